"""The memory that bodies declare to vary: known while it exists, and never kept alive."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from spmd.replicas.closures import note_closure
from spmd.replicas.declared import DeclaredMemory
from spmd.replicas.records import Replicas


def noted(replicas: Replicas, x: np.ndarray) -> bool:
    """Whether an array that a body closes over is compared."""
    before = len(replicas.records)
    note_closure(("x",), replicas, "spmd.map", [(f"array {before}", x)], {})
    return len(replicas.records) > before


def test_closures_that_are_declared_to_vary_are_not_compared():
    replicas, x, other = Replicas(True), np.arange(12.0).reshape(3, 4), np.arange(12.0)
    assert noted(replicas, x)
    replicas.declare(x[1:2, ::2])
    assert not noted(replicas, x)
    assert not noted(replicas, x[:, 1:])
    assert noted(replicas, x[2:])
    assert noted(replicas, other)


def test_an_array_without_entries_is_itself():
    replicas, x = Replicas(True), np.empty((0, 3))
    replicas.declare(x)
    assert not noted(replicas, x)
    assert noted(replicas, np.ones(3))


def test_declared_memory_is_let_go_of():
    memory, kept = DeclaredMemory(), np.ones(100)
    for k in range(20):
        x = np.full(50, k)
        memory.add(x, x[3:])
        memory.add(kept, kept[k:])
    del x
    gc.collect()
    assert len(memory) == 1
    assert memory.overlaps(kept)


@pytest.mark.torch
def test_tensors_are_known_by_their_storage():
    torch = pytest.importorskip("torch")
    import spmd.bridge.torch  # noqa: F401
    from spmd.frontends import frontend

    replicas, x = Replicas(True), torch.arange(12.0, requires_grad=True)
    y = (x * 2).view(3, 4)
    for part in (y, y[1], y.detach()):  # each an object that is gone at once
        other = frontend(part)
        assert other is not None
        replicas.declare(other.data(part), other.owner(part))
    assert not noted(replicas, y.detach().numpy())
    assert noted(replicas, x.detach().numpy())
    assert len(replicas.declared) == 1
    del y, part
    gc.collect()
    assert not len(replicas.declared)
