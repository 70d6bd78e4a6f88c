"""spt.data_parallel: training on several workers gives the results of the sequential run."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from data_parallel_cases import (  # noqa: E402
    CHECKS,
    SIZES,
    SMALL,
    Branches,
    Net,
    assert_gradients,
    assert_near,
    drawn,
    gradients,
    on_workers,
    randn,
    share,
    squares,
    values,
)
from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.tensor_state import plain  # noqa: E402
from spmd.errors import MismatchError  # noqa: E402
from spmd.layout import block_sizes, offsets  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 1 << 20])
def test_training_equals_the_sequential_run(n, check, bucket_bytes):
    """Minibatches that do not divide, the last of which leaves workers without a sample."""
    x, t = randn(25, 5, seed=1), randn(25, 3, seed=2)
    batches = [slice(0, 11), slice(11, 22), slice(22, 25), slice(24, 25)] * 2
    serial = drawn(Net(), 3)
    steps = torch.optim.SGD(serial.parameters(), lr=0.1, momentum=0.9)
    history = []
    for rows in batches:
        steps.zero_grad()
        squares(serial(x[rows]), t[rows]).mean().backward()
        steps.step()
        history.append(values(serial))

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 3 if worker == 0 else 4), "data", bucket_bytes=bucket_bytes)
        steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        results = []
        for rows in batches:
            steps.zero_grad()
            spt.mean(squares(model(share(x[rows], worker, n)), share(t[rows], worker, n)), "data").backward()
            steps.step()
            results.append(values(model))
        return results

    for result in on_workers(n, main, check=check):
        for step, expected in zip(result, history, strict=True):
            assert_near(step, expected)


@pytest.mark.parametrize("check", CHECKS)
def test_all_workers_have_the_same_bits(check):
    def main(worker):
        model = spt.data_parallel(drawn(Net(torch.float32), worker), "data", bucket_bytes=SMALL)
        for seed in range(3):
            model(spt.varying(randn(4, 5, seed=10 * seed + worker, dtype=torch.float32), "data")).sum().backward()
        return [*values(model), *gradients(model)]

    first, *others = on_workers(3, main, check=check)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("n", SIZES)
def test_the_mean_is_that_of_ddp(n, check):
    """Each worker's loss is the mean over its own minibatch; gradients are averaged, and add up in .grad."""
    x, t = randn(4 * n, 5, seed=1), randn(4 * n, 3, seed=2)
    serial = drawn(Net(), 3)
    for _ in range(2):
        squares(serial(x), t).mean().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 3), "data", reduction="mean", bucket_bytes=SMALL)
        for _ in range(2):
            squares(model(share(x, worker, n)), share(t, worker, n)).mean().backward()
        return gradients(model)

    assert_gradients(serial, n, main, check=check)


@pytest.mark.parametrize("n", SIZES)
def test_one_all_reduce_for_each_bucket_and_step(n):
    counts = {}

    def main(worker):
        model = spt.data_parallel(Net(), "data", bucket_bytes=SMALL)
        x = spt.varying(randn(3, 5, seed=worker), "data")
        steps = []
        for _ in range(3):
            with spmd.ledger() as log:
                model(x).sum().backward()
            steps.append((dict(log.workers[worker].verbs), dict(log.workers[worker].operators)))
        with spmd.ledger() as log, model.no_sync():
            model(x).sum().backward()
        steps.append((dict(log.workers[worker].verbs) if log.workers else {}, {}))
        counts[worker] = len(model._sync.buckets)
        return steps

    for result in on_workers(n, main):
        first, *others, unsent = result
        assert unsent == ({}, {})
        # The order in which gradients come is agreed on once.
        assert first[0].get("broadcast", 0) == (n > 1)
        for verbs, operators in others:
            assert verbs == {"all_reduce": counts[0]}
            assert operators == {"Sum": 7}
    assert counts[0] == (4 if n == 1 else 3)


def test_buckets_follow_the_order_in_which_backward_reaches_parameters():
    def main(worker):
        model = spt.data_parallel(Net(), "data", bucket_bytes=1)
        names = []
        for _ in range(2):
            names.append([g.name for b in model._sync.buckets for g in b.gradients])
            model(spt.varying(randn(3, 5), "data")).sum().backward()
        return names

    for before, after in on_workers(2, main):
        assert before == [name for name, _ in Net().named_parameters()][::-1]
        assert [name.partition(".")[0] for name in after] == ["last"] * 2 + ["scale"] + ["middle"] * 2 + ["first"] * 2


def test_buckets_are_sent_while_backward_goes_on():
    """When the first layer's backward begins, the sum for the last layers has started."""
    seen = {}

    def main(worker):
        model = spt.data_parallel(Net(), "data", bucket_bytes=SMALL)
        x = spt.varying(randn(3, 5), "data")
        model(x).sum().backward()  # after which buckets are in order

        def look(_):
            seen[worker] = model._sync.sent, len(model._sync.buckets)

        with spmd.ledger():
            hidden = {}
            model.first.register_forward_hook(lambda _m, _x, y: hidden.setdefault("y", y))
            out = model(x)
            hidden["y"].register_hook(look)
            out.sum().backward()

    on_workers(2, main)
    for sent, count in seen.values():
        assert 1 < sent < count


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "used", [("a", "a", "a"), ("ab", "b", "a"), ("a", "ba", "ab"), ("cb", "c", "b"), ("abc", "cba", "bca")]
)
def test_parameters_without_a_gradient(used, check, overlap):
    """None where no worker has one; else the sum of those that have. Nothing hangs, whatever the local order."""
    n = len(used)
    x = randn(7, 5, seed=1)
    serial = drawn(Branches(), 2)
    at = offsets(block_sizes(7, n))
    for _ in range(2):
        for k, names in enumerate(used):
            serial(x[at[k] : at[k + 1]], names).sin().sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Branches(), 2), "data", bucket_bytes=SMALL, overlap=overlap)
        for _ in range(2):
            model(share(x, worker, n), used[worker]).sin().sum().backward()
        return gradients(model)

    assert_gradients(serial, n, main, check=check)


@pytest.mark.parametrize("check", CHECKS)
def test_an_unused_parameter_keeps_its_gradient(check):
    def main(worker):
        model = spt.data_parallel(drawn(Branches(), 2), "data")
        x = spt.varying(randn(4, 5, seed=worker), "data")
        model(x, "abc").sum().backward()
        before = gradients(model)
        model(x, "a").sum().backward()
        return before, gradients(model)

    for before, after in on_workers(2, main, check=check):
        assert all(torch.equal(a, 2 * b) for a, b in zip(after[:2], before[:2], strict=True))
        assert all(torch.equal(a, b) for a, b in zip(after[2:], before[2:], strict=True))


@pytest.mark.parametrize("check", CHECKS)
def test_frozen_parameters_are_not_sent_and_may_be_released(check):
    x = randn(6, 5, seed=1)
    serial = drawn(Branches(), 2)
    expected = []
    for frozen in ("b", "", "a"):
        for name in "abc":
            getattr(serial, name).requires_grad_(name not in frozen)
        serial.zero_grad()
        serial(x, "abc").sin().sum().backward()
        expected.append(gradients(serial))

    def main(worker):
        module = drawn(Branches(), 2)
        module.b.requires_grad_(False)
        model = spt.data_parallel(module, "data")
        sizes, results = [], []
        for frozen in ("b", "", "a"):
            for name in "abc":
                getattr(model, name).requires_grad_(name not in frozen)
            model.zero_grad()
            model(share(x, worker, 3), "abc").sin().sum().backward()
            sizes.append(len(model._sync.gradients))
            results.append(gradients(model))
        return sizes, results

    for sizes, result in on_workers(3, main, check=check):
        assert sizes == [4, 6, 6]  # one that was frozen again contributes nothing, and is not taken out
        for one, other in zip(result, expected, strict=True):
            assert_near(one, other)


@pytest.mark.parametrize("check", CHECKS)
def test_requires_grad_that_differs_between_workers(check):
    """A parameter that some workers have frozen gets, everywhere, what the others' backwards give."""
    n = 3
    x = randn(7, 5, seed=1)
    at = offsets(block_sizes(7, n))
    serial = drawn(Branches(), 2)
    for k in range(n):
        for j, name in enumerate("abc"):
            getattr(serial, name).requires_grad_(j != k)
        serial(x[at[k] : at[k + 1]], "abc").sin().sum().backward()

    def main(worker):
        module = drawn(Branches(), 2)
        getattr(module, "abc"[worker]).requires_grad_(False)
        model = spt.data_parallel(module, "data", bucket_bytes=SMALL)
        model(share(x, worker, n), "abc").sin().sum().backward()
        return gradients(model)

    assert_gradients(serial, n, main, check=check)


@pytest.mark.parametrize("check", CHECKS)
def test_a_module_that_nothing_is_to_be_learnt_of(check):
    def main(worker):
        model = spt.data_parallel(drawn(nn.Linear(5, 3, dtype=torch.float64).requires_grad_(False), worker), "data")
        x = spt.varying(randn(4, 5, seed=worker), "data").requires_grad_()
        model(x).sum().backward()
        return values(model), plain(x.grad)

    for k, (result, grad) in enumerate(on_workers(2, main, check=check)):
        assert_near(result, values(drawn(nn.Linear(5, 3, dtype=torch.float64), 0)))
        assert torch.equal(grad, result[0].sum(0).expand(4, 5)), k


def test_a_worker_that_takes_no_part_is_a_mismatch():
    def main(worker):
        model = spt.data_parallel(Branches(), "data")
        if worker == 0:
            model(spt.varying(randn(4, 5), "data"), "a").sum().backward()

    with pytest.raises(MismatchError, match="data_parallel"):
        on_workers(2, main)


@pytest.mark.parametrize("check", CHECKS)
def test_a_worker_without_a_loss_ties_the_parameters(check):
    def main(worker):
        model = spt.data_parallel(drawn(Branches(), 2), "data")
        if worker == 0:
            model(spt.varying(randn(4, 5), "data"), "a").sum().backward()
        else:
            spt.tie(spt.varying(torch.zeros(()), "data"), *model.parameters()).backward()
        return gradients(model)

    serial = drawn(Branches(), 2)
    serial(randn(4, 5), "a").sum().backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in serial.parameters()]
    for result in on_workers(2, main, check=check):
        assert_near(result, expected)
