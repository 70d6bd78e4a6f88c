"""check_grads and check_vjp: right rules pass and wrong ones fail, in every precision, with words that help."""

from __future__ import annotations

import json

import numpy as np
import pytest
from launch import PROGRAMS, launch, mpiexec
from mpi_programs import checking

from spmd.autodiff import check_grads, check_vjp, custom_jvp, custom_vjp
from spmd.autodiff.check import tolerance

try:
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = None

DTYPES = ["f8", "f4", "f2", "c16", "c8"] + ([bfloat16] if bfloat16 is not None else [])
each = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
sizes = pytest.mark.parametrize("n", [1, 10, 1000])


def scaled(factor: float, order: int = 1, only=None):
    """x tanh x by a rule that is wrong by a factor, in the first or second derivative, in one dtype or all."""

    @custom_vjp
    def second(x):
        t = np.tanh(x)
        return t + x * (1 - t * t)

    def pull(x, g):
        t = np.tanh(x)
        return (g * 2 * (1 - t * t) * (1 - x * t) * (factor if order == 2 else 1.0),)

    second.defvjp(lambda x: (second(x), x), pull)

    @custom_vjp
    def f(x):
        return np.tanh(x) * x

    def bwd(x, g):
        wrong = order == 1 and (only is None or x.dtype == only)
        return (g * second(x) * (factor if wrong else 1.0),)

    f.defvjp(lambda x: (np.tanh(x) * x, x), bwd)
    return f


def draw(n: int, dtype):
    rng = np.random.default_rng(n)
    x = rng.normal(size=n)
    return (x + 0.3j * rng.normal(size=n) if np.dtype(dtype).kind == "c" else x).astype(dtype)


@each
@sizes
def test_right_rules_pass(dtype, n):
    x = draw(n, dtype)
    check_grads(scaled(1.0), (x,), 2)
    check_grads(lambda x: np.sum(np.sin(x) * x) / 3, (x,), 2)
    check_grads(lambda x, y: np.exp(x * 0.5) * y + np.mean(x), (x, x[::-1]), 2)


@each
@sizes
@pytest.mark.parametrize("order", [1, 2])
def test_rules_that_are_wrong_by_a_tenth_or_a_thousandth_fail(dtype, n, order):
    x = draw(n, dtype)
    for factor in (1.1, 0.9, 1.001):
        with pytest.raises(AssertionError, match=r"argument number 0(.|\n)*by finite difference"):
            check_grads(scaled(factor, order), (x,), order)


@each
def test_rules_that_are_wrong_in_low_precision_only_fail(dtype):
    """What is wrong in a coarse dtype alone is seen from √eps of the sum of all terms on."""
    x = draw(10, dtype)
    with pytest.raises(AssertionError, match="argument number 0"):
        check_vjp(scaled(2.0, only=np.dtype(dtype)), (x,))
    if np.dtype(dtype).itemsize >= 4:
        with pytest.raises(AssertionError, match="argument number 0"):
            check_vjp(scaled(1.1, only=np.dtype(dtype)), (x,))


def test_tolerances_are_those_of_the_docstring():
    assert tolerance(np.finfo("f8").eps) == pytest.approx(7e-9, rel=0.1)
    assert tolerance(np.finfo("f4").eps) == pytest.approx(5e-3, rel=0.1)
    assert tolerance(np.finfo("f2").eps) > 1
    for eps, half in ((np.finfo("f4").eps, 3e-4), (np.finfo("f2").eps, 3e-2), (2.0**-7, 9e-2)):
        assert eps**0.5 == pytest.approx(half, rel=0.2)


def test_functions_that_compute_in_single_precision_whatever_they_are_given():
    x = draw(10, "f4")
    check_grads(lambda x: np.tanh(x.astype("f4")) * 2.0, (x,))
    with pytest.raises(AssertionError, match="by finite difference"):
        check_vjp(lambda x: scaled(1.1)(x.astype("f4")), (x[:3],))
    with pytest.raises(AssertionError, match=r"the precision(.|\n)*computes in half precision"):
        check_vjp(lambda x: np.tanh(x.astype("f2")), (x.astype("f2"),))


# Arguments


def test_integers_none_and_other_leaves_are_constants():
    def f(p, n, kind, nothing, flag):
        assert nothing is None
        assert kind == "sum"
        return {"y": np.sum(p["x"] ** n) * p["s"], "n": n, "flag": flag}

    args = ({"x": np.array([0.5, 2.0]), "s": 1.5}, 3, "sum", None, np.array([True]))
    check_grads(f, args, 3)
    check_vjp(lambda x, i: x[i], (np.arange(3.0), np.array([0, 2])))
    wrong = scaled(1.1)
    with pytest.raises(AssertionError, match=r"argument number 1\['x'\](.|\n)*correct the derivative rule"):
        check_grads(lambda n, p: n * wrong(p["x"]) + p["y"], (2, {"x": np.ones(3), "y": np.ones(3)}))


def test_python_numbers_and_nothing_at_all():
    check_grads(lambda x, y: x * y**2, (2.0, 3.0), 3)
    check_grads(lambda z: z * z, (1.0 + 2.0j,), 2)
    check_grads(lambda x: x * 2, (np.zeros((0, 3)),))
    for f, args in ((lambda: 3.0, ()), (lambda n: n * 2.0, (3,)), (lambda x: x.astype(int), (np.ones(2),))):
        with pytest.raises(AssertionError, match="nothing that has a derivative"):
            check_grads(f, args)
    with pytest.raises(ValueError, match=r"\(x,\) for one argument"):
        check_grads(np.sin, np.ones(3))


def test_kinks():
    check_vjp(np.abs, (np.array([0.0, 1.0, -1.0]),))  # at a kink both give the mean of the slopes
    check_vjp(lambda x: np.maximum(x, 0), (np.array([0.0, 2.0]),))
    with pytest.raises(
        AssertionError, match=r"move away from a kink or a jump within 6e-06(.|\n)*correct the derivative"
    ):
        check_vjp(np.abs, (np.array([1e-7, 1.0]),))
    check_vjp(np.abs, (np.array([1e-7, 1.0]),), eps=1e-9, rtol=1e-5)
    with pytest.raises(AssertionError, match="cast to a coarser dtype"):
        check_vjp(lambda x: x.astype("f4").astype("f8") * 3, (np.array([0.3, 0.7]),))
    with pytest.raises(AssertionError) as told:
        check_vjp(scaled(1.1), (np.array([0.3, 0.7]),))
    assert "kink" not in str(told.value)


def test_tolerances_and_steps_can_be_given():
    f = scaled(1.001)
    x = (draw(5, "f8"),)
    with pytest.raises(AssertionError, match="finite difference"):
        check_grads(f, x, 1)
    check_grads(f, x, 1, rtol=1e-2)
    check_grads(f, x, 1, atol=1.0)
    check_grads(scaled(1.0), x, 2, eps=1e-4, rtol=1e-6)


def test_modes():
    check_grads(lambda x: np.sin(x) * x, (draw(5, "f8"),), 2, modes=("fwd", "rev"))
    check_grads(lambda x: np.abs(x) * np.conj(x), (draw(5, "c16"),), 2, modes=("fwd", "rev"))
    with pytest.raises(ValueError, match="modes"):
        check_grads(np.sin, (1.0,), modes=("forward",))

    f = custom_vjp(lambda x: x)  # no transpose: it is not linear in the cotangent
    f.defvjp(lambda x: (x, None), lambda _, g: (g * g,))
    with pytest.raises(AssertionError, match=r"the tangent(.|\n)*by jvp(.|\n)*by the pullback"):
        check_grads(f, (draw(5, "f8"),), 1, modes=("fwd",))


def test_rules_for_tangents_are_checked():
    f = custom_jvp(lambda x: x**3)
    f.defjvp(lambda p, t: (p[0] ** 3, 3 * p[0] ** 2 * t[0]))
    check_grads(f, (draw(5, "f8"),), 2, modes=("fwd", "rev"))
    f.defjvp(lambda p, t: (p[0] ** 3, 2 * p[0] ** 2 * t[0]))
    with pytest.raises(AssertionError, match="finite difference"):
        check_grads(f, (draw(5, "f8"),), 1)


def test_what_else_is_checked():
    f = custom_vjp(lambda x: x * 2)
    f.defvjp(lambda x: (x * 3, None), lambda _, g: (3 * g,))
    with pytest.raises(AssertionError, match=r"result 0(.|\n)*where traced"):
        check_vjp(f, (np.ones(2),))

    @custom_vjp
    def inside(x):
        return x * x

    # A derivative that is cut off in the backward function is found at the second order.
    inside.defvjp(lambda x: (x * x, x), lambda x, g: (2 * np.array(getattr(x, "value", x)) * g,))
    check_grads(inside, (np.ones(2),), 1)
    with pytest.raises(AssertionError, match="the pullback of inside"):
        check_grads(inside, (np.ones(2),), 2)


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_arguments_that_are_split_give_the_same_numbers_on_every_transport():
    here = checking.results()
    passed = {name for name, text in here.items() if text == "passed"}
    assert passed == {name for name in here if "1.0" in name}
    assert all("correct the derivative rule" in text for name, text in here.items() if name not in passed)
    ended = launch(PROGRAMS / "checking.py")
    assert ended.returncode == 0, ended
    assert json.loads(ended.stdout) == here
