"""`softmax`, `log_softmax` and `softmin` of arrays that lie anyhow, against torch's on one worker."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, check_layer, random_layout, random_mesh
from spmd import Layout, P, functions
from spmd.errors import SpecError, StateError

NAMES = ["softmax", "log_softmax", "softmin"]
close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


def serial(name: str, x: np.ndarray, axis: int, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The value, and the cotangent of x."""
    sign = -1 if name == "softmin" else 1
    shifted = sign * x - (sign * x).max(axis, keepdims=True, initial=-np.inf)
    total = np.exp(shifted).sum(axis, keepdims=True)
    y = np.exp(shifted) / total
    if name == "log_softmax":
        with np.errstate(divide="ignore"):  # of rows without entries
            return shifted - np.log(total), g - y * g.sum(axis, keepdims=True)
    return y, sign * y * (g - (y * g).sum(axis, keepdims=True))


def check(name: str, seed: int, torch: bool) -> None:
    rng = np.random.default_rng([seed, len(name)])
    mesh = random_mesh(rng)
    x = 20 * rng.normal(size=tuple(rng.integers(0, 7, rng.integers(1, 4)).tolist()))
    g, axis = rng.normal(size=x.shape), int(rng.integers(-x.ndim, x.ndim))
    spec = random_layout(rng, x.shape, mesh)
    fun = getattr(functions, name)
    value, gradient = serial(name, x, axis, g)
    in_body, in_global = partial(fun, axis=axis, spec=spec), partial(fun, axis=axis)
    expected = value, (gradient,)
    check_layer(in_body, expected, (x,), (spec,), spec, mesh, g, compare=close, in_global=in_global, torch=torch)


@FRONTENDS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_any_layouts(name, seed, torch):
    check(name, seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_many_layouts(name, seed, torch):
    check(name, seed, torch)


MESH = spmd.Mesh(x=3)
LIES = {
    "spec": P(None, "x"),
    "cuts": Layout((4, 5), P(None, "x"), MESH.axes, [None, (3, 0, 2)]),
    "grid": Layout.grid((4, 5), (1, 2), MESH.axes, [2, 0], [None, (1, 4)]),
}


def odd_rows() -> np.ndarray:
    """Rows with infinite entries in some blocks, and in all; and rows far from 0, where float32 is coarse."""
    x = np.random.default_rng(0).normal(size=(4, 5)).astype("f4")
    x[0, 3:] = x[1] = -np.inf
    x[2, 0] = np.inf
    x[3] += 5000
    return x


@pytest.mark.torch
@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
@pytest.mark.parametrize("name", NAMES)
def test_infinite_and_large_entries_are_as_in_torch(name, lies):
    import torch

    from spmd.bridge import torch as spt

    x, g = odd_rows(), np.random.default_rng(1).normal(size=(4, 5)).astype("f4")
    fun = partial(getattr(functions, name), spec=lies)

    def both(x: torch.Tensor, call: Any) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        return y.detach(), torch.autograd.grad(y, leaf, torch.tensor(g))[0]

    expected = both(torch.tensor(x), partial(getattr(torch.nn.functional, name), dim=-1))
    found = both(torch.tensor(x), spt.map(fun, lies, lies, mesh=MESH))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-6, equal_nan=True)
    with np.errstate(all="ignore"):
        y, pullback = spmd.vjp(MESH.map(fun, lies, lies), x)
        gradient = pullback(g)[0]
    np.testing.assert_allclose(y.numpy(), expected[0], rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(np.asarray(gradient), expected[1], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_cost(name):
    """Two all-reduces forward, one more backward; where only rows are split, nothing."""
    x = np.random.default_rng(0).normal(size=(3, 7))
    mesh = spmd.Mesh(x=2, y=3)
    for spec, forward, both in ((P("x", "y"), 2, 3), (P("x"), 0, 0)):
        fun = mesh.map(lambda x, spec=spec: getattr(functions, name)(x, spec=spec), spec, spec)
        with spmd.ledger() as first:
            fun(x)
        with spmd.ledger() as all_:
            spmd.vjp(fun, x)[1](x)
        assert sum(first.verbs.values()) == forward
        assert sum(all_.verbs.values()) == both


@FRONTENDS
def test_dtypes(torch):
    """dtype= converts before; results of short numbers are short, computed in longer ones."""
    whole, x = P(None, "x"), np.arange(8).reshape(2, 4)
    if torch:
        from spmd.bridge import torch as spt

        run, give, name = spt.map, __import__("torch").tensor, lambda y: str(y.dtype).removeprefix("torch.")
    else:
        run, give, name = spmd.map, np.asarray, lambda y: y.dtype.name
    expected = serial("softmax", x.astype(float), -1, x)[0]
    for dtype, given, tolerance in ((np.float64, x, 1e-12), (np.float32, x, 1e-6), (None, x.astype("f2"), 1e-3)):
        body = lambda x, dtype=dtype: functions.softmax(x, dtype=dtype, spec=whole)
        y = run(body, whole, whole, mesh=spmd.Mesh(x=3))(give(given))
        assert name(y) == np.dtype(dtype or "f2").name
        np.testing.assert_allclose(np.asarray(y if torch else y.numpy()), expected, rtol=tolerance)


@pytest.mark.torch
def test_torch_s_dtypes_and_numbers():
    import torch

    y = functions.log_softmax(torch.arange(3), dtype=torch.float64)
    assert torch.equal(y, torch.log_softmax(torch.arange(3), -1, dtype=torch.float64))
    assert functions.softmax(torch.tensor(2.0), 0) == 1


def test_errors():
    x = np.ones((2, 3))
    with pytest.raises(StateError, match=r"softmax: argument spec[\s\S]*leave 'x' out of spec"):
        MESH.map(lambda x: functions.softmax(x, spec=P(None, "x")), P(), P())(x)
    with pytest.raises(SpecError, match="a global array has its layout"):
        functions.softmin(spmd.put(x, P("x"), MESH), spec=P("x"))
    with pytest.raises(SpecError, match=r"softmax: argument dtype\n  got:    str 'float23'"):
        functions.softmax(x, dtype="float23")
