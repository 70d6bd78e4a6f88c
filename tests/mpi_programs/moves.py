"""Blocks to and from one worker, from worker to worker, and in pieces of any length. Runs with any transport."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a program it stands beside, not in, the package
from mpi_programs.verbs import digest, draw

DTYPES = "bool int32 float32 float64 complex128".split()


def ragged_plan(n: int, k: int) -> dict[str, np.ndarray]:
    """Member k sends (k + 2 t) % 4 rows to member t, two rows apart; they are joined there in the senders' order."""
    sizes = np.array([[(s + 2 * t) % 4 for t in range(n)] for s in range(n)])
    return {
        "input_offsets": 2 * np.arange(n),
        "send_sizes": sizes[k],
        "output_offsets": (np.cumsum(sizes, 0) - sizes)[k],
        "recv_sizes": sizes[:, k],
    }


def moved(axes: tuple[str, ...], dtype: str) -> dict[str, object]:
    """Every movement once, of blocks that are uneven."""
    n, k, me = spmd.axis_size(axes), spmd.worker_index(axes), spmd.worker_index(("x", "y"))
    x = spmd.varying(draw(me, (2, k), dtype), ("x", "y"))
    root = n - 1
    joined = spmd.gather(x, axes, axis=1, root=root)
    sizes = [(3 * j) % n for j in range(n)]
    sizes[0] += joined.shape[1] - sum(sizes)
    doubled = spmd.at_root(lambda a: {"twice": (a + a, None)}, joined, axis_name=axes, root=root)["twice"][0]
    long = spmd.varying(draw(me, (2 * n + 2, 3), dtype, 1), ("x", "y"))
    plan = ragged_plan(n, k)
    return {
        "gather": joined.block,
        "scatter": spmd.scatter(joined, axes, axis=1, root=root, sizes=sizes),
        "balanced": spmd.scatter(doubled, axes, axis=1, root=root),
        "pshuffle": spmd.pshuffle(x, axes, list(reversed(range(n)))),
        "sendrecv": spmd.sendrecv(x, axes, (k - 1) % n, (k + 1) % n),
        "pswapaxes": spmd.pswapaxes(spmd.varying(draw(me, (3, n), dtype), ("x", "y")), axes, 1),
        "ragged": spmd.ragged_all_to_all(long, long + long, **plan, axis_name=axes),
    }


def gradients(axes: tuple[str, ...], dtype: str) -> dict[str, object]:
    """Of a loss at the root: in its argument, and once more."""
    n, k, me = spmd.axis_size(axes), spmd.worker_index(axes), spmd.worker_index(("x", "y"))
    x = spmd.varying(draw(me, (2 * n + 2, 2), dtype), ("x", "y"))

    def loss(x):
        y = spmd.ragged_all_to_all(x, x, **ragged_plan(n, k), axis_name=axes)
        z = spmd.gather(spmd.pshuffle(y * y, axes, list(reversed(range(n)))), axes, root=0)
        return spmd.at_root(lambda z: np.sum(z**2), z, axis_name=axes)

    value, g = spmd.value_and_grad(loss)(x)
    h = spmd.grad(lambda x: spmd.psum(np.sum(spmd.grad(loss)(x) * x), axes))(x)
    return {"value": value.block, "grad": g, "second": h}


def bodies() -> Iterator[tuple[str, Callable]]:
    for axes in (("x",), ("y",), ("x", "y"), ("y", "x")):
        for dtype in DTYPES:
            yield f"{','.join(axes)} {dtype}", lambda a=axes, d=dtype: moved(a, d)
        yield f"{','.join(axes)} gradients", lambda a=axes: gradients(a, "float64")


def results(**options) -> dict[str, dict[str, str]]:
    """For each case the digests of all workers."""
    found: dict[str, dict[str, str]] = {}
    mesh = spmd.Mesh(x=2, y=2, **options)
    for name, body in bodies():
        outcome = mesh.run(lambda w, body=body: {k: digest(spmd.block(v)) for k, v in body().items()})
        for worker, said in mesh.transport.share(outcome.results).items():
            found[f"{name} worker {worker}"] = said
    return found


class Unknown(Exception):
    """An error that only its own program knows."""


def fails(mesh: spmd.Mesh, error: Exception) -> list[str]:
    """What each process catches when f raises at the root; all is well after."""

    def wrong(a):
        raise error

    def body(x):
        return spmd.replicate(spmd.at_root(wrong, spmd.keep(x, "x", 2), axis_name="x", root=2), "x", 2)

    caught = ""
    try:
        spmd.map(body, spmd.P(), spmd.P(), mesh=mesh)(np.ones(3))
    except Exception as e:
        caught = f"{type(e).__name__}: {e} | {' '.join(getattr(e, '__notes__', []))}"
    everyone = mesh.transport.share(dict.fromkeys(mesh.local_workers, caught))
    total = spmd.map(lambda x: spmd.psum(x.sum(), "x"), spmd.P("x"), spmd.P(), mesh=mesh)(np.ones(8))
    assert float(total) == 8
    return [everyone[k] for k in range(4)]


if __name__ == "__main__":
    if sys.argv[1:] == ["errors"]:
        mesh = spmd.Mesh(x=4)
        said = [fails(mesh, e) for e in (ValueError("no such file"), spmd.errors.LayoutError("bad"), Unknown("own"))]
    else:
        said = results()
    if spmd.is_main():
        print(json.dumps(said))
