"""Mistakes in pictures, prints and profiles: what cannot be drawn, workers that do not exist."""

from __future__ import annotations

import numpy as np

import spmd
from mistakes import EVEN, D, Row, X, run
from spmd import P
from spmd.errors import DtypeError, JitError, LayoutError, MeshError, SpecError

LAYOUT, FIELD, TIMELINE, PRINT = "spmd.plot.layout", "spmd.plot.field", "spmd.plot.timeline", "spmd.debug.print"


def jitted_print() -> None:
    def f(x):
        spmd.debug.print(x)
        return x + 1

    spmd.jit(f)(spmd.put(EVEN, D))


ROWS = [
    Row(
        "a picture of a spec without a shape",
        lambda: spmd.plot.layout(D),
        SpecError,
        f"{LAYOUT}: argument what",
        "P('data') without a shape",
        "the shape of the array and the mesh",
        "spmd.plot.layout(P('data'), shape=(8, 6), mesh=mesh)",
    ),
    Row(
        "a picture of a layout of NumPy's array",
        lambda: spmd.plot.layout(X),
        SpecError,
        f"{LAYOUT}: argument what",
        "float64[3, 2]",
        "a global array, a layout, a mesh, or a spec with a shape",
        "spmd.plot.layout(spmd.put(x, spec))",
    ),
    Row(
        "a picture of a number",
        lambda: spmd.plot.field(spmd.put(np.float64(3), P())),
        LayoutError,
        f"{FIELD}: argument array",
        "float64[]",
        "an array of at least one dimension",
        "print(x)",
    ),
    Row(
        "a picture of complex values",
        lambda: spmd.plot.field(EVEN + 1j),
        DtypeError,
        f"{FIELD}: argument array",
        "complex128[4, 2]",
        "real numbers",
        "np.abs(x), np.real(x) or np.imag(x)",
    ),
    Row(
        "a slice beyond the end",
        lambda: spmd.plot.field(np.ones((3, 4, 5)), at=3),
        LayoutError,
        f"{FIELD}: argument at",
        "3",
        "an index in each of the first dimensions, which have the lengths (3,)",
        "at=(1,)",
    ),
    Row(
        "a slice of an empty array",
        lambda: spmd.plot.field(np.ones((0, 4, 5))),
        LayoutError,
        f"{FIELD}: argument at",
        "lengths (0,)",
        "an index in each of the first dimensions",
        "draw an array that is not empty",
    ),
    Row(
        "a picture of no ledger",
        lambda: spmd.plot.ledger({}),
        LayoutError,
        "spmd.plot.ledger: argument log",
        "{}",
        "a ledger, and at least one bar",
        "with spmd.ledger() as log: ...",
    ),
    Row(
        "a timeline of an array",
        lambda: spmd.plot.timeline(X),
        LayoutError,
        f"{TIMELINE}: argument trace",
        "float64[3, 2]",
        "a profile that has written a file, or such a file",
        "spmd.plot.timeline(",
    ),
    Row(
        "a picture of a pipeline that does not run",
        lambda: spmd.plot.pipeline([]),
        LayoutError,
        "spmd.plot.pipeline: argument trace",
        "a trace in which no pipeline runs",
        "one of a program that calls spmd.training.pipeline or spt.pipeline",
        "spmd.plot.pipeline(",
    ),
    Row(
        "a print of a worker that does not exist",
        lambda: run(lambda x: spmd.debug.print(x, only=4), out=None),
        MeshError,
        f"{PRINT}: argument only",
        "4",
        "the number of a worker, less than 4, or indices along axes of Mesh(data=2, model=2)",
        "only=0, or only={'data': 0}",
    ),
    Row(
        "a print along an axis that does not exist",
        lambda: run(lambda x: spmd.debug.print(x, only={"x": 0}), out=None),
        MeshError,
        f"{PRINT}: argument only",
        "{'x': 0}",
        "indices along axes of Mesh(data=2, model=2)",
        "only=0",
    ),
    Row(
        "a print in a jitted function of global arrays",
        jitted_print,
        JitError,
        PRINT,
        "a call within spmd.jit, outside of any body",
        "values, which a function that is recorded does not have",
        "call it in the body of a map",
    ),
    Row(
        "a profile that keeps no event",
        lambda: spmd.profile(limit=0),
        SpecError,
        "spmd.profile: argument limit",
        "int 0",
        "a number of events per worker, at least 1",
        "leave limit out: it is 100000",
    ),
    Row(
        "a profile inside a body",
        lambda: run(lambda x: spmd.profile().__enter__()),
        MeshError,
        "spmd.profile",
        "a profile that is opened inside a body",
        "one around maps: it records all workers",
        'with spmd.profile("trace.json"): around the call of the map',
    ),
]
