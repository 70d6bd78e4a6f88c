"""What a halo exchange and its adjoint share: checked parameters, and the lengths of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np

from spmd.errors import LayoutError, SpecError, describe
from spmd.layout import P
from spmd.operators.base import Operator
from spmd.operators.halo_arguments import boundaries_of, sizes_of, widths_of
from spmd.operators.halo_geometry import Dimension, dimensions_of
from spmd.operators.memo import bounded, memoised
from spmd.transport.algorithms.neighbours import Near
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group, Shape
from spmd.transport.plan import Plans

Kind = TypeVar("Kind", bound="Halo")

__all__ = ["Halo", "lengths_learnt"]

_WHOLE = P()


@dataclass(frozen=True)
class Halo(Operator):
    """Base of both directions.

    spec: the axes that split each dimension; `axes` are its axes. widths: for each dimension (low, high) of each block,
    or one pair for all. boundary: one for all dimensions, or one for each. sizes: for each dimension the lengths of its
    blocks without halo (None: unknown). block: the shape of this worker's block without halo, once known. learnt: for
    each dimension the lengths of its blocks, where they matter and are learnt, as far as they matter. Other workers
    learn those of other blocks, so they are no part of what workers compare.
    """

    spec: P = _WHOLE
    widths: Any = ()
    boundary: str | Sequence[str] = "none"
    sizes: Any = None
    block: Shape | None = None
    learnt: tuple[tuple[int, ...] | None, ...] | None = None

    private: ClassVar[tuple[str, ...]] = ("block", "learnt")

    def __post_init__(self):
        where = f"spmd.{self.function}"
        if not isinstance(self.spec, P) or self.spec.axes != self.axes:
            raise SpecError.at(
                where,
                argument="spec",
                got=describe(self.spec),
                need=f"a spec whose axes are {self.axes}",
                mend='P("x") splits dimension 0 over axis x: HaloExchange(("x",), P("x"), 1)',
            )
        widths = widths_of(where, self.spec, self.widths)
        object.__setattr__(self, "widths", widths)
        object.__setattr__(self, "boundary", boundaries_of(where, self.boundary, len(widths)))
        if self.sizes is not None:
            object.__setattr__(self, "sizes", sizes_of(where, self.sizes))

    def _dimensions(self, group: Group, ndim: int) -> tuple[Dimension, ...]:
        return dimensions_of(
            self.spec, self.widths, self.boundary, group.axes, group.dims, group.members, group.index, ndim
        )

    def lines(self, group: Group, ndim: int) -> tuple[Group, ...]:
        """The workers along each dimension."""
        return tuple(dim.line for dim in self._dimensions(group, ndim))

    def _given(self, d: int) -> tuple[int, ...] | None:
        """The lengths of the blocks of a dimension, if they were given."""
        return self.sizes[d] if self.sizes is not None and d < len(self.sizes) else None

    def _known(self, d: int) -> tuple[int, ...] | None:
        """The lengths of the blocks of a dimension, as far as they matter, if known."""
        given, learnt = self._given(d), self.learnt or ()
        return given if given is not None or d >= len(learnt) else learnt[d]

    def _split(self, lengths: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        """Known lengths of all dimensions, parted into those that were given and those that were learnt."""
        given = [self._given(d) for d in range(len(lengths))]
        return given, tuple(known if g is None else None for g, known in zip(given, lengths, strict=True))

    def _like(self, kind: type[Kind], **changes: Any) -> Kind:
        """A copy of this operator, or its adjoint, without checking the parameters again."""
        other = object.__new__(kind)
        other.__dict__.update({f.name: getattr(self, f.name) for f in fields(self)}, **changes)
        return other

    @memoised
    def _unknown(self, group: Group, ndim: int) -> tuple[tuple[Group, Near], ...]:
        """What to learn: the workers along each dimension whose lengths matter and are not known, and which lengths."""
        dimensions = enumerate(self._dimensions(group, ndim))
        return tuple((dim.line, dim.near(d)) for d, dim in dimensions if not dim.alone and self._known(d) is None)

    def out_shape(self, group: Group, shapes: Sequence[Shape], dtype: np.dtype) -> Shape:
        own = shapes[group.index]
        for k, shape in enumerate(shapes):
            if k == group.index or self.learnt is None:  # what was learnt is this worker's view
                self.check(group.of_member(k), np.broadcast_to(np.zeros((), dtype), shape))
        lengths = {
            d: tuple(shapes[group.members.index(worker)][d] for worker in dim.line.members)
            for d, dim in enumerate(self._dimensions(group, len(own)))
            if not dim.alone and self._known(d) is None
        }
        return self._plans_for(group, own, dtype, lengths).shape

    def _plans_for(self, group: Group, shape: Shape, dtype: np.dtype, lengths: dict[int, tuple[int, ...]]) -> Plans:
        """The plans for a block of this shape. lengths: per dimension the lengths of all blocks, where not given."""
        raise NotImplementedError

    def check(self, group: Group, x: np.ndarray) -> None:
        if (group, x.shape) not in self._checked:
            self._check(group, x)
            bounded(self._checked)[group, x.shape] = True

    @cached_property
    def _checked(self) -> dict[Any, bool]:
        """The groups and shapes of blocks that have passed the check."""
        return {}

    def _check(self, group: Group, x: np.ndarray) -> None:
        where = f"spmd.{self.function}"
        entries = {
            "spec": len(self.spec.trimmed),
            "widths": len(self.widths),
            "boundary": 0 if isinstance(self.boundary, str) else len(self.boundary),
            "sizes": len(self.sizes or ()),
        }
        for argument, count in entries.items():
            if count > x.ndim:
                raise LayoutError.at(
                    where,
                    argument=argument,
                    got=f"{count} entr{'y' if count == 1 else 'ies'} for a block of shape {list(x.shape)}",
                    need=f"at most {x.ndim}, one per dimension",
                    mend="((low, high),) gives the two sides of one dimension"
                    if argument == "widths"
                    else "leave out dimensions that the block does not have",
                )
        for d, dim in enumerate(self._dimensions(group, x.ndim)):
            for argument, values in {"widths": dim.pairs, "sizes": self._given(d)}.items():
                if values is not None and len(values) != dim.line.size:
                    raise self._count_error(argument, d, values, dim.line.size)

    def _count_error(self, argument: str, d: int, entries: tuple, blocks: int) -> LayoutError:
        return LayoutError.at(
            f"spmd.{self.function}",
            argument=f"{argument}, dimension {d}",
            got=f"{len(entries)} entries: {entries}",
            need=f"{blocks}, one per block",
            mend="one (low, high) for all blocks" if argument == "widths" else "None where they are to be learnt",
        )

    def _assumed_lengths(self, d: int, dim: Dimension, n: int) -> tuple[int, ...] | None:
        """The lengths of the blocks of a dimension; if unknown, n for this one and large ones for others."""
        lengths = self._known(d)
        if lengths is not None or dim.alone:
            return lengths
        far = dim.near(d).far
        return tuple(n if k == dim.line.index else far for k in range(dim.line.size))


def lengths_learnt(comm: Comm, unknown: Sequence[tuple[Group, Near]], call: Call):
    """For each dimension that is to be learnt the lengths of its blocks, as far as they matter."""
    handles = [comm.lengths(line, call, near) for line, near in unknown]
    lengths: dict[int, tuple[int, ...]] = {}
    for (_, near), handle in zip(unknown, handles, strict=True):
        lengths[near.dim] = yield handle
    return lengths
