"""Collectives of which some workers make more than others, among workers that all make the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spmd.mesh import Worker
from spmd.operators.partial_comm import whole_comm

__all__ = ["uneven_calls"]

_SPAN = 1 << 12
"""So many collectives are made inside, at most."""


@contextmanager
def uneven_calls(worker: Worker, uneven: bool = True) -> Iterator[None]:
    """Inside, workers along other axes may make other collectives, as where each stage of a pipeline has parameters of
    its own. Afterwards all have counted the same: the next one has a number that none has reached.
    """
    try:
        yield
    finally:
        if uneven:
            comm = whole_comm(worker.comm)
            comm.number = (comm.number // _SPAN + 1) * _SPAN
