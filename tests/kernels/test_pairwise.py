"""Sums of blocks are pairwise: the same tree in every engine, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
import pytest
from emulator import device
from kernel_cases import dtype_of, laid_out

from spmd.kernels import cpu, jit, reference
from spmd.kernels.cpu import moves
from spmd.kernels.cpu.chunks import CACHE, accurate
from spmd.kernels.memory import nontemporal, pool
from spmd.kernels.pairwise import first_half, pairs
from spmd.kernels.parallel import split_work

FOLDS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


def tree(terms: Sequence[Any], add: Callable[[Any, Any], Any]) -> Any:
    """The tree by its definition: surplus terms first, then adjacent partial sums again and again."""
    n = len(terms)
    surplus = n - 2 ** (n.bit_length() - 1)
    sums = [add(terms[2 * k], terms[2 * k + 1]) for k in range(surplus)] + list(terms[2 * surplus :])
    while len(sums) > 1:
        sums = [add(sums[k], sums[k + 1]) for k in range(0, len(sums), 2)]
    return sums[0]


def oracle(blocks: Sequence[np.ndarray], how: str) -> np.ndarray:
    dtype = blocks[0].dtype
    wide = accurate(dtype) if how == "sum" else dtype
    total = tree([b.astype(wide) for b in blocks], lambda a, b: FOLDS[how](a, b).astype(wide))
    return np.asarray(total).astype(dtype)


def drawn(count: int, shape: tuple[int, ...], dtype: str) -> list[np.ndarray]:
    """Blocks whose sum has other bits in another order; with zeros of both signs, which max and min tell apart."""
    rng = np.random.default_rng(count)
    blocks = [rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape) for _ in range(count)]
    if np.dtype(dtype_of(dtype)).kind == "c":
        blocks = [b + 1j * rng.standard_normal(shape) for b in blocks]
    if np.dtype(dtype_of(dtype)).kind in "iu":
        blocks = [np.abs(100 * b) % 100 for b in blocks]
    for block in blocks:
        block[..., ::7] = rng.choice([0.0, -0.0], block[..., ::7].shape)
    return [np.asarray(b).astype(dtype_of(dtype)) for b in blocks]


@pytest.mark.parametrize("n", range(1, 70))
def test_pairs_make_the_tree(n):
    names = [f"b{k}" for k in range(n)]
    sums: list[str | None] = [*names]
    partial_sums: set[int] = set()
    for i, j in pairs(n):
        assert i < j
        sums[i], sums[j] = f"({sums[i]} + {sums[j]})", None  # an added sum is not used again
        partial_sums = (partial_sums - {j}) | {i}
        assert len(partial_sums) <= n.bit_length()
    assert sums == [tree(names, lambda a, b: f"({a} + {b})"), *[None] * (n - 1)]
    if n > 1:
        assert pairs(n)[-1] == (0, first_half(n))


DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "int32", "uint8", "bool", ">f8", ">f2")


@pytest.mark.parametrize("how", ["sum", "max", "min"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("engine", [reference, cpu], ids=["reference", "cpu"])
def test_results_have_the_bits_of_the_tree(engine, dtype, how):
    for n in range(1, 34):
        for shape in (5, 13), (130,):
            blocks = drawn(n, shape, dtype)
            before, want = [b.tobytes() for b in blocks], oracle(blocks, how)
            for layout in "plain", "fortran", "strided":
                given = [laid_out(b, layout) for b in blocks]
                actual = engine.combine(given, how)
                assert (actual.dtype, actual.shape) == (want.dtype, want.shape)
                assert actual.tobytes() == want.tobytes(), (n, shape)
                assert n == 1 or not any(np.may_share_memory(actual, b) for b in given)
                assert [b.tobytes() for b in given] == before
        zero = [np.asarray(b[3]) for b in blocks]  # without dimensions
        assert engine.combine(zero, how).tobytes() == oracle(zero, how).tobytes()
        assert engine.combine([b[:0] for b in blocks], how).shape == (0,)


@pytest.mark.skipif(not device.available(), reason="needs g++ and no GPU")
@pytest.mark.parametrize("how", ["sum", "max"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16", "complex64", "int32"])
def test_kernels_in_cuda_have_the_bits_of_the_tree(dtype, how):
    if dtype == "complex64" and how == "max":
        pytest.skip("CuPy has no order of complex numbers")
    with device.emulated() as gpu:
        for n in range(1, 34):
            for shape in (5, 13), ():
                blocks = [np.asarray(b[..., 1]) for b in drawn(n, (*shape, 3), dtype)]
                want = oracle(blocks, how)
                for into in {None, 0, n // 2, n - 1} if n > 1 else {None}:
                    there = device.put(blocks)
                    actual = gpu.combine(there, how, None if into is None else there[into])
                    assert device.get(actual).tobytes() == want.tobytes(), (n, shape, into)


@pytest.mark.parametrize("how", ["sum", "min"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 9, 16, 21])
def test_the_result_may_be_any_block_or_another_array(n, dtype, how, monkeypatch):
    """In pieces and in one, by one thread and by several."""
    monkeypatch.setattr(moves, "_PIECE", 1 << 12)
    monkeypatch.setattr(split_work, "SPLIT_MIN", 1 << 13)
    monkeypatch.setattr(split_work, "part_bytes", lambda: 1 << 12)
    for shape in (), (0, 3), (17,), (4099,), (61, 70):
        blocks = [b.reshape(shape) for b in drawn(n, (*shape, 1), dtype)]
        want = oracle(blocks, how).tobytes()
        for cores in 1, 3:
            with split_work.SplitScope(lambda cores=cores: cores):
                assert cpu.combine([laid_out(b, "fortran") for b in blocks], how).tobytes() == want
            for k in range(n + 1):
                given = [b.copy() for b in blocks]
                into = given[k] if k < n else np.empty_like(blocks[0])
                with split_work.SplitScope(lambda cores=cores: cores):
                    assert cpu.combine(given, how, into) is into
                assert into.tobytes() == want, (shape, k)
                assert all(
                    a.tobytes() == b.tobytes() for j, (a, b) in enumerate(zip(given, blocks, strict=True)) if j != k
                )


@pytest.mark.parametrize(
    ("n", "dtype"),
    [  # Every count and every dtype twice; the other pairs are long searches.
        pytest.param(n, dtype, marks=[pytest.mark.full] if (k + d) % 2 else [])
        for k, n in enumerate([2, 3, 8, 11])
        for d, dtype in enumerate(["float32", "complex128", "float16", "int16"])
    ],
)
def test_thresholds_change_no_bits(n, dtype):
    itemsize = dtype_of(dtype).itemsize
    for nbytes in {CACHE, pool.out_min(), moves._PIECE, split_work.SPLIT_MIN}:
        for size in nbytes // itemsize - 1, nbytes // itemsize + 1:
            blocks = drawn(n, (size,), dtype)
            assert cpu.combine(blocks).tobytes() == oracle(blocks, "sum").tobytes(), size


@pytest.mark.skipif(not jit.available(), reason="needs numba")
@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13])
def test_sums_past_the_caches_have_the_bits_of_the_tree(n, into, monkeypatch):
    monkeypatch.setattr(nontemporal, "pays", lambda nbytes, copies=1: True)
    monkeypatch.setattr(moves, "_PIECE", 1 << 12)
    blocks = drawn(n, ((1 << 16) + 5,), "float64")
    out = np.full_like(blocks[0], 7) if into else None
    assert cpu.combine(blocks, into=out).tobytes() == oracle(blocks, "sum").tobytes()


@pytest.mark.parametrize("how", ["sum", "max"])
@pytest.mark.parametrize("shape", [(5, 13), ()])
@pytest.mark.parametrize("n", range(2, 34))
def test_repeated_small_sums_have_the_bits_of_the_tree(n, shape, how):
    blocks = [b[tuple(map(slice, shape)) or (0, 1)].reshape(shape) for b in drawn(n, (5, 13), "float32")]
    fold = moves.small_fold(blocks[0], how)
    assert fold is not None
    actual = fold(*blocks)
    assert type(actual) is np.ndarray
    assert actual.shape == shape
    assert actual.tobytes() == oracle(blocks, how).tobytes()
    assert not actual.flags.writeable
    assert not any(np.may_share_memory(actual, b) for b in blocks)


@pytest.mark.parametrize("engine", [reference, cpu], ids=["reference", "cpu"])
def test_errors_grow_with_the_logarithm_of_the_number_of_blocks(engine):
    """Higham's bound for pairwise sums of positive numbers, log2(n) units of roundoff, which one sum after the other
    exceeds."""
    n = 4096
    blocks = [b.astype(np.float32) for b in np.random.default_rng(0).uniform(0.5, 1.5, (n, 100))]
    exact = np.sum(blocks, axis=0, dtype=np.float64)
    bound = np.log2(n) * 2.0**-24
    error = lambda total: np.max(np.abs(total - exact) / exact)
    assert error(engine.combine(blocks)) < bound
    assert error(reduce(np.add, blocks)) > 2 * bound
