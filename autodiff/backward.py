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
from spmd.autodiff.dropping import recorded_args
from spmd.autodiff.dtypes import cotangent_dtype
from spmd.autodiff.sanitizers import FINITE, Watched, check_finite
from spmd.autodiff.staging.recorder import one_line
from spmd.autodiff.tape import STEP, Arriving, Bundle, Future, Like, Node, Tape, underscored
from spmd.errors import DifferentiationError

__all__ = ["fit", "is_sole_owner", "sweep", "unbroadcast"]


def unbroadcast(g, shape: tuple[int, ...]):
    """The transpose of broadcasting `shape` to the shape of g: sum over the dimensions that were added or stretched."""
    extra = g.ndim - len(shape)
    if extra > 0 and shape and type(g) is np.ndarray and g.shape[extra:] == shape:  # the common case: a bias
        return _total(g, 0 if extra == 1 else tuple(range(extra)))
    if extra < 0 or any(n not in (1, m) for n, m in zip(shape, g.shape[extra:], strict=True)):
        raise DifferentiationError.at(
            "the backward sweep",
            got=f"a cotangent of shape {list(g.shape)} for a value of shape {list(shape)}",
            need="the shape of the value, or one that the value broadcasts to",
            mend="return cotangents of the arguments' shapes from the backward function (custom_vjp, an operator's H)",
        )
    stretched = tuple(i + extra for i, n in enumerate(shape) if n == 1 and g.shape[i + extra] != 1)
    axes = tuple(range(extra)) + stretched
    return np.reshape(_total(g, axes), shape) if axes else np.reshape(g, shape)


def _total(g, axes: int | tuple[int, ...]):
    """The sum over axes, rounded once."""
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
    """The cotangents of `leaves`, given those of some results; None where no cotangent arrives.

    With `free` the sweep drops each node after its use; the tape then serves once.
    A primitive may defer the cotangent of a leaf (`defer`); the sweep waits for all of them at the end.
    """
    nodes = tape.nodes
    if type(nodes) is Watched:
        nodes.check()
    cotangents = Cotangents(nodes)
    for node, g in seeds:
        cotangents.add(node, g)
    by_node = cotangents.by_node
    top_of_heap = _top_of_heap(nodes) if free else None
    try:
        for node in map(nodes.pop, itertools.repeat(-1, len(nodes))) if free else reversed(nodes):
            if node.prim is None:
                continue
            if node in by_node:
                if node.prim.plain:
                    _pull(node, by_node.pop(node), cotangents)
                else:
                    _pull_special(node, cotangents, free)
            if free:
                node.args, node.parents = None, ()
    except AttributeError as error:
        if isinstance(error.obj, Like):
            raise AttributeError(underscored(f".{error.name}")) from None
        raise
    del top_of_heap
    if tape.dropped is not None:
        tape.dropped.swept()
    return cotangents.of_leaves(leaves)


class Cotangents:
    """The cotangents of a sweep: for each node the sum of those that have arrived.

    by_node: the sums. owned: the nodes whose sum is a large array of this sweep, to which more is added in place.
    deferred: by leaf, the cotangents that arrive later. sweep_state: what their primitives keep during the sweep.
    kinds: the numbers that `spmd.debug` looks for.
    """

    __slots__ = ("by_node", "deferred", "kinds", "nodes", "owned", "sweep_state")

    def __init__(self, nodes: list[Node]):
        self.nodes = nodes
        self.kinds = FINITE.get()
        self.by_node: dict[Node, Any] = {}
        self.owned: set[Node] = set()
        self.deferred: dict[Node, list[Future | Arriving]] = {}
        self.sweep_state: dict[Any, Any] = {}

    def add(self, node: Node, g: Any) -> None:
        """Add a cotangent to which there may be other references."""
        if type(g) is not np.ndarray or g.dtype is not node.dtype or g.shape != node.shape:
            g = fit(g, node)
        old = self.by_node.get(node)
        if old is None:
            self.by_node[node] = g
        elif node in self.owned and type(g) is np.ndarray:
            old += g
        else:
            total = self.by_node[node] = _sum(old, g)
            self.owned.discard(node)
            if type(total) is np.ndarray and total.nbytes > INPLACE_MIN:
                self.owned.add(node)

    def receive(self, parent: Node, h: Any, reused: bool) -> None:
        """Add the result of a rule, to which the caller has one reference. If there is no other, add in place.

        reused: whether a rule may add to the array later."""
        old = self.by_node.get(parent)
        if type(h) is not np.ndarray or h.dtype is not parent.dtype or h.shape != parent.shape:
            self.add(parent, h)
        elif old is None:
            self.by_node[parent] = h
            if reused and h.nbytes > INPLACE_MIN and is_sole_owner(getrefcount(h) - 2, h):
                self.owned.add(parent)
        elif (
            parent not in self.owned
            and type(old) is np.ndarray
            and h.nbytes > INPLACE_MIN
            and is_sole_owner(getrefcount(h) - 1, h)
        ):
            h += old
            self.by_node[parent] = h
            self.owned.add(parent)
        else:
            old = None
            self.add(parent, h)

    def expect(self, node: Node, arriving: Arriving) -> None:
        """Add a cotangent that has not arrived: that of a leaf at the end, others now."""
        if node.prim is None and node.place is not STEP:
            self.deferred.setdefault(node, []).append(arriving)
        else:
            self.add(node, arriving.wait())

    def check(self, h: Any, node: Node) -> None:
        """Raise if the result of a rule is None, or holds what `spmd.debug` looks for."""
        if h is None:
            raise _none_from_rule(node.prim)
        if self.kinds:
            check_finite(h, self.kinds, partial(_describe_gradient, node.prim, node, self.nodes))

    def of_leaves(self, leaves: list[Node]) -> list[Any]:
        """The cotangents of the leaves; waits for those that arrive later."""
        for node in leaves:
            for future in self.deferred.get(node, ()):
                self.add(node, future.wait())
        return [self.by_node.get(node) for node in leaves]


def _pull(node: Node, g: Any, cotangents: Cotangents) -> None:
    """Give the parents of a node their cotangents, by rules that only compute."""
    args, parents, by_node = node.args, node.parents, cotangents.by_node
    if args is None:
        raise _freed_tape()
    if type(g) is Bundle:
        g = g.filled(node.results)
    for k, pull in enumerate(node.pulls):
        try:
            if node.kwargs:
                h = pull(g, *args, **node.kwargs)
            else:
                h = pull(g, args[0], args[1]) if len(args) == 2 else pull(g, *args)
        except Exception as error:
            h = cupy_fallback.retry_rule(pull, (g, *args), node.kwargs, error)
        if h is None or cotangents.kinds:
            cotangents.check(h, node)
        parent = parents[k]
        if parent not in by_node and type(h) is np.ndarray and h.dtype is parent.dtype and h.shape == parent.shape:
            by_node[parent] = h  # `receive`, inlined for the common case
        else:
            cotangents.receive(parent, h, False)


def _pull_special(node: Node, cotangents: Cotangents, free: bool) -> None:
    """Give the parents of a node their cotangents, by rules with an option: see `joint`, `sums`, `defer`, `over`,
    `into` and `early` of `Primitive`."""
    prim, args, pulls, parents, g = node.prim, node.args, node.pulls, node.parents, cotangents.by_node.pop(node)
    if args is None:
        raise _freed_tape()
    if prim.sums:
        arrived = [(parent, cotangents.by_node.get(parent)) for parent in parents]
        for parent, total in zip(parents, prim.joint(g, arrived, *args[1:]), strict=True):
            if parent is not None and total is not None:
                cotangents.by_node[parent] = fit(total, parent)
                cotangents.owned.discard(parent)
    elif prim.joint is not None:
        for parent, part in zip(parents, prim.joint(g, *args[1:]), strict=True):
            if parent is not None and part is not None:
                (cotangents.expect if type(part) is Arriving else cotangents.add)(parent, part)
    elif type(g) is Bundle:
        g = g.filled(node.results)
    over = prim.over if prim.over is not None and type(g) is np.ndarray and is_sole_owner(getrefcount(g), g) else None
    dropped = None
    if prim.early and free and len(pulls) == 2:
        dropped, pulls, parents = parents[0], pulls[::-1], parents[::-1]
    for k, pull in enumerate(pulls):
        parent = parents[k]
        if prim.defer is not None and parent.prim is None and parent.place is not STEP:
            future = prim.defer(cotangents.sweep_state, g, parent, *args[1:])
            if future is not None:
                cotangents.deferred.setdefault(parent, []).append(future)
                g = h = None  # The future now has the only references to its terms.
                future.begin()
                continue
        if prim.into is not None and type(g) is np.ndarray:
            h, old = None, cotangents.by_node.get(parent)  # h may be the same array: drop that reference
            if parent in cotangents.owned or (type(old) is np.ndarray and is_sole_owner(getrefcount(old) - 1, old)):
                prim.into(old, g, *args)
                continue
            old = None
        try:
            h = (pull if over is None else over)(g, *args, **node.kwargs)
        except Exception as error:
            if prim.joint is not None or prim.defer is not None:  # communication is not repeated
                raise
            h = cupy_fallback.retry_rule(pull, (g, *args), node.kwargs, error)
        if dropped is not None:  # the next rule needs only the shape of the first argument
            args = node.args = (args[0], dropped, *args[2:])
            dropped = None
        if h is None or cotangents.kinds:
            cotangents.check(h, node)
        cotangents.receive(parent, h, prim.into is not None)


def _describe_gradient(prim, node: Node, nodes: list[Node]) -> str:
    where = nodes.places.get(id(node)) if type(nodes) is Watched else None
    return f"the gradient of {prim.name}" + (f", recorded at {where}" if where else "")


def _sum(a, b):
    """a + b; an array of the host moves to the device of the other."""
    try:
        return a + b
    except TypeError as error:
        return cupy_fallback.retry(operator.add, [a, b], {}, error, "the backward sweep")


INPLACE_MIN = 1 << 16
"""Bytes above which cotangents are summed in place."""


def _top_of_heap(nodes: list[Node]) -> np.ndarray | None:
    """The large array that the last nodes keep, if it lies on the heap of the C library.

    It lies at the top of the heap. If it is freed first, malloc trims the heap with each later array, and new arrays
    fault the pages in again. Arrays of the memory pool lie elsewhere."""
    for node in nodes[:-5:-1]:
        for x in recorded_args(node):
            if type(x) is np.ndarray and x.nbytes > INPLACE_MIN and x.flags.owndata:
                return x
    return None


def _sole_owner_count() -> int:
    h = np.zeros(())
    return getrefcount(h)


_SOLE_OWNER = min(_sole_owner_count(), 2)
"""The reference count of an array to which one local variable refers, and nothing else (no debugger, say)."""


def is_sole_owner(count: int, h: np.ndarray) -> bool:
    """Whether one local variable has the only reference to h, by the count that the caller took, and h is writable."""
    return count == _SOLE_OWNER and owns_memory(h) and h.flags.writeable


def _none_from_rule(prim) -> Exception:
    return DifferentiationError.at(
        f"the backward sweep, at {prim.name}",
        got="None from a derivative rule",
        need="the cotangent of the argument",
        mend="return it; zero is np.zeros_like(x), and an argument without derivative has None in place of a rule",
    )


def _freed_tape() -> Exception:
    return DifferentiationError.at(
        "a backward sweep",
        got="a tape that has been freed by grad or value_and_grad",
        need="a tape that was kept",
        mend="use vjp: its pullback may be called many times",
    )
