"""Random programs for bodies: right ones with what they give, and such in which one worker differs from the others.

A program is a list of steps on values of three entries, drawn from a seed. `body` runs it on one worker; `oracle` runs
it on the lists of all workers' values. A fault makes worker `odd` differ where that decides a number; a legal
difference does not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import spmd
from spmd import P

FAULTS = (
    *("undeclared reduction", "undeclared gradient", "undeclared result", "tree", "tuple and dict", "function"),
    *("missing collective", "object", "checkpoint", "masked argument", "argument of objects"),
)
FAULTS_OF_PROCESSES = ("argument", "closure", "number", "shape", "structure", "global array")
LEGAL = ("declared data", "a line of one worker", "static argument", "a branch", "local print")


@dataclass
class Program:
    """size: workers. steps: (operation, indices of values, parameter). fault, legal: how worker `odd` differs."""

    seed: int
    size: int
    steps: list[tuple[str, tuple[int, ...], Any]] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    fault: str | None = None
    legal: tuple[str, ...] = ()
    odd: int = 0

    def __str__(self) -> str:
        lines = "\n".join(
            f"  v{k} [{s}] = {step}" for k, (s, step) in enumerate(zip(self.states, self.steps, strict=True))
        )
        head = f"program {self.seed} on {self.size} workers, fault {self.fault}, legal {self.legal}, odd {self.odd}"
        return f"{head}\n{lines}"


def draw(seed: int, *, processes: int | None = None) -> Program:
    """A program; for so many processes, or for 1 to 4 virtual workers."""
    rng = np.random.default_rng(seed)
    size = processes or int(rng.integers(1, 5))
    p = Program(seed, size, odd=int(rng.integers(size)))
    p.legal = tuple(name for name in LEGAL if rng.random() < 0.3)
    faults = FAULTS + (FAULTS_OF_PROCESSES if processes else ())
    if size > 1 and rng.random() < 0.5:
        p.fault = str(rng.choice(faults))

    def add(state: str, operation: str, of: tuple[int, ...] = (), parameter: Any = None) -> int:
        p.steps.append((operation, of, parameter))
        p.states.append(state)
        return len(p.steps) - 1

    def some(states: str) -> int:
        return int(rng.choice([k for k, s in enumerate(p.states) if s in states]))

    add("I", "argument")
    add("V", "rows")
    add("I", "number")
    add("I", "bare", parameter=int(rng.integers(1000)))
    if "declared data" in p.legal:
        add("V", "declared")
    for _ in range(int(rng.integers(2, 8))):
        operation = str(
            rng.choice(["add", "multiply", "tanh", *("psum pmean pmax mean shift tree gradient narrow".split()) * 2])
        )
        if operation in ("add", "multiply"):
            a, b = some("IV"), some("IV")
            add("V" if "V" in (p.states[a], p.states[b]) else "I", operation, (a, b))
        elif operation == "tanh":
            a = some("IV")
            add(p.states[a], operation, (a,))
        elif operation in ("psum", "tree"):
            add("I", operation, (some("V"), some("V")))
        elif operation == "shift":
            add("V", operation, (some("V"),))
        elif operation == "narrow":
            add("I", operation)
        elif operation == "gradient":
            a = some("IV")
            add(p.states[a], operation, (a, some("V")))
        else:
            add("I", operation, (some("IV"),))
    if p.fault in ("tree", "tuple and dict"):
        add("I", "tree", (some("V"), some("V")))
    if p.fault in ("function", "missing collective"):
        add("I", "psum", (some("V"), some("V")))
    if p.fault == "checkpoint":
        add("I", "checkpoint", (0,))
    return p


def own(p: Program, worker: int, fault: str) -> int:
    """1 on the odd worker of a program with this fault, else 0."""
    return int(p.fault == fault and worker == p.odd)


def whole(p: Program) -> tuple[np.ndarray, np.ndarray, float]:
    """The arguments: a replicated array, rows for the workers, and a number."""
    rng = np.random.default_rng(p.seed + 1)
    return rng.normal(size=3), rng.normal(size=(p.size, 3)), float(rng.normal())


def square(w, v):
    return spmd.mean((w * v) ** 2, "x")


def body(p: Program, closed: np.ndarray):
    """The body of the map, which closes over an array."""

    def run(a, rows, number, static):
        worker = spmd.worker_index("x")
        values: list[Any] = []
        for operation, of, parameter in p.steps:
            args = [values[k] for k in of]
            values.append(step(p, worker, operation, args, parameter, (a, rows[0], number, closed)))
        legal_lines(p, worker, static)
        faulty_lines(p, worker, values)
        total = 0.0
        for value in values:
            total = total + spmd.pvary(value, "x")
        shown = float(p.seed + own(p, worker, "object"))
        result = np.full(3, 1.0 + own(p, worker, "undeclared result"))
        return (total + closed)[None], result, shown

    return run


def step(p: Program, worker: int, operation: str, args: list, parameter: Any, given: tuple) -> Any:
    a, rows, number, _ = given
    odd = worker == p.odd
    match operation:
        case "argument":
            return a
        case "rows":
            return rows
        case "number":
            return a * 0.0 + number
        case "bare":
            return a * 0.0 + np.random.default_rng(parameter).normal(size=3)
        case "declared":
            return spmd.varying(np.full(3, 1.0 + worker), "x")
        case "add":
            return args[0] + args[1]
        case "multiply":
            return args[0] * args[1]
        case "tanh":
            return np.tanh(args[0])
        case "psum":
            if p.fault == "function" and odd:
                return spmd.pmean(args[0] + args[1], "x")
            if p.fault == "missing collective" and odd:
                return args[0] * 0.0
            return spmd.psum(args[0] + args[1], "x")
        case "tree":
            return tree_sum(p, odd, *args)
        case "pmean":
            return spmd.pmean(args[0], "x")
        case "pmax":
            return spmd.pmax(args[0], "x")
        case "mean":
            return a * 0.0 + spmd.mean(args[0], "x")
        case "narrow":
            return a * 0.0 + spmd.mean(spmd.varying(np.full(40_000, 1.0 + worker, np.float16), "x"), "x")
        case "shift":
            return spmd.shift(args[0], "x", 1)
        case "gradient":
            return spmd.grad(square)(args[0], args[1])
        case "checkpoint":
            return late_binding(args[0])
    raise AssertionError(operation)


def tree_sum(p: Program, odd: bool, x: Any, y: Any) -> Any:
    if p.fault == "tree" and odd:
        return spmd.psum({"b": x, "c": y}, "x")["b"]
    if p.fault == "tuple and dict" and odd:
        return spmd.psum((x, y), "x")[1]
    return spmd.psum({"a": x, "b": y}, "x")["b"]


def late_binding(a: Any) -> Any:
    """A checkpoint whose function sees another value of `k` when it runs again."""

    def loss(y):
        for k in range(3):
            y = spmd.checkpoint(lambda y: np.tanh(y * (k + 1.0)))(y)  # noqa: B023
        return np.sum(y)

    return spmd.grad(loss)(a)


def legal_lines(p: Program, worker: int, static: int) -> None:
    if "a line of one worker" in p.legal and worker == p.odd:
        spmd.pmean(np.ones(2), "x")
    if "a branch" in p.legal and worker == p.odd:
        np.tanh(np.ones(3))
    if "static argument" in p.legal:
        assert isinstance(static, int)
    if "local print" in p.legal and worker == p.odd:
        str(spmd.block(np.ones(2)))


def faulty_lines(p: Program, worker: int, values: list) -> None:
    if p.fault == "undeclared reduction":
        values.append(spmd.pmean(np.full(3, 1.0 + own(p, worker, p.fault)), "x"))
    if p.fault == "undeclared gradient":
        values.append(spmd.grad(square)(np.full(3, 1.0 + own(p, worker, p.fault)), values[1]))


GLOBAL = np.zeros(3)


def reads_a_global(total):
    return total + GLOBAL


def run(p: Program, mesh: spmd.Mesh, rank: int = -1) -> list[np.ndarray]:
    """Run a program; rank: of this process, if it is one of several."""
    global GLOBAL
    a, rows, number = whole(p)
    there = max(rank, 0) if p.fault in FAULTS_OF_PROCESSES and rank == p.odd else None
    a = a + 1.0 if there is not None and p.fault == "argument" else a
    number = number + 1.0 if there is not None and p.fault == "number" else number
    if p.fault == "masked argument":
        a = np.ma.masked_array(a, [False, True, False])
    if p.fault == "argument of objects":
        a = a.astype(object)
    closed = np.zeros(3) + (there is not None and p.fault == "closure")
    GLOBAL = np.zeros(3) + (there is not None and p.fault == "global array")
    if there is not None and p.fault == "shape":
        rows = np.concatenate([rows, rows])
    inner = body(p, closed)

    def main(t, rows, number, static):
        total, result, shown = inner(t["a"], rows, number, static)
        return reads_a_global(total), result, shown

    t = {"a": a, "b": a} if there is not None and p.fault == "structure" else {"a": a}
    static = rank if "static argument" in p.legal else 0
    outs = mesh.map(main, (P(), P("x"), P(), None), (P("x"), P(), None))(t, rows, number, static)
    return [outs[0].numpy(), outs[1].numpy(), np.float64(outs[2])]


def oracle(p: Program) -> list[np.ndarray]:
    """What a program without a fault gives, from the values of all workers together."""
    a, rows, number = whole(p)
    n = p.size
    values: list[list[np.ndarray]] = []
    for operation, of, parameter in p.steps:
        args = [values[k] for k in of]
        values.append(together(p, operation, args, parameter, (a, rows, number), [p.states[k] for k in of]))
    total = np.array([sum(v[w] for v in values) for w in range(n)])
    return [total, np.ones(3), np.float64(p.seed)]


def together(p: Program, operation: str, args: list, parameter: Any, given: tuple, states: list[str]) -> list:
    a, rows, number = given
    n = p.size
    match operation:
        case "argument":
            return [a] * n
        case "rows":
            return [*rows]
        case "number":
            return [np.full(3, number)] * n
        case "bare":
            return [np.random.default_rng(parameter).normal(size=3)] * n
        case "declared":
            return [np.full(3, 1.0 + w) for w in range(n)]
        case "add":
            return [x + y for x, y in zip(*args, strict=True)]
        case "multiply":
            return [x * y for x, y in zip(*args, strict=True)]
        case "tanh":
            return [np.tanh(x) for x in args[0]]
        case "psum":
            return [np.sum([x + y for x, y in zip(*args, strict=True)], axis=0)] * n
        case "tree":
            return [np.sum(args[1], axis=0)] * n
        case "pmean":
            return [np.mean(args[0], axis=0)] * n
        case "pmax":
            return [np.max(args[0], axis=0)] * n
        case "mean":
            return [np.full(3, np.mean(args[0]))] * n
        case "narrow":
            return [np.full(3, (n + 1) / 2)] * n
        case "shift":
            return [args[0][w - 1] for w in range(n)]
        case "gradient":
            each = [2 * w * v * v / (3 * n) for w, v in zip(*args, strict=True)]
            return each if states[0] == "V" else [np.sum(each, axis=0)] * n
    raise AssertionError(operation)


def verdict(p: Program, mesh: spmd.Mesh, rank: int = -1) -> str:
    """What is wrong with how a program ends; nothing where it is right, or raises as it should."""
    return judged(p, lambda: run(p, mesh, rank), lambda: oracle(p), of_processes=rank >= 0)


def judged(p: Any, run: Callable[[], Any], oracle: Callable[[], Any], *, of_processes: bool = False) -> str:
    """What is wrong with what `run` gives for a program, where `oracle` gives what is right. A fault has to raise an
    error of this library; in processes it may be that of another one."""
    try:
        got = run()
    except Exception as error:
        right = p.fault is not None and (type(error).__module__ == "spmd.errors" or of_processes)
        return "" if right else f"{p}\nraised {type(error).__name__}: {error}"
    if p.fault is not None:
        return f"{p}\nraised nothing, and gave {got}"
    for one, other in zip(got, oracle(), strict=True):
        if not np.allclose(one, other, rtol=1e-9, atol=1e-9):
            return f"{p}\ngave {one}, not {other}"
    return ""
