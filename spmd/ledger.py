"""Count operators and messages: `with spmd.ledger() as log:`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from spmd.representations.tables import Printed, Report, Table
from spmd.transport.algorithms.cost import Cost
from spmd.transport.call import LEDGERS, Observer, Origin, begin_observing

__all__ = ["Ledger", "Record", "Row", "ledger", "short_line"]


class Row(NamedTuple):
    """What one line of a program sends by one operator, of one worker.

    line: `file.py:12 in f`; of a backward sweep the line of the forward call, of sums of gradients the line that asks
    for them. direction: "forward" or "backward". times: applications of the operator. messages, bytes: what the
    collectives send. declared: the bytes that the plans of the operator say.
    """

    line: str
    operator: str
    axes: tuple[str, ...]
    direction: str
    times: int
    messages: int
    bytes: int
    declared: int


class _Counts:
    """The counts of a row."""

    __slots__ = ("declared", "messages", "nbytes", "origin", "times")

    def __init__(self, origin: Origin):
        self.origin = origin
        self.times = self.messages = self.nbytes = self.declared = 0

    def row(self) -> Row:
        origin = self.origin
        counts = self.times, self.messages, self.nbytes, self.declared
        return Row(origin.line, origin.operator, origin.axes, origin.direction, *counts)


class Record:
    """The counts of one worker. operators, verbs: applications of each operator, uses of each transport verb.

    messages, bytes: what the worker sends by the algorithms that are chosen for messages, also where workers share
    memory (docs/explanation/costs.md). Not counted: headers, shapes that are asked for, and
    what a map agrees on at its end. rounds: how often it sends or receives.
    """

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.axes: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.verbs: Counter[str] = Counter()
        self.messages = 0
        self.bytes = 0
        self.rounds = 0
        self._by_origin: dict[Any, _Counts] = {}

    def counts(self, origin: Origin) -> _Counts:
        """The counts of what comes from there."""
        key = origin.key
        return self._by_origin.get(key) or self._by_origin.setdefault(key, _Counts(origin))

    def rows(self) -> list[Row]:
        """The counts by line, operator, axes and direction, in the order of the first calls."""
        merged: dict[Any, Row] = {}
        for row in (counts.row() for counts in self._by_origin.values()):
            before = merged.get(row[:4])  # several calls of one line
            merged[row[:4]] = row if before is None else Row(*row[:4], *map(sum, zip(before[4:], row[4:], strict=True)))
        return list(merged.values())


class Ledger(Printed, Observer):
    """What `spmd.ledger` counts: of the workers of this process, each by itself.

    workers: a `Record` for each, by its number. first: that of the first: worker 0 of virtual workers, its own under
    MPI. operators, verbs, messages, bytes, rounds, rows(): those of `first`, so of one worker, not of all together.

    messages, bytes: what the worker sends by the algorithms for messages. rounds: how often it sends or receives.
    operators: how often it applies each operator: a `Counter` by name; first.axes: by name and axes. rows(): a `Row`
    for each line of the program, in the order of the first calls; print(log) shows them as a table, whose column
    `times` has the applications of the operator by that line.
    """

    def __init__(self) -> None:
        self.workers: dict[int, Record] = {}

    def _record(self, worker: int) -> Record:
        return self.workers.get(worker) or self.workers.setdefault(worker, Record())

    def operator(self, worker: int, origin: Origin) -> None:
        """Count an application of an operator."""
        record = self._record(worker)
        record.operators[origin.operator] += 1
        record.axes[origin.operator, origin.axes] += 1
        record.counts(origin).times += 1

    def verb(self, worker: int, verb: str, cost: Cost, declared: Cost, origin: Origin) -> None:
        """Count a use of a transport verb."""
        record = self._record(worker)
        record.verbs[verb] += 1
        record.messages += cost.messages
        record.bytes += cost.nbytes
        record.rounds += cost.rounds
        counts = record.counts(origin)
        counts.messages += cost.messages
        counts.nbytes += cost.nbytes
        counts.declared += declared.nbytes

    @property
    def first(self) -> Record:
        """The counts of the first worker here; zero before its first call."""
        return self.workers[min(self.workers)] if self.workers else Record()

    @property
    def operators(self) -> Counter[str]:
        return self.first.operators

    @property
    def verbs(self) -> Counter[str]:
        return self.first.verbs

    @property
    def messages(self) -> int:
        return self.first.messages

    @property
    def bytes(self) -> int:
        return self.first.bytes

    @property
    def rounds(self) -> int:
        return self.first.rounds

    def rows(self) -> list[Row]:
        """A `Row` for each line, operator, axes and direction, in the order of the first calls."""
        return self.first.rows()

    def _report(self) -> Report:
        head = ("line", "operator", "axes", "direction", "times", "messages", "bytes", "declared")
        rows = [(short_line(r.line), r.operator, " ".join(r.axes), *map(str, r[3:])) for r in self.rows()]
        total = f"{self.messages} messages, {self.bytes} bytes sent by one worker"
        return Report("", [Table(rows, head, right=range(4, 8)), total], gap="\n")


def short_line(line: str) -> str:
    """`file.py:12 in f` without the folders."""
    return line.rpartition("/")[2]


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Count operators, verbs, messages and bytes while the block runs: in maps it calls, or in the body around it.

    Gives a `Ledger`. `print(log)` is a table, and `log.rows()` its rows, by the line of the program, the operator, the
    axes and the direction. `log.messages`, `log.bytes` and `log.rounds` are what one worker sends, not the sum over
    workers; `log.operators` how often it applies each operator; `log.workers[w]` the counts of each worker of this
    process. What jitted functions send is counted, too.

        >>> total = spmd.map(lambda x: spmd.psum(x, "x"), in_specs=P("x"), out_specs=P())
        >>> with spmd.Mesh(x=2), spmd.ledger() as log:
        ...     y = total(np.arange(4.0))
        >>> [(row.operator, row.axes, row.direction, row.times, row.bytes, row.declared) for row in log.rows()]
        [('Sum', ('x',), 'forward', 1, 16, 16)]
        >>> log.messages, log.operators["Sum"], sum(record.messages for record in log.workers.values())
        (1, 1, 2)
    """
    log = Ledger()
    token = begin_observing(log)
    try:
        yield log
    finally:
        LEDGERS.reset(token)
