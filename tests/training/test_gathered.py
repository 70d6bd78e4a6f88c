"""Parameters gathered unit by unit: the losses, gradients and steps of one worker, in every mode of differentiation."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.autodiff import tree
from spmd.training import gathered, shard_specs

WIDTH = 5
SCHEDULERS = pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
WHOLE = {"qkv": P(), "up": P(None, "model"), "bias": P("model"), "down": P("model"), "scale": P()}
"""How the parameters of a layer lie without the axis `data`; `model` is an axis of some meshes."""


def layer_of(rng):
    return {
        "qkv": rng.standard_normal((WIDTH, 3 * WIDTH)) / 3,
        "up": rng.standard_normal((WIDTH, 7)) / 2,
        "bias": rng.standard_normal(7),
        "down": rng.standard_normal((7, WIDTH)) / 3,
        "scale": rng.standard_normal(()),
    }


def layer(w, x, add=lambda y: y):
    """Attention of one head and a perceptron; add: sums over the workers among which the perceptron is split."""
    q, k, v = np.split(x @ w["qkv"], 3, axis=-1)
    scores = np.exp(np.tanh(q @ np.swapaxes(k, -1, -2)))
    x = x + w["scale"] * (scores / np.sum(scores, -1, keepdims=True)) @ v
    return x + add(np.tanh(x @ w["up"] + w["bias"]) @ w["down"])


def serial(layers, x):
    for w in layers:
        x = layer(w, x)
    return np.mean(x**2)


def data(seed=0, count=4):
    rng = np.random.default_rng(seed)
    return [layer_of(rng) for _ in range(count)], rng.standard_normal((7, 3, WIDTH))


def loss(layers, x, specs, add=lambda y: y, **options):
    for w in gathered(layers, specs, "data", **options):
        x = layer(w, x, add)
    return spmd.mean(x**2, "data")


def of_mesh(mesh, layers):
    """The specs of the layers on a mesh, and the sum over `model` where it has that axis."""
    model = "model" in mesh.axes
    specs = shard_specs(layers, "data", [WHOLE if model else P()] * len(layers))
    return specs, (lambda y: spmd.psum(y, "model")) if model else (lambda y: y)


def assert_close(found, wanted, tolerance=1e-10):
    for a, b in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(getattr(a, "numpy", lambda a=a: a)()), b, rtol=tolerance, atol=tolerance)


@SCHEDULERS
@pytest.mark.parametrize(
    "axes", [{"data": 1}, {"data": 2}, {"data": 3}, {"data": 4}, {"data": 8}, {"data": 2, "model": 2}], ids=str
)
def test_ten_steps_of_adam_are_those_of_one_worker(axes, scheduler):
    layers, x = data()
    optimizer = spmd.optim.adam(0.01)
    wanted, state = layers, optimizer.init(layers)
    losses = []
    for _ in range(10):
        value, grads = spmd.value_and_grad(serial)(wanted, x)
        wanted, state = optimizer.update(grads, state, wanted)
        losses.append(value)
    with spmd.Mesh(**axes, scheduler=scheduler) as mesh:
        specs, add = of_mesh(mesh, layers)
        step = spmd.value_and_grad(spmd.map(lambda w, x: loss(w, x, specs, add), (specs, P("data")), P()))
        params = tree.map(spmd.put, layers, specs)
        own, found = optimizer.init(params), []
        for _ in range(10):
            value, grads = step(params, x)
            params, own = optimizer.update(grads, own, params)
            found.append(value)
        assert_close(found, losses)
        assert_close(params, wanted)
        assert_close(own, state)
        assert all(p.spec == s for p, s in zip(tree.leaves(params), tree.leaves(specs), strict=True))


FORMS = {
    "for": lambda w, specs, use, x: _loop(gathered(w, specs, "data"), use, x),
    "least memory": lambda w, specs, use, x: _loop(gathered(w, specs, "data", prefetch=0), use, x),
    "far ahead": lambda w, specs, use, x: _loop(gathered(w, specs, "data", prefetch=3), use, x),
    "checkpointed layers": lambda w, specs, use, x: _loop(gathered(w, specs, "data"), spmd.checkpoint(use), x),
    "enumerate": lambda w, specs, use, x: _numbered(gathered(w, specs, "data"), use, x),
    "kept": lambda w, specs, use, x: _kept(gathered(w, specs, "data"), use, x),
    "tied": lambda w, specs, use, x: _loop(gathered([*w, *w], [*specs, *specs], "data"), use, x),
    "two loops": lambda w, specs, use, x: _loop(
        gathered(w[2:], specs[2:], "data"), use, _loop(gathered(w[:2], specs[:2], "data"), use, x)
    ),
    "checkpointed loop": lambda w, specs, use, x: spmd.checkpoint(
        lambda w, x: _loop(gathered(w, specs, "data"), use, x)
    )(w, x),
    "unit by unit": lambda w, specs, use, x: _each(w, specs, use, x),
}


def _loop(units, use, x):
    for w in units:
        x = use(w, x)
    return x


def _numbered(units, use, x):
    for _, w in enumerate(units):
        x = use(w, x)
    return x


def _kept(units, use, x):
    kept = [*units]
    for w in kept:
        x = use(w, x)
    return x


def _each(layers, specs, use, x):
    """A loop of one unit for each, in a checkpointed function: it is gathered there, and there again."""

    def one(block, x, spec):
        for w in gathered([block], [spec], "data"):
            x = use(w, x)
        return x

    for block, spec in zip(layers, specs, strict=True):
        x = spmd.checkpoint(one, static_argnums=2)(block, x, spec)
    return x


def _repeated(form, layers):
    return [*layers, *layers] if form == "tied" else layers


def _dot(a, b):
    return sum(np.sum(x * y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def _both(form, mesh):
    """The loss on the mesh and that of one worker, with parameters, and a direction to go from there."""
    layers, x = data(1, 3)
    v, _ = data(2, 3)
    specs, _ = of_mesh(mesh, layers)

    def body(w, x):
        return spmd.mean(FORMS[form](w, specs, layer, x) ** 2, "data")

    return body, specs, x, layers, v, lambda w: serial(_repeated(form, w), x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("workers", [2, 3])
def test_gradients_of_every_kind(form, workers):
    with spmd.Mesh(data=workers) as mesh:
        body, specs, x, layers, v, one = _both(form, mesh)
        mapped = spmd.map(body, (specs, P("data")), P())

        def f(w):
            return mapped(w, x)

        assert_close(spmd.value_and_grad(f)(layers), spmd.value_and_grad(one)(layers))
        _, pull = spmd.vjp(f, layers)
        for g in (1.0, -2.0):
            assert_close(pull(g), spmd.vjp(one, layers)[1](g))
        assert_close(spmd.jvp(f, (layers,), (v,)), spmd.jvp(one, (layers,), (v,)))
        second = spmd.grad(lambda w: _dot(spmd.grad(one)(w), v))(layers)
        assert_close(spmd.grad(lambda w: _dot(spmd.grad(f)(w), v))(layers), second)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_taken_in_the_body_and_recorded(form):
    with spmd.Mesh(data=3) as mesh:
        body, specs, x, layers, v, one = _both(form, mesh)
        ins = (specs, P("data"))
        wanted = spmd.grad(one)(layers)
        assert_close(spmd.map(spmd.grad(body), ins, specs)(layers, x), wanted)
        recorded = spmd.jit(spmd.map(spmd.grad(body), ins, specs))
        for _ in range(3):
            assert_close(recorded(layers, x), wanted)
        outside = spmd.grad(spmd.jit(spmd.map(body, ins, P())))
        for _ in range(3):
            assert_close(outside(layers, x), wanted)

        def second(w, x, v):
            return spmd.hvp(lambda w: body(w, x), (w,), (v,))

        def forward(w, x, v):
            return spmd.jvp(lambda w: body(w, x), (w,), (v,))

        assert_close(spmd.map(second, (*ins, specs), (specs,))(layers, x, v), spmd.hvp(one, (layers,), (v,)))
        assert_close(spmd.map(forward, (*ins, specs), (P(), P()))(layers, x, v), spmd.jvp(one, (layers,), (v,)))


@SCHEDULERS
@pytest.mark.parametrize("shape", [(8,), (3,), (0,), (5, 4), (3, 20), (2, 3, 4), (90, 101)], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_the_dot_test_is_exact(shape, workers, scheduler):
    for dim in range(len(shape)):
        spec = P(*[None] * dim, "data")

        def one(x, spec=spec):
            for whole in gathered([x], [spec], "data"):
                return whole * 1.0

        def packed(x, spec=spec):
            for wholes in gathered([{"a": x, "b": [x + x, None]}], spec, "data"):
                return wholes["a"] + 3 * wholes["b"][0]

        with spmd.Mesh(data=workers, scheduler=scheduler):
            for f in (one, packed):
                spmd.check_adjoint(f, shape, in_specs=spec, out_specs=spec, trials=1)


def test_what_is_not_split_comes_as_it_is():
    def body(unit, x):
        for w in gathered([unit], [specs], "data"):
            assert set(w) == set(unit)
            assert w["nothing"] is None
            assert w["text"] == "text"
            assert w["number"] is unit["number"]
            assert w["count"].shape == (5,)
            x = x * w["number"] + w["count"][w["nested"][0].astype(int).size - 1] + w["nested"][1].x
        return spmd.mean(x, "data")

    class Pair(tuple):
        __slots__ = ()
        x = property(lambda self: self[0])

    specs = {
        "number": P(),
        "nothing": None,
        "text": None,
        "count": P("data"),
        "nested": (P("data"), P()),
    }
    unit = {"number": np.float64(2.0), "nothing": None, "count": np.arange(5), "nested": (np.ones(3), np.ones(()))}

    def with_text(unit, x):
        return body({**unit, "text": "text", "nested": (unit["nested"][0], Pair((unit["nested"][1],)))}, x)

    def one(number, x):
        return np.mean(x * number + 2 + 1.0)

    x = np.arange(4.0)
    with spmd.Mesh(data=2):
        own = {k: v for k, v in specs.items() if k != "text"}
        f = spmd.map(with_text, (own, P("data")), P())
        value, grads = spmd.value_and_grad(f, allow_int=True)(unit, x)
        assert_close([value, grads["number"]], [*spmd.value_and_grad(one)(2.0, x)])


def random_unit(rng):
    """Arrays of any dimensions and dtypes, some empty, some of messages of their own, in a nested tree."""

    def array():
        shape = tuple(int(n) for n in rng.choice([0, 1, 2, 3, 5, 8, 70], rng.integers(0, 4)))
        x = rng.standard_normal(shape)
        return [x, x.astype(np.float32), x + 1j * rng.standard_normal(shape)][rng.choice(3, p=[0.6, 0.2, 0.2])]

    return {"a": [array() for _ in range(rng.integers(0, 4))], "b": (array(), {"c": array()}), "nothing": None}


def random_use(unit, x, k):
    """A number of some views of the arrays of a unit, and x."""
    total = 0.0
    for w in tree.leaves(unit):
        views = [w, w.T, w.reshape(-1)[::-1], w[..., None]]
        total = total + np.sum(np.sin(np.abs(views[k % 4]) ** 2))
    return np.sin(x + total)


@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 100))])
def test_random_units(seed):
    rng = np.random.default_rng(seed)
    layers = [random_unit(rng) for _ in range(rng.integers(1, 5))]
    order = [int(k) for k in rng.integers(0, len(layers), rng.integers(1, 7))]
    x = rng.standard_normal(4)
    axes = [{"data": 2}, {"data": 3}, {"data": 5}, {"data": 2, "other": 2}, {"other": 2, "data": 3}][rng.integers(5)]
    prefetch, checkpointed = int(rng.integers(4)), rng.random() < 0.3

    def one(layers, x):
        for n, k in enumerate(order):
            x = random_use(layers[k], x, n)
        return np.sum(x)

    with spmd.Mesh(**axes):
        specs = shard_specs(layers, "data")

        def body(layers, x):
            units = gathered([layers[k] for k in order], [specs[k] for k in order], "data", prefetch=prefetch)
            for n, w in zip(range(len(order)), units, strict=True):
                x = (spmd.checkpoint(random_use, static_argnums=2) if checkpointed else random_use)(w, x, n)
            return spmd.sum(x, "data") / spmd.axis_size("data")

        if not any("data" in spec.axes for k in order for spec in tree.leaves(specs[k])):
            return
        f = spmd.map(body, (specs, P()), P())
        value, grads = spmd.value_and_grad(f)(layers, x)
        wanted, expected = spmd.value_and_grad(one)(layers, x)
    np.testing.assert_allclose(value, wanted, rtol=1e-6)
    for g, e in zip(tree.leaves(grads), tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(g), e, rtol=1e-4, atol=1e-5 if e.dtype == np.float32 else 1e-9)
