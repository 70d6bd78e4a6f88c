"""Patterns of names, such as `params.*`, that say which leaves are wanted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from typing import Any

from spmd.errors import CheckpointError, describe

__all__ = ["Patterns"]

_SPECIAL = re.compile(r"[*?[]")


class Patterns:
    """Patterns of names. A name fits those of `fnmatch` and itself: names may have brackets."""

    def __init__(self, where: str, names: Any):
        patterns: Any = [names] if isinstance(names, str) else [*names] if isinstance(names, Iterable) else [None]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise CheckpointError.at(
                where, argument="names", got=describe(names), need="a pattern or several", mend='names=["params.*"]'
            )
        self._names: dict[str, None] = dict.fromkeys(patterns)
        special = {pattern: translate(pattern) for pattern in self._names if _SPECIAL.search(pattern)}
        self._patterns = {pattern: re.compile(text) for pattern, text in special.items()}
        self._any = re.compile("|".join(special.values()) or "(?!)")  # nothing

    def fit(self, name: str) -> bool:
        """Whether a name fits one of the patterns."""
        return name in self._names or self._any.match(name) is not None

    def idle(self, names: Iterable[str]) -> str | None:
        """The first pattern that none of these names fits; None if each has one."""
        idle = self._names.copy()
        for name in names:
            idle.pop(name, None)
            for pattern in [p for p in self._patterns if p in idle and self._patterns[p].match(name)]:
                del idle[pattern]
        return next(iter(idle), None)
