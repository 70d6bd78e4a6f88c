"""Count operators and messages: `with spmd.ledger() as log:`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from spmd.transport.call import LEDGERS

__all__ = ["Ledger", "Record", "ledger"]


class Record:
    """The counts of one worker. operators, verbs: applications of each operator, uses of each transport verb.

    messages, bytes: what the worker sends by the algorithms that are chosen for messages, also where workers share
    memory (docs/explanation/costs.md). Not counted: headers, shapes that are asked for, and
    what a map agrees on at its end.
    rounds: how often it sends or receives.
    """

    def __init__(self) -> None:
        self.operators: Counter[str] = Counter()
        self.axes: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self.verbs: Counter[str] = Counter()
        self.messages = 0
        self.bytes = 0
        self.rounds = 0


class Ledger:
    """The counts of the workers of this process.

    operators, verbs, messages, bytes, rounds: of the first of them: worker 0 of virtual workers, its own under MPI.
    """

    def __init__(self) -> None:
        self.workers: dict[int, Record] = {}

    def _record(self, worker: int) -> Record:
        return self.workers.get(worker) or self.workers.setdefault(worker, Record())

    def operator(self, worker: int, name: str, axes: tuple[str, ...]) -> None:
        """Count an application of an operator."""
        record = self._record(worker)
        record.operators[name] += 1
        record.axes[name, axes] += 1

    def verb(self, worker: int, verb: str, messages: int, nbytes: int, rounds: int = 0) -> None:
        """Count a use of a transport verb."""
        record = self._record(worker)
        record.verbs[verb] += 1
        record.messages += messages
        record.bytes += nbytes
        record.rounds += rounds

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

    def __str__(self) -> str:
        lines = [f"{'operator':16}{'times':>8}"]
        lines += [f"{name:16}{n:8}" for name, n in sorted(self.operators.items())]
        return "\n".join([*lines, f"{self.messages} messages, {self.bytes} bytes sent by one worker"])


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Count operators, verbs, messages and bytes while the block runs: in maps it calls, or in the body around it."""
    log = Ledger()
    token = LEDGERS.set((*LEDGERS.get(), log))
    try:
        yield log
    finally:
        LEDGERS.reset(token)
