"""Python's numbers as initial values: programs give what Python gives, or refuse; no digits are lost."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from loops.random_recorded import bits
from spmd import P
from spmd.errors import LayoutError

MESH = spmd.Mesh(x=2)
WHOLE, HALVES = np.arange(1, 4), np.arange(3, dtype=np.float32) / 2
INITS = [True, 1, 2**60 + 1, 3.7, 0.1, 1j]
STEPS = {
    "half": lambda c: c * 0.5,
    "one more": lambda c: c + 1,
    "turned": lambda c: c * 1j,
    "negative": lambda c: -(c + 0),
    "float32": lambda c: c * 3 * np.float32(0.5),
    "a smaller number": lambda c: 2,
    "a larger number": lambda c: 2.5,
    "an integer array": lambda c: np.int64(4),
    "a float array": lambda c: np.float32(0.5),
}
TIMES = lambda c, a: a * (c * 3)
USES = [(TIMES, WHOLE), (TIMES, HALVES), (lambda c, a: a + c, HALVES), (lambda c, a: a + c, 1j * WHOLE)]


def by_while(init, step, use, a, n):
    """The arrays are those of the last step: their dtype is that of the first one, or the loop refuses."""

    def body(c):
        return {"k": c["k"] + 1, "x": step(c["x"]), "a": use(c["x"], c["a"])}

    c = spmd.while_loop(lambda c: c["k"] < n, body, {"k": 0, "x": init, "a": a})
    return c["x"] * WHOLE, c["a"]


def by_scan(init, step, use, a, n):
    c, ys = spmd.scan(lambda c, _: (step(c), use(c, a)), init, length=n)
    return c * WHOLE, ys


def outcome(run, *args):
    """The bits of the results; None where the loop refuses."""
    try:
        with np.errstate(over="ignore"):
            return bits(run(*args))
    except LayoutError:
        return None


@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("init", INITS, ids=repr)
@pytest.mark.parametrize("loop", [by_while, by_scan])
def test_programs_give_what_python_gives_or_refuse(loop, init, n):
    """Without steps the number may have become an array like the one that a step returns."""
    same = 0
    for step in STEPS.values():
        for use, a in USES:
            f = lambda count, a, step=step, use=use: loop(init, step, use, a, count if loop is by_while else n)
            body = MESH.map(f, (P(), P()), P())
            python, program = (outcome(run, np.asarray(n), a) for run in (body, spmd.jit(body)))
            if n == 0 and python is not None and program is not None:
                python, program = python[1:], program[1:]
            assert program == python or (program is None and n == 0)
            same += program is not None
    assert same > 3


@pytest.mark.parametrize("jit", [lambda f: f, spmd.jit])
def test_numbers_are_not_cut_off(jit):
    """Where a step makes a wider number of a number, arrays beside it are wider from the next step on."""
    body = lambda f, *args: jit(MESH.map(f, P(), P()))(*args).numpy()

    def halves(n):
        going = lambda c: c["k"] < n
        return spmd.while_loop(going, lambda c: {"k": c["k"] + 1, "x": c["x"] * 0.5}, {"k": 0, "x": 1})["x"] * WHOLE

    for n in range(4):
        np.testing.assert_array_equal(body(halves, np.asarray(n)), 0.5**n * WHOLE)
    ys = body(lambda u: spmd.scan(lambda c, _: (c * np.float32(0.5), u * c), 0.1, length=2)[1], WHOLE)
    np.testing.assert_array_equal(ys, [0.1 * WHOLE, np.float64(np.float32(0.1) * np.float32(0.5)) * WHOLE])
    with pytest.raises(LayoutError, match="argument y, which a step returns"):
        body(lambda u: spmd.scan(lambda c, _: (c * 0.5, u * c), 1, length=3)[1], WHOLE)


@pytest.mark.parametrize("sign", ["-", "+", "~", "abs"])
def test_signs_of_numbers_leave_them_numbers(sign):
    """So that arrays keep their dtype beside them."""
    signed = eval(f"lambda c: {sign}(c)")
    f = lambda u: spmd.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * signed(c[0])), (0, u))[1]
    assert bits(spmd.jit(f)(spmd.put(HALVES, P(), MESH))) == bits(f(HALVES))
