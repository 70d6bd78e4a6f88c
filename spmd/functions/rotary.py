"""Rotary embeddings of positions, of sequences that may be split over workers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from spmd.autodiff.signatures import Tree
from spmd.errors import LayoutError, SpecError, describe
from spmd.functions.arguments import as_number
from spmd.functions.layouts import dtype_of, spec_of_names
from spmd.functions.local import local, namespace
from spmd.functions.movement import relaid
from spmd.functions.planned import LayerPlan, Operand, is_split, run_layer
from spmd.layout import Layout, Spec
from spmd.mesh import here
from spmd.tracebacks import api_boundary

__all__ = ["rope"]

_WHERE = "spmd.functions.rope"


@api_boundary
def rope(
    x: Tree, positions: Any = None, *, base: float = 10000.0, interleaved: bool = False, spec: Spec | None = None
) -> Tree:
    """x with pairs of features turned by angles that grow with the position: rotary embedding.

    x: (..., n, d), d even, floating; arrays of NumPy, CuPy or PyTorch. Pair i of the entry at position p is turned by
    p / base^(2 i / d). It is of features i and i + d / 2; interleaved: of 2 i and 2 i + 1.
    positions: integers that broadcast to x.shape[:-1], those of the entries of this block, or of a global array. None:
    0 to n - 1, counted over the whole array.
    spec: in a body, how the whole array is split, of which x is this worker's block: a spec, or a `Layout`. Outside of
    bodies global arrays have their layouts. The result lies as x does.

    Cost: nothing moves, unless features are split: then they are gathered, and the result is not.
    Linear in x. Adjoint: the turn by the opposite angles. Raises SpecError and LayoutError for arguments that do not
    fit. Source: Su et al., "RoFormer: Enhanced transformer with rotary position embedding", 2021.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.array([[1.0, 0.0]] * 3), P("x"))
        ...     spmd.functions.rope(x).numpy().round(3)
        array([[ 1.   ,  0.   ],
               [ 0.54 ,  0.841],
               [-0.416,  0.909]])
    """
    _check(x, positions)
    turn = Turn(as_number(_WHERE, "base", base, 1, math.inf), bool(interleaved))
    operands = [Operand("spec", x, spec)]
    if not is_split(*operands, Operand("positions", positions)):
        _check_features(x.shape)
        at = np.arange(x.shape[-2]) if positions is None else positions
        return turn(x, at)
    if positions is not None:
        wanted = tuple(x.shape[:-1])
        if tuple(positions.shape) != wanted:
            positions = namespace(positions).broadcast_to(positions, wanted)
        operands.append(Operand("positions", positions, derive=lambda before: _of_positions(before[0])))
    return run_layer(_WHERE, lambda x, at=None: _plan(x, at, turn), operands)


def _check(x: Any, positions: Any) -> None:
    """Raise unless the operands have the dimensions and the dtypes of a rotary embedding."""
    if getattr(x, "ndim", 0) < 2 or dtype_of(x).kind not in "fV":
        need, mend = "real floating-point numbers, of shape (..., n, d)", "x[None] for one entry, x.astype(float)"
        raise SpecError.at(_WHERE, argument="x", got=describe(x), need=need, mend=mend)
    if positions is None:
        return
    shape = getattr(positions, "shape", x.shape)  # a list has none: it is refused, as one of too many dimensions
    fits = len(shape) < x.ndim and dtype_of(positions).kind in "iu"
    if not fits or any(n not in (1, m) for n, m in zip(shape[::-1], x.shape[-2::-1], strict=False)):
        need = f"integers that broadcast to {list(x.shape[:-1])}, those of the entries of x"
        mend = "positions=None for 0 to n - 1; np.asarray(positions)"
        raise SpecError.at(_WHERE, argument="positions", got=describe(positions), need=need, mend=mend)


def _check_features(shape: Any) -> None:
    if shape[-1] % 2:
        need = "an even number of features, which are turned in pairs"
        raise LayoutError.at(_WHERE, argument="x", got=f"shape {list(shape)}", need=need, mend="pad x with a feature")


@dataclass(frozen=True)
class Turn:
    """The rotation of pairs of features by positions."""

    base: float
    interleaved: bool

    def __call__(self, x: Any, positions: Any) -> Any:
        xp, half = namespace(x), x.shape[-1] // 2
        rates = self.base ** (-np.arange(half) / max(1, half))
        cos, sin = local(x, "rotary").turns(positions, rates, x)
        if self.interleaved:
            low, high = x[..., 0::2], x[..., 1::2]
        else:
            low, high = x[..., :half], x[..., half:]
        turned = low * cos - high * sin, low * sin + high * cos
        if self.interleaved:
            return xp.reshape(xp.stack(turned, axis=-1), x.shape)
        return xp.concat(turned, axis=-1)


def _of_positions(layout: Layout | None) -> Layout:
    """The layout of positions, which lie as the entries of x do."""
    assert layout is not None
    shape, cuts = layout.shape[:-1], layout.cuts[:-1]
    if layout.spec is not None:
        return Layout(shape, spec_of_names(layout.spec.dims[:-1]), layout.axes, cuts)
    assert layout.workers is not None
    return Layout.grid(shape, [len(c) for c in cuts], layout.axes, layout.workers[:: len(layout.cuts[-1])], cuts)


@lru_cache(maxsize=1024)
def _plan(x: Layout, positions: Layout | None, turn: Turn) -> LayerPlan:
    _check_features(x.shape)
    return _Plan(x, positions, turn)


@dataclass(frozen=True)
class _Plan:
    """x to whole features, turned there, and brought back."""

    x: Layout
    positions: Layout | None
    turn: Turn

    @property
    def out(self) -> Layout:
        return self.x

    @cached_property
    def _whole(self) -> Layout:
        """The layout of x with whole features."""
        x = self.x
        if len(x.cuts[-1]) == 1:
            return x
        cuts = [*x.cuts[:-1], None]
        if x.spec is not None:
            return Layout(x.shape, spec_of_names([*x.spec.dims[:-1], ()]), x.axes, cuts)
        assert x.workers is not None
        grid = [*(len(c) for c in x.cuts[:-1]), 1]
        return Layout.grid(x.shape, grid, x.axes, x.workers[:: len(x.cuts[-1])], cuts)

    def __call__(self, x: Any, positions: Any = None) -> Any:
        x = relaid(x, self.x, self._whole)
        if positions is None:
            positions = np.arange(*self._whole.boxes[here(_WHERE).index][-2])
        else:
            assert self.positions is not None
            positions = relaid(positions, self.positions, _of_positions(self._whole))
        return relaid(self.turn(x, positions), self._whole, self.x)
