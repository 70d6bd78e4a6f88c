"""Recurrent layers and cells of `spt.nn` against those of torch, whatever is split."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import spmd
from bridge.torch.nn.module_cases import Case, check_module, double_precision, table
from spmd import Grid, Layout, P
from spmd.bridge import torch as spt
from spmd.errors import SpecError

pytestmark = pytest.mark.torch

THREE = {"model": 3}
FOUR = {"data": 2, "model": 2}
SIZES = {"input_size": 3, "hidden_size": 5}
STATE = P(None, "data", "model")
WHOLE = P(), P(), P()


def grid(shape, dims, workers, axes):
    return Layout.grid(shape, dims, axes, workers)


def with_state(layer, x, h, *c):
    return layer(x, (h, *c) if c else h)


@table(
    Case("RNN", SIZES, {}, [(4, 2, 3)], [P()], (P(), P()), THREE),
    Case(
        "RNN",
        {**SIZES, "nonlinearity": "relu"},
        {"w_spec": P("model")},
        [(4, 2, 3)],
        [P()],
        (P(None, None, "model"),) * 2,
        THREE,
    ),
    Case(
        "RNN",
        {**SIZES, "batch_first": True},
        {"spec": P("data", "model")},
        [(1, 5, 3)],
        [P("data", "model")],
        (P("data", "model"), P(None, "data")),
        FOUR,
    ),
    Case(
        "RNN",
        {**SIZES, "num_layers": 2, "bidirectional": True},
        {"spec": P("model"), "microbatches": 2},
        [(4, 3, 3)],
        [P("model")],
        (P("model"), P()),
        THREE,
    ),
    Case("RNN", {**SIZES, "bias": False}, {}, [(4, 3)], [P()], (P(), P()), THREE),
    Case(
        "GRU",
        {**SIZES, "num_layers": 2},
        {"spec": P(None, "data"), "w_spec": P("model")},
        [(4, 3, 3), (2, 3, 5)],
        [P(None, "data"), STATE],
        (STATE, STATE),
        FOUR,
        with_state,
    ),
    Case(
        "GRU",
        {**SIZES, "bidirectional": True, "batch_first": True},
        {"w_spec": P("model")},
        [(2, 4, 3)],
        [P()],
        (P(), P(None, None, "model")),
        THREE,
    ),
    Case(
        "GRU",
        {"input_size": 3, "hidden_size": 2},
        {"w_spec": P("model")},
        [(4, 3), (1, 2)],
        [P(), P(None, "model")],
        (P(None, "model"),) * 2,
        THREE,
        with_state,
    ),
    Case(
        "GRU",
        SIZES,
        {"spec": Grid((2, 2, 1), workers=[3, 0, 1, 2])},
        [(4, 3, 3)],
        [grid((4, 3, 3), (2, 2, 1), [3, 0, 1, 2], FOUR)],
        (grid((4, 3, 5), (2, 2, 1), [3, 0, 1, 2], FOUR), grid((1, 3, 5), (1, 2, 1), [3, 0], FOUR)),
        FOUR,
    ),
    Case("LSTM", SIZES, {"w_spec": P("model")}, [(4, 2, 3)], [P()], (P(None, None, "model"),) * 3, {"model": 2}),
    Case(
        "LSTM",
        {**SIZES, "num_layers": 2, "bias": False},
        {"spec": P("data", "model")},
        [(5, 1, 3), (2, 1, 5), (2, 1, 5)],
        [P("data", "model"), P(None, "model"), P(None, "model")],
        (P("data", "model"), P(None, "model"), P(None, "model")),
        FOUR,
        with_state,
    ),
    Case(
        "LSTM",
        {**SIZES, "proj_size": 2, "bidirectional": True},
        {"spec": P(None, "data"), "w_spec": P("model")},
        [(4, 3, 3)],
        [P(None, "data")],
        (P(None, "data"), P(None, "data"), STATE),
        FOUR,
    ),
    Case(
        "LSTM",
        SIZES,
        {"w_spec": Layout((5,), P("model"), THREE, [(1, 4, 0)])},
        [(3, 2, 3)],
        [P()],
        (
            Layout((3, 2, 5), P(None, None, "model"), THREE, [None, None, (1, 4, 0)]),
            *[Layout((1, 2, 5), P(None, None, "model"), THREE, [None, None, (1, 4, 0)])] * 2,
        ),
        THREE,
    ),
    Case("RNNCell", SIZES, {"w_spec": P("model")}, [(2, 3)], [P()], P(None, "model"), THREE),
    Case(
        "RNNCell",
        {**SIZES, "nonlinearity": "relu", "bias": False},
        {"spec": P("model")},
        [(2, 3), (2, 5)],
        [P("model")] * 2,
        P("model"),
        THREE,
        with_state,
    ),
    Case(
        "GRUCell",
        SIZES,
        {"spec": P("data"), "w_spec": P("model")},
        [(3, 3), (3, 5)],
        [P("data"), P("data", "model")],
        P("data", "model"),
        FOUR,
        with_state,
    ),
    Case(
        "LSTMCell",
        SIZES,
        {"spec": P("data"), "w_spec": P("model")},
        [(3, 3), (3, 5), (3, 5)],
        [P("data"), *[P("data", "model")] * 2],
        (P("data", "model"),) * 2,
        FOUR,
        with_state,
    ),
    Case("LSTMCell", SIZES, {}, [(3,), (5,), (5,)], WHOLE, (P(), P()), THREE, with_state),
)
def test_recurrent(case):
    check_module(case)


@pytest.mark.parametrize("name", ["RNN", "LSTM"])
@pytest.mark.parametrize("w_spec", [None, P("model")])
def test_packed(name, w_spec):
    """Packed sequences that are not sorted: outputs are packed, and states in the order of the sequences."""
    rng = np.random.default_rng(0)
    sequences = [torch.tensor(rng.standard_normal((n, 3))) for n in (2, 4, 1)]
    with double_precision():
        whole = getattr(nn, name)(**SIZES)
        packed = pack_sequence(sequences, enforce_sorted=False)
        h = torch.tensor(rng.standard_normal((1, 3, 5)))
        hx = (h, h + 1) if name == "LSTM" else h
        wanted, states = whole(packed, hx)

        def body(data, hx):
            layer = getattr(spt.nn, name).from_torch(whole, w_spec=w_spec)
            y, states = layer(packed._replace(data=data), hx)
            assert torch.equal(y.batch_sizes, packed.batch_sizes)
            return y.data, states

        lies = P(None, None, "model") if w_spec else P()
        rows = P(None, "model") if w_spec else P()
        y, found = spt.map(body, (P(), lies), (rows, lies), mesh=spmd.Mesh(**THREE))(packed.data, hx)
    torch.testing.assert_close(y.detach(), wanted.data.detach())
    torch.testing.assert_close(found, states, check_device=False)


@pytest.mark.parametrize(
    ("spec", "w_spec", "lies"),
    [(P("data"), P("model"), P("data", None, "model")), (P(None, "model"), None, P(None, "model"))],
)
def test_dropout_on_any_mesh(spec, w_spec, lies):
    """Between layers, by the index in the whole, in training only."""
    x = torch.tensor(np.random.default_rng(0).standard_normal((4, 3, 3)))

    def run(axes, specs, ins, out, train=True):
        def body(x):
            layer = spt.nn.GRU(**SIZES, num_layers=3, dropout=0.5, **specs, dtype=torch.float64, generator=1)
            return layer.train(train)(x)[0]

        torch.manual_seed(0)
        return spt.map(body, ins, out, mesh=spmd.Mesh(**axes))(x).detach()

    one = run({"data": 1}, {}, P(), P())
    torch.testing.assert_close(run(FOUR, {"spec": spec, "w_spec": w_spec}, spec, lies), one)
    assert not torch.allclose(run({"data": 1}, {}, P(), P(), train=False), one)


def test_mistakes():
    def body(make):
        return spt.map(make, (), None, mesh=spmd.Mesh(**THREE))()

    with pytest.raises(SpecError, match=r"(?s)spt.nn.LSTM.*w_spec.*hidden features alone"):
        body(lambda: spt.nn.LSTM(3, 5, w_spec=P(None, "model")))
    with pytest.raises(SpecError, match=r"(?s)spt.nn.GRU.*input.*three dimensions"):
        body(lambda: spt.nn.GRU(3, 5)(torch.zeros(3)))
    with pytest.raises(SpecError, match=r"PackedSequence, with spec"):
        body(lambda: spt.nn.GRU(3, 5, spec=P("model"))(pack_sequence([torch.zeros(2, 3)])))
    with pytest.raises(SpecError, match=r"batch_first"):
        body(lambda: spt.nn.GRU(3, 5, batch_first=True, spec=Grid((2, 1, 1)))(torch.zeros(1, 2, 3)))
