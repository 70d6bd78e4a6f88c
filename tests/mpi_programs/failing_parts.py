"""What becomes of a job where worker 1 fails inside a part that it alone runs. Arguments: what happens there, "raise",
"kill", "stop" or "sleep"; and in which parts, all where none is given.

Where it raises, all catch the error outside of the body, and a healthy pipeline runs after each.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
from spmd import P, functions

WIDTH, MICROBATCHES = 3, 4
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


class Own(Exception):
    """An error of this program."""


def strike(how: str) -> None:
    """What happens to worker 1."""
    if how == "raise":
        raise Own("of worker 1")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait(1000)


def on_the_way_back(x: Any, act: Callable[[], None]) -> Any:
    """x; act() runs where its gradient comes."""
    same = spmd.custom_vjp(lambda x: x * 1.0)

    def backward(_: None, g: Any) -> tuple[Any]:
        act()
        return (g,)

    same.defvjp(lambda x: (x * 1.0, None), backward)
    return same(x)


def in_pipeline(x: Any, how: str, schedule: str, where: str) -> Any:
    """A step, in which the stage on worker 1 fails in its third action of this kind. how: "" for a healthy one."""
    workers = spmd.axis_size("x")
    n = workers * (2 if schedule == "interleaved" else 1)
    place = n - 1 if where == "loss" else 1
    times = itertools.count()

    def act() -> None:
        if how and next(times) == 2:
            strike(how)

    def stage_of(k: int) -> Callable[[Any, Any], Any]:
        def stage(w: Any, h: Any) -> Any:
            if k == place and where == "forward":
                act()
            if k == place and where == "backward":
                h = on_the_way_back(h, act)
            if k == place and where == "weight":
                w = on_the_way_back(w, act)
            return np.tanh(h @ w)

        return stage

    def loss(h: Any) -> Any:
        if where == "loss":
            act()
        return np.mean(h**2)

    stages = [stage_of(k) for k in range(n)]
    step = spmd.training.pipeline(stages, "x", microbatches=MICROBATCHES, schedule=schedule, loss=loss)
    weights = np.random.default_rng(0).normal(size=(n, WIDTH, WIDTH))
    return step.value_and_grad([*weights], x)[0]


def in_expert(x: Any, how: str, where: str) -> Any:
    own = spmd.pslice(x, "x", axis=0, tiled=True)

    def expert(h: Any) -> Any:
        act = lambda: strike(how) if spmd.worker_index("x") == 1 else None
        if where == "forward":
            act()
        return np.tanh(h if where == "forward" else on_the_way_back(h, act))

    scores = np.ones((len(own), spmd.axis_size("x")))
    run = lambda own: np.sum(functions.experts(own, spmd.varying(scores, "x"), [expert], "x", k=1))
    return spmd.psum(np.sum(spmd.grad(run)(own)), "x")


def in_call(x: Any, how: str, where: str) -> Any:
    """A remote call, of which the result is asked for at once, by another call, or by nobody; or its gradient."""

    def f(x: Any) -> Any:
        if where != "backward":
            strike(how)
        return np.sum(on_the_way_back(x, lambda: strike(how)))

    def along(x: Any) -> Any:
        future = spmd.remote(f, at=1, axis_name="x")(x)
        if where == "unasked":
            return spmd.psum(spmd.pvary(np.sum(x), "x"), "x")
        if where == "taken":
            future = spmd.remote(lambda y: 2 * y, at=0, axis_name="x")(future)
        return spmd.replicate(future.result(), "x", future.at)

    return np.sum(spmd.grad(along)(x))


def in_move(x: Any, how: str, where: str) -> Any:
    """Worker 1 fails before it sends, or before it takes, a value."""
    r = spmd.keep(x, "x", 1 if where == "source" else 0)
    if spmd.worker_index("x") == 1:
        strike(how)
    r = spmd.move(r, "x", 1, 0) if where == "source" else spmd.move(r, "x", 0, 1)
    return spmd.replicate(np.sum(x) * 0 + 0 * x[0, 0] if r is None else r, "x", 0 if where == "source" else 1).sum()


PARTS: dict[str, Callable[[Any, str], Any]] = {
    **{
        f"{schedule} {where}": lambda x, how, s=schedule, w=where: in_pipeline(x, how, s, w)
        for schedule in SCHEDULES
        for where in ("forward", "backward", "loss", "weight")
    },
    **{f"expert {w}": lambda x, how, w=w: in_expert(x, how, w) for w in ("forward", "backward")},
    **{f"call {w}": lambda x, how, w=w: in_call(x, how, w) for w in ("asked", "taken", "unasked", "backward")},
    **{f"move {w}": lambda x, how, w=w: in_move(x, how, w) for w in ("source", "target")},
}


def run(part: str, how: str, **options: Any) -> str:
    """The error of the part, with its notes; then a pipeline that is healthy has to give what one worker gives."""
    n = int(os.environ.get("SPMD_TEST_WORKERS", "2"))
    mesh, x = spmd.Mesh(x=n, **options), np.random.default_rng(1).normal(size=(7, WIDTH))
    said = "nothing"
    try:
        spmd.map(lambda x: PARTS[part](x, how), P(), P(), mesh=mesh)(x)
    except Exception as error:
        said = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
    h = x
    for w in np.random.default_rng(0).normal(size=(n, WIDTH, WIDTH)):
        h = np.tanh(h @ w)
    healthy = spmd.map(lambda x: in_pipeline(x, "", "1f1b", ""), P(), P(), mesh=mesh)(x)
    np.testing.assert_allclose(float(healthy), np.mean(h**2), rtol=1e-12)
    return said


def check(part: str, said: str, workers: int) -> None:
    """Raise unless this is the error of the worker that failed, with the place where it arose."""
    failed = workers - 1 if "loss" in part else 1
    assert said.startswith("Own: of worker 1\n"), f"{part}: {said}"
    assert f"worker {failed} (x={failed})" in said, f"{part}: {said}"
    if part.split()[0] in SCHEDULES:
        assert "of stage" in said, f"{part}: {said}"
        assert "for microbatch" in said, f"{part}: {said}"
    if "expert" in part:
        assert "raised in expert 0" in said or "backward" in part, f"{part}: {said}"


if __name__ == "__main__":
    import up  # noqa: F401

    how, parts = sys.argv[1], sys.argv[2:] or [*PARTS]
    mesh = spmd.Mesh(x=int(os.environ.get("SPMD_TEST_WORKERS", "2")))
    for part in parts:
        said = run(part, how)
        if how != "raise":
            raise SystemExit(f"{part} has gone on: {said}")
        check(part, said, mesh.size)
    if spmd.is_main():
        print(f"{len(parts)} parts fail as they should")
