"""Mistakes, a row each, and the words of the errors that explain them: what test_errors.py goes through."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

import spmd
from spmd import P, errors

X = np.arange(6.0).reshape(3, 2)
"""Rows of 2 and 1 on the workers along `data`."""
EVEN = np.arange(8.0).reshape(4, 2)
D = P("data")


class Row(NamedTuple):
    """A mistake, and words of the head of its message and of each of the three lines."""

    name: str
    call: Callable
    error: type[Exception]
    head: str
    got: str
    need: str
    mend: str


class Message(NamedTuple):
    head: str
    got: str
    need: str
    mend: str


def parsed(error: BaseException) -> Message:
    """The four parts of a message; each stands once, in this order."""
    text = str(error)
    marks = ["\n  got:    ", "\n  needed: ", "\n  mend:   "]
    places = [text.find(mark) for mark in marks]
    assert -1 not in places, f"no got, needed and mend in: {type(error).__name__}: {text}"
    assert places == sorted(places)
    assert [text.count(mark) for mark in marks] == [1, 1, 1]
    bounds = [0, *places, len(text)]
    parts = [text[a:b] for a, b in itertools.pairwise(bounds)]
    return Message(*(part.removeprefix(mark) for part, mark in zip(parts, ["", *marks], strict=True)))


def refused(row: Row) -> None:
    """The call raises this error of ours, with these words."""
    assert getattr(errors, row.error.__name__) is row.error
    with pytest.raises(row.error) as caught:
        row.call()
    assert type(caught.value) is row.error
    said = parsed(caught.value)
    for part, word in zip(said, row[3:], strict=True):
        assert word in part, f"{word!r} is not in {part!r}, of\n{caught.value}"
    assert not any(part.endswith(" ") or "  " in part.split("\n")[0] for part in said)


def run(body, *args, ins=D, out=D, **options):
    """A body on X, or on these arguments, cut by rows."""
    return spmd.map(body, ins, out, **options)(*(args or (X,)))


def here() -> spmd.PartitionedArray:
    return spmd.put(X, D)


def step(w, *, rate):
    return w * rate


@spmd.custom_vjp
def lopsided(x):
    return x


lopsided.defvjp(lambda x: (x, None), lambda _, g: (g * (1.0 + spmd.worker_index("model")),))
