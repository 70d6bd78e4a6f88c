"""The Array API standard for global arrays: each of its names is there, and gives NumPy's values and dtypes."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from global_cases import bare, outcome, quietly

import spmd
from spmd import P
from spmd import array_api as xp
from spmd.errors import LayoutError, MeshError

CONSTANTS = "e inf nan newaxis pi"
DTYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float32 float64 complex64 complex128"
UNARY = (
    "abs acos acosh asin asinh atan atanh bitwise_invert ceil conj cos cosh exp expm1 floor imag isfinite isinf isnan "
    "log log10 log1p log2 logical_not negative positive real reciprocal round sign signbit sin sinh sqrt square tan "
    "tanh trunc"
)
BINARY = (
    "add atan2 bitwise_and bitwise_left_shift bitwise_or bitwise_right_shift bitwise_xor copysign divide equal "
    "floor_divide greater greater_equal hypot less less_equal logaddexp logical_and logical_or logical_xor maximum "
    "minimum multiply nextafter not_equal pow remainder subtract"
)
MAKERS = "arange asarray empty eye from_dlpack full linspace ones zeros"
LIKE = "empty_like full_like ones_like zeros_like"
OF_DTYPES = "astype can_cast finfo iinfo isdtype result_type"
OTHERS = (
    "all any argmax argmin argsort broadcast_arrays broadcast_to clip concat count_nonzero cumulative_prod "
    "cumulative_sum diff expand_dims flip matmul matrix_transpose max mean meshgrid min moveaxis nonzero permute_dims "
    "prod repeat reshape roll searchsorted sort squeeze stack std sum take take_along_axis tensordot tile tril triu "
    "unique_all unique_counts unique_inverse unique_values unstack var vecdot where"
)
LINALG = (
    "cholesky cross det diagonal eigh eigvalsh inv matmul matrix_norm matrix_power matrix_rank matrix_transpose outer "
    "pinv qr slogdet solve svd svdvals tensordot trace vecdot vector_norm"
)
FFT = "fft fftfreq fftn fftshift hfft ifft ifftn ifftshift ihfft irfft irfftn rfft rfftfreq rfftn"
NAMES = " ".join((CONSTANTS, DTYPES, UNARY, BINARY, MAKERS, LIKE, OF_DTYPES, OTHERS, "fft linalg")).split()
ATTRIBUTES = "T device dtype mT ndim shape size"
METHODS = (
    "abs add and array_namespace bool complex dlpack dlpack_device eq float floordiv ge getitem gt index int invert le "
    "lshift lt matmul mod mul ne neg or pos pow rshift setitem sub truediv xor"
)
LATER = {"cumulative_prod": "2.1", "cumulative_sum": "2.1", "unstack": "2.1"}
"""Names that NumPy has since a version after 2.0."""


def has(name: str) -> bool:
    return name not in LATER or hasattr(np, name)


# The meshes, and how an array is laid out on each of them: rows on one axis, rows and columns on two. Blocks of 7 rows
# differ in length, and on "lumps" one is empty.

MESHES = {
    "1": spmd.Mesh(x=1),
    "2": spmd.Mesh(x=2),
    "3": spmd.Mesh(x=3),
    "2x2": spmd.Mesh(x=2, y=2),
    "lumps": spmd.Mesh(x=3),
}


def split(a: np.ndarray, mesh: spmd.Mesh, lumps: bool) -> spmd.PartitionedArray:
    if not a.ndim:
        return spmd.put(a, P())
    if lumps:
        n = len(a)
        return spmd.from_blocks([a[: n // 3], a[n // 3 : n // 3], a[n // 3 :]], P("x"))
    names = list(mesh.axes)
    return spmd.put(a, P(tuple(names)) if a.ndim == 1 else P(*names[: a.ndim]))


_draw = np.random.default_rng(0)
_square = _draw.normal(size=(3, 4, 4))
ARRAYS = {
    "a": _draw.normal(size=(7, 4)),
    "b": _draw.normal(size=(7, 4)),
    "row": _draw.normal(size=4),
    "col": _draw.normal(size=(7, 1)),
    "v": _draw.normal(size=7),
    "w": _draw.normal(size=7),
    "three": _draw.normal(size=(7, 3)),
    "cube": _draw.normal(size=(3, 7, 2)),
    "s": np.array(0.75),
    "none": np.zeros((0, 3)),
    "f4": _draw.normal(size=(7, 4)).astype(np.float32),
    "c": (_draw.normal(size=(7, 4)) + 1j * _draw.normal(size=(7, 4))).astype(np.complex64),
    "i": _draw.integers(-4, 5, (7, 4)),
    "i1": _draw.integers(-4, 5, (7, 4)).astype(np.int8),
    "u": _draw.integers(0, 5, (7, 4)).astype(np.uint16),
    "k": _draw.integers(0, 3, 7),
    "t": _draw.random((7, 4)) < 0.5,
    "ordered": np.sort(_draw.normal(size=9)),
    "at": _draw.integers(0, 7, (3, 4)),
    "of4": _draw.integers(0, 4, (7, 2)),
    "m": _square,
    "m1": _square[0],
    "spd": _square @ _square.swapaxes(-1, -2) + np.eye(4),
    "rhs": _draw.normal(size=(3, 4, 2)),
    "zero": np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, -1.0]),
}


class A(str):
    """An array of the table above, among arguments."""


def _pair(name: str) -> list[tuple]:
    """Two arrays of each kind, broadcast, and with Python numbers on either side."""
    del name
    return [
        *((A(k), A(k)) for k in ("a", "f4", "c", "i", "i1", "u", "t")),
        *((A("a"), A(k)) for k in ("b", "row", "col", "s", "f4")),
        *((A("i"), A("i1")), (A("i1"), A("u")), (A("zero"), A("v")), (A("none"), A("none"))),
        *((A(k), n) for k, n in (("f4", 2.5), ("i1", 3), ("t", True), ("c", 1j), ("a", 2))),
        *((n, A(k)) for k, n in (("f4", 2.5), ("u", 3), ("c", 2.0))),
    ]


def with_axes(*names: str, **options: Any) -> list[tuple]:
    return [(A(k), {**options, "axis": axis}) for k in names for axis in (0, -1)]


_KEEP = [(A("a"), {"keepdims": True}), (A("a"), {"axis": 0, "keepdims": True}), (A("cube"), {"axis": (0, 2)})]
_EACH = [(A(k),) for k in ("a", "c", "i", "i1", "u", "t", "f4", "v", "zero")]
_SUMS = [*_EACH, *with_axes("a", "i1", "f4", "cube"), *_KEEP]
_ALONG = with_axes("a", "i", "v", "cube")
_SPECTRA = [*with_axes("a", "f4", "v"), (A("a"), {"n": 5, "axis": 0}), (A("a"), {"norm": "ortho"})]
_MANY = [(A("a"),), (A("cube"), {"axes": (0, 1)}), (A("a"), {"s": (3, 5), "axes": (0, 1)})]
_MATRICES = [(A("m"),), (A("m1"),)]

CASES: dict[str, list[tuple]] = {
    **{name: [(A(k),) for k in (*ARRAYS,)[:16]] + [(A("zero"),)] for name in UNARY.split()},
    **{name: _pair(name) for name in BINARY.split()},
    "all": _SUMS,
    "any": _SUMS,
    "count_nonzero": _SUMS,
    "sum": [*_SUMS, (A("i1"), {"dtype": np.int64, "axis": 0})],
    "prod": [*_SUMS, (A("i1"), {"dtype": np.float32, "axis": 0})],
    "max": [*_SUMS[:-1], (A("cube"), {"axis": (0, 2)})],
    "min": _SUMS,
    "mean": _SUMS,
    "var": [*_SUMS, (A("a"), {"axis": 0, "correction": 1})],
    "std": [*_SUMS, (A("a"), {"axis": 0, "correction": 1.5})],
    "argmax": [*_EACH, *_ALONG, (A("a"), {"axis": 0, "keepdims": True})],
    "argmin": [*_EACH, *_ALONG, (A("a"), {"axis": 0, "keepdims": True})],
    "cumulative_sum": [*_ALONG, (A("v"),), (A("a"), {"axis": 0, "include_initial": True})],
    "cumulative_prod": [*_ALONG, (A("v"),), (A("a"), {"axis": 0, "include_initial": True})],
    "diff": [*_ALONG, (A("a"), {"n": 2, "axis": 0}), (A("v"), {"prepend": A("w"), "append": A("w")})],
    "broadcast_arrays": [(A("a"), A("row")), (A("col"), A("row")), (A("s"), A("a"), A("col"))],
    "broadcast_to": [(A("row"), (3, 4)), (A("col"), (2, 7, 5)), (A("s"), (3,))],
    "concat": [([A("a"), A("i")],), ([A("a"), A("three")], {"axis": 1}), ([A("v"), A("a")], {"axis": None})],
    "stack": [([A("a"), A("b")],), ([A("a"), A("i")], {"axis": -1}), ([A("v"), A("w")], {"axis": 1})],
    "expand_dims": [(A("a"), {"axis": d}) for d in (0, 1, -1)],
    "flip": [(A("a"),), *_ALONG, (A("cube"), {"axis": (0, 1)})],
    "moveaxis": [(A("cube"), 0, -1), (A("cube"), (0, 1), (1, 2))],
    "permute_dims": [(A("cube"), (2, 0, 1)), (A("a"), (1, 0))],
    "matrix_transpose": [(A("cube"),), (A("a"),)],
    "repeat": [(A("a"), 2), (A("a"), 3, {"axis": 1}), (A("a"), A("k"), {"axis": 0})],
    "reshape": [(A("a"), (14, 2)), (A("cube"), (-1, 7)), (A("a"), (28,)), (A("s"), (1, 1)), (A("none"), (3, 0))],
    "roll": [(A("a"), 3), (A("a"), -2, {"axis": 0}), (A("cube"), (1, 2), {"axis": (0, 1)})],
    "squeeze": [(A("col"), 1), (A("col"), (1,))],
    "tile": [(A("a"), (2, 1)), (A("v"), (3,)), (A("v"), (2, 2))],
    "tril": [(A("a"),), (A("m"), {"k": 1}), (A("i"), {"k": -1})],
    "triu": [(A("a"),), (A("m"), {"k": 1}), (A("i"), {"k": -1})],
    "unstack": [(A("a"),), (A("cube"), {"axis": 1})],
    "meshgrid": [(A("v"), A("row")), (A("v"), A("row"), {"indexing": "ij"}), (A("v"), A("w"), A("k"))],
    "clip": [(A("a"), -0.5, 0.5), (A("i1"), -2), (A("a"), None, A("b")), (A("f4"), {"max": 0.0})],
    "where": [(A("t"), A("a"), A("b")), (A("t"), A("i"), 0), (A("t"), 1.0, A("f4")), (A("t"), A("row"), A("c"))],
    "nonzero": [(A("i"),), (A("t"),), (A("k"),)],
    "searchsorted": [(A("ordered"), A("v")), (A("ordered"), A("a"), {"side": "right"})],
    "take": [(A("a"), A("k"), {"axis": 0}), (A("v"), A("k")), (A("a"), A("k"), {"axis": -1})],
    "take_along_axis": [(A("a"), A("at"), {"axis": 0}), (A("i"), A("of4"), {"axis": -1})],
    **{f"unique_{name}": [(A("i"),), (A("k"),), (A("t"),)] for name in ("all", "counts", "inverse", "values")},
    "matmul": [(A("m"), A("rhs")), (A("a"), A("row")), (A("v"), A("a")), (A("v"), A("w")), (A("i"), A("m1"))],
    "tensordot": [(A("a"), A("b")), (A("a"), A("m1"), {"axes": 1}), (A("a"), A("b"), {"axes": ((0,), (0,))})],
    "vecdot": [(A("a"), A("b")), (A("c"), A("c")), (A("a"), A("b"), {"axis": 0}), (A("i"), A("i1"))],
    "full_like": [(A("a"), 2), (A("i1"), 3), (A("a"), 1.5, {"dtype": np.float32})],
    **{f"{name}_like": [(A("a"),), (A("i1"),), (A("a"), {"dtype": np.int16})] for name in ("ones", "zeros")},
    "can_cast": [(A("i1"), np.int16), (A("a"), np.int8), (np.int8, np.float32)],
    "result_type": [(A("i1"), A("u")), (A("f4"), 1j), (A("i1"), 2), (np.int8, np.uint8)],
    "linalg.cross": [(A("three"), A("three")), (A("three"), A("three"), {"axis": -1})],
    **{f"linalg.{name}": _MATRICES for name in ("det", "inv", "pinv", "slogdet", "svdvals", "matrix_rank")},
    **{f"linalg.{name}": [(A("spd"),)] for name in ("cholesky", "eigh", "eigvalsh")},
    "linalg.diagonal": [*_MATRICES, (A("a"), {"offset": 1}), (A("m"), {"offset": -2})],
    "linalg.trace": [*_MATRICES, (A("i1"), {"offset": 1}), (A("i1"), {"dtype": np.int16})],
    "linalg.matrix_norm": [(A("m"), {"ord": o}) for o in (1, -1, 2, -2, np.inf, -np.inf, "fro", "nuc")],
    "linalg.matrix_power": [(A("m"), 3), (A("m1"), -1), (A("m"), 0)],
    "linalg.outer": [(A("v"), A("row")), (A("k"), A("v"))],
    "linalg.qr": [*_MATRICES, (A("m"), {"mode": "complete"})],
    "linalg.svd": [*_MATRICES, (A("rhs"), {"full_matrices": False})],
    "linalg.solve": [(A("m"), A("rhs")), (A("m1"), A("row")), (A("m"), A("row"))],
    "linalg.vector_norm": [(A("a"), {"ord": o}) for o in (0, 1, 2, 3, np.inf)] + [*with_axes("a", "c"), *_KEEP],
    **{f"fft.{name}": _SPECTRA for name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")},
    **{f"fft.{name}": _MANY for name in ("fftn", "ifftn", "rfftn", "irfftn")},
    **{f"fft.{name}": [(A("a"),), (A("v"),), (A("a"), {"axes": 0})] for name in ("fftshift", "ifftshift")},
}
CASES["astype"] = [(A(k), d) for k in ("a", "i1", "t") for d in (np.float32, np.int64, np.bool_, np.complex64)]
CASES["sort"] = CASES["argsort"] = [
    *((A(k), {"axis": d, "descending": o}) for k in ("a", "i", "k", "cube") for d in (0, -1) for o in (False, True)),
    (A("zero"), {"stable": False}),
]
CASES.update({f"linalg.{name}": CASES[name] for name in ("matmul", "matrix_transpose", "tensordot", "vecdot")})


def _descending(x: np.ndarray, axis: int = -1, descending: bool = False, stable: bool = True) -> np.ndarray:
    """Where the entries go: those of larger rank first, of equal ones the first first."""
    rank = np.unique(x, return_inverse=True)[1].reshape(x.shape)
    return np.argsort(-rank if descending else rank, axis=axis, kind="stable")


ELEMENTWISE = {*UNARY.split(), *BINARY.split()}
REFERENCES: dict[str, Callable] = {
    "argsort": _descending,
    "sort": lambda x, axis=-1, **how: np.take_along_axis(x, _descending(x, axis, **how), axis),
    "clip": lambda x, min=None, max=None: np.clip(x, min, max),
    "astype": lambda x, dtype: x.astype(dtype),
    "diff": lambda x, **options: np.diff(x, **options),
    "take_along_axis": lambda x, i, axis: np.take_along_axis(x, i, axis),
    "concat": lambda arrays, axis=0: np.concatenate(arrays, axis=axis),
    "result_type": lambda *a: np.empty(0, np.result_type(*a)),
}
OURS: dict[str, Callable] = {"result_type": lambda *a: np.empty(0, xp.result_type(*a))}


def named(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part)
    return module


def filled(case: Any, arrays: dict[str, Any]) -> Any:
    """Arguments with the arrays that they name."""
    if isinstance(case, A):
        return arrays[case]
    if isinstance(case, list):
        return [filled(c, arrays) for c in case]
    return {k: filled(c, arrays) for k, c in case.items()} if isinstance(case, dict) else case


def called(function: Callable, case: tuple, arrays: dict[str, Any]) -> Any:
    *args, last = (filled(c, arrays) for c in case)
    return function(*args, **last) if isinstance(last, dict) else function(*args, last)


def parts(result: Any) -> Iterator[Any]:
    """The arrays of a result; those of a decomposition are unique up to signs."""
    if isinstance(result, list | tuple):
        for each in result:
            yield from parts(each)
    else:
        yield result


def products(name: str, result: Any) -> Any:
    """What does not depend on the choice of signs, for decompositions that have one."""
    result = [bare(r) for r in result]
    if name == "linalg.svd":
        u, s, v = result
        return [u[..., : s.shape[-1]] * s[..., None, :] @ v[..., : s.shape[-1], :], s]
    first, second = result
    return [first, np.abs(second)] if name == "linalg.eigh" else [np.abs(first), np.abs(second)]


def differences(name: str, have: Any, want: Any) -> str | None:
    if name in ("linalg.svd", "linalg.eigh", "linalg.qr"):
        have, want = products(name, have), products(name, want)
    have, want = [*parts(have)], [*parts(want)]
    if len(have) != len(want):
        return f"{len(have)} results, not {len(want)}"
    for h, w in zip(have, want, strict=True):
        h, w = bare(h), np.asarray(w)
        if (h.dtype, h.shape) != (w.dtype, w.shape):
            return f"{h.dtype}{list(h.shape)}, not {w.dtype}{list(w.shape)}"
        tolerance = 1e-5 if w.dtype in (np.float32, np.complex64) else 1e-12
        if not np.allclose(h, w, rtol=tolerance, atol=tolerance, equal_nan=True):
            return f"{h}\nis not\n{w}"
    return None


@functools.cache
def laid_out(mesh: str) -> dict[str, spmd.PartitionedArray]:
    with MESHES[mesh] as workers:
        return {k: split(a, workers, mesh == "lumps") for k, a in ARRAYS.items()}


@pytest.mark.parametrize("name", [name for name in CASES if has(name)])
@pytest.mark.parametrize("mesh", MESHES)
def test_values_are_numpys(mesh, name):
    reference, ours = REFERENCES.get(name) or named(np, name), OURS.get(name) or named(xp, name)
    wrong, arrays = [], laid_out(mesh)
    with MESHES[mesh]:
        for case in CASES[name]:
            if os.environ.get("SPMD_TEST_DEVICE", "cpu") != "cpu" and name == "logical_not" and case == ("c",):
                continue  # CuPy has none of complex numbers
            want, expected = outcome(called, reference, case, ARRAYS)
            have, error = outcome(called, ours, case, arrays)
            if (error is None) != (expected is None) or (expected is not None and name not in ELEMENTWISE):
                wrong.append(f"{case}: {error!r}, NumPy: {expected!r}")
            elif error is None and (difference := differences(name, have, want)):
                wrong.append(f"{case}: {difference}")
    assert not wrong, "\n".join(wrong)


MADE: dict[str, list[tuple]] = {
    "arange": [(5,), (2, 9, 3), (0, 4.0), (0.5, 4), (9, 2, -2), (5, {"dtype": np.float32})],
    "empty": [((0, 3),), ((0,), {"dtype": np.int8})],
    "eye": [(5,), (3, 6, {"k": 1, "dtype": np.float32})],
    "full": [((5, 2), 3), (4, 2.5), ((), True), ((3,), 1j), ((3,), 1, {"dtype": np.uint8})],
    "linspace": [(0, 1, 7), (0, 5, 5, {"endpoint": False}), (0, 1, 4, {"dtype": np.complex64})],
    "ones": [((5, 2),), (3, {"dtype": np.int8})],
    "zeros": [((5, 2),), (3, {"dtype": np.bool_}), ((),)],
    "fft.fftfreq": [(7,), (8, {"d": 0.25}), (1,)],
    "fft.rfftfreq": [(7,), (8, {"d": 0.25}), (1,)],
    "asarray": [([[1, 2], [3, 4]],), (2.5,), (ARRAYS["f4"],), ([1, 2], {"dtype": np.float32}), ([True, False],)],
    "from_dlpack": [(ARRAYS["i1"],), (ARRAYS["c"],)],
}


@pytest.mark.parametrize("name", MADE)
def test_arrays_are_made_on_the_mesh_in_a_layout(name):
    for mesh in MESHES.values():
        for *args, last in MADE[name]:
            args, options = (args, last) if isinstance(last, dict) else ([*args, last], {})
            want = np.asarray(named(np, name)(*args, **options))
            for spec in (P(), P("x"))[: 1 + want.ndim]:
                have = named(xp, name)(*args, **options, device=mesh, spec=spec)
                assert (have.dtype, have.spec.axes, have.device) == (want.dtype, spec.axes, mesh)
                np.testing.assert_array_equal(have.numpy(), want)


def test_every_name_is_there():
    assert sorted(xp.__all__) == sorted(filter(has, NAMES))
    assert sorted(xp.linalg.__all__) == sorted(LINALG.split())
    assert sorted(xp.fft.__all__) == sorted(FFT.split())
    everything = [*NAMES, *(f"linalg.{n}" for n in LINALG.split()), *(f"fft.{n}" for n in FFT.split())]
    assert len(everything) > 180
    tested = {*CASES, *MADE, *CONSTANTS.split(), *DTYPES.split(), "fft", "linalg"}
    assert {n for n in everything if n not in tested} == {"finfo", "iinfo", "isdtype", "empty_like"}
    for name in filter(has, everything):
        assert named(xp, name) is not None or name == "newaxis"
    assert all(hasattr(spmd.PartitionedArray, name) for name in ATTRIBUTES.split() if name != "dtype")
    assert all(hasattr(spmd.PartitionedArray, f"__{name}__") for name in METHODS.split())


def test_constants_and_dtypes_are_numpys():
    assert all(getattr(xp, name) is getattr(np, name) for name in CONSTANTS.split())
    assert all(np.dtype(getattr(xp, name)) == np.dtype(name) for name in DTYPES.split())
    x = laid_out("3")["f4"]
    assert xp.finfo(x) == xp.finfo(xp.float32)
    assert (xp.finfo(x).eps, type(xp.finfo(x).max)) == (2.0**-23, float)
    assert xp.iinfo(laid_out("3")["i1"]).max == 127
    assert xp.isdtype(x.dtype, ("real floating", "bool"))
    assert (xp.empty_like(x).layout, xp.empty_like(x, dtype=xp.int8).dtype) == (x.layout, np.int8)


def test_the_namespace_of_arrays():
    x, mesh = laid_out("2")["a"], MESHES["2"]
    assert x.__array_namespace__() is xp is x.__array_namespace__(api_version="2024.12")
    namespaces = []
    spmd.grad(lambda y: namespaces.append(y.__array_namespace__()) or y.sum())(x)
    assert namespaces == [xp]
    info = xp.__array_namespace_info__()
    assert (info.devices(), info.default_device()) == ([], None)
    with mesh:
        assert (info.devices(), info.default_device()) == ([mesh], mesh)
    assert info.default_dtypes(device=mesh)["complex floating"] == np.complex128
    assert info.dtypes(kind="bool") == {"bool": np.dtype(bool)}
    assert info.capabilities()["boolean indexing"]


def test_devices_are_meshes():
    x, other = laid_out("3")["a"], MESHES["2x2"]
    assert x.device == x.mesh
    assert x.to_device(x.device) is x
    moved = x.to_device(other)
    assert (moved.mesh, moved.spec.axes) == (other, ())
    np.testing.assert_array_equal(moved.numpy(), ARRAYS["a"])
    assert xp.zeros_like(x, device=other).device == xp.astype(x, xp.float32, device=other).device == other
    assert xp.ones_like(x, spec=P(None, "x")).spec == P(None, "x")


def test_library_code_is_differentiated():
    def softmax(x):
        xp = x.__array_namespace__()
        e = xp.exp(x - xp.max(x, axis=-1, keepdims=True))
        return xp.sum((e / xp.sum(e, axis=-1, keepdims=True)) ** 2 * xp.asarray(ARRAYS["b"]))

    want = spmd.grad(softmax)(ARRAYS["a"])
    for name, mesh in MESHES.items():
        with mesh:
            x = laid_out(name)["a"]
            have = spmd.grad(softmax)(x)
            assert have.layout == x.layout
            np.testing.assert_allclose(have.numpy(), want, rtol=1e-12, atol=1e-12)


def test_asarray_takes_what_is_there():
    with MESHES["3"] as mesh:
        x = laid_out("3")["v"]
        assert xp.asarray(x) is x
        assert xp.from_dlpack(x) is x
        assert xp.asarray(x, dtype=xp.float64, copy=False) is x
        assert (xp.asarray(x, dtype=xp.float32).layout, xp.asarray(x, spec=P()).spec) == (x.layout, P(None))
        np.testing.assert_array_equal(xp.asarray([x[0], x[1], 2]).numpy(), [*ARRAYS["v"][:2], 2])
        weights = xp.asarray([1.0, 2.0, 3.0], spec=P("x"))
        gradient = spmd.grad(lambda x: xp.sum(xp.asarray([x[0], x[1] * x[1], 7.0], spec=P("x")) * weights))(x)
        np.testing.assert_allclose(gradient.numpy(), [1, 4 * ARRAYS["v"][1], *[0] * 5])
        of_number = spmd.grad(lambda x: xp.sum(xp.asarray([x, x * x, 7.0]) * weights))(3.0)
        assert float(of_number) == 1 + 2 * 2 * 3
    assert xp.asarray([1, 2], device=mesh).mesh == mesh


def test_masks_of_no_entries_choose_none():
    for shape in (0, 4), (7, 0), (0,), (0, 0), (3, 0), (0, 4, 0):
        want, expected = outcome(lambda x: x[np.zeros(shape, bool)], ARRAYS["a"])  # noqa: B023
        for name in MESHES:
            have, error = outcome(lambda x: x[np.zeros(shape, bool)], laid_out(name)["a"])  # noqa: B023
            assert type(error) is type(expected)
            assert error or have.shape == want.shape


def test_dlpack_gives_the_whole_array():
    for name in MESHES:
        x = laid_out(name)["a"]
        assert x.__dlpack_device__() == (1, 0)
        np.testing.assert_array_equal(np.from_dlpack(x), ARRAYS["a"])
        assert "dltensor" in repr(x.__dlpack__())
    x = laid_out("2")["s"]
    assert np.shares_memory(np.from_dlpack(x, copy=False), x.blocks[0])


@pytest.mark.parametrize("code", [*(f"x {op} y" for op in "+ - * / // % ** & | ^ << >> < <= > >= == !=".split()), "-x"])
@pytest.mark.parametrize("kind", ["a", "f4", "c", "i", "i1", "u", "t"])
def test_operators_with_python_numbers(kind, code):
    wrong = []
    for y in (2, 2.5, True, 1j, 300, ARRAYS[kind]):
        if code == "x ** y" and kind == "t" and y is not True:
            continue  # NumPy squares where y is 2, which gives another dtype. The standard has no powers of booleans.
        want, expected = outcome(lambda x: eval(code, {"x": x, "y": y}), ARRAYS[kind])  # noqa: B023
        for name in ("3", "2x2"):
            have, error = outcome(lambda x: eval(code, {"x": x, "y": y}), laid_out(name)[kind])  # noqa: B023
            if (error is None) != (expected is None):
                wrong.append(f"{y!r}: {error!r}, NumPy: {expected!r}")
            elif error is None and (difference := differences(code, have, want)):
                wrong.append(f"{y!r}: {difference}")
    assert not wrong, "\n".join(wrong)


# What is refused, as the page says it.

REFUSED = {
    "x[0] = 1.0": (LayoutError, r"x = x\.at\[i\]\.set\(v\)"),
    "xp.asarray([1.0], copy=False)": (LayoutError, "leave copy out"),
    "x.__dlpack__(copy=False)": (LayoutError, r"spmd\.put\(x, P\(\)\)"),
    'xp.zeros(3, device="cpu")': (MeshError, r"device=x\.device"),
    "x.to_device(mesh, stream=1)": (MeshError, r"x\.to_device\(mesh\)"),
    'x.__array_namespace__(api_version="2030.12")': (LayoutError, "leave api_version out"),
}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "explanation" / "global.md"


def rows(header: str) -> list[list[str]]:
    """The rows of the table of the page under a header."""
    table = PAGE.read_text().split(header)[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in table]


@pytest.mark.parametrize("code", REFUSED)
def test_refusals_say_what_to_write(code):
    error, mend = REFUSED[code]
    with MESHES["2"] as mesh:
        x = laid_out("2")["a"]
        with pytest.raises(error, match=mend):
            exec(code, {"x": x, "xp": xp, "mesh": mesh})


def test_the_page_has_the_same_refusals():
    said = {row[0].strip("`"): row[2] for row in rows("| refused |")}
    assert list(said) == list(REFUSED)
    for code, (_, mend) in REFUSED.items():
        assert re.search(mend, said[code].replace("`", "")), (code, said[code])


def test_values_that_differ_from_the_standard_are_on_the_page():
    """They are NumPy's. Where a later NumPy follows the standard the row goes."""
    for code, numpys, standards in rows("| call |"):
        with MESHES["2"], quietly():
            have = eval(code.strip("`"), {"xp": xp, "inf": np.inf}).numpy()
        assert repr(have.item()) == numpys.strip("`")
        assert numpys != standards
