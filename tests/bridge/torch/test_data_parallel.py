"""spt.data_parallel: what training on several workers gives is what the sequential run gives."""

from __future__ import annotations

import copy
import difflib
import gc
import io
import json
import re
import sys
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from launch import PROGRAMS, ROOT, TORCHRUN, launch, mpiexec, run_python  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spmd  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.tensor_state import GRADIENT_SYNCS, plain  # noqa: E402
from spmd.errors import (  # noqa: E402
    DifferentiationError,
    LayoutError,
    MeshError,
    MismatchError,
    ReplicaError,
    StateError,
)
from spmd.layout import block_sizes, offsets  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")

SIZES = (1, 2, 3, 4)
CHECKS = (True, False)
SMALL = 100
"""Bytes: a bucket of one or two parameters of the models here."""


def on_workers(n, main, *args, check=True, mesh=None):
    """Run main(index, *args) on n workers; what each returned."""
    found = {}

    def body():
        worker = spt.worker_index("data")
        found[worker] = main(worker, *args)

    spt.map(body, (), None, mesh=mesh or spmd.Mesh(data=n), check=check)()
    return [found[k] for k in sorted(found)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def share(x, worker, n):
    """The block of a minibatch that a worker has, as a tensor that varies."""
    at = offsets(block_sizes(len(x), n))
    return spt.varying(x[at[worker] : at[worker + 1]], "data")


def drawn(module, seed):
    """The module with random parameters."""
    for k, p in enumerate(module.parameters()):
        p.data.copy_(randn(*p.shape, seed=1000 * seed + k, dtype=p.dtype))
    return module


class Net(nn.Module):
    """Layers declared in another order than they are used in."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.last = nn.Linear(7, 3, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.middle = nn.Linear(6, 7, dtype=dtype)
        self.first = nn.Linear(5, 6, dtype=dtype)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))) * self.scale)


def squares(y, t):
    """For each sample a loss."""
    return ((y - t) ** 2).mean(1)


def values(module):
    return [plain(p).detach().clone() for p in module.parameters()]


def gradients(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def assert_near(found, wanted, atol=1e-12):
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert type(a) is torch.Tensor
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=atol)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("bucket_bytes", [1, SMALL, 1 << 20])
def test_training_equals_the_sequential_run(n, check, bucket_bytes):
    """Minibatches that do not divide, the last of which leaves workers without a sample."""
    x, t = randn(25, 5, seed=1), randn(25, 3, seed=2)
    batches = [slice(0, 11), slice(11, 22), slice(22, 25), slice(24, 25)] * 2
    alone = drawn(Net(), 3)
    steps = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    history = []
    for rows in batches:
        steps.zero_grad()
        squares(alone(x[rows]), t[rows]).mean().backward()
        steps.step()
        history.append(values(alone))

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 3 if worker == 0 else 4), "data", bucket_bytes=bucket_bytes)
        steps = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        found = []
        for rows in batches:
            steps.zero_grad()
            spt.mean(squares(model(share(x[rows], worker, n)), share(t[rows], worker, n)), "data").backward()
            steps.step()
            found.append(values(model))
        return found

    for found in on_workers(n, main, check=check):
        for step, wanted in zip(found, history, strict=True):
            assert_near(step, wanted)


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
    alone = drawn(Net(), 3)
    for _ in range(2):
        squares(alone(x), t).mean().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 3), "data", reduction="mean", bucket_bytes=SMALL)
        for _ in range(2):
            squares(model(share(x, worker, n)), share(t, worker, n)).mean().backward()
        return gradients(model)

    for found in on_workers(n, main, check=check):
        assert_near(found, gradients(alone))


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

    for found in on_workers(n, main):
        first, *others, unsent = found
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


# Which gradients there are


class Branches(nn.Module):
    """Three layers, of which a forward uses some."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 3, dtype=torch.float64)
        self.b = nn.Linear(5, 3, dtype=torch.float64)
        self.c = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x, names):
        return sum(getattr(self, name)(x) for name in names)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize(
    "used", [("a", "a", "a"), ("ab", "b", "a"), ("a", "ba", "ab"), ("cb", "c", "b"), ("abc", "cba", "bca")]
)
def test_parameters_without_a_gradient(used, check, overlap):
    """None where no worker has one; else the sum of those that have. Nothing hangs, whatever the local order."""
    n = len(used)
    x = randn(7, 5, seed=1)
    alone = drawn(Branches(), 2)
    at = offsets(block_sizes(7, n))
    for _ in range(2):
        for k, names in enumerate(used):
            alone(x[at[k] : at[k + 1]], names).sin().sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Branches(), 2), "data", bucket_bytes=SMALL, overlap=overlap)
        for _ in range(2):
            model(share(x, worker, n), used[worker]).sin().sum().backward()
        return gradients(model)

    for found in on_workers(n, main, check=check):
        assert_near(found, gradients(alone))


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
    alone = drawn(Branches(), 2)
    wanted = []
    for frozen in ("b", "", "a"):
        for name in "abc":
            getattr(alone, name).requires_grad_(name not in frozen)
        alone.zero_grad()
        alone(x, "abc").sin().sum().backward()
        wanted.append(gradients(alone))

    def main(worker):
        module = drawn(Branches(), 2)
        module.b.requires_grad_(False)
        model = spt.data_parallel(module, "data")
        sizes, found = [], []
        for frozen in ("b", "", "a"):
            for name in "abc":
                getattr(model, name).requires_grad_(name not in frozen)
            model.zero_grad()
            model(share(x, worker, 3), "abc").sin().sum().backward()
            sizes.append(len(model._sync.gradients))
            found.append(gradients(model))
        return sizes, found

    for sizes, found in on_workers(3, main, check=check):
        assert sizes == [4, 6, 6]  # one that was frozen again contributes nothing, and is not taken out
        for one, other in zip(found, wanted, strict=True):
            assert_near(one, other)


@pytest.mark.parametrize("check", CHECKS)
def test_requires_grad_that_differs_between_workers(check):
    """A parameter that some workers have frozen gets, everywhere, what the others' backwards give."""
    n = 3
    x = randn(7, 5, seed=1)
    at = offsets(block_sizes(7, n))
    alone = drawn(Branches(), 2)
    for k in range(n):
        for j, name in enumerate("abc"):
            getattr(alone, name).requires_grad_(j != k)
        alone(x[at[k] : at[k + 1]], "abc").sin().sum().backward()

    def main(worker):
        module = drawn(Branches(), 2)
        getattr(module, "abc"[worker]).requires_grad_(False)
        model = spt.data_parallel(module, "data", bucket_bytes=SMALL)
        model(share(x, worker, n), "abc").sin().sum().backward()
        return gradients(model)

    for found in on_workers(n, main, check=check):
        assert_near(found, gradients(alone))


@pytest.mark.parametrize("check", CHECKS)
def test_a_module_that_nothing_is_to_be_learnt_of(check):
    def main(worker):
        model = spt.data_parallel(drawn(nn.Linear(5, 3, dtype=torch.float64).requires_grad_(False), worker), "data")
        x = spt.varying(randn(4, 5, seed=worker), "data").requires_grad_()
        model(x).sum().backward()
        return values(model), plain(x.grad)

    for k, (found, grad) in enumerate(on_workers(2, main, check=check)):
        assert_near(found, values(drawn(nn.Linear(5, 3, dtype=torch.float64), 0)))
        assert torch.equal(grad, found[0].sum(0).expand(4, 5)), k


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

    alone = drawn(Branches(), 2)
    alone(randn(4, 5), "a").sum().backward()
    wanted = [torch.zeros_like(p) if p.grad is None else p.grad for p in alone.parameters()]
    for found in on_workers(2, main, check=check):
        assert_near(found, wanted)


# Backwards


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

    alone = drawn(Net(), 2)
    wanted = []
    for _ in range(2):
        alone.zero_grad(set_to_none=to_none)
        step(alone, x, x[:4])
        wanted.append(gradients(alone))

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data", bucket_bytes=SMALL)
        found = []
        for _ in range(2):
            model.zero_grad(set_to_none=to_none)
            step(model, share(x, worker, n), share(x[:4], worker, n))
            found.append(gradients(model))
        return found

    for found in on_workers(n, main, check=check):
        for one, other in zip(found, wanted, strict=True):
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
    alone = drawn(Tied(), 2)
    alone(x).sin().sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Tied(), 2), "data", bucket_bytes=1)
        with spmd.ledger() as log:
            spt.psum(model(share(x, worker, n)).sin().sum(), "data").backward()
        return gradients(model), log.workers[worker].operators["Sum"]

    for found, sums in on_workers(n, main, check=check):
        assert_near(found, gradients(alone))
        assert sums == 1 + 4  # the loss, and each parameter


class Mixed(nn.Module):
    """Parameters of five dtypes."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, dtype=torch.float64)
        self.b = nn.Linear(4, 4, dtype=torch.float32)
        self.c = nn.Linear(4, 4, dtype=torch.bfloat16)
        self.d = nn.Linear(4, 4, dtype=torch.complex128)
        self.e = nn.Parameter(torch.zeros(4, dtype=torch.float16))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x)).float())
        y = self.d(y.to(torch.complex128)).real + self.c(y.bfloat16()).double()
        return y * self.e.double()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_parameters_of_different_dtypes(check, bucket_bytes):
    """A bucket is of one dtype. Sums of two numbers are exact to the last bit but one rounding."""
    x = [randn(5, 4, seed=k) for k in range(2)]
    own = []
    for k in range(2):
        alone = drawn(Mixed(), 2)
        alone(x[k]).sum().backward()
        own.append(gradients(alone))
    wanted = [a + b for a, b in zip(*own, strict=True)]

    def main(worker):
        model = spt.data_parallel(drawn(Mixed(), 2), "data", bucket_bytes=bucket_bytes)
        counts = []
        for _ in range(2):
            model.zero_grad()
            with spmd.ledger() as log:
                model(spt.varying(x[worker], "data")).sum().backward()
            counts.append(log.workers[worker].verbs["all_reduce"])
        return gradients(model), counts[-1]

    for found, count in on_workers(2, main, check=check):
        assert_near(found, wanted, 0)
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
    alone = drawn(Stages(None, shared), 2)
    alone(x).sin().sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Stages(reentrant, shared), 2), "data", bucket_bytes=bucket_bytes)
        for _ in range(2):
            model.zero_grad()
            model(share(x, worker, n)).sin().sum().backward()
        return gradients(model)

    for found in on_workers(n, main, check=check):
        assert_near(found, gradients(alone))


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_the_whole_module(reentrant, check):
    n, x = 2, randn(7, 5, seed=1)
    alone = drawn(Net(), 2)
    alone(x).sin().sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        y = share(x, worker, n)
        checkpoint(model, y.requires_grad_(), use_reentrant=reentrant).sin().sum().backward()
        return gradients(model)

    for found in on_workers(n, main, check=check):
        assert_near(found, gradients(alone))


@pytest.mark.parametrize("check", CHECKS)
def test_autograd_grad_gives_the_workers_own(check):
    """Also differentiated again; and it touches neither .grad nor the sums."""
    x = randn(7, 5, seed=1)
    at = offsets(block_sizes(7, 2))

    def own(model, x):
        return torch.autograd.grad(model(x).sin().sum(), list(model.parameters()), create_graph=True)

    def penalty(grads):
        return sum((g**2).sum() for g in grads)

    alone = drawn(Net(), 2)
    firsts = [own(alone, x[at[k] : at[k + 1]]) for k in range(2)]
    wanted = [torch.autograd.grad(penalty(g), list(alone.parameters()), allow_unused=True) for g in firsts]

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
    for k, found in enumerate(on_workers(2, main, check=check)):
        assert_near(found[:7], [g.detach() for g in firsts[k]])
        assert_near(found[7:14], [g.detach() for g in summed])
        assert_near(found[14:], wanted[k], 1e-11)


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
    alone = drawn(Net(), 2)
    alone(x).sum().backward()

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

    for found in on_workers(2, main, check=check):
        assert_near(found, gradients(alone))


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

    for found in on_workers(3, main, check=check):
        assert_near(found, gradients(one) + gradients(other))


@pytest.mark.parametrize("check", CHECKS)
def test_a_layer_that_is_called_by_itself(check):
    """Its parameters are summed all the same, and once."""
    x = randn(7, 5, seed=1)
    alone = drawn(Net(), 2)
    alone.first(x).sin().sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        model.first(share(x, worker, 3)).sin().sum().backward()
        return gradients(model)

    for found in on_workers(3, main, check=check):
        assert_near(found, gradients(alone))


# no_sync


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("n", SIZES)
def test_accumulation_without_sums(n, reduction, check):
    """Three minibatches, of which the last sums; twice, the second time on top of the first's gradient."""
    x = randn(3 * 2 * n, 5, seed=1).reshape(3, 2 * n, 5)
    alone = drawn(Net(), 2)
    for _ in range(2):
        for part in x:
            alone(part).sin().sum().backward()
    wanted = [g / n if reduction == "mean" else g for g in gradients(alone)]

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data", reduction=reduction, bucket_bytes=SMALL)
        for _ in range(2):
            with model.no_sync():
                for part in x[:2]:
                    model(share(part, worker, n)).sin().sum().backward()
            model(share(x[2], worker, n)).sin().sum().backward()
        return gradients(model)

    for found in on_workers(n, main, check=check):
        assert_near(found, wanted)


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

    for found, before, y in on_workers(3, main, check=check):
        own = drawn(Net(), 2)
        own(y).sum().backward()
        assert_near(found, [a + b for a, b in zip(before, gradients(own), strict=True)])


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("summed_before", [False, True])
def test_what_came_without_sums_can_be_cleared(to_none, summed_before):
    x = randn(6, 5, seed=1)
    alone = drawn(Branches(), 2)
    alone(x, "ab").sum().backward()

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

    wanted = [torch.zeros_like(p) if p.grad is None and not to_none else p.grad for p in alone.parameters()]
    for found in on_workers(3, main):
        assert_near(found, wanted)


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
    alone = drawn(Branches(), 2)
    alone(x, "bc").sum().backward()
    alone(x, "a").sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Branches(), 2), "data", bucket_bytes=SMALL)
        y = share(x, worker, 3)
        with model.no_sync():
            model(y, "bc").sum().backward()
        model(y, "a").sum().backward()
        return gradients(model)

    for found in on_workers(3, main, check=check):
        assert_near(found, gradients(alone))


# The module


def test_the_first_workers_parameters_and_buffers_are_taken():
    def made(worker):
        module = nn.Sequential(drawn(Mixed(), worker), nn.BatchNorm1d(4))
        module[1].running_mean += worker
        module[0].count += worker
        return module

    def main(worker):
        model = spt.data_parallel(made(worker), "data")
        return {k: v.clone() for k, v in model.state_dict().items()}

    wanted = made(0).state_dict()
    for found in on_workers(3, main):
        assert list(found) == list(wanted)
        assert all(torch.equal(found[k], v) for k, v in wanted.items())


def test_verification_names_what_differs():
    def main(worker):
        module = drawn(Net(), 1)
        if worker == 2:
            module.middle.bias.data[3] += 1
        spt.data_parallel(module, "data", init="verify")

    with pytest.raises(StateError, match=r"middle\.bias that differs[\s\S]*worker 2"):
        on_workers(3, main)

    def alike(worker):
        spt.data_parallel(drawn(Net(), 1), "data", init="verify")

    on_workers(3, alike)


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_running_means(broadcast_buffers, check):
    """They are those of the first worker, or each worker's own."""
    x = [randn(6, 4, seed=k) for k in range(3)]
    own = []
    for k in range(3):
        norm = nn.BatchNorm1d(4, dtype=torch.float64)
        for _ in range(2):
            norm(x[k])
        own.append(norm.running_mean.clone())

    def main(worker):
        model = spt.data_parallel(nn.BatchNorm1d(4, dtype=torch.float64), "data", broadcast_buffers=broadcast_buffers)
        for _ in range(2):
            model(spt.varying(x[worker], "data")).sum().backward()
        return model.running_mean.clone(), int(model.num_batches_tracked)

    for k, (found, count) in enumerate(on_workers(3, main, check=check)):
        torch.testing.assert_close(plain(found), own[0 if broadcast_buffers else k], rtol=0, atol=1e-15)
        assert count == 2


def test_state_dict_and_names_are_those_of_the_module():
    plain_names = [name for name, _ in Net().named_parameters()]

    def main(worker):
        module = drawn(Net(), worker)
        model = spt.data_parallel(module, "data")
        assert model.module is module
        assert [name for name, _ in model.named_parameters()] == plain_names
        assert list(model.state_dict()) == list(Net().state_dict())
        assert model.first is module.first
        assert [id(p) for p in model.parameters()] == [id(p) for p in module.parameters()]
        with pytest.raises(AttributeError, match="nothing_like_this"):
            _ = model.nothing_like_this
        model.eval()
        assert not module.first.training
        assert module.first.weight.__class__ is nn.Parameter
        model.load_state_dict(drawn(Net(), 7).state_dict())
        assert_near(values(module), values(drawn(Net(), 7)))

        parent = nn.ModuleDict({"inner": model, "outer": nn.Linear(2, 2)})
        names = [f"inner.{name}" for name in plain_names] + ["outer.weight", "outer.bias"]
        assert list(parent.state_dict()) == names
        other = {k: v + 1 for k, v in parent.state_dict().items()}
        assert str(parent.load_state_dict(other)) == "<All keys matched successfully>"
        assert_near(values(module), [v + 1 for v in values(drawn(Net(), 7))])
        with pytest.raises(RuntimeError, match=r"Missing key[\s\S]*last\.bias"):
            parent.load_state_dict({k: v for k, v in other.items() if "last.bias" not in k})
        saved = io.BytesIO()
        torch.save(model.state_dict(), saved)

    on_workers(2, main)


@pytest.mark.parametrize("check", CHECKS)
def test_parameters_that_are_replaced(check):
    """By load_state_dict(assign=True), by another dtype: the new ones are summed."""
    x = randn(6, 5, seed=1)
    alone = drawn(Net(), 5)
    alone(x).sin().sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Net(torch.float32), 2), "data")
        model(share(x, worker, 3).float()).sum().backward()
        model.zero_grad()
        model.double()
        model.load_state_dict(drawn(Net(), 5).state_dict())
        model(share(x, worker, 3)).sin().sum().backward()
        found = [gradients(model)]
        model.load_state_dict(drawn(Net(), 5).state_dict(), assign=True)
        model(share(x, worker, 3)).sin().sum().backward()
        return [*found, gradients(model)]

    for found in on_workers(3, main, check=check):
        for one in found:
            assert_near(one, gradients(alone))


@pytest.mark.parametrize("check", CHECKS)
def test_copies_have_sums_of_their_own(check):
    x = randn(6, 5, seed=1)
    alone = drawn(Net(), 2)
    alone(x).sin().sum().backward()

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        with spmd.ledger() as log:
            twin = copy.deepcopy(model)
        assert not log.workers
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        found = []
        for one in (twin, loaded):
            assert one.first.weight is not model.first.weight
            assert all(p.grad is None for p in one.parameters())
            one(share(x, worker, 3)).sin().sum().backward()
            found.append(gradients(one))
        assert all(p.grad is None for p in model.parameters())
        return found

    for found in on_workers(3, main, check=check):
        for one in found:
            assert_near(one, gradients(alone))


@pytest.mark.parametrize("check", CHECKS)
def test_a_module_in_a_later_map(check):
    """On the same mesh it works on; elsewhere it says where it was made."""
    n, x = 3, randn(7, 5, seed=1)
    mesh = spmd.Mesh(data=n)
    alone = drawn(Net(), 2)
    alone(x).sin().sum().backward()

    def make(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        model(share(x, worker, n)).sum().backward()
        return model

    models = on_workers(n, make, check=check, mesh=mesh)

    def use(worker):
        model = models[worker]
        model.zero_grad()
        model(share(x, worker, n)).sin().sum().backward()
        return gradients(model)

    for found in on_workers(n, use, check=check, mesh=mesh):
        assert_near(found, gradients(alone))
    for found in on_workers(n, use, check=check, mesh=spmd.Mesh(data=n)):
        assert_near(found, gradients(alone))

    with pytest.raises(MeshError, match=r"worker 1[\s\S]*worker 0[\s\S]*where it was made"):
        on_workers(n, lambda worker: models[(worker + 2) % n](x), mesh=mesh)
    with pytest.raises(MeshError, match="where it was made"):
        on_workers(1, lambda worker: models[0](x))
    with pytest.raises(MeshError, match=r"outside of any body[\s\S]*no_grad"):
        models[0](x)
    with torch.no_grad():
        assert torch.equal(models[0](x), models[0].module(x))


def test_two_workers_cannot_share_a_module():
    shared = Net()
    with pytest.raises(StateError, match=r"parameters that a module[\s\S]*copy\.deepcopy"):
        on_workers(2, lambda worker: spt.data_parallel(shared, "data"))
    gc.collect()
    on_workers(1, lambda worker: spt.data_parallel(shared, "data"))


def test_modules_that_differ_are_a_mismatch():
    with pytest.raises(MismatchError, match=r"2 parameters of 18 entries[\s\S]*2 parameters of 24 entries"):
        on_workers(2, lambda worker: spt.data_parallel(nn.Linear(5 + 2 * worker, 3), "data"))
    with pytest.raises(MismatchError, match="digest"):
        on_workers(2, lambda worker: spt.data_parallel(nn.Linear(*[(5, 3), (2, 6)][worker]), "data"))


def test_what_it_refuses():
    def wrong(**options):
        return lambda worker: spt.data_parallel(nn.Linear(2, 2), "data", **options)

    with pytest.raises(MeshError, match="body"):
        spt.data_parallel(Net(), "data")
    with pytest.raises(ValueError, match=r"reduction[\s\S]*'average'[\s\S]*\"sum\"|\"mean\""):
        on_workers(1, wrong(reduction="average"))
    with pytest.raises(ValueError, match=r"init[\s\S]*\"verify\""):
        on_workers(1, wrong(init="verifi"))
    with pytest.raises(ValueError, match="bucket_bytes"):
        on_workers(1, wrong(bucket_bytes=0))
    with pytest.raises(MeshError, match=r"axis_name[\s\S]*'data'"):
        on_workers(1, lambda worker: spt.data_parallel(nn.Linear(2, 2), "dta"))
    with pytest.raises(TypeError, match=r"nn\.Module"):
        on_workers(1, lambda worker: spt.data_parallel(torch.ones(2), "data"))
    with pytest.raises(StateError, match="lazy"):
        on_workers(1, lambda worker: spt.data_parallel(nn.LazyLinear(2), "data"))

    def sparse(worker):
        model = spt.data_parallel(nn.Embedding(5, 2, sparse=True), "data")
        model(torch.tensor([1, 2])).sum().backward()

    with pytest.raises(LayoutError, match=r"weight[\s\S]*sparse=False"):
        on_workers(2, sparse)


@pytest.mark.parametrize("check", CHECKS)
def test_a_loss_outlives_its_module(check):
    """Its gradients are summed all the same."""
    x = randn(7, 5, seed=1)
    alone = drawn(Net(), 2)
    alone(x).sin().sum().backward()

    def main(worker):
        net = drawn(Net(), 2)
        loss = spt.data_parallel(net, "data")(share(x, worker, 3)).sin().sum()
        gc.collect()
        loss.backward()
        return gradients(net)

    for found in on_workers(3, main, check=check):
        assert_near(found, gradients(alone))


def test_nothing_is_left_when_a_module_goes():
    before = len(GRADIENT_SYNCS)

    def main(worker):
        model = spt.data_parallel(Net(), "data")
        model(spt.varying(randn(3, 5), "data")).sum().backward()
        gone = weakref.ref(model._sync)
        module = model.module
        del model
        assert gone() is None
        out = module(plain(randn(3, 5)))
        with spmd.ledger() as log:
            out.sum().backward()
        assert not log.workers
        assert not module.first.weight._post_accumulate_grad_hooks

    on_workers(2, main)
    gc.collect()
    assert len(GRADIENT_SYNCS) == before


class Shards(nn.Module):
    """A layer of which each worker along `model` has some rows."""

    def __init__(self, rows):
        super().__init__()
        self.weight = nn.Parameter(rows)
        self.bias = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        own = F.linear(spt.pvary(x, "model"), spt.varying(self.weight, "model"))
        return spt.all_gather(own, "model", axis=1, tiled=True, to="invariant") * self.bias


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("direct", [False, True])
def test_with_a_parallel_layer_along_another_axis(check, direct):
    """Sums are taken along the axis of the data, among workers that have the same shard."""
    x, w = randn(7, 5, seed=1), randn(3, 5, seed=2)
    alone = nn.Linear(5, 3, dtype=torch.float64, bias=False)
    alone.weight.data.copy_(w)
    bias = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (alone(x) * bias).sin().sum().backward()
    mesh = spmd.Mesh(data=3, model=2)
    at = offsets(block_sizes(3, 2))
    found = {}

    def main():
        k, j = spt.worker_index("data"), spt.worker_index("model")
        model = spt.data_parallel(Shards(w[at[j] : at[j + 1]].clone()), "data")
        forward = model.module if direct else model
        forward(share(x, k, 3)).sin().sum().backward()
        found[k, j] = gradients(model)

    spt.map(main, (), None, mesh=mesh, check=check)()
    assert len(found) == 6
    for (_, j), (weight, biases) in found.items():
        assert_near([weight], [alone.weight.grad[at[j] : at[j + 1]]])
        assert_near([biases], [bias.grad])


def test_along_two_axes_together():
    x = randn(7, 5, seed=1)
    alone = drawn(Net(), 2)
    alone(x).sin().sum().backward()
    found = []

    def main():
        model = spt.data_parallel(drawn(Net(), 2), ("data", "more"))
        at = offsets(block_sizes(7, 4))
        k = spt.worker_index(("data", "more"))
        model(spt.varying(x[at[k] : at[k + 1]], ("data", "more"))).sin().sum().backward()
        found.append(gradients(model))

    spt.map(main, (), None, mesh=spmd.Mesh(data=2, more=2))()
    assert len(found) == 4
    for one in found:
        assert_near(one, gradients(alone))


@pytest.mark.parametrize("layer", ["lstm", "attention", "conv", "embedding"])
def test_layers_of_many_kinds(layer):
    """Both modes of checking give the gradients of one worker."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            double = {"dtype": torch.float64}
            self.layer = {
                "lstm": lambda: nn.LSTM(5, 4, num_layers=2, batch_first=True, **double),
                "attention": lambda: nn.TransformerEncoderLayer(
                    4, 2, 8, dropout=0.0, batch_first=True, norm_first=True, **double
                ),
                "conv": lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 3, 3, **double)),
                "embedding": lambda: nn.Embedding(11, 4, padding_idx=0, **double),
            }[layer]()

        def forward(self, x):
            y = self.layer(x)
            return y[0] if layer == "lstm" else y

    shape = {"lstm": (7, 6, 5), "attention": (7, 6, 4), "conv": (7, 6, 5), "embedding": (7, 3)}[layer]
    x = randn(*shape, seed=1)
    if layer == "embedding":
        x = (x * 3).long().abs() % 11
    alone = drawn(Model(), 2)
    alone(x).sin().sum().backward()

    for check in CHECKS:

        def main(worker):
            model = spt.data_parallel(drawn(Model(), 2), "data", bucket_bytes=SMALL)
            model(share(x, worker, 3)).sin().sum().backward()
            return gradients(model)

        for found in on_workers(3, main, check=check):
            assert_near(found, gradients(alone))


def test_a_compiled_module():
    """torch.compile of the module, and of what data_parallel gives."""
    n, x = 2, randn(8, 5, seed=1)
    alone = drawn(Net(), 2)
    alone(x).sin().sum().backward()
    lock = threading.Lock()
    seen = []

    def backend(graph, inputs):
        seen.append(len(inputs))
        return graph

    def main(worker):
        found = []
        for way in range(2):
            module = drawn(Net(), 2)
            with lock:  # torch's compiler is not for several threads at once
                if way == 0:
                    module = torch.compile(module, backend=backend)
            model = spt.data_parallel(module, "data")
            called = torch.compile(model, backend=backend) if way == 1 else model
            y = share(x, worker, n)
            with lock:
                out = called(y)
            out.sin().sum().backward()
            found.append(gradients(model))
        return found

    for found in on_workers(n, main, check=False):
        for one in found:
            assert_near(one, gradients(alone))
    assert len(seen) >= 2


# The samplers, other libraries, other launchers


@pytest.mark.parametrize("check", CHECKS)
def test_an_epoch_by_a_sampler(check):
    """The minibatches of the sequential run, and a step for each, with an uneven tail."""
    x, t = randn(17, 5, seed=1), randn(17, 3, seed=2)
    data = torch.utils.data.TensorDataset(x, t)

    def train(model, batches, mean):
        steps = torch.optim.Adam(model.parameters(), lr=0.01)
        for x, t in batches:
            steps.zero_grad()
            mean(squares(model(x), t)).backward()
            steps.step()
        return values(model)

    alone = spt.DistributedSampler(data, num_replicas=1, rank=0, batch_size=6, seed=3)
    wanted = train(drawn(Net(), 2), alone.loader(), torch.mean)

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data")
        loader = spt.DistributedSampler(data, batch_size=6, seed=3, axis_name="data").loader()
        batches = ([spt.varying(a, "data") for a in batch] for batch in loader)
        return train(model, batches, lambda loss: spt.mean(loss, "data"))

    for found in on_workers(4, main, check=check):
        assert_near(found, wanted)


def ten_steps(worker, n):
    """What the programs that are compared do."""
    net = drawn(nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 4)), 1)
    model = spt.data_parallel(net, "data", reduction="mean", bucket_bytes=1000)
    steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for k in range(10):
        x, t = randn(16, 20, seed=k, dtype=torch.float32), randn(16, 4, seed=100 + k, dtype=torch.float32)
        rows = slice(16 // n * worker, 16 // n * (worker + 1))
        steps.zero_grad()
        F.mse_loss(model(x[rows]), t[rows]).backward()
        steps.step()
    return {name: v.double().tolist() for name, v in model.state_dict().items()}


def test_ten_steps_of_ddp():
    """Two processes of torch's DistributedDataParallel over gloo, and two workers here."""
    ended = run_python(ROOT / "tests" / "torch_programs" / "ddp.py", timeout=120)
    assert ended.returncode == 0, str(ended)
    theirs = json.loads(ended.stdout.splitlines()[-1])
    for ours in on_workers(2, ten_steps, 2, check=False):
        assert list(ours) == list(theirs)
        for name, wanted in theirs.items():
            # Of numbers beyond 8, as running variances are, a last bit of float32 is 1e-6 already.
            bound = 1e-6 * np.maximum(1, np.abs(wanted))
            assert (np.abs(np.subtract(ours[name], wanted)) <= bound).all(), name


def same_bits(n, python):
    """Uneven shares, unused parameters, accumulation, several dtypes and buffers, as virtual workers have them."""
    program = PROGRAMS / "torch_data_parallel.py"
    ended, alone = launch(program, str(n), n=n, python=python, timeout=120), run_python(program, str(n), timeout=120)
    assert ended.returncode == 0, str(ended)
    assert alone.returncode == 0, str(alone)
    assert ended.stdout == alone.stdout
    assert len(set(ended.stdout.splitlines())) == 4  # steps, alike on all workers
    assert len(ended.stdout.splitlines()) == 4 * n


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
@pytest.mark.full
@pytest.mark.parametrize("n", [2, 3])
def test_the_same_bits_under_mpiexec(n):
    same_bits(n, sys.executable)


@pytest.mark.full
def test_the_same_bits_under_torchrun():
    same_bits(3, TORCHRUN)


PLAIN, PORT = ROOT / "examples" / "torch_ddp.py", ROOT / "examples" / "torch_data_parallel.py"
EPOCH = re.compile(r"epoch \d  loss \d\.\d{4}  test accuracy (\d\d\.\d)%")


def printed(ended):
    assert ended.returncode == 0, str(ended)
    lines = ended.stdout.splitlines()
    assert [bool(EPOCH.fullmatch(line)) for line in lines] == [True] * 5, str(ended)
    assert float(EPOCH.fullmatch(lines[-1])[1]) > 90
    return lines


def test_a_port_of_a_script_for_ddp():
    """It trains as the script does, to the printed digits, without a launcher."""
    for _ in range(5):
        plain = launch(PLAIN, n=2, python=TORCHRUN, timeout=120)
        # The script has torch alone in it, which aborts now and then when such processes end.
        if "terminate called without an active exception" not in str(plain):
            break
    assert printed(run_python(PORT, timeout=120)) == printed(plain)


@pytest.mark.full
@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_the_port_under_launchers():
    wanted = printed(run_python(PORT, timeout=120))
    assert printed(launch(PORT, n=2, timeout=120)) == wanted
    assert printed(launch(PORT, n=2, python=TORCHRUN, timeout=120)) == wanted
    assert len(printed(run_python(PORT, "3", timeout=120))) == 5


def test_the_port_is_a_few_lines():
    """Those of the page, and imports."""
    lines = list(
        difflib.unified_diff(
            PLAIN.read_text().split('"""', 2)[2].splitlines(), PORT.read_text().split('"""', 2)[2].splitlines(), n=0
        )
    )
    changed = [line for line in lines[2:] if line[0] in "+-" and len(line) > 1 and "import" not in line]
    page = (ROOT / "docs" / "torch_data_parallel.md").read_text()
    shown = page[page.index("```diff") :].split("```")[1].splitlines()
    assert changed == [line for line in shown if line[:1] in ("+", "-")]
    assert len(changed) <= 12


# Parameters along other axes


def stages(varying, *, make=None, equal=False, check=True):
    """Two stages with a linear layer each; the gradients of each, and what they are in one program."""
    x = randn(6, 3, seed=4)
    nets = [drawn(nn.Linear(3, 3, dtype=torch.float64), 1 if equal else k) for k in range(2)]
    (nets[1](torch.tanh(nets[0](x))).sin().sum()).backward()
    found = {}

    def main():
        k, stage = spt.worker_index("data"), spt.worker_index("stage")
        net = drawn(nn.Linear(3, 3, dtype=torch.float64), 1 if equal else stage)
        options = {} if varying is None else {"varying": varying}
        model = spt.data_parallel(make(net) if make else net, "data", **options)
        rows = share(x, k, spt.axis_size("data"))
        first = torch.tanh(model(spt.varying(rows, "stage")))
        last = model(spt.shift(first, "stage", 1)) * float(stage == 1)
        spt.psum(last.sin().sum(), ("data", "stage")).backward()
        found[k, stage] = [p.grad.clone() for p in net.parameters()]

    spt.map(main, (), None, mesh=spmd.Mesh(data=2, stage=2), check=check)()
    return found, [[p.grad for p in net.parameters()] for net in nets]


@pytest.mark.parametrize("varying", ["stage", ("stage",)])
def test_stages_have_gradients_of_their_own(varying):
    found, wanted = stages(varying)
    for (_, stage), gs in found.items():
        assert_near([plain(g) for g in gs], wanted[stage])


def test_replicated_parameters_are_summed_along_other_axes():
    found, wanted = stages(None, equal=True)
    for gs in found.values():
        assert_near([plain(g) for g in gs], [a + b for a, b in zip(*wanted, strict=True)])


class Wrapped(nn.Module):
    """A module of the user's that says nothing, or declares."""

    def __init__(self, net, declares, operators=False):
        super().__init__()
        self.weight, self.bias, self.declares, self.operators = net.weight, net.bias, declares, operators

    def forward(self, x):
        if self.operators:
            return x @ self.weight.T + self.bias
        if self.declares:
            return F.linear(x, spt.varying(self.weight, "stage"), spt.varying(self.bias, "stage"))
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize(
    "make",
    [None, lambda net: nn.Sequential(net), lambda net: Wrapped(net, False), lambda net: Wrapped(net, False, True)],
)
def test_undeclared_differences_raise(make):
    with pytest.raises((StateError, ReplicaError), match=r"weight, which differs[\s\S]*'stage'[\s\S]*varying='stage'"):
        stages(None, make=make)


def test_a_forward_may_declare_its_parameters():
    found, wanted = stages(None, make=lambda net: Wrapped(net, True))
    for (_, stage), gs in found.items():
        assert_near([plain(g) for g in gs], wanted[stage])


def test_undeclared_differences_of_one_entry_of_frozen_parameters_and_of_modules():
    def main(change):
        net = nn.Sequential(nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 2))
        drawn(net, 1).requires_grad_(False)
        change(net, spt.worker_index("stage"))
        spt.data_parallel(net, "data")

    def run(change):
        spt.map(lambda: main(change), (), None, mesh=spmd.Mesh(data=1, stage=3))()

    def one_entry(net, stage):
        net[2].weight[1, 7] += stage == 2

    run(lambda net, stage: None)
    with pytest.raises(StateError, match=r"2\.weight, which differs between workers along 'stage'"):
        run(one_entry)
    with pytest.raises(StateError, match="list of parameters, which differs between workers along 'stage'"):
        run(lambda net, stage: net.append(nn.Linear(2, 2)) if stage else None)
    with pytest.raises(StateError, match=r"0\.bias, which differs"):
        run(lambda net, stage: setattr(net[0], "bias", nn.Parameter(torch.zeros(300 + stage))))
    with pytest.raises(StateError, match="argument varying"):
        spt.map(lambda: spt.data_parallel(nn.Linear(2, 2), "data", varying="data"), (), None, mesh=spmd.Mesh(data=2))()
    with pytest.raises(MeshError, match="satge"):
        spt.map(lambda: spt.data_parallel(nn.Linear(2, 2), "data", varying="satge"), (), None, mesh=spmd.Mesh(data=2))()


def test_sharded_layers_need_no_declaration():
    def main():
        net = nn.Sequential(spt.ColumnParallelLinear("model", 4, 6), nn.Tanh(), spt.RowParallelLinear("model", 6, 2))
        model = spt.data_parallel(net, "data")
        spt.mean(model(spt.varying(torch.ones(2, 4), "data")) ** 2, "data").backward()

    spt.map(main, (), None, mesh=spmd.Mesh(data=2, model=2))()


def test_synchronised_batch_norms_raise():
    """torch's would take the statistics of one worker; plain ones are DDP's, which do so by contract."""

    def main(norm):
        spt.data_parallel(norm(4), "data")(spt.varying(torch.ones(3, 4), "data"))

    mesh = spmd.Mesh(data=2)
    with pytest.raises(StateError, match=r"SyncBatchNorm[\s\S]*spt\.mean\(x, 'data', \(0,\)\)"):
        spt.map(lambda: main(nn.SyncBatchNorm), (), None, mesh=mesh)()
    spt.map(lambda: main(nn.BatchNorm1d), (), None, mesh=mesh)()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("summed", [True, False])
def test_a_penalty_counts_once_for_each_worker(reduction, summed, check):
    """Whether it is added to a loss of each worker or to that of all, and whether states are tracked or not."""
    x = randn(6, 5, seed=1)
    alone = drawn(Net(), 2)
    (alone(x).sin().sum() + 3 * sum(p.square().sum() for p in alone.parameters())).backward()
    wanted = [g / (3 if reduction == "mean" else 1) for g in gradients(alone)]

    def main(worker):
        model = spt.data_parallel(drawn(Net(), 2), "data", reduction=reduction)
        loss = model(share(x, worker, 3)).sin().sum()
        loss = spt.psum(loss, "data") if summed else loss
        (loss + sum(p.square().sum() for p in model.parameters())).backward()
        return gradients(model)

    for found in on_workers(3, main, check=check):
        assert_near(found, wanted)


def test_what_is_computed_of_its_parameters_and_of_others_is_refused():
    def main(worker):
        net, other = drawn(Net(), 2), nn.Parameter(torch.ones((), dtype=torch.float64))
        loss = spt.data_parallel(net, "data")(share(randn(6, 5), worker, 2)).sum()
        (loss + net.scale * other).backward()

    with pytest.raises(ReplicaError, match=r"spt\.pvary\(value, 'data'\)"):
        on_workers(2, main)
