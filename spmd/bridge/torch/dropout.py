"""Dropout whose mask depends on the index of an entry in the whole tensor, not on the worker that holds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from spmd import functions
from spmd.bridge.torch.rng import random_word, worker_generator
from spmd.bridge.torch.worker_context import refuse_lockstep
from spmd.functions.dropouts import check_rate, dropped
from spmd.layout import Spec
from spmd.mesh import WORKER

__all__ = ["alpha_dropout", "drawn_key", "dropout"]

_WHERE = "spt.dropout"


def dropout(
    x: torch.Tensor,
    p: float = 0.5,
    key: Any = None,
    spec: Spec | None = None,
    *,
    training: bool = True,
    broadcast_dims: Sequence[int] = (),
) -> torch.Tensor:
    """x with each entry set to 0 with probability p, and the others divided by 1 - p: the same entries on any mesh.

        h = spt.dropout(h, 0.1, spec=P("data"))  # h is this worker's rows
        h = spt.dropout(h, 0.1, spec=P("data", "model"))  # and some of their features

    x: floating, of any shape. p: from 0 to 1. training: False gives x as it is. broadcast_dims: dimensions along which
    entries are dropped together, as the positions of a channel.
    key: of `spmd.random`, used once. None: one from this worker's generator, the same on all workers, so that
    `torch.manual_seed` before the map determines it.
    spec: in a body, how the whole tensor, of which x is a block, is split over the axes along which x varies: a spec,
    or a `Layout`, also on some of the workers. Blocks may be uneven or empty. None or P(): x is the whole, the same on
    all workers.

    Forward: the dropped entries depend on the key and on their index in the whole, so one worker would drop the same.
    Linear in x, and its own adjoint. Cost: no bytes; with a spec the workers exchange the shapes of their blocks.
    Raises SpecError for another p, and for an x that varies without a spec; StateError for one that varies over more
    axes than spec names; LayoutError for blocks that do not fit together. `nn.Dropout` of a block draws for each
    worker's block separately; of a global tensor it drops as this function does.

        >>> def body(x, seed):
        ...     return spt.dropout(x, 0.5, spmd.random.key(7), spec=P("x"))
        >>> y = [spt.map(body, (P("x"), None), P("x"), mesh=spmd.Mesh(x=n))(torch.ones(100), 7) for n in (1, 3)]
        >>> torch.equal(*y)  # the same entries on one worker and on three
        True
    """
    check_rate(_WHERE, "p", p)
    if not training or not p:
        return x
    return dropped(_WHERE, x, float(p), _key_for(key), spec, broadcast_dims)


def alpha_dropout(
    x: torch.Tensor,
    p: float = 0.5,
    key: Any = None,
    spec: Spec | None = None,
    *,
    training: bool = True,
    broadcast_dims: Sequence[int] = (),
) -> torch.Tensor:
    """`spmd.functions.alpha_dropout` with the arguments of `dropout`."""
    check_rate("spt.nn.AlphaDropout", "p", p)
    if not training or not p:
        return x
    return functions.alpha_dropout(x, float(p), _key_for(key), spec, broadcast_dims=broadcast_dims)


def _key_for(key: Any) -> Any:
    """The key, or one drawn from the generator of this worker."""
    worker = WORKER.get()
    if worker is not None:
        refuse_lockstep(worker)
    if key is not None:
        return key
    generator = worker_generator() or torch.default_generator
    return np.array([random_word(generator, 32), random_word(generator, 32)], np.uint32)


def drawn_key() -> np.ndarray:
    """A key, drawn from the generator of this worker."""
    return _key_for(None)
