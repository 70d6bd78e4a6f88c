"""Movements as modules: against a serial oracle in exact integers, with layouts known and learnt, also compiled."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import Layout, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.layouts import broadcast_grid, grid_of  # noqa: E402
from spmd.errors import LayoutError, MeshError, MismatchError, StateError  # noqa: E402
from spmd.grid import layout_of_shapes  # noqa: E402

Grid = spt.Grid
MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}]
SHAPES = [(7, 5), (2, 6), (1, 3)]  # uneven; empty blocks on 3 and 4 workers


class Case(NamedTuple):
    """A module, and the layouts that it moves between; its arguments may be without shape."""

    name: str
    module: nn.Module
    src: Layout
    dst: Layout


def mesh_of(axes: dict[str, int]) -> spmd.Mesh:
    return spmd.Mesh(**axes)


def cases(axes: dict[str, int], shape: tuple[int, int]) -> list[Case]:
    """Movements between layouts on a mesh: each given in full, and as specs or grids alone."""
    n = int(np.prod([*axes.values()]))
    names = tuple(axes)
    rows, columns = Layout(shape, P(names), axes), Layout(shape, P(None, names), axes)
    whole = Layout(shape, P(), axes)
    some = tuple(range(n))[::-1][: max(1, n - 1)]  # all but worker 0, backwards
    on_some = Layout.grid(shape, (len(some), 1), axes, some)
    corner = Layout.grid(shape, (1, 1), axes, (n - 1,))
    everywhere = Layout.grid(shape, (1, 1, n), axes)
    every = [
        Case("rows-columns", spt.nn.Repartition(rows, columns), rows, columns),
        Case("rows-columns-specs", spt.nn.Repartition(P(names), P(None, names)), rows, columns),
        Case("rows-whole-specs", spt.nn.Repartition(P(names), P()), rows, whole),
        Case("whole-rows", spt.nn.Repartition(whole, rows), whole, rows),
        Case("rows-some", spt.nn.Repartition(P(names), Grid((len(some), 1), some)), rows, on_some),
        Case("some-columns", spt.nn.Repartition(Grid((len(some), 1), some), P(None, names)), on_some, columns),
        Case("some-corner", spt.nn.Repartition(Grid((len(some), 1), some), Grid((1,), (n - 1,))), on_some, corner),
        Case("spec-layout", spt.nn.Repartition(P(names), corner), rows, corner),
        Case("broadcast", spt.nn.Broadcast(Grid((1, 1), (n - 1,)), Grid((n, 1))), corner, everywhere),
        Case("broadcast-layouts", spt.nn.Broadcast(corner, everywhere), corner, everywhere),
        Case("broadcast-layout-grid", spt.nn.Broadcast(corner, Grid((n,))), corner, everywhere),
        Case("sum-reduce", spt.nn.SumReduce(Grid((1, n)), Grid((1, 1), (n - 1,))), everywhere, corner),
        Case("sum-reduce-layouts", spt.nn.SumReduce(everywhere, corner), everywhere, corner),
        Case("sum-reduce-grid-layout", spt.nn.SumReduce(Grid((n, 1)), corner), everywhere, corner),
        Case(
            "broadcast-specs",
            spt.nn.Broadcast(P(), P(names)),
            whole,
            Layout(shape, P(), axes, copies="varying"),
        ),
        Case(
            "sum-reduce-specs",
            spt.nn.SumReduce(P(None, names), P()),
            Layout(shape, P(), axes, copies="varying"),
            whole,
        ),
    ]
    if len(axes) == 2:
        line = Layout.grid(shape, (1, 2), axes, (3, 0))
        square = Layout.grid(shape, (1, 2, 2), axes, (2, 0, 3, 1))
        over_x = Layout(shape, P("x"), {"x": 2})
        every += [
            Case("line-square", spt.nn.Broadcast(Grid((1, 2), (3, 0)), Grid((2, 2), (2, 3, 0, 1))), line, square),
            Case("square-line", spt.nn.SumReduce(Grid((2, 2), (2, 3, 0, 1)), Grid((2,), (3, 0))), square, line),
            Case("one-axis", spt.nn.Repartition(P("x"), P(None, "x")), over_x, Layout(shape, P(None, "x"), {"x": 2})),
            Case(
                "grid-of-an-axis",
                spt.nn.Repartition(Grid((2,), axes="y"), Grid((1,), (1,), axes="y")),
                Layout.grid(shape, (1, 2), {"y": 2}),
                Layout.grid(shape, (1, 1), {"y": 2}, (1,)),
            ),
        ]
    return every


ALL = [
    pytest.param(axes, shape, k, id=f"{'x'.join(map(str, axes.values()))}-{shape[0]}-{case.name}")
    for axes in MESHES
    for shape in SHAPES
    for k, case in enumerate(cases(axes, shape))
]


def place(mesh: spmd.Mesh, layout: Layout, worker: int) -> tuple[int, int]:
    """The worker's number in a layout over some axes of the mesh, and which of the groups along them it is in."""
    group = mesh.group(worker, tuple(layout.axes))
    return group.index, min(group.members)


def blocks(mesh: spmd.Mesh, layout: Layout, rng: np.random.Generator) -> dict[int, np.ndarray]:
    """Random integers on every worker, another block each; the same ones where a layout says that copies are."""
    result: dict[Any, np.ndarray] = {}
    out = {}
    for w in range(mesh.size):
        k, group = place(mesh, layout, w)
        key = group, layout.owners[k]
        out[w] = result.setdefault(key, rng.integers(-9, 10, layout.block_shape(k)).astype(float))
    return out


def moved(mesh: spmd.Mesh, src: Layout, dst: Layout, x: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """The oracle: in each group the whole of what counts, and the part of it that each gets."""
    whole: dict[int, np.ndarray] = {}
    for w, block in x.items():
        k, group = place(mesh, src, w)
        total = whole.setdefault(group, np.zeros(src.shape))
        if src.owners[k] == k:
            total[src.slices(k)] += block
    return {w: whole[place(mesh, dst, w)[1]][dst.slices(place(mesh, dst, w)[0])] for w in x}


def run(mesh: spmd.Mesh, check: bool, module: nn.Module, src: Layout, dst: Layout, x: dict, g: dict) -> dict:
    """What the module gives each worker, and the gradient of its x for the cotangent g."""
    result = {}

    def main():
        w = spmd.mesh.here("a test").index
        leaf = torch.tensor(x[w], requires_grad=True)
        y = module(spt.varying(leaf, tuple(src.varying)) if src.varying else leaf)
        if check:
            assert y.state.varying == dst.varying
        spt.block(y)
        y.backward(torch.tensor(g[w]))
        result[w] = spt.block(y).numpy(), leaf.grad.numpy()

    spt.map(main, (), None, mesh=mesh, check=check)()
    return result


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("axes", "shape", "k"), ALL)
def test_a_movement_and_its_gradient_are_those_of_the_oracle(axes, shape, k, check):
    _, module, src, dst = cases(axes, shape)[k]
    mesh, rng = mesh_of(axes), np.random.default_rng(k)
    x, g = blocks(mesh, src, rng), blocks(mesh, dst, rng)
    forward, backward = moved(mesh, src, dst, x), moved(mesh, dst, src, g)
    result = run(mesh, check, module, src, dst, x, g)
    for w in range(mesh.size):
        np.testing.assert_array_equal(result[w][0], forward[w])
        np.testing.assert_array_equal(result[w][1], backward[w])


def test_blocks_of_other_lengths_than_balanced_ones_are_learnt():
    mesh, rng = spmd.Mesh(x=3), np.random.default_rng(0)
    for cuts in ((0, 5, 2), (4, 0, 1), (1, 1, 1)):
        shape = (sum(cuts), 4)
        src = Layout(shape, P("x"), mesh.axes, [cuts, None])
        grid = Layout.grid(shape, (3, 1), mesh.axes, (2, 0, 1), [cuts, None])
        for module, lies in (
            (spt.nn.Repartition(P("x"), P(None, "x")), src),
            (spt.nn.Repartition(Grid((3, 1), (2, 0, 1)), P(None, "x")), grid),
        ):
            dst = Layout(shape, P(None, "x"), mesh.axes)
            x, g = blocks(mesh, lies, rng), blocks(mesh, dst, rng)
            result = run(mesh, True, module, lies, dst, x, g)
            forward, backward = moved(mesh, lies, dst, x), moved(mesh, dst, lies, g)
            for w in range(3):
                np.testing.assert_array_equal(result[w][0], forward[w])
                np.testing.assert_array_equal(result[w][1], backward[w])


def test_one_module_serves_tensors_of_other_shapes_and_dimensions_call_after_call():
    """Worker 0 holds 3 rows of 5 and of 6: it cannot know by itself that the other's block has grown."""
    mesh = spmd.Mesh(x=2)
    module = spt.nn.Repartition(P("x"), P(None, "x"))
    for n in (5, 6, 5):
        for rest in ((4,), (3, 2)):
            x = torch.arange(float(n * 4 * (len(rest) * 2 - 1))).reshape(n, -1)[:, : np.prod(rest)].reshape(n, *rest)
            y = spt.map(module, P("x"), P(None, "x"), mesh=mesh)(x)
            assert torch.equal(y, x)


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("check", [True, False])
def test_modules_of_axes_are_their_functions(axes, check):
    mesh, rng = mesh_of(axes), np.random.default_rng(1)
    names = tuple(axes)
    x, w = (torch.tensor(rng.integers(-9, 10, (7, 5, 3)).astype(float)) for _ in range(2))
    rows = P(None, names)

    def through(f):
        def body(x, w):
            y = f(x)
            return y * spt.pvary(w, names) if f is gather else y

        return body

    gather = spt.nn.AllGather(names, 1)
    x.requires_grad_()
    y = spt.map(lambda a: spt.nn.AllGather(names, -2, to="invariant")(a), rows, P(), mesh=mesh, check=check)(x)
    (gx,) = torch.autograd.grad(y, x, w)
    assert torch.equal(y, x)
    assert torch.equal(gx, w)
    y = spt.map(lambda a: spt.nn.ReduceScatter(names, 1)(gather(a)), rows, rows, mesh=mesh, check=check)(x)
    (gx,) = torch.autograd.grad(y, x, w)
    assert torch.equal(y, mesh.size * x)
    assert torch.equal(gx, mesh.size * w)
    y = spt.map(lambda a: spt.nn.AllSumReduce(names)(a.sum(1)), rows, P(), mesh=mesh, check=check)(x)
    (gx,) = torch.autograd.grad(y, x, w[:, 0])
    assert torch.equal(y, x.sum(1))
    assert torch.equal(gx, w[:, :1].expand_as(x))


def test_an_all_sum_reduce_to_varying_is_its_own_adjoint():
    mesh = spmd.Mesh(x=3)
    x = torch.tensor([1.0, 2.0, 4.0])
    for check in (True, False):
        result = {}

        def main(check=check, result=result):
            k = spmd.worker_index("x")
            leaf = x[k].clone().requires_grad_()
            y = spt.nn.AllSumReduce("x", to="varying")(spt.varying(leaf, "x"))
            if check:
                assert y.state.varying == {"x"}
            y.backward(torch.tensor(10.0**k))
            result[k] = float(spt.block(y)), float(leaf.grad)

        spt.map(main, (), None, mesh=mesh, check=check)()
        assert set(result.values()) == {(7.0, 111.0)}


def test_equal_blocks_are_stacked_and_unstacked():
    mesh = spmd.Mesh(x=3)
    x = torch.arange(6.0).reshape(3, 2)

    def body(x):
        y = spt.nn.AllGather("x", 1, tiled=False)(x[0])
        return spt.nn.ReduceScatter("x", -1, tiled=False)(y)[None]

    assert torch.equal(spt.map(body, P("x"), P("x"), mesh=mesh)(x), 3 * x)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("boundary", ["none", "zero", "periodic", "reflect", "edge"])
def test_a_halo_exchange_is_its_function_and_takes_any_batch(n, boundary):
    mesh = spmd.Mesh(x=n)
    rng = np.random.default_rng(n)
    module = spt.nn.HaloExchange(P(None, "x"), [0, (1, 2)], boundary)
    for batch in (1, 4):
        x = torch.tensor(rng.integers(-9, 10, (batch, 11)).astype(float), requires_grad=True)
        outs = []
        for f in (module, lambda x: spt.halo_exchange(x, P(None, "x"), (0, (1, 2)), boundary)):
            y = spt.map(f, P(None, "x"), P(None, "x"), mesh=mesh)(x)
            outs.append((y, *torch.autograd.grad(y, x, y.detach() + 1)))
        assert torch.equal(outs[0][0], outs[1][0])
        assert torch.equal(outs[0][1], outs[1][1])


@pytest.mark.parametrize("axes", [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"), [(3, 1, 1, 1), (5, 2, 0, 1), (2, 2, 0, 1), (3, 1, 2, 2)]
)
def test_a_convolution_on_the_window_of_its_kernel_is_the_serial_one(axes, kernel, stride, padding, dilation):
    mesh = mesh_of(axes)
    spec = P(None, None, "x", "y" if "y" in axes else None)
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, kernel, stride, 0, dilation, dtype=torch.float64)
    serial = copy.deepcopy(conv)
    serial.padding = (padding, padding)
    halo = spt.nn.HaloExchange.of_window(
        spec, (None, None, kernel, kernel), stride=stride, padding=padding, dilation=dilation
    )
    net = nn.Sequential(halo, conv)
    for shape in ((2, 2, 17, 11), (1, 2, 12, 14)):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        y = spt.map(net, spec, spec, mesh=mesh)(x)
        z = serial(x)
        assert torch.allclose(y, z, rtol=0, atol=1e-12)
        g = torch.randn_like(z)
        ours = torch.autograd.grad(y, (x, *conv.parameters()), g)
        theirs = torch.autograd.grad(z, (x, *serial.parameters()), g)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-11)
        assert halo.plan(mesh.layout(shape, spec)).target.shape[2:] == z.shape[2:]


def test_widths_may_be_windows():
    mesh = spmd.Mesh(x=3)
    x = torch.arange(20.0).reshape(1, 20)
    windows = spmd.plan_windows(mesh.layout((1, 20), P(None, "x")), (None, 4), stride=2, padding=1)
    window = spmd.plan_window(20, 4, stride=2, padding=1, inputs=3)
    widths = [((0, 0),), window.widths]
    runs = [
        spt.map(m, P(None, "x"), P(None, "x"), mesh=mesh)(x)
        for m in (
            spt.nn.HaloExchange(P(None, "x"), windows, "zero"),
            spt.nn.HaloExchange(P(None, "x"), (0, window), "zero"),
            spt.nn.HaloExchange(P(None, "x"), widths, "zero", shape=(1, 20)),
            spt.nn.HaloExchange.of_window(P(None, "x"), (None, 4), stride=2, padding=1),
        )
    ]
    assert all(torch.equal(runs[0], r) for r in runs[1:])
    assert runs[0].shape[1] == sum(stop - start for start, stop in window.needs)


# Modules among modules

EVERY = [
    spt.nn.Repartition(P("x"), P(None, "x")),
    spt.nn.Repartition(Layout((5, 4), P("x"), {"x": 2}), Layout.grid((5, 4), (1, 1), {"x": 2}, (1,))),
    spt.nn.Broadcast(Layout.grid((3, 4), (1, 1), {"x": 2}, (0,)), Layout.grid((3, 4), (1, 1, 2), {"x": 2})),
    spt.nn.SumReduce(P("x"), P()),
    spt.nn.AllSumReduce("x"),
    spt.nn.AllSumReduce("x", to="varying"),
    spt.nn.AllGather("x"),
    spt.nn.AllGather("x", 1, to="invariant"),
    spt.nn.ReduceScatter("x", 1),
    spt.nn.HaloExchange(P("x"), 1, "periodic"),
    spt.nn.HaloExchange.of_window(P("x"), (3, None), padding=1),
]


@pytest.mark.parametrize("module", EVERY, ids=lambda m: type(m).__name__)
def test_copies_pickles_and_descriptions(module):
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), copy.copy(module)):
        assert type(other) is type(module)
        assert other.extra_repr() == module.extra_repr()
        assert not list(other.parameters())
        assert not other.state_dict()
    assert module.extra_repr() in repr(nn.Sequential(module))
    made = repr(module)
    if not made.startswith("HaloExchange(spec=P('x'), boundary"):
        again = eval(made, {**vars(spt), "P": P, "Layout": Layout, type(module).__name__: type(module)})
        assert again.extra_repr() == module.extra_repr()


def shape_for(module: nn.Module, worker: int) -> tuple[int, int]:
    if isinstance(module, spt.nn.Broadcast):
        return (3, 4) if worker == 0 else (0, 0)
    if isinstance(module, spt.nn.Repartition) or (isinstance(module, spt.nn.AllGather) and module.axis == 0):
        return (3 - worker, 4)
    return 3, 4


@pytest.mark.parametrize("module", EVERY, ids=lambda m: type(m).__name__)
def test_compiled_is_eager(module):
    """In the full graph: values, and gradients, in a body with check=False."""
    torch._dynamo.reset()  # which counts how often it has compiled nn.Sequential
    mesh = spmd.Mesh(x=2)
    net = nn.Sequential(nn.Tanh(), module)
    result = {}

    def main():
        w = spmd.worker_index("x")
        rng = np.random.default_rng(w)
        x = torch.tensor(rng.normal(size=shape_for(module, w)), requires_grad=True)
        results = []
        for f in (net, torch.compile(net, fullgraph=True, backend="aot_eager")):
            y = f(x)
            (g,) = torch.autograd.grad(y, x, torch.full_like(y, 1.5))
            results.append((y.detach(), g))
        result[w] = results

    with torch._dynamo.config.patch(
        capture_dynamic_output_shape_ops=True
    ):  # as docs/how_to/torch.md says of older torch
        spt.map(main, (), None, mesh=mesh, check=False)()
    for (y, g), (cy, cg) in result.values():
        assert torch.equal(y, cy)
        assert torch.equal(g, cg)


def test_compiled_between_layouts_over_some_axes():
    """The shape of the result is that of the worker's place along them, not of its number in the mesh."""
    torch._dynamo.reset()
    mesh = spmd.Mesh(x=2, y=2)
    module = spt.nn.Repartition(Layout((5, 3), P("x"), {"x": 2}), Layout((5, 3), P(None, "x"), {"x": 2}))
    x = torch.arange(15.0).reshape(5, 3)
    compiled = torch.compile(lambda x: 2 * module(x), fullgraph=True, backend="aot_eager")
    y = spt.map(compiled, P("x"), P(None, "x"), mesh=mesh, check=False)(x)
    assert torch.equal(y, 2 * x)


def test_gradients_of_gradients():
    mesh = spmd.Mesh(x=3)
    module = nn.Sequential(
        spt.nn.Repartition(P("x"), P(None, "x")), nn.Tanh(), spt.nn.Repartition(P(None, "x"), P("x"))
    )
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    mapped = spt.map(module, P("x"), P("x"), mesh=mesh)
    assert torch.autograd.gradcheck(mapped, (x,))
    assert torch.autograd.gradgradcheck(mapped, (x,))


# What it costs


def counted(mesh: spmd.Mesh, module: nn.Module, x: torch.Tensor, src: P | Layout, dst: Any) -> Any:
    x = x.clone().requires_grad_()
    with spmd.ledger() as log:
        y = spt.map(module, src, dst, mesh=mesh)(x)
        torch.autograd.grad(y, x, torch.ones_like(y))
    return log


def test_what_is_learnt_costs_a_meeting_and_no_message():
    mesh, x = spmd.Mesh(x=3), torch.randn(7, 6)
    rows, columns = mesh.layout((7, 6), P("x")), mesh.layout((7, 6), P(None, "x"))
    known = counted(mesh, spt.nn.Repartition(rows, columns), x, P("x"), P(None, "x"))
    learnt = counted(mesh, spt.nn.Repartition(P("x"), P(None, "x")), x, P("x"), P(None, "x"))
    assert dict(known.operators) == dict(learnt.operators) == {"Repartition": 1, "Accumulate": 1}
    assert (known.messages, known.bytes) == (learnt.messages, learnt.bytes) == (4, known.bytes)
    assert "shapes" not in known.verbs
    assert learnt.verbs["shapes"] == 1  # not again on the way back


def test_specs_that_broadcast_cost_one_sum():
    mesh, x = spmd.Mesh(x=3), torch.randn(7, 6)
    log = counted(mesh, nn.Sequential(spt.nn.Broadcast(P(), P("x")), spt.nn.SumReduce(P("x"), P())), x, P(), P())
    assert dict(log.operators) == {"Sum": 2}  # of the forward run, and of the cotangent of x
    assert "shapes" not in log.verbs


# Geometry


def test_grids_broadcast_as_arrays_do():
    rng = np.random.default_rng(0)
    for small, large in [((1, 3), (4, 3)), ((3,), (4, 3)), ((4, 1), (4, 3)), ((1,), (2, 3)), ((2, 1, 3), (2, 4, 3))]:
        ndim = max(2, len(small))
        total = int(np.prod(large))
        workers = tuple(rng.permutation(total).tolist())
        counts, holders = broadcast_grid("a test", Grid(small), Grid(large, workers), ndim)
        # Which block each worker has, by NumPy's own broadcasting.
        owned = np.broadcast_to(np.arange(np.prod(small)).reshape(small), large).ravel()
        expected = {w: int(owned[k]) for k, w in enumerate(workers)}
        copies = counts[-1]
        assert {w: k // copies for k, w in enumerate(holders)} == expected
        assert counts[:-1] == (1,) * (ndim - len(small)) + small


def test_a_grid_is_a_layout_without_its_shape():
    axes = {"x": 2, "y": 3}
    grid = Grid((2, 2), [5, 4, 0, 1])
    assert grid.layout((3, 7, 5), axes) == Layout.grid((3, 7, 5), (1, 2, 2), axes, [5, 4, 0, 1])
    assert grid_of(grid.layout((7, 5), axes)) == Grid((2, 2), (5, 4, 0, 1), axes=("x", "y"))
    assert Grid((2,), copies=3).layout((5,), axes) == Layout.grid((5,), (2, 3), axes)
    lies = layout_of_shapes("a test", ((0, 0), (2, 3), (0, 0), (1, 3)), Grid((2, 1), (3, 1)), (("x", 4),))
    assert lies == Layout.grid((3, 3), (2, 1), {"x": 4}, (3, 1), [(1, 2), (3,)])


# Errors


@pytest.mark.parametrize(
    ("module", "shapes", "kind", "words"),
    [
        (
            spt.nn.Repartition(Grid((2, 1)), P("x")),
            [(2, 3), (2, 4), (0, 0)],
            LayoutError,
            "equal lengths in dimension 1",
        ),
        (spt.nn.Repartition(Grid((2, 1)), P("x")), [(2, 3), (2, 3), (1, 3)], LayoutError, r"zeros of shape \[0, 0\]"),
        (spt.nn.Repartition(Grid((2, 1)), P("x")), [(2,), (2,), (0,)], LayoutError, "spmd.Grid: argument dims"),
        (spt.nn.Repartition(Grid((5, 1)), P("x")), [(2, 3)] * 3, LayoutError, "5 different workers of the 3"),
        (spt.nn.Repartition(P("x"), P("x", "y")), [(2, 3)] * 2, ValueError, "axis 'y'"),
        (spt.nn.Repartition(P("x"), Grid((2,), axes="y")), [(2, 3)] * 2, MeshError, "'y'"),
        (spt.nn.Broadcast(Grid((2, 1)), Grid((3, 1))), [(2, 3), (2, 3), (0, 0)], LayoutError, "grids that broadcast"),
        (spt.nn.Broadcast(P("x"), Grid((3, 1))), [(2, 3)] * 3, LayoutError, "two grids, two specs, or two layouts"),
        (spt.nn.Broadcast(P("x"), P(None, "x")), [(2, 3)] * 3, LayoutError, "specs that broadcast"),
        (spt.nn.SumReduce(Grid((3, 1)), Grid((1, 1))), [(2, 3), (2, 3), (1, 3)], LayoutError, "equal lengths"),
        (spt.nn.AllGather("x", 2), [(2, 3)] * 2, LayoutError, "argument axis"),
        (spt.nn.AllGather("z"), [(2, 3)] * 2, MeshError, "axis_name"),
        (spt.nn.ReduceScatter("x", sizes=(1, 2)), [(2, 3)] * 2, LayoutError, "sizes"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_errors_say_what_is_wrong(module, shapes, kind, words):
    mesh = spmd.Mesh(x=len(shapes))

    def main():
        module(spt.varying(torch.ones(shapes[spmd.worker_index("x")]), "x"))

    with pytest.raises(kind, match=words) as caught:
        spt.map(main, (), None, mesh=mesh)()
    assert "mend: " in str(caught.value)


def test_arguments_are_checked_where_a_module_is_made():
    with pytest.raises(LayoutError, match=r"spt\.nn\.Repartition: argument dst"):
        spt.nn.Repartition(P("x"), "x")
    with pytest.raises(LayoutError, match="argument to"):
        spt.nn.AllGather("x", to="everywhere")
    with pytest.raises(LayoutError, match=r"spmd\.Grid"):
        Grid((0, 2))
    with pytest.raises(MeshError, match="outside of any body"):
        spt.nn.AllSumReduce("x")(torch.ones(2))


def test_workers_with_other_modules_are_told_the_line_of_their_own_code():
    mesh = spmd.Mesh(x=2)
    modules = [spt.nn.AllSumReduce("x"), spt.nn.AllGather("x")]

    def main():
        modules[spmd.worker_index("x")](spt.varying(torch.ones(3), "x"))

    with pytest.raises(MismatchError, match=r"test_movements\.py") as caught:
        spt.map(main, (), None, mesh=mesh)()
    assert "spmd/bridge" not in str(caught.value)


def test_what_adds_refuses_one_value():
    mesh = spmd.Mesh(x=2)
    for module in (spt.nn.AllSumReduce("x"), spt.nn.ReduceScatter("x"), spt.nn.SumReduce(P("x"), P())):
        with pytest.raises(StateError, match="does not vary over axis 'x'"):
            spt.map(module, P(), P(), mesh=mesh)(torch.ones(4))
