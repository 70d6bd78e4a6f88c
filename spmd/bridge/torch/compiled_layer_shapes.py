"""The shapes of a layer's results in a compiled graph, where the blocks of other workers matter.

The layer runs on tensors without data, with a comm that assumes how long the others' blocks are: as this worker's, or
an entry longer or shorter. A length of the result that is not the same for all of these stays open in the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from spmd.bridge.torch.compiled_calls import ASSUMED_RESULT
from spmd.bridge.torch.compiled_shapes import member_shapes
from spmd.bridge.torch.interop import array_dtype
from spmd.bridge.torch.worker_context import assigned
from spmd.grid import Grid
from spmd.layout import P
from spmd.mesh import WORKER, Worker
from spmd.operators.base import Operator
from spmd.transport.call import Call, Group
from spmd.transport.handles import Done, Handle

__all__ = ["Result", "assumed_results"]

_FIRST, _STEP = 211, 2
"""Two runs stand for any length of an open dimension: these are 211 or 307, and 2 more for each further one."""
_SECOND = 307
_SMALL = 1 << 16
"""Layers of so few entries run on zeros: that is quicker than without data."""


class Result(NamedTuple):
    """What is known of a result. lengths: each a number, (tensor, dimension) of the argument that has it, or None."""

    dtype: torch.dtype
    lengths: tuple[Any, ...]
    differentiable: bool

    def lengths_of(self, xs: Sequence[Any]) -> tuple[Any, ...]:
        """The lengths, for these arguments."""
        return tuple(xs[n[0]].shape[n[1]] if isinstance(n, tuple) else n for n in self.lengths)


def assumed_results(
    run: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
    xs: Sequence[torch.Tensor],
    wanted: Sequence[bool],
    worker: Worker | None,
) -> tuple[Result, ...]:
    """What is known of the results of `run`, of tensors of a graph. wanted: which are differentiated.

    Raises what `run` raises where the blocks of this worker cannot be right.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # slow to import

    symbols: dict[str, tuple[int, int]] = {}
    unknown: dict[str, tuple[int, int]] = {}
    for k, x in enumerate(xs):
        for d, n in enumerate(x.shape):
            if isinstance(n, torch.SymInt):
                symbols.setdefault(str(n), (k, d))
                if free_unbacked_symbols(n):
                    unknown.setdefault(str(n), (k, d))
    runs = lambda shapes: _runs(run, xs, shapes, wanted, worker)
    if len(symbols) > len(unknown):
        try:
            found = _of_any_lengths(runs, xs, symbols)
        except Exception:  # other lengths do not fit: those that came are taken
            found = None
        if found is not None and not found[1]:
            return found[0]
    if unknown:
        return _of_any_lengths(runs, xs, unknown)[0]
    return runs([tuple(map(int, x.shape)) for x in xs])


def _of_any_lengths(
    runs: Callable[[Sequence[tuple[int, ...]]], tuple[Result, ...]],
    xs: Sequence[torch.Tensor],
    symbols: dict[str, tuple[int, int]],
) -> tuple[tuple[Result, ...], bool]:
    """The results where these lengths may be any, each of the argument and dimension that has it; and whether a length
    of a result depends on them otherwise than by being one of them. Such a one stays open."""
    names = list(symbols)

    def length(n: Any, first: int) -> int:
        return first + _STEP * names.index(str(n)) if str(n) in symbols else int(n)

    ends = [[tuple(length(n, first) for n in x.shape) for x in xs] for first in (_FIRST, _SECOND)]
    one, two = map(runs, ends)
    results, depends = [], False
    for a, b in zip(one, two, strict=True):
        lengths: list[Any] = []
        for n, m in zip(a.lengths, b.lengths, strict=True):
            same = [at for at in symbols.values() if (n, m) == (ends[0][at[0]][at[1]], ends[1][at[0]][at[1]])]
            depends |= n != m and not same
            lengths.append(n if n == m else same[0] if same else None)
        results.append(a._replace(lengths=tuple(lengths)))
    return tuple(results), depends


class _Place(NamedTuple):
    """A dimension of the blocks whose shapes a layer asks for: the number of the request, and the dimension."""

    request: int
    dim: int


class _Lengths(NamedTuple):
    """The lengths of other workers' blocks, where this one's is n: n + more; or those of balanced blocks of which the
    first `longer` have one entry more, this one or not."""

    more: int = 0
    longer: int | None = None

    def of(self, own: int, place: int, other: int) -> int:
        if self.longer is None:
            return max(0, own + self.more)
        base = own - (place < self.longer)
        return max(0, base + (other < self.longer))


_ALIKE = _Lengths()
_Assumed = dict[_Place, _Lengths]
_MIXED_MAX = 64
"""Of so many balanced layouts at most it is tried whether one fits."""


def _runs(
    run: Callable, xs: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], wanted: Sequence[bool], worker: Any
) -> tuple[Result, ...]:
    """The results for blocks of these shapes; None for lengths that other workers' blocks decide."""
    first, assumed = _fitting(run, xs, shapes, wanted, worker)
    found = [first]
    for place in assumed:
        for more in (1, -1):
            changed = assumed | {place: _Lengths(more)}
            try:
                found.append(_run(run, xs, shapes, wanted, _AssumedComm.of(worker, changed), worker))
            except Exception:
                continue
    found = [r for r in found if [len(y.lengths) for y in r] == [len(y.lengths) for y in first]]

    def length(k: int, d: int, n: int) -> int | None:
        return n if all(f[k].lengths[d] == n for f in found) else None

    return tuple(
        r._replace(lengths=tuple(length(k, d, n) for d, n in enumerate(r.lengths))) for k, r in enumerate(first)
    )


def _fitting(
    run: Callable, xs: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], wanted: Sequence[bool], worker: Any
) -> tuple[tuple[Result, ...], _Assumed]:
    """The results where the others' blocks have lengths with which those of this worker fit, and these lengths."""
    size = 1 if worker is None else worker.mesh.size
    others = [_Lengths(), *(_Lengths(longer=r) for r in range(1, min(size, _MIXED_MAX))), _Lengths(-1), _Lengths(1)]
    reason: Exception | None = None
    for each in others:
        comm = _AssumedComm.of(worker, {}, each)
        try:
            return _run(run, xs, shapes, wanted, comm, worker), {} if comm is None else comm.met
        except Exception as error:
            reason = reason or error
    assert reason is not None
    raise reason


def _run(
    run: Callable,
    xs: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    wanted: Sequence[bool],
    comm: _AssumedComm | None,
    worker: Worker | None,
) -> tuple[Result, ...]:
    """The results of one run."""
    with _disable_current_modes(), torch.enable_grad(), assigned(ASSUMED_RESULT, _result):
        reason: Exception | None = None
        small = sum(map(prod, shapes)) <= _SMALL
        # Without data where there would be much; but zeros where the layer reads values.
        for make, device in [(torch.empty, "meta")] * (not small) + [(torch.zeros, "cpu")]:
            try:
                with _on(worker, comm):
                    ys = run(_tensors(make, xs, shapes, wanted, device))
                return tuple(Result(y.dtype, tuple(y.shape), y.requires_grad) for y in ys)
            except Exception as error:
                reason = error
    assert reason is not None
    raise reason


def _tensors(
    make: Callable, xs: Sequence[torch.Tensor], shapes: Sequence[tuple[int, ...]], wanted: Sequence[bool], device: Any
) -> list[torch.Tensor]:
    return [
        make(shape, dtype=x.dtype, device=device).requires_grad_(w)
        for x, shape, w in zip(xs, shapes, wanted, strict=True)
    ]


@contextmanager
def _on(worker: Worker | None, comm: Any) -> Iterator[None]:
    if worker is None:
        yield
        return
    assuming = copy(worker)
    assuming.comm, assuming.prepared = comm, {}
    comm.requests = 0
    with assigned(WORKER, assuming):
        yield


class _AssumedComm:
    """The comm of a worker that assumes the lengths of the others' blocks.

    assumed: these lengths, for dimensions that are asked for; otherwise: those of all further ones. met: what was used.
    """

    def __init__(self, worker: Worker, assumed: _Assumed, otherwise: _Lengths):
        self.mesh, self.worker, self.requests = worker.mesh, worker.index, 0
        self.otherwise, self.met = otherwise, dict(assumed)

    @classmethod
    def of(cls, worker: Worker | None, assumed: _Assumed, otherwise: _Lengths = _ALIKE) -> _AssumedComm | None:
        return None if worker is None else cls(worker, assumed, otherwise)

    def assumed_shapes(self, spec: P | Grid, own: tuple[int, ...], group: Group) -> tuple[tuple[int, ...], ...]:
        """The shapes of the blocks of the members, of an array that a spec or grid splits."""
        zeros, axes = (0,) * len(own), self.mesh.axes
        layout = spec.layout(zeros, axes) if isinstance(spec, Grid) else self.mesh.layout(zeros, spec)
        mine = layout.positions(self.worker)
        lengths = [self._lengths(d) if len(cut) > 1 else _Lengths() for d, cut in enumerate(layout.cuts)]
        self.requests += 1

        def shape(worker: int) -> tuple[int, ...]:
            place = layout.positions(worker)
            if place is None:
                return (0,) * len(own)
            if mine is None:
                return (_FIRST,) * len(own)
            return tuple(n if p == q else x.of(n, p, q) for n, p, q, x in zip(own, mine, place, lengths, strict=True))

        return tuple(shape(w) for w in group.members)

    def _lengths(self, d: int) -> _Lengths:
        return self.met.setdefault(_Place(self.requests, d), self.otherwise)

    def run(self, plan: Any, call: Call, x: Any) -> Handle:
        """A number, of which the others have the same."""
        return Done((x, None))


def _result(op: Any, x: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape that an operator gives, where all blocks have the shape of this one."""
    worker = WORKER.get()
    assert worker is not None
    shape = _shape(op, tuple(x.shape), worker, array_dtype(x.dtype))
    y = x if shape == tuple(x.shape) else x.new_zeros(shape) + x.sum()
    return y if isinstance(op, Operator) else y.detach()


def _shape(op: Any, shape: tuple[int, ...], worker: Worker, dtype: np.dtype) -> tuple[int, ...]:
    group = worker.group(op.axes)
    layouts = getattr(op, "layouts", None)
    if layouts is not None:
        op.check(group, np.broadcast_to(np.zeros((), dtype), shape))
        return layouts[1].block_shape(group.index)
    if not isinstance(op, Operator):  # an extremum
        return tuple(n for d, n in enumerate(shape) if d not in op.dims)
    return op.out_shape(group, member_shapes(op, group, shape, shape), dtype)
