"""Layers of an ensemble: arrays that vary over an axis of the mesh which no spec of a layer names, weights too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

import spmd
from spmd import P
from spmd import functions as F


class Layer(NamedTuple):
    """fun(*arrays, split) of one member: by specs over axis x if split, else of the whole. shapes, specs: of the arrays
    of a member; out: of the result. ids: the places of integers below 5, which are not differentiated."""

    fun: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    specs: Sequence[tuple]
    out: tuple
    ids: tuple[int, ...] = ()


def by(split: bool, *dims: Any) -> P | None:
    return P(*dims) if split else None


def gru(spec: tuple, w_spec: tuple, out: tuple) -> Layer:
    def fun(x, ih, hh, split):
        params = {"weight_ih_l0": ih, "weight_hh_l0": hh}
        return F.gru(x, None, params, spec=by(split, *spec), w_spec=by(split, *w_spec))[0]

    weights = (None, *w_spec)
    return Layer(fun, [(5, 4, 3), (3, 6, 3), (3, 6, 6)], [spec, weights, weights], out)


def attention(method: str) -> Layer:
    def fun(q, k, v, split):
        return F.attention(q, k, v, causal=True, spec=by(split, None, "x"), method=method if split else None)

    return Layer(fun, [(4, 8, 3)] * 3, [(None, "x")] * 3, (None, "x"))


IMAGE, ROWS = (2, 3, 9, 7), (None, None, "x")
LAYERS = {
    "linear": Layer(lambda x, w, s: F.linear(x, w, spec=by(s, "x")), [(7, 4), (5, 4)], [("x",), ()], ("x",)),
    "conv": Layer(lambda x, w, s: F.conv(x, w, padding=1, spec=by(s, *ROWS)), [IMAGE, (4, 3, 3, 3)], [ROWS, ()], ROWS),
    "conv_transpose": Layer(
        lambda x, w, s: F.conv_transpose(x, w, stride=2, spec=by(s, *ROWS)), [IMAGE, (3, 4, 3, 3)], [ROWS, ()], ROWS
    ),
    "max_pool": Layer(lambda x, s: F.max_pool(x, 3, stride=2, padding=1, spec=by(s, *ROWS)), [IMAGE], [ROWS], ROWS),
    "pad": Layer(lambda x, s: F.pad(x, 1, mode="reflect", spec=by(s, "x")), [(9, 7)], [("x",)], ("x",)),
    "resize": Layer(lambda x, s: F.resize(x, size=(13, 5), spec=by(s, *ROWS)), [IMAGE], [ROWS], ROWS),
    "batch_norm": Layer(lambda x, w, s: F.batch_norm(x, w, spec=by(s, "x")), [(6, 3), (3,)], [("x",), ()], ("x",)),
    "group_norm": Layer(
        lambda x, w, s: F.group_norm(x, 1, w, spec=by(s, None, "x")),
        [(6, 3, 5), (3,)],
        [(None, "x"), ("x",)],
        (None, "x"),
    ),
    "layer_norm": Layer(
        lambda x, w, s: F.layer_norm(x, w, spec=by(s, None, "x")), [(6, 5), (5,)], [(None, "x"), ("x",)], (None, "x")
    ),
    "mse_loss": Layer(lambda x, t, s: F.mse_loss(x, t, spec=by(s, "x")), [(7, 5)] * 2, [("x",)] * 2, ()),
    "cross_entropy": Layer(
        lambda x, t, s: F.cross_entropy(x, t, spec=by(s, None, "x")), [(7, 5), (7,)], [(None, "x"), ()], (), (1,)
    ),
    "embedding": Layer(
        lambda table, ids, s: F.embedding(table, ids, table_spec=by(s, "x")), [(5, 3), (7,)], [("x",), ()], (), (1,)
    ),
    "rope": Layer(lambda x, s: F.rope(x, spec=by(s, "x")), [(8, 6)], [("x",)], ("x",)),
    **{f"attention by {method}": attention(method) for method in ("heads", "sequence", "ring")},
    "gru, time": gru(("x",), (), ("x",)),
    "gru, batch": gru((None, "x"), (), (None, "x")),
    "gru, features": gru((), ("x",), (None, None, "x")),
    "rfftn": Layer(
        lambda x, s: np.abs(spmd.fft.rfftn(x, spec=by(s, "x"), out_spec=by(s, "x"))), [(8, 6)], [("x",)], ("x",)
    ),
}


@pytest.mark.parametrize("how", ["states", "no states", "jit"])
@pytest.mark.parametrize("name", LAYERS)
def test_each_member_has_its_own_values_and_gradients(name, how):
    fun, shapes, dims, out_dims, ids = LAYERS[name]
    rng, members = np.random.default_rng(0), 2
    arrays = [
        rng.integers(0, 5, (members, *shape)) if k in ids else rng.standard_normal((members, *shape))
        for k, shape in enumerate(shapes)
    ]
    chosen = [k for k in range(len(arrays)) if k not in ids]
    specs, out = [P("member", *each) for each in dims], P("member", *out_dims)

    def whole(*some):
        given = dict(zip(chosen, some, strict=True))
        operands = [given.get(k, a) for k, a in enumerate(arrays)]
        return np.stack([fun(*(a[m] for a in operands), False) for m in range(members)])

    mesh = spmd.Mesh(x=2, member=members)
    mapped = mesh.map(
        lambda *blocks: fun(*(b[0] for b in blocks), True)[None], tuple(specs), out, check=how != "no states"
    )
    mapped = spmd.jit(mapped) if how == "jit" else mapped

    def split(*some):
        given = dict(zip(chosen, some, strict=True))
        return mapped(*(given.get(k, a) for k, a in enumerate(arrays)))

    for scale in (1.0, -0.5):  # a recorded program is run again with other values
        some = [scale * arrays[k] for k in chosen]
        value, pullback = spmd.vjp(whole, *some)
        ours, pullback_ours = spmd.vjp(split, *some)
        np.testing.assert_allclose(ours.numpy(), value, atol=1e-10)
        g = rng.standard_normal(value.shape)
        for a, b in zip(pullback_ours(spmd.put(g, out, mesh)), pullback(g), strict=True):
            np.testing.assert_allclose(np.asarray(a), b, atol=1e-9)
