"""The shapes of results in compiled graphs, as plans say them: nothing moves while a function is compiled.

Where a length depends on the blocks of other workers, it stays open in the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

import spmd
from spmd import frontends
from spmd.errors import MeshError
from spmd.layout import Layout
from spmd.mesh import WORKER, Mesh, Worker
from spmd.operators.base import Collective, Operator
from spmd.operators.halo_base import Halo
from spmd.replicas.records import Replicas
from spmd.state import ROOTED
from spmd.transport.call import Group
from spmd.transport.handles import Done, Handle

__all__ = [
    "check_planned",
    "differs_by_worker",
    "member_shapes",
    "ndims_seen",
    "of_one_worker",
    "result_lengths",
    "tokens",
]

tokens: dict[str, tuple[Any, tuple, dict[str, Any]]] = {}
"""The functions that graphs refer to, with their arguments, by their names there."""


of_one_worker: set[str] = set()
"""The tokens of operators in graphs that belong to one worker anyhow."""


def result_lengths(token: str, shape: tuple[Any, ...], worker: Worker) -> tuple[Any, ...]:
    """The shape of the result on this worker; None for a length that the blocks of the others decide.

    A length that is itself open, as another operator has left it, or that the graph takes as it comes, stands for any:
    two are planned with. Lengths that come are fixed where that does not say the result's.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols  # slow to import

    symbolic = [d for d, n in enumerate(shape) if isinstance(n, torch.SymInt)]
    unknown = [d for d in symbolic if free_unbacked_symbols(shape[d])]
    if len(symbolic) > len(unknown):
        lengths = _lengths(token, shape, worker, symbolic)
        if lengths is not None and None not in lengths:
            return lengths
    lengths = _lengths(token, shape, worker, unknown)
    if lengths is None:
        return (None,) * _ndim(token, shape, unknown, tuple(worker.mesh.axes.items()), worker)
    return lengths


def _lengths(token: str, shape: tuple[Any, ...], worker: Worker, open_dims: list[int]) -> tuple[Any, ...] | None:
    """`result_lengths`, with any lengths in the open dimensions; None where plans do not tell."""
    axes = tuple(worker.mesh.axes.items())
    index = worker.index if differs_by_worker(token) else None
    samples = [tuple(first + 2 * d if d in open_dims else int(n) for d, n in enumerate(shape)) for first in (211, 307)]
    planned = [_planned(token, sample, axes, index) for sample in (samples if open_dims else samples[:1])]
    if None in planned:
        return None

    def length(*lengths: int | None) -> Any:
        same = [shape[d] for d in open_dims if lengths == (samples[0][d], samples[1][d])]
        return lengths[0] if len(set(lengths)) == 1 else same[0] if same else None

    return tuple(length(*lengths) for lengths in zip(*planned, strict=True))  # type: ignore[arg-type]


def check_planned(token: str, shape: tuple[int, ...], result: tuple[int, ...], worker: Worker) -> None:
    """Raise where a block of this shape has a result of other lengths than a graph takes for granted: plans are made
    for other blocks that differ from this one by at most one entry in each dimension."""
    axes = tuple(worker.mesh.axes.items())
    planned = _planned(token, shape, axes, worker.index if differs_by_worker(token) else None)
    if planned is not None and any(n not in (None, m) for n, m in zip(planned, result, strict=True)):
        raise MeshError.at(
            f"a compiled call of {token.split('(')[0]}",
            got=f"a result of shape {list(result)} of a block of shape {list(shape)}: others are much shorter",
            need=f"shape {[n if n is not None else '?' for n in planned]}, for which the graph was made",
            mend="give the lengths of the blocks (shape=... or sizes=...); torch.compiler.disable keeps this call out",
        )


def _ndim(token: str, shape: tuple[Any, ...], open_dims: list[int], axes: tuple, worker: Worker) -> int:
    """How many dimensions the result has where plans do not tell."""
    if getattr(tokens[token][0], "learns", False):
        return len(shape)  # workers hold blocks of other shapes than this one's
    concrete = tuple(0 if d in open_dims else int(n) for d, n in enumerate(shape))
    ndim = None if open_dims else ndims_seen.get((token, concrete, axes, worker.index))
    if ndim is not None:
        return ndim
    raise MeshError.at(
        f"a compiled call of {token.split('(')[0]}",
        got=f"a block of shape {list(concrete)}, where the other workers' blocks decide the shape of the result",
        need="a result whose shape is known from an earlier call",
        mend="run the function once before it is compiled; torch.compiler.disable keeps this call out",
    )


ndims_seen: dict[tuple, int] = {}
"""How many dimensions the result had, by token, block shape and worker, for what plans do not tell."""


def differs_by_worker(token: str) -> bool:
    """Whether equal blocks may give results of other shapes on one worker than on another: then each has a graph."""
    op = tokens[token][0]
    if token in of_one_worker:
        return True
    if getattr(op, "learns", False) or getattr(op, "layouts", None) is not None:
        return True
    if isinstance(op, Operator):
        return ROOTED in (op.source, op.target)
    return getattr(op, "__name__", "") in ("repartition", "accumulate")


class _Block:
    """A block of which nothing but the shape is known. A function of one gives the operator that it applies, or the
    block where nothing moves."""

    __slots__ = ("dtype", "ndim", "shape")

    def __init__(self, shape: tuple[int, ...]):
        self.shape, self.ndim, self.dtype = shape, len(shape), np.dtype(np.int8)


class _BlockFrontend:
    def begin(self, op: Collective, x: _Block, worker: Worker, frame: Any) -> Callable[[], Collective]:
        return lambda: op

    def vary(self, x: _Block, names: Sequence[str], worker: Worker) -> _Block:
        return x

    declare = vary

    def bare(self, x: _Block) -> _Block:
        return x

    def data(self, x: _Block) -> None:
        return None


frontends.register(_Block, cast(Any, _BlockFrontend()))


class _AssumedShapes:
    """The comm of a worker with a block of shape `own`, where the blocks of all others have the shape `others`."""

    def __init__(self, worker: int, own: tuple[int, ...], others: tuple[int, ...]):
        self.worker, self.own, self.others = worker, own, others

    def shapes(self, group: Group, call: Any = None) -> Handle:
        return Done([self.own if k == group.index else self.others for k in range(group.size)])


def member_shapes(op: Operator, group: Group, own: tuple[int, ...], others: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of the blocks of all members: `others`, in the lengths that the operator does not know."""
    shapes = [own if k == group.index else others for k in range(group.size)]
    if not isinstance(op, Halo) or op.sizes is None:
        return shapes
    lines = [op.lines(group.of_member(k), len(own)) for k in range(group.size)]

    def length(k: int, d: int) -> int:
        sizes = op.sizes[d] if d < len(op.sizes) else None
        return shapes[k][d] if sizes is None or k == group.index else sizes[lines[k][d].index]

    return [tuple(length(k, d) for d in range(len(own))) for k in range(group.size)]


@functools.lru_cache(maxsize=4096)
def _planned(
    token: str, shape: tuple[int, ...], axes: tuple[tuple[str, int], ...], index: int | None
) -> tuple[int | None, ...] | None:
    """The lengths of the result by the operator's plans, where all blocks have the shape of this worker's; None for
    those that differ where the other workers' blocks are an entry longer or shorter. index: which worker; None: any,
    since one graph serves all.

    None where such blocks do not fit each other.
    """
    function, args, _ = tokens[token]
    layouts = args if args and isinstance(args[-1], Layout) else getattr(function, "layouts", None)
    mesh = spmd.make_mesh([n for _, n in axes], [name for name, _ in axes], transport="local", device="cpu")
    if layouts is not None:
        return layouts[1].block_shape(mesh.group(index or 0, tuple(layouts[1].axes)).index)
    root = getattr(function, "root", None) if isinstance(function, Operator) and function.source == ROOTED else None
    if root is not None and index is not None and mesh.group(index, function.axes).index != root:
        return None  # this worker has nothing: the root decides
    # Blocks of balanced layouts differ by one entry; `check_planned` refuses what others decide beyond that.
    near = [(*shape[:d], m, *shape[d + 1 :]) for d, n in enumerate(shape) for m in (n - 1, n + 1) if m >= 0]
    others = [shape, *near, *([] if root is None else [(0,)])]
    workers = range(mesh.size) if index is None else [index]
    shapes = [s for w in workers for other in others if (s := _planned_on(token, mesh, w, shape, other)) is not None]
    if not shapes or any(len(s) != len(shapes[0]) for s in shapes):
        return None
    return tuple(lengths[0] if len(set(lengths)) == 1 else None for lengths in zip(*shapes, strict=True))


def _planned_on(
    token: str, mesh: Mesh, index: int, own: tuple[int, ...], others: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The shape of the result on a worker with a block of shape `own`; None where the others' do not fit it."""
    function, args, kwargs = tokens[token]
    comm = _AssumedShapes(index, own, others)
    outer = WORKER.set(Worker(mesh, cast(Any, comm), False, Replicas(False, 0)))
    try:
        op = function if isinstance(function, Operator) else function(_Block(own), *args, **kwargs)
        if isinstance(op, _Block):
            return own
        group = mesh.group(index, op.axes)
        return op.out_shape(group, member_shapes(op, group, own, others), np.dtype(np.int8))
    except (
        ValueError,
        TypeError,
        RuntimeError,
        AttributeError,
    ):  # AttributeError: of a function of several collectives
        return None
    finally:
        WORKER.reset(outer)
