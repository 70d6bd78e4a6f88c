"""spt.map: arguments and results of every kind, gradients against a serial oracle, states, and memory."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from launch import ROOT, launch, mpiexec, run_python  # noqa: E402
from torch.autograd.graph import saved_tensors_hooks  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch_operators import placed  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.test_operators import KINDS, each, few  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError, MeshError, MutationError, SpecError, StateError, TransportError  # noqa: E402
from spmd.mesh import Mesh  # noqa: E402
from spmd.operators.sums import Vary  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")

SIZES = [1, 2, 3, 4]
each_size = pytest.mark.parametrize("n", SIZES)


def normal(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape))


def same(a, b):
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Arguments and results


@each_size
@pytest.mark.parametrize("rows", [0, 1, 5, 8])
@pytest.mark.parametrize("check", [True, False])
def test_specs_split_arguments_and_join_results(n, rows, check):
    x = normal(rows, 3)
    mesh = Mesh(x=n)
    got = spt.map(lambda x: x * 2, P("x"), P("x"), mesh=mesh, check=check)(x)
    assert type(got) is torch.Tensor
    assert torch.equal(got, x * 2)
    columns = spt.map(lambda x: x + 1, P(None, "x"), P(None, "x"), mesh=mesh, check=check)(x)
    assert torch.equal(columns, x + 1)


@pytest.mark.parametrize("check", [True, False])
def test_two_axes_and_replicated_results(check):
    mesh = Mesh(x=2, y=2)
    x = normal(5, 3)
    f = spt.map(lambda x: (x, spt.psum(x.sum(), ("x", "y"))), P("x", "y"), (P("x", "y"), P()), mesh=mesh, check=check)
    whole, total = f(x)
    assert torch.equal(whole, x)
    same(total, x.sum())
    assert total.shape == ()


@each_size
def test_trees_keywords_and_what_is_passed_as_it_is(n):
    mesh = Mesh(x=n)

    def body(pair, scale, *, names, shift):
        a, b = pair["a"], pair["b"]
        assert names == ["one", "two"]
        return {"sum": spt.psum((a * scale).sum() + b.sum(), "x"), "blocks": [a + shift, b]}

    specs = {"pair": {"a": P("x"), "b": P("x")}, "scale": P(), "names": None, "shift": P()}
    out = {"sum": P(), "blocks": P("x")}
    a, b = normal(7, 2), normal(4, seed=1)
    result = spt.map(body, specs, out, mesh=mesh)({"a": a, "b": b}, torch.tensor(3.0), names=["one", "two"], shift=2.5)
    same(result["sum"], (a * 3).sum() + b.sum())
    assert torch.equal(result["blocks"][0], a + 2.5)
    assert torch.equal(result["blocks"][1], b)


@pytest.mark.parametrize("check", [True, False])
def test_arrays_numbers_and_partitioned_arrays_reach_the_body(check):
    mesh = Mesh(x=3)
    a = np.random.default_rng(0).standard_normal((7, 2))
    frozen = a.copy()
    frozen.flags.writeable = False
    laid = spmd.put(a, P(None, "x"), mesh)

    def body(x, y, z, k):
        assert all(isinstance(t, torch.Tensor) for t in (x, y, z))
        assert type(k) is int
        return x + y + z * k

    got = spt.map(body, (P("x"), P("x"), P("x"), P()), P("x"), mesh=mesh, check=check)(a, frozen, laid, 2)
    assert torch.equal(got, torch.from_numpy(a + a + a * 2))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64", "int8", "int64", "uint8", "bool"])
def test_dtypes_are_kept(dtype):
    x = (torch.arange(10) % 2).to(getattr(torch, dtype))
    for check in (True, False):
        y = spt.map(lambda x: x, P("x"), P("x"), mesh=Mesh(x=3), check=check)(x)
        assert y.dtype == x.dtype
        assert torch.equal(y, x)


def test_tensors_without_dimensions():
    mesh = Mesh(x=2)
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    y = spt.map(lambda w: w * w, P(), P(), mesh=mesh)(w)
    assert y.shape == ()
    y.backward()
    assert w.grad == 4


def test_as_a_decorator():
    @spt.map(in_specs=P("x"), out_specs=P(), mesh=Mesh(x=3))
    def total(x):
        """The sum."""
        return spt.psum(x.sum(), "x")

    assert total(torch.ones(7)) == 7
    with Mesh(x=2):
        assert spt.map(lambda x: spt.psum(x.sum(), "x"), P("x"), P())(torch.ones(5)) == 5


def test_a_main_on_every_worker():
    seen = set()

    def main():
        seen.add(spt.worker_index("x"))

    spt.map(main, (), None, mesh=Mesh(x=3))()
    assert seen == {0, 1, 2}


def test_results_are_the_callers_own():
    """Nobody else has the memory of a result: neither the argument, nor a later call."""
    mesh = Mesh(x=2)
    x = normal(6)
    for spec in (P(), P("x")):
        y = spt.map(lambda x: x, spec, spec, mesh=mesh)(x)
        z = spt.map(lambda x: x, spec, spec, mesh=mesh)(x)
        before = x.clone()
        y.zero_()
        assert torch.equal(x, before)
        assert torch.equal(z, before)


# Gradients


def mlp(w1, w2, x, y):
    return torch.tanh(x @ w1) @ w2 - y


@each_size
@pytest.mark.parametrize("rows", [9, 2])
def test_gradients_of_arguments_are_those_of_the_serial_program(n, rows):
    tensors = [normal(3, 4, seed=1), normal(4, seed=2), normal(rows, 3, seed=3), normal(rows, seed=4)]

    def loss(w1, w2, x, y):
        return spt.mean(mlp(w1, w2, x, y) ** 2, "x")

    f = spt.map(loss, (P(), P(), P("x"), P("x")), P(), mesh=Mesh(x=n))
    mine = [t.clone().requires_grad_() for t in tensors]
    theirs = [t.clone().requires_grad_() for t in tensors]
    got, want = f(*mine), (mlp(*theirs) ** 2).mean()
    same(got, want)
    got.backward()
    want.backward()
    for a, b in zip(mine, theirs, strict=True):
        same(a.grad, b.grad)


@each_size
@pytest.mark.parametrize("check", [True, False])
def test_gradients_of_parameters_that_are_closed_over(n, check):
    """One gradient, that of the whole program, however many workers use the module; checked or not."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    x = normal(7, 3).requires_grad_()
    got = spt.map(lambda x: net(x), P("x"), P("x"), mesh=Mesh(x=n), check=check)(x)
    (got**2).sum().backward()
    mine = [p.grad.clone() for p in net.parameters()] + [x.grad.clone()]
    net.zero_grad()
    x.grad = None
    (net(x) ** 2).sum().backward()
    for a, b in zip(mine, [*(p.grad for p in net.parameters()), x.grad], strict=True):
        same(a, b)


def test_parameters_alone_are_differentiated():
    net = torch.nn.Linear(3, 1).double()
    x = normal(5, 3)
    f = spt.map(lambda x: spt.mean(net(x) ** 2, "x"), P("x"), P(), mesh=Mesh(x=3))
    f(x).backward()
    mine = net.weight.grad.clone()
    net.zero_grad()
    (net(x) ** 2).mean().backward()
    same(mine, net.weight.grad)
    with torch.no_grad():
        assert not f(x).requires_grad


def square_sum(mesh):
    return spt.map(lambda x: spt.psum((x**3).sum(), "x"), P("x"), P(), mesh=mesh)


def test_backward_twice_and_retain_graph():
    f, x = square_sum(Mesh(x=3)), normal(5).requires_grad_()
    y = f(x)
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    same(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        y.backward()


def test_derivatives_of_higher_order():
    f, x = square_sum(Mesh(x=2)), normal(5).requires_grad_()
    (g,) = torch.autograd.grad(f(x), x, create_graph=True)
    same(g, 3 * x**2)
    (h,) = torch.autograd.grad(g.sum(), x, create_graph=True)
    same(h, 6 * x)
    (k,) = torch.autograd.grad((h * h).sum(), x)
    same(k, 72 * x)


def test_derivatives_of_higher_order_by_closed_over_parameters():
    w = normal(3).requires_grad_()
    x = normal(5, 3, seed=1)
    f = spt.map(lambda x: spt.mean((x @ w) ** 3, "x"), P("x"), P(), mesh=Mesh(x=2))
    (g,) = torch.autograd.grad(f(x), w, create_graph=True)
    (h,) = torch.autograd.grad((g * g).sum(), w)
    v = w.detach().requires_grad_()
    (a,) = torch.autograd.grad(((x @ v) ** 3).mean(), v, create_graph=True)
    (b,) = torch.autograd.grad((a * a).sum(), v)
    same(g, a)
    same(h, b)


def test_without_gradients():
    f, x = square_sum(Mesh(x=2)), normal(5).requires_grad_()
    with torch.no_grad():
        assert not f(x).requires_grad
    with torch.inference_mode():
        y = f(x)
        assert y.is_inference()
    same(y.clone(), (x**3).sum().detach())
    assert f(x).requires_grad


@pytest.mark.parametrize("cache", [True, False])
def test_autocast_reaches_the_body(cache):
    seen = []

    def body(a, b):
        c = a @ b
        seen.append(c.dtype)
        return c

    a, b = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    f = spt.map(body, (P("x"), P()), P("x"), mesh=Mesh(x=2))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache):
        y, z = f(a, b), a @ b
    assert set(seen) == {torch.bfloat16}
    assert torch.equal(y, z)
    y.float().sum().backward()
    assert a.grad.dtype == torch.float32
    f(a, b)
    assert seen[-1] == torch.float32


def test_results_of_which_some_are_not_used_or_not_differentiated():
    def body(x, w):
        return x * 2, (x * w).sum(dtype=torch.float64) * 0 + 1, (x > 0), x.detach(), torch.arange(2)

    x, w = normal(5).requires_grad_(), torch.ones((), dtype=torch.float64, requires_grad=True)
    specs = (P("x"), P("x"), P("x"), P("x"), P())

    def reshaped(x, w):
        a, b, c, d, e = body(x, w)
        return a, b.reshape(1), c, d, e

    a, b, c, d, e = spt.map(reshaped, (P("x"), P()), specs, mesh=Mesh(x=3))(x, w)
    assert a.requires_grad
    assert b.requires_grad
    assert not c.requires_grad
    assert c.dtype == torch.bool
    assert not d.requires_grad
    assert e.dtype == torch.int64
    g, h = torch.autograd.grad(a.sum(), (x, w), allow_unused=True, retain_graph=True)
    same(g, torch.full_like(x, 2))
    assert h is None or not h.any()
    b.sum().backward()


def test_an_argument_that_no_result_needs():
    x, u = normal(5).requires_grad_(), normal(4, seed=1).requires_grad_()
    y = spt.map(lambda x, u: x * 2, (P("x"), P("x")), P("x"), mesh=Mesh(x=2))(x, u)
    g, h = torch.autograd.grad(y.sum(), (x, u), allow_unused=True)
    same(g, torch.full_like(x, 2))
    assert h is None or not h.any()


def test_graphs_are_let_go_with_the_callers():
    kept = []

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            mark = torch.ones(1)
            ctx.mark = mark
            kept.append(weakref.ref(mark))
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    x = normal(6).requires_grad_()
    w = normal(1, seed=1).requires_grad_()
    f = spt.map(lambda x: spt.psum((Held.apply(x) * w).sum(), "x"), P("x"), P(), mesh=Mesh(x=3))

    def alive():
        gc.collect()
        return sum(r() is not None for r in kept)

    y = f(x)
    assert alive() == 3
    y.backward()
    assert alive() == 0
    y = f(x)
    assert alive() == 3
    del y
    assert alive() == 0
    for _ in range(3):
        f(x).backward()
    assert alive() == 0


# Errors


def parts(caught) -> str:
    text = str(caught.value)
    for part in ("got:", "needed:", "mend:"):
        assert part in text, text
    return text


@pytest.mark.parametrize("check", [True, False])
def test_a_body_must_not_write_to_its_arguments(check):
    def body(x):
        x += 1
        return x

    with pytest.raises((StateError, RuntimeError)):
        spt.map(body, P("x"), P("x"), mesh=Mesh(x=2), check=check)(torch.ones(4))


def test_lockstep_is_refused():
    mesh = Mesh(x=2, scheduler="lockstep")
    with pytest.raises(TransportError) as caught:
        spt.map(lambda x: x, P("x"), P("x"), mesh=mesh)(torch.ones(4))
    assert "scheduler" in parts(caught)
    with pytest.raises(TransportError) as caught:
        spmd.map(lambda x: spmd.psum(torch.ones(2), "x") and x, P("x"), P("x"), mesh=mesh, check=False)(np.ones(4))
    parts(caught)


def test_a_raising_worker_stops_all():
    def body(x):
        if spt.worker_index("x") == 1:
            raise KeyError("mine")
        return spt.psum(x, "x")

    mesh = Mesh(x=3)
    with pytest.raises(KeyError, match="mine"):
        spt.map(body, P("x"), P(), mesh=mesh)(torch.ones(6))
    assert spt.map(lambda x: spt.psum(x.sum(), "x"), P("x"), P(), mesh=mesh)(torch.ones(6)) == 6


def test_errors_say_what_to_do():
    mesh = Mesh(x=2)
    x = torch.ones(4)
    inner = spt.map(lambda x: x, P("x"), P("x"), mesh=mesh)
    with pytest.raises(MeshError) as caught:
        spt.map(inner, P("x"), P("x"), mesh=mesh)(x)
    parts(caught)
    with pytest.raises(MeshError) as caught:
        spt.map(lambda x: x, P("x"), P("x"))(x)
    parts(caught)
    with pytest.raises(SpecError) as caught:
        spt.map(lambda x: x, (P("x"), P()), P("x"), mesh=mesh)(x)
    parts(caught)
    with pytest.raises((SpecError, LayoutError)) as caught:
        spt.map(lambda x: x, P(None, "x"), P("x"), mesh=mesh)(x)
    parts(caught)
    with pytest.raises(SpecError) as caught:
        spt.map(lambda x: x, P("z"), P("x"), mesh=mesh)(x)
    parts(caught)
    with pytest.raises(SpecError) as caught:
        spt.map(lambda x: x, P("x"), P("x"), mesh=mesh)("text")
    parts(caught)
    with pytest.raises(StateError) as caught:
        spt.map(lambda x: None, P("x"), P("x"), mesh=mesh)(x)
    parts(caught)
    with pytest.raises(StateError) as caught:
        spt.map(lambda x: x, P("x"), P("x"), mesh=mesh)(x.to_sparse())
    assert "to_dense" in parts(caught)
    with pytest.raises(StateError) as caught:
        spt.map(lambda x: x, P("x"), None, mesh=mesh)(x)
    parts(caught)
    outer = normal(4).requires_grad_() * 2
    with pytest.raises(StateError) as caught:
        spt.map(lambda x: spt.psum((x * outer[: x.shape[0]]).sum(), "x"), P("x"), P(), mesh=mesh)(x.double())
    assert "closes over" in parts(caught)


def test_backward_after_the_body_is_over():
    kept = {}

    def body(x):
        x = x.clone().requires_grad_()
        kept[spt.worker_index("x")] = spt.shift(x, "x", 1).sum()
        return x.detach()

    spt.map(body, P("x"), P("x"), mesh=Mesh(x=2))(torch.ones(4))
    with pytest.raises(MeshError) as caught:
        kept[0].backward()
    assert "whose map is over" in parts(caught)


# States


SPLIT = P("x")


def typed(body, *args, specs=SPLIT, out=SPLIT, n=2):
    return spt.map(body, specs, out, mesh=Mesh(x=n))(*args)


def test_what_is_promised_invariant_must_be():
    with pytest.raises(StateError) as caught:
        typed(lambda x: x.sum(), torch.ones(4), out=P())
    assert "result" in parts(caught)
    assert "psum" in str(caught.value)
    with pytest.raises(StateError):  # a bare tensor counts as Invariant, and is compared
        typed(lambda x: torch.tensor(float(spt.worker_index("x"))), torch.ones(4), out=P())


@pytest.mark.parametrize("how", [float, int, bool, complex, torch.Tensor.item, torch.Tensor.tolist, np.asarray])
def test_values_of_varying_tensors_are_refused(how):
    def body(x):
        how(x.sum())
        return x

    with pytest.raises(StateError) as caught:
        typed(body, torch.ones(4))
    assert "psum" in parts(caught)

    def fine(x):
        how(spt.psum(x.sum(), "x"))
        how(spt.block(x).sum())
        return x

    typed(fine, torch.ones(4))


def test_states_of_results():
    def body(x, w):
        assert isinstance(x, spt.Tensor)
        assert x.state.varying == {"x"}
        assert not w.state.varying
        assert (x * w).state.varying == {"x"}
        assert (w * 2).state.varying == frozenset()
        assert torch.cat([w, x]).state.varying == {"x"}
        assert x.max(0).values.state.varying == {"x"}
        assert all(c.state.varying == {"x"} for c in x.chunk(2))
        assert (x > 0).state.varying == {"x"}
        assert w[x.argmax()].state.varying == {"x"}
        assert spt.psum(x, "x").state.varying == frozenset()
        assert spt.pvary(w, "x").state.varying == {"x"}
        assert spt.varying(torch.ones(2), "x").state.varying == {"x"}
        assert torch.nn.functional.linear(x, torch.eye(2), torch.ones(2)).state.varying == {"x"}
        assert torch.where(x > 0, w, 0.0).state.varying == {"x"}
        assert type(x.shape) is torch.Size
        y = torch.zeros(2)
        y = y + x
        assert y.state.varying == {"x"}
        return x

    typed(body, torch.arange(4.0), torch.ones(2), specs=(P("x"), P()))


def test_writes_that_would_lose_a_state():
    def plainly(x):
        y = torch.zeros(2)
        y += x
        return y

    def indexed(x):
        y = torch.zeros(2)
        y[0] = x[0]
        return y

    def out(x):
        y = torch.zeros(2)
        torch.add(x, 1, out=y)
        return y

    def copied(x):
        y = torch.zeros(2)
        y.copy_(x)
        return y

    for body in (plainly, indexed, out, copied):
        with pytest.raises(MutationError) as caught:
            typed(body, torch.ones(4))
        assert "spt.varying" in parts(caught)

    def declared(x):
        y = spt.varying(torch.zeros(2), "x")
        y += x
        y[0] = x[1]
        return y

    assert typed(declared, torch.arange(4.0)).tolist() == [1, 1, 3, 3]

    def invariant(x, w):
        v = w.clone()
        v += x
        assert v.state.varying == {"x"}
        return v

    assert typed(invariant, torch.arange(4.0), torch.ones(2), specs=(P("x"), P())).tolist() == [1, 2, 3, 4]


def test_copies_pickles_and_text_of_tensors():
    def body(x):
        y = copy.deepcopy(x)
        assert isinstance(y, spt.Tensor)
        assert y.state is x.state
        assert y.data_ptr() != x.data_ptr()
        z = pickle.loads(pickle.dumps(x))
        assert type(z) is torch.Tensor
        assert torch.equal(z, spt.block(x))
        file = io.BytesIO()
        torch.save({"x": x}, file)
        file.seek(0)
        assert torch.equal(torch.load(file)["x"], spt.block(x))
        assert "state=" in repr(x)
        assert "Varying(x)" in repr(x)
        assert f"{x}" == repr(x)
        return y

    assert torch.equal(typed(body, torch.arange(4.0)), torch.arange(4.0))


def test_parameters_and_optimisers_of_varying_tensors():
    """A shard of a parameter stays Varying under an optimiser: workers go their own ways, and no sum is taken."""

    def body(x):
        shard = torch.nn.Parameter(spt.block(x).clone())
        assert isinstance(shard, torch.nn.Parameter)
        steps = torch.optim.Adam([shard], lr=0.1)
        for _ in range(3):
            steps.zero_grad()
            w = spt.varying(shard, "x")
            loss = spt.psum((w * w).sum(), "x")
            loss.backward()
            steps.step()
        return spt.varying(shard.detach(), "x")

    x = torch.arange(1.0, 7.0, dtype=torch.float64)
    got = typed(body, x, n=3)
    w = torch.nn.Parameter(x.clone())
    steps = torch.optim.Adam([w], lr=0.1)
    for _ in range(3):
        steps.zero_grad()
        (w * w).sum().backward()
        steps.step()
    same(got, w.detach())


def test_a_parameter_of_a_tensor_with_state():
    def body(x):
        p = torch.nn.Parameter(x.clone())
        assert p.requires_grad
        loss = spt.psum((p * p).sum(), "x")
        loss.backward()
        return p.grad

    x = torch.arange(4.0)
    assert torch.equal(typed(body, x), 2 * x)


def test_bare_tensors_are_not_summed():
    with pytest.raises(StateError) as caught:
        typed(lambda x: spt.psum(torch.ones(2), "x"), torch.ones(4), out=P())
    assert "pvary" in parts(caught)


@each_size
def test_a_shared_parameter_owes_one_sum(n):
    """However often it is used; a training step applies as many sums as it has parameters, and one for the loss."""
    mesh = Mesh(x=n)

    drawn = torch.nn.Linear(3, 3).double()

    def body(x):
        lin = copy.deepcopy(drawn)
        y = lin(torch.tanh(lin(x)))
        loss = spt.psum((y * y).sum(), "x")
        loss.backward()
        return lin.weight.grad, lin.bias.grad

    x = normal(8, 3)
    with spmd.ledger() as log:
        w, b = spt.map(body, P("x"), P(), mesh=mesh)(x)
    assert log.operators["Sum"] == 3
    lin = copy.deepcopy(drawn)
    y = lin(torch.tanh(lin(x)))
    (y * y).sum().backward()
    same(w, lin.weight.grad)
    same(b, lin.bias.grad)


def test_gradients_accumulate_in_a_body():
    def body(x):
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        for half in x.chunk(2):
            (spt.psum((half @ w).pow(2).sum(), "x")).backward()
        return w.grad

    x = normal(8, 3)
    got = typed(body, x, out=P())
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (x @ w).pow(2).sum().backward()
    same(got, w.grad)


@each_size
@pytest.mark.parametrize("hooks", [False, True], ids=["", "hooks"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_meet_the_states_of_forward(n, reentrant, hooks):
    """A checkpointed function runs once more in backward: what it closes over is varied there, and summed, too."""
    x = normal(7)
    w = normal(7, seed=1).requires_grad_()
    c = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    y = torch.tanh(c * x) * w
    (y - (y * y).sum()).square().sum().backward()
    result = {}

    def f(x, w):
        bias = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)

        def part(x, w):
            y = torch.tanh(bias * x) * w
            return y - spmd.sum(y * y, "x")

        w = w.detach().requires_grad_()
        with saved_tensors_hooks(torch.Tensor.detach, lambda x: x) if hooks else nullcontext():
            y = checkpoint(part, x, w * 1, use_reentrant=reentrant)
        assert y.state.varying == {"x"}
        spmd.sum(y * y, "x").backward()
        result[spmd.worker_index("x")] = bias.grad, w.grad

    spt.map(f, P("x"), None, mesh=Mesh(x=n))(x, w.detach())
    for bias, _ in result.values():
        same(bias, c.grad)
    same(torch.cat([spt.block(g) for _, g in [result[k] for k in range(n)]]), w.grad)


def test_a_parameter_changed_in_place_is_varied_again():
    def body(x):
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        losses = []
        for _ in range(3):
            loss = spt.psum((x @ w).pow(2).sum(), "x")
            (g,) = torch.autograd.grad(loss, w)
            with torch.no_grad():
                w -= 0.01 * g
            losses.append(loss.detach())
        return torch.stack(losses)

    x = normal(8, 3)
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    want = []
    for _ in range(3):
        loss = (x @ w).pow(2).sum()
        (g,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w -= 0.01 * g
        want.append(loss.detach())
    same(typed(body, x, out=P()), torch.stack(want))


def test_a_map_of_a_map_is_a_map_in_a_body():
    mesh = Mesh(x=2)
    inner = spt.map(lambda x: x, P(), P(), mesh=mesh)
    for outer in (spt.map(inner, P("x"), P("x"), mesh=mesh), spmd.map(spmd.map(abs, P(), P(), mesh=mesh), P(), P())):
        assert outer.in_specs in (P("x"), P())
        with pytest.raises(MeshError, match="inside a body"), mesh:
            outer(torch.ones(4) if outer.in_specs == P("x") else np.ones(4))


def test_functional_transforms_in_bodies_with_states():
    def body(x, w):
        def loss(w):
            return spt.mean((x @ (w * 1.0)) ** 2, "x")

        g = torch.func.grad(loss)(w)
        assert not getattr(g, "state", spmd.P and w.state).varying
        own = torch.func.grad(lambda x: (x * x).sum())(x)
        assert own.state.varying == {"x"}
        _, pull = torch.func.vjp(lambda v: spt.all_gather(v, "x", tiled=True), x)
        back = pull(spt.all_gather(x, "x", tiled=True))[0]
        rows = torch.func.vmap(lambda row: spt.psum(row * w, "x"))(x)
        return g, own, back, rows

    x, w = normal(4, 3), normal(3, seed=1)
    g, own, back, rows = typed(body, x, w, specs=(P("x"), P()), out=(P(), P("x"), P("x"), P()))
    same(g, 2 * x.T @ (x @ w) / 4)
    same(own, 2 * x)
    same(back, 2 * x)
    same(rows, (x[:2] + x[2:]) * w)


# Memory


def serial(case, mesh, rng) -> None:
    """What workers write to arguments and results, all at once after a collective, reaches nobody else.

    A result of Vary, which moves nothing, is a view of its own worker's argument, as torch's views are.
    """
    at = placed(case, mesh)
    everyone = tuple(mesh.axes)

    def own(x, value):
        """Write to it, and see that this is what it holds when all have written."""
        x.fill_(value)
        spt.psum(1, everyone)
        assert (x == value).all()
        spt.psum(1, everyone)

    def body(x):
        mine = spt.worker_index(everyone) + 1
        for trial in range(5):
            block = at.block(x).clone()
            y = at.operator(block)
            expected = y.clone()
            if type(at.operator) is not Vary:
                own(block, 10 * trial + mine)
                assert torch.equal(y, expected)
            own(y, -100 - mine)
            leaf = at.block(x).clone().requires_grad_()
            z = at.operator(leaf)
            cotangent = torch.ones_like(z) * trial
            (g,) = torch.autograd.grad(z, leaf, cotangent)
            expected = g.clone()
            if type(at.operator.H) is not Vary:
                own(cotangent, mine)
                assert torch.equal(g, expected)
            own(g, -mine)
            with torch.no_grad():
                own(leaf, mine)

    spt.map(body, at.source, None, mesh=mesh, check=False)(torch.from_numpy(rng.standard_normal(at.size)))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nobody_else_has_the_memory_of_a_result(kind):
    axes = ({"x": 3}, {"x": 2, "y": 2})[KINDS.index(kind) % 2]
    each(serial, few(kind, axes, 3), axes)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_nobody_else_has_the_memory_of_a_result_everywhere(kind):
    for axes in ({"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}):
        each(serial, few(kind, axes, 20), axes, 5)


# Processes


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.full)])
def test_processes_print_what_one_process_does(n):
    program = ROOT / "tests" / "mpi_programs" / "torch_training.py"
    serial = run_python(program, str(n), timeout=120)
    assert serial.returncode == 0, serial
    ended = launch(program, str(n), n=n, timeout=120)
    assert ended.returncode == 0, ended
    assert len(serial.stdout.splitlines()) > 10
    assert ended.stdout.splitlines() == serial.stdout.splitlines()
