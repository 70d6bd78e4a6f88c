"""spt.shard_optimizer: bytes, messages, states in files, hooks, several axes, and lower precisions."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_training_cases import Net, numbers, split_rows, whole  # noqa: E402

import spmd  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.tensor_state import local_data  # noqa: E402
from spmd.errors import MismatchError  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


# Memory and messages


def on_workers(axes: dict[str, int], main: Callable[[], Any]) -> list[Any]:
    """What each worker of a mesh returns."""
    results = {}

    def body() -> None:
        results[spt.worker_index(tuple(axes))] = main()

    spt.map(body, (), None, mesh=spmd.Mesh(**axes))()
    return [results[k] for k in sorted(results)]


def nbytes(x: Any) -> int:
    return local_data(x).numel() * x.element_size()


@pytest.mark.parametrize("split", [True, False])
def test_bytes_of_states_and_gradients(split):
    """Rajbhandari et al.: states are divided by the workers, gradients too (ZeRO-2)."""

    def main():
        net = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32)).double()
        model = spt.data_parallel(net, "data")
        optimizer = spt.shard_optimizer(torch.optim.Adam(net.parameters()), "data", split_gradients=split)
        spt.mean(model(spt.varying(numbers(6, 64), "data")) ** 2, "data").backward()
        optimizer.step()
        parameters = sum(nbytes(p) for p in net.parameters())
        moments = sum(nbytes(s[name]) for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq"))
        return parameters, moments, sum(nbytes(p.grad) for p in net.parameters())

    for parameters, moments, gradients in on_workers({"data": 4}, main):
        assert moments == 2 * parameters // 4
        assert gradients == (parameters // 4 if split else parameters)


def test_what_a_step_sends():
    """All gradients in one bucket but for numbers, which stay whole, and all parameters, which are small, in one
    message. Reduced in parts and gathered, as many bytes are sent as by a sum alone."""

    def main(split):
        net = Net()
        model = spt.data_parallel(net, "data", broadcast_buffers=False)
        optimizer = spt.shard_optimizer(torch.optim.Adam(net.parameters()), "data", split_gradients=split)
        loss = spt.mean(model(spt.varying(numbers(6, 5), "data")) ** 2, "data")
        with spmd.ledger() as log:
            loss.backward()
            optimizer.step()
        return log.messages, log.bytes

    (parts, fewer), (sums, more) = (
        on_workers({"data": 4}, lambda split=split: main(split))[0] for split in (True, False)
    )
    assert (parts, sums) == (6, 4)  # log2 of 4 workers each
    assert fewer < 0.6 * more


def test_whole_gradients_are_freed_while_backward_runs():
    """Of a deep network at most three buckets' whole gradients are there at a time."""
    layers, width = 12, 32
    alive: list[int] = []

    def main():
        net = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).double()
        model = spt.data_parallel(net, "data", bucket_bytes=1)
        spt.shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), "data")
        for k in range(2):  # the first agrees on the order of buckets
            net[0].weight.register_post_accumulate_grad_hook(
                lambda p: alive.append(sum(type(q.grad) is torch.Tensor for q in net.parameters()))
            )
            model(spt.varying(numbers(2, width, seed=k), "data")).sum().backward()
        return None

    on_workers({"data": 2}, main)
    assert alive
    assert max(alive[-2:]) <= 1


# Hybrid axes, modes and options


@pytest.mark.parametrize("shard_axes", ["data", "pod", ("pod", "data"), ("data", "pod")])
def test_split_over_one_axis_and_whole_over_another(shard_axes):
    def steps(net, model, optimizer, x, mean):
        for k in range(3):
            optimizer.zero_grad()
            mean(model(x(k)) ** 2).backward()
            optimizer.step()
        return [whole(p) for p in net.parameters()]

    serial = Net()
    expected = steps(serial, serial, torch.optim.Adam(serial.parameters()), lambda k: numbers(9, 5, seed=k), torch.mean)

    def main():
        net = Net()
        model = spt.data_parallel(net, ("pod", "data"), bucket_bytes=200)
        optimizer = spt.shard_optimizer(torch.optim.Adam(net.parameters()), shard_axes)
        rows = lambda k: split_rows(numbers(9, 5, seed=k), 6, spt.worker_index(("pod", "data"))).clone()
        axes = ("pod", "data")
        return steps(net, model, optimizer, lambda k: spt.varying(rows(k), axes), lambda loss: spt.mean(loss, axes))

    for result in on_workers({"pod": 2, "data": 3}, main):
        for a, b in zip(result, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def stepped_twice(model: Any, net: nn.Module, optimizer: Any, mean: Callable, x: Callable, how: str) -> list[Any]:
    """Gradients that add up over backwards, in several orders of backwards that sum and that do not."""
    quiet = getattr(model, "no_sync", nullcontext)
    result = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=how != "zeros")
        for k, sends in enumerate((True, False, False, True) if how == "mixed" else (True, True)):
            with nullcontext() if sends else quiet():
                mean(model(x(10 * step + k)) ** 2).backward()
        optimizer.step()
        result += [whole(p) for p in net.parameters()] + [whole(p.grad) for p in net.parameters() if p.grad is not None]
    return result


@pytest.mark.parametrize("how", ["none", "zeros", "mixed"])
def test_gradients_add_up(how):
    serial = Net()
    optimizer = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    expected = stepped_twice(serial, serial, optimizer, torch.mean, lambda k: numbers(7, 5, seed=k), how)

    def main():
        net = Net()
        model = spt.data_parallel(net, "data", bucket_bytes=200)
        optimizer = spt.shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), "data")
        x = lambda k: spt.varying(split_rows(numbers(7, 5, seed=k), 3, spt.worker_index("data")).clone(), "data")
        return stepped_twice(model, net, optimizer, lambda y: spt.mean(y, "data"), x, how)

    for result in on_workers({"data": 3}, main):
        assert len(result) == len(expected)
        for a, b in zip(result, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_reduction_of_means():
    """As DDP: each worker's own mean, and the mean of their gradients."""

    def main(split):
        net = Net()
        model = spt.data_parallel(net, "data", reduction="mean", bucket_bytes=200)
        optimizer = spt.shard_optimizer(torch.optim.Adam(net.parameters()), "data", split_gradients=split)
        for k in range(3):
            optimizer.zero_grad()
            x = split_rows(numbers(6, 5, seed=k), 3, spt.worker_index("data")).clone()
            (model(spt.varying(x, "data")) ** 2).mean().backward()
            optimizer.step()
        return [whole(p) for p in net.parameters()]

    whole_gradients, parts = (on_workers({"data": 3}, lambda split=split: main(split)) for split in (False, True))
    for a, b in zip(whole_gradients[0], parts[2], strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_closures_and_hooks_see_whole_parameters():
    seen = []

    def main():
        net = Net()
        model = spt.data_parallel(net, "data")
        optimizer = spt.shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.1), "data")
        at_hooks = []
        for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            register(lambda o, *_: at_hooks.append([whole(p) for p in o.param_groups[0]["params"]]))

        def closure():
            optimizer.zero_grad()
            loss = spt.mean(model(spt.varying(numbers(4, 5), "data")) ** 2, "data")
            loss.backward()
            return loss

        first, second = float(optimizer.step(closure).detach()), float(optimizer.step(closure).detach())
        seen.append((at_hooks, [whole(p) for p in net.parameters()]))
        return first > second

    assert all(on_workers({"data": 2}, main))
    for at_hooks, final in seen:
        assert len(at_hooks) == 4
        assert all(torch.equal(a, b) for a, b in zip(at_hooks[-1], final, strict=True))
        assert [x.shape for x in at_hooks[0]] == [x.shape for x in final]


def test_an_error_in_a_step_leaves_parameters_and_states():
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError("no step")

    def main():
        net = Net()
        optimizer = spt.shard_optimizer(Failing(net.parameters(), lr=0.1), "data")
        with pytest.raises(ArithmeticError):
            optimizer.step()
        return all(p is q for p, q in zip(optimizer.param_groups[0]["params"], net.parameters(), strict=True))

    assert all(on_workers({"data": 2}, main))


def test_gradients_of_other_parameters_on_another_worker():
    def main():
        net = Net()
        optimizer = spt.shard_optimizer(torch.optim.Adam(net.parameters()), "data")
        for p in list(net.parameters())[: 3 + spt.worker_index("data")]:
            p.grad = torch.ones_like(p)
        optimizer.step()

    with pytest.raises(MismatchError, match="2 parameters of 10 entries"):
        on_workers({"data": 2}, main)


def test_parameters_that_lie_split_already():
    """By `spt.shard_parameters`: each worker steps its blocks, and nothing is sent."""

    def main():
        net = Net()
        spt.shard_parameters(net, "data")
        optimizer = spt.shard_optimizer(torch.optim.Adam(net.parameters(), lr=0.01), "data")
        rows = lambda k: split_rows(numbers(7, 5, seed=k), 2, spt.worker_index("data")).clone()
        trained(net, net, optimizer, lambda y: spt.mean(y, "data"), lambda k: spt.varying(rows(k), "data"), range(3))
        with spmd.ledger() as log:
            optimizer.step()
        assert log.messages == 0
        return [whole(p) for p in net.parameters()]

    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    trained(net, net, optimizer, torch.mean, lambda k: numbers(7, 5, seed=k), range(3))
    optimizer.step()
    for result in on_workers({"data": 2}, main):
        assert_alike(result, [whole(p) for p in net.parameters()])


# States


def trained(net: nn.Module, model: Any, optimizer: Any, mean: Callable, x: Callable, steps: range) -> None:
    for k in steps:
        optimizer.zero_grad()
        mean(model(x(k)) ** 2).backward()
        optimizer.step()


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
}


def on_mesh(n: int, make: Callable, steps: range, before: Callable, after: Callable) -> list[Any]:
    """Train on n workers, if n is not 0; before and after it a function of the module and the optimiser is called."""

    def main():
        net = Net()
        model = spt.data_parallel(net, "data", bucket_bytes=300)
        optimizer = spt.shard_optimizer(make(net.parameters()), "data")
        before(net, optimizer)
        rows = lambda k: split_rows(numbers(7, 5, seed=k), n, spt.worker_index("data")).clone()
        trained(net, model, optimizer, lambda y: spt.mean(y, "data"), lambda k: spt.varying(rows(k), "data"), steps)
        return after(net, optimizer)

    if n:
        return on_workers({"data": n}, main)
    net = Net()
    optimizer = make(net.parameters())
    before(net, optimizer)
    trained(net, net, optimizer, torch.mean, lambda k: numbers(7, 5, seed=k), steps)
    return [after(net, optimizer)]


def values(net: nn.Module, optimizer: Any) -> list[Any]:
    states = [whole(x) for p in net.parameters() for x in optimizer.state[p].values()]
    return [whole(p) for p in net.parameters()] + states


def assert_alike(result: list[Any], expected: list[Any]) -> None:
    assert len(result) == len(expected)
    for a, b in zip(result, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer", MAKERS)
@pytest.mark.parametrize(("first", "second"), [(4, 3), (3, 0), (0, 2)])
def test_a_run_goes_on_with_other_workers(tmp_path, first, second, optimizer):
    """From a checkpoint: on fewer workers, and to and from an optimiser that is not sharded (0)."""
    make, path = MAKERS[optimizer], tmp_path / "run"
    nothing = lambda net, optimizer: None
    state = lambda net, optimizer: {"model": net, "optimizer": optimizer}
    on_mesh(first, make, range(4), nothing, lambda net, o: spmd.save(path, state(net, o)))
    results = on_mesh(second, make, range(4, 7), lambda net, o: spmd.load(path, like=state(net, o)), values)
    (expected,) = on_mesh(0, make, range(7), nothing, values)
    for result in results:
        assert_alike(result, expected)


@pytest.mark.parametrize("workers", [1, 3])
def test_the_state_dict_of_an_unsharded_optimizer_is_taken(workers):
    make, kept = MAKERS["adam"], []
    nothing = lambda net, optimizer: None
    keep = lambda net, o: kept.append((net.state_dict(), o.state_dict()))
    on_mesh(0, make, range(4), nothing, keep)
    (modules, states), *_ = kept

    def load(net, o):
        net.load_state_dict(modules)
        o.load_state_dict(states)

    (expected,) = on_mesh(0, make, range(7), nothing, values)
    for result in on_mesh(workers, make, range(4, 7), load, values):
        assert_alike(result, expected)


def test_own_state_dicts_and_steps_before():
    """An optimiser that has stepped is split as it is, and takes back its own state."""

    def main():
        net = Net()
        model = spt.data_parallel(net, "data")
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        rows = lambda k: split_rows(numbers(7, 5, seed=k), 2, spt.worker_index("data")).clone()
        x = lambda k: spt.varying(rows(k), "data")
        mean = lambda y: spt.mean(y, "data")
        trained(net, model, optimizer, mean, x, range(2))
        optimizer = spt.shard_optimizer(optimizer, "data")
        trained(net, model, optimizer, mean, x, range(2, 4))
        state = copy.deepcopy(optimizer.state_dict())
        trained(net, model, optimizer, mean, x, range(4, 5))
        net.load_state_dict(middle)
        optimizer.load_state_dict(state)
        trained(net, model, optimizer, mean, x, range(4, 7))
        return values(net, optimizer)

    nothing = lambda net, optimizer: None
    ((middle, _),) = on_mesh(0, MAKERS["adam"], range(4), nothing, lambda net, o: (net.state_dict(), o))
    (expected,) = on_mesh(0, MAKERS["adam"], range(7), nothing, values)
    for result in on_workers({"data": 2}, main):
        assert_alike(result, expected)


# Lower precisions


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_masters_of_higher_precision(workers, dtype):
    """Steps that are too small for the parameters' dtype add up in the masters, on any number of workers."""

    def main():
        net = nn.Linear(5, 3).to(dtype)
        with torch.no_grad():
            for p in net.parameters():
                p.fill_(1.0)
        model = spt.data_parallel(net, "data")
        sgd = torch.optim.SGD(net.parameters(), lr=2.0**-12)
        optimizer = spt.shard_optimizer(sgd, "data", master_dtype=torch.float32)
        for _k in range(64):
            optimizer.zero_grad()
            spt.psum(model(spt.varying(torch.ones(1, 5, dtype=dtype) / workers, "data")).sum(), "data").backward()
            optimizer.step()
        return [whole(p) for p in net.parameters()], whole(optimizer.state[net.weight]["master"])

    for (weight, bias), master in on_workers({"data": workers}, main):
        assert master.dtype == torch.float32
        assert torch.allclose(master, torch.full((3, 5), 1 - 64 * 2.0**-12), atol=1e-4)
        assert torch.equal(weight, master.to(dtype))
        assert weight.dtype == bias.dtype == dtype
        assert float(bias[0]) < 1 - 64 * 2.0**-12 * (workers - 0.5)


def test_masters_are_saved_and_follow_new_parameters(tmp_path):
    def main(load):
        net = nn.Linear(5, 3).to(torch.bfloat16)
        model = spt.data_parallel(net, "data")
        optimizer = spt.shard_optimizer(torch.optim.Adam(net.parameters()), "data", master_dtype=torch.float32)
        if load:
            spmd.load(tmp_path / "run", like={"net": net, "optimizer": optimizer})
        else:
            model(spt.varying(torch.ones(2, 5, dtype=torch.bfloat16), "data")).sum().backward()
            optimizer.step()
            spmd.save(tmp_path / "run", {"net": net, "optimizer": optimizer})
        state = {name: whole(x) for name, x in optimizer.state[net.weight].items()}
        with torch.no_grad():
            net.weight.fill_(2.0)
        optimizer.zero_grad()
        (model(spt.varying(torch.zeros(2, 5, dtype=torch.bfloat16), "data")) * 0).sum().backward()
        net.weight.grad = None
        optimizer.step()
        return state, whole(net.weight)

    saved = on_workers({"data": 2}, lambda: main(load=False))
    loaded = on_workers({"data": 3}, lambda: main(load=True))
    assert {x.dtype for x in saved[0][0].values()} == {torch.float32}
    for state, weight in loaded:
        assert all(torch.equal(state[name], x) for name, x in saved[0][0].items())
        assert torch.equal(weight, torch.full((3, 5), 2.0, dtype=torch.bfloat16))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("split", [True, False])
def test_all_workers_skip_a_step_together(split, fused):
    """An infinite gradient of one worker; the scales and parameters are those of one worker."""

    def train(net, model, optimizer, scaler, x, mean, clip):
        scales = []
        for k in range(6):
            optimizer.zero_grad()
            inputs = x(k)
            scaler.scale(mean(model(inputs) ** 2)).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, [whole(p) for p in net.parameters()]

    def data(k):
        x = numbers(6, 5, seed=k)
        if k in (1, 4):
            x[0, 0] = float("inf")
        return x

    options = {"init_scale": 64.0, "growth_interval": 2}
    for clip in (False, True):
        net = Net()
        adam = torch.optim.Adam(net.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cpu", **options)
        expected = train(net, net, adam, scaler, data, torch.mean, clip)

        def main(clip=clip):
            net = Net()
            model = spt.data_parallel(net, "data", bucket_bytes=300)
            adam = torch.optim.Adam(net.parameters(), fused=fused)
            optimizer = spt.shard_optimizer(adam, "data", split_gradients=split)
            x = lambda k: spt.varying(split_rows(data(k), 3, spt.worker_index("data")).clone(), "data")
            return train(net, model, optimizer, spt.GradScaler(**options), x, lambda y: spt.mean(y, "data"), clip)

        for scales, parameters in on_workers({"data": 3}, main):
            assert scales == expected[0]
            assert_alike(parameters, expected[1])


def test_autocast():
    """The forward in bfloat16 and all else in float32: the numbers of one worker, to that precision."""

    def train(net, model, optimizer, x, mean):
        losses = []
        for k in range(10):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x(k))
            loss = mean(y.float() ** 2)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    net = Net().float()
    serial = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    expected = train(net, net, serial, lambda k: numbers(9, 5, seed=k).float(), torch.mean)

    def main():
        net = Net().float()
        model = spt.data_parallel(net, "data")
        optimizer = spt.shard_optimizer(torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), "data")
        x = lambda k: spt.varying(split_rows(numbers(9, 5, seed=k), 2, spt.worker_index("data")).float(), "data")
        return train(net, model, optimizer, x, lambda y: spt.mean(y, "data"))

    for losses in on_workers({"data": 2}, main):
        assert losses == pytest.approx(expected, rel=0.03)
