"""`spt.nn.Embedding` is `nn.Embedding`, however ids, table and result lie; and tied with a linear layer."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.nn.module_cases import Case, check_module, table  # noqa: E402
from spmd import Grid, Layout, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import SpecError  # noqa: E402

pytestmark = pytest.mark.torch

AXES = {"data": 2, "model": 2}
IDS = torch.tensor([[1, 2, 6], [0, 1, 1], [3, 3, 5]])
WHOLE = P()
FEW = torch.tensor([0, 0])


def case(w_spec, spec=WHOLE, out_spec=None, ids=IDS, lies=None, out=WHOLE, **options):
    sizes = {"num_embeddings": 7, "embedding_dim": 5} | options
    return Case(
        "Embedding", sizes, {"spec": spec, "w_spec": w_spec, "out_spec": out_spec}, [ids], [lies or spec], out, AXES
    )


@table(
    *(case(w, padding_idx=p) for w, p in itertools.product((P("model"), P(("model", "data"))), (None, 0, -2))),
    case(P(None, "model"), out=P(None, None, "model"), padding_idx=3),
    case(P("model"), P("data"), out=P("data"), padding_idx=1),
    case(P("data", "model"), P("data"), P("data", None, "model"), out=P("data", None, "model"), padding_idx=1),
    case(P(("data", "model")), ids=FEW, num_embeddings=1),
    case(
        Grid((3, 1), workers=[2, 0, 3]),
        Grid((2, 1), workers=[1, 3]),
        Grid((1, 1, 2), workers=[3, 1]),
        lies=Layout.grid((3, 3), (2, 1), AXES, [1, 3]),
        out=Layout.grid((3, 3, 5), (1, 1, 2), AXES, [3, 1]),
        padding_idx=4,
    ),
)
def test_embedding(case):
    check_module(case)


@pytest.mark.parametrize("axes", [{"model": 1}, {"model": 3}, {"model": 2, "data": 2}], ids=str)
def test_tied_with_a_linear_layer(axes):
    """One parameter in two layers gets the sum of both gradients, and trains as on one worker."""
    ids = torch.tensor([[1, 2, 6], [0, 1, 1]])

    def net(embed, head):
        head.weight = embed.weight
        return nn.ModuleDict({"embed": embed, "head": head})

    def train(both, steps=3):
        assert len(list(both.parameters())) == 1
        optimiser = torch.optim.AdamW(both.parameters(), lr=0.1)
        for _ in range(steps):
            optimiser.zero_grad()
            both["head"](both["embed"](ids)).square().mean().backward()
            optimiser.step()
        return {name: spt.block(value).clone() for name, value in spt.state_dict(both).items()}

    def body():
        embed = spt.nn.Embedding(7, 4, padding_idx=1, w_spec=P("model"))
        head = spt.nn.Linear(4, 7, bias=False, w_spec=P("model"), out_spec=P())
        return train(net(embed, head))

    torch.manual_seed(0)
    expected = train(net(nn.Embedding(7, 4, padding_idx=1), nn.Linear(4, 7, bias=False)))
    torch.manual_seed(0)
    found = spt.map(body, (), None, mesh=spmd.Mesh(**axes))()
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_pretrained_rows():
    rows = torch.randn(5, 3)

    def body():
        frozen = spt.nn.Embedding.from_pretrained(rows, padding_idx=0, w_spec=P("model"))
        trained = spt.nn.Embedding.from_pretrained(rows, freeze=False, w_spec=P("model"))
        assert [frozen.weight.requires_grad, trained.weight.requires_grad] == [False, True]
        assert frozen.padding_idx == 0
        assert torch.equal(spt.block(frozen(torch.arange(5))), rows)

    spt.map(body, (), None, mesh=spmd.Mesh(model=2))()


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
def test_options_that_count_ids_of_all_workers_raise(option):
    (name,) = option
    for make in (
        lambda: spt.nn.Embedding(4, 3, **option),
        lambda: spt.nn.Embedding.from_torch(nn.Embedding(4, 3, **option)),
    ):
        with pytest.raises(SpecError, match=f"argument {name}"):
            spt.map(lambda make=make: make() and None, (), None, mesh=spmd.Mesh(model=2))()
