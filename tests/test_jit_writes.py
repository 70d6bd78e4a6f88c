"""Rules of derivatives that write into arrays of their own, under `spmd.jit`."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.autodiff.registry import primitive


def onto_a_view(g, ans, x):
    z = np.zeros_like(x)
    view = z[1:4]
    view += g[1:4]
    view *= 2
    return z


def onto_a_view_of_a_view(g, ans, x):
    z = np.zeros_like(x)
    rows = np.reshape(z, (2, -1))
    row = rows[1]
    row -= g[:3]
    row **= 2
    row /= 3
    return z


def onto_an_item(g, ans, x):
    z = np.zeros_like(x)
    z[1:] += g[1:]
    z -= g
    return z


def onto_itself(g, ans, x):
    z = g * x
    same = z
    z += same
    return same


def onto_a_scalar(g, ans, x):
    total = np.sum(g)
    first = total
    total += 1
    return total * g + first


RULES = [onto_a_view, onto_a_view_of_a_view, onto_an_item, onto_itself, onto_a_scalar]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_may_write_in_place(rule, scheduler):
    f = primitive(rule.__name__, rule)(lambda x: x * 1.0)

    def body(x):
        return spmd.grad(lambda x: spmd.psum(np.sum(f(x) ** 2), "w"))(x)

    with spmd.Mesh(w=2, scheduler=scheduler):
        eager = spmd.map(body, in_specs=P("w"), out_specs=P("w"))
        once = spmd.jit(eager)
        for seed in range(3):
            x = np.random.default_rng(seed).standard_normal(12)
            np.testing.assert_array_equal(once(x).numpy(), eager(x).numpy())
