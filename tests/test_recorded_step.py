"""A whole step of training under spmd.jit: recorded once, with the bits of the step that is not recorded."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import recorded_step

import spmd
from spmd import P, optim
from spmd.errors import JitError, SpecError
from spmd.optim import AdamState, SGDState

OPTIMIZERS = {
    "sgd": optim.sgd(0.05),
    "nesterov": optim.sgd(optim.linear(0.05, 9, warmup=2), momentum=0.9, nesterov=True),
    "adam": optim.adam(optim.cosine(0.02, 5, warmup=2)),
    "adamw": optim.adamw(lambda t: 0.02 / (1 + t), weight_decay=0.1),
}
MESHES = [{"data": 1, "model": 1}, {"data": 3, "model": 1}, {"data": 1, "model": 2}, {"data": 2, "model": 2}]
SPECS = {"w": P(None, "model"), "b": P("model"), "layers": [(P("model", None), P())]}


def draw(*shape: int, seed: int = 0, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(dtype)


def parameters(dtype: Any = np.float64) -> dict[str, Any]:
    parts = {"w": draw(3, 5), "b": draw(5), "layers": [(draw(5, 2), draw(2))]}
    return spmd.tree.map(lambda x: x.astype(dtype), parts)


def batches(rows: int = 7) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(draw(rows, 3, seed=k), draw(rows, 2, seed=k)) for k in range(4)]


def local_loss(params: Any, x: Any, y: Any) -> Any:
    ((out, c),) = params["layers"]
    hidden = np.tanh(x @ params["w"] + params["b"])
    return spmd.mean((spmd.psum(hidden @ out, "model") + c - y) ** 2, "data")


def whole_loss(params: Any, x: Any, y: Any) -> Any:
    ((out, c),) = params["layers"]
    return ((np.tanh(x @ params["w"] + params["b"]) @ out + c - y) ** 2).mean()


def step_of(loss: Any, optimizer: Any, runs: list | None = None) -> Any:
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        if runs is not None:
            runs.append(spmd.worker_index("model") if loss is local_loss else 0)
        value, grads = spmd.value_and_grad(loss)(params, x, y)
        params, state = optimizer.update(optim.clip_by_global_norm(grads, 0.3), state, params)
        return params, state, value

    return step


def trained(step: Any, optimizer: Any, params: Any, data: Any) -> list:
    state, seen = optimizer.init(params), []
    for x, y in data:
        params, state, value = step(params, state, x, y)
        seen.append(value)
    return [seen, params, state]


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x.numpy() if hasattr(x, "numpy") else x).tobytes() for x in spmd.tree.leaves(tree)]


def records(mesh: spmd.Mesh) -> bool:
    """Whether spmd.jit records on this mesh: on a GPU the body runs at every call."""
    return mesh.device == "cpu"


def mapped(mesh: spmd.Mesh, optimizer: Any, runs: list | None = None) -> Any:
    specs, state = SPECS, optimizer.specs(SPECS)
    return mesh.map(step_of(local_loss, optimizer, runs), (specs, state, P("data"), P("data")), (specs, state, P()))


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_in_one_body_is_recorded_once(name, axes, scheduler):
    mesh, optimizer = spmd.Mesh(**axes, scheduler=scheduler), OPTIMIZERS[name]
    for rows in (7, 1):  # uneven, and empty blocks
        params, data, runs = spmd.put(parameters(), SPECS, mesh), batches(rows), []
        wanted = trained(mapped(mesh, optimizer), optimizer, params, data)
        found = trained(spmd.jit(mapped(mesh, optimizer, runs)), optimizer, params, data)
        assert bits(found) == bits(wanted)
        assert len(runs) == mesh.size or not records(mesh)
        assert found[2].steps == 4
        assert [p.layout for p in spmd.tree.leaves(found[1])] == [p.layout for p in spmd.tree.leaves(params)]


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_of_global_arrays_is_recorded_once(name, axes, scheduler):
    mesh, optimizer, runs = spmd.Mesh(**axes, scheduler=scheduler), OPTIMIZERS[name], []
    params, data = spmd.put(parameters(), SPECS, mesh), [spmd.put(b, P("data"), mesh) for b in batches()]
    wanted = trained(step_of(whole_loss, optimizer), optimizer, params, data)
    found = trained(spmd.jit(step_of(whole_loss, optimizer, runs)), optimizer, params, data)
    assert bits(found) == bits(wanted)
    assert len(runs) == 1 or not records(mesh)
    by_body = trained(mapped(mesh, optimizer), optimizer, params, data)
    for one, other in zip(spmd.tree.leaves(found[1]), spmd.tree.leaves(by_body[1]), strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_other_dtypes(dtype):
    kind = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    mesh, optimizer = spmd.Mesh(x=3), OPTIMIZERS["adamw"]
    p, g = spmd.put(draw(7, dtype=kind), P("x"), mesh), spmd.put(draw(7, seed=1, dtype=kind), P("x"), mesh)

    def step(p, state, g):
        return optimizer.update(optim.clip_by_global_norm(g, 0.5), state, p)

    state_specs = optimizer.specs(P("x"))
    body = mesh.map(step, (P("x"), state_specs, P("x")), (P("x"), state_specs))
    for run in (step, body):
        wanted, found = ([p, optimizer.init(p)] for _ in range(2))
        once = spmd.jit(run)
        for _ in range(3):
            wanted, found = run(*wanted, g), once(*found, g)
        assert bits(found) == bits(wanted)


def test_bare_parameters_and_bare_data():
    mesh, optimizer, runs = spmd.Mesh(data=2, model=2), OPTIMIZERS["adam"], []
    wanted = trained(mapped(mesh, optimizer), optimizer, parameters(), batches())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(spmd.jit(mapped(mesh, optimizer, runs)), optimizer, parameters(), batches())
    assert bits(found) == bits(wanted)
    assert len(runs) == 2 * mesh.size or not records(mesh)  # of bare parameters, and of those that lie on the mesh


def test_many_counts():
    """Powers of b1 and b2 in programs have the bits of those of Python integers."""
    p = g = np.full(3, 0.5, np.float32)
    optimizer = optim.adam(optim.cosine(1e-3, 200, warmup=10))
    once = spmd.jit(spmd.Mesh(x=1).map(optimizer.update, (P(), optimizer.specs(P()), P()), (P(), optimizer.specs(P()))))
    for t in (0, 1, 2, 3, 17, 200, 1001, 123_457):
        state = AdamState(np.asarray(t), g, g)
        assert bits(once(g, state, p)) == bits(optimizer.update(g, state, p))
        assert bits(optimizer.update(g, state._replace(steps=t), p)) == bits(optimizer.update(g, state, p))


# Counters


@pytest.mark.host("counts stay on the host")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_counts_are_arrays(name):
    optimizer, mesh = OPTIMIZERS[name], spmd.Mesh(x=3)
    for p in (draw(4), spmd.put(draw(4), P("x"), mesh)):
        state = optimizer.init(p)
        for k in range(3):
            assert type(state.steps) is type(p)
            assert (state.steps.shape, state.steps.dtype.kind, int(state.steps)) == ((), "i", k)
            for again in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
                assert bits(optimizer.update(p, again, p)) == bits(optimizer.update(p, state, p))
            _, state = optimizer.update(p, state, p)


def test_a_count_keeps_its_dtype_and_python_integers_become_arrays():
    p = draw(4)
    for optimizer in OPTIMIZERS.values():
        state = optimizer.init(p)
        for steps in (3, np.int32(3), np.asarray(3, np.int32), np.asarray(3, np.uint8)):
            new, after = optimizer.update(p, state._replace(steps=steps), p)
            assert type(after.steps) is np.ndarray
            assert after.steps.dtype == np.asarray(steps).dtype
            assert after.steps == 4
            assert bits(new) == bits(optimizer.update(p, state._replace(steps=np.asarray(3)), p)[0])


def test_a_count_that_varies_counts_on_each_worker():
    optimizer = optim.adam(0.1)

    def body(p, g):
        steps = spmd.axis_index("x")
        state = optimizer.init(p)._replace(steps=steps)
        new, state = optimizer.update(g, state, p)
        return new, state.steps.reshape(1)

    g = draw(1)
    found, steps = spmd.Mesh(x=3).map(body, (P(), P()), (P("x"), P("x")))(np.ones(1), g)
    for k in range(3):
        wanted, _ = optimizer.update(g, optimizer.init(g)._replace(steps=np.asarray(k)), np.ones(1))
        np.testing.assert_allclose(found.numpy()[k], wanted[0], rtol=1e-14)
    np.testing.assert_array_equal(steps.numpy(), [1, 2, 3])


@pytest.mark.parametrize("steps", [None, 1.0, True, "a", np.zeros(1, int), np.asarray(1.0), np.asarray(True)])
def test_other_counts_are_an_error(steps):
    for optimizer in OPTIMIZERS.values():
        state = optimizer.init(np.ones(2))._replace(steps=steps)
        with pytest.raises(ValueError, match=r"argument state, its steps\n  got: .*\n  needed: the number"):
            optimizer.update(np.ones(2), state, np.ones(2))


def test_steps_are_those_of_torch():
    torch = pytest.importorskip("torch")
    pairs = {
        "sgd": (optim.sgd(0.1, 0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
        "adam": (optim.adam(0.02), lambda p: torch.optim.Adam(p, 0.02)),
        "adamw": (optim.adamw(0.02, weight_decay=0.1), lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.1)),
    }
    for optimizer, make in pairs.values():
        mesh = spmd.Mesh(x=3)
        specs = P("x"), optimizer.specs(P("x"))
        step = spmd.jit(
            mesh.map(
                lambda p, s, g, optimizer=optimizer: optimizer.update(optim.clip_by_global_norm(g, 1.0), s, p),
                (*specs, P("x")),
                specs,
            )
        )
        p = spmd.put(draw(7), P("x"), mesh)
        state, theirs = optimizer.init(p), torch.nn.Parameter(torch.tensor(draw(7)))
        other = make([theirs])
        for k in range(4):
            p, state = step(p, state, draw(7, seed=k))
            theirs.grad = torch.tensor(draw(7, seed=k))
            torch.nn.utils.clip_grad_norm_([theirs], 1.0)
            other.step()
        np.testing.assert_allclose(p.numpy(), theirs.detach().numpy(), rtol=1e-5)  # they add 1e-6 to the norm


# Options that are inputs of a program


def test_options_may_be_arguments():
    mesh, runs = spmd.Mesh(x=2), []

    def step(p, g, rate, b1, most):
        runs.append(0)
        optimizer = optim.adam(rate, b1=b1)
        return optimizer.update(optim.clip_by_global_norm(g, most), optimizer.init(p), p)[0]

    specs = (P("x"), P("x"), P(), P(), P())
    for run in (mesh.map(step, specs, P("x")), step):
        once = spmd.jit(run)
        for kind in (float, np.float32, np.asarray):
            for numbers in ((0.1, 0.9, 1.0), (0.2, 0.8, 0.5)):
                numbers = [kind(n) for n in numbers]
                arrays = [spmd.put(draw(5, seed=k, dtype=np.float32), P("x"), mesh) for k in range(2)]
                assert bits(once(*arrays, *numbers)) == bits(run(*arrays, *numbers))
        for bad, words in (((-0.1, 0.9, 1.0), "learning_rate"), ((0.1, 1.0, 1.0), "b1"), ((0.1, 0.9, 0.0), "max_norm")):
            with pytest.raises(ValueError, match=rf"argument {words}\n"):
                once(*arrays, *bad)


@pytest.mark.host("nothing is recorded on a GPU")
def test_schedules_in_programs():
    mesh, asked = spmd.Mesh(x=2), []
    p = spmd.put(draw(5), P("x"), mesh)

    def schedule(t):
        assert type(t) is int  # `if`, math.cos and so on work
        asked.append(t)
        return 0.1 if t < 2 else 0.01

    def changing(p, state, rate):
        return optim.sgd(lambda t: 0.1 if t < 2 else rate).update(p, state, p)

    state = SGDState(P(), None)
    body = lambda p, g, state, rate: optim.sgd(lambda t: rate * 0.5**t).update(g, state, p)
    once = spmd.jit(mesh.map(body, (P("x"), P("x"), state, P()), (P("x"), state)))
    other = spmd.jit(lambda p, state: optim.sgd(schedule).update(p, state, p))
    for t in range(4):
        count = SGDState(np.asarray(t), None)
        for rate in (0.1, 0.2):
            gradient = spmd.put(draw(5, seed=7), P("x"), mesh)
            wanted = p.numpy() - rate * 0.5**t * gradient.numpy()
            np.testing.assert_allclose(once(p, gradient, count, rate)[0].numpy(), wanted, rtol=1e-14)
        np.testing.assert_allclose(other(p, count)[0].numpy(), p.numpy() * (0.9 if t < 2 else 0.99), rtol=1e-14)
    assert {*asked} == {0, 1, 2, 3}
    fails = spmd.jit(changing)
    for t in range(2):
        fails(p, SGDState(np.asarray(t), None), 0.1)
    with pytest.raises(JitError, match="a rate that depends on arguments"):
        fails(p, SGDState(np.asarray(2), None), 0.1)
    falling = spmd.jit(lambda p, state: optim.sgd(lambda t: 0.1 - t).update(p, state, p))
    falling(p, SGDState(np.asarray(0), None))
    with pytest.raises(ValueError, match="learning_rate, of 1 updates done"):
        falling(p, SGDState(np.asarray(1), None))


# Specs of states


def test_specs_of_states():
    mesh = spmd.Mesh(x=2, y=2)
    layout = spmd.Layout((5,), P("x"), mesh.axes, cuts=[(1, 4)])
    grid = spmd.Layout.grid((4,), (2,), mesh.axes, workers=(1, 3))
    part = P("x", unreduced={"y"})
    for specs in (P("x"), {"a": P(), "b": [None, (layout, grid)], "c": part}, [], None):
        for optimizer in (optim.sgd(0.1, 0.9), optim.sgd(0.1), optim.adam(), optim.adamw()):
            found = optimizer.specs(specs)
            moments = [specs] * (len(found) - 1) if optimizer.init({})[1] is not None else [None]
            assert found == type(optimizer.init({}))(P(), *moments)
    arrays = {
        "a": spmd.put(np.ones(4), P("x"), mesh),
        "b": spmd.put(np.ones(5), layout, mesh),
        "c": spmd.put(np.ones(4), grid, mesh),
    }
    assert optim.sgd(0.1, 0.9).specs(arrays) == SGDState(P(), {"a": P("x"), "b": layout, "c": grid})
    for bad, path in (
        ({"w": [P(), "x"]}, r"param_specs\['w'\]\[1\]"),
        (np.ones(3), "param_specs"),
        (("x", None), r"param_specs\[0\]"),
    ):
        with pytest.raises(SpecError, match=rf"spmd.optim.adam\(...\).specs: argument {path}\n  got: "):
            optim.adam().specs(bad)


def test_states_of_all_layouts_go_through_maps():
    """With parts of sums and layouts: each worker steps along what it holds."""
    mesh, optimizer = spmd.Mesh(x=2, y=2), optim.adam(0.1)
    layout = spmd.Layout((5,), P("x"), mesh.axes, cuts=[(1, 4)])
    part = P("x", unreduced={"y"})
    specs = {"a": P(("x", "y")), "b": [P(), layout], "c": part}
    make = mesh.map(lambda x: x * (1.0 + spmd.axis_index("y")), P("x"), part)
    params = {
        "a": spmd.put(draw(7), P(("x", "y")), mesh),
        "b": [spmd.put(draw(3), P(), mesh), spmd.put(draw(5), layout, mesh)],
    }
    params["c"] = make(draw(6))
    state_specs = optimizer.specs(specs)
    step = lambda p, s: optimizer.update(spmd.tree.map(lambda x: 2 * x, p), s, p)
    run = mesh.map(step, (specs, state_specs), (specs, state_specs))
    once = spmd.jit(run)
    wanted = found = params, optimizer.init(params)
    for _ in range(3):
        wanted, found = run(*wanted), once(*found)
    assert [x.layout for x in spmd.tree.leaves(found)] == [x.layout for x in spmd.tree.leaves(wanted)]
    for one, other in zip(spmd.tree.leaves(found), spmd.tree.leaves(wanted), strict=True):
        assert [b.tobytes() for b in one.blocks.values()] == [b.tobytes() for b in other.blocks.values()]
    for w, block in params["c"].blocks.items():
        p, state = block, optimizer.init(block)
        for _ in range(3):
            p, state = optimizer.update(2 * p, state, p)
        np.testing.assert_array_equal(found[0]["c"].blocks[w], p)


def test_a_tree_that_does_not_fit_names_the_leaf():
    optimizer, mesh = optim.adam(), spmd.Mesh(x=2)
    specs = {"w": P("x"), "b": P()}
    params = {"w": np.ones(4), "bias": np.ones(2)}
    run = mesh.map(lambda p, s: s, ({"w": P("x"), "bias": P()}, optimizer.specs(specs)), P())
    with pytest.raises(SpecError, match=r"state.mean has no 'b'|s.mean has no 'b'"):
        run(params, optimizer.init(params))


# Clipping


LAYOUTS = {
    "copies": (P(), P()),
    "split": (P("x"), P(None, "y")),
    "both": (P(("x", "y")), P("y", "x")),
    "mixed": (P(), P("x")),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("axes", [{"x": 1, "y": 1}, {"x": 3, "y": 1}, {"x": 2, "y": 2}], ids=str)
def test_clipping_counts_each_entry_once(name, axes, scheduler):
    mesh, specs = spmd.Mesh(**axes, scheduler=scheduler), LAYOUTS[name]
    grads = [draw(7, dtype=np.float32), draw(5, 3)]
    norm = np.sqrt(sum(np.sum(g.astype(float) ** 2) for g in grads))
    laid = [spmd.put(g, s, mesh) for g, s in zip(grads, specs, strict=True)]
    clip = lambda g, most: optim.clip_by_global_norm(g, most)
    body = mesh.map(clip, ([*specs], P()), [*specs])
    for run in (clip, body):
        once = spmd.jit(run)
        for most in (1.0, norm / 2, norm * 2, 1e-30):
            found = run(laid, most)
            assert bits(once(laid, most)) == bits(found)
            for one, g in zip(found, grads, strict=True):
                np.testing.assert_allclose(one.numpy(), g * min(1, most / norm), rtol=1e-6)


def test_clipping_of_varying_and_of_unreduced_gradients():
    mesh = spmd.Mesh(x=3)
    body = lambda g: optim.clip_by_global_norm(g * (1.0 + spmd.axis_index("x")), 1.0)
    for run in (mesh.map(body, P(), P("x")), spmd.jit(mesh.map(body, P(), P("x")))):
        whole = run(np.ones(2)).numpy()  # ones, twos and threes: values of the workers, which all count
        np.testing.assert_allclose(whole, np.repeat([1, 2, 3], 2) / np.sqrt(28), rtol=1e-14)
    parts = mesh.map(lambda x: x * (1.0 + spmd.axis_index("x")), P(), P(unreduced={"x"}))(np.ones(4))
    clip = lambda g: optim.clip_by_global_norm(g, 1.0)
    for run in (clip, spmd.jit(clip)):
        np.testing.assert_allclose(run(parts).numpy(), np.full(4, 0.5), rtol=1e-14)


@pytest.mark.parametrize(
    ("dtype", "size", "most"),
    [("float32", 1e30, 1.0), ("float32", 1e-30, 1e-31), ("float64", 1e200, 1e190), ("float16", 6e4, 1.0)],
)
def test_programs_decide_about_squares_out_of_range_in_every_run(dtype, size, most):
    mesh = spmd.Mesh(x=3)
    clip = lambda g: optim.clip_by_global_norm(g, most)
    for run in (clip, mesh.map(clip, P("x"), P("x"))):
        once = spmd.jit(run)
        for factor in (1.0, size, 0.0, most, size):
            g = spmd.put((np.clip(draw(7), -1, 1) * factor).astype(dtype), P("x"), mesh)
            assert bits(once(g)) == bits(run(g))


def test_gradients_through_recorded_clipping():
    mesh = spmd.Mesh(x=2)
    body = mesh.map(lambda g: spmd.sum(optim.clip_by_global_norm(g, 1.0) ** 3, "x"), P("x"), P())
    whole = lambda g: (optim.clip_by_global_norm(g, 1.0) ** 3).sum()
    for scale in (0.1, 3.0):
        g = spmd.put(scale * draw(5), P("x"), mesh)
        wanted = spmd.grad(whole)(g.numpy())
        for f in (body, whole):
            for run in (spmd.grad(f), spmd.grad(spmd.jit(f)), spmd.jit(spmd.grad(whole))):
                np.testing.assert_allclose(run(g).numpy(), wanted, rtol=1e-12)


def test_gradients_by_the_bound_of_recorded_clipping():
    mesh = spmd.Mesh(x=2)
    body = lambda g, most: spmd.sum(optim.clip_by_global_norm(g, most) ** 3, "x")
    run = mesh.map(body, (P("x"), P()), P())
    inside = mesh.map(lambda g, most: spmd.grad(body, 1)(g, most), (P("x"), P()), P())
    g = spmd.put(draw(5), P("x"), mesh)
    for scale in (1.0, 1e-30):  # the second: squares that are too small
        arrays = g * scale, np.float64(0.5 * scale)
        wanted = spmd.grad(lambda g, most: (optim.clip_by_global_norm(g, most) ** 3).sum(), 1)(
            g.numpy() * scale, arrays[1]
        )
        for f in (spmd.grad(run, 1), spmd.grad(spmd.jit(run), 1), inside, spmd.jit(inside)):
            np.testing.assert_allclose(np.asarray(f(*arrays)), wanted, rtol=1e-12)


def test_inner_products_of_global_arrays_are_recorded():
    for n in (1, 2, 3):
        mesh = spmd.Mesh(x=n)
        u, v = spmd.put(draw(5, 2), P("x"), mesh), spmd.put(draw(5, 2, seed=1), P(), mesh)
        for f in (
            spmd.inner,
            lambda u, v: u * spmd.norm({"a": u, "b": v}),
            lambda u, v: spmd.inner(u, np.ones((5, 2))),
        ):
            once = spmd.jit(f)
            for a, b in ((u, v), (v, u), (u + 1, v * 2)):
                assert bits(once(a, b)) == bits(f(a, b))


@each_mpi
@pytest.mark.parametrize("axes", [pytest.param((2, 1), marks=pytest.mark.full), (1, 3), (2, 2)])
def test_processes_take_the_same_steps(python, axes):
    ended = launch(PROGRAMS / "recorded_step.py", *map(str, axes), n=axes[0] * axes[1], python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.splitlines() == recorded_step.lines(*axes)
