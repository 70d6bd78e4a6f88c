"""Mistakes with global arrays and meshes."""

from __future__ import annotations

import numpy as np

import spmd
from mistakes import D, Row, X, here
from spmd import P
from spmd.errors import (
    DonatedError,
    LayoutError,
    MeshError,
    MissingMethodError,
    SpecError,
    StateError,
)


def gone():
    """An array that was given away."""
    x, optimizer = here(), spmd.optim.sgd(0.1)
    optimizer.update(np.zeros_like(x), optimizer.init(x), x, donate=True)
    return x


GLOBAL = [
    *(
        Row(f"{name} of a global array", call, error, head, got, need, mend)
        for name, head, error, got, need, mend, call in (
            (
                "@",
                "np.matmul",
                LayoutError,
                "PartitionedArray float64[3, 2] laid out by P('data', None) and PartitionedArray float64[3, 2]",
                "equal lengths in the dimensions that are summed; these are 2 and 3",
                "transpose one of them",
                lambda: here() @ here(),
            ),
            (
                "np.reshape",
                "np.reshape: argument shape",
                LayoutError,
                "(2, 4), for PartitionedArray float64[3, 2] laid out by P('data', None)",
                "a shape of 6 entries",
                "-1 in one place",
                lambda: np.reshape(here(), (2, 4)),
            ),
            (
                "np.concatenate",
                "np.concatenate",
                LayoutError,
                "PartitionedArray float64[3, 2] laid out by P('data', None) and ndarray float64[3]",
                "arrays of as many dimensions each",
                "np.expand_dims",
                lambda: np.concatenate([here(), X[:, 0]]),
            ),
            (
                "np.concatenate of other lengths",
                "np.concatenate",
                LayoutError,
                "ndarray float64[3, 1], along dimension 0",
                "arrays of equal lengths in all other dimensions",
                "another axis",
                lambda: np.concatenate([here(), X[:, :1]]),
            ),
            (
                "np.copyto",
                "np.copyto",
                LayoutError,
                "PartitionedArray float64[3, 2] laid out by P('data', None)",
                "arrays are immutable",
                "x = np.where(mask, v, x)",
                lambda: np.copyto(here(), 0),
            ),
            (
                "np.argmax of no entry",
                "np.argmax",
                LayoutError,
                "PartitionedArray float64[0, 2]",
                "an entry to choose",
                "x.size",
                lambda: here()[:0].argmax(),
            ),
            (
                "out=",
                "np.add: argument out",
                LayoutError,
                "an array to write into",
                "no out: arrays are immutable",
                "use the result: y = np.add(...)",
                lambda: np.add(here(), 1, out=np.zeros((3, 2))),
            ),
            (
                "where=",
                "np.add: argument where",
                LayoutError,
                "a mask",
                "no where argument",
                "np.where(mask, f(x), other)",
                lambda: np.add(here(), 1, where=[[True, False]]),
            ),
            (
                "a method in place",
                "x.sort",
                MissingMethodError,
                "PartitionedArray float64[3, 2] laid out by P('data', None)",
                "arrays are immutable, and NumPy's method sorts in place",
                "x = np.sort(x)",
                lambda: here().sort(),
            ),
            (
                "an attribute",
                "x.strides",
                MissingMethodError,
                "PartitionedArray float64[3, 2] laid out by P('data', None)",
                "a bare array",
                "x.numpy().strides",
                lambda: here().strides,
            ),
        )
    ),
    *(
        Row(
            f"an array that was given away, in {name}",
            lambda use=use: use(gone()),
            DonatedError,
            head,
            "an array that was given away (donate=True)",
            "the one that came in its place",
            "without donate the old stay",
        )
        for name, head, use in (
            ("x.numpy()", "PartitionedArray.numpy", lambda x: x.numpy()),
            ("a ufunc", "np.add", lambda x: x + 1),
            ("spmd.put", "spmd.put", lambda x: spmd.put(x, P())),
            (
                "an update",
                "spmd.optim: argument grads",
                lambda x: spmd.optim.sgd(0.1).update(x, spmd.optim.SGDState(0, None), here()),
            ),
            ("a map", "spmd.map of <lambda>: argument x", lambda x: spmd.map(lambda x: x, P("data"), P("data"))(x)),
        )
    ),
    Row(
        "a stack of different shapes",
        lambda: np.stack([here(), X[:1]]),
        LayoutError,
        "np.stack",
        "PartitionedArray float64[3, 2] laid out by P('data', None) and ndarray float64[1, 2]",
        "arrays of one shape",
        "np.broadcast_to",
    ),
    Row(
        "an update without parameters",
        lambda: spmd.optim.sgd(0.1).update(here(), spmd.optim.SGDState(0, None)),
        SpecError,
        "update of spmd.optim.sgd: argument params",
        "nothing",
        "an update gives new ones",
        "params, state = optimizer.update(grads, state, params)",
    ),
    Row(
        "an assignment to a global array",
        lambda: here().__setitem__(0, 1.0),
        LayoutError,
        "x[i] = v",
        "PartitionedArray float64[3, 2]",
        "arrays are immutable",
        "x = x.at[i].set(v)",
    ),
    Row(
        "the float of an array",
        lambda: float(here()),
        LayoutError,
        "float()",
        "PartitionedArray float64[3, 2]",
        "one entry",
        "x.numpy()",
    ),
    Row("the truth of an array", lambda: bool(here()), LayoutError, "bool()", "[3, 2]", "one entry", "x.numpy()"),
    Row("a format of an array", lambda: f"{here():.3f}", LayoutError, "format()", "[3, 2]", "one entry", "x.numpy()"),
    Row(
        "operands that do not broadcast",
        lambda: here() + np.ones(5),
        LayoutError,
        "np.add",
        "PartitionedArray float64[3, 2] laid out by P('data', None) and ndarray float64[5]",
        "shapes that broadcast",
        "the same shape",
    ),
    Row(
        "operands on different meshes",
        lambda: here() + spmd.put(X, P("x"), spmd.Mesh(x=4)),
        MeshError,
        "np.add",
        "arrays on Mesh(data=2, model=2) and on Mesh(x=4)",
        "arrays on one mesh",
        "spmd.put(x.numpy(), spec, mesh)",
    ),
    Row(
        "put onto another mesh",
        lambda: spmd.put(here(), D, spmd.Mesh(data=4)),
        MeshError,
        "spmd.put: argument mesh",
        "Mesh(data=4) for an array on Mesh(data=2, model=2)",
        "the mesh that the array is on",
        "spmd.put(x.numpy(), spec, mesh)",
    ),
    Row(
        "a sum over a dimension that there is not",
        lambda: np.sum(here(), axis=2),
        LayoutError,
        "np.sum: argument axis",
        "2 for an array of 2 dimensions",
        "from -2 to 1",
        "a dimension that the array has",
    ),
    Row(
        "an inner product of different trees",
        lambda: spmd.inner([X, X], [X]),
        StateError,
        "spmd.inner: argument y",
        "1 arrays for 2",
        "pytrees of one structure",
        "its counterpart",
    ),
]

MESHES = [
    *(
        Row(f"a size {n!r}", lambda n=n: spmd.Mesh(x=n), MeshError, "spmd.Mesh: argument x", repr(n), "1", "Mesh(x=2)")
        for n in (0, -1, 2.0, "2", True)
    ),
    Row(
        "an unknown transport",
        lambda: spmd.Mesh(x=2, transport="mpii"),
        MeshError,
        "spmd.Mesh: argument transport",
        "'mpii'",
        "'local', 'mpi'",
        'transport="mpi"',
    ),
    Row(
        "an unknown scheduler",
        lambda: spmd.Mesh(x=2, scheduler="thread"),
        MeshError,
        "spmd.Mesh: argument scheduler",
        "'thread'",
        "'auto', 'lockstep', 'threads'",
        'scheduler="threads"',
    ),
    Row(
        "an axis named as an option",
        lambda: spmd.Mesh(transport=2),
        MeshError,
        "spmd.Mesh: argument transport",
        "2",
        "'local', 'mpi'",
        'make_mesh((2,), ("transport",))',
    ),
    Row(
        "a communicator and virtual workers",
        lambda: spmd.Mesh(x=2, comm=object(), transport="local"),
        MeshError,
        "spmd.Mesh: argument comm",
        'transport="local"',
        "one of them",
        "leave out",
    ),
    Row(
        "a communicator that is none",
        lambda: spmd.put(X, P("x"), spmd.Mesh(x=2, comm=7)),
        MeshError,
        "spmd.Mesh: argument comm",
        "int 7",
        "an mpi4py communicator",
        "leave it out",
    ),
    *(
        Row(
            f"make_mesh of {shapes!r} and {names!r}",
            lambda shapes=shapes, names=names: spmd.make_mesh(shapes, names),
            MeshError,
            "spmd.make_mesh: argument axis_names",
            f"{names!r} for sizes {shapes!r}",
            "all different",
            'make_mesh((2, 2), ("data", "model"))',
        )
        for shapes, names in (((2, 2), ("a",)), ((2, 2), ("a", "a")), ((2,), "x"), (2, "x"), ((2,), (1,)))
    ),
    Row(
        "a mesh that is none",
        lambda: spmd.put(X, D, 3),
        MeshError,
        "spmd.put: argument mesh",
        "int 3",
        "a Mesh",
        "mesh=spmd.Mesh(x=4)",
    ),
]


ROWS = [*GLOBAL, *MESHES]
