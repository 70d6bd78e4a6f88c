"""What a convolution of blocks does by specs alone, whatever the lengths: along the axes of batch and channels."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from spmd.functions.convolution_geometry import with_bias
from spmd.functions.layouts import lie_on_grid
from spmd.functions.movement import varied
from spmd.global_ops.call import names_of
from spmd.grid import Grid
from spmd.layout import Layout, P, Spec
from spmd.operators.gather import all_gather, pslice, psum_scatter
from spmd.operators.reduce import psum

__all__ = ["AlongChannels", "without_batch", "without_channels"]

Names = tuple[str, ...]


class Inner(NamedTuple):
    """The layer that remains: its specs, and the axes along which workers have batches of their own."""

    spec: P
    w_spec: Spec | None
    out_spec: P | None
    batch: Names


class AlongChannels(NamedTuple):
    """What is done along the axes that split channels, around a layer whose channels are whole.

    gather: axes that split the channels of the input, which are joined first. rows, columns: the axes that split the
    channels of the result and those of the input. scatter: some of columns, and the dimension of the result that they
    split. others: the axes that split batch and space.
    """

    gather: Names
    rows: Names
    columns: Names
    scatter: tuple[Names, int] | None
    others: Names

    def before(self, x: Any) -> Any:
        x = all_gather(x, self.gather, axis=1, tiled=True) if self.gather else x
        return varied(x, [n for n in self.rows if n not in self.gather])  # the adjoint of the all-gather sums already

    def after(self, y: Any, bias: Any) -> Any:
        """The sum over columns, with the bias."""
        added, split = self.columns, self.others
        if self.scatter is not None:
            names, dimension = self.scatter
            y = psum_scatter(y, names, scatter_dimension=dimension, tiled=True)
            added = tuple(n for n in added if n not in names)
            if dimension == 1 and bias is not None:
                bias = pslice(bias, names, axis=0, tiled=True)
            elif dimension != 1:
                split = (*split, *names)
        y = psum(y, added) if added else y
        return y if bias is None else with_bias(y, varied(bias, split))


@lru_cache(maxsize=1024)
def without_channels(
    spec: Spec | None, w_spec: Spec | None, out_spec: Spec | None, ndim: int, groups: int, transposed: bool
) -> tuple[AlongChannels, Inner] | None:
    """What is done along channels, and the layer that remains; None where it takes lengths of channels."""
    if groups > 1 or any(isinstance(each, Layout | Grid) for each in (spec, w_spec, out_spec)):
        return None
    batch, channels, *space = names_of(spec or P(), ndim)
    rows, columns, *rest = names_of(w_spec or P(), ndim)
    rows, columns = (columns, rows) if transposed else (rows, columns)
    others = tuple(n for names in (batch, *space) for n in names)
    gather = channels if not columns and {*channels} <= {*rows} else ()
    if any(rest) or {*rows} & {*others} or (channels != columns and not gather):
        return None
    natural = [batch, rows, *space]
    target = natural if out_spec is None else names_of(out_spec, ndim)
    differ = [d for d in range(ndim) if natural[d] != target[d]]
    scatter = (target[differ[0]], differ[0]) if differ else None
    if len(differ) > 1 or (scatter and (natural[scatter[1]] or not {*scatter[0]} <= {*columns})):
        return None
    inner = Inner(P(None, None, *(names or None for names in space)), None, None, batch)
    return AlongChannels(gather, rows, columns, scatter, others), inner


@lru_cache(maxsize=1024)
def without_batch(spec: Spec | None, w_spec: Spec | None, out_spec: Spec | None, ndim: int) -> Inner | None:
    """The layer of the batch that workers along the other axes share; None where it takes lengths of batches."""
    if isinstance(spec, Layout | Grid) or isinstance(out_spec, Layout | Grid) or lie_on_grid(w_spec):
        return None
    batch, *names = names_of(spec or P(), ndim)
    target = [batch, *names] if out_spec is None else names_of(out_spec, ndim)
    of_w = {n for each in names_of(w_spec or P(), ndim) for n in each}
    if not batch or target[0] != batch or {*batch} & of_w:
        return None
    split = lambda names: P(None, *(each or None for each in names))
    return Inner(split(names), w_spec, None if out_spec is None else split(target[1:]), batch)
