"""The backward sweep: cotangents from results to leaves, in the reverse order of the tape."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from functools import partial
from sys import getrefcount
from typing import Any

import numpy as np

from spmd.autodiff import cupy_fallback
from spmd.autodiff.admission import admit
from spmd.autodiff.allocation import owns_memory
from spmd.autodiff.dtypes import cotangent_dtype
from spmd.autodiff.sanitizers import FINITE, Watched, check_finite
from spmd.autodiff.staging.recorder import one_line
from spmd.autodiff.tape import Bundle, Future, Like, Node, Tape, underscored
from spmd.errors import DifferentiationError, message

__all__ = ["alone", "fit", "sweep", "unbroadcast"]


def unbroadcast(g, shape: tuple[int, ...]):
    """The transpose of broadcasting `shape` to the shape of g: sum over the dimensions that were added or stretched."""
    extra = g.ndim - len(shape)
    if extra > 0 and shape and type(g) is np.ndarray and g.shape[extra:] == shape:  # as most often, of a bias
        return _total(g, 0 if extra == 1 else tuple(range(extra)))
    if extra < 0 or any(n not in (1, m) for n, m in zip(shape, g.shape[extra:], strict=True)):
        raise DifferentiationError(
            message(
                "the backward sweep",
                got=f"a cotangent of shape {list(g.shape)} for a value of shape {list(shape)}",
                need="the shape of the value, or one that the value broadcasts to",
                mend="let the backward function (custom_vjp, an operator's H) return cotangents as its arguments are",
            )
        )
    stretched = tuple(i + extra for i, n in enumerate(shape) if n == 1 and g.shape[i + extra] != 1)
    axes = tuple(range(extra)) + stretched
    return np.reshape(_total(g, axes), shape) if axes else np.reshape(g, shape)


def _total(g, axes: int | tuple[int, ...]):
    """The sum over dimensions, rounded once."""
    wide = cotangent_dtype(g.dtype)
    if wide is not None:
        return np.sum(g, axis=axes, dtype=wide).astype(g.dtype)
    return np.add.reduce(g, axis=axes) if type(g) is np.ndarray else np.sum(g, axis=axes)


def fit(g, node):
    """Bring a cotangent to the shape and dtype of its node: undo broadcasting, complex promotion and casts."""
    if type(g) is Bundle:
        return g
    if not hasattr(g, "dtype"):
        g = one_line(np.asarray, (g,))
    if isinstance(g, np.ndarray) and type(g) is not np.ndarray:
        g = np.asarray(admit(g, "the backward sweep", "the cotangent"))
    if g.shape != node.shape:
        g = unbroadcast(g, node.shape)
    dtype = node.dtype
    if g.dtype is not dtype:
        if g.dtype.kind == "c" and (dtype is None or dtype.kind != "c"):
            g = np.real(g)
        if dtype is not None and g.dtype != dtype:
            g = g.astype(dtype)
    return g


def sweep(tape: Tape, seeds: Iterable[tuple[Node, Any]], leaves: list[Node], *, free: bool) -> list[Any]:
    """The cotangents of `leaves`, given those of some results; None where no cotangent reaches.

    With `free`, nodes are dropped as the sweep passes, so that memory falls as it goes; the tape serves once.
    A primitive may owe a leaf its cotangent (`owe`): the sweep goes on, and waits for all debts at the end.
    """
    nodes, bare = tape.nodes, np.ndarray
    if type(nodes) is Watched:
        nodes.check()
    kinds = FINITE.get()
    cotangents: dict[Node, Any] = {}
    owed: dict[Node, list[Future]] = {}
    shared: dict[Any, Any] = {}
    own: set[Node] = set()  # where a large sum stands that was made here, so that more can be added in place

    def add(node: Node, g) -> None:
        if type(g) is not bare or g.dtype is not node.dtype or g.shape != node.shape:
            g = fit(g, node)
        old = cotangents.get(node)
        if old is None:
            cotangents[node] = g
        elif node in own and type(g) is bare:
            old += g
        else:
            total = cotangents[node] = _sum(old, g)
            own.discard(node)
            if type(total) is bare and total.nbytes > LARGE:
                own.add(node)

    for node, g in seeds:
        add(node, g)
    topmost = _topmost(nodes) if free else None
    try:
        for node in map(nodes.pop, itertools.repeat(-1, len(nodes))) if free else reversed(nodes):
            prim = node.prim
            if prim is None:
                continue
            g = cotangents.pop(node, None)
            if g is not None:
                args, kwargs, parents = node.args, node.kwargs, node.parents
                if args is None:
                    raise _freed()
                plain = prim.plain
                if not plain and prim.joint is not None:
                    for parent, part in zip(parents, prim.joint(g, *args[1:]), strict=True):
                        if parent is not None and part is not None:
                            add(parent, part)
                elif type(g) is Bundle:
                    g = g.filled(node.results)
                pulls, over, done = node.pulls, None, None
                if not plain:
                    if prim.over is not None and type(g) is bare:
                        h = old = None  # which may be g
                        if alone(getrefcount(g), g):
                            over = prim.over
                    if prim.early and free and len(pulls) == 2:
                        done, pulls, parents = parents[0], pulls[::-1], parents[::-1]
                k = 0
                for pull in pulls:
                    parent = parents[k]
                    k += 1
                    if not plain:
                        if prim.owe is not None and parent.prim is None:
                            debt = prim.owe(shared, g, parent, *args[1:])
                            if debt is not None:
                                owed.setdefault(parent, []).append(debt)
                                g = h = old = None
                                debt.begin()
                                continue
                        if prim.into is not None and type(g) is bare:
                            h, old = None, cotangents.get(parent)  # which h may be
                            if parent in own or (type(old) is bare and alone(getrefcount(old) - 1, old)):
                                prim.into(old, g, *args)
                                continue
                    try:
                        if over is not None:
                            h = over(g, *args, **kwargs)
                        elif kwargs:
                            h = pull(g, *args, **kwargs)
                        elif len(args) == 2:
                            h = pull(g, args[0], args[1])
                        else:
                            h = pull(g, *args)
                    except Exception as error:
                        if prim.joint is not None or prim.owe is not None:  # what sends is not done twice
                            raise

                        h = cupy_fallback.pulled_again(pull, (g, *args), kwargs, error)
                    if done is not None:  # The next rule asks for no more of the first argument than for its shape.
                        args = node.args = (args[0], done, *args[2:])
                        done = None
                    if kinds and h is not None:
                        check_finite(h, kinds, partial(_gradient_of, prim, node, nodes))
                    old = cotangents.get(parent)
                    if type(h) is not bare or h.dtype is not parent.dtype or h.shape != parent.shape:
                        if h is None:
                            raise _nothing(prim)
                        add(parent, h)
                    elif old is None:  # as in `add`, for the case that counts
                        cotangents[parent] = h
                        if not plain and prim.into is not None and h.nbytes > LARGE and alone(getrefcount(h) - 1, h):
                            own.add(parent)
                    elif parent not in own and type(old) is bare and h.nbytes > LARGE and alone(getrefcount(h), h):
                        h += old  # nobody else holds h
                        cotangents[parent] = h
                        own.add(parent)
                        old = None
                    else:
                        old = None
                        add(parent, h)
            if free:
                node.args, node.parents = None, ()
    except AttributeError as error:
        if isinstance(error.obj, Like):
            raise AttributeError(underscored(f".{error.name}")) from None
        raise
    g = h = old = None  # Of what is owed nobody else has the terms now.
    for node in leaves:
        for debt in owed.get(node, ()):
            add(node, debt.wait())
    del topmost
    return [cotangents.get(node) for node in leaves]


def _gradient_of(prim, node: Node, nodes: list[Node]) -> str:
    where = nodes.places.get(id(node)) if type(nodes) is Watched else None
    return f"the gradient of {prim.name}" + (f", recorded at {where}" if where else "")


def _sum(a, b):
    """a + b; what is of the host goes to the device of the other."""
    try:
        return a + b
    except TypeError as error:
        return cupy_fallback.again(operator.add, [a, b], {}, error, "the backward sweep")


LARGE = 1 << 16
"""Bytes from which a sum of cotangents is worth adding to in place."""


def _topmost(nodes: list[Node]) -> np.ndarray | None:
    """The large array of the C library's heap that was kept last. It lies at the top; were it freed first, the library
    would give the memory beneath back to the system with every array that follows, and the next arrays would fault it
    in again. Arrays of recycled memory lie elsewhere, and are let go of."""
    for node in nodes[:-5:-1]:
        for x in node.args:
            if type(x) is np.ndarray and x.nbytes > LARGE and x.flags.owndata:
                return x
    return None


def _count_alone() -> int:
    h = np.zeros(())
    return getrefcount(h)


_ALONE = min(_count_alone(), 2)
"""The reference count of an array that a variable of one function holds, and nothing else: no debugger, say."""


def alone(count: int, h: np.ndarray) -> bool:
    """Whether an array of this reference count, taken first, is held by one variable only and may be written into."""
    return count == _ALONE and owns_memory(h) and h.flags.writeable


def _nothing(prim) -> Exception:
    return DifferentiationError(
        message(
            f"the backward sweep, at {prim.name}",
            got="None from a derivative rule",
            need="the cotangent of the argument",
            mend="return it; zero is np.zeros_like(x), and an argument without derivative has None in place of a rule",
        )
    )


def _freed() -> Exception:
    return DifferentiationError(
        message(
            "a backward sweep",
            got="a tape that has been freed by grad or value_and_grad",
            need="a tape that was kept",
            mend="use vjp: its pullback may be called many times",
        )
    )
