"""Blocks of every dtype, empty and uneven ones, small and large: the bits of virtual workers."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
from mpi_programs.verbs import digest

import spmd
from spmd.transport.call import Call

DTYPES = [np.dtype(ml_dtypes.bfloat16), *map(np.dtype, "? u1 i2 u4 f2 f4 f8 c8 c16".split())]
SIZES = (0, 1, 93, 94, 95, 752, 753, 20_001)  # Around what a header takes along.


def body(worker) -> dict[str, str]:
    group, comm, found = worker.group(("x",)), worker.comm, {}
    for dtype in DTYPES:
        for size in SIZES:
            rng = np.random.default_rng([worker.index, size])
            x = (
                rng.integers(0, 2, size).astype(dtype)
                if dtype.kind == "b"
                else (rng.normal(size=size) * 9).astype(dtype)
            )
            uneven = x[: size * worker.index // 2]
            sources = [k for k in range(3) if (k + worker.index) % 3]
            sends = {k: x[: size // (1 + k)] for k in range(3) if (k + worker.index) % 3}

            def call(name: str, y: np.ndarray, alike: bool | None) -> Call:
                return Call(name, ("x",), y.dtype, y.shape, same_shape=alike)

            results = {
                "sum": comm.all_reduce(group, call("sum", x, True), x),
                "gather": comm.all_gather(group, call("gather", uneven, False), uneven),
                "exchange": comm.exchange(group, call("exchange", x, False), sends, sources),
                "many": comm.all_reduce_many(group, call("many", x, None), [x, x[:3]]),
            }
            found |= {f"{name} {dtype} {size}": digest(handle.wait()) for name, handle in results.items()}
    return found


def results(**options) -> dict[str, dict[str, str]]:
    mesh = spmd.Mesh(x=3, **options)
    found = mesh.transport.share(mesh.run(body, tracked=False).results)
    return {str(k): v for k, v in found.items()}


if __name__ == "__main__":
    found = results()
    if spmd.is_main():
        print(json.dumps(found))
