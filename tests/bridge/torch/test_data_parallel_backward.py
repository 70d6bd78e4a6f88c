"""spt.data_parallel: several backwards, checkpoints, torch.autograd.grad and no_sync."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from data_parallel_cases import (  # noqa: E402
    CHECKS,
    SIZES,
    SMALL,
    Branches,
    Mixed,
    Net,
    assert_gradients,
    assert_near,
    drawn,
    gradients,
    on_workers,
    randn,
    serial_run,
    share,
)
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spmd  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.tensor_state import plain  # noqa: E402
from spmd.errors import DifferentiationError, StateError  # noqa: E402
from spmd.layout import block_sizes, offsets  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("to_none", [True, False])
def test_several_backwards_add_up(n, check, to_none):
    """On one graph (retain_graph) and on new ones, two forwards before one backward, and again after zero_grad."""
    x = randn(9, 5, seed=1)

    def step(model, one, other):
        loss = model(one).sin().sum()
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        (model(other).cos().sum() + model(one).exp().sum()).backward()

    serial = drawn(Net(), 2)
    expected = []
    for _ in range(2):
        serial.zero_grad(set_to_none=to_none)
        step(serial, x, x[:4])
        expected.append(gradients(serial))

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data", bucket_bytes=SMALL)
        results = []
        for _ in range(2):
            model.zero_grad(set_to_none=to_none)
            step(model, share(x, worker, n), share(x[:4], worker, n))
            results.append(gradients(model))
        return results

    for result in on_workers(n, main, check=check):
        for one, other in zip(result, expected, strict=True):
            assert_near(one, other, 1e-11)


class Tied(nn.Module):
    """One weight, under two names and used three times, and a product of parameters."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(5, 5, dtype=torch.float64)
        self.two = nn.Linear(5, 5, bias=False, dtype=torch.float64)
        self.two.weight = self.one.weight
        self.low = nn.Parameter(torch.ones(5, 2, dtype=torch.float64))
        self.rank = nn.Parameter(torch.ones(2, 5, dtype=torch.float64))

    def forward(self, x):
        y = torch.tanh(self.two(torch.tanh(self.one(x))))
        return F.linear(y, self.one.weight.t()) + y @ (self.low @ self.rank)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("n", SIZES)
def test_shared_and_derived_parameters_have_one_sum(n, check):
    x = randn(9, 5, seed=1)
    serial = serial_run(drawn(Tied(), 2), x)

    def main(worker):
        model = spt.data_parallel(drawn(Tied(), 2), "data", bucket_bytes=1)
        with spmd.ledger() as log:
            spt.psum(model(share(x, worker, n)).sin().sum(), "data").backward()
        return gradients(model), log.workers[worker].operators["Sum"]

    for result, sums in on_workers(n, main, check=check):
        assert_near(result, gradients(serial))
        assert sums == 1 + 4  # the loss, and each parameter


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_parameters_of_different_dtypes(check, bucket_bytes):
    """A bucket is of one dtype. Sums of two numbers are exact to the last bit but one rounding."""
    x = [randn(5, 4, seed=k) for k in range(2)]
    own = []
    for k in range(2):
        serial = drawn(Mixed(), 2)
        serial(x[k]).sum().backward()
        own.append(gradients(serial))
    expected = [a + b for a, b in zip(*own, strict=True)]

    def main(worker):
        model = spt.data_parallel(drawn(Mixed(), 2), "data", bucket_bytes=bucket_bytes)
        counts = []
        for _ in range(2):
            model.zero_grad()
            with spmd.ledger() as log:
                model(spt.varying(x[worker], "data")).sum().backward()
            counts.append(log.workers[worker].verbs["all_reduce"])
        return gradients(model), counts[-1]

    for result, count in on_workers(2, main, check=check):
        assert_near(result, expected, 0)
        assert count == (9 if bucket_bytes == 1 else 5)


class Stages(nn.Module):
    """Layers of which some are computed again in backward."""

    def __init__(self, reentrant, shared):
        super().__init__()
        self.first = nn.Linear(5, 5, dtype=torch.float64)
        self.second = nn.Linear(5, 5, dtype=torch.float64)
        self.third = self.second if shared else nn.Linear(5, 5, dtype=torch.float64)
        self.reentrant = reentrant

    def again(self, layer, x):
        if self.reentrant is None:
            return layer(x).tanh()
        return checkpoint(lambda x: layer(x).tanh(), x, use_reentrant=self.reentrant)

    def forward(self, x):
        return self.again(self.third, self.again(self.second, self.first(x)))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_checkpoints(reentrant, shared, check, bucket_bytes):
    n, x = 3, randn(7, 5, seed=1)
    serial = serial_run(drawn(Stages(None, shared), 2), x)

    def main(worker):
        model = spt.data_parallel(drawn(Stages(reentrant, shared), 2), "data", bucket_bytes=bucket_bytes)
        for _ in range(2):
            model.zero_grad()
            model(share(x, worker, n)).sin().sum().backward()
        return gradients(model)

    assert_gradients(serial, n, main, check=check)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_the_whole_module(reentrant, check):
    n, x = 2, randn(7, 5, seed=1)
    serial = serial_run(drawn(Net(), 2), x)

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        y = share(x, worker, n)
        checkpoint(model, y.requires_grad_(), use_reentrant=reentrant).sin().sum().backward()
        return gradients(model)

    assert_gradients(serial, n, main, check=check)


@pytest.mark.parametrize("check", CHECKS)
def test_autograd_grad_gives_the_workers_own(check):
    """Also differentiated again; and it touches neither .grad nor the sums."""
    x = randn(7, 5, seed=1)
    at = offsets(block_sizes(7, 2))

    def own(model, x):
        return torch.autograd.grad(model(x).sin().sum(), list(model.parameters()), create_graph=True)

    def penalty(grads):
        return sum((g**2).sum() for g in grads)

    serial = drawn(Net(), 2)
    firsts = [own(serial, x[at[k] : at[k + 1]]) for k in range(2)]
    expected = [torch.autograd.grad(penalty(g), list(serial.parameters()), allow_unused=True) for g in firsts]

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        first = own(model, share(x, worker, 2))
        if check:
            assert all(g.state.varying == {"data"} for g in first)
        total = [spt.psum(g, "data") for g in first]
        second = torch.autograd.grad(penalty(first), list(model.parameters()), allow_unused=True)
        assert all(p.grad is None for p in model.parameters())
        return [None if g is None else plain(g).detach() for g in (*first, *total, *second)]

    summed = [a + b for a, b in zip(*firsts, strict=True)]
    for k, result in enumerate(on_workers(2, main, check=check)):
        assert_near(result[:7], [g.detach() for g in firsts[k]])
        assert_near(result[7:14], [g.detach() for g in summed])
        assert_near(result[14:], expected[k], 1e-11)


def test_a_backward_that_is_to_be_differentiated_is_refused():
    def main(worker):
        model = spt.data_parallel(Net(), "data")
        model(spt.varying(randn(4, 5), "data")).sum().backward(create_graph=True)

    with pytest.raises(DifferentiationError, match=r"create_graph=True[\s\S]*spt\.psum"):
        on_workers(2, main)


@pytest.mark.parametrize("check", CHECKS)
def test_after_a_backward_that_raised(check):
    """What it left behind is put away; the next one is right."""
    x = randn(7, 5, seed=1)
    serial = drawn(Net(), 2)
    serial(x).sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data", bucket_bytes=SMALL)
        y = share(x, worker, 2)
        model(y).sum().backward()

        def fail(_):
            raise ValueError("on purpose")

        handle = model.middle.weight.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            model(y).sum().backward()
        handle.remove()
        model.zero_grad()
        model(y).sum().backward()
        return gradients(model)

    assert_gradients(serial, 2, main, check=check)


@pytest.mark.parametrize("check", CHECKS)
def test_two_modules_in_one_backward(check):
    x = randn(7, 5, seed=1)
    one, other = drawn(Net(), 2), drawn(nn.Linear(3, 2, dtype=torch.float64), 3)
    other(one(x)).sin().sum().backward()

    def main(worker):
        a = spt.data_parallel(drawn(Net(), 2), "data", bucket_bytes=SMALL)
        b = spt.data_parallel(drawn(nn.Linear(3, 2, dtype=torch.float64), 3), "data")
        b(a(share(x, worker, 3))).sin().sum().backward()
        return gradients(a) + gradients(b)

    for result in on_workers(3, main, check=check):
        assert_near(result, gradients(one) + gradients(other))


@pytest.mark.parametrize("check", CHECKS)
def test_a_layer_that_is_called_by_itself(check):
    """Its parameters are summed all the same, and once."""
    x = randn(7, 5, seed=1)
    serial = drawn(Net(), 2)
    serial.first(x).sin().sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        model.first(share(x, worker, 3)).sin().sum().backward()
        return gradients(model)

    assert_gradients(serial, 3, main, check=check)


# no_sync


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("n", SIZES)
def test_accumulation_without_sums(n, reduction, check):
    """Three minibatches, of which the last sums; twice, the second time on top of the first's gradient."""
    x = randn(3 * 2 * n, 5, seed=1).reshape(3, 2 * n, 5)
    serial = drawn(Net(), 2)
    for _ in range(2):
        for part in x:
            serial(part).sin().sum().backward()
    expected = [g / n if reduction == "mean" else g for g in gradients(serial)]

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data", reduction=reduction, bucket_bytes=SMALL)
        for _ in range(2):
            with model.no_sync():
                for part in x[:2]:
                    model(share(part, worker, n)).sin().sum().backward()
            model(share(x[2], worker, n)).sin().sum().backward()
        return gradients(model)

    for result in on_workers(n, main, check=check):
        assert_near(result, expected)


@pytest.mark.parametrize("check", CHECKS)
def test_what_grad_holds_without_sums(check):
    """This worker's own gradient, on top of what was there."""
    x = randn(6, 5, seed=1)

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        y = share(x, worker, 3)
        model(y).sum().backward()
        before = gradients(model)
        with model.no_sync(), model.no_sync():
            model(y).sum().backward()
        return gradients(model), before, plain(y)

    for result, before, y in on_workers(3, main, check=check):
        own = drawn(Net(), 2)
        own(y).sum().backward()
        assert_near(result, [a + b for a, b in zip(before, gradients(own), strict=True)])


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("summed_before", [False, True])
def test_what_came_without_sums_can_be_cleared(to_none, summed_before):
    x = randn(6, 5, seed=1)
    serial = drawn(Branches(), 2)
    serial(x, "ab").sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Branches(), 2), "data")
        y = share(x, worker, 3)
        if summed_before:
            model(y, "abc").sum().backward()
        with model.no_sync():
            model(y, "abc").sum().backward()
        model.zero_grad(set_to_none=to_none)
        model(y, "ab").sum().backward()
        return gradients(model)

    expected = [torch.zeros_like(p) if p.grad is None and not to_none else p.grad for p in serial.parameters()]
    for result in on_workers(3, main):
        assert_near(result, expected)


def test_a_gradient_that_is_half_summed_must_be_left_alone():
    def main(worker):
        model = spt.data_parallel(Net(), "data")
        x = spt.varying(randn(4, 5), "data")
        model(x).sum().backward()
        with model.no_sync():
            model(x).sum().backward()
        nn.utils.clip_grad_norm_(list(model.parameters()), 1e-3)
        model(x).sum().backward()

    with pytest.raises(StateError, match=r"changed after a backward under no_sync[\s\S]*zero_grad"):
        on_workers(2, main)


@pytest.mark.parametrize("check", CHECKS)
def test_parameters_that_only_backwards_without_sums_have_reached(check):
    """They are summed with the others, at the first backward that sums."""
    x = randn(6, 5, seed=1)
    serial = drawn(Branches(), 2)
    serial(x, "bc").sum().backward()
    serial(x, "a").sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Branches(), 2), "data", bucket_bytes=SMALL)
        y = share(x, worker, 3)
        with model.no_sync():
            model(y, "bc").sum().backward()
        model(y, "a").sum().backward()
        return gradients(model)

    assert_gradients(serial, 3, main, check=check)
