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
from spmd.errors import DifferentiationError

__all__ = ["alone", "fit", "sweep", "unbroadcast"]


def unbroadcast(g, shape: tuple[int, ...]):
    """The transpose of broadcasting `shape` to the shape of g: sum over the dimensions that were added or stretched."""
    extra = g.ndim - len(shape)
    if extra > 0 and shape and type(g) is np.ndarray and g.shape[extra:] == shape:  # as most often, of a bias
        return _total(g, 0 if extra == 1 else tuple(range(extra)))
    if extra < 0 or any(n not in (1, m) for n, m in zip(shape, g.shape[extra:], strict=True)):
        raise DifferentiationError.at(
            "the backward sweep",
            got=f"a cotangent of shape {list(g.shape)} for a value of shape {list(shape)}",
            need="the shape of the value, or one that the value broadcasts to",
            mend="let the backward function (custom_vjp, an operator's H) return cotangents as its arguments are",
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
    nodes = tape.nodes
    if type(nodes) is Watched:
        nodes.check()
    cotangents = Cotangents(nodes)
    for node, g in seeds:
        cotangents.add(node, g)
    of = cotangents.of
    topmost = _topmost(nodes) if free else None
    try:
        for node in map(nodes.pop, itertools.repeat(-1, len(nodes))) if free else reversed(nodes):
            if node.prim is None:
                continue
            if node in of:
                if node.prim.plain:
                    _pull(node, of.pop(node), cotangents)
                else:
                    _pull_specially(node, cotangents, free)
            if free:
                node.args, node.parents = None, ()
    except AttributeError as error:
        if isinstance(error.obj, Like):
            raise AttributeError(underscored(f".{error.name}")) from None
        raise
    del topmost
    return cotangents.of_leaves(leaves)


class Cotangents:
    """The cotangents of a sweep, each the sum of what has come for its node so far, and who may write into it.

    of: by node. own: the nodes of which the sum is a large array that was made here, so that more is added in place.
    owed: what leaves will get, by leaf; shared: what all debts have in common. kinds: what `spmd.debug` looks for.
    """

    __slots__ = ("kinds", "nodes", "of", "owed", "own", "shared")

    def __init__(self, nodes: list[Node]):
        self.nodes = nodes
        self.kinds = FINITE.get()
        self.of: dict[Node, Any] = {}
        self.own: set[Node] = set()
        self.owed: dict[Node, list[Future]] = {}
        self.shared: dict[Any, Any] = {}

    def add(self, node: Node, g: Any) -> None:
        """Add a cotangent that others may hold too."""
        if type(g) is not np.ndarray or g.dtype is not node.dtype or g.shape != node.shape:
            g = fit(g, node)
        old = self.of.get(node)
        if old is None:
            self.of[node] = g
        elif node in self.own and type(g) is np.ndarray:
            old += g
        else:
            total = self.of[node] = _sum(old, g)
            self.own.discard(node)
            if type(total) is np.ndarray and total.nbytes > LARGE:
                self.own.add(node)

    def receive(self, parent: Node, h: Any, reused: bool) -> None:
        """Add what a rule has given, which a variable of the caller's holds: where nobody else does, the other addend
        is added to it, in place. reused: whether a rule may add to the array later."""
        old = self.of.get(parent)
        if type(h) is not np.ndarray or h.dtype is not parent.dtype or h.shape != parent.shape:
            self.add(parent, h)
        elif old is None:
            self.of[parent] = h
            if reused and h.nbytes > LARGE and alone(getrefcount(h) - 2, h):
                self.own.add(parent)
        elif parent not in self.own and type(old) is np.ndarray and h.nbytes > LARGE and alone(getrefcount(h) - 1, h):
            h += old
            self.of[parent] = h
            self.own.add(parent)
        else:
            old = None
            self.add(parent, h)

    def check(self, h: Any, node: Node) -> None:
        """Raise where a rule has given what `spmd.debug` looks for, or nothing."""
        if h is None:
            raise _nothing(node.prim)
        if self.kinds:
            check_finite(h, self.kinds, partial(_gradient_of, node.prim, node, self.nodes))

    def of_leaves(self, leaves: list[Node]) -> list[Any]:
        """Those of the leaves, when all debts are paid."""
        for node in leaves:
            for debt in self.owed.get(node, ()):
                self.add(node, debt.wait())
        return [self.of.get(node) for node in leaves]


def _pull(node: Node, g: Any, cotangents: Cotangents) -> None:
    """Give the parents of a node their cotangents, by rules that only compute."""
    args, parents, of = node.args, node.parents, cotangents.of
    if args is None:
        raise _freed()
    if type(g) is Bundle:
        g = g.filled(node.results)
    for k, pull in enumerate(node.pulls):
        try:
            if node.kwargs:
                h = pull(g, *args, **node.kwargs)
            else:
                h = pull(g, args[0], args[1]) if len(args) == 2 else pull(g, *args)
        except Exception as error:
            h = cupy_fallback.pulled_again(pull, (g, *args), node.kwargs, error)
        if h is None or cotangents.kinds:
            cotangents.check(h, node)
        parent = parents[k]
        if parent not in of and type(h) is np.ndarray and h.dtype is parent.dtype and h.shape == parent.shape:
            of[parent] = h  # as `receive` does, for the case that counts
        else:
            cotangents.receive(parent, h, False)


def _pull_specially(node: Node, cotangents: Cotangents, free: bool) -> None:
    """Give the parents of a node their cotangents, by rules that send, that write over the cotangent of the result
    (`over`) or add to that of a parent (`into`), or need less than all arguments (`early`)."""
    prim, args, pulls, parents, g = node.prim, node.args, node.pulls, node.parents, cotangents.of.pop(node)
    if args is None:
        raise _freed()
    if prim.joint is not None:
        for parent, part in zip(parents, prim.joint(g, *args[1:]), strict=True):
            if parent is not None and part is not None:
                cotangents.add(parent, part)
    elif type(g) is Bundle:
        g = g.filled(node.results)
    over = prim.over if prim.over is not None and type(g) is np.ndarray and alone(getrefcount(g), g) else None
    dropped = None
    if prim.early and free and len(pulls) == 2:
        dropped, pulls, parents = parents[0], pulls[::-1], parents[::-1]
    for k, pull in enumerate(pulls):
        parent = parents[k]
        if prim.owe is not None and parent.prim is None:
            debt = prim.owe(cotangents.shared, g, parent, *args[1:])
            if debt is not None:
                cotangents.owed.setdefault(parent, []).append(debt)
                g = h = None  # Of what is owed nobody else has the terms now.
                debt.begin()
                continue
        if prim.into is not None and type(g) is np.ndarray:
            h, old = None, cotangents.of.get(parent)  # which h may be
            if parent in cotangents.own or (type(old) is np.ndarray and alone(getrefcount(old) - 1, old)):
                prim.into(old, g, *args)
                continue
            old = None
        try:
            h = (pull if over is None else over)(g, *args, **node.kwargs)
        except Exception as error:
            if prim.joint is not None or prim.owe is not None:  # what sends is not done twice
                raise
            h = cupy_fallback.pulled_again(pull, (g, *args), node.kwargs, error)
        if dropped is not None:  # The next rule asks for no more of the first argument than for its shape.
            args = node.args = (args[0], dropped, *args[2:])
            dropped = None
        if h is None or cotangents.kinds:
            cotangents.check(h, node)
        cotangents.receive(parent, h, prim.into is not None)


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
    return DifferentiationError.at(
        f"the backward sweep, at {prim.name}",
        got="None from a derivative rule",
        need="the cotangent of the argument",
        mend="return it; zero is np.zeros_like(x), and an argument without derivative has None in place of a rule",
    )


def _freed() -> Exception:
    return DifferentiationError.at(
        "a backward sweep",
        got="a tape that has been freed by grad or value_and_grad",
        need="a tape that was kept",
        mend="use vjp: its pullback may be called many times",
    )
