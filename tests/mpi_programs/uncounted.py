"""Collectives that only some workers make, or that go on while others are made, between processes that share no memory,
while one of them is late: none of them is taken for another one."""

from __future__ import annotations

import time

import numpy as np
import other_hosts  # noqa: F401

import spmd
from spmd import P

LATE = 4.0
"""Seconds after which a process that waits compares all that others have called with what it has called."""


def late(times: list[int], at: int) -> None:
    """Wait in the call of this number of worker 1 along `y`."""
    times[0] += 1
    if times[0] == at and spmd.worker_index("y") == 1:
        time.sleep(LATE)


def sums_at_root(x):
    """Two calls of a function that only the first workers along `x` run."""
    times, r = [0], spmd.keep(x, "x", 0)

    def f(a):
        late(times, 2)
        return spmd.psum(spmd.pvary(np.sum(a), "y"), "y")

    first, second = (spmd.at_root(f, r, axis_name="x", root=0) for _ in range(2))
    return spmd.replicate(first, "x") + 2 * spmd.replicate(second, "x")


def sums_in_stages(x):
    """Two steps of a pipeline with more collectives in its stages than transfers."""
    times = [0]

    def stage(w, h):
        late(times, 4)
        h = h + spmd.psum(spmd.pvary(h * w, "y"), "y")
        return h + spmd.psum(spmd.pvary(h * w, "y"), "y") + spmd.pmax(spmd.pvary(np.sum(h), "y"), "y")

    step = spmd.training.pipeline([stage, stage], "x", microbatches=2, loss=np.mean, schedule="1f1b")
    return sum(step.value_and_grad([0.5, 0.25], part)[0] for part in (x[:2], x[2:]))


def sum_under_way(x):
    """The sum of a large gradient begins in the middle of the backward sweep, which goes on with other collectives."""
    large = np.linspace(0.0, 1.0, 700_000)

    def loss(v, w):
        h = spmd.all_gather(spmd.pvary(x, "y") * np.mean(v), "y", tiled=True)
        return spmd.psum(np.mean(np.sin(h)) * np.mean(w * h[1]), "y")

    return [np.sum(g * large) for g in spmd.grad(loss, (0, 1))(large, large)]


BODIES = (sums_at_root, sums_in_stages, sum_under_way)


def results(**options):
    mesh, x = spmd.Mesh(x=2, y=2, **options), np.arange(1.0, 5.0)
    return [spmd.tree.map(float, spmd.map(body, P(), P(), mesh=mesh)(x)) for body in BODIES]


if __name__ == "__main__":
    found, LATE = results(), 0.0
    wanted = results(transport="local")
    for name, a, b in zip(BODIES, found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, err_msg=name.__name__)
    if spmd.is_main():
        print("all are as they should be")
