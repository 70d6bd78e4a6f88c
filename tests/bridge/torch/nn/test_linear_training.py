"""Linear layers in all forms against `nn.Linear`: values, gradients, training, exact adjoints, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from launch import PROGRAMS, launch, mpiexec

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.nn.linear_layers import F64, MESHES, close, column, general, lies, row  # noqa: E402
from spmd import Grid, Layout, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError, MeshError, SpecError  # noqa: E402

pytestmark = pytest.mark.torch

SIZES = (7, 5)
WHERE = [*((axes, SIZES) for axes in MESHES), ({"x": 4}, (2, 3))]  # uneven; fewer features than workers


class Form(NamedTuple):
    """A network of sharded layers: how it is made in a body, the serial one, and how x and y lie for a batch shape."""

    name: str
    make: Callable[[], nn.Module]
    serial: Callable[[], nn.Module]
    x: Any
    y: Any


def forms(axes: dict[str, int], sizes: tuple[int, int]) -> list[Form]:
    """All forms on a mesh, from `sizes[0]` features to `sizes[1]`."""
    n, names = int(np.prod([*axes.values()])), tuple(axes)
    i, o = sizes
    h = i + o
    kw = {"dtype": F64}
    last = len(axes) > 1
    linear = lambda bias=True: nn.Linear(i, o, bias, **kw)
    chain = lambda first, second: nn.Sequential(first, nn.Tanh(), second)
    mlp = lambda: chain(nn.Linear(i, h, **kw), nn.Linear(h, o, **kw))
    rows = max(1, n // 2)
    columns = n // rows
    backwards = tuple(range(n))[::-1][: rows * columns]
    x_on, y_on, w_on = Grid((columns,), backwards[:columns]), Grid((rows,), backwards[-rows:]), Grid((rows, columns))
    cut_w = Layout.grid((o, i), (1, n), axes, backwards if last else None, [(o,), (i, *[0] * (n - 1))])
    one = Grid((1, 1), (n - 1,))
    every = [
        Form("column", lambda: column(names, i, o, gather=True, **kw), linear, P(), P()),
        Form("column-split", lambda: column(names, i, o, **kw), linear, P(), P(None, None, names)),
        Form("row", lambda: row(names, i, o, **kw), linear, P(None, None, names), P()),
        Form("row-no-bias", lambda: row(names, i, o, False, **kw), lambda: linear(False), P(None, None, names), P()),
        Form(
            "pair", lambda: nn.Sequential(column(names, i, h, **kw), nn.Tanh(), row(names, h, o, **kw)), mlp, P(), P()
        ),
        Form(
            "sequence-pair",
            lambda: chain(column(names, i, h, sequence=1, **kw), row(names, h, o, sequence=1, **kw)),
            mlp,
            P(None, names),
            P(None, names),
        ),
        Form("grids", lambda: general(x_on, y_on, w_on, i, o, **kw), linear, x_on, y_on),
        Form("grids-no-bias", lambda: general(x_on, y_on, w_on, i, o, False, **kw), lambda: linear(False), x_on, y_on),
        Form(
            "samples",
            lambda: general(Grid((n, 1, 1)), Grid((n, 1)), Grid((n, 1)), i, o, **kw),
            linear,
            Grid((n, 1, 1)),
            Grid((n, 1)),
        ),
        Form("cuts", lambda: general(one, Grid((n,)), cut_w, i, o, **kw), linear, one, Grid((n,))),
        Form(
            "grids-in-a-row",
            lambda: nn.Sequential(
                general(x_on, Grid((n,)), w_on, i, h, **kw),
                nn.Tanh(),
                general(Grid((n,)), one, Grid((1, n)), h, o, **kw),
            ),
            mlp,
            x_on,
            one,
        ),
        Form(
            "specs",
            lambda: general(P(None, None, names), P(), P(None, names), i, o, **kw),
            linear,
            P(None, None, names),
            P(),
        ),
    ]
    if last:
        every += [
            Form(
                "specs-2d",
                lambda: general(P(None, None, "y"), P(None, None, "x"), P("x", "y"), i, o, **kw),
                linear,
                P(None, None, "y"),
                P(None, None, "x"),
            ),
            Form(
                "specs-data",
                lambda: general(P("y", None, None), P("y", None, "x"), P("x"), i, o, **kw),
                linear,
                P("y"),
                P("y", None, "x"),
            ),
        ]
    return every


ALL = [
    pytest.param(axes, sizes, k, id=f"{'x'.join(map(str, axes.values()))}-{sizes[0]}-{form.name}")
    for axes, sizes in WHERE
    for k, form in enumerate(forms(axes, sizes))
]


def train(module: nn.Module, x: torch.Tensor, loss: Callable, optimiser: Callable, steps: int) -> None:
    """Some steps, after which the gradients of the last are there."""
    opt = optimiser(module.parameters())
    for _ in range(steps):
        opt.zero_grad()
        loss(module(x)).backward()
        opt.step()


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("axes", "sizes", "k"), ALL)
def test_values_gradients_and_training_are_those_of_nn_linear(axes, sizes, k, check):
    form = forms(axes, sizes)[k]
    mesh = spmd.Mesh(**axes)
    rng = np.random.default_rng(k)
    shape = (3, 5, sizes[0])
    x = torch.tensor(rng.normal(size=shape), requires_grad=True)
    t = torch.tensor(rng.normal(size=(3, 5, sizes[1])))
    X, Y = lies(form.x, shape, axes), lies(form.y, t.shape, axes)
    optimiser = OPTIMISERS["adam" if k % 2 else "sgd"]

    torch.manual_seed(k)
    serial = form.serial()
    y = serial(x)
    train(serial, x, lambda y: ((y - t) ** 2).sum(), optimiser, 4)
    result: dict[int, Any] = {}

    def main():
        w = spmd.mesh.here("a test").index
        net = form.make()
        leaf = x.detach()[X.slices(w)].clone().requires_grad_()
        mine = t[Y.slices(w)]
        block = spt.varying(leaf, tuple(X.varying)) if X.varying else leaf
        target = spt.varying(mine, tuple(Y.varying)) if Y.varying else mine
        first = net(block)
        if check:
            assert first.state.varying == Y.varying
        train(net, block, lambda y: ((y - target) ** 2).sum(), optimiser, 4)
        result[w] = spt.block(first), leaf.grad, net.state_dict()

    torch.manual_seed(k)
    spt.map(main, (), None, mesh=mesh, check=check)()
    for w in range(mesh.size):
        first, gx, state = result[w]
        close(first, y.detach()[Y.slices(w)])
        close(gx, x.grad[X.slices(w)])
        assert list(state) == list(serial.state_dict())
        for name, value in serial.state_dict().items():
            assert type(state[name]) is torch.Tensor
            close(state[name], value)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("axes", "sizes", "k"), ALL)
def test_in_integers_adjoints_are_exact(axes, sizes, k, check):
    """One layer at integer weights is a linear map; its pullback is the transpose, to the last bit."""
    form = forms(axes, sizes)[k]
    if form.name in ("pair", "sequence-pair", "grids-in-a-row"):
        linear = lambda net: nn.Sequential(*[m for m in net if not isinstance(m, nn.Tanh)])
    else:
        linear = lambda net: net
    mesh, rng = spmd.Mesh(**axes), np.random.default_rng(k)
    draw = lambda *s: torch.tensor(rng.integers(-9, 10, s).astype(float))
    serial = linear(form.serial())
    with torch.no_grad():
        for p in serial.parameters():
            p.copy_(draw(*p.shape))
    whole = serial.state_dict()
    x = draw(2, 3, sizes[0]).requires_grad_()
    g = draw(2, 3, sizes[1])
    y = serial(x)
    y.backward(g)
    X, Y = lies(form.x, x.shape, axes), lies(form.y, g.shape, axes)
    result = {}

    def main():
        w = spmd.mesh.here("a test").index
        net = linear(form.make())
        net.load_state_dict(whole)
        leaf = x.detach()[X.slices(w)].clone().requires_grad_()
        out = net(spt.varying(leaf, tuple(X.varying)) if X.varying else leaf)
        out.backward(g[Y.slices(w)])
        with torch.no_grad():
            for p in net.parameters():
                p.copy_(torch.zeros_like(p) if p.grad is None else p.grad)
        result[w] = spt.block(out), leaf.grad, net.state_dict()

    spt.map(main, (), None, mesh=mesh, check=check)()
    for w in range(mesh.size):
        out, gx, gradients = result[w]
        assert torch.equal(out, y.detach()[Y.slices(w)])
        assert torch.equal(gx, x.grad[X.slices(w)])
        for name, p in serial.named_parameters():
            assert torch.equal(gradients[name], p.grad)


@pytest.mark.parametrize(("check", "wrapped"), [(True, False), (True, True), (False, True)])
def test_a_pair_on_samples_that_are_split_over_another_axis(check, wrapped):
    """What is summed over the axis of the data: by itself where tensors carry their state, else by `data_parallel`."""
    mesh = spmd.Mesh(data=2, model=2)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(6, 9, dtype=F64), nn.Tanh(), nn.Linear(9, 3, dtype=F64))
    x, t = torch.randn(7, 6, dtype=F64), torch.randn(7, 3, dtype=F64)
    train(serial, x, lambda y: ((y - t) ** 2).sum(), OPTIMISERS["sgd"], 4)
    result = {}

    def main():
        net = nn.Sequential(
            column("model", 6, 9, dtype=F64),
            nn.Tanh(),
            row("model", 9, 3, dtype=F64),
        )
        rows = mesh.layout((7,), P("data")).slices(spmd.mesh.here("a test").index)
        mine, target = spt.varying(x[rows], "data"), spt.varying(t[rows], "data")
        model = spt.data_parallel(net, "data") if wrapped else net
        train(model, mine, lambda y: ((y - target) ** 2).sum(), OPTIMISERS["sgd"], 4)
        result[spmd.mesh.here("a test").index] = net.state_dict()

    torch.manual_seed(0)
    spt.map(main, (), None, mesh=mesh, check=check)()
    for state in result.values():
        for name, value in serial.state_dict().items():
            close(state[name], value)


@pytest.mark.parametrize("shape", [(7,), (4, 7), (0, 7), (2, 0, 7), (2, 1, 3, 7)])
def test_any_batch(shape):
    mesh = spmd.Mesh(x=3)
    x_on, y_on = Grid((2,), (2, 0)), Grid((3,))
    torch.manual_seed(0)
    serial = nn.Linear(7, 5, dtype=F64)
    x = torch.randn(shape, dtype=F64)
    y = serial(x).detach()
    X, Y = x_on.layout(shape, mesh.axes), y_on.layout(y.shape, mesh.axes)
    result = {}

    def main():
        w = spmd.worker_index("x")
        layer = spt.nn.Linear.from_torch(serial, spec=x_on, out_spec=y_on, w_spec=Grid((3, 1), (1, 0, 2)))
        pair = nn.Sequential(spt.nn.Linear.from_torch(serial, w_spec=P("x")), spt.nn.AllGather("x", -1, to="invariant"))
        result[w] = spt.block(layer(spt.varying(x[X.slices(w)], "x"))), spt.block(pair(x))

    spt.map(main, (), None, mesh=mesh)()
    for w in range(3):
        close(result[w][0], y[Y.slices(w)])
        close(result[w][1], y)


@pytest.mark.parametrize("form", ["pair", "sequence-pair", "column", "row", "specs"])
def test_compiled_is_eager(form):
    torch._dynamo.reset()
    axes = {"x": 2}
    made = next(f for f in forms(axes, (7, 5)) if f.name == form)
    x = torch.randn(3, 4, 7, dtype=F64)
    X = lies(made.x, x.shape, axes)
    result = {}

    def main():
        k = spmd.worker_index("x")
        net = made.make()
        leaf = x[X.slices(k)].clone().requires_grad_()
        runs = []
        for f in (net, torch.compile(net, fullgraph=True, backend="aot_eager")):
            y = f(leaf)
            grads = torch.autograd.grad(y.square().sum(), (leaf, *net.parameters()))
            runs.append((y.detach(), *(g.block() if isinstance(g, spt.PartitionedTensor) else g for g in grads)))
        result[k] = runs

    spt.map(main, (), None, mesh=spmd.Mesh(**axes), check=False)()
    for eager, compiled in result.values():
        for a, b in zip(eager, compiled, strict=True):
            close(a, b)


def test_a_layer_between_grids_breaks_the_graph_and_stays_right():
    torch._dynamo.reset()
    linear, x = nn.Linear(7, 5, dtype=F64), torch.randn(3, 7, dtype=F64)
    result = {}

    def main():
        k = spmd.worker_index("x")
        layer = spt.nn.Linear.from_torch(linear, spec=Grid((2,)), out_spec=Grid((1,)), w_spec=Grid((1, 2)))
        mine = x[Grid((2,)).layout(x.shape, {"x": 2}).slices(k)]
        result[k] = torch.compile(layer, backend="aot_eager")(mine).detach()

    spt.map(main, (), None, mesh=spmd.Mesh(x=2), check=False)()
    close(result[0], linear(x).detach())
    assert result[1].shape == (0, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: column("x", 4, 5)(torch.ones(2, 3)), "4 features in the last dimension"),
        (lambda: row("x", 4, 5)(spt.varying(torch.ones(2, 4), "x")), r"pslice"),
        (lambda: column("z", 4, 5), "axis 'z'"),
        (lambda: general(None, None, Grid((3, 1)), 4, 5), "3 different workers"),
        (
            lambda: general(Grid((2,)), Grid((1,)), Grid((1, 2)), 4, 5)(spt.varying(torch.ones(3, 3), "x")),
            r"x of shape \[3, 6\]",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(call, words):
    with pytest.raises((SpecError, MeshError, LayoutError), match=words):
        spt.map(lambda: call() and None, (), None, mesh=spmd.Mesh(x=2))()


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_the_same_in_processes():
    """Under the mpiexec of this environment: the one with Open MPI has no torch."""
    ended = launch(PROGRAMS / "torch_layers.py", timeout=180)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("is through") == 4, str(ended)
