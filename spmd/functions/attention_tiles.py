"""Attention by tiles of the score matrix, on one block, for arrays of any library.

A tile is computed, used and forgotten, so the score matrix never exists as a whole. Forward: a running maximum and sum
for each row (Rabe, Staats, "Self-attention does not need O(n²) memory", 2021). Backward: tiles are computed again from
the log-sum-exp of each row (Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Library", "Part", "attend", "attend_adjoint", "merged", "potential", "runs_of_heads"]

Pair = tuple[int, int]
Run = tuple[Pair, Pair]

ROWS, COLUMNS, ENTRIES = 128, 512, 1 << 17
"""The most rows and columns of a tile, and the most entries of the tiles that are computed at once."""


class Library(NamedTuple):
    """What the arithmetic needs of a library of arrays.

    xp: its functions of the Array API standard. zeros(shape, like): in the dtype and on the device of an array.
    wide: an array in the dtype to compute in. cast(x, dtype). where(mask, x, y): for a mask of NumPy or of the library.
    """

    xp: Any
    zeros: Callable[..., Any]
    wide: Callable[[Any], Any]
    cast: Callable[[Any, Any], Any]
    where: Callable[..., Any]


def runs_of_heads(heads: Pair, group: int) -> tuple[Run, ...]:
    """The heads from `start` to `stop`, in at most three runs, each with the heads of keys and values that it uses.

    group: how many heads share one head of keys. Each run divides evenly among its heads of keys; both count from the
    first one of this block.
    """
    start, stop = heads
    if start == stop:
        return ()
    first, last = start // group, (stop - 1) // group
    if first == last:
        return (((0, stop - start), (0, 1)),)
    inner = (first + (start % group > 0), last + (stop % group == 0))
    cuts = sorted({start, inner[0] * group, inner[1] * group, stop})
    return tuple(
        ((a - start, b - start), (a // group - first, (b - 1) // group + 1 - first))
        for a, b in itertools.pairwise(cuts)
    )


@dataclass(frozen=True)
class Part:
    """Which rows meet which columns.

    rows, columns: the positions in the whole sequences of the queries and of the keys of a block, as intervals.
    runs: see `runs_of_heads`. causal: a row sees the columns up to its own position.
    """

    rows: tuple[Pair, ...]
    columns: tuple[Pair, ...]
    runs: tuple[Run, ...]
    causal: bool
    scale: float

    def tiles(self, row_step: int, column_step: int) -> Iterator[tuple[slice, int, list[tuple[slice, int, bool]]]]:
        """Blocks of rows, each with its blocks of columns: (slice, first position), columns also with whether some of
        their entries are masked. Columns that a block of rows does not see are left out."""
        for rows, top in _steps(self.rows, row_step):
            last = top + rows.stop - rows.start - 1
            seen = []
            for columns, left in _steps(self.columns, column_step):
                if self.causal and left > last:
                    continue
                right = left + columns.stop - columns.start - 1
                seen.append((columns, left, self.causal and right > top))
            yield rows, top, seen

    def work(self) -> int:
        """How many entries of the score matrix of one head are computed."""
        return sum(
            (r.stop - r.start) * (c.stop - c.start) for r, _, seen in self.tiles(ROWS, COLUMNS) for c, _, _ in seen
        )

    def allowed(self) -> np.ndarray:
        """Which columns each row sees."""
        rows, columns = (
            np.concatenate([np.arange(0), *(np.arange(*i) for i in each)]) for each in (self.rows, self.columns)
        )
        return (rows[:, None] >= columns) if self.causal else np.ones((len(rows), len(columns)), bool)


def _steps(intervals: tuple[Pair, ...], step: int) -> Iterator[tuple[slice, int]]:
    """Pieces of intervals: the slice of the block that they are, and the position at which they start."""
    at = 0
    for start, stop in intervals:
        for position in range(start, stop, step):
            n = min(step, stop - position)
            yield slice(at, at + n), position
            at += n


class _Terms:
    """Bias and mask of one run, of which tiles are taken. Dimensions of length 1 broadcast."""

    def __init__(self, lib: Library, part: Part, run: Run, bias: Any, mask: Any, batch: tuple[int, ...]):
        self.lib, self.part = lib, part
        self.bias = None if bias is None else grouped_term(lib.xp, bias, run, batch)
        self.mask = None if mask is None else grouped_term(lib.xp, mask, run, batch)

    def add(self, s: Any, place: tuple[slice, ...], top: int, left: int, on_edge: bool) -> Any:
        """Scores (batch, key heads, group, rows, columns) with bias, and -inf where masked."""
        lib = self.lib
        if self.bias is not None:
            s = s + lib.wide(self.bias[part_of(self.bias, place)])
        if self.mask is not None:
            s = lib.where(self.mask[part_of(self.mask, place)], s, lib.zeros((), s) - math.inf)
        if on_edge:
            rows, columns = s.shape[-2:]
            seen = np.arange(top, top + rows)[:, None] >= np.arange(left, left + columns)
            s = lib.where(seen, s, lib.zeros((), s) - math.inf)
        return s


def grouped_term(xp: Any, a: Any, run: Run, batch: tuple[int, ...]) -> Any:
    """A bias or mask as (batch, key heads, group, rows, columns) of a run."""
    lead = a.shape[:-3]
    if all(n == 1 for n in lead) or tuple(lead) == batch:
        count = math.prod(lead)
    else:
        a, count = xp.broadcast_to(a, (*batch, *a.shape[-3:])), math.prod(batch)
    split = (1, 1)
    if a.shape[-3] != 1:
        a, split = a[..., slice(*run[0]), :, :], _split(run)
    return xp.reshape(a, (count, *split, *a.shape[-2:]))


def _split(run: Run) -> Pair:
    (start, stop), (first, last) = run
    return last - first, (stop - start) // (last - first)


def part_of(a: Any, place: tuple[slice, ...]) -> tuple[slice, ...]:
    """The place of a tile in an array whose dimensions of length 1 broadcast."""
    return tuple(slice(None) if n == 1 else s for n, s in zip(a.shape, place, strict=True))


def _grouped(xp: Any, a: Any, run: Run, keys: bool = False) -> Any:
    """An array (batch..., heads, length, features) as (batch, key heads, group, length, features) of a run; keys and
    values without the group."""
    heads = slice(*run[1 if keys else 0])
    shape = (math.prod(a.shape[:-3]), *(_split(run)[:1] if keys else _split(run)), *a.shape[-2:])
    return xp.reshape(a[..., heads, :, :], shape)


def _chunks(shape: tuple[int, int, int], rows: int, columns: int) -> tuple[int, Iterator[tuple[slice, slice]]]:
    """The rows of a tile, and the pieces of batch and key heads that are computed at once.

    shape: (batch, key heads, group).
    """
    batch, heads, group = shape
    columns = min(columns, COLUMNS)
    row_step = max(1, min(rows, ROWS, ENTRIES // (group * max(1, columns))))
    each = max(1, ENTRIES // max(1, group * row_step * columns))
    head_step = max(1, min(heads, each))
    batch_step = max(1, each // head_step)
    pieces = (
        (slice(b, b + batch_step), slice(h, h + head_step))
        for b in range(0, batch, batch_step)
        for h in range(0, heads, head_step)
    )
    return row_step, pieces


def _folded(xp: Any, a: Any) -> Any:
    """(batch, key heads, group, rows, n) as (batch, key heads, group * rows, n)."""
    return xp.reshape(a, (*a.shape[:2], a.shape[2] * a.shape[3], a.shape[4]))


def attend(lib: Library, q: Any, k: Any, v: Any, bias: Any, mask: Any, part: Part) -> tuple[Any, Any]:
    """softmax(scale q kᵀ + bias) v, and the log-sum-exp of each row, in the dtype that is computed in.

    q: (batch..., heads, rows, d). k, v: (batch..., key heads, columns, d). bias, mask: (batch..., heads, rows, all
    columns of the whole), or 1 in some dimensions. Rows that see nothing are zero, with -inf.
    """
    xp, batch = lib.xp, tuple(q.shape[:-3])
    out = lib.zeros((*q.shape[:-1], v.shape[-1]), lib.wide(q[..., :0, :]))
    lse = lib.zeros(q.shape[:-1], out) - math.inf
    for run in part.runs:
        terms = _Terms(lib, part, run, bias, mask, batch)
        qs, ks, vs = _grouped(xp, q, run), _grouped(xp, k, run, keys=True), _grouped(xp, v, run, keys=True)
        heads = slice(*run[0])
        shape = tuple(qs.shape[:3])
        run_out = lib.zeros((*shape, qs.shape[3], v.shape[-1]), out)
        run_lse = lib.zeros((*shape, qs.shape[3]), out)
        row_step, pieces = _chunks(shape, q.shape[-2], k.shape[-2])
        tiles = [*part.tiles(row_step, COLUMNS)]
        for b, h in pieces:
            for rows, top, seen in tiles:
                at = (b, h, slice(None), rows)
                run_out[at], run_lse[at] = _rows(lib, qs[at], ks[b, h], vs[b, h], terms, (at, top), seen)
        out[..., heads, :, :] = xp.reshape(run_out, out[..., heads, :, :].shape)
        lse[..., heads, :] = xp.reshape(run_lse, lse[..., heads, :].shape)
    return out, lse


def _rows(lib: Library, q: Any, k: Any, v: Any, terms: _Terms, at: Any, seen: list) -> tuple[Any, Any]:
    """The result and the log-sum-exp of some rows, over all tiles of columns that they see."""
    xp, (place, top) = lib.xp, at
    q = _folded(xp, lib.wide(q) * terms.part.scale)
    split = (*q.shape[:2], *_group_and_rows(place, q))
    high = lib.zeros((*q.shape[:-1], 1), q) - math.inf
    total, out = lib.zeros(high.shape, q), lib.zeros((*q.shape[:-1], v.shape[-1]), q)
    for columns, left, on_edge in seen:
        s = xp.matmul(q, xp.matrix_transpose(lib.wide(k[:, :, columns])))
        n = s.shape[-1]
        s = terms.add(xp.reshape(s, (*split, n)), (*place, slice(left, left + n)), top, left, on_edge)
        s = _folded(xp, s)
        new = xp.maximum(high, xp.max(s, axis=-1, keepdims=True))
        base = xp.where(xp.isinf(new), xp.zeros_like(new), new)
        s -= base
        p, kept = xp.exp(s), xp.exp(high - base)
        total = total * kept + xp.sum(p, axis=-1, keepdims=True)
        out = out * kept + xp.matmul(p, lib.wide(v[:, :, columns]))
        high = new
    some = xp.where(total == 0, xp.ones_like(total), total)
    lse = xp.where(total == 0, high, high + xp.log(some))
    return xp.reshape(out / some, (*split, out.shape[-1])), xp.reshape(lse, split)


def _group_and_rows(place: tuple[slice, ...], folded: Any) -> Pair:
    rows = place[3].stop - place[3].start
    return folded.shape[2] // rows, rows


def merged(xp: Any, a: tuple[Any, Any] | None, b: tuple[Any, Any]) -> tuple[Any, Any]:
    """Two results over different columns, with their log-sum-exps, as one."""
    if a is None:
        return b
    (x, s), (y, t) = a, b
    high = xp.maximum(s, t)
    base = xp.where(xp.isinf(high), xp.zeros_like(high), high)
    p, r = xp.exp(s - base), xp.exp(t - base)
    total = p + r
    some = xp.where(total == 0, xp.ones_like(total), total)
    out = x * (p / some)[..., None] + y * (r / some)[..., None]
    return out, xp.where(total == 0, high, base + xp.log(some))


def attend_adjoint(
    lib: Library, q: Any, k: Any, v: Any, bias: Any, mask: Any, lse: Any, delta: Any, g: Any, part: Part
) -> tuple[Any, Any, Any, Any]:
    """The cotangents of q, k, v and the bias (None without one), from tiles that are computed again.

    lse: the log-sum-exp of each row over all columns. delta: for each row, the sum of g times the result, less the
    cotangent of lse. g: the cotangent of the result. With p = exp(scores - lse) and s = p (g vᵀ - delta): s is the
    cotangent of the scores, that of q is scale s k, of k scale sᵀ q, of v pᵀ g.
    """
    xp, batch = lib.xp, tuple(q.shape[:-3])
    like = lib.wide(q[..., :0, :])
    dq, dk, dv = (lib.zeros(a.shape, like) for a in (q, k, v))
    dbias = None if bias is None else lib.zeros(bias.shape, like)
    base = xp.where(xp.isinf(lse), xp.zeros_like(lse), lse)
    for run in part.runs:
        terms = _Terms(lib, part, run, bias, mask, batch)
        qs, gs = _grouped(xp, q, run), _grouped(xp, g, run)
        ks, vs = _grouped(xp, k, run, keys=True), _grouped(xp, v, run, keys=True)
        bases, deltas = (_grouped(xp, a[..., None], run) for a in (base, delta))
        shape = tuple(qs.shape[:3])
        zeros = [None if a is None else lib.zeros(a.shape, like) for a in (qs, ks, vs, terms.bias)]
        to = _Sums._make(zeros)
        row_step, pieces = _chunks(shape, q.shape[-2], k.shape[-2])
        tiles = [*part.tiles(row_step, COLUMNS)]
        for b, h in pieces:
            for rows, top, seen in tiles:
                at = (b, h, slice(None), rows)
                block = tuple(_folded(xp, lib.wide(a[at])) for a in (qs, gs, bases, deltas))
                _add_tiles(lib, block, ks[b, h], vs[b, h], terms, (at, top), seen, to)
        _add_run(xp, run, batch, to, (dq, dk, dv, dbias))
    return dq, dk, dv, dbias


class _Sums(NamedTuple):
    """The cotangents of one run, to which tiles are added."""

    q: Any
    k: Any
    v: Any
    bias: Any


def _add_tiles(lib: Library, block: tuple, k: Any, v: Any, terms: _Terms, at: Any, seen: list, to: _Sums) -> None:
    """Add the cotangents that some rows give to those of a run."""
    xp, (place, top), scale = lib.xp, at, terms.part.scale
    q, g, base, delta = block
    split = (*q.shape[:2], *_group_and_rows(place, q))
    dq = lib.zeros(q.shape, q)
    b, h = place[:2]
    for columns, left, on_edge in seen:
        kt, vt = lib.wide(k[:, :, columns]), lib.wide(v[:, :, columns])
        n = kt.shape[2]
        s = xp.matmul(q * scale, xp.matrix_transpose(kt))
        tile = (*place, slice(left, left + n))
        s = _folded(xp, terms.add(xp.reshape(s, (*split, n)), tile, top, left, on_edge))
        s -= base
        p = xp.exp(s)
        to.v[b, h, columns] += xp.matmul(xp.matrix_transpose(p), g)
        ds = xp.matmul(g, xp.matrix_transpose(vt))
        ds -= delta
        ds *= p
        dq += xp.matmul(ds, kt)
        to.k[b, h, columns] += xp.matmul(xp.matrix_transpose(ds), q) * scale
        if to.bias is not None:
            to.bias[part_of(to.bias, tile)] += _summed_like(xp, xp.reshape(ds, (*split, n)), to.bias)
    to.q[place] = xp.reshape(dq * scale, (*split, q.shape[-1]))


def _summed_like(xp: Any, a: Any, term: Any) -> Any:
    """The sum of a over the dimensions in which a term broadcasts."""
    axes = tuple(d for d, (n, m) in enumerate(zip(a.shape, term.shape, strict=True)) if m == 1 and n != 1)
    return xp.sum(a, axis=axes, keepdims=True) if axes else a


def _add_run(xp: Any, run: Run, batch: tuple[int, ...], of: _Sums, to: tuple) -> None:
    """Add the cotangents of a run to those of the blocks."""
    dq, dk, dv, dbias = to
    for a, part, heads in ((dq, of.q, run[0]), (dk, of.k, run[1]), (dv, of.v, run[1])):
        view = a[..., slice(*heads), :, :]
        view += xp.reshape(part, view.shape)
    if dbias is None:
        return
    view = dbias if dbias.shape[-3] == 1 else dbias[..., slice(*run[0]), :, :]
    lead = tuple(dbias.shape[:-3])
    whole = of.bias
    if math.prod(lead) != whole.shape[0]:  # some dimensions of the batch broadcast
        whole = xp.reshape(whole, (*batch, *whole.shape[1:]))
        axes = tuple(d for d, n in enumerate(lead) if n == 1)
        whole = xp.sum(whole, axis=axes, keepdims=True)
    if dbias.shape[-3] == 1 and math.prod(whole.shape[-4:-2]) != 1:
        whole = xp.sum(whole, axis=(-4, -3), keepdims=True)
    view += xp.reshape(whole, view.shape)


def potential(lib: Library, q, k, v, bias, mask, lse, delta, g, part: Part) -> Any:
    """A number whose gradient in q, k, v and the bias is `attend_adjoint`, by functions that are differentiated.

    It is the sum of exp(scores - lse) (g vᵀ - delta). It holds the whole score matrix.
    """
    xp = lib.xp
    q, k, v, g = (lib.wide(a) for a in (q, k, v, g))
    shared = [first + n // _split(run)[1] for run in part.runs for first, n in _places(run)]
    k, v = (a if shared == [*range(a.shape[-3])] else a[..., shared, :, :] for a in (k, v))
    columns = [n for interval in part.columns for n in range(*interval)]
    s = xp.matmul(q, xp.matrix_transpose(k)) * part.scale
    if bias is not None:
        s = s + lib.wide(_at_columns(bias, columns))
    s = s - xp.where(xp.isinf(lse), xp.zeros_like(lse), lse)[..., None]
    low = lib.zeros((), s) - math.inf
    s = lib.where(part.allowed(), s, low)
    if mask is not None:
        s = lib.where(_at_columns(mask, columns), s, low)
    return xp.sum(xp.exp(s) * (xp.matmul(g, xp.matrix_transpose(v)) - delta[..., None]))


def _places(run: Run) -> Iterator[Pair]:
    """For each head of a run its first head of keys, and its own number in the run."""
    (start, stop), (first, _) = run
    return ((first, n) for n in range(stop - start))


def _at_columns(a: Any, columns: list[int]) -> Any:
    whole = a.shape[-1] == 1 or columns == [*range(a.shape[-1])]
    return a if whole else a[..., columns]
