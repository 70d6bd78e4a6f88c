"""The lines of a program, and a program as Python: one function, without branches, that does them in order."""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff.allocation import product

__all__ = ["COMM", "Built", "Like", "Line", "Ref", "done", "mapped", "refs", "within"]

LARGE = 1 << 16
"""Bytes from which memory of an operand that nobody needs any more is worth being written over."""


class Ref:
    """A value in a line of a program: by its number."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


def within(tree: Any, kind: type, into: list[Any] | None = None) -> list[Any]:
    """What is of a class in nested tuples, lists, dicts and slices."""
    found: list[Any] = [] if into is None else into
    if isinstance(tree, kind):
        found.append(tree)
    elif isinstance(tree, tuple | list):
        for t in tree:
            within(t, kind, found)
    elif isinstance(tree, dict):
        for t in tree.values():
            within(t, kind, found)
    elif isinstance(tree, slice):
        within((tree.start, tree.stop, tree.step), kind, found)
    return found


def mapped(tree: Any, f: Callable[[Any], Any]) -> Any:
    """Nested tuples, lists, dicts and slices with f of what is in them."""
    if isinstance(tree, tuple | list):
        kind, parts = type(tree), [mapped(t, f) for t in tree]
        return kind(*parts) if hasattr(tree, "_fields") else kind(parts)  # pyright: ignore[reportCallIssue]
    if isinstance(tree, dict):
        return {k: mapped(v, f) for k, v in tree.items()}
    if isinstance(tree, slice):
        return slice(*(mapped(t, f) for t in (tree.start, tree.stop, tree.step)))
    return f(tree)


def refs(tree: Any) -> list[int]:
    """The numbers of the values in nested tuples, lists, dicts and slices."""
    return [r.index for r in within(tree, Ref)]


class _Comm:
    """Among the arguments of a line: the communicator of the worker that does it."""

    def __repr__(self) -> str:
        return "comm"


COMM = _Comm()


class Line(NamedTuple):
    """One call. form: "call", "method", "attribute", "item" or "put". used: the numbers of the values in its arguments.
    parts: where in the result values lie, and their numbers. effect: it is done even if nobody takes the result.
    writes: it writes into its first argument, or into out.
    fresh: the result is an array of its own. gives: the last argument is a list of values, which are let go of before
    the call where nobody else needs them. errors: how NumPy treats errors there, where that differs. place: whose line
    of the user's it is."""

    form: str
    fun: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    used: list[int]
    parts: list[tuple[tuple[int, ...], int]]
    effect: bool
    writes: bool
    fresh: bool
    gives: bool
    errors: Any
    place: str

    @property
    def made(self) -> int | None:
        """The number of the result, if it is one value."""
        return self.parts[0][1] if len(self.parts) == 1 and not self.parts[0][0] else None


class Like(NamedTuple):
    """What is known of a value each time."""

    shape: tuple[int, ...]
    dtype: np.dtype
    c_contiguous: bool
    nbytes: int
    array: bool


_REDUCED = {np.sum: np.add, np.prod: np.multiply, np.max: np.maximum, np.min: np.minimum}
_OVER = {"activate_vjp": 0}
"""Kernels that take, after their other arguments, an array to write the result to, and which argument that may be."""
_numbers = itertools.count(1)


class Built:
    """A program that runs: `built.run(comm, [*inputs])` is the list of its results. text: what it does, as Python.

    likes: what is known of each value. small: those that are alike each time. inputs: the numbers of the arguments.
    outputs: what it gives: values as `Ref`, anything else as it is.
    """

    def __init__(
        self,
        lines: list[Line],
        likes: Sequence[Like | None],
        small: Mapping[int, Any],
        inputs: Sequence[int],
        outputs: Sequence[Any],
        name: str,
    ):
        self._likes = likes
        self._kept = {*refs(list(outputs))}
        self._names: dict[str, Any] = {}
        self._named: dict[int, str] = {}
        lines = self._needed(_with_constants(lines, small, likes, self._kept))
        last = {i: k for k, line in enumerate(lines) for i in [*line.used, *(i for _, i in line.parts)]}
        over = self._written_over(lines, {*inputs} | self._kept, last)
        text = ["def program(comm, given):"]
        if inputs:
            text += [f"    {', '.join(f'v{i}' for i in inputs)}{',' * (len(inputs) == 1)} = given", "    given.clear()"]
        for k, line in enumerate(lines):
            text += [f"    {row}" for row in self._rows(line, k, last, over.get(k))]
        text.append(f"    return [{', '.join(self._said(x) for x in outputs)}]")
        self.text = "\n".join(text) + "\n"
        file = f"<spmd.jit of {_in_one_line(name)}, {next(_numbers)}>"
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        weakref.finalize(self, linecache.cache.pop, file, None)
        names = dict(self._names)
        exec(compile(self.text, file, "exec"), names)
        self.run: Callable[[Any, list[Any]], list[Any]] = names["program"]

    def _needed(self, lines: list[Line]) -> list[Line]:
        """The lines whose results somebody takes, or that have an effect."""
        wanted, needed = set(self._kept), []
        for line in reversed(lines):
            if line.effect or any(i in wanted for _, i in line.parts):
                wanted.update(line.used)
                needed.append(line)
        return needed[::-1]

    def _written_over(self, lines: list[Line], shared: set[int], last: dict[int, int]) -> dict[int, Ref]:
        """By line, the argument that its result may be written over: a large array that a line has made, of which there
        are no views, and that nobody needs any more. shared: values that are others' too."""
        fresh: set[int] = set()
        for line in lines:
            if line.fresh:
                fresh.update(i for _, i in line.parts)
            else:
                shared.update(line.used)
        fresh -= shared
        found = {}
        for k, line in enumerate(lines):
            made = line.made
            if not line.fresh or made is None or line.kwargs:
                continue
            kernel = _OVER.get(getattr(line.fun, "__name__", ""))
            if isinstance(line.fun, np.ufunc) and line.fun is not np.matmul:
                candidates = line.args
            elif kernel is not None:
                candidates = line.args[kernel : kernel + 1]
            else:
                continue
            for a in candidates:
                if type(a) is Ref and a.index in fresh and last[a.index] == k:
                    like, once = self._likes[a.index], kernel is None or line.used.count(a.index) == 1
                    if once and like is not None and like == self._likes[made] and like[2] and like[3] > LARGE:
                        found[k] = a
                        break
        return found

    # Text

    def _rows(self, line: Line, k: int, last: dict[int, int], over: Ref | None) -> list[str]:
        """A line as Python, and what is let go of after it."""
        gone = {i for i in line.used if last[i] == k} - self._kept
        dead = {i for _, i in line.parts if last[i] == k} - self._kept
        note, rows, args = f"  # {_in_one_line(line.place)}" if line.place else "", [], line.args
        if line.gives:
            rows.append(f"given = {self._said(args[-1])}")
            if gone:
                rows.append(f"del {_names(gone)}")
            call, gone = self._call(line, [*map(self._said, args[:-1]), "given"], over), set()
        else:
            call = self._call(line, [*map(self._said, args)], over)
        if line.parts and not line.parts[0][0]:
            call = f"v{line.parts[0][1]} = {call}"
        elif line.parts:
            call = f"found = {call}"
        if line.errors is not None:
            rows.append(f"with {self._name(np.errstate, 'errstate')}(**{self._name(line.errors, 'errors')}):{note}")
            rows.append(f"    {call}")
        else:
            rows.append(call + note)
        if line.parts and line.parts[0][0]:
            rows += [f"v{i} = found{''.join(f'[{j}]' for j in at)}" for at, i in line.parts if i not in dead]
            rows.append("del found")
            dead = set()
        if line.gives:
            rows.append("del given")
        return [*rows, f"del {_names(gone | dead)}"] if gone | dead else rows

    def _call(self, line: Line, args: list[str], over: Ref | None) -> str:
        options = [f"{k}={self._said(v)}" for k, v in line.kwargs.items()]
        match line.form:
            case "attribute":
                return f"{args[0]}.{line.fun}"
            case "method":
                return f"{args[0]}.{line.fun}({', '.join(args[1:] + options)})"
            case "item":
                return f"{args[0]}[{self._index(line.args[1])}]"
            case "put":
                return f"{args[0]}[{self._index(line.args[1])}] = {args[2]}"
        if line.fun is np.expand_dims and not options and self._at_an_end(line.args):
            return f"{args[0]}[{'..., ' if line.args[1] else ''}None]"  # a tenth of the time
        fun = self._fun(line)
        if over is not None:
            options.append(f"out={self._said(over)}" if isinstance(fun, np.ufunc) else self._said(over))
        name = str(getattr(fun, "__name__", type(fun).__name__))
        if isinstance(owner := getattr(fun, "__self__", None), np.ufunc):
            name = f"{owner.__name__}_{name}"
        return f"{self._name(fun, name)}({', '.join(args + options)})"

    def _at_an_end(self, args: tuple[Any, ...]) -> bool:
        """Whether these are an array and a number that says its first dimension, or behind its last one."""
        x, *axes = args
        like = self._likes[x.index] if type(x) is Ref else None
        return like is not None and like.array and [*map(type, axes)] == [int] and axes[0] in (-1, 0)

    def _fun(self, line: Line) -> Any:
        """The function, or one that is sooner there for these arguments."""
        fun, made = line.fun, line.made
        if fun is np.matmul and not line.kwargs:
            like = None if made is None else self._likes[made]
            return np.matmul if like is not None and like.nbytes <= LARGE else product
        if fun in _REDUCED and line.args and type(line.args[0]) is Ref:
            like = self._likes[line.args[0].index]
            if like is not None and like.array and len(line.args) == 1 and line.kwargs.keys() == {"axis"}:
                return _REDUCED[fun].reduce
        return fun

    def _name(self, x: Any, wish: str) -> str:
        """The name of a constant."""
        name = self._named.get(id(x))
        if name is None:
            wish = "".join(c if c.isascii() and c.isalnum() else "_" for c in wish).strip("_") or "constant"
            wish = f"_{wish}" if wish[0].isdigit() or keyword.iskeyword(wish) or _TAKEN.fullmatch(wish) else wish
            name = next(n for k in itertools.count(1) if (n := f"{wish}_{k}" if k > 1 else wish) not in self._names)
            self._named[id(x)] = name
            self._names[name] = x
        return name

    def _said(self, a: Any) -> str:
        """An argument as Python."""
        if type(a) is Ref:
            return f"v{a.index}"
        if a is COMM:
            return "comm"
        if _plain(a):
            return "..." if a is Ellipsis else repr(a)
        within = bool(refs(a))
        if type(a) is tuple and (within or all(map(_plain, a))):
            return f"({', '.join(map(self._said, a))}{',' * (len(a) == 1)})"
        if type(a) is slice:
            return f"slice({self._said(a.start)}, {self._said(a.stop)}, {self._said(a.step)})"
        if type(a) is list and within:
            return f"[{', '.join(map(self._said, a))}]"
        if type(a) is dict and within:
            return f"{{{', '.join(f'{k!r}: {self._said(v)}' for k, v in a.items())}}}"
        if within:  # a tuple of a class of its own
            return f"{self._name(type(a), type(a).__name__)}({', '.join(map(self._said, a))})"
        return self._name(a, str(getattr(a, "__name__", type(a).__name__)))

    def _index(self, a: Any) -> str:
        if type(a) is slice and a.step is None:
            return f"{'' if a.start is None else self._said(a.start)}:{'' if a.stop is None else self._said(a.stop)}"
        if type(a) is tuple and a:
            return ", ".join(map(self._index, a)) + "," * (len(a) == 1)
        return self._said(a)


_TAKEN = re.compile(r"comm|given|found|program|slice|v\d+")


def _in_one_line(text: str) -> str:
    """A name or a place of the user's, as a comment or a file's name may hold it: they may have any character."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _names(numbers: Iterable[int]) -> str:
    return ", ".join(f"v{i}" for i in sorted(numbers))


def _plain(a: Any) -> bool:
    """Whether an argument is what its text says."""
    return a is None or a is Ellipsis or type(a) in (int, bool, str) or (type(a) is float and math.isfinite(a))


_SMALL = 1 << 10
"""Bytes up to which what is alike each time is kept."""


def _with_constants(
    lines: list[Line], small: Mapping[int, Any], likes: Sequence[Like | None], outputs: set[int]
) -> list[Line]:
    """The lines without those that give something small that is alike each time, which stands in their place. Where
    some lines write to arrays, it is not what might be seen through a view."""
    writes = any(line.writes for line in lines)
    viewed = {i for line in lines if not line.fresh for i in line.used} if writes else set[int]()
    fixed = {i: x for i, x in small.items() if i not in outputs | viewed}
    found = []
    for line in lines:
        if any(i in fixed for i in line.used):
            args, kwargs = (mapped(t, lambda a: _constant(a, fixed)) for t in (line.args, line.kwargs))
            line = line._replace(args=args, kwargs=kwargs, used=refs((args, kwargs)))
            made = line.made
            like = None if made is None else likes[made]
            alike = not line.used and not line.effect and line.errors is None and (line.fresh or not writes)
            if alike and like is not None and like.nbytes <= _SMALL and made not in outputs | viewed:
                fixed[made] = done(line.form, line.fun, args, kwargs)  # type: ignore[index]
                continue
        found.append(line)
    return found


def _constant(a: Any, fixed: Mapping[int, Any]) -> Any:
    return fixed.get(a.index, a) if type(a) is Ref else a


def done(form: str, fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a line does, with values in the place of their numbers."""
    if form == "method":
        return getattr(args[0], fun)(*args[1:], **kwargs)
    return getattr(args[0], fun) if form == "attribute" else fun(*args, **kwargs)
