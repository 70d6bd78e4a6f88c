"""Resizing arrays that lie anyhow, by sums of their entries along each axis."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import numpy as np

from spmd import kernels
from spmd.autodiff.signatures import Tree
from spmd.errors import SpecError, describe
from spmd.frontends import frontend
from spmd.functions.arguments import as_array
from spmd.functions.layouts import as_operand, checked_target
from spmd.functions.local import local
from spmd.functions.movement import relaid
from spmd.functions.planned import LayerPlan, Operand, along, is_local, run_layer
from spmd.functions.windows import extended
from spmd.kernels import taps
from spmd.kernels.cpu.chunks import accurate
from spmd.layout import Layout, Spec
from spmd.mesh import here
from spmd.spellings import closest
from spmd.tracebacks import api_boundary
from spmd.window import Window, plan_blocks
from spmd.window_nd import same_grid

__all__ = ["Taps", "plan_resize", "resample", "resize"]

_WHERE = "spmd.functions.resize"
_NUMBERS = "floating-point or complex numbers"


_numbers = itertools.count()


class Taps:
    """A linear map along an axis: output o is the sum over k of weight[o, k] * x[index[o, k]].

    n: the length of the input. index, weight: (outputs, taps). `len` gives the outputs. name: its own in this process,
    for compiled graphs.

        >>> taps = spmd.functions.plan_resize(4, 2)
        >>> taps.index.tolist(), taps.weight.tolist()
        ([[0, 1], [2, 3]], [[0.5, 0.5], [0.5, 0.5]])
    """

    named: ClassVar[WeakValueDictionary[str, Taps]] = WeakValueDictionary()

    def __init__(self, n: int, index: np.ndarray, weight: np.ndarray):
        self.n, self.index, self.weight = n, index, weight
        self._cache: dict[Any, Any] = {}
        self.name = f"taps {next(_numbers)}"
        Taps.named[self.name] = self

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"Taps({self.n} -> {len(self)}, {self.index.shape[1]} each)"

    def needs(self, o: int) -> tuple[int, int]:
        """The interval of the input that output o reads, for `spmd.plan_needs`."""
        return int(self.index[o].min()), int(self.index[o].max()) + 1

    def part(self, outputs: tuple[int, int], inputs: tuple[int, int]) -> Taps:
        """The taps of outputs (first, end) alone, with indices into inputs (start, stop)."""
        (first, end), (start, stop) = outputs, inputs
        index = self.index[first:end] - np.int32(start)
        if index.size and not (index.min() >= 0 and index.max() < stop - start):
            raise SpecError.at(
                "Taps.part",
                argument="inputs",
                got=f"{start}:{stop}",
                need=f"what the outputs {first}:{end} read, {index.min() + start}:{index.max() + start + 1}",
                mend="ask for it: spmd.plan_needs(n, m, taps.needs, inputs=...)",
            )
        return Taps(stop - start, index, self.weight[first:end])

    @cached_property
    def T(self) -> Taps:
        return Taps(len(self), *taps.transposed(self.index, self.weight, self.n))

    @cached_property
    def is_selection(self) -> bool:
        """Whether each output is an entry of the input."""
        return self.index.shape[1] == 1 and bool(np.all(self.weight == 1))

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """What make() gives, made once for each key."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def for_input(self, x: Any) -> tuple[Any, Any]:
        """index and weight on the device of x, weight in the dtype of the computation."""
        wide = accurate(np.dtype(x.dtype))
        dtype = np.dtype({"F": np.float32, "D": np.float64}.get(wide.char, wide))
        if not kernels.on_device(x):
            return self.cached(dtype, lambda: (self.index, self.weight.astype(dtype)))
        from spmd.kernels.gpu.source import device_and_stream, uploaded

        return self.cached(
            (dtype, *device_and_stream()), lambda: (uploaded(self.index), uploaded(self.weight.astype(dtype)))
        )


@api_boundary
def resample(x: Tree, taps: Taps, axis: int = -1) -> Tree:
    """Along an axis, output o is the sum of weight[o, k] * x[index[o, k]], of the taps that `plan_resize` gives. x: a
    block or a bare array of NumPy, CuPy or PyTorch.

    Linear. Adjoint: the same with the transposed taps, `taps.T`. Raises SpecError where x has another length.

        >>> taps = spmd.functions.plan_resize(4, 2, "area")
        >>> spmd.functions.resample(np.array([1.0, 3.0, 5.0, 9.0]), taps)
        array([2., 7.])
        >>> spmd.functions.resample(np.array([1.0, 2.0]), taps.T)
        array([0.5, 0.5, 1. , 1. ])
    """
    where = "spmd.functions.resample"
    checked = as_array if frontend(x) is None else as_operand
    x = checked(where, "x", x, "fc", _NUMBERS, "x.astype(float)")
    if not -x.ndim <= axis < x.ndim or x.shape[axis] != taps.n:
        raise SpecError.at(
            where,
            argument="x",
            got=f"{describe(x)}, axis {axis}",
            need=f"the length {taps.n} along the axis",
            mend="plan for this length; for a part of the outputs, taps.part(outputs, inputs)",
        )
    return local(x, "resampling").resample(x, taps, axis % x.ndim)


# Cached, because a body calls it at every step.
@lru_cache(maxsize=64)
def _taps(n: int, m: int, *options: Any) -> Taps:
    return Taps(n, *taps.resize_taps(n, m, *options))


@api_boundary
def plan_resize(
    n: int,
    m: int,
    method: str = "linear",
    *,
    align_corners: bool = False,
    antialias: bool = False,
    cubic: float = -0.5,
    scale: float | None = None,
) -> Taps:
    """The taps from n entries to m. On blocks: `spmd.plan_needs(n, m, taps.needs, inputs=...)` says what each
    worker needs, and `taps.part(outputs, inputs)` are the taps of its outputs. The options are those of `resize`; scale
    is the distance of outputs in entries of the input, n / m by default.

        >>> taps = spmd.functions.plan_resize(3, 6, "nearest")
        >>> taps.index[:, 0].tolist(), spmd.plan_needs(3, 6, taps.needs, inputs=2).needs
        ([0, 0, 1, 1, 2, 2], ((0, 2), (1, 3)))
    """
    where = "spmd.functions.plan_resize"
    for name, value in (("n", n), ("m", m)):
        try:
            valid = not isinstance(value, bool) and operator.index(value) >= (name == "n" and m != 0)
        except TypeError:
            valid = False
        if not valid:
            need = "a length: an int, at least 1" if name == "n" and m != 0 else "a length: an int, at least 0"
            raise SpecError.at(where, argument=name, got=describe(value), need=need, mend=f"{name}=1")
    _check_method(where, method, align_corners, antialias, cubic)
    if scale is not None:
        _check_scales(where, "scale", (scale,))
    options = method, bool(align_corners), bool(antialias), float(cubic)
    return _taps(int(n), int(m), *options, None if scale is None else float(scale))


@api_boundary
def resize(
    x: Tree,
    shape: Sequence[int] | None = None,
    method: str = "linear",
    *,
    size: int | Sequence[int | None] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    recompute_scale_factor: bool = False,
    align_corners: bool = False,
    antialias: bool = False,
    cubic: float = -0.5,
    spec: Spec | None = None,
    in_shape: Sequence[int | None] | None = None,
    out_spec: Spec | None = None,
) -> Tree:
    """x with other lengths, interpolated along each axis. x: floating or complex; an array of NumPy, CuPy or PyTorch.

    How long, by one of: shape, all lengths of the result, as in jax.image.resize; size, those of the spatial dimensions
    of x: (N, C, *spatial), as in torch.nn.functional.interpolate, or an int for all of them, None for one that stays;
    scale_factor, which multiplies them, rounded down: a number, or one for each. With a scale_factor s, outputs are
    1 / s entries apart, as in torch, even where n * s is no whole number; recompute_scale_factor: n / m entries, as by
    size.
    method: "linear"; "cubic" (R. Keys, 1981; cubic: his parameter, -1/2 as in JAX, -3/4 in torch); "nearest" as torch
    has it, entry floor(o * n / m); "nearest-exact", the entry nearest to the middle of the output, which is "nearest"
    in JAX; "area", the mean of what an output covers, torch's adaptive average pooling.
    Entries are the middles of cells, so output o lies at (o + 1/2) * n / m - 1/2. Beyond its ends x is constant.
    align_corners: of "linear" and "cubic" the first and last entries of both coincide; output o lies at
    o * (n - 1) / (m - 1). antialias: where an axis shrinks, "linear" and "cubic" average over all entries, and weights
    that reach beyond the ends are left out, as in jax.image.resize, where this is the default.
    spec: in a body, how the whole x is split, of which x is this worker's block: a spec, or a `Layout` on some of the
    workers. None: x is the whole. Outside of bodies global arrays have their layouts. in_shape: of the whole x, if spec
    splits it evenly (the `shape` of other layers); without it the workers exchange the lengths of their blocks.
    out_spec: how the result is to lie. None: on the grid of x, in balanced blocks of the dimensions that change.

    Forward: each worker gets the entries that its outputs read, by one halo exchange; on some of the workers by an
    exchange between those who need something of one another. Linear. Adjoint: the same with transposed taps, axis by
    axis, then a halo accumulation.
    Raises SpecError and LayoutError for an unknown method, for lengths that x cannot have, and for specs and layouts
    that do not fit. Source: as jax.image.resize and torch.nn.functional.interpolate.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.array([[[0.0, 2.0, 4.0]]]), P(None, None, "x"))
        ...     spmd.functions.resize(x, size=6)
        PartitionedArray([[[0. , 0.5, 1.5, 2.5, 3.5, 4. ]]], dtype=float64, spec=P(None, None, 'x'))
    """
    x = as_operand(_WHERE, "x", x, "fc", _NUMBERS, "x.astype(float)")
    _check_method(_WHERE, method, align_corners, antialias, cubic)
    lengths = _lengths(x, shape, size, scale_factor, bool(recompute_scale_factor))
    options = _Options(*lengths, method, bool(align_corners), bool(antialias), float(cubic))
    operand = Operand("spec", x, spec, in_shape)
    mixed = range(0 if options.kind == "shape" else 2, x.ndim)
    if is_local(_WHERE, operand, out_spec, range(mixed.start)):
        steps = options.taps(x.shape)
        for axis in _order(steps):
            x = local(x, "resampling").resample(x, steps[axis], axis)
        return x
    operand = along(_WHERE, operand, out_spec, mixed)
    return run_layer(_WHERE, lambda layout: _planned(layout, options, out_spec), [operand])


def _lengths(x: Any, shape: Any, size: Any, scale_factor: Any, recompute: bool) -> tuple[str, Any, bool]:
    """Which of the arguments says how long the result is, its value, and whether to recompute the scale factor."""
    arguments = {"shape": shape, "size": size, "scale_factor": scale_factor}
    given = {kind: value for kind, value in arguments.items() if value is not None}
    if len(given) != 1 or (recompute and scale_factor is None):
        names = " and ".join([*given, *["recompute_scale_factor"] * recompute])
        raise SpecError.at(
            _WHERE,
            argument=[*given, "shape"][0],
            got=names or "none of them",
            need="one of shape, size and scale_factor; recompute_scale_factor with the last only",
            mend="size=(64, 64) for the spatial dimensions, or scale_factor=2",
        )
    ((kind, value),) = given.items()
    value = value.tolist() if isinstance(value, np.ndarray) else value
    count = x.ndim if kind == "shape" else x.ndim - 2
    each: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else () if kind == "shape" else (value,) * count
    if count < 1 or len(each) != count or isinstance(value, str):
        raise _wrong_count(x, kind, value)
    if kind == "scale_factor":
        return kind, _check_scales(_WHERE, kind, each), recompute
    try:
        return kind, tuple(_length(n, kind) for n in each), recompute
    except TypeError:
        mend = "scale_factor=1.5 multiplies lengths"
        raise SpecError.at(_WHERE, argument=kind, got=repr(value), need="lengths: ints", mend=mend) from None


def _length(n: Any, kind: str) -> int | None:
    """A length of the result; None: as that of x, which only size can say."""
    if kind != "size":
        return operator.index(n)
    return None if n is None else operator.index(n)


def _wrong_count(x: Any, kind: str, value: Any) -> SpecError:
    mend = f"shape={tuple(2 * n for n in x.shape)}"
    if kind == "shape":
        need = f"{x.ndim} lengths for {describe(x)}"
    elif x.ndim < 3:
        need = "x of shape (N, C, *spatial)"
    else:
        need, mend = "one for each spatial dimension, or one for all", f"{kind}={(2,) * (x.ndim - 2)}"
    return SpecError.at(_WHERE, argument=kind, got=f"{value!r} for {describe(x)}", need=need, mend=mend)


def _check_scales(where: str, argument: str, values: Sequence[Any]) -> tuple[float, ...]:
    for value in values:
        number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            need = "a number above 0, or one for each spatial dimension"
            raise SpecError.at(where, argument=argument, got=repr(value), need=need, mend=f"{argument}=2")
    return tuple(map(float, values))


def _check_method(where: str, method: Any, align_corners: Any, antialias: Any, cubic: Any) -> None:
    allowed = taps.RESIZE_METHODS
    if method not in allowed:
        words = ", ".join(map(repr, allowed))
        near = {"bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}.get(method) if method else None
        mend = f"method={near or closest(method, allowed, 'linear')!r}"
        raise SpecError.at(where, argument="method", got=repr(method), need=f"one of {words}", mend=mend)
    check_cubic(where, cubic)
    if align_corners and (antialias or method not in ("linear", "cubic")):
        argument = "antialias" if antialias else "align_corners"
        got = "True, with align_corners=True" if antialias else f"True, with method={method!r}"
        need = "one of them" if antialias else 'method="linear" or "cubic"'
        raise SpecError.at(where, argument=argument, got=got, need=need, mend="align_corners=False")


def check_cubic(where: str, cubic: Any) -> None:
    if isinstance(cubic, bool) or not isinstance(cubic, int | float | np.floating):
        raise SpecError.at(where, argument="cubic", got=describe(cubic), need="a Python number", mend="cubic=-0.5")


@dataclass(frozen=True)
class _Options:
    """The arguments of `resize`. kind: "shape", "size" or "scale_factor"; lengths: its values."""

    kind: str
    lengths: tuple[Any, ...]
    recompute: bool
    method: str
    align_corners: bool
    antialias: bool
    cubic: float

    def result(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the result."""
        if self.kind == "scale_factor":
            space = tuple(math.floor(n * s) for n, s in zip(shape[2:], self.lengths, strict=True))
        else:
            space = self.lengths
        if self.kind == "size":
            space = tuple(n if m is None else m for n, m in zip(shape[2:], space, strict=True))
        target = space if self.kind == "shape" else (*shape[:2], *space)
        if any(m < 0 or (m and not n) for m, n in zip(target, shape, strict=True)):
            raise SpecError.at(
                _WHERE,
                argument=self.kind,
                got=f"{self.lengths} for an array of shape {list(shape)}",
                need="lengths of at least 0; an empty axis can only stay empty",
                mend=f"shape={tuple(2 * n for n in shape)}",
            )
        return target

    def taps(self, shape: Sequence[int]) -> list[Taps | None]:
        """The taps of each axis; None where it stays as it is."""
        steps: list[Taps | None] = []
        options = self.method, self.align_corners, self.antialias, self.cubic
        for axis, (n, m) in enumerate(zip(shape, self.result(shape), strict=True)):
            scale = None
            if self.kind == "scale_factor" and axis >= 2 and not self.recompute and self.method != "area":
                scale = 1 / self.lengths[axis - 2]
            # As in torch: where the length stays, only these have outputs at other places than inputs.
            moves = self.method in ("nearest", "nearest-exact") or (self.method == "cubic" and not self.antialias)
            stays = n == m and (scale in (None, 1) or self.align_corners or not moves)
            steps.append(None if stays else _taps(n, m, *options, scale))
        return steps


def _order(steps: Sequence[Taps | None]) -> list[int]:
    """The axes that change: those that shrink first. Of both groups the last axis, which is slowest, comes when the
    array is smallest."""
    grows = {axis: len(step) > step.n for axis, step in enumerate(steps) if step is not None}
    return sorted(grows, key=lambda axis: (grows[axis], -axis if grows[axis] else axis))


@lru_cache(maxsize=256)
def _planned(x: Layout, options: _Options, out_spec: Spec | None) -> LayerPlan:
    return _Plan(x, options, out_spec)


@lru_cache(maxsize=256)
def _parts(plan: _Plan, place: tuple[int, ...]) -> list[Taps | None]:
    """The taps of the outputs of a block, with indices into what it needs."""
    parts: list[Taps | None] = []
    for step, window, k in zip(plan.taps, plan.windows, place, strict=True):
        part = None
        if step is not None and window is not None:
            part = step.part(window.output_bounds[k], window.needs[k])
        parts.append(part)
    return parts


@dataclass(frozen=True)
class _Plan:
    """Each worker computes its block of the result from the entries that it reads."""

    x: Layout
    options: _Options
    out_spec: Spec | None

    @cached_property
    def taps(self) -> list[Taps | None]:
        return self.options.taps(self.x.shape)

    @cached_property
    def resized(self) -> Layout:
        """The layout of the result on the grid of x."""
        cuts = [cut if step is None else None for cut, step in zip(self.x.cuts, self.taps, strict=True)]
        return same_grid(self.x, self.options.result(self.x.shape), cuts)

    @cached_property
    def windows(self) -> list[Window | None]:
        each = zip(self.x.cuts, self.resized.cuts, self.taps, strict=True)
        return [None if step is None else plan_blocks(_WHERE, a, b, step.needs) for a, b, step in each]

    @cached_property
    def out(self) -> Layout:
        return checked_target(_WHERE, "out_spec", self.out_spec, self.resized.shape, self.resized, self.x.axes)

    def __call__(self, x: Any) -> Any:
        place = self.x.positions(here(_WHERE).index)
        y = extended(x, self.x, self.windows, ["none"] * len(self.windows))
        if place is not None:
            parts = _parts(self, tuple(place))
            for axis in _order(self.taps):
                y = local(y, "resampling").resample(y, parts[axis], axis)
        return relaid(y, self.resized, self.out)
