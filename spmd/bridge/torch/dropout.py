"""Dropout whose mask depends on the index of an entry in the whole tensor, not on the worker that holds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from spmd.bridge.torch.rng import random_word, worker_generator
from spmd.bridge.torch.worker_context import refuse_lockstep
from spmd.functions.dropouts import check_rate, dropped
from spmd.layout import Spec
from spmd.mesh import WORKER

__all__ = ["drawn_key", "dropout"]

_WHERE = "spt.dropout"


def dropout(
    x: torch.Tensor, p: float = 0.5, key: Any = None, spec: Spec | None = None, *, training: bool = True
) -> torch.Tensor:
    """x with each entry set to 0 with probability p, and the others divided by 1 - p: the same entries on any mesh.

        h = spt.dropout(h, 0.1, spec=P("data"))  # h is this worker's rows
        h = spt.dropout(h, 0.1, spec=P("data", "model"))  # and some of their features

    x: floating, of any shape. p: from 0 to below 1. training: False gives x as it is.
    key: of `spmd.random`, used once. None: one from this worker's generator, the same on all workers, so that
    `torch.manual_seed` before the map determines it.
    spec: in a body, how the whole tensor, of which x is a block, is split over the axes along which x varies: a spec,
    or a `Layout`, also on some of the workers. Blocks may be uneven or empty. None or P(): x is the whole, the same on
    all workers.

    Forward: the dropped entries depend on the key and on their index in the whole, so one worker would drop the same.
    Linear in x, and its own adjoint. Cost: no bytes; with a spec the workers exchange the shapes of their blocks.
    Raises SpecError for another p, and for an x that varies without a spec; StateError for one that varies over more
    axes than spec names; LayoutError for blocks that do not fit together. `nn.Dropout` draws for each worker's block
    separately.
    """
    check_rate(_WHERE, "p", p)
    if not training or not p:
        return x
    worker = WORKER.get()
    if worker is not None:
        refuse_lockstep(worker)
    return dropped(_WHERE, x, float(p), drawn_key() if key is None else key, spec)


def drawn_key() -> np.ndarray:
    """A key, drawn from the generator of this worker."""
    generator = worker_generator() or torch.default_generator
    return np.array([random_word(generator, 32), random_word(generator, 32)], np.uint32)
