"""`spt.nn.MultiheadAttention` against torch's, with heads, batch and sequences split."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

import spmd
from bridge.torch.nn.module_cases import Case, check_module, double_precision, table
from spmd import P
from spmd.bridge import torch as spt
from spmd.errors import SpecError

pytestmark = pytest.mark.torch

TWO = {"model": 2}
THREE = {"model": 3}
FOUR = {"data": 2, "model": 2}
EIGHT = {"embed_dim": 8, "num_heads": 4}
SIX = {"embed_dim": 6, "num_heads": 3}
HEADS = {"heads": "model"}


def hidden(*shape):
    """A mask of booleans that hides some keys, and never the first."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.4
    mask[..., 0] = False
    return mask


def added(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def of_self(**options):
    return lambda layer, x, **more: layer(x, x, x, **options)


def padded(**options):
    return lambda layer, q, kv, mask: layer(q, kv, kv, key_padding_mask=mask, **options)


def masked(**options):
    return lambda layer, q, kv, mask: layer(q, kv, kv, attn_mask=mask, **options)


def of_three(**options):
    return lambda layer, q, k, v: layer(q, k, v, **options)


def both_masks(layer, x, padding, mask):
    return layer(x, x, x, padding, attn_mask=mask, need_weights=False)


CAUSAL = torch.triu(torch.full((5, 5), -torch.inf, dtype=torch.float64), 1)


@table(
    Case("MultiheadAttention", EIGHT, {}, [(5, 2, 8)], [P()], (P(), P()), TWO, of_self()),
    Case("MultiheadAttention", EIGHT, HEADS, [(5, 2, 8)], [P()], (P(), P()), THREE, of_self()),
    Case("MultiheadAttention", SIX, HEADS, [(5, 2, 6)], [P()], P(), TWO, of_self(need_weights=False)),
    Case("MultiheadAttention", SIX, HEADS, [(3, 2, 6)], [P()], P(), {"model": 4}, of_self(need_weights=False)),
    Case(
        "MultiheadAttention",
        {**EIGHT, "batch_first": True, "bias": False},
        {**HEADS, "spec": P("data")},
        [(3, 5, 8)],
        [P("data")],
        (P("data"), P("data", "model")),
        FOUR,
        of_self(average_attn_weights=False),
    ),
    Case(
        "MultiheadAttention",
        {**EIGHT, "batch_first": True},
        {**HEADS, "spec": P("data", "model")},
        [(1, 5, 8)],
        [P("data", "model")],
        P("data", "model"),
        FOUR,
        of_self(need_weights=False),
    ),
    Case(
        "MultiheadAttention",
        {**EIGHT, "kdim": 3, "vdim": 5, "batch_first": True},
        {**HEADS, "spec": P("data")},
        [(3, 5, 8), (3, 4, 3), (3, 4, 5)],
        [P("data")] * 3,
        (P("data"), P("data")),
        FOUR,
        of_three(),
    ),
    Case(
        "MultiheadAttention",
        EIGHT,
        {"spec": P("model"), "method": "ring"},
        [(7, 2, 8)],
        [P("model")],
        P("model"),
        THREE,
        of_self(need_weights=False),
    ),
    Case(
        "MultiheadAttention",
        EIGHT,
        {"spec": P("model"), "method": "sequence"},
        [(7, 2, 8)],
        [P("model")],
        P("model"),
        THREE,
        of_self(need_weights=False),
    ),
    Case(
        "MultiheadAttention",
        EIGHT,
        {"spec": P("model"), "kv_spec": P(), "out_spec": P()},
        [(7, 2, 8), (3, 2, 8), (3, 2, 8)],
        [P("model"), P(), P()],
        (P(), P(None, "model")),
        THREE,
        of_three(),
    ),
    Case(
        "MultiheadAttention",
        {**EIGHT, "add_bias_kv": True, "add_zero_attn": True},
        HEADS,
        [(5, 2, 8), (4, 2, 8), hidden(2, 4)],
        [P()] * 3,
        (P(), P()),
        THREE,
        padded(),
    ),
    Case(
        "MultiheadAttention",
        EIGHT,
        {**HEADS, "spec": P("data"), "kv_spec": P("data")},
        [(5, 2, 8), (4, 2, 8), hidden(2, 4)],
        [P("data"), P("data"), P(None, "data")],
        (P("data"), P(None, "data")),
        FOUR,
        padded(),
    ),
    Case(
        "MultiheadAttention", EIGHT, HEADS, [(5, 2, 8), (4, 2, 8), hidden(5, 4)], [P()] * 3, (P(), P()), TWO, masked()
    ),
    Case(
        "MultiheadAttention",
        EIGHT,
        HEADS,
        [(5, 2, 8), (4, 2, 8), added(8, 5, 4)],
        [P()] * 3,
        P(),
        THREE,
        masked(need_weights=False),
    ),
    Case(
        "MultiheadAttention",
        EIGHT,
        {"spec": P(None, "data")},
        [(5, 3, 8), (4, 3, 8), hidden(12, 5, 4)],
        [P(None, "data"), P(None, "data"), P()],
        (P(None, "data"), P("data")),
        FOUR,
        masked(),
    ),
    Case(
        "MultiheadAttention",
        EIGHT,
        {**HEADS, "spec": P(None, "data")},
        [(5, 2, 8), hidden(2, 5), CAUSAL],
        [P(None, "data"), P("data"), P()],
        P(None, "data"),
        FOUR,
        both_masks,
    ),
    Case(
        "MultiheadAttention",
        EIGHT,
        {**HEADS, "spec": P(None, "data")},
        [(5, 2, 8), hidden(2, 5), CAUSAL.isinf()],
        [P(None, "data"), P("data"), P()],
        P(None, "data"),
        FOUR,
        both_masks,
    ),
    Case("MultiheadAttention", EIGHT, {}, [(5, 2, 8), added(2, 5), CAUSAL], [P()] * 3, P(), TWO, both_masks),
    Case(
        "MultiheadAttention",
        EIGHT,
        {"spec": P("model"), "method": "ring"},
        [(5, 2, 8)],
        [P("model")],
        P("model"),
        THREE,
        of_self(need_weights=False, attn_mask=CAUSAL, is_causal=True),
    ),
    Case(
        "MultiheadAttention",
        EIGHT,
        HEADS,
        [(5, 8)],
        [P()],
        (P(), P()),
        THREE,
        of_self(attn_mask=CAUSAL, is_causal=True),
    ),
    Case(
        "MultiheadAttention",
        EIGHT,
        HEADS,
        [(5, 8), (4, 8), hidden(4)],
        [P()] * 3,
        (P(), P("model")),
        THREE,
        padded(average_attn_weights=False),
    ),
)
def test_attention(case):
    check_module(case)


@pytest.mark.parametrize(("specs", "ins"), [(HEADS, P()), ({"spec": P("data", "model")}, P("data", "model"))])
def test_dropout_on_any_mesh(specs, ins):
    """Of the weights, by the index in the whole, in training only."""
    x = added(5, 2, 8)

    def run(axes, specs, ins, train=True):
        def body(x):
            layer = spt.nn.MultiheadAttention(**EIGHT, dropout=0.5, **specs, dtype=torch.float64, generator=1)
            return layer.train(train)(x, x, x, need_weights=False)[0]

        torch.manual_seed(0)
        return spt.map(body, ins, ins, mesh=spmd.Mesh(**axes))(x).detach()

    one = run({"data": 1}, {}, P())
    torch.testing.assert_close(run(FOUR, specs, ins), one)
    assert not torch.allclose(run({"data": 1}, {}, P(), False), one)


def test_mistakes():
    x = torch.zeros(3, 2, 8)

    def run(call, **specs):
        spt.map(lambda: call(spt.nn.MultiheadAttention(**EIGHT, **specs)), (), None, mesh=spmd.Mesh(**TWO))()

    with pytest.raises(SpecError, match=r"(?s)argument query.*three dimensions of each"):
        run(lambda layer: layer(x, x[0], x[0]))
    with pytest.raises(SpecError, match=r"(?s)argument key_padding_mask.*\(N, S\)"):
        run(lambda layer: layer(x, x, x, torch.zeros(3)))
    with pytest.raises(SpecError, match=r"(?s)argument attn_mask.*\(N \* heads, L, S\)"):
        run(lambda layer: layer(x, x, x, attn_mask=torch.zeros(3)))
    with pytest.raises(SpecError, match=r"(?s)argument attn_mask.*is_causal"):
        run(lambda layer: layer(x, x, x, is_causal=True))
    with pytest.raises(SpecError, match=r"(?s)argument attn_mask.*one of the two of booleans"):
        run(lambda layer: layer(x, x, x, torch.zeros(2, 3), attn_mask=torch.zeros(3, 3)), heads="model")
    with pytest.raises(SpecError, match=r"(?s)argument spec.*a spec of axes"):
        run(lambda layer: None, spec=spmd.Grid((1, 2, 1)))
    vary = lambda layer: layer(*[spt.varying(x, "model")] * 3)
    with pytest.raises(SpecError, match=r"(?s)argument kv_spec.*whole sequences"):
        run(vary, spec=P("model"), add_zero_attn=True)


def test_optimisers_and_gradient_norms_of_packed_weights():
    """A step of AdamW with clipped gradients gives the weights that it gives on one worker."""
    x = added(5, 2, 8)

    def step(layer, clip):
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        layer(x, x, x)[0].square().sum().backward()
        clip(layer)
        optimizer.step()
        return spt.state_dict(layer)

    with double_precision():
        torch.manual_seed(1)
        whole = nn.MultiheadAttention(**EIGHT)
        body = lambda: step(
            spt.nn.MultiheadAttention.from_torch(whole, heads="model"), lambda m: spt.clip_grad_norm_(m, 0.1)
        )
        found = spt.map(body, (), None, mesh=spmd.Mesh(**THREE))()
        wanted = step(whole, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    torch.testing.assert_close(found, dict(wanted))
