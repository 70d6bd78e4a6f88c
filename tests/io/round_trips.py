"""Random arrays, saved and loaded by two processes, by one, and by virtual workers, from one to another; all alike.

mpiexec -n 2 python round_trips.py FOLDER TIMES
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

import spmd
from spmd import P
from spmd.io import files, manifest, reading, writing
from spmd.layout import Layout

WORLD = MPI.COMM_WORLD
DTYPES = ("?", "u1", "f2", "f4", "f8", "c8", "c16", ">i4")


def drawn(rng: np.random.Generator, shape: tuple[int, ...], axes: dict[str, int]) -> P | Layout | None:
    """A spec on a mesh of one axis: none, copies, or cut along a dimension, evenly or anywhere."""
    (axis,) = axes
    kind = rng.integers(4)
    if kind == 0:
        return None
    if kind == 1 or not shape:
        return P()
    d = rng.integers(len(shape))
    spec = P(*(axis if k == d else None for k in range(len(shape))))
    if kind == 2:
        return spec
    places = sorted(rng.integers(0, shape[d] + 1, size=axes[axis] - 1).tolist())
    cuts = [(n,) for n in shape]
    cuts[d] = tuple(np.diff([0, *places, shape[d]]).tolist())
    return Layout(shape, spec, axes, tuple(cuts))


def main(base: Path, times: int) -> None:
    rng = np.random.default_rng(0)  # of the same numbers in both
    for k in range(times):
        for module in (files, manifest, reading, writing):
            module.CHUNK = (16, 64, 1 << 20)[k % 3]
        writing.FILE_BYTES, writing.SHARED_MIN = (64, 300, 2 << 30)[k % 3], (16, 1 << 20)[k % 2]
        arrays = {}
        for name in "abc"[: rng.integers(1, 4)]:
            shape = tuple(rng.choice([0, 1, 2, 3, 5, 8], size=rng.integers(0, 4)).tolist())
            arrays[name] = (rng.normal(size=shape) * 9).astype(rng.choice(DTYPES))
        folder = base / str(k)
        meshes = [{"x": 2, "transport": "mpi"}, {"x": 3, "transport": "local"}]
        for step in (0, 1):
            mesh = dict(meshes[rng.integers(2)])
            axes = {"x": mesh["x"]}
            specs = {n: drawn(rng, x.shape, axes) for n, x in arrays.items()}
            alone = mesh["transport"] == "local"
            with spmd.Mesh(**mesh):
                if step == 0 and not (alone and WORLD.rank):
                    spmd.save(folder, {n: x if specs[n] is None else spmd.put(x, specs[n]) for n, x in arrays.items()})
                if step == 1:
                    check(arrays, spmd.load(folder, specs=specs), specs)
            WORLD.Barrier()
    print("all is well")


def check(arrays: dict, loaded: dict, specs: dict) -> None:
    for name, x in arrays.items():
        y = loaded[name] if specs[name] is None else loaded[name].numpy()
        x = x.astype(x.dtype.newbyteorder("="))
        assert (y.dtype, y.shape, y.tobytes()) == (x.dtype, x.shape, x.tobytes()), (name, x, y, specs[name])


main(Path(sys.argv[1]), int(sys.argv[2]))
