"""How many units are whole at a time, what is sent, and how a loop over gathered units ends."""

from __future__ import annotations

import tracemalloc
import weakref

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import StateError
from spmd.mesh import WORKER
from spmd.training import gathered
from spmd.training.units import Unit

LAYERS, WIDTH = 6, 5
SCHEDULERS = pytest.mark.parametrize("scheduler", ["lockstep", "threads"])


def layers_of(count=LAYERS):
    rng = np.random.default_rng(3)
    return [
        {"w": rng.standard_normal((WIDTH, 9)), "b": rng.standard_normal(9), "v": rng.standard_normal((9, WIDTH))}
        for _ in range(count)
    ]


X = np.random.default_rng(4).standard_normal((7, WIDTH))


def layer(w, x):
    """With views of the whole arrays that the tape keeps: a transpose, a slice and a reshape."""
    y = np.tanh(x @ w["w"].T.reshape(9, WIDTH).T[:, ::-1] + w["b"])
    return y @ np.reshape(w["v"], (3, 3, WIDTH)).reshape(9, WIDTH) + x


def serial(layers, x):
    for w in layers:
        x = layer(w, x)
    return np.mean(x**2)


@pytest.fixture
def most(monkeypatch):
    """By worker, how many units have been whole or under way at a time at most."""
    wholes, most = {}, {}
    start, wait = Unit.start, Unit.wait

    def count(worker):
        wholes[worker] = [refs for refs in wholes.get(worker, []) if any(r() is not None for r in refs)]
        most[worker] = max(most.get(worker, 0), len(wholes[worker]) + 1)

    class Token:
        """Something that lives for as long as a collective is under way."""

    tokens = {}

    def counted_start(self, worker, frame=None):
        if self.wholes is None and self._finishes is None:
            token = tokens[id(self)] = Token()
            count(worker.index)
            wholes[worker.index].append([weakref.ref(token)])
        start(self, worker, frame)

    def counted_wait(self):
        arriving, found = self.wholes is None, wait(self)
        if arriving:
            worker, token = WORKER.get().index, tokens.pop(id(self))
            wholes[worker] = [refs for refs in wholes[worker] if refs[0]() is not token]
            alive = [weakref.ref(x) for x in found]
            wholes[worker].append(alive)
        return found

    monkeypatch.setattr(Unit, "start", counted_start)
    monkeypatch.setattr(Unit, "wait", counted_wait)
    return most


@spmd.custom_vjp
def ruled(w, x):
    return layer(w, x)


ruled.defvjp(lambda w, x: (layer(w, x), (w, x)), lambda kept, g: spmd.vjp(layer, *kept)[1](g))


def _looped(layers, x, use=layer, **options):
    for w in gathered(layers, P("data"), "data", **options):
        x = use(w, x)
    return spmd.mean(x**2, "data")


def _two_loops(layers, x, use=layer, **options):
    for w in gathered(layers[:3], P("data"), "data", **options):
        x = use(w, x)
    del w
    for w in gathered(layers[3:], P("data"), "data", **options):
        x = use(w, x)
    return spmd.mean(x**2, "data")


def _unpacked(layers, x, use=layer, **options):
    for w, b, v in gathered([(u["w"], u["b"], u["v"]) for u in layers], P("data"), "data", **options):
        x = use({"w": w, "b": b, "v": v}, x)
    return spmd.mean(x**2, "data")


BODIES = {
    "for": _looped,
    "two loops": _two_loops,
    "unpacked": _unpacked,
    "checkpointed": lambda layers, x, **options: _looped(layers, x, spmd.checkpoint(layer), **options),
    "custom rule": lambda layers, x, **options: _looped(layers, x, ruled, **options),
}


@SCHEDULERS
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("body", BODIES)
def test_so_many_units_are_whole_at_a_time(body, prefetch, scheduler, most):
    layers = layers_of()
    with spmd.Mesh(data=2, scheduler=scheduler):
        f = spmd.map(lambda w, x: BODIES[body](w, x, prefetch=prefetch), (P("data"), P("data")), P())
        f(layers, X)
        assert set(most.values()) == {prefetch + 1}
        most.clear()
        grads = spmd.grad(f)(layers, X)
        assert set(most.values()) == {prefetch + 1}
        most.clear()
        _, pull = spmd.vjp(f, layers, X)
        for _ in range(2):
            pulled, _ = pull(1.0)
        assert set(most.values()) == {prefetch + 1}
    wanted = spmd.grad(serial)(layers, X)
    for found in (grads, pulled):
        for a, b in zip(found, wanted, strict=True):
            for name in b:
                np.testing.assert_allclose(a[name], b[name], atol=1e-12)


def test_bytes_that_are_alive_at_most():
    """Measured by tracemalloc, in units of a layer: activations are small, and there are no gradients yet."""
    count, width = 8, 90
    rng = np.random.default_rng(0)

    def body(layers, x, prefetch):
        if prefetch is None:
            units = (spmd.all_gather(w, "data", tiled=True) for w in layers)
        else:
            units = gathered(layers, P("data"), "data", prefetch=prefetch)
        for w in units:
            x = np.tanh(x @ w)
        return spmd.mean(x, "data")

    peaks = {}
    with spmd.Mesh(data=2, scheduler="lockstep"):
        layers = [spmd.put(rng.standard_normal((width, width)) / 20, P("data")) for _ in range(count)]
        x = spmd.put(rng.standard_normal((2, width)), P("data"))
        for prefetch in (0, 1, 2, None):
            f = spmd.map(lambda w, x, n=prefetch: body(w, x, n), ([P("data")] * count, P("data")), P())
            spmd.vjp(f, layers, x)
            tracemalloc.start()
            _, pull = spmd.vjp(f, layers, x)
            peaks[prefetch] = tracemalloc.get_traced_memory()[1] / (width * width * 8)
            tracemalloc.stop()
            del pull
    assert peaks[0] < 3
    assert round(peaks[1] - peaks[0]) == 1
    assert round(peaks[2] - peaks[1]) == 1
    assert peaks[None] - peaks[0] > count - 2


def test_what_a_step_sends():
    layers = [{"w": np.ones((200, 200)), "b": np.ones(200), "c": np.ones(200)} for _ in range(4)]

    def body(layers, x):
        for w in gathered(layers, P("data"), "data"):
            x = np.tanh(x @ w["w"] + w["b"] * w["c"])
        return spmd.mean(x, "data")

    with spmd.Mesh(data=2):
        f = spmd.map(body, (P("data"), P("data")), P())
        with spmd.ledger() as log:
            spmd.value_and_grad(f)(layers, np.ones((4, 200)))
        # Forward each unit's large array, and its small ones in one pack; again but the last; sums of both.
        assert log.operators["AllGather"] == 2 * 4 + 2 * 3
        assert log.operators["ReduceScatter"] == 2 * 4
        rows = {(row.operator, row.direction): row for row in log.rows()}
        nbytes = 4 * (200 * 200 + 400) * 8 // 2
        assert rows["AllGather", "forward"].bytes == nbytes
        assert rows["AllGather", "backward"].bytes == nbytes * 3 // 4
        assert rows["ReduceScatter", "backward"].bytes == nbytes
        lines = {row.line for row in log.rows() if row.operator in ("AllGather", "ReduceScatter")}
        assert len(lines) == 1
        assert "in body" in lines.pop()


@SCHEDULERS
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_loop_that_breaks(prefetch, scheduler):
    layers = layers_of()

    def body(layers, x):
        for k, w in enumerate(gathered(layers, P("data"), "data", prefetch=prefetch)):
            x = layer(w, x)
            if k == 2:
                break
        return spmd.mean(x**2, "data")

    with spmd.Mesh(data=3, scheduler=scheduler):
        value, grads = spmd.value_and_grad(spmd.map(body, (P("data"), P("data")), P()))(layers, X)
    wanted = spmd.value_and_grad(serial)(layers[:3], X)
    np.testing.assert_allclose(value, wanted[0])
    for a, b in zip(grads, wanted[1], strict=False):
        np.testing.assert_allclose(a["w"], b["w"], atol=1e-12)
    assert not any(np.any(g) for w in grads[3:] for g in w.values())


@SCHEDULERS
def test_an_error_in_the_loop_of_one_worker_ends_all(scheduler):
    def body(layers, x):
        for k, w in enumerate(gathered(layers, P("data"), "data")):
            if k == 2 and spmd.worker_index("data") == 1:
                raise ZeroDivisionError("of one worker")
            x = layer(w, x)
        return spmd.mean(x**2, "data")

    layers = layers_of()
    with spmd.Mesh(data=3, scheduler=scheduler):
        f = spmd.map(body, (P("data"), P("data")), P())
        with pytest.raises(ZeroDivisionError, match="of one worker"):
            f(layers, X)
        with pytest.raises(ZeroDivisionError, match="of one worker"):
            spmd.grad(f)(layers, X)


def test_arrays_that_the_program_keeps_are_right():
    layers = layers_of(3)

    def body(layers, x):
        kept = []
        for w in gathered(layers, P("data"), "data"):
            kept.append(w["v"].T)
            x = layer(w, x)
        units = gathered(layers, P("data"), "data")
        first, second = next(units), next(units)
        third = next(units)
        for view, w in zip(kept, (first, second, third), strict=True):
            x = x + (x @ view.T[:WIDTH]) * np.sum(w["v"])
        return spmd.mean(x**2, "data")

    def one(layers, x):
        y = x
        for w in layers:
            y = layer(w, y)
        for w in layers:
            y = y + (y @ w["v"][:WIDTH]) * np.sum(w["v"])
        return np.mean(y**2)

    with spmd.Mesh(data=2):
        grads = spmd.grad(spmd.map(body, (P("data"), P("data")), P()))(layers, X)
    for a, b in zip(grads, spmd.grad(one)(layers, X), strict=True):
        for name in b:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-11)


def test_the_variable_of_the_loop_is_right_after_it():
    layers = layers_of(3)

    def body(layers, x):
        for w in gathered(layers, P("data"), "data"):
            x = layer(w, x)
        broken = gathered(layers, P("data"), "data")
        for v in broken:
            x = layer(v, x)
            break
        del broken
        return spmd.mean(layer(v, layer(w, x)) ** 2, "data")

    def one(layers, x):
        return serial([*layers, layers[0], layers[-1], layers[0]], x)

    with spmd.Mesh(data=2):
        found = spmd.value_and_grad(spmd.map(body, (P("data"), P("data")), P()))(layers, X)
    value, grads = spmd.value_and_grad(one)(layers, X)
    np.testing.assert_allclose(found[0], value)
    for a, b in zip(found[1], grads, strict=True):
        for name in b:
            np.testing.assert_allclose(a[name], b[name], rtol=1e-10)


@pytest.mark.parametrize("options", [{"nans": True}, {"mutation": True}, {"replicas": True}], ids=str)
def test_what_debuggers_look_at_is_kept(options):
    layers = layers_of(3)
    with spmd.Mesh(data=2), spmd.debug(**options):
        grads = spmd.grad(spmd.map(_looped, (P("data"), P("data")), P()))(layers, X)
    for a, b in zip(grads, spmd.grad(serial)(layers, X), strict=True):
        np.testing.assert_allclose(a["w"], b["w"], atol=1e-12)


def test_an_array_that_was_given_up_says_so():
    def body(layers, x):
        for w in gathered(layers, P("data"), "data"):
            if x is not None:
                mine, x = w, None
                del w
        return mine["w"] + 1

    with spmd.Mesh(data=2), pytest.raises(StateError, match="had left the unit"):
        spmd.map(body, (P("data"), P("data")), P("data"))(layers_of(3), X)


def test_frozen_units_are_dropped_too(most):
    layers = layers_of()

    def body(frozen, x):
        def inner(x):
            return _looped(frozen, x)

        return spmd.grad(inner)(x)

    with spmd.Mesh(data=2):
        found = spmd.map(body, (P("data"), P("data")), P("data"))(layers, X)
    np.testing.assert_allclose(found.numpy(), spmd.grad(serial, 1)(layers, X), atol=1e-12)
    assert set(most.values()) == {2}


def test_a_body_without_states():
    layers = layers_of()
    with spmd.Mesh(data=2):
        f = spmd.map(_looped, (P("data"), P("data")), P(), check=False)
        np.testing.assert_allclose(f(layers, X), serial(layers, X))
        grads = spmd.grad(f)(layers, X)
    np.testing.assert_allclose(grads[0]["w"], spmd.grad(serial)(layers, X)[0]["w"], atol=1e-12)
