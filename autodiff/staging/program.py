"""The lines of a program, and a program as Python: one function, without branches, that does them in order."""

from __future__ import annotations

import itertools
import keyword
import linecache
import math
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff.allocation import product

__all__ = ["COMM", "SUMS_IN_PLACE", "Built", "Line", "Ref", "ValueInfo", "collect", "execute", "mapped", "refs"]

REUSE_MIN = 1 << 16
"""Bytes above which a result is written into the memory of an operand that is no longer needed."""


class Ref:
    """A value in a line of a program, by its number."""

    __slots__ = ("index",)

    def __init__(self, index: int):
        self.index = index


def collect(tree: Any, kind: type) -> list[Any]:
    """The instances of a class in nested tuples, lists, dicts and slices."""
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif isinstance(tree, slice):
        tree = (tree.start, tree.stop, tree.step)
    elif not isinstance(tree, tuple | list):
        return []
    return [x for t in tree for x in collect(t, kind)]


def mapped(tree: Any, f: Callable[[Any], Any]) -> Any:
    """Nested tuples, lists, dicts and slices with f applied to their entries."""
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
    return [r.index for r in collect(tree, Ref)]


class _Comm:
    """An argument of a line: the communicator of the worker that runs it."""

    def __repr__(self) -> str:
        return "comm"


COMM = _Comm()


class Line(NamedTuple):
    """One call.

    form: "call", "method", "attribute", "item" or "put".
    used: the numbers of the values in its arguments.
    parts: of each value in the result its path and its number.
    effect: the line runs even if its result is not used.
    writes: it writes into its first argument, or into out.
    fresh: the result is a new array, no view.
    donates: the last argument is a list of values; those not used later are released before the call.
    errors: the np.errstate of the call, if it differs.
    place: the line of the user's code.
    """

    form: str
    fun: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    used: list[int]
    parts: list[tuple[tuple[int, ...], int]]
    effect: bool
    writes: bool
    fresh: bool
    donates: bool
    errors: Any
    place: str

    @property
    def result(self) -> int | None:
        """The number of the result if that is one value."""
        return self.parts[0][1] if len(self.parts) == 1 and not self.parts[0][0] else None


class ValueInfo(NamedTuple):
    """What a value has in every run."""

    shape: tuple[int, ...]
    dtype: np.dtype
    c_contiguous: bool
    nbytes: int
    array: bool


_UFUNCS_OF_REDUCTIONS = {np.sum: np.add, np.prod: np.multiply, np.max: np.maximum, np.min: np.minimum}
_OUT_ARGUMENTS = {"activate_vjp": 0}
"""Kernels that take an output array as their last argument, and which argument may be that array."""
SUMS_IN_PLACE: dict[Any, Callable[..., Any]] = {}
"""Functions that make an array of zeros but for a part: what adds that part to another array, which it takes first."""
_numbers = itertools.count(1)


class Built:
    """A program that runs: `built.run(comm, [*inputs])` is the list of its results. text: its Python source.

    likes: the `ValueInfo` of each value. small: values that are constants. inputs: the numbers of the arguments.
    outputs: the results: a `Ref` for a value, anything else unchanged.
    """

    def __init__(
        self,
        lines: list[Line],
        likes: Sequence[ValueInfo | None],
        small: Mapping[int, Any],
        inputs: Sequence[int],
        outputs: Sequence[Any],
        name: str,
    ):
        self._likes = likes
        self._outputs = {*refs(list(outputs))}
        self._constants: dict[str, Any] = {}
        self._named: dict[int, str] = {}
        lines = self._live_lines(_with_constants(lines, small, likes, self._outputs))
        lines = self._summed_in_place(lines, {*inputs} | self._outputs)
        last = _last_uses(lines)
        over = self._reusable(lines, {*inputs} | self._outputs, last)
        text = ["def program(comm, given):"]
        if inputs:
            text += [f"    {', '.join(f'v{i}' for i in inputs)}{',' * (len(inputs) == 1)} = given", "    given.clear()"]
        for k, line in enumerate(lines):
            text += [f"    {row}" for row in self._rows(line, k, last, over.get(k))]
        text.append(f"    return [{', '.join(self._source(x) for x in outputs)}]")
        self.text = "\n".join(text) + "\n"
        file = f"<spmd.jit of {_in_one_line(name)}, {next(_numbers)}>"
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        weakref.finalize(self, linecache.cache.pop, file, None)
        names = dict(self._constants)
        self.steps = [x for x in self._constants.values() if hasattr(x, "__spmd_programs__")]
        exec(compile(self.text, file, "exec"), names)
        self.run: Callable[[Any, list[Any]], list[Any]] = names["program"]

    def source(self) -> str:
        """The text, and after it that of the steps of its loops."""
        parts = [f"# {step.__name__}\n{p.source()}" for step in self.steps for p in step.__spmd_programs__()]
        return "\n".join([self.text, *parts])

    def _live_lines(self, lines: list[Line]) -> list[Line]:
        """The lines whose results are used, or that have an effect."""
        wanted, needed = set(self._outputs), []
        for line in reversed(lines):
            if line.effect or any(i in wanted for _, i in line.parts):
                wanted.update(line.used)
                needed.append(line)
        return needed[::-1]

    def _summed_in_place(self, lines: list[Line], shared: set[int]) -> list[Line]:
        """The lines, with sums of an array that nobody else uses and one that is mostly zero done in place."""
        last, counts = _last_uses(lines), Counter(i for line in lines for i in line.used)
        fresh, parts, dropped = _unshared(lines, shared), {}, set()
        lines = list(lines)
        for k, line in enumerate(lines):
            result = line.result
            if line.fun in SUMS_IN_PLACE and line.errors is None:
                parts[result] = k
            if (
                line.fun is not np.add
                or line.form != "call"
                or line.kwargs
                or line.errors is not None
                or result is None
            ):
                continue
            for total, part in (line.args, line.args[::-1]):
                if not (type(total) is type(part) is Ref and part.index in parts and counts[part.index] == 1):
                    continue
                like = self._likes[total.index]
                own = total.index in fresh and last[total.index] == k and part.index in fresh
                if own and like == self._likes[part.index] == self._likes[result] and like is not None and like.array:
                    made = lines[parts[part.index]]
                    args = (total, *made.args)
                    lines[k] = line._replace(fun=SUMS_IN_PLACE[made.fun], args=args, used=refs(args))
                    dropped.add(parts[part.index])
                    break
        return [line for k, line in enumerate(lines) if k not in dropped]

    def _reusable(self, lines: list[Line], shared: set[int], last: dict[int, int]) -> dict[int, Ref]:
        """By line, the argument into whose memory the result may be written: a large new array of an earlier line,
        without views and not used later. shared: values to which there are references outside of the program."""
        fresh = _unshared(lines, shared)
        reusable = {}
        for k, line in enumerate(lines):
            result = line.result
            if not line.fresh or result is None or line.kwargs:
                continue
            kernel = _OUT_ARGUMENTS.get(getattr(line.fun, "__name__", ""))
            if isinstance(line.fun, np.ufunc) and line.fun is not np.matmul:
                candidates = line.args
            elif kernel is not None:
                candidates = line.args[kernel : kernel + 1]
            else:
                continue
            for a in candidates:
                if type(a) is Ref and a.index in fresh and last[a.index] == k:
                    like, once = self._likes[a.index], kernel is None or line.used.count(a.index) == 1
                    if once and like is not None and like == self._likes[result] and like[2] and like[3] > REUSE_MIN:
                        reusable[k] = a
                        break
        return reusable

    # Text

    def _rows(self, line: Line, k: int, last: dict[int, int], over: Ref | None) -> list[str]:
        """The Python source of a line, and the `del` of values that are not used later."""
        dead_operands = {i for i in line.used if last[i] == k} - self._outputs
        dead_results = {i for _, i in line.parts if last[i] == k} - self._outputs
        note, rows, args = f"  # {_in_one_line(line.place)}" if line.place else "", [], line.args
        if line.donates:
            rows.append(f"given = {self._source(args[-1])}")
            if dead_operands:
                rows.append(f"del {_joined_names(dead_operands)}")
            call, dead_operands = self._call(line, [*map(self._source, args[:-1]), "given"], over), set()
        else:
            call = self._call(line, [*map(self._source, args)], over)
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
            rows += [f"v{i} = found{''.join(f'[{j}]' for j in at)}" for at, i in line.parts if i not in dead_results]
            rows.append("del found")
            dead_results = set()
        if line.donates:
            rows.append("del given")
        return [*rows, f"del {_joined_names(dead_operands | dead_results)}"] if dead_operands | dead_results else rows

    def _call(self, line: Line, args: list[str], over: Ref | None) -> str:
        options = [f"{k}={self._source(v)}" for k, v in line.kwargs.items()]
        match line.form:
            case "attribute":
                return f"{args[0]}.{line.fun}"
            case "method":
                return f"{args[0]}.{line.fun}({', '.join(args[1:] + options)})"
            case "item":
                return f"{args[0]}[{self._index(line.args[1])}]"
            case "put":
                return f"{args[0]}[{self._index(line.args[1])}] = {args[2]}"
        if line.fun is np.expand_dims and not options and self._is_edge_axis(line.args):
            return f"{args[0]}[{'..., ' if line.args[1] else ''}None]"  # a tenth of the time
        fun = self._fun(line)
        if over is not None:
            options.append(f"out={self._source(over)}" if isinstance(fun, np.ufunc) else self._source(over))
        name = str(getattr(fun, "__name__", type(fun).__name__))
        if isinstance(owner := getattr(fun, "__self__", None), np.ufunc):
            name = f"{owner.__name__}_{name}"
        return f"{self._name(fun, name)}({', '.join(args + options)})"

    def _is_edge_axis(self, args: tuple[Any, ...]) -> bool:
        """Whether these are an array and 0 or -1: a new first or last dimension."""
        x, *axes = args
        like = self._likes[x.index] if type(x) is Ref else None
        return like is not None and like.array and [*map(type, axes)] == [int] and axes[0] in (-1, 0)

    def _fun(self, line: Line) -> Any:
        """The function, or a faster one for these arguments."""
        fun, result = line.fun, line.result
        if fun is np.matmul and not line.kwargs:
            like = None if result is None else self._likes[result]
            return np.matmul if like is not None and like.nbytes <= REUSE_MIN else product
        if fun in _UFUNCS_OF_REDUCTIONS and line.args and type(line.args[0]) is Ref:
            like = self._likes[line.args[0].index]
            if like is not None and like.array and len(line.args) == 1 and line.kwargs.keys() == {"axis"}:
                return _UFUNCS_OF_REDUCTIONS[fun].reduce
        return fun

    def _name(self, x: Any, wanted: str) -> str:
        """The name of a constant in the source."""
        name = self._named.get(id(x))
        if name is None:
            wanted = "".join(c if c.isascii() and c.isalnum() else "_" for c in wanted).strip("_") or "constant"
            if wanted[0].isdigit() or keyword.iskeyword(wanted) or _RESERVED.fullmatch(wanted):
                wanted = f"_{wanted}"
            suffixed = itertools.chain([wanted], (f"{wanted}_{k}" for k in itertools.count(2)))
            name = next(n for n in suffixed if n not in self._constants)
            self._named[id(x)] = name
            self._constants[name] = x
        return name

    def _source(self, a: Any) -> str:
        """The Python source of an argument."""
        if type(a) is Ref:
            return f"v{a.index}"
        if a is COMM:
            return "comm"
        if _is_literal(a):
            return "..." if a is Ellipsis else repr(a)
        has_refs = bool(refs(a))
        if type(a) is tuple and (has_refs or all(map(_is_literal, a))):
            return f"({', '.join(map(self._source, a))}{',' * (len(a) == 1)})"
        if type(a) is slice:
            return f"slice({self._source(a.start)}, {self._source(a.stop)}, {self._source(a.step)})"
        if type(a) is list and has_refs:
            return f"[{', '.join(map(self._source, a))}]"
        if type(a) is dict and has_refs:
            return f"{{{', '.join(f'{k!r}: {self._source(v)}' for k, v in a.items())}}}"
        if has_refs:  # a named tuple
            return f"{self._name(type(a), type(a).__name__)}({', '.join(map(self._source, a))})"
        return self._name(a, str(getattr(a, "__name__", type(a).__name__)))

    def _index(self, a: Any) -> str:
        if type(a) is slice and a.step is None:
            return ":".join("" if end is None else self._source(end) for end in (a.start, a.stop))
        if type(a) is tuple and a:
            return ", ".join(map(self._index, a)) + "," * (len(a) == 1)
        return self._source(a)


def _last_uses(lines: Sequence[Line]) -> dict[int, int]:
    """Of each value the last line that uses it, or makes it."""
    return {i: k for k, line in enumerate(lines) for i in [*line.used, *(i for _, i in line.parts)]}


def _unshared(lines: Sequence[Line], shared: set[int]) -> set[int]:
    """The values that are new arrays without views, to which there are no references but those of the lines."""
    fresh: set[int] = set()
    for line in lines:
        if line.fresh:
            fresh.update(i for _, i in line.parts)
        else:
            shared.update(line.used)
    return fresh - shared


_RESERVED = re.compile(r"comm|given|found|program|slice|v\d+")


def _in_one_line(text: str) -> str:
    """A name or a place of the user's without unprintable characters, for a comment or the name of a file."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _joined_names(numbers: Iterable[int]) -> str:
    return ", ".join(f"v{i}" for i in sorted(numbers))


def _is_literal(a: Any) -> bool:
    """Whether the repr of an argument is its source."""
    return a is None or a is Ellipsis or type(a) in (int, bool, str) or (type(a) is float and math.isfinite(a))


CONSTANT_MAX = 1 << 10
"""Bytes up to which a constant result is stored in the program."""


def _with_constants(
    lines: list[Line], small: Mapping[int, Any], likes: Sequence[ValueInfo | None], outputs: set[int]
) -> list[Line]:
    """The lines without those whose result is a small constant; the constant takes their place.

    If some lines write to arrays, values of which there are views are no constants."""
    writes = any(line.writes for line in lines)
    viewed = {i for line in lines if not line.fresh for i in line.used} if writes else set[int]()
    fixed = {i: x for i, x in small.items() if i not in outputs | viewed}
    remaining = []
    for line in lines:
        if any(i in fixed for i in line.used):
            args, kwargs = (mapped(t, lambda a: _constant(a, fixed)) for t in (line.args, line.kwargs))
            line = line._replace(args=args, kwargs=kwargs, used=refs((args, kwargs)))
            result = line.result
            like = None if result is None else likes[result]
            alike = not line.used and not line.effect and line.errors is None and (line.fresh or not writes)
            if alike and like is not None and like.nbytes <= CONSTANT_MAX and result not in outputs | viewed:
                fixed[result] = execute(line.form, line.fun, args, kwargs)  # type: ignore[index]
                continue
        remaining.append(line)
    return remaining


def _constant(a: Any, fixed: Mapping[int, Any]) -> Any:
    return fixed.get(a.index, a) if type(a) is Ref else a


def execute(form: str, fun: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a line on values."""
    if form == "method":
        return getattr(args[0], fun)(*args[1:], **kwargs)
    return getattr(args[0], fun) if form == "attribute" else fun(*args, **kwargs)
