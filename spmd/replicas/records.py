"""What a map notes about values that must be equal on several workers."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import fields, is_dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np

from spmd.errors import caller, source_line
from spmd.replicas.compare import OTHER, SAME, TABLE_MAX, digest, relation
from spmd.replicas.declared import DeclaredMemory, owner_of

__all__ = ["ReplicaRecord", "Replicas", "Source", "array_text", "object_record", "record_relation", "source_of"]

NOTED_BYTES_MAX = 64 << 20
"""The most bytes of noted arrays that a map of processes keeps, to distinguish rounding from other values."""
SINGLE_RECORDS_MAX = 64
"""Occurrences of a line in one map that are noted one by one. Of later ones those are noted whose number is a power of
two; the digest covers all before."""


class Source(NamedTuple):
    """A line of the user's code."""

    code: CodeType | None
    instruction: int

    def __str__(self) -> str:
        return source_line(self.code, self.instruction)


def source_of(frame: FrameType | None) -> Source:
    """The line of the user's code that a frame of the library was called from."""
    user = caller(frame)
    return Source(None, 0) if user is None else Source(user.f_code, user.f_lasti)


class ReplicaRecord(NamedTuple):
    """One process's copy of a value that must be equal on several processes.

    where, argument, source: for messages. text: dtype, shape and spec, which must be equal too. turn: the number of the
    comparison. number: the digest of the part that this comparison covers. value: that part, if it is kept.
    """

    where: str
    argument: str | None
    source: str
    text: str
    turn: int = 0
    number: int = 0
    value: np.ndarray | None = None


class Replicas:
    """The values of one run of a map that must be equal on several workers, as this process has noted them.

    distributed: whether this process holds one worker of several; processes compare their records as the map ends.
    run: how many runs of this map came before.
    declared: the memory that the body declared to vary. arrays: global arrays that this run compares.
    counts: how often each worker has passed each line. any_noted: whether any process has noted something.
    """

    __slots__ = (
        "_bytes",
        "_later",
        "_lock",
        "_waiting",
        "any_noted",
        "arrays",
        "counts",
        "declared",
        "distributed",
        "records",
        "run",
    )

    def __init__(self, distributed: bool, run: int = 0):
        self.distributed = distributed
        self.run = run
        self.records: dict[str, ReplicaRecord] = {}
        self.any_noted = False
        self.arrays: list[Any] = []
        self.declared = DeclaredMemory()
        self.counts: dict[Any, int] = {}
        self._later: dict[str, int] = {}
        self._waiting: dict[Any, list[Any]] = {}
        self._lock = threading.RLock()
        self._bytes = 0

    def declare(self, x: Any, owner: Any = None) -> None:
        """Note that the body declared x to vary. owner: what exists as long as the memory of x; None: an array."""
        if isinstance(x, np.ndarray):
            self.declared.add(owner_of(x) if owner is None else owner, x)

    def first_value(self, key: Any, own: tuple, size: int) -> tuple | None:
        """The value of the first of `size` workers that reach a comparison; None on that worker."""
        with self._lock:
            entry = self._waiting.get(key)
            if entry is None:
                if len(self._waiting) >= TABLE_MAX:
                    del self._waiting[next(iter(self._waiting))]
                self._waiting[key] = [own, 1]
                return None
            entry[1] += 1
            if entry[1] == size:
                del self._waiting[key]
            return entry[0]

    def add_line(self, axes: tuple[str, ...], part: np.ndarray, record: ReplicaRecord, count: int) -> None:
        """Note the part of an array that a line of the body compares; `count` is the number of the occurrence."""
        line = f"{','.join(axes)}|{record.where}|{record.argument}|{record.source}"
        number = digest(part)
        value = part if count < SINGLE_RECORDS_MAX and self._bytes + part.nbytes <= NOTED_BYTES_MAX else None
        if count >= SINGLE_RECORDS_MAX:
            number = self._later[line] = hash((self._later.get(line, 0), number))
            if count & (count - 1):
                return
        self._bytes += 0 if value is None else value.nbytes
        self.records[f"{line}|{count}"] = record._replace(number=number, value=value)

    def add(self, axes: tuple[str, ...], record: ReplicaRecord, kind: str) -> None:
        """Note a value for the comparison at the end of the map. kind: what the value is; the message depends on it."""
        self.records["|".join((",".join(axes), record.where, record.argument or "", record.source, kind))] = record

    def shared(self) -> dict[str, list[Any]]:
        """The records as processes send them to each other."""
        return {key: [record.text, record.turn, record.number] for key, record in self.records.items()}


def object_record(where: str, argument: str, x: Any) -> ReplicaRecord | None:
    """The record of an object that must be equal on all workers; None where objects of its type cannot be compared."""
    if isinstance(x, np.ndarray | np.generic) and np.asarray(x).dtype.kind not in "OVT":
        mask = np.ma.getmaskarray(x) if isinstance(x, np.ma.MaskedArray) else None
        x = np.asarray(x)
        number = digest(x) if mask is None else digest(np.where(mask, 0, x)) ^ digest(mask)
        return ReplicaRecord(where, argument, "", array_text(x), 0, number, x if mask is None else None)
    text = _canonical_text(x)
    if text is None:
        return None
    text = f"{type(x).__name__} {text}"
    return ReplicaRecord(
        where, argument, "", text if len(text) <= 100 else text[:97] + "...", 0, _digest_of(text), None
    )


_EQUAL_BY_REPR = {
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
"""By module, the classes whose objects are equal exactly if their repr is."""


@lru_cache(maxsize=1024)
def _is_equal_by_repr(cls: type) -> bool:
    return any(c.__name__ in _EQUAL_BY_REPR.get(c.__module__, ()) for c in cls.__mro__)


def _canonical_text(x: Any) -> str | None:
    """A text that is the same for equal objects; None for objects that cannot be compared."""
    if _is_equal_by_repr(type(x)):
        return repr(x)
    if isinstance(x, np.ndarray | np.generic) and np.asarray(x).dtype.kind != "O":  # strings, records
        return f"{array_text(np.asarray(x))} {x.tolist()!r}"
    parts: list[str | None]
    if isinstance(x, np.ndarray):
        parts = [_canonical_text(y) for y in x.reshape(-1).tolist()]
    elif isinstance(x, set | frozenset):
        parts = sorted(map(_canonical_text, x), key=str)
    elif isinstance(x, list | tuple):
        parts = [_canonical_text(y) for y in x]
    elif isinstance(x, dict):
        parts = [_canonical_text(y) for pair in x.items() for y in pair]
    elif is_dataclass(x) and not isinstance(x, type):
        parts = [_canonical_text(getattr(x, f.name)) for f in fields(x) if f.compare]
    else:
        return None
    return None if None in parts else f"{type(x).__name__}({', '.join(map(str, parts))})"


def _digest_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def record_relation(one: ReplicaRecord, other: ReplicaRecord) -> str:
    """Whether two records are of one value, of values that differ by rounding, or of other values."""
    if one.text != other.text:
        return OTHER
    if one.value is not None and other.value is not None:
        return relation(one.value, other.value)
    return SAME if one.number == other.number else OTHER


def array_text(x: np.ndarray) -> str:
    return f"{x.dtype}{list(x.shape)}"
