"""Dropout whose mask depends on the index of an entry in the whole tensor, not on the worker that holds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from spmd.bridge.torch.rng import random_word, worker_generator
from spmd.bridge.torch.worker_context import refuse_lockstep
from spmd.errors import SpecError, describe
from spmd.layout import P
from spmd.mesh import WORKER
from spmd.random import distributions, layouts

__all__ = ["dropout"]

_WHERE = "spt.dropout"


def dropout(
    x: torch.Tensor, p: float = 0.5, key: Any = None, spec: P | None = None, *, training: bool = True
) -> torch.Tensor:
    """x with each entry set to 0 with probability p, and the others divided by 1 - p: the same entries on any mesh.

        h = spt.dropout(h, 0.1, spec=P("data"))  # h is this worker's rows
        h = spt.dropout(h, 0.1, spec=P("data", "model"))  # and some of their features

    x: floating, of any shape. p: from 0 to below 1. training: False gives x as it is.
    key: of `spmd.random`, used once. None: one from this worker's generator, the same on all workers, so that
    `torch.manual_seed` before the map determines it.
    spec: in a body, how the whole tensor, of which x is a block, is split over the axes along which x varies. Blocks
    may be uneven or empty. None or P(): x is the whole, the same on all workers.

    Forward: the dropped entries depend on the key and on their index in the whole, so one worker would drop the same.
    Linear in x, and its own adjoint. Cost: no bytes; with a spec the workers exchange the shapes of their blocks.
    Raises SpecError for another p, and for an x that varies without a spec; StateError for one that varies over more
    axes than spec names; LayoutError for blocks that do not fit together. `nn.Dropout` draws for each worker's block
    separately.
    """
    if not isinstance(p, int | float | np.floating) or not 0 <= p < 1:
        raise SpecError.at(
            _WHERE,
            argument="p",
            got=describe(p),
            need="the probability to drop an entry, from 0 to below 1",
            mend="p=0.1",
        )
    if not training or not p:
        return x
    worker = WORKER.get()
    if worker is not None:
        refuse_lockstep(worker)
    layout = layouts.layout_of_block(_WHERE, x, spec)
    if key is None:
        key = _key()
    shape = tuple(x.shape) if layout is None else layout.shape
    keep: Any = distributions.bernoulli(key, 1 - float(p), shape, spec=layout)
    if not isinstance(keep, torch.Tensor):
        keep = torch.from_numpy(np.array(keep))
    return torch.where(keep.to(x.device), x, torch.zeros((), dtype=x.dtype, device=x.device)) * (1 / (1 - float(p)))


def _key() -> np.ndarray:
    """A key, drawn from the generator of this worker."""
    generator = worker_generator() or torch.default_generator
    return np.array([random_word(generator, 32), random_word(generator, 32)], np.uint32)
