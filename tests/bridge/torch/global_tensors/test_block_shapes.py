"""Plain operands that fit the block of a global tensor and not its whole: they raise, as torch does for the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError, MismatchError, SpecError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning")]

LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss kl_div poisson_nll_loss".split()


def _classes(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(x), dtype=torch.long)


CASES: dict[str, Callable[[Any, Any], Any]] = {
    **{name: getattr(F, name) for name in LOSSES},
    "cross_entropy": lambda x, y: F.cross_entropy(x, _classes(y)),
    "cross_entropy of probabilities": lambda x, y: F.cross_entropy(x, y),
    "nll_loss": lambda x, y: F.nll_loss(x, _classes(y)),
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x, y),
    "binary_cross_entropy_with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y),
    "weight of binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x, x.detach(), weight=y),
    "pos_weight": lambda x, y: F.binary_cross_entropy_with_logits(x, x.detach(), pos_weight=y),
    "weight of cross_entropy": lambda x, y: F.cross_entropy(x.T, _classes(x.T), weight=y[:, 0]),
    "whole target of a plain input": lambda x, y: F.mse_loss(y, x),
    "add": lambda x, y: x + y,
    "add_": lambda x, y: x.clone().add_(y),
    "copy_": lambda x, y: x.clone().copy_(y),
    "where": lambda x, y: torch.where(x > 0.5, y, 0.0),
    "masked_fill": lambda x, y: x.masked_fill(y > 0.5, 0.0),
    "matmul": lambda x, y: x.T @ y,
    "a plain first operand": lambda x, y: y.T @ x,
    "einsum": lambda x, y: torch.einsum("ij,ik->jk", x, y),
    "mv": lambda x, y: torch.mv(x.T, y[:, 0]),
    "linear": lambda x, y: F.linear(x.T, y.T),
    "bias of linear": lambda x, y: F.linear(torch.ones(3, 2), x, y[:, 0]),
    "bias of conv": lambda x, y: F.conv1d(torch.ones(1, 2, 4), x[:, :, None], y[:, 0]),
    "batch_norm": lambda x, y: F.batch_norm(x.T, None, None, y[:, 0], y[:, 1], training=True),
    "layer_norm": lambda x, y: F.layer_norm(x.T, x.shape[:1], y[:, 0], y[:, 1]),
    "group_norm": lambda x, y: F.group_norm(x.T[:, :, None], 1, y[:, 0], y[:, 1]),
    "cat": lambda x, y: torch.cat([x, y], 1),
    "stack": lambda x, y: torch.stack([x, y]),
}


@pytest.mark.parametrize("rows", [(2, 6), (3, 9), (2, 2), (3, 3)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_what_fits_the_block_alone_raises(name: str, rows: tuple[int, int]) -> None:
    """Where torch broadcasts a block of one row, the value is that of torch, or an error."""
    workers, length = rows
    x, y = torch.rand(length, 2), torch.rand(length // workers, 2)
    call = lambda a, b: torch.as_tensor(CASES[name](a, b))
    run = spt.map(lambda a, b: _whole(call(spt.put(a, P("rows")), b)), (P(), P()), P(), mesh=spmd.Mesh(rows=workers))
    try:
        expected = call(x, y)
    except (RuntimeError, ValueError):
        with pytest.raises((RuntimeError, ValueError)):
            run(x, y)
        return
    assert len(y) == 1
    try:
        found = run(x, y)
    except (LayoutError, MismatchError, SpecError):
        return
    torch.testing.assert_close(found, expected)


def _whole(y: Any) -> Any:
    return y.whole() if isinstance(y, spt.GlobalTensor) else y
