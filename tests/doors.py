"""The doors through which arrays enter, and the kinds of arrays that people bring: `test_admission.py`, and the program
`admitting.py` among processes, let every kind through every door."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
from spmd import P

N = 8
SPLIT = P("x")
"""Entries of each array; a mesh of 2 or 4 workers along x divides them."""


class Labelled:
    """As the series and data arrays of other libraries: entries with labels, and operations that heed them."""

    def __init__(self, values: np.ndarray):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values, dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        return NotImplemented


class Table:
    """As a data frame: columns with names, of several dtypes."""

    columns = ("a", "b")

    def __repr__(self):
        return "Table of a, b"

    def __array__(self, dtype=None, copy=None):
        return np.zeros((N, 2))

    def to_numpy(self):
        return np.zeros((N, 2))


class Sparse:
    """As a sparse matrix: no protocol of NumPy's at all."""

    shape, dtype = (N, N), np.dtype(float)

    def toarray(self):
        return np.eye(N)


class Stored:
    """As a data set of a file: nothing but what NumPy needs to read it."""

    def __init__(self, values: np.ndarray):
        self.values_ = values

    def __repr__(self):
        return f"stored {self.values_}"

    def __array__(self, dtype=None, copy=None):
        return np.array(self.values_, dtype)


class MaskedStored(Stored):
    """One that gives a masked array."""

    def __array__(self, dtype=None, copy=None):
        return np.ma.masked_greater(self.values_, 2)  # type: ignore[return-value]


class Quantity(np.ndarray):
    """As an array with a unit."""


def _numbers(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 6, N).astype(float)


def _matrix() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return np.matrix(_numbers())


def _records(with_objects: bool) -> np.ndarray:
    found = np.zeros(N, [("a", "O" if with_objects else "i4"), ("b", "f8")])
    found["a"], found["b"] = range(N), _numbers()
    return found


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "masked": (lambda: np.ma.masked_greater(_numbers(), 2), ".filled(value)"),
    "the masked constant": (lambda: np.ma.masked, ".filled(value)"),
    "masked integers": (lambda: np.ma.masked_equal(_numbers().astype(np.int8), 2), ".filled(value)"),
    "matrix": (_matrix, "np.asarray(x)"),
    "a subclass": (lambda: _numbers().view(Quantity), "np.asarray(x)"),
    "objects": (lambda: _numbers().astype(object), "np.asarray(x, dtype=float)"),
    "records with objects": (lambda: _records(True), "np.asarray(x['b'])"),
    "strings": (lambda: _numbers().astype(str), "np.unique"),
    "bytes": (lambda: _numbers().astype("S3"), "np.unique"),
    "strings of any length": (lambda: _numbers().astype(np.dtypes.StringDType()), "np.unique"),
    "times": (lambda: _numbers().astype("M8[s]"), "astype(np.int64)"),
    "time differences": (lambda: _numbers().astype("m8[s]"), "astype(np.int64)"),
    "labelled": (lambda: Labelled(_numbers()), "x.values"),
    "a table": (Table, "x.to_numpy()"),
    "sparse": (Sparse, "x.toarray()"),
    "stored with a mask": (lambda: MaskedStored(_numbers()), ".filled(value)"),
}
"""Kinds of which something would be lost, and what the mend says."""


def _foreign(name: str) -> Callable[[], Any]:
    def make() -> Any:
        import ml_dtypes

        return _numbers().astype(getattr(ml_dtypes, name))

    return make


def _as(dtype: Any) -> Callable[[], np.ndarray]:
    return lambda: _numbers().astype(dtype)


ADMITTED: dict[str, Callable[[], Any]] = {
    **{f"dtype {d}": _as(d) for d in "? i1 u2 i4 u8 f2 f4 f8 g F D G >f8 >i2 >c8".split()},
    **{name: _foreign(name) for name in ("bfloat16", "float8_e4m3fn", "int4")},
    "records": lambda: _records(False),
    "raw bytes": lambda: np.arange(N * 6, dtype="u1").view("V6"),
    "a record array": lambda: _records(False).view(np.recarray),
    "a mask without a masked entry": lambda: np.ma.array(_numbers(), mask=False),
    "frozen": lambda: spmd.freeze(_numbers()),
    "stored": lambda: Stored(_numbers()),
    "a view of every other entry": lambda: np.repeat(_numbers(), 2)[::2],
}
"""Kinds that enter with nothing lost."""

NUMERIC = [name for name in ADMITTED if name not in ("records", "raw bytes", "a record array")]

Door = Callable[[Any, spmd.Mesh], Any]


def mapped(body: Callable, x: Any, mesh: spmd.Mesh, check: bool = True, out: Any = SPLIT) -> Any:
    """What a body gives of the blocks of x."""
    return spmd.map(body, P("x"), out, mesh=mesh, check=check)(x)


def here(of: Callable[[Any], Any], x: Any, mesh: spmd.Mesh, check: bool, out: Any = SPLIT) -> Any:
    """What a function in a body gives of x, which the body closes over."""
    return mapped(lambda _: of(x), np.zeros(N), mesh, check, out)


def ones() -> np.ndarray:
    return np.ones(N)


def outside(x: Any, mesh: spmd.Mesh) -> Any:
    return spmd.put(ones(), P("x"), mesh) * x


def in_blocks(x: Any, mesh: spmd.Mesh) -> Any:
    return spmd.from_blocks([x] * len(mesh.local_workers), P("x"), mesh)


def of_operator(x: Any, mesh: spmd.Mesh) -> Any:
    return spmd.linear_operator(lambda b: 2 * b, P("x"), P("x"), shape=(N,), mesh=mesh) @ x


def of_map_gradient(x: Any, mesh: spmd.Mesh) -> Any:
    f = spmd.map(lambda b: spmd.sum(b * b, "x"), P("x"), P(), mesh=mesh)
    return spmd.grad(lambda z: f(z))(x)


def of_map_cotangent(x: Any, mesh: spmd.Mesh) -> Any:
    return spmd.vjp(spmd.map(lambda b: 2 * b, P("x"), P("x"), mesh=mesh), ones())[1](x)


def in_jit(x: Any, mesh: spmd.Mesh) -> Any:
    f = spmd.jit(spmd.map(lambda b: spmd.shift(b, "x", 1), P("x"), P("x"), mesh=mesh))
    f(ones())
    f(x)
    return f(x)


MOVES: dict[str, Door] = {
    "map": lambda x, m: mapped(lambda b: b, x, m),
    "map, check=False": lambda x, m: mapped(lambda b: b, x, m, False),
    "map, replicated": lambda x, m: spmd.map(lambda b: b, P(), P(), mesh=m)(x),
    "jit": in_jit,
    "shift of an argument": lambda x, m: mapped(lambda b: spmd.shift(b, "x", 1, wrap=True), x, m),
    "shift of an argument, check=False": lambda x, m: mapped(lambda b: spmd.shift(b, "x", 1, wrap=True), x, m, False),
    "put": lambda x, m: spmd.put(x, P("x"), m),
    "from_blocks": in_blocks,
    "from_callback": lambda x, m: spmd.from_callback((N,), P(), lambda _: x, m),
    "freeze": lambda x, m: spmd.freeze(x),
    **{
        f"{name}, check={check}": lambda x, m, of=of, check=check: here(of, x, m, check)
        for name, of in {
            "shift": lambda x: spmd.shift(x, "x", 1, wrap=True),
            "all_gather": lambda x: spmd.all_gather(x, "x", tiled=True),
            "halo_exchange": lambda x: spmd.halo_exchange(spmd.varying(x, "x"), P("x"), 1, "periodic"),
            "varying": lambda x: spmd.varying(x, "x"),
            "pvary": lambda x: spmd.shift(spmd.pvary(x, "x"), "x", 1),
            "block": spmd.block,
            "result": lambda x: x,
            "keep": lambda x: spmd.broadcast(spmd.keep(x, "x"), "x"),
        }.items()
        for check in (True, False)
    },
    "a result of a layout": lambda x, m: mapped(lambda b: x, ones(), m, out=m.layout((N * m.size,), P("x"))),
    "at_root": lambda x, m: mapped(
        lambda b: spmd.broadcast(spmd.at_root(lambda _: x, spmd.keep(np.ones(1), "x"), axis_name="x"), "x"), ones(), m
    ),
}
"""Doors that move entries."""

COUNTS: dict[str, Door] = {
    **{
        f"{name}, check={check}": lambda x, m, of=of, check=check: here(of, x, m, check, P())
        for name, of in {
            "psum": lambda x: spmd.psum(spmd.varying(x, "x"), "x"),
            "mean": lambda x: spmd.mean(spmd.varying(x, "x"), "x"),
            "pmean": lambda x: spmd.pmean(spmd.varying(x, "x"), "x"),
            "sum": lambda x: spmd.sum(spmd.varying(x, "x"), "x"),
            "mean of it": lambda x: spmd.mean(x, "x"),
            "norm": spmd.norm,
            "inner": lambda x: spmd.inner(x, x),
        }.items()
        for check in (True, False)
    },
    "inner": lambda x, m: spmd.inner(x, x),
    "inner with a global array": lambda x, m: spmd.inner(spmd.put(ones(), P("x"), m), x),
    "norm": lambda x, m: spmd.norm(x),
    "an operator outside": outside,
}
"""Doors that compute with entries."""

DIFFERENTIATES: dict[str, Door] = {
    "grad": lambda x, m: spmd.grad(lambda z: np.sum(z * z))(x),
    "vjp": lambda x, m: spmd.vjp(lambda z: z * z, x)[1](ones()),
    "jvp": lambda x, m: spmd.jvp(lambda z: z * z, (x,), (ones(),)),
    "grad of a map": of_map_gradient,
    "cotangent": lambda x, m: spmd.vjp(lambda z: 2 * z, ones())[1](x),
    "cotangent of a map": of_map_cotangent,
    "tangent": lambda x, m: spmd.jvp(lambda z: 2 * z, (ones(),), (x,)),
    "jacrev": lambda x, m: spmd.jacrev(lambda z: z * z)(x),
    "grad in a body": lambda x, m: here(lambda y: spmd.grad(lambda z: np.sum(z * z))(y), x, m, True, P()),
    "matvec": of_operator,
    "changed copy": lambda x, m: spmd.grad(lambda z: np.sum(z.at[:].set(x)))(ones()),
    "optimiser": lambda x, m: spmd.optim.sgd(0.1).update(
        {"w": x}, spmd.optim.sgd(0.1).init({"w": ones()}), {"w": ones()}
    ),
    "layer_norm": lambda x, m: spmd.functions.layer_norm(x),
    "bernoulli": lambda x, m: spmd.random.bernoulli(spmd.random.key(0), x),
    "a key": lambda x, m: spmd.random.normal(x, (3,)),
}
"""Doors for floating-point numbers: what else comes may be refused for that alone."""

DOORS = {**MOVES, **COUNTS, **DIFFERENTIATES}
