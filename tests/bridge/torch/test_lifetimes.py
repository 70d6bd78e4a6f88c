"""Tensors of bodies are freed when the body lets go of them, and not only when it ends."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

import spmd
from spmd import P, functions

torch = pytest.importorskip("torch")
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.tensor_state import state_of_tensor  # noqa: E402

pytestmark = pytest.mark.torch

ROWS = P(None, None, "workers")


def varied(w: Any, x: Any) -> tuple[Any, Any]:
    """A result that is the same on all workers, where it meets what varies."""
    y = w * 2
    return y, (y * x.sum()).sum()


def convolved(w: Any, x: Any) -> tuple[Any, Any]:
    y = x * w.sum()
    return y, functions.conv(y, w, padding=1, spec=ROWS).sum()


def joined(w: Any, x: Any) -> tuple[Any, Any]:
    y = spt.GlobalTensor.from_block(x, ROWS) * w.sum()
    return y.block(), torch.nn.functional.conv2d(y, w, padding=1).square().sum()


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("check", [True, False], ids=["checked", "bare"])
@pytest.mark.parametrize("step", [varied, convolved, joined], ids=lambda f: f.__name__)
@pytest.mark.parametrize("how", ["forward", "backward"])
def test_what_a_step_computes_is_freed_after_it(step, check, workers, how):
    def body(x):
        w = torch.ones(2, 2, 3, 3, requires_grad=True)
        y, loss = step(w, x)
        storage = weakref.ref(y.untyped_storage())
        assert storage() is not None
        if how == "backward":
            (spt.psum(loss, "workers") if check and state_of_tensor(loss).varying else loss).backward()
            assert w.grad is not None
        del y, loss
        for turn in range(workers):  # a collection does nothing while another thread is in one
            if spmd.worker_index("workers") == turn:
                gc.collect()
            spt.psum(x.sum(), "workers")
        return torch.tensor([float(storage() is None)])

    x = torch.arange(2.0 * 2 * 7 * 5).reshape(2, 2, 7, 5)
    freed = spt.map(body, (ROWS,), P("workers"), mesh=spmd.Mesh(workers=workers), check=check)(x)
    assert freed.tolist() == [1.0] * workers
