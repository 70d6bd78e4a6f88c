"""The communicator of a worker in a part of a body that not all workers run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from spmd.transport.call import Call, Group
from spmd.transport.handles import Handle
from spmd.transport.plan import Plan

__all__ = ["PartialComm", "refusing_along", "whole_comm"]


class PartialComm:
    """A worker's `Comm` that refuses collectives with workers that do not take part.

    axes: along which they do not. refuse: refuse(axis, call) is the error.
    """

    def __init__(self, comm: Any, axes: tuple[str, ...], refuse: Callable[[str, Call], Exception]):
        self.comm = comm
        self.axes = axes
        self.refuse = refuse

    def repeated_plan(self, *_: Any) -> None:
        """None: every call is to be checked."""

    def __getattr__(self, name: str):
        attribute = getattr(self.comm, name)
        if not callable(attribute):
            return attribute

        def verb(group: Group, call: Call, *args):
            self._check(group, call)
            return attribute(group, call, *args)

        return verb

    def run(self, plan: Any, call: Call, x: Any) -> Handle:
        if type(plan) is not Plan or plan.kind != "none" or plan.counted:
            self._check(plan.group, call)
        return self.comm.run(plan, call, x)

    def _check(self, group: Group, call: Call) -> None:
        along = [a for a in self.axes if a in group.axes]
        if along and group.size > 1:
            raise self.refuse(along[0], call)


@contextmanager
def refusing_along(worker: Any, axes: tuple[str, ...], refuse: Callable[[str, Call], Exception]) -> Iterator[None]:
    """Inside, collectives of a worker along these axes are refused, and the others are uncounted: not all workers are
    here."""
    before = worker.comm, worker.prepared
    worker.comm, worker.prepared = PartialComm(worker.comm, axes, refuse), {}
    try:
        with whole_comm(before[0]).uncounted():
            yield
    finally:
        worker.comm, worker.prepared = before


def whole_comm(comm: Any) -> Any:
    """The communicator of all workers, which counts the collectives."""
    while type(comm) is PartialComm:
        comm = comm.comm
    return comm
