"""One worker of four fails: how the job ends. The first argument says where."""

from __future__ import annotations

import os
import sys

import numpy as np
import up  # noqa: F401

import spmd
from spmd import P

WHERE = sys.argv[1]
if WHERE == "start" and "1" in (os.environ.get(name) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK")):
    raise ValueError("worker one fails: start")  # MPI has not started here, and the others wait for that.
if WHERE == "wrong size":
    spmd.map(lambda x: x, P("x"), P("x"), mesh=spmd.Mesh(x=3))(np.ones(4))

mesh = spmd.Mesh(x=4)
me = mesh.local_workers[0]


def fail(where: str) -> None:
    if me == 1 and where == WHERE:
        if where == "exit":
            sys.exit(3)
        if where == "message":
            sys.exit("worker one has had enough")
        if where == "interrupt":
            raise KeyboardInterrupt
        raise ValueError(f"worker one fails: {where}")


def body(x):
    x = spmd.psum(x, "x")
    for where in ("body", "exit", "message", "interrupt"):
        fail(where)
    return spmd.psum(spmd.pvary(x, "x"), "x")


fail("before")
spmd.map(body, P("x"), P(), mesh=mesh)(np.ones(4))
fail("between")
spmd.map(body, P("x"), P(), mesh=mesh)(np.ones(4))
if WHERE == "caught":
    try:
        spmd.map(lambda x: 1 / 0, P("x"), P("x"), mesh=mesh)(np.ones(4))
    except ZeroDivisionError as error:
        print(*error.__notes__)
    spmd.map(body, P("x"), P(), mesh=mesh)(np.ones(4))
print("reached the end", flush=True)
