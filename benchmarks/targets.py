"""What we mean to be: for each work the peers that it is held against, and how much faster ours is to be.

A figure is met or missed by the medians of one run. What the run did not measure, for want of a peer or of the section,
is left out. Where a contestant does only what the work cannot do without, what the figure would be with its time is the
limit: a figure that the limit misses too is out of reach of any library of the kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks.collectives import VERBS
from benchmarks.contest import Measured, Table

__all__ = ["TARGETS", "Found", "Target", "found"]

JAX = "jax, 2 devices"
GLOO = ("torch, gloo", "torch, halo in place")
SIZES = ("4 B", "256 KB", "4 MB", "64 MB")
LIMIT = "limit"
"""The contestant that does only what the work cannot do without."""


@dataclass(frozen=True)
class Target:
    """need: by `of` the least "ratio" of the best peer's time to ours, the most "seconds" of ours, the most seconds
    that it takes "more" than the best peer, or the most "memory" relative to the best peer's. ours: our engines that
    may do it, of which the best counts."""

    section: str
    case: str
    peers: tuple[str, ...]
    need: float
    of: Literal["ratio", "seconds", "more", "memory"] = "ratio"
    ours: tuple[str, ...] = ("spmd",)


def _targets() -> Iterator[Target]:
    for size, need in zip(SIZES, (10, 1.5, 2, 5), strict=True):
        yield Target("local", f"all-reduce {size}", (JAX,), need)
    for verb in "broadcast", "permute":
        yield Target("local", f"{verb} 4 MB", (JAX,), 20)
        yield Target("local", f"{verb} 64 MB", (JAX,), 300)
    for verb, need in {"all-gather": 6, "reduce-scatter": 3.5, "all-to-all": 7}.items():
        yield Target("local", f"{verb} 64 MB", (JAX,), need)
    for verb in "all-reduce", "reduce-scatter":
        yield Target("local", f"{verb} 64 MB", (LIMIT,), 0.8)
    for verb in VERBS:
        for size in SIZES:
            yield Target("local", f"{verb} {size}", ("torch, gloo",), 4)
    for mine, peer in {"spmd": "mpi4py", "spmd, Open MPI": "mpi4py, Open MPI"}.items():
        for verb in VERBS:
            yield Target("mpi", f"{verb} 4 B", (peer,), 10e-6, "more", (mine,))
            for size in ("1 MB", "4 MB", "64 MB"):
                need = 1.5 if verb == "all-reduce" and size != "1 MB" else 0.95
                yield Target("mpi", f"{verb} {size}", (peer,), need, "ratio", (mine,))
    torch, engines = ("torch DDP", "torch + mpi4py"), ("spmd", "spmd, MPI")
    yield Target("w1", "batch 256", (JAX, *torch), 1, ours=engines)
    yield Target("w1", "batch 4096", (JAX, *torch), 1, ours=engines)
    yield Target("w2", "512 tokens, 1024-4096-1024", (JAX,), 1.1)
    yield Target("w2", "512 tokens, 1024-4096-1024", ("torch DTensor",), 1.15)
    yield Target("w3", "(4, 16, 256, 256)", (JAX, "jax, 1 device", "torch, by hand"), 1)
    yield Target("w4", "2048x2048, 100 steps", ("jax, 1 device",), 1)
    yield Target("w4", "2048x2048, 100 steps", (JAX,), 1, ours=("spmd, NumPy alone",))
    yield Target("w5", "4096x4096, round trip", ("mpi4py-fft",), 1)
    yield Target("w5", "4096x4096, round trip", (JAX, "torch DTensor"), 5)
    yield Target("w6", "256x256x256", ("mpi4py-fft",), 1, ours=engines)
    yield Target("w6", "256x256x256", (JAX, "jax, 1 device"), 1.5, ours=engines)
    yield Target("w7", "20 operations and a sum", ("jax eager, 2 devices",), 100, ours=engines)
    yield Target("w7", "20 operations and a sum", ("torch DTensor",), 5, ours=engines)
    yield Target("costs", "empty map, auto", (), 60e-6, "seconds")
    yield Target("costs", "import", ("numpy",), 1 / 1.5)
    yield Target("costs", "the example of digits", (), 20, "seconds")
    yield Target("w1", "batch 256", (*torch, "torch, by hand"), 1, "memory")
    yield Target("w1", "batch 4096", (*torch, "torch, by hand"), 1, "memory")
    yield Target("w2", "512 tokens, 1024-4096-1024", ("torch DTensor", "torch, by hand"), 1, "memory")
    yield Target("w3", "(4, 16, 256, 256)", ("torch, by hand",), 1, "memory")


TARGETS = tuple(_targets())


@dataclass(frozen=True)
class Found:
    """What a run found of a target: of which of our engines, against which peer, and what the limit would have."""

    target: Target
    value: float
    ours: str
    peer: str
    limit: float | None = None

    @property
    def met(self) -> bool:
        return self._holds(self.value)

    @property
    def out_of_reach(self) -> bool:
        return self.limit is not None and not self._holds(self.limit)

    def _holds(self, value: float) -> bool:
        return value >= self.target.need if self.target.of == "ratio" else value <= self.target.need


def found(tables: Sequence[Table]) -> list[Found]:
    """The targets that a run has measured."""
    by_name = {table.section.name: table for table in tables}
    results = []
    for target in TARGETS:
        row = by_name[target.section].rows.get(target.case, {}) if target.section in by_name else {}
        ours, peers = ({n: row[n] for n in names if n in row} for names in (target.ours, target.peers))
        if ours and (peers or not target.peers):
            result = _compare(target, ours, peers, row)
            if result is not None:
                results.append(result)
    return results


def _compare(
    target: Target, ours: dict[str, Measured], peers: dict[str, Measured], row: dict[str, Measured]
) -> Found | None:
    mine = min(ours, key=lambda n: ours[n].median)
    limit = None if LIMIT in target.peers else row.get(LIMIT + mine.removeprefix("spmd"), row.get(LIMIT))
    if target.of == "memory":
        peak, peaks = ours[mine].peak, {n: m.peak for n, m in peers.items() if m.peak}
        if peak is None or not peaks:
            return None
        best = min(peaks, key=peaks.__getitem__)
        return Found(target, peak / peaks[best], mine, best)
    best = min(peers, key=lambda n: peers[n].median) if peers else ""
    theirs = peers[best].median if peers else 0.0

    def value(time: float) -> float:
        return theirs / time if target.of == "ratio" else time - theirs

    return Found(target, value(ours[mine].median), mine, best, None if limit is None else value(limit.median))
