"""Rows of a table that is split over workers: who looks up which, and where they are added."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from spmd.errors import LayoutError
from spmd.functions.layouts import checked_target, lie_on_grid, spec_of_names
from spmd.functions.local import local
from spmd.functions.movement import fetched, relaid, summed, varied
from spmd.functions.planned import LayerPlan
from spmd.layout import Box, Layout, Spec
from spmd.mesh import here
from spmd.operators.repartition import accumulate

__all__ = ["embedding_plan"]


@lru_cache(maxsize=1024)
def embedding_plan(
    where: str, table: Layout, ids: Layout, padding: tuple[int, ...], out_spec: Spec | None
) -> LayerPlan:
    """The plan for a table and ids that lie so."""
    if not table.shape:
        need, mend = "rows: at least one dimension", "np.atleast_1d(x)"
        raise LayoutError.at(where, argument="table", got=f"shape {list(table.shape)}", need=need, mend=mend)
    return (_GridPlan if lie_on_grid(table, ids, out_spec) else _SpecPlan)(where, table, ids, padding, out_spec)


@dataclass(frozen=True)
class _Plan:
    where: str
    table: Layout
    ids: Layout
    padding: tuple[int, ...]
    out_spec: Spec | None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return (*self.ids.shape, *self.table.shape[1:])

    def rows(self, table: Any, ids: Any) -> Any:
        """The rows of this worker's block of the table that ids name; zeros for others."""
        box = self.table.boxes[here(self.where).index]
        bounds = (*(box[0] if table.shape[0] else (0, 0)), self.table.shape[0])
        return local(table, "embeddings").rows(self.where, table, ids, bounds, self.padding)


class _SpecPlan(_Plan):
    """By specs: ids without the axes of the table, rows looked up there, and summed over the axes of the rows."""

    @cached_property
    def looked_up(self) -> Layout:
        """The layout of ids for looking up: without the axes of the table."""
        taken = self.table.spec.varying
        names = [tuple(n for n in each if n not in taken) for each in self.ids.spec.dims]
        same = zip(self.ids.cuts, self.ids.spec.dims, names, strict=True)
        return Layout(self.ids.shape, spec_of_names(names), self.ids.axes, [c if a == b else None for c, a, b in same])

    @cached_property
    def found(self) -> Layout:
        """The layout of the sums of what the workers find."""
        names = [*self.looked_up.spec.dims, *self.table.spec.dims[1:]]
        cuts = [*self.looked_up.cuts, *self.table.cuts[1:]]
        return Layout(self.shape, spec_of_names(names), self.table.axes, cuts)

    @cached_property
    def out(self) -> Layout:
        return checked_target(self.where, "out_spec", self.out_spec, self.shape, self.found, self.table.axes)

    def __call__(self, table: Any, ids: Any) -> Any:
        rows, *rest = self.table.spec.dims
        ids = relaid(ids, self.ids, self.looked_up)
        batch = [n for names in self.looked_up.spec.dims for n in names]
        split = [n for names in (rows, *rest) for n in names]
        y = self.rows(varied(table, batch), varied(ids, split))
        return summed(y, rows, self.found, self.out)


class _GridPlan(_Plan):
    """On some of the workers: all ids to each worker of the table, and what they find added where the result lies."""

    @cached_property
    def held(self) -> Layout:
        """The table on the first workers that hold its blocks."""
        table = self.table
        blocks = [len(c) for c in table.cuts]
        if table.spec is None:
            return table
        owners = [table.holders[place][0] for place in sorted(table.holders)]
        return Layout.grid(table.shape, blocks, table.axes, owners, table.cuts)

    @cached_property
    def _needs(self) -> tuple[Box, ...]:
        """All ids where there is a block of the table."""
        whole, places = tuple((0, n) for n in self.ids.shape), map(self.held.positions, range(self.held.size))
        return tuple(tuple((0, 0) for _ in whole) if place is None else whole for place in places)

    @cached_property
    def found(self) -> Layout:
        """What the workers find, which varies over the blocks of rows."""
        rows, *rest = map(len, self.held.cuts)
        workers = self.held.workers or ()
        step = len(workers) // rows
        by_block = [w for k in range(step) for w in workers[k::step]]
        cuts = [*((n,) for n in self.ids.shape), *self.held.cuts[1:]]
        grid = [*(1 for _ in self.ids.shape), *rest, rows]
        return Layout.grid(self.shape, grid, self.table.axes, by_block, cuts)

    @cached_property
    def out(self) -> Layout:
        found, rows = self.found, len(self.held.cuts[0])
        assert found.workers is not None
        natural = Layout.grid(self.shape, [len(c) for c in found.cuts], found.axes, found.workers[::rows], found.cuts)
        return checked_target(self.where, "out_spec", self.out_spec, self.shape, natural, self.table.axes)

    def __call__(self, table: Any, ids: Any) -> Any:
        held = relaid(table, self.table, self.held)
        ids = fetched(ids, self.ids, self._needs)
        me = here(self.where).index
        box = self.held.boxes[me]
        y = local(table, "embeddings").rows(self.where, held, ids, (*box[0], self.table.shape[0]), self.padding)
        return accumulate(y, self.found, self.out)
