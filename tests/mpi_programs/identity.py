"""Two workers call functions of trees: they meet where function and tree are the same, and are told where not."""

from __future__ import annotations

import itertools
import json
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import spmd


class Pair(NamedTuple):
    first: Any
    second: Any


class Other(NamedTuple):
    first: Any
    second: Any


@spmd.tree.register
@dataclass
class Model:
    first: Any
    second: Any
    activation: Any = field(default=abs, metadata={"static": True})


@spmd.tree.register
@dataclass
class Head:
    first: Any
    second: Any


def sorted_dict(**entries: Any) -> defaultdict:
    return defaultdict(list, entries)


# Trees of two blocks a and b, by what workers compare: those in one list are one tree.
TREES: dict[str, list[Callable[[Any, Any], Any]]] = {
    "(*, *)": [lambda a, b: (a, b)],
    "[*, *]": [lambda a, b: [a, b]],
    "(*, (*,))": [lambda a, b: (a, (b,))],
    "((*, *),)": [lambda a, b: ((a, b),)],
    "(*, None, *)": [lambda a, b: (a, None, b)],
    "(None, *, *)": [lambda a, b: (None, a, b)],
    "{'a': *, 'b': *}": [lambda a, b: {"a": a, "b": b}, lambda a, b: {"b": b, "a": a}],
    "{'b': *, 'c': *}": [lambda a, b: {"b": a, "c": b}],
    "{'a': *, 'b': *, 'c': None}": [lambda a, b: {"a": a, "b": b, "c": None}],
    "{'a': {'b': *}, 'c': *}": [lambda a, b: {"a": {"b": a}, "c": b}],
    "{1: *, 2: *}": [lambda a, b: {1: a, 2: b}, lambda a, b: {np.int64(2): b, True: a}],
    "{'1': *, '2': *}": [lambda a, b: {"1": a, "2": b}],
    "OrderedDict('a'=*, 'b'=*)": [lambda a, b: OrderedDict(a=a, b=b)],
    "OrderedDict('b'=*, 'a'=*)": [lambda a, b: OrderedDict(b=a, a=b)],
    "defaultdict('a'=*, 'b'=*)": [lambda a, b: sorted_dict(a=a, b=b), lambda a, b: sorted_dict(b=b, a=a)],
    "deque(0=*, 1=*)": [lambda a, b: deque([a, b])],
    "Pair(first=*, second=*)": [Pair],
    "Other(first=*, second=*)": [Other],
    "Model('first'=*, 'second'=*)": [Model, lambda a, b: Model(a, b, round)],
    "Head('first'=*, 'second'=*)": [Head],
}

SWAP = [(0, 1), (1, 0)]

# Functions of trees.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "psum": lambda t: spmd.psum(t, "x"),
    "pmean": lambda t: spmd.pmean(t, "x"),
    "pmax": lambda t: spmd.pmax(t, "x"),
    "pmin": lambda t: spmd.pmin(t, "x"),
    "all_gather": lambda t: spmd.all_gather(t, "x"),
    "psum_scatter": lambda t: spmd.psum_scatter(t, "x"),
    "ppermute": lambda t: spmd.ppermute(t, "x", SWAP),
    "shift": lambda t: spmd.shift(t, "x"),
    "pshuffle": lambda t: spmd.pshuffle(t, "x", [1, 0]),
    "sendrecv": lambda t: spmd.sendrecv(t, "x", lambda k: 1 - k, lambda k: 1 - k),
    "all_to_all": lambda t: spmd.all_to_all(t, "x", 0, 0),
    "pswapaxes": lambda t: spmd.pswapaxes(t, "x", 0),
    "halo_exchange": lambda t: spmd.halo_exchange(t, spmd.P("x"), 1),
    "sum_reduce": lambda t: spmd.sum_reduce(t, "x"),
    "gather": lambda t: spmd.gather(t, "x"),
    "inner": lambda t: spmd.inner(t, t),
    "norm": lambda t: spmd.norm(t),
}

# Functions of one array: those of a row do the same to it, but for what comes afterwards.
ARRAYS: list[dict[str, Callable[[Any], Any]]] = [
    {
        "psum": lambda x: spmd.psum(x, "x"),
        "pmean": lambda x: spmd.pmean(x, "x"),
        "sum": lambda x: spmd.sum(x, "x", ()),
        "mean": lambda x: spmd.mean(x, "x", ()),
    },
    {"pmax": lambda x: spmd.pmax(x, "x"), "max": lambda x: spmd.max(x, "x", ())},
    {"pmin": lambda x: spmd.pmin(x, "x"), "min": lambda x: spmd.min(x, "x", ())},
    {
        "ppermute": lambda x: spmd.ppermute(x, "x", SWAP),
        "shift": lambda x: spmd.shift(x, "x"),
        "pshuffle": lambda x: spmd.pshuffle(x, "x", [1, 0]),
        "sendrecv": lambda x: spmd.sendrecv(x, "x", lambda k: 1 - k, lambda k: 1 - k),
    },
    {"all_to_all": lambda x: spmd.all_to_all(x, "x", 0, 0), "pswapaxes": lambda x: spmd.pswapaxes(x, "x", 0)},
    {"inner": lambda x: spmd.inner(x, x), "norm": lambda x: spmd.norm(x)},
]


class Draw(NamedTuple):
    """What two workers call. equal: whether that is the same. rounds: how often both have called the first's before.

    functions, trees: by name; a tree is "" for one array.
    """

    functions: tuple[str, str]
    trees: tuple[str, str]
    equal: bool
    rounds: int
    calls: tuple[Callable[[Any], Any], Callable[[Any], Any]]


def blocks(x: Any) -> tuple[Any, Any]:
    return x, 10 * x


def of_tree(function: Callable[[Any], Any], tree: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(tree(*blocks(x)))


def draw(rng: random.Random, only: set[str] | None = None) -> Draw:
    """Two workers that call the same, or differ in the function or in the tree. only: functions to draw from."""
    rounds, equal = rng.randrange(4), rng.random() < 0.3
    rows = [row for row in ARRAYS if only is None or only.issuperset(row)]
    if not equal and rng.random() < 0.4 and rows:
        (f, first), (g, second) = rng.sample([*rng.choice(rows).items()], 2)
        return Draw((f, g), ("", ""), False, rounds, (first, second))
    name = rng.choice([n for n in FUNCTIONS if only is None or n in only])
    function = FUNCTIONS[name]
    trees = [rng.choice([*TREES])] * 2 if equal else rng.sample([*TREES], 2)
    first, second = (of_tree(function, rng.choice(TREES[t])) for t in trees)
    return Draw((name, name), (trees[0], trees[1]), equal, rounds, (first, second))


def body_of(drawn: Draw, value: Callable[[Any], Any] = lambda x: x) -> Callable[[Any], None]:
    """The body. All calls are made by one line."""

    def body(x: Any) -> None:
        mine = drawn.calls[spmd.worker_index("x")]
        for call in [*[drawn.calls[0]] * drawn.rounds, mine]:
            call(value(x))

    return body


def judged(drawn: Draw, error: Exception | None) -> str:
    """What is wrong with how a body ended; nothing, if it is right."""
    if drawn.equal:
        return "" if error is None else f"{drawn} was refused: {error}"
    text = str(error)
    wanted = ["worker 0 (x=0): ", "worker 1 (x=1): ", *(f"{f}(" for f in drawn.functions)]
    if drawn.trees[0] != drawn.trees[1]:
        wanted += [*(f"of {t}\n" for t in drawn.trees), "paths"]
    missing = [w for w in wanted if w not in text]
    if type(error).__name__ != "MismatchError" or missing or text.count("identity.py:") != 2:
        return f"{drawn} gave {type(error).__name__}, without {missing}: {text}"
    return ""


def wrong(mesh: spmd.Mesh, count: int, seed: int, check: bool) -> list[str]:
    """What is wrong with so many draws."""
    rng, found = random.Random(seed), []
    data = np.random.default_rng(seed).normal(size=(4, 2, 2))
    with mesh:
        for _ in range(count):
            drawn, error = draw(rng), None
            try:
                spmd.map(body_of(drawn), spmd.P("x"), None, check=check)(data[:, 0])
            except Exception as raised:
                error = raised
            found.append(judged(drawn, error))
    return [*filter(None, found)]


def every_pair() -> list[Draw]:
    """Each tree against each other one, of `psum`, and each function of an array against each of its row."""
    psum, found = FUNCTIONS["psum"], []
    for (s, first), (t, second) in itertools.combinations(TREES.items(), 2):
        found.append(Draw(("psum", "psum"), (s, t), False, 2, (of_tree(psum, first[0]), of_tree(psum, second[0]))))
    for row in ARRAYS:
        for (f, one), (g, other) in itertools.combinations(row.items(), 2):
            found.append(Draw((f, g), ("", ""), False, 2, (one, other)))
    return found


if __name__ == "__main__":
    said = [wrong(spmd.Mesh(x=2), int(sys.argv[1]), seed, bool(seed % 2)) for seed in range(2)]
    if spmd.is_main():
        print(json.dumps(said))
