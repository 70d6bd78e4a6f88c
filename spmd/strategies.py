"""Strategies for hypothesis: meshes, specs, shapes, layouts, halos, arrays.

    from hypothesis import given, strategies as st
    from spmd.testing import arrays, layouts, meshes

    @given(st.data(), meshes())
    def test(data, mesh):
        layout = data.draw(layouts(mesh))
        x = data.draw(arrays(layout.shape))

Simple examples come first, so failures shrink to one worker, dimensions of length 1, and balanced blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.errors import message
from spmd.layout import Layout, P
from spmd.mesh import Mesh, make_mesh
from spmd.spellings import closest

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy
except ImportError as error:
    raise ImportError(
        message(
            "spmd.testing",
            got="a strategy, and no hypothesis to draw from it",
            need="the package hypothesis",
            mend="pip install hypothesis",
        )
    ) from error

__all__ = ["Halo", "arrays", "halos", "layouts", "meshes", "shapes", "specs"]

Shape = tuple[int, ...]
BOUNDARIES = ("none", "zero", "periodic", "reflect", "edge")


def meshes(
    max_workers: int = 8,
    max_axes: int = 3,
    *,
    min_workers: int = 1,
    schedulers: Sequence[str] = ("lockstep", "threads"),
    names: Sequence[str] = ("x", "y", "z", "u", "v", "w"),
) -> SearchStrategy[Mesh]:
    """Meshes of virtual workers, from one worker to max_workers; at most one axis is of length 1."""
    sizes = [
        dims
        for k in range(1, max_axes + 1)
        for dims in itertools.product(range(1, max_workers + 1), repeat=k)
        if min_workers <= math.prod(dims) <= max_workers and dims.count(1) < 2
    ]
    sizes.sort(key=lambda dims: (math.prod(dims), len(dims), dims))
    kinds = st.sampled_from(list(schedulers))

    def built(dims: Shape) -> SearchStrategy[Mesh]:  # Reports show a call that makes the mesh.
        shape, axis_names = st.just(dims), st.just(tuple(names[: len(dims)]))
        return st.builds(make_mesh, shape, axis_names, transport=st.just("local"), scheduler=kinds)

    return st.sampled_from(sizes).flatmap(built)


def specs(mesh: Mesh | Mapping[str, int], ndim: int) -> SearchStrategy[P]:
    """Specs for arrays of ndim dimensions: each axis splits at most one dimension, in any order of the axes."""
    axes = list(mesh.axes if isinstance(mesh, Mesh) else mesh)

    @st.composite
    def drawn(draw) -> P:
        dims: list[list[str]] = [[] for _ in range(ndim)]
        for name in draw(st.permutations(axes)) if len(axes) > 1 else axes:
            d = draw(st.sampled_from([None, *range(ndim)]))
            if d is not None:
                dims[d].append(name)
        return P(*(tuple(names) or None for names in dims))

    return drawn()


def shapes(*, min_dims: int = 0, max_dims: int = 3, min_side: int = 0, max_side: int = 5) -> SearchStrategy[Shape]:
    """Shapes: few dimensions first; length 1 first, length 0 last."""
    sides = [*range(max(1, min_side), max_side + 1), *range(min_side, 1)]
    return st.lists(st.sampled_from(sides), min_size=min_dims, max_size=max_dims).map(tuple)


def _cuts(n: int, parts: int) -> SearchStrategy[Shape]:
    """Sizes of `parts` blocks of n items in all; some may be 0."""
    cuts = st.lists(st.integers(0, n), min_size=parts - 1, max_size=parts - 1).map(sorted)
    return cuts.map(lambda at: tuple(b - a for a, b in itertools.pairwise([0, *at, n])))


def layouts(
    mesh: Mesh | Mapping[str, int],
    shape: Sequence[int] | None = None,
    *,
    grids: bool = True,
    copies: Sequence[str] = ("invariant", "varying"),
) -> SearchStrategy[Layout]:
    """Layouts on a mesh: specs, and with `grids` also grids on any of its workers; balanced or uneven.

    shape: of the array; None: any. copies: the allowed values of `Layout.copies`. Copies of a grid always vary, because
    no axis distinguishes them.
    """
    axes = dict(mesh.axes if isinstance(mesh, Mesh) else mesh)
    worker_count = math.prod(axes.values())

    @st.composite
    def drawn(draw) -> Layout:
        sides = tuple(shape) if shape is not None else draw(shapes())
        is_grid = grids and draw(st.booleans())

        def cut(counts: Sequence[int]):
            """For each dimension the sizes of its blocks; None: balanced."""
            return [
                draw(_cuts(n, k)) if k > 1 and draw(st.booleans()) else None for n, k in zip(sides, counts, strict=True)
            ]

        if not is_grid:
            spec = draw(specs(axes, len(sides)))
            counts = [math.prod(axes[a] for a in names) for names in (*spec.dims, *[()] * (len(sides) - len(spec)))]
            return Layout(sides, spec, axes, cut(counts), copies=draw(st.sampled_from(list(copies))))
        counts, workers_left = [], worker_count
        for _ in sides:
            counts.append(draw(st.integers(1, workers_left)))
            workers_left //= counts[-1]
        copies_of_each = draw(st.integers(1, workers_left)) if "varying" in copies else 1
        workers = draw(st.permutations(range(worker_count)))[: math.prod(counts) * copies_of_each]
        return Layout.grid(sides, (*counts, copies_of_each), axes, workers, cut(counts))

    return drawn()


class Halo(NamedTuple):
    """Widths and boundaries: `halo_exchange(x, spec, *halo)`."""

    widths: tuple[tuple[int, int], ...]
    boundary: tuple[str, ...]


def halos(ndim: int, max_width: int = 3, boundaries: Sequence[str] = BOUNDARIES) -> SearchStrategy[Halo]:
    """Halos of arrays of ndim dimensions: for each the widths at its low and high side, and the boundary."""
    width = st.integers(0, max_width)
    sides = st.lists(st.tuples(width, width), min_size=ndim, max_size=ndim).map(tuple)
    edges = st.lists(st.sampled_from(list(boundaries)), min_size=ndim, max_size=ndim).map(tuple)
    return st.builds(Halo, sides, edges)


KINDS = ("integers", "normal", "distinct")


def arrays(
    shape: Sequence[int] | SearchStrategy[Shape], dtype: Any = np.float64, kind: str = "integers"
) -> SearchStrategy[np.ndarray]:
    """Arrays of a given shape, or of a drawn one.

    kind: "integers" from -9 to 9 without 0, whose sums are exact and show every missed entry; "normal"; or "distinct":
    1, 2, 3, ... in any order, which shows where every entry went. The simplest order is the increasing one.
    """
    if kind not in KINDS:
        raise ValueError(
            message(
                "spmd.testing.arrays",
                argument="kind",
                got=repr(kind),
                need=f"one of {', '.join(map(repr, KINDS))}",
                mend=f'kind="{closest(kind, KINDS)}"',
            )
        )
    array_dtype = np.dtype(dtype)
    sides = st.just(tuple(shape)) if not isinstance(shape, SearchStrategy) else shape

    @st.composite  # Reports show the numbers.
    def drawn(draw) -> np.ndarray:
        return _array(draw(sides), array_dtype, kind, draw(st.integers(0, 2**32 - 1)))

    return drawn()


def _array(shape: Shape, dtype: np.dtype, kind: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "distinct":
        values = np.arange(1, math.prod(shape) + 1)
        return (rng.permutation(values) if seed else values).reshape(shape).astype(dtype)

    def real():
        if kind == "normal":
            return rng.standard_normal(shape)
        low = 0 if dtype.kind in "ub" else -9
        drawn = rng.integers(low, 9, shape)
        return np.where(drawn >= 0, drawn + 1, drawn)

    return np.asarray(real() + 1j * real() if dtype.kind == "c" else real()).astype(dtype)
