"""Tensors that stay on their workers between maps: what is done with them is what is done with wholes."""

from __future__ import annotations

import copy
import pickle
import sys

import pytest
from launch import ROOT, TORCHRUN, launch, mpiexec

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

import spmd  # noqa: E402
from bridge.torch import sharded_cases as cases  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError, MeshError, SpecError, StateError  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")

PLACES = [
    ({"x": 1}, (3, 4), P("x")),
    ({"x": 2}, (4, 3), P(None, "x")),
    ({"x": 3}, (7, 2), P("x")),
    ({"x": 2, "y": 2}, (5, 3), P("x")),
    ({"x": 2, "y": 3}, (5, 2), P("y", "x")),
    ({"x": 5}, (3, 4), P("x")),
    ({"x": 2, "y": 4}, (9, 3), P(("x", "y"))),
]
OVER = pytest.mark.parametrize(("axes", "shape", "spec"), PLACES, ids=[f"{a}{s}{p}" for a, s, p in PLACES])
SCHEDULERS = pytest.mark.parametrize("scheduler", ["threads", "lockstep"])


@OVER
@pytest.mark.parametrize("name", cases.ELEMENTWISE)
def test_elementwise_functions(name, axes, shape, spec):
    with spmd.Mesh(**axes):
        cases.check_elementwise(name, shape, spec)


@OVER
@pytest.mark.parametrize("name", cases.REDUCTIONS)
def test_reductions(name, axes, shape, spec):
    with spmd.Mesh(**axes):
        cases.check_reduction(name, shape, spec)


@OVER
@SCHEDULERS
def test_in_place(axes, shape, spec, scheduler):
    with spmd.Mesh(**axes, scheduler=scheduler):
        cases.check_in_place(shape, spec)


@SCHEDULERS
def test_lists_of_tensors_that_lie_in_several_ways(scheduler):
    with spmd.Mesh(x=2, y=3, scheduler=scheduler):
        specs = [P("x"), P("y"), P(), P(None, "y"), P("y", "x"), P("x")]
        cases.check_lists([(5, 2), (4,), (3,), (3, 7), (2, 3), (1, 2)], specs)


MAPS = [
    ({"x": 1}, P("x"), P("x")),
    ({"x": 3}, P("x"), P("x")),
    ({"x": 3}, P("x"), P(None, "x")),
    ({"x": 2, "y": 2}, P("x"), P("x")),
    ({"x": 2, "y": 2}, P("x"), P("y", "x")),
    ({"x": 7}, P("x"), P("x")),
    ({"x": 2, "y": 4}, P(("x", "y")), P(None, "y")),
]


@pytest.mark.parametrize(("axes", "spec", "in_spec"), MAPS, ids=[f"{a}{s}{p}" for a, s, p in MAPS])
def test_maps(axes, spec, in_spec):
    with spmd.Mesh(**axes):
        cases.check_map(5, 4, spec, in_spec)


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_training_keeps_shards(n, monkeypatch):
    with spmd.Mesh(x=n, scheduler="threads"):
        cases.check_training(monkeypatch)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch(name):
    with spmd.Mesh(x=3):
        cases.check_optimizer(OPTIMIZERS[name])


# Putting, gathering, copies


@pytest.mark.parametrize("scheduler", ["threads", "lockstep"])
def test_put_lays_out_whole_tensors_arrays_and_sharded_ones(scheduler):
    a = cases.numbers(7, 3)
    with spmd.Mesh(x=3, scheduler=scheduler) as mesh:
        x = spt.put(a, P("x"))
        assert x.shape == (7, 3)
        assert x.dtype == torch.float64
        assert x.mesh is mesh
        assert x.spec == P("x", None)
        assert [tuple(b.shape) for b in x.blocks.values()] == [(3, 3), (2, 3), (2, 3)]
        for y in (x, spt.put(x, P(None, "x")), spt.put(a.numpy(), P("x")), spt.put(spmd.put(a.numpy(), P()), P("x"))):
            assert type(y) is spt.ShardedTensor
            assert torch.equal(y.whole(), a)
            np.testing.assert_array_equal(y.numpy(), a.numpy())
        cuts = spmd.Layout((7, 3), P("x"), {"x": 3}, [(0, 6, 1), (3,)])
        uneven = spt.put(x, cuts)
        assert [len(b) for b in uneven.blocks.values()] == [0, 6, 1]
        assert torch.equal((uneven * 2).whole(), 2 * a)
        assert uneven.sum() == a.sum()
        grid = spmd.Layout.grid((7, 3), (1, 2), {"x": 3}, workers=(2, 0))
        assert torch.equal(spt.put(uneven, grid).whole(), a)
        assert spt.put([a], spmd.Grid((1, 2), workers=(2, 0)))[0].block_layout == grid
        assert (spt.put(a, grid) * 3).sum() == 3 * a.sum()
        assert torch.equal(spt.put(x, P()), a)
        assert type(spt.put(x, P())) is torch.Tensor
        a.zero_()
        assert x.norm() > 0


def test_moves_are_differentiable():
    a, b = cases.numbers(5, 4).requires_grad_(), cases.numbers(5, 4, seed=2)
    with spmd.Mesh(x=2, y=2):
        x = spt.put(a, P("x", "y"))
        assert not x.is_leaf
        z = spt.put(x * x, P(("y", "x")))
        ((z.whole() * b).sum() + (z * z).sum()).backward()
    cases.alike(a.grad, (2 * a * b + 4 * a**3).detach())


def test_copies_share_their_memory():
    with spmd.Mesh(x=2, y=2):
        x = spt.put(cases.numbers(4, 2), P("x"))
        assert x.blocks[0] is x.blocks[1]
        assert x.blocks[0] is not x.blocks[2]
        x += 1  # once for both
        cases.alike(x, cases.numbers(4, 2) + 1, exact=True)
        y = x * 2
        assert y.blocks[0] is y.blocks[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.bool])
def test_dtypes(dtype):
    a = cases.numbers(5, 3).to(dtype)
    with spmd.Mesh(x=2):
        x = spt.put(a, P("x"))
        assert x.dtype == dtype
        assert torch.equal(x.whole(), a)
        assert torch.equal(spt.put(x, P(None, "x")).whole(), a)
        assert torch.equal(x.to(torch.complex64).whole(), a.to(torch.complex64))
        assert torch.equal(spt.map(lambda x: x, P("x"), P("x"))(x).whole(), a)


def test_deepcopy_pickle_and_parameters():
    with spmd.Mesh(x=3) as mesh:
        x = spt.put(cases.numbers(4, 2), P("x")).requires_grad_()
        (x * x).sum().backward()
        y = copy.deepcopy(x)
        cases.lies_as(y, x)
        assert y.requires_grad
        cases.alike(y.grad, x.grad.whole(), exact=True)
        with torch.no_grad():
            y.add_(1)
        cases.alike(x.detach(), cases.numbers(4, 2), exact=True)
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(x.detach())
        assert next(iter(module.parameters())) is module.w
        assert type(module.w) is spt.ShardedTensor
        back = pickle.loads(pickle.dumps(x.detach()))
        assert back.mesh == mesh
        assert torch.equal(back.whole(), x.whole())


def test_text_says_how_it_lies_and_gathers_nothing(monkeypatch):
    with spmd.Mesh(x=3):
        x = spt.put(cases.numbers(4, 2), P("x")).requires_grad_()
        monkeypatch.setattr(cases.sharded, "moved", cases._never)
        text = "ShardedTensor(shape=[4, 2], dtype=float64, spec=P('x', None), blocks={0: [2, 2], 1: [1, 2], 2: [1, 2]}"
        assert repr(x) == f"{text}, requires_grad=True)"
        assert f"{x.detach()}" == str(x.detach()) == f"{text})"


def test_save_and_load(tmp_path):
    with spmd.Mesh(x=3):
        tree = {"w": spt.put(cases.numbers(5, 2), P("x")), "m": spt.put(cases.numbers(2, 4), P(None, "x")), "t": 3}
        spmd.save(tmp_path / "c", tree)
    with spmd.Mesh(x=2, y=2):
        like = {"w": spt.put(torch.zeros(5, 2).double(), P("y", "x")).requires_grad_(), "m": torch.zeros(2, 4).double()}
        loaded = spmd.load(tmp_path / "c", like=like | {"t": 0})
        cases.lies_as(loaded["w"], like["w"])
        assert loaded["w"].requires_grad
        assert loaded["w"].is_leaf
        cases.alike(loaded["w"].detach(), cases.numbers(5, 2), exact=True)
        assert torch.equal(loaded["m"], cases.numbers(2, 4))


def test_a_training_continues_from_its_checkpoint(tmp_path):
    def step(w, optimizer):
        optimizer.zero_grad()
        (w * w).sum().backward()
        optimizer.step()

    with spmd.Mesh(x=3):
        w = spt.put(cases.numbers(5, 2), P("x")).requires_grad_()
        optimizer = torch.optim.Adam([w])
        step(w, optimizer)
        spmd.save(tmp_path / "c", {"w": w, "state": optimizer.state_dict()})
        step(w, optimizer)
        v = spt.put(torch.zeros(5, 2).double(), P("x")).requires_grad_()
        other = torch.optim.Adam([v])
        step(v, other)
        loaded = spmd.load(tmp_path / "c", like={"w": v, "state": other.state_dict()})
        v = loaded["w"]
        other = torch.optim.Adam([v])
        other.load_state_dict(loaded["state"])
        cases.lies_as(other.state[v]["exp_avg"], v)
        step(v, other)
    cases.alike(v.detach(), w.detach().whole(), exact=True)


# Maps


def test_results_stay_split_only_where_an_argument_is():
    a = cases.numbers(4, 2)
    with spmd.Mesh(x=2):
        mapped = spt.map(lambda x, y: (x, y, 2.0), (P("x"), P()), (P("x"), P(), P()))
        assert [type(r) for r in mapped(a, a)] == [torch.Tensor] * 3
        assert [type(r) for r in mapped(spt.put(a, P("x")), a)] == [spt.ShardedTensor, torch.Tensor, torch.Tensor]
        assert type(spt.put(mapped(a, a)[0], P("x"))) is spt.ShardedTensor


def test_an_argument_that_fits_is_not_copied_and_may_not_be_written_to():
    seen = {}

    def look(x):
        seen[spmd.worker_index("x")] = x.data_ptr()
        return x * 1

    with spmd.Mesh(x=2):
        x = spt.put(cases.numbers(4, 2), P("x"))
        with spmd.ledger() as log:
            y = spt.map(look, P("x"), P("x"), check=False)(x)
        assert seen == {w: b.data_ptr() for w, b in x.blocks.items()}
        assert log.messages == 0
        assert all(y.blocks[w].data_ptr() != x.blocks[w].data_ptr() for w in x.blocks)
        with pytest.raises(StateError, match="leaves its arguments as they are"):
            spt.map(lambda x: x.add_(1), P("x"), P("x"), check=False)(x)


def test_results_of_which_no_gradient_comes_count_as_zeros():
    with spmd.Mesh(x=3):
        x = spt.put(cases.numbers(4, 2), P("x")).requires_grad_()
        z, total = spt.map(lambda x: (x * x, spt.psum(x.sum(), "x")), P("x"), (P("x"), P()))(x)
        (g,) = torch.autograd.grad(total, [x], retain_graph=True)
        cases.alike(g, torch.ones(4, 2).double(), exact=True)
        (g,) = torch.autograd.grad(z.sum(), [x])
        cases.alike(g, 2 * cases.numbers(4, 2), exact=True)


def test_unreduced_results_are_summed():
    with spmd.Mesh(x=2, y=2):
        x = spt.put(cases.numbers(4, 3), P("x", "y"))
        rows = spt.map(lambda x: x.sum(1), P("x", "y"), P("x", unreduced={"y"}), check=False)(x)
        cases.lies_as(rows, spt.put(cases.numbers(4), P("x")))
        cases.alike(rows, cases.numbers(4, 3).sum(1), exact=True)


@pytest.mark.parametrize(("spec", "in_spec"), [(P("x"), P("x")), (P("x"), P(None, "x"))])
def test_transformations_of_functions_keep_shards(spec, in_spec):
    a = cases.numbers(5, 4)
    with spmd.Mesh(x=3):
        x = spt.put(a, spec)
        cubes = spt.map(lambda x: spt.psum((x**3).sum(), "x"), in_spec, P())
        g = torch.func.grad(cubes)(x)
        second = torch.func.grad(lambda x: (torch.func.grad(cubes)(x) ** 2).sum())(x)
    cases.lies_as(g, x)
    cases.alike(g, 3 * a**2, exact=True)
    cases.lies_as(second, x)
    cases.alike(second, 36 * a**3, exact=True)


@pytest.mark.parametrize("spec", [P("x"), P(None, "x")])
def test_gradients_of_plain_tensors_beside_sharded_ones_are_plain(spec):
    a, b = cases.numbers(5, 4), cases.numbers(4, seed=2).requires_grad_()
    with spmd.Mesh(x=3):
        x = spt.put(a, spec).requires_grad_()
        (x * b * b).sum().backward()
        g = torch.autograd.grad((x * b).square().sum(), [b])[0]
    assert type(b.grad) is type(g) is torch.Tensor
    cases.alike(b.grad, (2 * b * a.sum(0)).detach())
    cases.alike(g, (2 * b * (a * a).sum(0)).detach())


def test_comparisons_of_wholes():
    a = cases.numbers(5, 4)
    with spmd.Mesh(x=3):
        x, y = spt.put(a, P("x")), spt.put(a + 1, P("x"))
        assert torch.equal(x, y - 1)
        assert not torch.equal(x, y)
        assert torch.allclose(x, a)
        assert (x < y).all()
        assert x.max() == a.max()
        assert float(spt.put(torch.ones(1, 1), P("x"))) == 1.0


# Mistakes

ROWS = {
    "another layout": (
        lambda x, y: x + y,
        LayoutError,
        "torch's add",
        "spt.put(x, spec) for another layout",
    ),
    "another layout in a list": (
        lambda x, y: torch._foreach_add([x], [y]),
        LayoutError,
        "torch's _foreach_add",
        "tensors that lie alike",
    ),
    "a product": (lambda x, y: x @ y.T, LayoutError, "torch's mm", "spt.map for a function of blocks"),
    "sorting along a split dimension": (lambda x, y: x.sort(0), LayoutError, "torch's sort", "x.whole()"),
    "an index into a split dimension": (lambda x, y: x[0], LayoutError, "torch's select", "x.whole()"),
    "joining": (lambda x, y: torch.cat([x, x]), LayoutError, "torch's cat", "tensors that lie alike"),
    "random numbers": (lambda x, y: x.normal_(), LayoutError, "torch's normal_", "spt.put(torch.randn(shape), spec)"),
    "dropout": (lambda x, y: torch.dropout(x, 0.5, True), LayoutError, "do not depend on the mesh", "draw in a body"),
    "another device": (lambda x, y: x.to("meta"), LayoutError, "torch's _to_copy", "tensors on the mesh"),
    "a list": (lambda x, y: x.tolist(), LayoutError, "x.tolist", "one piece of memory"),
    "np.asarray": (lambda x, y: np.asarray(x), LayoutError, "x.__array__", "x.whole() for the whole (collective)"),
    "x.data": (lambda x, y: setattr(x, "data", y), LayoutError, "x.data = y", "x.copy_(y)"),
    "a tensor that is written to": (
        lambda x, y: torch.zeros(4, 2).double().add_(x),
        LayoutError,
        "torch's add_",
        "tensors that lie alike",
    ),
    "another mesh": (
        lambda x, y: x + spt.put(y.whole(), P("x"), spmd.Mesh(x=4)),
        MeshError,
        "need",
        "spt.put(x.whole(), spec, mesh)",
    ),
    "a map on another mesh": (
        lambda x, y: spt.map(lambda x: x, P("x"), P("x"), mesh=spmd.Mesh(x=4))(x),
        MeshError,
        "argument x",
        "or x.whole()",
    ),
    "put on another mesh": (lambda x, y: spt.put(x, P("x"), spmd.Mesh(x=4)), MeshError, "argument mesh", "x.whole()"),
    "a spec that does not fit": (lambda x, y: spt.put(x, P("x", None, None)), SpecError, "spt.put", "shorten"),
    "unreduced axes": (lambda x, y: spt.put(x, P(unreduced={"x"})), LayoutError, "spt.put", "no unreduced axes"),
    "no mesh": (lambda x, y: spt.put(x.whole(), P("x")), MeshError, "spt.put", "with spmd.Mesh(x=4)"),
    "in a body by its closure": (
        lambda x, y: spt.map(lambda y: y + x, P("x"), P("x"), mesh=x.mesh)(y),
        LayoutError,
        "a sharded tensor float64[4, 2]",
        "pass it to the map as an argument",
    ),
    "returned from a body": (
        lambda x, y: spt.map(lambda y: x, P("x"), P("x"), mesh=x.mesh)(y),
        LayoutError,
        "a sharded tensor",
        "pass it to the map as an argument",
    ),
    "a view of another shape": (
        lambda x, y: spt.map(lambda y: y, P(), P(), mesh=x.mesh)(y.reshape(-1)),
        LayoutError,
        "a view of shape [8]",
        "x.reshape(...)",
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_mistakes(name):
    f, kind, *words = ROWS[name]
    with spmd.Mesh(x=2):
        x, y = spt.put(cases.numbers(4, 2), P("x")), spt.put(cases.numbers(4, 2), P(None, "x"))
    with pytest.raises(kind) as caught:
        f(x, y)
    for word in words:
        assert word in str(caught.value) or word == "need", str(caught.value)


# Processes

PROGRAM = ROOT / "tests" / "mpi_programs" / "torch_between_steps.py"
MPI = [pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")]


@pytest.mark.parametrize(
    "python", [pytest.param(sys.executable, id="mpiexec", marks=MPI), pytest.param(TORCHRUN, id="torchrun")]
)
def test_the_same_in_processes(python, tmp_path):
    ended = launch(PROGRAM, str(tmp_path), n=3, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("a process is through") == 3, str(ended)
