"""Checks of derivatives against finite differences, for the rules here and for functions of users."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.dtypes import float0, spacing
from spmd.autodiff.forward import jvp
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transform_arguments import kind_of, name_of, zeros_like
from spmd.autodiff.transforms import vjp
from spmd.errors import DifferentiationError, describe, message
from spmd.tracebacks import api_boundary

__all__ = ["check_grads", "check_vjp", "tolerance"]

_DOUBLE = float(np.finfo(float).eps)


def tolerance(eps: float) -> float:
    """The relative error that a finite difference in a precision is allowed: 200 eps^(2/3), 7e-9 in double.

    A central difference with step h is wrong by eps/h from rounding and by h²/6 times the third derivative; at
    h = eps^(1/3) both are eps^(2/3). The factor leaves room for third derivatives a thousand times the function.
    In single precision it is 5e-3; in half precision it is above 1, and a finite difference says nothing.
    """
    return 200 * eps ** (2 / 3)


@api_boundary
def check_vjp(
    f: Callable[..., Any],
    args: Sequence[Any],
    *,
    atol: float = 0.0,
    rtol: float | None = None,
    eps: float | None = None,
    seed: int = 0,
) -> None:
    """Check the pullback of `f` at `args` along a random direction v, for a random cotangent g.

    It compares Re Σ pull(g) v with Re Σ g (f(x + h v) - f(x - h v)) / 2h, within atol + rtol · S, where S is the sum of
    the sizes of all that is summed: Σ |g| |f(x)| + Σ |pull(g)| (|v| + |x|). It also checks that f gives the same traced
    and bare, and that each cotangent has the shape and dtype of its argument.

    f: takes and returns pytrees, smooth within about h of `args`. Integers and anything that is no array are constants.
    rtol: `tolerance` of the precision, by default: 7e-9 in double. eps: the step h; eps^(1/3) of the precision, 6e-6.
    Where that fails a tenth of the step is tried: truncation is a hundredth there, and rounding still within bounds.

    Single and half precision (float32, float16, bfloat16) are checked in two steps. The mathematics is checked in
    double, where a rule that is wrong by one part in a million is seen: f is called with its arguments cast to it. Then
    the pullback in the given dtype must agree with that in double to half of its digits, √eps · S: 3e-4, 3e-2 and 9e-2.
    For a function that computes in single precision whatever it is given the finite difference is taken there, within
    5e-3 · S; in half precision such a function cannot be checked, which is an error.

    Global arrays among the arguments and results stay split, and all processes call the check: the numbers are the same
    on all transports. Raises AssertionError, which names the argument that is most wrong.

        >>> wrong = spmd.custom_vjp(lambda x: x**2)
        >>> wrong.defvjp(lambda x: (x**2, x), lambda x, g: (g * x,))
        >>> spmd.check_vjp(wrong, (np.array(3.0),))
        Traceback (most recent call last):
            ...
        AssertionError: check_vjp of <lambda>: argument number 0
          ...
    """
    fun, xs, paths = _reduced(f, args)
    rng = np.random.default_rng(seed)
    value, pull = vjp(fun, *xs)
    ys, out_tree = tree.flatten(value)
    for what, some in (("arguments", xs), ("results", ys)):
        if not any(kind_of(x) in ("f", "c") for x in some):
            raise _failure(f, what, "nothing that has a derivative", f"floating {what}", "x.astype(float)")
    coarse = _coarsest([*xs, *ys])
    _compare_values(f, ys, tree.leaves(fun(*xs)), coarse)
    gs = [_random_like(rng, y) for y in ys]
    vs = [_random_like(rng, x) for x in xs]
    arg_cotangents = pull(tree.unflatten(out_tree, gs))
    _compare_types(f, paths, xs, arg_cotangents)
    point = _Point(fun, paths, xs, ys, gs, vs, arg_cotangents)
    wide = _in_double(point) if coarse > _DOUBLE else None
    if wide is not None:
        _check_direction(wide, atol, rtol or tolerance(_DOUBLE), eps or _DOUBLE ** (1 / 3))
        _compare_precisions(point, wide, atol, max(rtol or 0, coarse**0.5))
    elif tolerance(coarse) > 0.1:
        raise _failure(f, *_HALF_PRECISION)
    else:
        _check_direction(point, atol, rtol or tolerance(coarse), eps or coarse ** (1 / 3))


_HALF_PRECISION = (
    "the precision",
    "a function that computes in half precision where it is given double",
    "a function that computes in the dtype of its arguments",
    "leave out what casts to half precision, for the check",
)


@api_boundary
def check_grads(
    f: Callable[..., Any],
    args: Sequence[Any],
    order: int = 2,
    *,
    modes: Sequence[str] = ("rev",),
    atol: float = 0.0,
    rtol: float | None = None,
    eps: float | None = None,
    seed: int = 0,
) -> None:
    """Check the derivatives of `f` at `args` up to an order: `check_vjp` of f, of its pullback, and so on.

    The pullback is checked as a function of the arguments and of the cotangent, which covers forward mode, as that
    transposes the pullback. With "fwd" among the modes `jvp` is compared with the pullback besides.
    atol, rtol, eps: see `check_vjp`.

        >>> cube = spmd.custom_vjp(lambda x: x**3)
        >>> cube.defvjp(lambda x: (x**3, x), lambda x, g: (3 * g * spmd.stop_gradient(x) ** 2,))
        >>> spmd.check_grads(cube, (2.0,), order=1)
        >>> spmd.check_grads(cube, (2.0,), order=2)
        Traceback (most recent call last):
            ...
        AssertionError: check_vjp of the pullback of <lambda>: argument number 0[0]
          got:    0 by the pullback
          needed: 3.922644754 by finite difference, within 1e-07
          mend:   correct the derivative rule
    """
    if not set(modes) <= {"fwd", "rev"}:
        raise ValueError(
            message(
                "check_grads", argument="modes", got=repr(modes), need='"fwd", "rev" or both', mend='modes=("rev",)'
            )
        )
    if "fwd" in modes:
        _check_jvp(f, args, seed)
    check_vjp(f, args, atol=atol, rtol=rtol, eps=eps, seed=seed)  # in either mode: jvp was compared with the pullback
    if order > 1:
        rng = np.random.default_rng(seed + 1)
        cotangent = tree.map(lambda y: _random_like(rng, value_of(y)), f(*args))

        def pullback(args, cotangent):
            fun, xs, _ = _reduced(f, args)
            return vjp(fun, *xs)[1](cotangent)

        pullback.__name__ = f"the pullback of {name_of(f)}"
        options: Any = {"modes": modes, "atol": atol, "rtol": rtol, "eps": eps}
        check_grads(pullback, (tuple(args), cotangent), order - 1, seed=seed + 1, **options)


def _reduced(f: Callable, args: Sequence[Any]) -> tuple[Callable, list, list[str]]:
    """f as a function of the leaves that are differentiated; those, and how each is written."""
    if not isinstance(args, tuple | list):
        raise ValueError(
            message(
                f"check_vjp of {name_of(f)}",
                argument="args",
                got=describe(args),
                need="a tuple of arguments",
                mend="(x,) for one argument",
            )
        )
    leaves, treedef = tree.flatten(tuple(args))  # type: ignore[arg-type]
    active = [k for k, x in enumerate(leaves) if kind_of(x) in ("f", "c")]

    def fun(*xs):
        full = list(leaves)
        for k, x in zip(active, xs, strict=True):
            full[k] = x
        return f(*tree.unflatten(treedef, full))

    fun.__name__ = name_of(f)
    paths = tree.paths(tuple(args))  # type: ignore[arg-type]
    names = [f"number {paths[k][0]}" + "".join(f"[{p!r}]" for p in paths[k][1:]) for k in active]
    return fun, [leaves[k] for k in active], names


def _compare_values(f: Callable, traced: list, bare: list, eps: float) -> None:
    """Raise where a function gives something else traced than bare."""
    if len(traced) != len(bare):
        raise _failure(f, "result", f"{len(traced)} arrays where traced", f"{len(bare)}, as where not")
    for k, (y, plain) in enumerate(zip(map(value_of, traced), map(value_of, bare), strict=True)):
        if kind_of(y) not in ("f", "c"):
            continue
        bound = min(1e3 * eps, eps**0.5)
        if not np.allclose(_wide(y), _wide(plain), rtol=bound, atol=bound, equal_nan=True):
            mend = "make f deterministic if it draws numbers; else correct its composition or its rule"
            raise _failure(f, f"result {k}", f"{y} where traced", f"{plain}, as where not", mend)


def _compare_types(f: Callable, paths: Sequence[str], xs: Sequence[Any], arg_cotangents: Sequence[Any]) -> None:
    """Raise where a cotangent has another shape or dtype than its argument."""
    for path, x, p in zip(paths, xs, arg_cotangents, strict=True):
        have, need = (np.shape(p), getattr(p, "dtype", None)), (np.shape(x), getattr(x, "dtype", None))
        if have[0] != need[0] or (need[1] is not None and have[1] != need[1]):
            raise _failure(f, path, f"a cotangent {have[1]}{list(have[0])}", f"{need[1]}{list(need[0])}")


class _Point(NamedTuple):
    """A function at the checked point: argument paths and values, results, their cotangents, directions, and the
    cotangents of the arguments."""

    fun: Callable
    paths: list[str]
    xs: list
    ys: list
    gs: list
    vs: list
    arg_cotangents: Sequence[Any]

    @property
    def scale(self) -> float:
        """The sum of the sizes of all terms, by which errors are measured."""
        sizes = [(g, y) for g, y in zip(self.gs, self.ys, strict=True) if _counts(g)]
        moved = [np.abs(_wide(v)) + np.abs(_wide(x)) for v, x in zip(self.vs, self.xs, strict=True)]
        sizes += zip(self.arg_cotangents, moved, strict=True)
        return sum(_dot(np.abs(_wide(a)), np.abs(_wide(b))) for a, b in sizes)


def _in_double(point: _Point) -> _Point | None:
    """The point in double precision; None if the function does not compute in it."""
    xs, gs, vs = ([_wide(x) for x in some] for some in (point.xs, point.gs, point.vs))
    try:
        value, pull = vjp(point.fun, *xs)
        ys, out_tree = tree.flatten(value)
        if _coarsest(ys) > _DOUBLE:
            return None
        return point._replace(xs=xs, ys=ys, gs=gs, vs=vs, arg_cotangents=pull(tree.unflatten(out_tree, gs)))
    except DifferentiationError:
        return None


def _check_direction(point: _Point, atol: float, rtol: float, h: float) -> None:
    """Compare the pullback along the directions with a finite difference of step h."""
    fun, _, xs, _, gs, *_ = point

    def paired(these: list, those: list) -> float:
        pairs = zip(gs, these, those, strict=True)
        return sum(_dot(g, _wide(a) - _wide(b)) for g, a, b in pairs if _counts(g))

    def compare(vs: list, h: float) -> tuple[float, float, float, float]:
        """The derivative by finite difference and by the pullback, the error allowed, and by how much slopes differ."""
        over, middle, under = (
            tree.leaves(fun(*(_moved(x, s * h, v) for x, v in zip(xs, vs, strict=True)))) for s in (1, 0, -1)
        )
        scale = point._replace(vs=vs).scale
        exact = sum(_dot(p, v) for p, v in zip(point.arg_cotangents, vs, strict=True))
        bend = (paired(over, middle) - paired(middle, under)) / h
        return paired(over, under) / (2 * h), exact, atol + rtol * scale, abs(bend)

    for step in (h, h / 10):  # the smaller one where third derivatives are large
        numeric, exact, bound, _ = compare(point.vs, step)
        if abs(numeric - exact) <= bound:
            return
    alone = [compare([v if i == k else 0 * v for i, v in enumerate(point.vs)], h) for k in range(len(xs))]
    k = max(range(len(xs)), key=lambda k: _excess(*alone[k][:3]))
    numeric, exact, bound, bend = alone[k]
    raise _failure(
        fun,
        point.paths[k],
        f"{exact:.10g} by the pullback",
        f"{numeric:.10g} by finite difference, within {bound:.2g}",
        "move to a place where neither f nor its pullback is NaN"
        if numeric != numeric or exact != exact
        else "correct the derivative rule"
        if bend < abs(numeric - exact) / 2
        else f"move away from a kink or a jump within {h:.1g} of the arguments, or from a cast to a coarser dtype; "
        "if there is none, correct the derivative rule",
    )


def _compare_precisions(point: _Point, wide: _Point, atol: float, rtol: float) -> None:
    """Raise if the pullback in lower precision differs from the one in double precision."""
    bound = atol + rtol * wide.scale
    for path, p, w, v in zip(point.paths, point.arg_cotangents, wide.arg_cotangents, wide.vs, strict=True):
        if not float(np.sum(np.abs(_wide(p) - w) * np.abs(v))) <= bound:
            raise _failure(point.fun, path, f"{p} by the pullback", f"{w}, that in double, within {bound:.2g}")


def _check_jvp(f: Callable, args: Sequence[Any], seed: int) -> None:
    """Raise where jvp and the pullback are not transposes of each other: Re Σ g jvp(v) = Re Σ pull(g) v."""
    fun, xs, paths = _reduced(f, args)
    rng = np.random.default_rng(seed)
    value, pull = vjp(fun, *xs)
    ys, out_tree = tree.flatten(value)
    gs, vs = [_random_like(rng, y) for y in ys], [_random_like(rng, x) for x in xs]
    arg_cotangents = pull(tree.unflatten(out_tree, gs))
    pushed = tree.leaves(jvp(fun, xs, vs)[1])
    forward = sum(_dot(g, t) for g, t in zip(gs, pushed, strict=True) if _counts(g))
    backward = sum(_dot(p, v) for p, v in zip(arg_cotangents, vs, strict=True))
    bound = _coarsest([*xs, *ys]) ** 0.5 * _Point(fun, paths, xs, ys, gs, vs, arg_cotangents).scale
    if not abs(forward - backward) <= bound:
        raise _failure(
            f, "the tangent", f"{forward:.10g} by jvp", f"{backward:.10g} by the pullback, within {bound:.2g}"
        )


def _eps(x) -> float:
    """The spacing of floating numbers at 1 in the dtype of x."""
    return spacing(getattr(x, "dtype", np.dtype(float)))


def _coarsest(arrays) -> float:
    return max((_eps(x) for x in arrays if kind_of(x) in ("f", "c")), default=_DOUBLE)


def _wide(x):
    """x in double precision."""
    x = value_of(x)
    kind = kind_of(x)
    if kind not in ("f", "c") or not hasattr(x, "dtype"):
        return x
    return x.astype(float if kind == "f" else complex, copy=False)  # a global array stays split


def _random_like(rng, x):
    """Random numbers of x's shape and dtype, of size about one, laid out as x; of an integer zeros of dtype float0.

    Each process draws all of them, so that they depend neither on the layout nor on the transport.
    """
    kind = kind_of(x)
    if kind not in ("f", "c"):
        return zeros_like(x) if kind == "i" else x
    numbers = rng.uniform(0.5, 1, np.shape(x)) * rng.choice([-1, 1], np.shape(x))
    if kind == "c":
        numbers = numbers * np.exp(2j * np.pi * rng.uniform(size=np.shape(x)))
    numbers = np.asarray(numbers).astype(getattr(x, "dtype", type(x)))
    return np.asarray(numbers, like=x) if hasattr(x, "__array_function__") else numbers


def _counts(g) -> bool:
    return getattr(g, "dtype", None) != float0


def _moved(x, h: float, v):
    """x + h v, still an array where it has no dimensions."""
    step = h * v
    return np.asarray(x + step) if isinstance(x, np.ndarray) else x + step


def _dot(a, b) -> float:
    """Re Σ a b, in double precision. Of global arrays each worker multiplies its blocks."""
    return float(np.real(np.sum(_wide(a) * _wide(b))))


def _excess(numeric: float, exact: float, bound: float) -> float:
    error = abs(numeric - exact) / bound if bound else 0.0
    return error if error == error else np.inf


def _failure(f, argument: str, got: str, need: str, mend: str = "correct the derivative rule") -> AssertionError:
    return AssertionError(message(f"check_vjp of {name_of(f)}", argument=argument, got=got, need=need, mend=mend))
