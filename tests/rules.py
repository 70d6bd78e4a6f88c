"""Tables of rows that verify derivative rules: a function, where its arguments come from, and their shapes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from spmd.autodiff import tree, vjp
from spmd.autodiff.check import check_grads, check_vjp

FEW = settings(derandomize=True, deadline=None, max_examples=3, database=None)
FEWER = settings(FEW, max_examples=2)
MORE = settings(FEW, max_examples=6)
MANY = settings(derandomize=True, deadline=None, max_examples=200, database=None)

# Where arguments are drawn from: rng, shape -> array. All stay clear of kinks and poles by more than a step.


def signed(rng, shape):
    return rng.uniform(0.3, 1.7, shape) * rng.choice([-1, 1], shape)


def positive(rng, shape):
    return rng.uniform(0.3, 2, shape)


def inner(rng, shape):
    return rng.uniform(0.1, 0.8, shape) * rng.choice([-1, 1], shape)


def above_one(rng, shape):
    return rng.uniform(1.2, 3, shape)


def distinct(rng, shape):
    n = math.prod(shape)
    return (rng.permutation(n).reshape(shape) - n / 2 + rng.uniform(0.1, 0.4, shape)) / 3


def spread(rng, shape):
    """Distinct, and different from what another call gives."""
    return distinct(rng, shape) + rng.choice([0.1, 0.2]) + rng.uniform(0, 0.03)


def complex_(rng, shape):
    return rng.uniform(0.3, 1.7, shape) * np.exp(1j * rng.uniform(0.3, 2.8, shape) * rng.choice([-1, 1], shape))


@dataclass(frozen=True)
class Row:
    """A function, where its arguments come from, and of which shapes they are."""

    name: str
    f: Callable
    domains: tuple
    shapes: st.SearchStrategy

    def draw(self, data):
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
        return tuple(np.asarray(d(rng, s)) for d, s in zip(self.domains, data.draw(self.shapes), strict=True))


any_shape = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3)
full_shape = hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=4)
one = any_shape.map(lambda s: (s,))
full = full_shape.map(lambda s: (s,))
pair = hnp.mutually_broadcastable_shapes(num_shapes=2, min_side=0, max_side=3, max_dims=3).map(lambda b: b.input_shapes)


def of(*options):
    """These shapes only: a string each, of one shape per argument, a digit per dimension ("." has none)."""
    return st.sampled_from([tuple(tuple(map(int, s.strip("."))) for s in option.split()) for option in options])


class Table:
    """The rows of one family of functions, by name. Every table is in `Table.all`."""

    all: ClassVar[list[Table]] = []

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        Table.all.append(self)

    def row(self, name: str, f: Callable, domains, shapes) -> None:
        """One function; a single domain stands for a function of one argument."""
        assert name not in self.rows, name
        self.rows[name] = Row(name, f, domains if isinstance(domains, tuple) else (domains,), shapes)

    def tests(self) -> type:
        """The tests that every row must pass; pytest collects the class under the name it is given."""
        each = pytest.mark.parametrize("row", self.rows.values(), ids=self.rows)

        @each
        class Rows:
            @FEW
            @given(data=st.data())
            def test_against_finite_differences(self, row, data):
                check_grads(row.f, row.draw(data))

            @pytest.mark.full
            @MANY
            @given(data=st.data())
            def test_against_finite_differences_long(self, row, data):
                check_grads(row.f, row.draw(data))

            @FEWER
            @given(data=st.data())
            def test_single_precision_stays_single(self, row, data):
                check_single(row, data)

            @pytest.mark.full
            @MORE
            @given(data=st.data())
            def test_single_precision_stays_single_long(self, row, data):
                check_single(row, data)

            @pytest.mark.gpu
            @FEW
            @given(data=st.data())
            def test_on_a_gpu(self, row, data):
                cupy = pytest.importorskip("cupy")
                args = row.draw(data)
                value, pull = vjp(row.f, *args)
                there, pull_there = vjp(row.f, *map(cupy.asarray, args))
                ones = tree.map(np.ones_like, value)
                pairs = zip(
                    tree.leaves((there, pull_there(tree.map(cupy.asarray, ones)))),
                    tree.leaves((value, pull(ones))),
                    strict=True,
                )
                for got, expected in pairs:
                    assert isinstance(got, cupy.ndarray)
                    np.testing.assert_allclose(cupy.asnumpy(got), expected, rtol=1e-9, atol=1e-9)

        return Rows


def check_single(row: Row, data) -> None:
    """One draw: in single precision the value and the cotangents are of single precision, and right."""
    args = tuple(a.astype("c8" if a.dtype.kind == "c" else "f4") for a in row.draw(data))
    value, pull = vjp(row.f, *args)
    bare = tree.leaves(row.f(*args))
    assert [v.dtype for v in tree.leaves(value)] == [v.dtype for v in bare]
    for g, a in zip(pull(tree.map(np.ones_like, value)), args, strict=True):
        assert g.dtype == a.dtype
    check_vjp(row.f, args)
