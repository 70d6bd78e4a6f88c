"""Sharded linear layers against nn.Linear: values, gradients, training, checkpoints, initial values, and costs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from launch import PROGRAMS, launch, mpiexec

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import Layout, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError, MeshError, StallError, StateError  # noqa: E402

Grid = spt.Grid
F64 = torch.float64
MESHES = [{"x": 1}, {"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}]
SIZES = [(7, 5), (2, 3)]  # uneven; fewer features than workers


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
    column, row, general = spt.ColumnParallelLinear, spt.RowParallelLinear, spt.DistributedLinear
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
            lambda: chain(column(names, i, h, sequence=-2, **kw), row(names, h, o, sequence=1, **kw)),
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
        Form("specs", lambda: general(P(names), P(), P(None, names), i, o, **kw), linear, P(None, None, names), P()),
    ]
    if last:
        every += [
            Form(
                "specs-2d",
                lambda: general(P("y"), P("x"), P("x", "y"), i, o, **kw),
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
    for axes in MESHES
    for sizes in SIZES
    for k, form in enumerate(forms(axes, sizes))
]


def laid(lies: Any, shape: tuple[int, ...], axes: dict[str, int]) -> Layout:
    return lies.layout(shape, axes) if isinstance(lies, Grid) else Layout(shape, lies, axes)


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
    X, Y = laid(form.x, shape, axes), laid(form.y, t.shape, axes)
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


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


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
    X, Y = laid(form.x, x.shape, axes), laid(form.y, g.shape, axes)
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
            spt.ColumnParallelLinear("model", 6, 9, dtype=F64),
            nn.Tanh(),
            spt.RowParallelLinear("model", 9, 3, dtype=F64),
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
        layer = spt.DistributedLinear.from_linear(serial, x_on, y_on, Grid((3, 1), (1, 0, 2)))
        pair = nn.Sequential(spt.ColumnParallelLinear.from_linear(serial, "x"), spt.AllGather("x", -1, to="invariant"))
        result[w] = spt.block(layer(spt.varying(x[X.slices(w)], "x"))), spt.block(pair(x))

    spt.map(main, (), None, mesh=mesh)()
    for w in range(3):
        close(result[w][0], y[Y.slices(w)])
        close(result[w][1], y)


# Initial values


def values(make: Callable[[], nn.Module], mesh: spmd.Mesh, check: bool = True) -> list[torch.Tensor]:
    """The whole parameters of what a body makes; those of all workers are equal."""
    result = {}

    def main():
        result[spmd.mesh.here("a test").index] = [*make().state_dict().values()]

    spt.map(main, (), None, mesh=mesh, check=check)()
    for other in result.values():
        assert all(torch.equal(a, b) for a, b in zip(result[0], other, strict=True))
    return result[0]


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_begin_as_those_of_nn_linear_on_any_mesh(axes, dtype):
    if dtype is torch.bfloat16:
        pytest.importorskip("ml_dtypes")
    names = tuple(axes)
    torch.manual_seed(5)
    serial = nn.Sequential(
        nn.Linear(7, 6, dtype=dtype), nn.Linear(6, 5, False, dtype=dtype), nn.Linear(5, 3, dtype=dtype)
    )
    after = torch.rand(3)

    def make():
        n = spmd.axis_size(names)
        return nn.Sequential(
            spt.ColumnParallelLinear(names, 7, 6, dtype=dtype),
            spt.RowParallelLinear(names, 6, 5, False, dtype=dtype),
            spt.DistributedLinear(Grid((1,)), Grid((1,)), Grid((1, n)), 5, 3, dtype=dtype),
        )

    torch.manual_seed(5)
    result = values(make, spmd.Mesh(**axes))
    assert all(torch.equal(a, b) for a, b in zip(result, serial.state_dict().values(), strict=True))
    # torch's generator goes on from where the workers left off, as after the serial program.
    assert torch.equal(torch.rand(3), after)


def test_numbers_do_not_depend_on_who_comes_first():
    mesh = spmd.Mesh(x=4)
    results = []
    for late in range(4):

        def make(late=late):
            if spmd.worker_index("x") == late:
                time.sleep(0.05)
            first = spt.RowParallelLinear("x", 6, 5)
            if spmd.worker_index("x") != late:
                time.sleep(0.01)
            with spt.drawing():
                plain = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
            return nn.Sequential(first, plain, spt.ColumnParallelLinear("x", 5, 7))

        torch.manual_seed(1)
        results.append(values(make, mesh))
    torch.manual_seed(1)
    serial = nn.Sequential(nn.Linear(6, 5), nn.Embedding(4, 3), nn.Linear(3, 2), nn.Linear(5, 7))
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, serial.state_dict().values(), strict=True))


def test_seeds_and_generators():
    mesh = spmd.Mesh(x=3)
    serial = nn.Linear(4, 5)

    def seeded(generator):
        torch.nn.init.kaiming_uniform_(serial.weight, a=5**0.5, generator=generator)
        return serial.weight.detach().clone()

    expected = seeded(torch.Generator().manual_seed(7))
    column = spt.ColumnParallelLinear
    torch.manual_seed(0)
    state = torch.get_rng_state()
    by_seed = values(lambda: column("x", 4, 5, False, generator=7), mesh)
    by_generator = values(lambda: column("x", 4, 5, False, generator=torch.Generator().manual_seed(7)), mesh)

    def inside():
        with spt.drawing():
            torch.manual_seed(7)
            return column("x", 4, 5, False)

    def elsewhere():
        torch.manual_seed(7)  # that of all threads: nothing is drawn from it
        spt.psum(1, "x")  # but by whoever draws at that moment
        return column("x", 4, 5, False)

    def again():
        layer = column("x", 4, 5, False)
        layer.reset_parameters(7)
        return layer

    by_inside = values(inside, mesh)
    for result in (by_seed, by_generator, by_inside, values(again, mesh)):
        assert torch.equal(result[0], expected)
    torch.set_rng_state(state)
    one = values(lambda: column("x", 4, 5, False), mesh)
    torch.set_rng_state(state)
    assert torch.equal(values(elsewhere, mesh)[0], one[0])
    two = values(lambda: column("x", 4, 5, False), mesh)
    assert not torch.equal(one[0], two[0])


def test_a_generator_of_several_workers_is_refused():
    mesh = spmd.Mesh(x=2)
    shared = torch.Generator().manual_seed(0)
    with pytest.raises(StateError, match="draws from too"):
        values(lambda: spt.ColumnParallelLinear("x", 4, 5, generator=shared), mesh)
    with pytest.raises(StateError, match="argument generator"):
        values(lambda: spt.ColumnParallelLinear("x", 4, 5, generator="0"), mesh)
    one = spmd.Mesh(x=1)
    twice = [values(lambda: spt.ColumnParallelLinear("x", 4, 5, generator=shared), one) for _ in range(2)]
    assert not torch.equal(twice[0][0], twice[1][0])


def test_a_collective_where_workers_take_turns_is_an_error(monkeypatch):
    monkeypatch.setenv("SPMD_TIMEOUT", "1")

    def main():
        with spt.drawing():
            spt.psum(spt.varying(torch.ones(2), "x"), "x")

    with pytest.raises(StallError, match=r"spt\.drawing"):
        spt.map(main, (), None, mesh=spmd.Mesh(x=2))()

    def saving():
        layer = spt.ColumnParallelLinear("x", 4, 5)
        with spt.drawing():
            layer.state_dict()

    with pytest.raises(StateError, match="take turns"):
        spt.map(saving, (), None, mesh=spmd.Mesh(x=2))()


def test_outside_of_bodies_drawing_is_torch_s_own():
    torch.manual_seed(3)
    with spt.drawing():
        a = torch.rand(3)
    b = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.cat([a, b]), torch.cat([torch.rand(3), torch.rand(3)]))
    with spt.drawing(3):
        assert torch.equal(torch.rand(3), a)


# Checkpoints and conversions


class Net(nn.Module):
    """Sharded and replicated parameters, and a buffer, nested."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.norm = nn.LayerNorm(4, dtype=F64)
        self.body = nn.Sequential(first, nn.Tanh(), second)
        self.register_buffer("steps", torch.tensor(3))


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    net = Net(nn.Linear(4, 9, dtype=F64), nn.Linear(9, 4, dtype=F64))
    with torch.no_grad():
        for p in net.parameters():
            p.normal_()
    return net.state_dict()


def test_a_checkpoint_reloads_on_another_mesh_in_other_forms_and_in_nn_linear():
    whole = checkpoint(0)
    saved = {}
    makers = {
        4: lambda: Net(
            spt.ColumnParallelLinear("x", 4, 9, dtype=F64, sequence=0), spt.RowParallelLinear("x", 9, 4, dtype=F64)
        ),
        3: lambda: Net(
            spt.DistributedLinear(Grid((2,)), Grid((2,), (2, 1)), Grid((2, 1), (0, 2)), 4, 9, dtype=F64),
            spt.ColumnParallelLinear("x", 9, 4, dtype=F64),
        ),
        1: lambda: Net(nn.Linear(4, 9, dtype=F64), spt.RowParallelLinear("x", 9, 4, dtype=F64)),
    }
    given = whole
    for n, make in makers.items():
        result = {}

        def main(make=make, given=given, result=result):
            net = make()
            assert str(net.load_state_dict(given)) == "<All keys matched successfully>"
            result[spmd.worker_index("x")] = net.state_dict(), sum(held(p) for p in net.parameters())

        spt.map(main, (), None, mesh=spmd.Mesh(x=n))()
        saved[n] = result
        for state, _ in result.values():
            assert list(state) == list(whole)
            assert all(torch.equal(a, b) for a, b in zip(state.values(), whole.values(), strict=True))
            assert all(type(a) is torch.Tensor and not a.requires_grad for a in state.values())
        given = result[n - 1][0]
    total = sum(v.numel() for v in whole.values()) - 1
    assert max(size for _, size in saved[4].values()) < 0.5 * total
    Net(nn.Linear(4, 9, dtype=F64), nn.Linear(9, 4, dtype=F64)).load_state_dict(given)


def held(p: torch.Tensor) -> int:
    """How many entries of a parameter a worker holds."""
    return p.block().numel() if isinstance(p, spt.Parameter) else p.numel()


def test_what_is_loaded_is_copied_and_what_is_saved_is_not_shared():
    whole = nn.Linear(4, 5).state_dict()
    kept = copy.deepcopy(whole)

    def main():
        for assign in (False, True):
            layer = spt.ColumnParallelLinear("x", 4, 5)
            layer.load_state_dict(whole, assign=assign)
            with torch.no_grad():
                layer.weight.add_(1)
                layer.state_dict()["weight"].zero_()
            assert torch.equal(layer.state_dict()["weight"], kept["weight"] + 1)
            # What is assigned keeps nothing of the whole alive.
            block = layer.weight.block()
            assert block.untyped_storage().nbytes() == block.numel() * 4

    spt.map(main, (), None, mesh=spmd.Mesh(x=2))()
    assert all(torch.equal(whole[k], kept[k]) for k in kept)


def test_errors_of_loading_are_those_of_torch_and_name_the_whole():
    mesh = spmd.Mesh(x=3)
    good = nn.Linear(4, 5).state_dict()

    def load(state, strict=True):
        def main():
            return str(
                nn.Sequential(spt.ColumnParallelLinear("x", 4, 5)).load_state_dict(
                    {f"0.{k}": v for k, v in state.items()}, strict
                )
            )

        return spt.map(main, (), None, mesh=mesh)()

    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.bias"'):
        load({"weight": good["weight"]})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "0.more"'):
        load(good | {"more": good["bias"]})
    with pytest.raises(RuntimeError, match=r"size mismatch for 0.weight: .*\[2, 4\].*current model is .*\[5, 4\]") as e:
        load(good | {"weight": good["weight"][:2]})
    assert str(e.value).count("size mismatch") == 1
    assert "A checkpoint has whole tensors" in str(e.value)
    assert "missing_keys=['0.bias'], unexpected_keys=['0.more']" in load({"weight": good["weight"], "more": 1}, False)
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        load(good | {"weight": 3})


def test_a_state_dict_outside_of_a_body_says_where_to_ask():
    layers = {}

    def main():
        layers[spmd.worker_index("x")] = spt.ColumnParallelLinear("x", 4, 5)

    spt.map(main, (), None, mesh=spmd.Mesh(x=2))()
    with pytest.raises(MeshError, match="call state_dict\\(\\) in the body"):
        layers[0].state_dict()
    whole = nn.Linear(4, 5)
    layers[1].load_state_dict(whole.state_dict())  # which nobody else is needed for
    assert torch.equal(layers[1].weight.block(), whole.weight[3:])
    with pytest.raises(MeshError, match="outside of any body"):
        spt.ColumnParallelLinear("x", 4, 5)


def test_conversions_between_forms_and_back():
    torch.manual_seed(0)
    linear = nn.Linear(6, 5, dtype=F64).eval()
    linear.bias.requires_grad_(False)
    x = torch.randn(3, 6, dtype=F64)
    result = {}

    def main():
        column = spt.ColumnParallelLinear.from_linear(linear, "x", gather=True)
        row = spt.RowParallelLinear.from_linear(column, "x", sequence=0)
        general = spt.DistributedLinear.from_linear(row, Grid((3,)), Grid((1,)), Grid((1, 3)))
        back = general.to_linear()
        for m in (column, row, general, back):
            assert m.weight.requires_grad
            assert not m.bias.requires_grad
            assert not m.training
        column.weight.data.zero_()
        result[spmd.worker_index("x")] = back
        with pytest.raises(LayoutError, match="argument linear"):
            spt.RowParallelLinear.from_linear(nn.Conv2d(1, 1, 1), "x")

    spt.map(main, (), None, mesh=spmd.Mesh(x=3))()
    for back in result.values():
        assert type(back) is nn.Linear
        assert torch.equal(back.weight, linear.weight)
        assert torch.equal(back.bias, linear.bias)
        assert torch.equal(back(x), linear(x))


def test_copies_descriptions_and_devices():
    def main():
        layer = spt.DistributedLinear(Grid((2,)), Grid((2,), (1, 0)), Grid((1, 2)), 6, 5)
        other = copy.deepcopy(layer)
        with torch.no_grad():
            other.weight.add_(1)
        assert torch.equal(other.state_dict()["weight"], layer.state_dict()["weight"] + 1)
        text = "Grid((2,)), Grid((2,), workers=[1, 0]), Grid((1, 2)), in_features=6, out_features=5, bias=True"
        assert text in repr(nn.Sequential(layer))
        column = spt.ColumnParallelLinear("x", 6, 5, False, sequence=-2, gather=True)
        assert column.extra_repr() == "'x', in_features=6, out_features=5, bias=False, sequence=-2, gather=True"
        empty = spt.RowParallelLinear("x", 6, 5, device="meta")
        assert empty.weight.is_meta
        assert empty.weight.shape == (5, 6)
        assert empty.weight.block().shape == (5, 3)
        assert empty.state_dict()["weight"].shape == (5, 6)
        assert column.bias is None
        assert "bias" not in column.state_dict()
        assert layer.weight.dtype is torch.float32
        assert layer.double().to_linear().weight.dtype is F64

    spt.map(main, (), None, mesh=spmd.Mesh(x=2))()


# Modules of users


class Scale(spt.ShardedModule):
    def __init__(self, features: int, value: Any):
        super().__init__()
        self.register_shard("scale", value, P("x"), (features,), dtype=F64)
        self.register_buffer("seen", torch.zeros(2))
        self.offset = nn.Parameter(torch.zeros((), dtype=F64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.shard("scale") + self.offset


@pytest.mark.parametrize("check", [True, False])
def test_a_module_says_which_of_its_parameters_are_blocks(check):
    torch.manual_seed(2)
    whole = torch.empty(7, dtype=F64).normal_()
    x = torch.arange(7.0, dtype=F64)
    result = {}

    def main():
        k = spmd.worker_index("x")
        net = nn.Sequential(Scale(7, nn.init.normal_))
        layout = net[0].shard_layout("scale")
        mine = spt.varying(x[layout.slices(k)], "x")
        y = net(mine).square().sum()
        (spt.psum(y, "x") if check else y).backward()
        state = net.state_dict()
        net.load_state_dict({k: v + 1 for k, v in state.items()})
        result[k] = state, net[0].scale.detach().block(), net[0].scale.grad.block(), net[0].gathered("scale")

    torch.manual_seed(2)
    spt.map(main, (), None, mesh=spmd.Mesh(x=3), check=check)()
    layout = Layout((7,), P("x"), {"x": 3})
    for k, (state, scale, g, gathered) in result.items():
        assert {name: v.shape for name, v in state.items()} == {"0.scale": (7,), "0.offset": (), "0.seen": (2,)}
        assert torch.equal(state["0.scale"], whole)
        assert torch.equal(scale, whole[layout.slices(k)] + 1)
        assert torch.equal(gathered, whole + 1)
        assert torch.equal(g, (2 * whole * x * x)[layout.slices(k)])


def test_a_typed_body_beside_one_that_is_compiled(monkeypatch):
    """That some thread compiles is a flag of the process; what this one does, it must find out otherwise."""
    x = torch.arange(1.0, 8, dtype=F64)
    result = {}

    def main():
        k = spmd.worker_index("x")
        net = Scale(7, nn.init.ones_)
        to = spt.AllSumReduce("x")
        monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
        loss = to((net(x[net.shard_layout("scale").slices(k)].clone()) ** 2).sum())
        loss.backward()
        result[k] = loss.item(), net.offset.grad.item()

    assert torch.compiler._is_compiling_flag is False  # what this test sets is still there
    spt.map(main, (), None, mesh=spmd.Mesh(x=2))()
    value = (x**2).sum().item()
    assert result == {0: (value, 2 * x.sum().item()), 1: (value, 2 * x.sum().item())}


def test_errors_of_register_shard():
    def main(kind):
        module = spt.ShardedModule()
        if kind == "shape":
            module.register_shard("w", nn.init.ones_, P("x"))
        elif kind == "layout":
            module.register_shard("w", torch.ones(3), Layout((4,), P("x"), {"x": 2}))
        elif kind == "number":
            module.register_shard("w", torch.ones(()), P())

    for kind, words in {
        "shape": "argument shape",
        "layout": r"shape \[3\]",
        "number": "numbers are replicated",
    }.items():
        with pytest.raises(LayoutError, match=words):
            spt.map(main, None, None, mesh=spmd.Mesh(x=2))(kind)


# The norm of gradients


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("p", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("check", [True, False])
def test_the_norm_of_gradients_counts_every_entry_once(axes, p, check):
    names = tuple(axes)
    torch.manual_seed(0)
    serial = nn.Sequential(nn.Linear(4, 9, dtype=F64), nn.Linear(9, 3, dtype=F64), nn.Linear(3, 3, dtype=F64))
    x = torch.randn(5, 4, dtype=F64)
    serial(x).square().sum().backward()
    total = torch.linalg.vector_norm(torch.cat([q.grad.ravel() for q in serial.parameters()]), p)
    before = torch.nn.utils.clip_grad_norm_(serial.parameters(), 0.5, p)
    result = {}

    def main():
        net = nn.Sequential(
            spt.ColumnParallelLinear.from_linear(serial[0], names),
            spt.RowParallelLinear.from_linear(serial[1], names),
            copy.deepcopy(serial[2]),
        )
        net.zero_grad()
        net(x).square().sum().backward()
        norm = spt.grad_norm(net, p)
        assert torch.equal(norm, spt.clip_grad_norm_([net], 0.5, p, error_if_nonfinite=True))
        with torch.no_grad():
            for q in net.parameters():
                q.copy_(q.grad)
        result[spmd.mesh.here("a test").index] = norm, net.state_dict(), spt.clip_grad_norm_(net, 1e6, p)

    spt.map(main, (), None, mesh=spmd.Mesh(**axes), check=check)()
    for norm, gradients, after in result.values():
        assert type(norm) is torch.Tensor
        close(norm, total)
        close(norm, before)
        assert float(after) == pytest.approx(0.5, rel=1e-5)
        for name, q in serial.named_parameters():
            close(gradients[name], q.grad)


def test_the_norm_of_blocks_on_some_workers_and_of_nothing():
    torch.manual_seed(0)
    linear = nn.Linear(5, 4, dtype=F64)
    linear(torch.ones(5, dtype=F64)).sum().backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.ravel() for p in linear.parameters()]))

    def main():
        k = spmd.worker_index("x")
        layer = spt.DistributedLinear.from_linear(linear, Grid((1,)), Grid((1,)), Grid((2, 1), (2, 0)))
        assert float(spt.grad_norm(layer)) == 0
        y = layer(spt.varying(torch.ones(5 if k == 0 else 0, dtype=F64), "x"))
        y.sum().backward()
        close(spt.grad_norm(layer), expected)
        layer.weight.grad.fill_(float("nan"))
        if layer.weight.numel():
            assert torch.isnan(layer.weight.grad).all()
        with pytest.raises(RuntimeError, match="non-finite"):
            spt.clip_grad_norm_(layer, 1.0, error_if_nonfinite=True)
        with pytest.raises(StateError, match="need"):
            spt.grad_norm(list(layer.parameters()))
        with pytest.raises(StateError, match="norm_type"):
            spt.grad_norm(layer, 0)

    spt.map(main, (), None, mesh=spmd.Mesh(x=3))()


# What it costs


def count(mesh: spmd.Mesh, make: Callable[[], nn.Module], x: torch.Tensor, src: Any, dst: Any, check: bool) -> tuple:
    """The operators of the forward run and of the backward sweep, and the messages of both."""
    logs = {}

    def main():
        w = spmd.mesh.here("a test").index
        net = make()
        X = laid(src, x.shape, mesh.axes)
        leaf = x[X.slices(w)].clone().requires_grad_()
        block = spt.varying(leaf, tuple(X.varying)) if X.varying else leaf
        with spmd.ledger() as forward:
            loss = net(block).sum()
        with spmd.ledger() as backward:
            loss.backward()
        logs[w] = forward.workers[w], backward.workers.get(w)

    spt.map(main, (), None, mesh=mesh, check=check)()
    forward, backward = logs[0]
    return (
        dict(forward.operators),
        dict(backward.operators) if backward else {},
        forward.messages,
        backward.messages if backward else 0,
    )


@pytest.mark.parametrize("check", [True, False])
def test_a_pair_costs_one_sum_forward_and_one_backward(check):
    mesh = spmd.Mesh(x=4)

    def pair(**options):
        return nn.Sequential(
            spt.ColumnParallelLinear("x", 6, 8, **options), nn.Tanh(), spt.RowParallelLinear("x", 8, 6, **options)
        )

    x = torch.randn(2, 5, 6)
    # Each small collective of four workers costs log2(4) messages.
    assert count(mesh, pair, x, P(), P(), check) == ({"Sum": 1}, {"Sum": 1}, 2, 2)
    # Of a sequence an all-gather and a reduce-scatter each way; and the sum that the bias is owed.
    split = P(None, "x")
    assert count(mesh, lambda: pair(sequence=1), x, split, split, check) == (
        {"AllGather": 1, "ReduceScatter": 1},
        {"AllGather": 1, "ReduceScatter": 1, "Sum": 1},
        4,
        6,
    )
    no_bias = lambda: nn.Sequential(
        spt.ColumnParallelLinear("x", 6, 8, sequence=1), spt.RowParallelLinear("x", 8, 6, False, sequence=1)
    )
    assert count(mesh, no_bias, x, split, split, check)[1:] == ({"AllGather": 1, "ReduceScatter": 1}, 4, 4)
    alone = lambda: spt.ColumnParallelLinear("x", 6, 8, gather=True)
    assert count(mesh, alone, x, P(), P(), check) == ({"Collect": 1}, {"Slice": 1, "Sum": 1}, 2, 2)


@pytest.mark.parametrize("check", [True, False])
def test_a_layer_between_grids_moves_blocks_to_who_lacks_them(check):
    mesh = spmd.Mesh(x=4)
    x_on, y_on, w_on = Grid((2,), (0, 1)), Grid((2,), (0, 2)), Grid((2, 2))
    make = lambda: spt.DistributedLinear(x_on, y_on, w_on, 6, 8)
    # Worker 0 holds block 0 of x, which worker 2 needs too; its products are of block 0 of y, which is its own.
    result = count(mesh, make, torch.randn(3, 6), x_on, y_on, check)
    assert result == ({"Repartition": 1, "Accumulate": 1}, {"Repartition": 1, "Accumulate": 1}, 1, 1)


def test_parameters_take_no_communication_to_make_or_load():
    whole = nn.Linear(6, 8).state_dict()

    def main():
        with spmd.ledger() as log:
            layer = spt.DistributedLinear(Grid((1,)), Grid((1,)), Grid((2, 2)), 6, 8)
            layer.load_state_dict(whole)
            spt.RowParallelLinear.from_linear(nn.Linear(6, 8), "x")
        assert not log.operators
        assert not log.verbs

    spt.map(main, (), None, mesh=spmd.Mesh(x=4))()


# Compiled, and in processes


@pytest.mark.parametrize("form", ["pair", "sequence-pair", "column", "row", "specs"])
def test_compiled_is_eager(form):
    torch._dynamo.reset()
    axes = {"x": 2}
    made = next(f for f in forms(axes, (7, 5)) if f.name == form)
    x = torch.randn(3, 4, 7, dtype=F64)
    X = laid(made.x, x.shape, axes)
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
        layer = spt.DistributedLinear.from_linear(linear, Grid((2,)), Grid((1,)), Grid((1, 2)))
        mine = x[Grid((2,)).layout(x.shape, {"x": 2}).slices(k)]
        result[k] = torch.compile(layer, backend="aot_eager")(mine).detach()

    spt.map(main, (), None, mesh=spmd.Mesh(x=2), check=False)()
    close(result[0], linear(x).detach())
    assert result[1].shape == (0, 0)


def test_what_does_not_fit_is_told():
    mesh = spmd.Mesh(x=2)
    general, column, row = spt.DistributedLinear, spt.ColumnParallelLinear, spt.RowParallelLinear
    cases = [
        (lambda: column("x", 4, 5)(torch.ones(2, 3)), "4 features in the last dimension"),
        (lambda: row("x", 4, 5)(torch.ones(2, 4)), r"spt\.pslice"),
        (lambda: column("x", 4, 5, sequence=-1), "argument sequence"),
        (lambda: column("z", 4, 5), "argument axis_name"),
        (lambda: general(P("x"), P("x"), P(None, "x"), 4, 5), r"P_y = P\(..., r\)"),
        (lambda: general(P("x"), Grid((1,)), P(None, "x"), 4, 5), "three grids"),
        (lambda: general(Grid((1,)), Grid((1,)), Grid((1, 1), copies=2), 4, 5), "argument P_w"),
        (lambda: general(Grid((1,)), Grid((1,)), Grid((3, 1)), 4, 5), "3 different workers"),
        (
            lambda: general(Grid((2,)), Grid((1,)), Grid((1, 2)), 4, 5)(spt.varying(torch.ones(3, 3), "x")),
            r"blocks that join to shape \[3, 6\]",
        ),
    ]
    for call, words in cases:
        with pytest.raises((LayoutError, MeshError), match=words):
            spt.map(lambda call=call: call() and None, (), None, mesh=mesh)()


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_the_same_in_processes():
    """Under the mpiexec of this environment: the one with Open MPI has no torch."""
    ended = launch(PROGRAMS / "torch_layers.py", timeout=180)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("is through") == 4, str(ended)
