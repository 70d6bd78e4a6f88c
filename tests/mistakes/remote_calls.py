"""Mistakes with remote calls, and with futures where arrays are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
from mistakes import Row, run
from spmd import P
from spmd.errors import MeshError, MissingMethodError, ReplicaError, StateError


def with_future(use: Callable[[Any], Any]) -> Callable[[], Any]:
    """A body that uses the future of a call."""
    return lambda: run(lambda x: use(spmd.remote(np.sum, at=1, axis_name="data")(x)), ins=P(), out=P())


def remote(f: Callable[..., Any], at: int = 1) -> Callable[..., Any]:
    return spmd.remote(f, at=at, axis_name="data")


def kept_future(later: Callable[[Any], Any]) -> Callable[[], Any]:
    """A future that is used after the body which made it."""

    def call() -> Any:
        held: list[Any] = []
        run(lambda x: held.append(remote(np.sum)(x)), ins=P(), out=None)
        return later(held[0])

    return call


FUTURE, NEEDED, ASK = (
    "a future at 1 along data",
    "a value that this worker has",
    "spmd.replicate(x.result(), 'data', 1)",
)
ENDED = "the body in which the call was made, which has not ended"

ROWS = [
    *(
        Row(f"a future, {name}", with_future(use), error, head, FUTURE, NEEDED, ASK)
        for name, use, error, head in (
            ("and a number", lambda future: future + 1, StateError, "an operation on arrays"),
            ("of np.tanh", np.tanh, StateError, "an operation on arrays"),
            ("of np.sum", np.sum, StateError, "an operation on arrays"),
            ("in a loop", list, StateError, "an operation on arrays"),
            ("as a result", lambda future: future, StateError, "an operation on arrays"),
            ("its shape", lambda future: future.shape, MissingMethodError, "x.shape"),
            ("as one of torch", lambda future: future.wait(), MissingMethodError, "x.wait"),
        )
    ),
    *(
        Row(
            f"{name} of a future",
            with_future(use),
            StateError,
            f"spmd.{name}: argument x",
            FUTURE,
            "Rooted(1)",
            "x.result()",
        )
        for name, use in (
            ("replicate", lambda future: spmd.replicate(future, "data", 1)),
            ("move", lambda future: spmd.move(future, "data", 1, 0)),
            ("at_root", lambda future: spmd.at_root(np.sum, future, axis_name="data", root=1)),
        )
    ),
    Row(
        "a future asked outside of bodies",
        kept_future(lambda future: future.result()),
        MeshError,
        "spmd.Future.result",
        "asked outside of any body",
        ENDED,
        ASK.replace("x.", "future."),
    ),
    Row(
        "a future asked on another mesh",
        kept_future(lambda future: spmd.map(lambda: future.result(), (), None, mesh=spmd.Mesh(data=3))()),
        MeshError,
        "spmd.Future.result",
        "asked on Mesh(data=3)",
        ENDED,
        ASK.replace("x.", "future."),
    ),
    Row(
        "remote call in a remote call",
        lambda: run(lambda x: remote(lambda x: remote(np.sum, at=0)(x))(x).result(), ins=P(), out=None),
        StateError,
        "spmd.remote",
        "one worker along 'data' runs alone",
        "all workers of the axes make",
        "pass a future",
    ),
    Row(
        "remote call that returns a future",
        lambda: run(lambda x: (lambda h: remote(lambda: h)().result())(remote(np.sum)(x)), ins=P(), out=None),
        StateError,
        "spmd.remote: result of f",
        FUTURE,
        "arrays of the worker that runs f",
        "outside of f",
    ),
    Row(
        "remote call with data that differ",
        lambda: run(lambda x: remote(np.sum)(np.ones(3) * spmd.worker_index("data")).result(), ins=P(), out=None),
        ReplicaError,
        "spmd.remote at ",
        "differs between worker",
        "one value on all workers along 'data'",
        "spmd.varying(a, 'data')",
    ),
]
