"""Verification of values that are supposed to be one value on several workers.

A bare array or number counts as Invariant although nobody declared it. Where that decides a number, the copies of the
workers are compared: results promised Invariant, arguments and closures of processes, reductions that are the identity
on Invariant values, and Invariant leaves of gradients taken inside a body.

Virtual workers compare their arrays with each other at once. Processes note a digest, and compare the digests with the
message that ends the map.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import CodeType, FrameType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd.autodiff.allocation import writable
from spmd.errors import ReplicaError, StateError, caller, message, source_line
from spmd.kernels import on_device

if TYPE_CHECKING:
    from spmd.array import PartitionedArray
    from spmd.mesh import Mesh, Worker

__all__ = [
    "OTHER",
    "ROUNDING",
    "SAME",
    "Record",
    "Replicas",
    "Source",
    "alike",
    "compared",
    "digest",
    "next_turn",
    "note_closure",
    "object_record",
    "part_of",
    "relation",
    "report",
    "rests",
    "settle",
    "sketch",
    "source_of",
    "taken",
]

WHOLE_TURNS = 3
"""Comparisons of one line that take in whole arrays; later ones of large arrays take in one part each."""
PART_BYTES = 1 << 20
PARTS = 64
"""An array has a part for each third of PART_BYTES, and at most PARTS of them, so that so many comparisons see every
entry: three up to PART_BYTES."""
KEPT_BYTES = 64 << 20
"""Bytes of noted arrays that a map of processes keeps to tell rounding from another value."""
MANY = 64
"""Occurrences of a line in one map that are noted one by one; later ones are noted where their number is a power of
two, with the digests of all before."""
TABLE = 4096
"""Entries of the tables of turns and of values that wait to be compared."""
_ROUNDING = 1024.0
"""Differences of up to so many units in the last place of the largest entry count as rounding, or the root of the unit
where that is less."""
_CHUNKS = 1024
_GOLDEN = (3.0 - 5.0**0.5) / 2.0

SAME, ROUNDING, OTHER = "same", "rounding", "other"
_DECLARE = (
    "data made from a worker's place, from random numbers, files or the clock is Varying: declare it with "
    "spmd.varying(a, {axes}){more}; spmd.debug(replicas=True) finds where values first part"
)
_PASS = (
    "pass the same on every process: seed random numbers alike, or make it on one process and send it to the others; "
    "spmd.from_blocks and spmd.from_callback make a global array of data that differs from process to process"
)
_MENDS = {
    "argument": _PASS,
    "number": _PASS,
    "shape": _PASS,
    "closure": "pass it to the map as an argument, or, if it is meant to differ, declare it in the body with "
    "spmd.varying(a, {axes})",
    "result": _DECLARE.replace("{more}", ", and reduce it before it is returned"),
    "object": "return what is equal on all workers, or give it a spec: P() for one value after a reduction, "
    "P(axis_name) for a block per worker",
    "": _DECLARE.replace("{more}", ""),
}
"""The mend, by what a value is."""
_OF_PROCESSES = ("argument", "number", "shape", "closure", "object")
_NEEDS = {"shape": "one shape, dtype and spec on all processes", "object": "an object that is equal on all workers"}


# Arrays


def part_of(size: int, itemsize: int, turn: int) -> slice:
    """The entries of a flat array that comparison number `turn` takes in."""
    parts = min(PARTS, -(-3 * size * itemsize // PART_BYTES))
    if turn < WHOLE_TURNS or parts <= 1:
        return slice(None)
    length = -(-size // parts)
    start = turn % parts * length
    return slice(start, start + length)


def next_turn(turns: dict[Any, int], key: Any) -> int:
    """How often the key was met before."""
    if len(turns) >= TABLE:
        turns.clear()
    turn = turns.get(key, 0)
    turns[key] = turn + 1
    return turn


def rests(turn: int, nbytes: int) -> bool:
    """Whether a value is left out of comparison number `turn`.

    Of any three comparisons of a small value in a row at least one is made: the first ones, and then those at steps of
    the golden section, which keep time with no loop of the program.
    """
    return turn >= WHOLE_TURNS and nbytes <= PART_BYTES and turn * _GOLDEN % 1.0 >= _GOLDEN


@lru_cache(maxsize=1)
def _weights() -> np.ndarray:
    """Odd numbers, so that every change of one word changes the sum that they weigh."""
    return np.random.default_rng(0).integers(0, 1 << 63, 1 << 12, dtype=np.uint64) * np.uint64(2) + np.uint64(1)


def digest(x: np.ndarray) -> int:
    """A number that depends on the bits of an array, and on where they stand."""
    flat = np.ascontiguousarray(x).reshape(-1)
    if flat.dtype.char in "gG" and np.finfo(np.longdouble).nmant == 63:  # the other bytes may hold anything
        octets = np.ascontiguousarray(flat.view(np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)[:, :10])
    else:
        octets = flat.view(np.uint8)
    octets = octets.reshape(-1)
    words, rest = octets[: octets.size // 8 * 8].view(np.uint64), octets[octets.size // 8 * 8 :].tobytes()
    return _fold(words) ^ int.from_bytes(rest, "little") * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF


def _fold(words: np.ndarray) -> int:
    """The weighted sum of words: rows are folded first, then their sums."""
    weights = _weights()
    while words.size > weights.size:
        rows = words.size // weights.size
        head, tail = words[: rows * weights.size], words[rows * weights.size :]
        words = np.concatenate([head.reshape(rows, -1) @ weights, tail])
    return int(words @ weights[: words.size])


def taken(x: np.ndarray, turn: int) -> np.ndarray:
    """The entries of an array that comparison number `turn` takes in, as one that nobody writes to."""
    flat = np.ascontiguousarray(x).reshape(-1)
    part = flat[part_of(flat.size, flat.dtype.itemsize, turn)]
    return part.copy() if writable(part) else part


def relation(a: np.ndarray, b: np.ndarray) -> str:
    """Whether two arrays are the same, differ by rounding, or are other values."""
    if a is b:
        return SAME
    if a.shape != b.shape or a.dtype != b.dtype:
        return OTHER
    a, b = (np.ascontiguousarray(x).reshape(-1) for x in (a, b))
    word = f"u{min(a.dtype.itemsize, 8)}"  # bits first: that takes one pass
    if a.dtype.itemsize in (1, 2, 4, 8, 16) and a.dtype.char not in "gG" and np.array_equal(a.view(word), b.view(word)):
        return SAME
    with np.errstate(all="ignore"):
        differ = ~((a == b) | ((a != a) & (b != b)))
        if not differ.any():
            return SAME
        tolerance = _tolerance(a.dtype)
        if tolerance is None:
            return OTHER
        a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
        finite = np.isfinite(a) & np.isfinite(b)
        if (differ & ~finite).any():
            return OTHER
        a, b = a[finite], b[finite]
        return ROUNDING if np.abs(a - b).max() <= tolerance * np.abs(a).max() else OTHER


@lru_cache(maxsize=64)
def _tolerance(dtype: np.dtype) -> float | None:
    """The largest difference that counts as rounding, relative to the largest entry; None where nothing is rounded."""
    if dtype.kind in "fc":
        unit = float(np.finfo(dtype).eps)
    else:
        try:
            import ml_dtypes

            unit = float(ml_dtypes.finfo(dtype).eps)
        except (ImportError, ValueError):
            return None
    return min(_ROUNDING * unit, unit**0.5)


def sketch(x: np.ndarray) -> list[float]:
    """What tells rounding from another value without the array: what counts as rounding, how the entries that are not
    finite lie, and in float64 the weighted sums of stretches and their norms. Empty where nothing is rounded."""
    tolerance = _tolerance(x.dtype)
    if tolerance is None or not x.size:
        return []
    flat = np.ascontiguousarray(x).reshape(-1)
    flat = flat.astype(np.complex128).view(np.float64) if flat.dtype.kind == "c" else flat.astype(np.float64)
    finite = np.isfinite(flat)
    flat = np.where(finite, flat, 0.0)
    weights = 1.0 + np.resize(_weights() / 2.0**64, flat.size)
    starts = np.arange(0, flat.size, max(1, -(-flat.size // _CHUNKS)))
    sums, squares = np.add.reduceat(flat * weights, starts), np.add.reduceat(flat * flat, starts)
    return [tolerance, float(digest(finite) % (1 << 32)), *sums.tolist(), *np.sqrt(squares).tolist()]


def alike(one: Sequence[float] | None, other: Sequence[float] | None) -> bool:
    """Whether two arrays differ by rounding at most, by their sketches. None: there is no sketch."""
    if not one or not other or len(one) != len(other) or one[:2] != other[:2]:
        return False
    (sums, norms), (other_sums, other_norms) = (np.reshape(x[2:], (2, -1)) for x in (one, other))
    scale = max(norms.max(), other_norms.max())
    return bool(np.abs(sums - other_sums).max() <= 2 * one[0] * scale)


# Records


class Source(NamedTuple):
    """A line of the user's."""

    code: CodeType | None
    instruction: int

    def __str__(self) -> str:
        return source_line(self.code, self.instruction)


def source_of(frame: FrameType | None) -> Source:
    """The user's line that a frame of the library was called from."""
    user = caller(frame)
    return Source(None, 0) if user is None else Source(user.f_code, user.f_lasti)


class Record(NamedTuple):
    """A value that a process holds one copy of, as the processes compare it.

    where, argument, source: for messages. text: what must be equal beside the contents: dtype, shape, spec. turn,
    number: of the comparison, and the digest of what it takes in. value: the array, as long as it is kept.
    """

    where: str
    argument: str | None
    source: str
    text: str
    turn: int
    number: int
    value: np.ndarray | None


class Replicas:
    """What the workers of one map that this process holds supposed to be one value.

    alone: whether this process holds one worker of several, so that others are asked at the end of the map.
    run: how often this map ran before.
    declared: bare arrays that the body declared to vary. arrays: global arrays that this map compares.
    anywhere: whether any process has noted something.
    """

    __slots__ = (
        "_bytes",
        "_counts",
        "_later",
        "_lock",
        "_waiting",
        "alone",
        "anywhere",
        "arrays",
        "declared",
        "records",
        "run",
    )

    def __init__(self, alone: bool, run: int = 0):
        self.alone = alone
        self.run = run
        self.records: dict[str, Record] = {}
        self.anywhere = False
        self.arrays: list[PartitionedArray] = []
        self.declared: list[np.ndarray] = []
        self._counts: dict[Any, int] = {}
        self._later: dict[str, int] = {}
        self._waiting: dict[Any, list[Any]] = {}
        self._lock = threading.RLock()
        self._bytes = 0

    def verify(
        self, worker: Worker, axes: tuple[str, ...], value: Any, where: str, argument: str, source: Source
    ) -> None:
        """Compare a value with those of the workers along `axes` that pass the same line as often as this one.

        A line that only some of them pass is no error. source: the line. A value that may be written to is copied.
        """
        group = worker.group(axes)
        if group.size == 1 or on_device(value) or not worker.mesh.checks:
            return
        line = (group.key, id(source.code), source.instruction, where, argument)
        count = next_turn(self._counts, (worker.index, *line))
        value = np.asarray(value)
        if max(self.run, count) >= WHOLE_TURNS and rests(self.run + count, value.nbytes):
            return
        turn = next_turn(worker.mesh.turns, (worker.index, *line, value.shape))
        part = taken(value, turn)
        if self.alone:
            record = Record(where, argument, str(source), _text(value), turn, 0, None)
            self._note(group.axes, part, record, source, count)
            return
        found = self._found((*line, count), (worker.index, value, part), group.size)
        if found is None:
            return
        other, same, others = found
        if same is value:
            return
        fits = same.shape == value.shape and same.dtype == value.dtype
        judged = relation(others, part) if fits else OTHER
        if judged != SAME:
            texts = [] if fits else [_text(same), _text(value)]
            report(worker.mesh, judged, where, argument, (other, worker.index), axes, str(source), texts)

    def _found(self, key: Any, own: tuple, size: int) -> tuple | None:
        """What the first of `size` workers brought to a comparison; None for the first itself."""
        with self._lock:
            found = self._waiting.get(key)
            if found is None:
                if len(self._waiting) >= TABLE:
                    del self._waiting[next(iter(self._waiting))]
                self._waiting[key] = [own, 1]
                return None
            found[1] += 1
            if found[1] == size:
                del self._waiting[key]
            return found[0]

    def _note(self, axes: tuple[str, ...], part: np.ndarray, record: Record, source: Source, count: int) -> None:
        line = f"{','.join(axes)}|{record.where}|{record.argument}|{source}"
        number = digest(part)
        kept = part if count < MANY and self._bytes + part.nbytes <= KEPT_BYTES else None
        if count >= MANY:
            number = self._later[line] = hash((self._later.get(line, 0), number))
            if count & (count - 1):
                return
        self._bytes += 0 if kept is None else kept.nbytes
        self.records[f"{line}|{count}"] = record._replace(number=number, value=kept)

    def add(self, axes: tuple[str, ...], record: Record, kind: str) -> None:
        """Note something for the comparison at the end of the map. kind: of what, which tells its mend."""
        self.records["|".join((",".join(axes), record.where, record.argument or "", record.source, kind))] = record

    def noted(self) -> dict[str, list[Any]]:
        """The records as they travel."""
        return {key: [record.text, record.turn, record.number] for key, record in self.records.items()}


def object_record(where: str, argument: str, x: Any) -> Record | None:
    """A record of an object that should be equal on all workers; None where nothing is known of its equality."""
    if isinstance(x, np.ndarray | np.generic) and np.asarray(x).dtype.kind not in "OVT":
        mask = np.ma.getmaskarray(x) if isinstance(x, np.ma.MaskedArray) else None
        x = np.asarray(x)
        number = digest(x) if mask is None else digest(np.where(mask, 0, x)) ^ digest(mask)
        return Record(where, argument, "", _text(x), 0, number, x if mask is None else None)
    text = _written(x)
    if text is None:
        return None
    text = f"{type(x).__name__} {text}"
    return Record(where, argument, "", text if len(text) <= 100 else text[:97] + "...", 0, _digest_of(text), None)


_TOLD_BY_REPR = {
    "builtins": "bool int float complex str bytes bytearray NoneType range slice".split(),
    "datetime": "date time timedelta timezone".split(),
    "decimal": ["Decimal"],
    "fractions": ["Fraction"],
    "enum": ["Enum"],
    "uuid": ["UUID"],
    "array": ["array"],
    "pathlib": ["PurePath"],
    "pathlib._local": ["PurePath"],
    "numpy": ["dtype"],
    "torch": ["Size", "dtype"],
}
"""By module, the classes whose objects are equal where they are written alike."""


@lru_cache(maxsize=1024)
def _is_told_by_repr(cls: type) -> bool:
    return any(c.__name__ in _TOLD_BY_REPR.get(c.__module__, ()) for c in cls.__mro__)


def _written(x: Any) -> str | None:
    """A text that is the same for equal objects; None where it is not known what makes them equal."""
    if _is_told_by_repr(type(x)):
        return repr(x)
    if isinstance(x, np.ndarray | np.generic) and np.asarray(x).dtype.kind != "O":  # strings, records
        return f"{_text(np.asarray(x))} {x.tolist()!r}"
    parts: list[str | None]
    if isinstance(x, np.ndarray):
        parts = [_written(y) for y in x.reshape(-1).tolist()]
    elif isinstance(x, set | frozenset):
        parts = sorted(map(_written, x), key=str)
    elif isinstance(x, list | tuple):
        parts = [_written(y) for y in x]
    elif isinstance(x, dict):
        parts = [_written(y) for pair in x.items() for y in pair]
    elif is_dataclass(x) and not isinstance(x, type):
        parts = [_written(getattr(x, f.name)) for f in fields(x) if f.compare]
    else:
        return None
    return None if None in parts else f"{type(x).__name__}({', '.join(map(str, parts))})"


def _digest_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def compared(one: Record, other: Record) -> str:
    """How two records of one value relate."""
    if one.text != other.text:
        return OTHER
    if one.value is not None and other.value is not None:
        return relation(one.value, other.value)
    return SAME if one.number == other.number else OTHER


def note_closure(mesh: Mesh, replicas: Replicas, where: str, f: Callable, turns: dict[Any, int]) -> None:
    """Note the arrays that a body closes over."""
    for name, x in closed_arrays(f):
        if any(x is a or np.may_share_memory(x, a) for a in replicas.declared):
            continue
        turn = next_turn(turns, (name, x.shape))
        part = taken(x, turn)
        replicas.add(tuple(mesh.axes), Record(where, name, "", _text(x), turn, digest(part), part), "closure")


@lru_cache(maxsize=1024)
def _names_in(code: CodeType) -> tuple[str, ...]:
    """The names of globals and attributes that a function and those inside it use."""
    inner = [name for c in code.co_consts if isinstance(c, CodeType) for name in _names_in(c)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _is_plain_tensor(x: Any) -> bool:
    """Whether it is a tensor of torch that is data: parameters are compared where they are differentiated."""
    return type(x).__module__ == "torch" and type(x).__name__ == "Tensor" and not x.requires_grad


def closed_arrays(f: Callable) -> list[tuple[str, np.ndarray]]:
    """The arrays that a function closes over, with their names: those of its cells, globals, defaults and partial
    arguments, in lists, tuples and dicts too, and of the functions of its module that it uses."""
    found: list[tuple[str, np.ndarray]] = []
    seen: set[int] = set()

    def walk(name: str, x: Any) -> None:
        if id(x) in seen:
            return
        if _is_plain_tensor(x):
            seen.add(id(x))
            with contextlib.suppress(TypeError, RuntimeError):  # one on a device, or of a dtype that NumPy lacks
                found.append((name, np.asarray(x)))
        elif isinstance(x, np.ndarray):
            seen.add(id(x))
            if x.dtype.kind not in "OV" and type(x) is np.ndarray:
                found.append((name, x))
        elif isinstance(x, functools.partial):
            seen.add(id(x))
            walk(name, x.func)
            walk(f"{name}.args", x.args)
            walk(f"{name}.keywords", x.keywords)
        elif isinstance(x, MethodType):
            seen.add(id(x))
            walk(name, x.__func__)
            attributes(x.__self__)
        elif isinstance(x, FunctionType):
            seen.add(id(x))
            for cell_name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # a cell that has no value yet
                    walk(cell_name, cell.cell_contents)
            for global_name in _names_in(x.__code__):
                y = x.__globals__.get(global_name)
                if not isinstance(y, FunctionType) or y.__module__ == x.__module__:
                    walk(global_name, y)
            walk(f"{name}.__defaults__", x.__defaults__)
            walk(f"{name}.__kwdefaults__", x.__kwdefaults__)
        elif isinstance(x, list | tuple):
            seen.add(id(x))
            for k, item in enumerate(x):
                walk(f"{name}[{k}]", item)
        elif type(x) is dict:
            seen.add(id(x))
            for k, item in x.items():
                walk(f"{name}[{k!r}]", item)

    def attributes(x: Any) -> None:
        """Those of the object that a method is of."""
        seen.add(id(x))
        for attribute, value in {**vars(type(x)), **getattr(x, "__dict__", {})}.items():
            if isinstance(value, np.ndarray | list | tuple | dict) or _is_plain_tensor(value):
                walk(f"{type(x).__name__}.{attribute}", value)

    walk(getattr(f, "__name__", type(f).__name__), f)
    call = getattr(type(f), "__call__", None)  # noqa: B004
    if isinstance(call, FunctionType):  # an object of a class of the user's
        walk(type(f).__name__, MethodType(call, f))
    return found


def _text(x: np.ndarray) -> str:
    return f"{x.dtype}{list(x.shape)}"


def settle(mesh: Mesh, shared: Mapping[int, Mapping[str, Any]], replicas: Replicas) -> None:
    """Compare what all processes noted: `shared` by worker and key; `replicas` are this process's own. Every process
    finds the same differences, so that all ask for sketches of the same values."""
    replicas.anywhere = any(shared.values())
    _compare(mesh, shared, replicas.records)
    for x in replicas.arrays:
        x.compared = True


def _compare(mesh: Mesh, shared: Mapping[int, Mapping[str, Any]], records: Mapping[str, Record]) -> None:
    first = shared[0]
    if all(told == first for told in shared.values()):
        return
    differences = list(_differences(mesh, shared))
    if not differences:
        return
    keys = sorted({key for _, _, key in differences})
    kept = {key: records[key].value for key in keys if key in records}
    own = {key: sketch(value) for key, value in kept.items() if value is not None}
    (me,) = mesh.local_workers
    sketches = mesh.transport.share({me: own})
    rounded: set[str] = set()
    for one, other, key in differences:
        where, argument, source = _names(key)
        texts = [shared[w].get(key, ["no such argument"])[0] for w in (one, other)]
        judged = OTHER
        if texts[0] == texts[1]:
            judged = ROUNDING if alike(*(sketches[w].get(key) for w in (one, other))) else OTHER
            texts = []
            # Of occurrences that are noted together only bits are known: they differ as the earlier ones do.
            line = key.rpartition("|")[0]
            judged = ROUNDING if line in rounded else judged
            rounded |= {line} if judged == ROUNDING else set()
        report(mesh, judged, where, argument, (one, other), _axes(key), source, texts, _kind(key))


def _axes(key: str) -> tuple[str, ...]:
    return tuple(name for name in key.split("|", 1)[0].split(",") if name)


def _names(key: str) -> list[str]:
    """Where, argument and source of a key, for messages."""
    return key.split("|")[1:4]


def _kind(key: str) -> str:
    """What a key is of: empty for the lines of bodies, whose keys end with a number."""
    last = key.rpartition("|")[2]
    return "" if last.isdigit() else last


def _differences(mesh: Mesh, shared: Mapping[int, Mapping[str, Any]]) -> Iterable[tuple[int, int, str]]:
    """Pairs of workers that noted other values, with the key."""
    first: dict[tuple[str, int], int] = {}
    for w in range(mesh.size):
        for key, (text, turn, number) in shared[w].items():
            one = first.setdefault((key, mesh.group(w, _axes(key)).ordered[0]), w)
            other_text, other_turn, other_number = shared[one][key]
            if text != other_text or (turn == other_turn and number != other_number):
                yield one, w, key
    for key, w in {key: w for (key, _), w in first.items() if key.rpartition("|")[2] in ("shape", "number")}.items():
        yield from ((w, other, key) for other in range(mesh.size) if key not in shared[other])


def _warn_at(source: str, text: str) -> None:
    """A warning at a line of the user's, which Python shows once."""
    place, _, _ = source.rpartition(" in ")
    file, _, line = place.rpartition(":")
    if not source:
        user = source_of(sys._getframe(1))
        file, line = user.code.co_filename if user.code else "spmd", str(user).rpartition(" in ")[0].rpartition(":")[2]
    registry = _shown.setdefault(source, {})
    warnings.warn_explicit(text, RuntimeWarning, file or "spmd", int(line or 1), registry=registry)


_shown: dict[str, dict] = {}
"""By line of the user's: the warnings that Python has shown there."""


def report(
    mesh: Mesh,
    judged: str,
    where: str,
    argument: str | None,
    workers: tuple[int, int],
    axes: Sequence[str],
    source: str = "",
    texts: Sequence[str] = (),
    kind: str = "",
) -> None:
    """Raise for another value; warn, once for each line, of rounding."""
    one, other = map(mesh.describe, workers)
    line = f" at {source}" if source else ""
    along = " and ".join(map(repr, axes)) or "all axes"
    if judged == ROUNDING:
        told = f"{where}{line}: {argument} differs by rounding between {one} and {other}; it should be the same bits"
        _warn_at(source, told)
        return
    named = "axis_name" if not axes else repr(axes[0]) if len(axes) == 1 else repr(tuple(axes))
    what = "a value" if kind in _OF_PROCESSES else "an Invariant array"
    got = f"{what} that differs between {one} and {other}"
    if texts:
        got = f"{texts[0]} on {one} and {texts[1]} on {other}"
    # torch takes a TypeError, which a StateError is, in an operator for operands that do not go together.
    kind_of_error = StateError if kind else ReplicaError
    raise kind_of_error(
        message(
            where + line,
            argument=argument,
            got=got,
            need=_NEEDS.get(kind, "one value on all workers along {along}").format(along=along),
            mend=_MENDS.get(kind, _MENDS[""]).format(axes=named),
        )
    )
