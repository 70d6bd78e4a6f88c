"""The shapes of a layer's results in a compiled graph, where the blocks of other workers matter.

The layer runs on tensors without data, with a comm that assumes how long the others' blocks are: as this worker's, or an
entry longer or shorter. A length of the result that is not the same for all of these stays open in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from spmd.bridge.torch.compiled_calls import ASSUMED_RESULT
from spmd.bridge.torch.compiled_shapes import member_shapes
from spmd.bridge.torch.interop import array_dtype
from spmd.bridge.torch.worker_context import assigned
from spmd.mesh import WORKER, Worker
from spmd.operators.base import Operator
from spmd.transport.call import Call, Group
from spmd.transport.handles import Done, Handle

__all__ = ["Result", "assumed_results", "concrete_lengths"]

_FIRST, _STEP = 211, 2
"""Two runs stand for any length of an open dimension: these are 211 or 307, and 2 more for each further one."""
_SECOND = 307


class Result(NamedTuple):
    """What is known of a result. lengths: each a number, (tensor, dimension) of the argument that has it, or None."""

    dtype: torch.dtype
    lengths: tuple[Any, ...]
    differentiable: bool

    def lengths_of(self, xs: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        return tuple(xs[n[0]].shape[n[1]] if isinstance(n, tuple) else n for n in self.lengths)


concrete_lengths = Result.lengths_of


def assumed_results(
    run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    xs: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    worker: Worker | None,
) -> tuple[Result, ...]:
    """What is known of the results of `run`, of tensors of a graph. wanted: which are differentiated.

    Raises what `run` raises where the blocks of this worker cannot be right.
    """
    open_dims = [(k, d) for k, x in enumerate(xs) for d, n in enumerate(x.shape) if isinstance(n, torch.SymInt)]
    if open_dims:
        symbols = {str(xs[k].shape[d]): (k, d) for k, d in reversed(open_dims)}
        ends = [_sampled(xs, list(symbols), first) for first in (_FIRST, _SECOND)]
        try:
            found = [_runs(run, xs, shapes, wanted, worker) for shapes in ends]
        except Exception:  # other lengths do not fit: those that came are taken
            found = []
        merged = _open(found, ends, list(symbols.values())) if found else None
        if merged is not None:
            return merged
    return _runs(run, xs, [_hints(x.shape) for x in xs], wanted, worker)


def _hints(shape: Sequence[Any]) -> tuple[int, ...]:
    """The lengths that came; a graph is made for these. What another op leaves open stands for any."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # slow to import

    return tuple(_FIRST + _STEP * d if free_unbacked_symbols(n) else int(n) for d, n in enumerate(shape))


def _sampled(xs: Sequence[torch.Tensor], symbols: list[str], first: int) -> list[tuple[int, ...]]:
    def length(n: Any) -> int:
        return first + _STEP * symbols.index(str(n)) if isinstance(n, torch.SymInt) else n

    return [tuple(map(length, x.shape)) for x in xs]


def _open(
    found: Sequence[tuple[Result, ...]], ends: Sequence[Sequence[tuple[int, ...]]], places: list[tuple[int, int]]
) -> tuple[Result, ...] | None:
    """Results for any lengths, from those for two; None where they say nothing of a length that came."""
    one, two = found
    if [(r.dtype, len(r.lengths)) for r in one] != [(r.dtype, len(r.lengths)) for r in two]:
        return None
    results = []
    for a, b in zip(one, two, strict=True):
        lengths: list[Any] = []
        for n, m in zip(a.lengths, b.lengths, strict=True):
            same = [(k, d) for k, d in places if (n, m) == (ends[0][k][d], ends[1][k][d])]
            if n != m and not same:
                return None
            lengths.append(n if n == m else same[0])
        results.append(a._replace(lengths=tuple(lengths)))
    return tuple(results)


def _runs(
    run: Callable, xs: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], wanted: Sequence[bool], worker: Any
) -> tuple[Result, ...]:
    """The results for blocks of these shapes; None for lengths that other workers' blocks decide."""
    first, ndim = _run(run, xs, shapes, wanted, worker, None)
    found = [first]
    for d in range(ndim):
        for more in (1, -1):
            try:
                found.append(_run(run, xs, shapes, wanted, worker, (d, more))[0])
            except Exception:  # noqa: PERF203 (such blocks do not fit)
                continue
    found = [r for r in found if [len(y.lengths) for y in r] == [len(y.lengths) for y in first]]
    return tuple(
        r._replace(lengths=tuple(n if all(f[k].lengths[d] == n for f in found) else None for d, n in enumerate(r.lengths)))
        for k, r in enumerate(first)
    )


def _run(
    run: Callable,
    xs: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    wanted: Sequence[bool],
    worker: Worker | None,
    change: tuple[int, int] | None,
) -> tuple[tuple[Result, ...], int]:
    """The results of one run, and the dimensions of the blocks whose shapes were exchanged."""
    comm = None if worker is None else _AssumedComm(worker.index, change)
    with _disable_current_modes(), torch.enable_grad(), assigned(ASSUMED_RESULT, _result), _on(worker, comm):
        try:
            with FakeTensorMode():
                ys = run(_tensors(torch.empty, xs, shapes, wanted, None))
                results = tuple(Result(y.dtype, tuple(y.shape), y.requires_grad) for y in ys)
        except Exception:  # it reads values
            ys = run(_tensors(torch.zeros, xs, shapes, wanted, "cpu"))
            results = tuple(Result(y.dtype, tuple(y.shape), y.requires_grad) for y in ys)
    return results, 0 if comm is None else comm.ndim


def _tensors(
    make: Callable, xs: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], wanted: Sequence[bool], device: Any
) -> list[torch.Tensor]:
    return [
        make(shape, dtype=x.dtype, device=device or x.device).requires_grad_(w)
        for x, shape, w in zip(xs, shapes, wanted, strict=True)
    ]


@contextmanager
def _on(worker: Worker | None, comm: Any) -> Iterator[None]:
    if worker is None:
        yield
        return
    assuming = copy(worker)
    assuming.comm, assuming.prepared = comm, {}
    with assigned(WORKER, assuming):
        yield


class _AssumedComm:
    """The comm of a worker where the blocks of all others are as its own, or longer in a dimension.

    change: the dimension, and by how much. ndim: the most dimensions of blocks whose shapes were asked for.
    """

    def __init__(self, worker: int, change: tuple[int, int] | None):
        self.worker, self.change, self.ndim = worker, change, 0

    def shapes(self, group: Group, call: Call) -> Handle:
        own = tuple(call.shape)
        others = self.others(own)
        return Done([own if k == group.index else others for k in range(group.size)])

    def others(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the others' blocks."""
        self.ndim = max(self.ndim, len(own))
        if self.change is None or self.change[0] >= len(own):
            return own
        d, more = self.change
        return (*own[:d], max(0, own[d] + more), *own[d + 1 :])

    def run(self, plan: Any, call: Call, x: Any) -> Handle:
        """A number, of which the others have the same."""
        return Done((x, None))


def _result(op: Any, x: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape that an operator gives, where all blocks have the shape of this one."""
    worker = WORKER.get()
    assert worker is not None
    own = tuple(x.shape)
    others = worker.comm.others(own) if op.same_shape is False else own  # type: ignore[attr-defined]
    shape = _shape(op, own, others, worker, array_dtype(x.dtype))
    y = x if shape == tuple(x.shape) else x.new_zeros(shape) + x.sum()
    return y if isinstance(op, Operator) else y.detach()


def _shape(
    op: Any, shape: tuple[int, ...], others: tuple[int, ...], worker: Worker, dtype: np.dtype
) -> tuple[int, ...]:
    group = worker.group(op.axes)
    layouts = getattr(op, "layouts", None)
    if layouts is not None:
        op.check(group, np.broadcast_to(np.zeros((), dtype), shape))
        return layouts[1].block_shape(group.index)
    if not isinstance(op, Operator):  # an extremum
        return tuple(n for d, n in enumerate(shape) if d not in op.dims)
    return op.out_shape(group, member_shapes(op, group, shape, others), dtype)
