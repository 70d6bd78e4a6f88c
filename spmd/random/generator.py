"""Random generators for bodies, as `numpy.random.default_rng` makes them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.errors import SpecError, describe
from spmd.mesh import WORKER, here
from spmd.operators.varying import varying
from spmd.tracebacks import api_boundary

__all__ = ["default_rng"]


_WHERE = "spmd.random.default_rng"


class Generator:
    """A `numpy.random.Generator` in a body. Its results carry their state. See `default_rng`."""

    __slots__ = ("axes", "rng")

    def __init__(self, rng: np.random.Generator, axes: tuple[str, ...]):
        self.rng = rng
        self.axes = axes

    def __reduce__(self):
        return Generator, (self.rng, self.axes)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.rng, name)
        if name.startswith("_") or not callable(attribute):
            return attribute
        if name == "spawn":
            return lambda n_children: [Generator(rng, self.axes) for rng in self.rng.spawn(n_children)]

        def draw(*args, **kwargs):
            drawn = attribute(*args, **kwargs)
            return varying(drawn, self.axes) if isinstance(drawn, np.ndarray | np.generic | int | float) else drawn

        draw.__name__, draw.__doc__ = name, attribute.__doc__
        return draw

    def __repr__(self) -> str:
        return f"<{_WHERE}, {f'varying over {self.axes}' if self.axes else 'the same on all workers'}>"


@api_boundary
def default_rng(seed: int | Sequence[int], axis_name: str | Sequence[str] = ()) -> np.random.Generator:
    """A random generator as of `numpy.random.default_rng`, for bodies, where NumPy's global state must not be used.

    seed: one or several non-negative integers, different for each use, such as (seed, step). axis_name: workers with
    different indices along these axes draw different numbers, which are Varying over the axes. Without axes all workers
    draw the same numbers, which are Invariant.
    The numbers depend on the seed and on the index along the axes only, not on timing, schedulers or transports.

    Outside of bodies it is NumPy's own. Raises SpecError for an invalid seed, MeshError for an unknown axis.

        >>> def body():
        ...     rng = spmd.random.default_rng((0, 7), "data")
        ...     return rng.integers(0, 100, size=2)
        >>> with spmd.Mesh(data=2):
        ...     spmd.map(body, (), P("data"))()
        PartitionedArray([27, 78, 27, 19], dtype=int64, spec=P('data'))
    """
    seeds = [seed] if isinstance(seed, int | np.integer) else seed
    if not isinstance(seeds, Sequence) or not all(isinstance(s, int | np.integer) and s >= 0 for s in seeds):
        raise SpecError.at(
            _WHERE,
            argument="seed",
            got=describe(seed),
            need="a non-negative integer, or a sequence of them: a stream that can be drawn again",
            mend="default_rng(0)",
        )
    if WORKER.get() is None and not axis_name:
        return np.random.default_rng([int(s) for s in seeds])
    worker = here(_WHERE)
    axes = worker.mesh.names(axis_name, _WHERE)
    # The names distinguish streams along different axes.
    spawn_key = (zlib.crc32(" ".join(axes).encode()), worker.group(axes).index) if axes else ()
    stream = np.random.SeedSequence([int(s) for s in seeds], spawn_key=spawn_key)
    return Generator(np.random.default_rng(stream), axes)  # type: ignore[return-value] - it has NumPy's methods
