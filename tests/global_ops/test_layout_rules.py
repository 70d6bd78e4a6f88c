"""Each function of global arrays has a rule by which it lays out its result, which docs/explanation/global.md tells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from loaded import load

import spmd
from spmd import P
from spmd.global_functions import MAPPED, NATIVE
from spmd.layout_rules import RULES, Rule

DOCS = Path(__file__).resolve().parents[2] / "docs"
page = load(DOCS / "tools" / "make_layouts.py")


def test_the_table_is_that_of_the_rules():
    have = page.PAGE.read_text()
    if page.VERSION not in have:
        pytest.skip("the table is of another version of NumPy")
    assert page.text(have) == have, f"docs/explanation/global.md is not what the rules say; run `{page.COMMAND}`"


def test_another_rule_is_another_table(monkeypatch):
    have = page.PAGE.read_text()
    monkeypatch.setitem(RULES, np.sort, Rule.KEPT)
    assert page.text(have) != have


def test_each_function_has_a_rule_and_each_rule_a_function():
    assert RULES.keys() == NATIVE.keys() | MAPPED.keys()
    assert {*RULES.values()} == {*Rule}


def of(rule: Rule) -> list:
    """The functions of NumPy's own namespace with a rule."""
    found = [f for f, other in RULES.items() if other is rule and getattr(np, getattr(f, "__name__", ""), None) is f]
    return [f for f in found if f is not np.ufunc]


EXAMPLES = {
    **{f: lambda f, u: f(u) for f in (*of(Rule.BLOCKWISE), *of(Rule.KEPT))},
    np.where: lambda f, u: f(u > 1, u, 0),
    np.isclose: lambda f, u: f(u, u),
    np.clip: lambda f, u: f(u, 0, 1),
    np.full_like: lambda f, u: f(u, 2),
    np.roll: lambda f, u: f(u, 1, 0),
}
"""How a function is called, where not with the array alone."""


@pytest.mark.parametrize("function", of(Rule.BLOCKWISE) + of(Rule.KEPT), ids=lambda f: f.__name__)
def test_layouts_that_stay(function):
    with spmd.Mesh(x=2, y=2):
        u = spmd.put(np.arange(15.0).reshape(5, 3), P("y", "x"))[1:]  # uneven
        assert EXAMPLES[function](function, u).layout == u.layout


_TWICE = {np.allclose, np.array_equal, getattr(np, "vecdot", None)}


@pytest.mark.parametrize("function", [f for f in of(Rule.REDUCED) if f not in _TWICE], ids=lambda f: f.__name__)
def test_reduced_layouts(function):
    with spmd.Mesh(x=2, y=2):
        u = spmd.put(np.arange(15.0).reshape(5, 3), P("y", "x"))
        assert function(u, axis=0).spec == P("x")
        assert function(u, axis=1).spec == P("y")


def test_summed_layouts():
    assert of(Rule.SUMMED)[0] is np.sum
    with spmd.Mesh(x=2, y=2):
        u = spmd.put(np.arange(15.0).reshape(5, 3), P("y", "x"))
        for function in (np.sum, np.add.reduce):
            assert function(u, axis=0).spec == P("x", unreduced={"y"})
            assert function(function(u, axis=0, keepdims=True), axis=1).spec == P(unreduced={"x", "y"})


_MORE = {
    **dict.fromkeys((np.partition, np.argpartition), (1,)),
    **dict.fromkeys((np.quantile, np.percentile, np.nanquantile, np.nanpercentile), (0.5,)),
    np.repeat: (2,),
    np.delete: (0,),
    np.append: (np.zeros((2, 3, 4)),),
    np.take_along_axis: (np.zeros((1, 3, 4), int),),
}
_JOINING = {np.insert, np.concatenate, np.vstack, np.hstack, np.column_stack}


@pytest.mark.parametrize("function", [f for f in of(Rule.ALONG) if f not in _JOINING], ids=lambda f: f.__name__)
def test_layouts_along_a_dimension_that_is_made_whole(function):
    with spmd.Mesh(x=2):
        u = spmd.put(np.arange(60.0).reshape(5, 3, 4), P("x"))
        spec = function(u, *_MORE.get(function, ()), axis=0).spec
        assert spec in (P(None, None, "x"), P(None, "x")), spec
