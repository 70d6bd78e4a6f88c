"""Checks of derivatives against finite differences, for the rules here and for functions of users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transforms import vjp
from spmd.errors import message

__all__ = ["check_grads", "check_vjp", "tolerance"]


def _eps(arrays) -> float:
    """The coarsest spacing of floating numbers among the arrays."""
    dtypes = [x.dtype for x in arrays if hasattr(x, "dtype") and x.dtype.kind in "fc"]
    return max((float(np.finfo(d).eps) for d in dtypes), default=float(np.finfo(float).eps))


def tolerance(eps: float) -> float:
    """The relative error that a check allows: 200 eps^(2/3), which is 7e-9 in double and 5e-3 in single precision.

    A central difference with step h is wrong by eps/h from rounding and by h²/6 times the third derivative; at
    h = eps^(1/3) both are eps^(2/3). The factor leaves room for third derivatives a thousand times the function.
    """
    return 200 * eps ** (2 / 3)


def check_vjp(f: Callable, args: Sequence[Any], *, seed: int = 0) -> None:
    """Check the pullback of `f` at `args` along a random direction v, for a random cotangent g.

    It compares Re Σ pull(g) v with Re Σ g (f(x + h v) - f(x - h v)) / 2h, relative to the sizes of all that is
    summed; see `tolerance`. It also checks that f gives the same traced and bare, and that each cotangent has the
    shape and dtype of its argument.

    f: takes and returns pytrees of floating or complex arrays, smooth within about eps^(1/3) of `args`.
    Raises AssertionError, which names the argument that is most wrong.
    """
    rng = np.random.default_rng(seed)
    xs, treedef = tree.flatten(tuple(args))  # type: ignore[arg-type]
    value, pull = vjp(f, *args)
    ys, out_tree = tree.flatten(value)
    ys = [value_of(y) for y in ys]
    eps = _eps([*xs, *ys])
    bound, h = tolerance(eps), eps ** (1 / 3)

    def values(xs):
        return [value_of(y) for y in tree.leaves(f(*tree.unflatten(treedef, xs)))]

    for k, (y, plain) in enumerate(zip(ys, values(xs), strict=True)):
        if not np.allclose(y, plain, rtol=1e3 * eps, atol=1e3 * eps, equal_nan=True):
            raise _failure(f, f"result {k}", f"{y} where traced", f"{plain}, as where not")
    gs = [_random_like(rng, y) for y in ys]
    found = tree.leaves(pull(tree.unflatten(out_tree, gs)))
    for k, (x, p) in enumerate(zip(xs, found, strict=True)):
        have, need = (np.shape(p), getattr(p, "dtype", None)), (np.shape(x), getattr(x, "dtype", None))
        if have[0] != need[0] or (need[1] is not None and have[1] != need[1]):
            raise _failure(f, _path(args, k), f"a cotangent {have[1]}{list(have[0])}", f"{need[1]}{list(need[0])}")

    def compare(vs) -> tuple[float, float, float]:
        """The derivative along vs by finite difference and by the pullback, and the scale of their terms."""
        over, under = (values([_moved(x, s * h * v) for x, v in zip(xs, vs, strict=True)]) for s in (1, -1))
        numeric = sum(_dot(g, (o - u) / (2 * h)) for g, o, u in zip(gs, over, under, strict=True))
        exact = sum(_dot(p, v) for p, v in zip(found, vs, strict=True))
        terms = [(g, y) for g, y in zip(gs, ys, strict=True)] + [
            (p, np.abs(v) + np.abs(x)) for p, v, x in zip(found, vs, xs, strict=True)
        ]
        return numeric, exact, sum(_dot(np.abs(a), np.abs(b)) for a, b in terms)

    vs = [_random_like(rng, x) for x in xs]
    numeric, exact, scale = compare(vs)
    if abs(numeric - exact) <= bound * scale:
        return
    alone = [compare([v if i == k else 0 * v for i, v in enumerate(vs)]) for k in range(len(xs))]
    k = max(range(len(xs)), key=lambda k: _excess(*alone[k]))
    numeric, exact, scale = alone[k]
    raise _failure(
        f,
        _path(args, k),
        f"{exact:.10g} by the pullback",
        f"{numeric:.10g} by finite difference, within {bound * scale:.2g}",
    )


def check_grads(f: Callable, args: Sequence[Any], order: int = 2, *, seed: int = 0) -> None:
    """Check the derivatives of `f` at `args` up to an order: `check_vjp` of f, of its pullback, and so on.

    The pullback is checked as a function of the arguments and of the cotangent.
    """
    args = tuple(args)
    check_vjp(f, args, seed=seed)
    if order > 1:
        rng = np.random.default_rng(seed + 1)
        cotangent = tree.map(lambda y: _random_like(rng, value_of(y)), f(*args))

        def pullback(args, cotangent):
            return vjp(f, *args)[1](cotangent)

        pullback.__name__ = f"the pullback of {getattr(f, '__name__', f)}"
        check_grads(pullback, (args, cotangent), order - 1, seed=seed + 1)


def _random_like(rng, x):
    """Random numbers of x's shape and dtype, of size about one."""
    dtype = getattr(x, "dtype", np.result_type(type(x)))
    numbers = rng.uniform(0.5, 1, np.shape(x)) * rng.choice([-1, 1], np.shape(x))
    if dtype.kind == "c":
        numbers = numbers * np.exp(2j * np.pi * rng.uniform(size=np.shape(x)))
    return np.asarray(numbers).astype(dtype)


def _moved(x, step):
    """x + step, still an array where it has no dimensions."""
    return np.asarray(x + step) if isinstance(x, np.ndarray) else x + step


def _dot(a, b) -> float:
    """Re Σ a b, in double precision."""
    return float(np.sum(np.asarray(a, complex) * np.asarray(b, complex)).real)


def _excess(numeric: float, exact: float, scale: float) -> float:
    error = abs(numeric - exact) / scale if scale else 0.0
    return error if error == error else np.inf


def _path(args, k: int) -> str:
    path = tree.paths(args)[k]
    return f"number {path[0]}" + "".join(f"[{p!r}]" for p in path[1:])


def _failure(f, argument: str, got: str, need: str) -> AssertionError:
    where = f"check_vjp of {getattr(f, '__name__', f)}"
    return AssertionError(message(where, argument=argument, got=got, need=need, mend="correct the derivative rule"))
