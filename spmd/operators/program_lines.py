"""Collectives as lines of a program that `spmd.jit` records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from types import FrameType
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.staging.joining import BLOCK_MAX, Batch
from spmd.autodiff.staging.program import COMM
from spmd.autodiff.staging.recorder import Program, slot_of
from spmd.device import contiguous
from spmd.errors import caller
from spmd.layout import offsets
from spmd.mesh import Worker
from spmd.operators.base import Collective
from spmd.operators.partial_comm import whole_comm
from spmd.operators.plan_cache import ObservedCall, Prepared, call_of, observed_call
from spmd.operators.sums import Sum
from spmd.transport.base import Comm
from spmd.transport.call import LEDGERS, Call, CallOfMany, Group, Observers

__all__ = ["write_down"]


class CollectiveLine:
    """The function of a line that is one collective. times: how many operators it stands for, in a ledger.

    bound: the operator, bound to the blocks of the last run.
    """

    def __init__(self, prepared: Prepared, name: str, times: int = 1):
        self.prepared, self.times = prepared, times
        self.bound: Any = None
        self.__name__ = name
        self.__spmd_batch__: int | None = None

    def __call__(self, comm: Comm, x: Any) -> Any:
        prepared = self.prepared
        if type(x) is not np.ndarray or not x.flags.c_contiguous:
            x = contiguous(x)
        if LEDGERS.get():
            block, self.bound = (prepared.observed or ObservedCall.of(prepared))(comm, x, self.times)
        elif prepared.fast_run is None:
            block, self.bound = prepared(comm, x)
        else:
            block, self.bound = prepared.fast_run(comm, x, prepared.general_run)
        return block

    def __spmd_joined__(self, others: Sequence[CollectiveLine]) -> PackedSum:
        return PackedSum([self, *others])


class PackedSum:
    """The function of a line that is several sums: one all-reduce of their blocks, packed. The results are views.

    The bits are those of separate sums: each entry is added over the workers in the same order.
    """

    __name__ = "packed_psum"

    def __init__(self, lines: Sequence[CollectiveLine]):
        calls = [line.prepared.call for line in lines]
        self.count, ends = len(calls), offsets([prod(call.shape) for call in calls])
        self.flat = all(len(call.shape) == 1 for call in calls)
        self.parts = [slice(*pair) for pair in pairwise(ends)]
        self.shapes = [call.shape for call in calls]
        first = lines[0].prepared
        call = CallOfMany("psum", calls, (ends[-1],), _described_leaves(calls))
        self.line = CollectiveLine(Prepared(first.op, first.dtype, first.group, call, None), "psum", self.count)

    def __call__(self, comm: Comm, *xs: Any) -> list[np.ndarray]:
        total = self.line(comm, np.concatenate(xs if self.flat else [np.asarray(x).reshape(-1) for x in xs]))
        whole_comm(comm).number += self.count - 1  # as where these sums run by themselves, in other groups
        sums = [total[part] for part in self.parts]
        return sums if self.flat else [*map(np.ndarray.reshape, sums, self.shapes)]


def _described_leaves(calls: Sequence[Call]) -> tree.Leaf | None:
    """The leaves of trees that are summed, in the form that workers compare; None where there are none."""
    leaves = [call.leaf for call in calls]
    if not any(leaves):
        return None
    paths = ["an array by itself" if leaf is None else leaf.path for leaf in leaves]
    trees = dict.fromkeys(leaf.tree.text for leaf in leaves if leaf is not None)
    return tree.Leaf(tree.Described(f"{' and '.join(trees)}, by {', '.join(paths)}", paths), -1)


def write_down(op: Collective, x: Any, worker: Worker, frame: FrameType | None) -> tuple[Any, Collective]:
    """Run a collective, which becomes a line of the worker's program: the new block and the bound operator."""
    program = worker.program
    assert program is not None
    like, group = contiguous(slot_of(x)), worker.group(op.axes)
    op.check(group, like)
    call = observed_call(call_of(op, like, worker, frame, None, False))
    line = CollectiveLine(Prepared(op, like.dtype, group, call, None), op.function)
    block = program.call(line, (COMM, x), effect=True, comm=worker.comm)
    if type(op) is Sum and group.size > 1:
        _join(line, program, worker, like, frame)
    else:
        whole_comm(worker.comm).number += 1  # as `_join` does, in workers of other groups
    return block, line.bound


def _join(line: CollectiveLine, program: Program, worker: Worker, like: np.ndarray, frame: FrameType | None) -> None:
    """Add a sum, the last line of the program, to the batch of the sums before it if all members of the group can.

    What depends on what may differ between workers: so they ask each other."""
    op, group = line.prepared.op, line.prepared.group
    kind, batch = (op.axes, like.dtype, program.lines[-1].errors), program.batch
    small = like.nbytes <= BLOCK_MAX
    can = small and batch is not None and batch.takes(program.lines, kind, like.nbytes)
    if not _all(can, worker.comm, group, frame):
        batch = Batch(0 if batch is None else batch.number + 1, kind)
    if small:
        assert batch is not None
        batch.add(program.lines, like.nbytes)
        program.batch, line.__spmd_batch__ = batch, batch.number


def _all(flag: bool, comm: Comm, group: Group, frame: FrameType | None) -> bool:
    """Whether a flag is set on all members of a group. Ledgers do not count it."""
    asked = np.array([flag], np.int64)
    detail, user = "whether it can join sums", caller(frame)
    call = Call("psum", group.axes, asked.dtype, (1,), detail=detail, same_shape=True, frame=user)
    token = LEDGERS.set(Observers())
    try:
        return bool(comm.all_reduce(group, call, asked, "min").wait()[0])
    finally:
        LEDGERS.reset(token)
