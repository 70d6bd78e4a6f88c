"""Programs of global arrays: the numbers of NumPy, and no more moved than by a map that is written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import spmd
from spmd import P

RNG = np.random.default_rng(3)
X, Y = RNG.random((41, 5)), RNG.random(41)


def linear_model(x, y, w):
    """Gradient descent on a linear model."""

    def loss(w):
        return ((x @ w - y) ** 2).mean()

    for _ in range(4):
        w = w - 0.3 * spmd.grad(loss)(w)
    return loss(w), w


def two_layers(x, y, w1, w2):
    """One step of a network of two layers."""

    def loss(w1, w2):
        hidden = np.maximum(x @ w1, 0.1)
        return ((hidden @ w2 - y) ** 2).mean()

    value, (g1, g2) = spmd.value_and_grad(loss, (0, 1))(w1, w2)
    return value, w1 - 0.1 * g1, w2 - 0.1 * g2


def k_means(x, centres):
    for _ in range(3):
        apart = ((x[:, None, :] - centres) ** 2).sum(axis=2)
        nearest = (apart == apart.min(axis=1, keepdims=True)) * 1.0
        centres = np.einsum("nk,nd->kd", nearest, x) / nearest.sum(axis=0)[:, None]
    return centres


def power_iteration(x, v):
    """The first principal component."""
    x = x - x.mean(axis=0)
    for _ in range(5):
        v = (x @ v) @ x
        v = v / np.linalg.norm(v)
    return v


def heat(u):
    for _ in range(4):
        near = np.roll(u, 1, 0) + np.roll(u, -1, 0) + np.roll(u, 1, 1) + np.roll(u, -1, 1)
        u = u + 0.1 * (near - 4 * u)
    return u, u.sum()


def same(have: Any, want: Any) -> None:
    for a, b in zip(spmd.tree.leaves(have), spmd.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a.numpy() if isinstance(a, spmd.PartitionedArray) else a, b, rtol=1e-10)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_data_parallel(workers):
    w = np.zeros(5)
    centres, v, u = X[:3].copy(), np.ones(5), RNG.random((9, 7))
    with spmd.Mesh(data=workers):
        x, y = spmd.put(X, P("data")), spmd.put(Y, P("data"))
        same(linear_model(x, y, w), linear_model(X, Y, w))
        same(linear_model(x, y, spmd.put(w, P())), linear_model(X, Y, w))
        same(k_means(x, centres), k_means(X, centres))
        same(power_iteration(x, v), power_iteration(X, v))
        same(heat(spmd.put(u, P("data"))), heat(u))
        same(heat(spmd.put(u, P(None, "data"))), heat(u))


@pytest.mark.parametrize("sides", [{"data": 2, "model": 2}, {"data": 1, "model": 3}, {"data": 4, "model": 1}])
def test_layers_whose_columns_and_rows_are_split(sides):
    w1, w2 = RNG.random((5, 6)), RNG.random(6)
    with spmd.Mesh(**sides):
        x, y = spmd.put(X, P("data")), spmd.put(Y, P("data"))
        columns, rows = spmd.put(w1, P(None, "model")), spmd.put(w2, P("model"))
        have = two_layers(x, y, columns, rows)
        assert (have[1].spec, have[2].spec) == (columns.spec, rows.spec)
        same(have, two_layers(X, Y, w1, w2))


def moved(f: Callable, *args: Any) -> tuple[int, int]:
    with spmd.ledger() as log:
        f(*args)
    return log.messages, log.bytes


def test_they_move_what_a_map_moves():
    with spmd.Mesh(data=4):
        x, y, w = spmd.put(X, P("data")), spmd.put(Y, P("data")), spmd.put(np.ones(5), P())
        of_arrays = spmd.grad(lambda w: ((x @ w - y) ** 2).mean())

        def local(x, y, w):
            return spmd.sum((x @ w - y) ** 2, "data") / len(Y)

        by_map = spmd.grad(spmd.map(local, (P("data"), P("data"), P()), P()), 2)
        assert moved(of_arrays, w) == moved(by_map, x, y, w)


def test_two_layers_move_what_a_map_moves():
    with spmd.Mesh(data=2, model=2):
        x, y = spmd.put(X, P("data")), spmd.put(Y, P("data"))
        w1, w2 = spmd.put(RNG.random((5, 6)), P(None, "model")), spmd.put(RNG.random(6), P("model"))

        def local(x, y, w1, w2):
            hidden = np.maximum(x @ w1, 0.1)
            return spmd.sum((spmd.psum(hidden @ w2, "model") - y) ** 2, "data") / len(Y)

        by_map = spmd.map(local, (P("data"), P("data"), P(None, "model"), P("model")), P())
        by_hand = spmd.value_and_grad(by_map, (2, 3))
        assert moved(two_layers, x, y, w1, w2) == moved(by_hand, x, y, w1, w2)


def test_k_means_moves_what_a_map_moves():
    def local(x, centres):
        for _ in range(3):
            apart = ((x[:, None, :] - centres) ** 2).sum(axis=2)
            nearest = (apart == apart.min(axis=1, keepdims=True)) * 1.0
            centres = spmd.psum(nearest.T @ x, "data") / spmd.psum(nearest.sum(axis=0), "data")[:, None]
        return centres

    with spmd.Mesh(data=4):
        x, centres = spmd.put(X, P("data")), spmd.put(X[:3], P())
        by_map = spmd.map(local, (P("data"), P()), P())
        same(by_map(x, centres), k_means(X, X[:3]))
        assert moved(lambda x, c: k_means(x, c).numpy(), x, centres) == moved(by_map, x, centres)


def test_power_iteration_moves_what_a_map_moves():
    def local(x, v):
        x = x - spmd.psum(x.sum(axis=0), "data") / len(X)
        for _ in range(5):
            v = spmd.psum((x @ v) @ x, "data")
            v = v / np.linalg.norm(v)
        return v

    with spmd.Mesh(data=4):
        x, v = spmd.put(X, P("data")), spmd.put(np.ones(5), P())
        by_map = spmd.map(local, (P("data"), P()), P())
        same(by_map(x, v), power_iteration(X, np.ones(5)))
        assert moved(lambda x, v: power_iteration(x, v).numpy(), x, v) == moved(by_map, x, v)


def test_heat_moves_what_a_map_moves():
    def local(u):
        for _ in range(4):
            wide = spmd.halo_exchange(u, P("rows"), ((1, 1), (0, 0)), "periodic")
            near = wide[2:] + wide[:-2] + np.roll(u, 1, 1) + np.roll(u, -1, 1)
            u = u + 0.1 * (near - 4 * u)
        return u, spmd.sum(u, "rows")

    start = RNG.random((9, 7))
    with spmd.Mesh(rows=4):
        u = spmd.put(start, P("rows"))
        by_map = spmd.map(local, P("rows"), (P("rows"), P()))
        same(by_map(u), heat(start))
        assert moved(lambda u: float(heat(u)[1]), u) == moved(by_map, u)
