"""Warnings of a jitted map, or function, that is recorded again and again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from spmd.errors import describe, message
from spmd.jit_entry import JitEntry, key_part
from spmd.layout import Layout
from spmd.mesh import Mesh

__all__ = ["Recordings"]

_IN_A_ROW = 3
"""The number of consecutive calls that are recorded anew at which the user is warned."""
_RECORDINGS_WARNED = 64
"""The number of recordings of one map at which its user is warned."""


class _Call(NamedTuple):
    """A recorded call: its arguments, as keys of programs and as text. static: which of them have the spec None."""

    conditions: Any
    structure: Any
    paths: Sequence[str]
    static: Sequence[bool]
    keys: list[tuple[Any, ...]]
    values: list[Any]
    texts: list[str]


class Recordings:
    """The recordings of a map, or function: how many, and the last calls of each kind if all of them were recorded."""

    def __init__(self, has_specs: bool) -> None:
        self.has_specs = has_specs
        self.count = 0
        self._in_a_row: dict[Any, list[_Call]] = {}
        self._warned = False

    def replayed(self, kind: Any) -> None:
        """Note that a call of this kind was replayed."""
        if self._in_a_row:
            self._in_a_row.pop(kind, None)

    def recorded(self, where: str, kind: Any, mesh: Mesh, structure: Any, entry: JitEntry, flat: list) -> str | None:
        """Note that a call of this kind was recorded: a warning, if there is to be one.

        structure, flat: the arguments, as a tree. entry: its programs.
        """
        self.count += 1
        if self._warned:
            return None
        keys = [key_part(x, s) for x, s in zip(flat, entry.static, strict=True)]
        # Arrays are not kept: only what is part of the program.
        values = [None if hasattr(x, "dtype") else x for x in flat]
        conditions = (mesh, *np.geterr().values())
        call = _Call(conditions, structure, entry.paths, entry.static, keys, values, [_shown(x) for x in flat])
        calls = self._in_a_row.get(kind, [])
        calls = self._in_a_row[kind] = [*[c for c in calls if c.conditions == conditions][1 - _IN_A_ROW :], call]
        text = _text(where, calls, self.has_specs) if len(calls) == _IN_A_ROW else None
        if text is None and self.count == _RECORDINGS_WARNED:
            text = (
                f"spmd.jit of {where} has run its body for {_RECORDINGS_WARNED} kinds of arguments: shapes, or "
                "integers and other arguments that are part of the program, which change from call to call"
            )
        self._warned = text is not None
        return text


def _shown(x: Any) -> str:
    """An argument, as a warning shows it."""
    if hasattr(x, "dtype") and not isinstance(x, type):
        return describe(x)
    text = repr(x)
    return text if len(text) <= 80 else text[:77] + "..."


def _text(where: str, calls: list[_Call], has_specs: bool) -> str | None:
    """The warning for calls that were recorded one after the other: the first argument that changed in each."""
    *_, before, last = calls
    # Hashes, because parts of structures and of keys may not be comparable.
    structures = [hash(call.structure) for call in calls]
    if all(a != b for a, b in pairwise(structures)):
        lone = [p for p in last.paths if p not in before.paths] or [p for p in before.paths if p not in last.paths]
        argument = lone[0] if lone else None
        got = f"arguments of {len(last.paths)} leaves, after {len(before.paths)} in the call before"
        mend = "arguments of one structure: arrays that hold what lists of changing length hold"
    elif all(a == b for a, b in pairwise(structures)):
        pairs = list(pairwise(calls))
        changed = [k for k in range(len(last.keys)) if all(hash(a.keys[k]) != hash(b.keys[k]) for a, b in pairs)]
        if not changed:
            return None
        k = changed[0]
        argument, old, new = last.paths[k], before.texts[k], last.texts[k]
        if old == new:
            old, new = f"{old} {before.keys[k][0]}", f"{new} {last.keys[k][0]}"
        got = f"{new}, after {old} in the call before"
        mend = _mend(last, before, k, has_specs)
    else:
        return None
    return message(
        f"spmd.jit of {where}, recorded anew in {_IN_A_ROW} calls in a row",
        argument=argument,
        got=got,
        need="what is part of the program, the same in every call: shapes, dtypes, layouts, integers, other objects",
        mend=mend,
    )


def _mend(last: _Call, before: _Call, k: int, has_specs: bool) -> str:
    """What to write, so that an argument is no part of the program, or does not change."""
    value, old, new = last.values[k], before.keys[k], last.keys[k]
    if last.static[k] and isinstance(value, float | complex):
        return "the spec P() in place of None: then the values of numbers are no part of the program"
    if isinstance(value, int):
        spec = "the spec P() in place of None, and " if has_specs and last.static[k] else ""
        return f"{spec}np.asarray({value}): values of arrays are no part of the program, integers that make shapes are"
    if value is not None:
        return "an object that equals the one before: make it once, before the loop"
    if isinstance(old[0], Layout) and isinstance(new[0], Layout):
        same = old[0].shape == new[0].shape and old[1] == new[1]
        return "spmd.reshard(x, spec): one layout in every call" if same else _ONE_SHAPE
    return _ONE_SHAPE if old[0] is new[0] else "spmd.put(x, spec) before the loop: an array on the mesh in every call"


_ONE_SHAPE = "pad arrays to one shape, and keep one dtype"
