"""Pooling over windows of one to three spatial dimensions: arrays (N, C, *spatial) that lie anyhow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from spmd.autodiff.signatures import Tree
from spmd.errors import SpecError
from spmd.functions.layouts import as_operand, checked_target
from spmd.functions.local import local, namespace
from spmd.functions.movement import relaid
from spmd.functions.planned import LayerPlan, Operand, along, is_local, run_layer
from spmd.functions.window_arguments import check_spatial, paddings, per_dimension, tuples
from spmd.functions.windows import extended
from spmd.layout import Layout, Spec
from spmd.mesh import here
from spmd.tracebacks import api_boundary
from spmd.window_nd import Windows, plan_windows

__all__ = ["avg_pool", "max_pool"]

Ints = tuple[int, ...]
Window = tuple[Ints, Ints, tuple[tuple[int, int], ...], Ints]
"""The window, stride, padding and dilation of each dimension of space, as local functions take them."""


@api_boundary
def max_pool(
    x: Any,
    window: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    *,
    spec: Spec | None = None,
    shape: Sequence[int | None] | None = None,
    out_spec: Spec | None = None,
) -> Any:
    """The largest entry of every window. x: (N, C, *spatial), floating, of one to three spatial dimensions; an array of
    NumPy, CuPy or PyTorch.

    window, stride, dilation: an int, or one for each spatial dimension; the default stride is the window. padding: an
    int, an int or a pair (low, high) for each dimension, "SAME" (ceil(length / stride) outputs) or "VALID" (none).
    ceil_mode: a last, incomplete window has an output too, unless it would start in the high padding. return_indices:
    also return the flat row-major index of each largest entry among the spatial entries of x, of the whole x.
    spec: in a body, how the whole x is split, of which x is this worker's block: a spec, or a `Layout` on some of the
    workers. None: x is the whole. Outside of bodies global arrays have their layouts. shape: of the whole x, if spec
    splits it evenly; without it the workers exchange the lengths of their blocks, if space is split.
    out_spec: how the result is to lie. None: on the grid of x, in the same blocks of batch and channels and in balanced
    blocks of space.

    Of equal entries the first in row-major order is chosen, before them the first NaN (of tensors the last), never
    padding. A window of padding alone has -inf, and the index -1.
    Forward: each worker gets the entries that its outputs need, by one halo exchange; on some of the workers by an
    exchange between those who need something of one another. Nothing moves where no window crosses a block.
    Adjoint of the derivative: g is added to the chosen entry, by a halo accumulation where that lies on another worker.
    Raises SpecError and LayoutError where options, specs and layouts do not fit x. Source: as
    torch.nn.functional.max_pool2d; Hewett, Grady, "A linear algebraic approach to model parallelism in deep learning",
    2020.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.array([[[1.0, 5.0, 2.0, 4.0, 3.0]]]), P(None, None, "x"))
        ...     spmd.functions.max_pool(x, 3, stride=2)
        ...     spmd.grad(lambda x: np.sum(spmd.functions.max_pool(x, 3, stride=2)))(x)
        PartitionedArray([[[5., 4.]]], dtype=float64, spec=P(None, None, 'x'))
        PartitionedArray([[[0., 1., 0., 1., 0.]]], dtype=float64, spec=P(None, None, 'x'))
    """
    where = "spmd.functions.max_pool"
    x = as_operand(where, "x", x, "f", "real floating-point numbers", "x.astype(float)")
    taps = _checked(where, x, window, stride, dilation)
    operand, ceil, indices = Operand("spec", x, spec, shape), bool(ceil_mode), bool(return_indices)
    if is_local(where, operand, out_spec, range(2)):
        top, index = local(x, "pooling").max_pool(x, _padded(where, x.shape[2:], padding, *taps), ceil, indices)
        return (top, index) if indices else top
    options = _Options(where, *taps, _hashable(where, padding, *taps), ceil)
    operand = along(where, operand, out_spec, range(2, x.ndim))
    return run_layer(where, lambda layout: _planned(layout, options, out_spec, indices), [operand])


@api_boundary
def avg_pool(
    x: Tree,
    window: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    spec: Spec | None = None,
    shape: Sequence[int | None] | None = None,
    out_spec: Spec | None = None,
) -> Tree:
    """The mean of every window. x: (N, C, *spatial), floating or complex, of one to three spatial dimensions; an array
    of NumPy, CuPy or PyTorch.

    window, stride, padding, dilation, ceil_mode, spec, shape, out_spec: as for `max_pool`. count_include_pad: padding
    counts as zeros; else it does not count. Entries beyond the padding, which ceil_mode may read, never count. A window
    in which no entry counts has the mean 0. divisor_override: what the sum of a window is divided by, in place of the
    number of entries that count.

    Forward: as for `max_pool`. Linear. Adjoint: each entry of g is shared equally among the entries of its window that
    count, by a halo accumulation where they lie on other workers.
    Raises SpecError and LayoutError where options, specs and layouts do not fit x. Source: as
    torch.nn.functional.avg_pool2d.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.arange(6.0).reshape(1, 1, 6), P(None, None, "x"))
        ...     spmd.functions.avg_pool(x, 3, stride=1)
        PartitionedArray([[[1., 2., 3., 4.]]], dtype=float64, spec=P(None, None, 'x'))
    """
    where = "spmd.functions.avg_pool"
    x = as_operand(where, "x", x, "fc", "floating-point or complex numbers", "x.astype(float)")
    taps, divisor = _checked(where, x, window, stride, dilation), _divisor(where, divisor_override)
    operand, ceil, count = Operand("spec", x, spec, shape), bool(ceil_mode), bool(count_include_pad)
    if is_local(where, operand, out_spec, range(2)):
        return local(x, "pooling").avg_pool(x, _padded(where, x.shape[2:], padding, *taps), ceil, count, divisor)
    options = _Options(where, *taps, _hashable(where, padding, *taps), ceil, count, divisor)
    operand = along(where, operand, out_spec, range(2, x.ndim))
    return run_layer(where, lambda layout: _planned(layout, options, out_spec), [operand])


def _checked(where: str, x: Any, window: Any, stride: Any, dilation: Any) -> tuple[Ints, Ints, Ints]:
    """The window, stride and dilation of each dimension."""
    check_spatial(where, x)
    dims = x.ndim - 2
    window = per_dimension(where, "window", window, dims)
    stride = window if stride is None else per_dimension(where, "stride", stride, dims)
    return window, stride, per_dimension(where, "dilation", dilation, dims)


def _padded(where: str, space: Ints, padding: Any, window: Ints, stride: Ints, dilation: Ints) -> Window:
    """The window over an array of these lengths, as local functions take it."""
    return window, stride, paddings(where, padding, space, window, stride, dilation), dilation


def _hashable(where: str, padding: Any, window: Ints, stride: Ints, dilation: Ints) -> Any:
    """The padding as it was given, checked, in tuples."""
    paddings(where, padding, (1,) * len(window), window, stride, dilation)
    return tuples(padding)


def _divisor(where: str, divisor: Any) -> int | None:
    if divisor is None:
        return None
    if not isinstance(divisor, int) or isinstance(divisor, bool) or divisor == 0:
        mend = "leave it out for the mean"
        raise SpecError.at(where, argument="divisor_override", got=repr(divisor), need="an int, not 0", mend=mend)
    return divisor


@dataclass(frozen=True)
class _Options:
    """The arguments of a pooling. kernel, stride, dilation: an int for each dimension. padding: as it is given."""

    where: str
    kernel: Ints
    stride: Ints
    dilation: Ints
    padding: Any
    ceil_mode: bool
    count_include_pad: bool = True
    divisor: int | None = None

    def window(self, space: Ints) -> Window:
        """The window over an array of these lengths."""
        return _padded(self.where, space, self.padding, self.kernel, self.stride, self.dilation)


@lru_cache(maxsize=256)
def _planned(x: Layout, options: _Options, out_spec: Spec | None, indices: bool | None = None) -> LayerPlan:
    return _Plan(x, options, out_spec, indices)


@dataclass(frozen=True)
class _Plan:
    """Each worker computes the outputs of its block of the result. indices: of a maximum, whether to return them; None:
    a mean."""

    x: Layout
    options: _Options
    out_spec: Spec | None
    indices: bool | None

    @cached_property
    def windows(self) -> Windows:
        space = self.x.shape[2:]
        kernel, stride, padding, dilation = self.options.window(space)
        return plan_windows(
            self.x,
            (None, None, *kernel),
            stride=(None, None, *stride),
            padding=(None, None, *padding),
            dilation=(None, None, *dilation),
            ceil=self.options.ceil_mode,
        )

    @cached_property
    def target(self) -> Layout:
        natural = self.windows.target
        return checked_target(self.options.where, "out_spec", self.out_spec, natural.shape, natural, self.x.axes)

    @cached_property
    def out(self) -> Any:
        return (self.target, self.target) if self.indices else self.target

    @cached_property
    def blocks(self) -> list[tuple[tuple, list[int]]]:
        """For each worker the window over the entries that its outputs need, and where these start in space.

        The padding is what stands around them; in ceil mode outputs may read further, but only what was asked for
        counts.
        """
        dims, (kernel, stride, padding, dilation) = self.windows.dims[2:], self.options.window(self.x.shape[2:])
        blocks = []
        for worker in range(self.x.size):
            place = self.x.positions(worker)
            if place is None:
                blocks.append(((kernel, stride, ((0, 0),) * len(dims), dilation), [0] * len(dims)))
                continue
            pads = [w.pads[k] for w, k in zip(dims, place[2:], strict=True)]
            around = tuple((low, min(high, most)) for (low, high), (_, most) in zip(pads, padding, strict=True))
            starts = [max(0, w.needs[k][0]) for w, k in zip(dims, place[2:], strict=True)]
            blocks.append(((kernel, stride, around, dilation), starts))
        return blocks

    def __call__(self, x: Any) -> Any:
        window, starts = self.blocks[here(self.options.where).index]
        x = extended(x, self.x, (None, None, *self.windows.dims[2:]), ["none"] * x.ndim)
        if self.indices is None:
            ceil, count, divisor = self.options.ceil_mode, self.options.count_include_pad, self.options.divisor
            return self._laid(local(x, "pooling").avg_pool(x, window, ceil, count, divisor))
        top, index = local(x, "pooling").max_pool(x, window, self.options.ceil_mode, self.indices)
        if not self.indices:
            return self._laid(top)
        return self._laid(top), self._laid(_of_whole(index, x.shape[2:], starts, self.x.shape[2:]))

    def _laid(self, y: Any) -> Any:
        return relaid(y, self.windows.target, self.target)


def _of_whole(index: Any, block: Sequence[int], starts: Sequence[int], space: Sequence[int]) -> Any:
    """Flat indices among the spatial entries of a block as those of the whole array; -1 stays."""
    xp = namespace(index)
    if prod(space) >= 1 << 31:
        index = xp.astype(index, xp.int64)
    if tuple(block) == tuple(space):
        return index
    rest, whole, step = index, xp.zeros_like(index), 1
    for n, start, m in reversed(list(zip(block, starts, space, strict=True))):
        whole, rest, step = whole + (rest % max(1, n) + start) * step, rest // max(1, n), step * m
    return xp.where(index < 0, index, whole)
