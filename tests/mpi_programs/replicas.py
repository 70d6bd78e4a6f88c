"""What should be one value and is another one on each process: runs each case, and prints how it ended on all."""

from __future__ import annotations

import datetime
import json
import sys
import warnings

import numpy as np

import spmd
from spmd import P

SIZE = int(sys.argv[1])
MESH = spmd.Mesh(x=SIZE) if SIZE < 4 else spmd.Mesh(x=2, y=SIZE // 2)
(RANK,) = MESH.local_workers
X = np.arange(24.0).reshape(8, 3)
OWN = np.random.default_rng(RANK).normal(size=3)
ONE = np.random.default_rng(0).normal(size=3)
LARGE = np.zeros(1 << 18)  # 2 MB: compared in 7 parts from the fourth call on


def squares(w, x):
    return spmd.mean((x @ w) ** 2, tuple(MESH.axes))


def closes_over(w):
    return lambda x: x @ w


def default(x, w=OWN):
    return x @ w


def reads_a_global(x):
    return x @ OWN


def declares(x):
    return spmd.psum(spmd.varying(OWN, tuple(MESH.axes)), tuple(MESH.axes))


def mean_of_own(x):
    return spmd.mean(np.random.default_rng(RANK).normal(size=3), "x") + 0 * x[0]


def trains_in_the_body(x):
    w = np.random.default_rng(RANK).normal(size=3)
    w = w - 0.1 * spmd.grad(squares)(w, x)
    return x @ w


def one_parts_ways(x):
    """A door that only some workers pass is no error."""
    if RANK == 0:
        spmd.pmean(np.ones(3), "x")
    return x


ALL = tuple(MESH.axes)
LOSS = MESH.map(squares, (P(), P(ALL)), P())
JITTED = spmd.jit(LOSS)
SAME = MESH.map(lambda w: w, P(), P())


def changed(calls: int, at: int = 200_000) -> int:
    """The number of calls after which an entry that one process changed is found; one more than `calls` for never."""
    run = MESH.map(lambda w: w, P(), P())
    for _ in range(5):
        run(LARGE)
    other = LARGE.copy()
    other[at] = RANK
    for call in range(calls):
        try:
            run(other)
        except spmd.errors.StateError:
            return call + 1
    return calls + 1


class Model:
    """A model of the user's, whose weights no argument tells of."""

    shared = OWN

    def __init__(self):
        self.weights = [OWN]

    def loss(self, x):
        return x * np.sum(self.weights[0])

    def __call__(self, x):
        return x * np.sum(self.shared)


CASES = {
    # These raise.
    "a replicated argument": lambda: spmd.value_and_grad(LOSS)(OWN, X),
    "a jitted argument": lambda: JITTED(OWN, X),
    "an array that was put": lambda: LOSS(spmd.put(OWN, P(), MESH), X),
    "an array of a callback": lambda: LOSS(spmd.from_callback((3,), P(), lambda index: OWN[index], MESH), X),
    "an array from arithmetic": lambda: LOSS(spmd.put(ONE, P(), MESH) * (1.0 + RANK), X),
    "a shape": lambda: MESH.map(lambda x: x, P("x"), P("x"))(np.arange(4.0 * (RANK + 1))),
    "a dtype": lambda: MESH.map(lambda x: x * 1.0, P("x"), P("x"))(np.arange(8, dtype="f4" if RANK else "i4")),
    "a spec": lambda: MESH.map(lambda x: spmd.psum(np.sum(x), "x"), P("x") if RANK else P(None, "x"), P())(
        np.ones((4, 4))
    ),
    "a tree": lambda: MESH.map(lambda t: t["a"], P("x"), P("x"))({"a": X} if RANK else {"a": X, "b": X}),
    "a number": lambda: MESH.map(lambda x, a: a * x, (P(ALL), P()), P(ALL))(X, 1.0 + RANK),
    "a closure": lambda: MESH.map(closes_over(OWN), P(ALL), P(ALL))(X),
    "a method's object": lambda: MESH.map(Model().loss, P(ALL), P(ALL))(X),
    "an object that is called": lambda: MESH.map(Model(), P(ALL), P(ALL))(X),
    "a set": lambda: MESH.map(lambda x: frozenset({("best", RANK)}), P(ALL), None)(X),
    "a date": lambda: MESH.map(lambda x: datetime.date(2024, 1, 1 + RANK), P(ALL), None)(X),
    "records": lambda: MESH.map(lambda x: np.array([(RANK, 1.0)], "i4,f8"), P(ALL), None)(X),
    "strings": lambda: MESH.map(lambda x: np.array([f"on {RANK}"]), P(ALL), None)(X),
    "a default": lambda: MESH.map(default, P(ALL), P(ALL))(X),
    "a global": lambda: MESH.map(reads_a_global, P(ALL), P(ALL))(X),
    "a cotangent": lambda: spmd.vjp(LOSS, ONE, X)[1](1.0 + RANK),
    "an object": lambda: MESH.map(lambda x: RANK, P(ALL), None)(X),
    "a text": lambda: MESH.map(lambda x: ("loss", f"on {RANK}"), P(ALL), None)(X),
    "an array without a spec": lambda: MESH.map(lambda x: OWN, P(ALL), None)(X),
    "a reduction": lambda: MESH.map(mean_of_own, P(ALL), P(ALL))(X),
    "a gradient in the body": lambda: MESH.map(trains_in_the_body, P(ALL), P(ALL))(X),
    "a result": lambda: MESH.map(lambda x: OWN, P(ALL), P())(X),
    "partly replicated": lambda: (
        MESH.map(lambda x: x, P("y"), P("y"))(np.arange(8.0) + RANK) if SIZE >= 4 else SAME(OWN)
    ),
    # These are right.
    "right: arguments": lambda: spmd.value_and_grad(LOSS)(ONE, X),
    "right: jitted again": lambda: JITTED(ONE, X),
    "right: declared": lambda: MESH.map(declares, P(ALL), P())(X),
    "right: objects": lambda: MESH.map(lambda x: (3, "loss", None, 0.5), P(ALL), None)(X),
    "right: own block of own data": lambda: spmd.from_blocks([OWN], P(ALL), MESH),
    "right: only its own block matters": lambda: MESH.map(lambda x: x, P(ALL), P(ALL))(
        np.where(np.arange(SIZE) == RANK, RANK, -1.0 - RANK)
    ),
    "right: a static argument": lambda: MESH.map(lambda x, rank: x * 1.0, (P(ALL), None), P(ALL))(X, RANK),
    "right: one parts ways": lambda: MESH.map(one_parts_ways, P(ALL), P(ALL))(X),
    "rounding": lambda: LOSS(ONE * (1 + 2.0**-52 * RANK), X),
}


def how(case) -> str:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            case()
            ended = "ok"
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
    return "rounding" if any("by rounding" in str(w.message) for w in told) else ended


def main() -> None:
    found = {name: how(case) for name, case in CASES.items()}
    found["calls until a changed entry of 2 MB is found"] = str(changed(64))
    every = MESH.transport.share({RANK: found})
    if RANK == 0:
        print(json.dumps(every))


if __name__ == "__main__":
    main()
