"""Tables of kernels: each equals its reference, on every engine, for arrays that lie in memory in every way.

    family = Family("softmaxes")
    family.case("softmax", lambda draw: (draw.array(draw.shape(1, 4)),))
    TestKernels = family.tests()

A case says what a kernel is called with. `draw.array` makes an array of the dtype and the layout in memory that are
under test; what is drawn otherwise (`draw.integer`, `draw.choose`, `draw.rng`) is the same for all of them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import pytest
from emulator import device
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd import kernels
from spmd.kernels import cpu, jit, reference
from spmd.kernels.cpu.chunks import accurate

FEW = settings(derandomize=True, deadline=None, max_examples=8, database=None)
SLOW = settings(FEW, max_examples=6)
MANY = settings(derandomize=True, deadline=None, max_examples=400, database=None)

LAYOUTS = ("plain", "read-only", "fortran", "reversed", "strided", "broadcast", "huge")
WIDE = {"float16": np.float64, "bfloat16": np.float64, "float32": np.float64, "complex64": np.complex128}


def dtype_of(name: str) -> np.dtype:
    """The dtype of this name; those that NumPy does not have are ml_dtypes'."""
    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def epsilon(dtype: np.dtype) -> float:
    """The distance from 1 to the next number."""
    return 2.0**-7 if dtype.name == "bfloat16" else float(np.finfo(dtype).eps)


def laid_out(x: np.ndarray, how: str) -> np.ndarray:
    """The same numbers, lying in memory otherwise."""
    if how == "fortran" and x.ndim:  # NumPy makes an array without dimensions one of one
        return np.asfortranarray(x)
    if how == "reversed" and x.ndim:
        return x[(slice(None, None, -1),) * x.ndim].copy()[(slice(None, None, -1),) * x.ndim]
    if how == "strided" and x.ndim:
        wide = np.zeros(tuple(2 * n + 1 for n in x.shape), x.dtype)
        wide[(slice(1, None, 2),) * x.ndim] = x
        return wide[(slice(1, None, 2),) * x.ndim]
    if how == "broadcast" and x.ndim and x.shape[0]:
        return np.broadcast_to(x[:1], x.shape)
    if how == "huge" and x.ndim and 0 < x.shape[0] <= 8:
        # Rows 512 MB apart; only the pages that are written to come to exist.
        apart = (1 << 29) // x.itemsize
        far = np.zeros(apart * (x.shape[0] - 1) + max(1, x[0].size), x.dtype)
        rows = np.lib.stride_tricks.as_strided(far, x.shape, (apart * x.itemsize, *np.zeros_like(x[0]).strides))
        rows[...] = x
        return rows
    x = x.copy()
    x.flags.writeable = how != "read-only"
    return x


class Draw:
    """What a case draws from: see the head of this file."""

    def __init__(self, data: Any, dtype: np.dtype, layout: str, *, small: bool = False, rows: bool = False):
        self._data = data
        self.small = small
        self.rows = rows
        self.dtype = dtype
        self.layout = layout
        self.rng = np.random.default_rng(self.integer(0, 2**32 - 1))

    def integer(self, least: int, most: int) -> int:
        return self._data.draw(st.integers(least, most))

    def choose(self, *options: Any) -> Any:
        return self._data.draw(st.sampled_from(options))

    def shape(self, least: int, most: int, side: int = 7) -> tuple[int, ...]:
        """A shape of `least` to `most` dimensions, of lengths from 0 to `side`; seldom with a long last one. `rows`:
        of few rows, of some vectors each."""
        if self.rows:
            outer = tuple(self.integer(1, 2) for _ in range(self.integer(least, most)))
            return (*outer[:-1], self.choose(1, self.integer(8, 40))) if outer else ()
        side = min(side, 3) if self.small else side
        shape = tuple(self.integer(0, side) for _ in range(self.integer(least, most)))
        return (*shape[:-1], self.integer(0, 700)) if shape and self.integer(0, 5) == 0 else shape

    def array(self, shape: tuple[int, ...], dtype: Any = None, *, low: float = -3, high: float = 3) -> np.ndarray:
        """Numbers between low and high; of the dtype under test, or of another one."""
        dtype = np.dtype(self.dtype if dtype is None else dtype)
        if self.rows and low < -3:  # none so large that the others do not count
            low, high = -2, 2
        x = self.rng.uniform(low, high, shape)
        if dtype.kind == "c":
            x = x + 1j * self.rng.uniform(low, high, shape)
        return laid_out(np.asarray(x).astype(dtype), self.layout)

    def integers(self, shape: tuple[int, ...], least: int, most: int, dtype: Any = np.int64) -> np.ndarray:
        """Integers from least to most - 1."""
        return laid_out(self.rng.integers(least, most, shape).astype(dtype), self.layout)


@dataclass(frozen=True)
class Case:
    """What a kernel is called with, for which dtypes, and how many units in the last place it may be off."""

    name: str
    make: Callable[[Draw], tuple]
    dtypes: tuple[str, ...]
    ulps: float
    scale: float | Callable[..., float]
    label: str
    kept: tuple[int, ...] = ()


REAL = ("float32", "float64")
FLOATING = (*REAL, "float16", "bfloat16")
NUMBERS = (*REAL, "complex64", "complex128")


@dataclass
class Family:
    """The cases of one family of kernels."""

    name: str
    cases: list[Case] = field(default_factory=list)
    all: ClassVar[list[Family]] = []

    def __post_init__(self):
        Family.all.append(self)

    def case(
        self,
        name: str,
        make: Callable[[Draw], tuple],
        *,
        dtypes: Sequence[str] = FLOATING,
        ulps: float = 8,
        scale: float | Callable[..., float] = 0,
        label: str = "",
        kept: tuple[int, ...] = (),
    ) -> None:
        """Arguments of a kernel. ulps: what its result may be off, in units in the last place of its largest entry, or
        of `scale`, the size of what is added up, where entries may cancel. kept: the numbers of the results that
        are float32 where the dtype is a short one."""
        assert name in kernels.FAMILIES[self.name], name
        self.cases.append(Case(name, make, tuple(dtypes), ulps, scale, label, kept))

    def tests(self) -> type:
        """The tests that every case must pass; pytest collects the class under the name it is given."""
        rows = [(case, d) for case in self.cases for d in case.dtypes]
        each = pytest.mark.parametrize(("case", "dtype"), rows, ids=[f"{c.name}{c.label}-{d}" for c, d in rows])

        @each
        class Kernels:
            @FEW
            @given(data=st.data())
            def test_on_numpy_alone(self, case, dtype, data):
                with jit.off():
                    compare(cpu, case, dtype, data)

            @pytest.mark.skipif(not jit.available(), reason="needs numba")
            @FEW
            @given(data=st.data())
            def test_with_numba(self, case, dtype, data):
                compare(cpu, case, dtype, data)

            @pytest.mark.skipif(not jit.available(), reason="needs numba")
            @FEW
            @given(data=st.data())
            def test_bits_come_from_the_numbers_alone(self, case, dtype, data):
                check_bits(case, dtype, data)

            @pytest.mark.skipif(not device.available(), reason="needs g++ and no GPU")
            @SLOW
            @given(data=st.data())
            def test_cuda_on_the_cpu(self, case, dtype, data):
                with device.emulated() as gpu:
                    compare(gpu, case, dtype, data, device)

            @pytest.mark.gpu
            @FEW
            @given(data=st.data())
            def test_on_a_gpu(self, case, dtype, data):
                from emulator import real

                compare(kernels.of(real.put(np.zeros(1))), case, dtype, data, real)

            @pytest.mark.full
            @MANY
            @given(data=st.data())
            def test_long(self, case, dtype, data):
                with contextlib.nullcontext() if data.draw(st.booleans()) else jit.off():
                    compare(cpu, case, dtype, data)

            @pytest.mark.full
            @pytest.mark.skipif(not jit.available(), reason="needs numba")
            @MANY
            @given(data=st.data())
            def test_bits_come_from_the_numbers_alone_long(self, case, dtype, data):
                check_bits(case, dtype, data)

        return Kernels


def compare(engine: Any, case: Case, dtype: str, data: Any, place: Any = None) -> None:
    """One draw: the engine's kernel against the reference, computed in more precision."""
    layout = data.draw(st.sampled_from(LAYOUTS))
    args = case.make(Draw(data, dtype_of(dtype), layout, small=hasattr(place, "emulated")))
    if callable(case.scale):
        case = replace(case, scale=case.scale(*args))
    before = [a.copy() for a in arrays_of(args)]
    there = args if place is None else tuple(map(place.put, args))
    found = getattr(engine, case.name)(*there)
    found = found if place is None else place.get(found)
    wide = WIDE.get(dtype)
    exact = getattr(reference, case.name)(*(widened(a, wide) for a in args))
    single = not isinstance(found, tuple | list) and 0 in case.kept
    check_alike(found, exact, accurate(dtype_of(dtype)) if single else dtype_of(dtype), case)
    for a, b in zip(arrays_of(args), before, strict=True):
        a, b = (widened(v, WIDE.get(dtype)) for v in (a, b))  # NumPy knows the NaNs of its own dtypes only
        np.testing.assert_array_equal(a, b, err_msg="the kernel wrote into an argument")


def check_bits(case: Case, dtype: str, data: Any) -> None:
    """One draw: the kernel gives the same bits wherever its arrays lie. Else copies on several workers would part."""
    args = case.make(Draw(data, dtype_of(dtype), "plain", rows=True))
    alone = getattr(cpu, case.name)(*args)
    with side_by_side(data):
        assert bits(getattr(cpu, case.name)(*args)) == bits(alone)


@contextlib.contextmanager
def side_by_side(data: Any) -> Iterator[None]:
    """Within, the arrays that loops are called with lie next to each other in memory, as small ones may.

    Compiled loops ask whether what they write lies near what they read, and may take another way if so.
    """
    call = jit.Loops.__call__

    def moved(self: jit.Loops, *args: Any) -> Any:
        places = [k for k, a in enumerate(args) if isinstance(a, np.ndarray)]
        if any(np.shares_memory(args[i], args[j]) for i in places for j in places if i < j):
            return call(self, *args)
        order = data.draw(st.permutations(places))
        memory = np.empty(sum(args[k].nbytes + 160 for k in places), np.uint8)
        end, there = 0, list(args)
        for k in order:
            begin = end + 16 * data.draw(st.integers(0, 8))
            end = begin + args[k].nbytes
            there[k] = memory[begin:end].view(args[k].dtype).reshape(args[k].shape)
            there[k][...] = args[k]
            end += -end % 16
        found = call(self, *there)
        for k in places:
            if args[k].flags.writeable:
                args[k][...] = there[k]
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.Loops, "__call__", moved)
        yield


def bits(found: Any) -> Any:
    """What tells two results apart."""
    return [bits(x) for x in found] if isinstance(found, tuple | list) else np.asarray(found).tobytes()


def arrays_of(args: Any) -> list[np.ndarray]:
    """The arrays among arguments, also those in lists and tuples."""
    found = [arrays_of(a) if isinstance(a, list | tuple) else [a] * isinstance(a, np.ndarray) for a in args]
    return [a for some in found for a in some]


def widened(a: Any, wide: Any) -> Any:
    """An array of short numbers in more precision; what is no array, or holds integers, as it is."""
    if isinstance(a, list | tuple):
        return type(a)(widened(x, wide) for x in a)
    if not isinstance(a, np.ndarray) or wide is None or a.dtype.kind in "iub":
        return a
    return a.astype(np.float64 if a.dtype.kind == "f" else wide)


def check_alike(found: Any, exact: Any, dtype: np.dtype, case: Case) -> None:
    """The same numbers within so many units in the last place of the largest, of the dtype under test."""
    if isinstance(exact, tuple | list):
        assert len(found) == len(exact)
        for k, (f, e) in enumerate(zip(found, exact, strict=True)):
            check_alike(f, e, accurate(dtype) if k in case.kept else dtype, case)
        return
    if exact is None or isinstance(exact, int):
        assert found == exact
        return
    exact = np.asarray(exact)
    assert isinstance(found, np.ndarray | np.generic), type(found)
    assert found.shape == exact.shape, (found.shape, exact.shape)
    if exact.dtype.kind in "iub":
        assert found.dtype.kind in "iub"
        np.testing.assert_array_equal(found, exact)
        return
    real = dtype.kind == "c" and exact.dtype.kind != "c"
    assert found.dtype == (np.zeros(0, dtype).real.dtype if real else dtype), found.dtype
    wide = np.complex128 if exact.dtype.kind == "c" else np.float64
    found, exact = found.astype(wide), exact.astype(dtype).astype(wide)
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(np.isfinite(found), finite)
    np.testing.assert_array_equal(found[~finite], exact[~finite])
    size = np.max(np.abs(exact[finite]), initial=case.scale)
    error = np.max(np.abs(found[finite] - exact[finite]), initial=0)
    bound = case.ulps * epsilon(dtype) * size
    assert error <= bound, f"off by {error / (epsilon(dtype) * size or math.inf):.1f} units in the last place"
