"""Remote calls between processes. Argument 1: `values`, their gradients and errors; `overlap`, two calls that wait for
each other; else what happens to worker 1 while it runs f."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import spmd
from spmd import P

HOW = (*sys.argv, "")[1]
LIMIT = 60.0


def around(x):
    """A loss of values of unknown structure that go around all workers."""
    n = spmd.axis_size("x")
    first = spmd.remote(lambda a: {"a": np.sin(a), "n": [a.size, a > 0]}, at=1)(x)
    parts = [spmd.remote(lambda d, k=k: d["a"] * (k + 1) + d["n"][0], at=k)(first) for k in range(n)]
    return spmd.remote(lambda *ys: sum(np.sum(y**2) for y in ys), at=n - 1)(*parts).to(0).result()


def with_gradient(x):
    value, grad = spmd.value_and_grad(around)(x)
    return spmd.replicate(value, "x"), grad


def serial(x, n):
    return sum(np.sum((np.sin(x) * (k + 1) + x.size) ** 2) for k in range(n))


class Own(Exception):
    """An error of this program."""


def raising(x):
    raise Own("of worker 1")


def caught(x):
    """What each worker catches, and a sum after it."""
    future = spmd.remote(raising, at=1)(x)
    try:
        future.result()
    except Own as error:
        return spmd.psum(spmd.varying(np.array([float(str(error) == "of worker 1")]), "x"), "x")


def passed_on(x):
    return spmd.remote(raising, at=1)(x).to(0).result()


def never_asked(x):
    spmd.remote(raising, at=1)(x)
    return x


def error_of(body) -> str:
    try:
        spmd.map(body, P(), P())(np.ones(3))
    except Own as error:
        return f"Own: {error}"
    return "nothing"


def values() -> dict:
    found: dict = {"values": []}
    for n in (0, 1, 7, 300_000):
        x = np.random.default_rng(n).normal(size=n)
        value, grad = spmd.map(with_gradient, P(), P())(x)
        found["values"].append([float(value), float(np.sum(grad.numpy() * np.arange(n)))])
    found["caught"] = spmd.map(caught, P(), P())(np.ones(3)).tolist()
    found["errors"] = [error_of(body) for body in (passed_on, never_asked)]
    found["after"] = spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P())(np.ones(4)).tolist()
    return found


class Signs:
    """What workers tell each other beside the mesh: files of a folder."""

    def __init__(self, folder: str):
        self.folder = Path(folder)

    def meet(self, own: str, other: str) -> float:
        """Say `own`, and wait for `other`."""
        (self.folder / own).touch()
        until = time.monotonic() + LIMIT
        while not (self.folder / other).exists():
            if time.monotonic() > until:
                raise TimeoutError(f"{own} has waited for {other}")
            time.sleep(0.005)
        return 1.0


def overlap(folder: str) -> list[float]:
    """Two calls that begin before the other ends; then a chain of two, of which the first goes on meanwhile."""
    signs = Signs(folder)

    def body(x):
        calls = [spmd.remote(lambda x, k=k: x + signs.meet(f"{k}", f"{1 - k}"), at=k)(x) for k in (0, 1)]
        for m in (0, 1):  # The worker of the first stage begins with the next one while the second stage has this one.
            y = spmd.remote(lambda x, m=m: x + signs.meet(f"first {m}", ("0", "second 0")[m]), at=0)(x)
            calls.append(spmd.remote(lambda y, m=m: y + signs.meet(f"second {m}", "first 1"), at=1)(y))
        return sum(spmd.replicate(f.result(), "x", f.at) for f in calls)

    return spmd.map(body, P(), P())(np.zeros(2)).tolist()


def struck(x):
    """What becomes of worker 1 while it runs f."""
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if HOW == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if HOW == "exit":
        os._exit(3)
    threading.Event().wait(1000)
    return x


def main() -> None:
    mesh = spmd.Mesh(x=int(sys.argv[2]))
    with mesh:
        if HOW == "values":
            found = values()
        elif HOW == "overlap":
            found = overlap(sys.argv[3])
        else:
            body = lambda x: spmd.replicate(spmd.remote(struck, at=1)(x).result(), "x", 1)
            found = float(spmd.map(body, P(), P())(np.ones(3)).numpy()[0])
        if spmd.is_main():
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    import up  # noqa: F401

    main()
