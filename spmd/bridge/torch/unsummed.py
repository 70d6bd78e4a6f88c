"""Gradients that backwards under `no_sync` left to a later sum.

Each is this worker's own, so neither a step nor a norm of it is right. Under `spt.data_parallel` it lies in `.grad`.
Under `spt.shard_parameters` it is one of the whole parameter. It hangs on `.grad`, so what clears `.grad` drops it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from spmd.bridge.torch.tensor_state import gradient_sync_of, local_data, no_overrides
from spmd.errors import StateError

__all__ = ["check_summed", "hang_up", "take_down"]


class _Unsummed(NamedTuple):
    """This worker's own gradient of the whole of a parameter.

    version: of `.grad`, when this was hung on it. alone: whether `.grad` holds this worker's block of it, and not the
    sum of earlier backwards.
    """

    name: str
    whole: torch.Tensor
    version: int
    alone: bool


def hang_up(name: str, p: torch.Tensor, whole: torch.Tensor, block: Any = None) -> None:
    """Hang this worker's own gradient of a whole on `.grad`. block: the gradient to be `.grad`, where there is none."""
    with no_overrides():
        alone = p.grad is None
        if alone:
            p.grad = block
        grad: Any = p.grad
    grad._unsummed = _Unsummed(name, whole, _version(grad), alone)


def take_down(p: torch.Tensor) -> torch.Tensor | None:
    """The gradient that `hang_up` left, if nothing has cleared it since. It hangs there no more."""
    own = _hanging(p)
    if own is None:
        return None
    with no_overrides():
        grad: Any = p.grad
        del grad._unsummed
        if own.alone:
            p.grad = None
    return own.whole


def _hanging(p: torch.Tensor) -> _Unsummed | None:
    """What hangs on `.grad`. Raises StateError if `.grad` was changed since, and not cleared."""
    with no_overrides():
        grad: Any = p.grad
    if grad is None:
        return None
    own: _Unsummed | None = vars(grad).get("_unsummed")
    if own is None or _version(grad) == own.version:
        return own
    if bool(local_data(grad).any()):
        raise StateError.at(
            "spt.shard_parameters",
            argument=own.name,
            got="a .grad that was changed after a backward under no_sync, whose gradients are not summed yet",
            need="a .grad that is cleared or left unchanged until the sum",
            mend="change .grad after a backward outside of no_sync; optimizer.zero_grad() drops what is not summed",
        )
    del grad._unsummed
    if own.alone:
        with no_overrides():
            p.grad = grad.detach().clone()  # no view of what was dropped
    return None


def _version(grad: torch.Tensor) -> int:
    """The number of writes to a gradient, and to the block on which it lies."""
    with no_overrides():
        return grad._version + local_data(grad)._version


def check_summed(parameters: Iterable[torch.Tensor], where: str) -> None:
    """Raise StateError where `.grad` is not the sum over workers yet."""
    parameters = list(parameters)
    syncs = set()
    for p in parameters:
        own = _hanging(p)
        if own is not None:
            raise _unsummed(where, [own.name])
        sync = gradient_sync_of(p)
        if sync is not None:
            syncs.add(sync)
    ids = {id(p) for p in parameters} if syncs else ()
    for sync in syncs:
        names = sync.unsynced(ids)
        if names:
            raise _unsummed(where, names)


def _unsummed(where: str, names: Sequence[str]) -> StateError:
    return StateError.at(
        where,
        argument=names[0],
        got="a .grad that holds this worker's own part, of a backward under no_sync",
        need="the sum over workers",
        mend="the last backward before step outside of no_sync",
    )
