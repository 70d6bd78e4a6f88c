"""`spmd.functions.experts` where tokens, scores and parameters do not vary over the same axes: against the same
experts all on one worker, once for each place along the further axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spmd
from spmd import P, functions

SPLITS = [(x, gate, w) for x in (False, True) for gate in (False, True) for w in (False, True)]


def applied(w: Any, rows: Any) -> Any:
    return (rows @ w) ** 2


def drawn(seed: int, data: int, split: tuple[bool, ...]) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Tokens, scores and parameters, with a first dimension along data where they are split over it; and options."""
    rng = np.random.default_rng(seed)
    tokens, experts = int(rng.integers(0, 9)), int(rng.integers(1, 5))
    shapes = zip([(tokens, 3), (tokens, experts), (experts, 3, 3)], split, strict=True)
    arrays = [rng.normal(size=(data, *shape) if is_split else shape) for shape, is_split in shapes]
    capacity = int(rng.integers(1, 6)) if rng.random() < 0.4 else None
    options = {"k": int(rng.integers(1, experts + 1)), "capacity": capacity, "renormalize": bool(rng.random() < 0.5)}
    return arrays, options


def of_one(arrays: list[np.ndarray], split: tuple[bool, ...], data: int, options: dict[str, Any]) -> Callable[..., Any]:
    """The loss, in which each place along data counts with another factor."""

    def loss(*args: Any) -> Any:
        parts = [[a[d] if s else a for a, s in zip(args, split, strict=True)] for d in range(data)]
        ys = [functions.experts(x, gate, applied, params=w, **options) for x, gate, w in parts]
        return sum((d + 1) * np.sum(np.sin(y)) for d, y in enumerate(ys))

    return loss


@given(st.integers(0, 10**6), st.sampled_from(SPLITS), st.sampled_from([{"data": 2, "e": 2}, {"e": 3, "data": 2}]))
@settings(max_examples=25)
def test_gradients_are_summed_where_arrays_do_not_vary(seed, split, axes):
    arrays, options = drawn(seed, axes["data"], split)

    def body(*blocks: Any) -> Any:
        x, gate, w = (block[0] if s else block for block, s in zip(blocks, split, strict=True))
        y = functions.experts(x, gate, applied, "e", params=w, **options)
        total = (spmd.axis_index("data") + 1) * np.sum(np.sin(y))
        return spmd.psum(total, ("data", "e"))

    specs = tuple(P("data", "e") if s else P("e") for s in split)
    f = spmd.map(body, in_specs=specs, out_specs=P(), mesh=spmd.Mesh(**axes, transport="local"))
    value, gradients = spmd.value_and_grad(f, (0, 1, 2))(*arrays)
    expected, wanted = spmd.value_and_grad(of_one(arrays, split, axes["data"], options), (0, 1, 2))(*arrays)
    np.testing.assert_allclose(float(value), expected, rtol=1e-12, atol=1e-12)
    for got, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(got), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_parameters_of_all_dtypes_are_summed_where_workers_have_no_experts(dtype):
    """Six workers and two experts: each takes part in the sums over data, whatever the dtype."""
    kind = np.dtype(dtype) if dtype != "bfloat16" else pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(0)
    x, gate, w = (rng.normal(size=shape).astype(kind) for shape in ((9, 3), (9, 2), (2, 3, 3)))

    def gradient(axes: dict[str, int]) -> np.ndarray:
        names = tuple(axes)
        body = lambda x, gate, w: spmd.psum(
            np.sum(functions.experts(x, gate, applied, "e", params=w).astype(np.float32)), names
        )
        f = spmd.map(body, (P(names), P(names), P("e")), P(), mesh=spmd.Mesh(**axes, transport="local"))
        return np.asarray(spmd.grad(f, 2)(x, gate, w)).astype(float)

    np.testing.assert_allclose(gradient({"data": 2, "e": 3}), gradient({"e": 1}), rtol=0.05, atol=0.05)


def test_a_list_of_functions_takes_parameters_too():
    """Each function has its own entries; they are called as one function for all is."""
    rng = np.random.default_rng(0)
    x, gate, w = rng.normal(size=(7, 3)), rng.normal(size=(7, 3)), rng.normal(size=(3, 3, 3))
    factors = [1.0, 2.0, 3.0]

    def body(x, gate, w):
        own = factors[:2] if spmd.worker_index("e") == 0 else factors[2:]
        fns = [lambda w, rows, c=c: c * applied(w, rows) for c in own]
        return functions.experts(x, gate, fns, "e", params=w)

    y = spmd.map(body, P("e"), P("e"), mesh=spmd.Mesh(e=2))(x, gate, w)
    scaled = w * np.sqrt(factors)[:, None, None]
    np.testing.assert_allclose(y.numpy(), functions.experts(x, gate, applied, params=scaled), rtol=1e-12)
    with pytest.raises(spmd.errors.SpecError, match="for 2 functions"):
        functions.experts(x, gate, [applied] * 2, params=w)


def test_losses_take_scores_of_any_number_of_dimensions():
    scores = np.random.default_rng(0).normal(size=(4, 3, 5))
    for loss in (functions.load_balance_loss, functions.router_z_loss):
        f = spmd.map(lambda s, loss=loss: loss(s, "x"), P("x"), P(), mesh=spmd.Mesh(x=3))
        np.testing.assert_allclose(float(f(scores)), loss(scores.reshape(12, 5)), rtol=1e-12)
