"""What we mean to be: for each work the peers that it is held against, and how much faster ours is to be.

A figure is met or missed by the medians of one run. Of a section that ran, what was not measured, for want of a peer,
is said to be so; and who of several peers was not there. Where a contestant does by hand only what the work cannot do
without, what the figure would be with its time is the limit: a figure that the limit misses too is out of reach of what
it is made of, which its section says: NumPy, its BLAS, mpi4py. One that is slower than ours is no limit.

Peers are as they come: compiled, warmed up, with the threads that suit them. Where there is also one whose C library is
told to ask for large pages, and to keep them, what the figure would be against it is said beside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks import pipelines, sharding
from benchmarks.collectives import VERBS
from benchmarks.contest import TOLD, Measured, Table
from benchmarks.loops import BLOCK
from benchmarks.plans import titles
from benchmarks.saving import READS, WRITES

__all__ = ["TARGETS", "Found", "Target", "found"]

JAX = "jax, 2 devices"
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
    for size in SIZES:
        yield Target("local", f"halo exchange {size}", ("torch, halo in place",), 4)
    for mine, peer in {"spmd": "mpi4py", "spmd, Open MPI": "mpi4py, Open MPI"}.items():
        for verb in VERBS:
            yield Target("mpi", f"{verb} 4 B", (peer,), 10e-6, "more", (mine,))
            for size in ("1 MB", "4 MB", "64 MB"):
                need = 1.5 if verb == "all-reduce" and size != "1 MB" else 0.95
                yield Target("mpi", f"{verb} {size}", (peer,), need, "ratio", (mine,))
        # Only edges move, so it is a matter of a call, as with 4 B.
        for size in ("1 MB", "4 MB", "64 MB"):
            yield Target("mpi", f"halo exchange {size}", (f"{peer}, halo in place",), 10e-6, "more", (mine,))
    by_torch = "torch, by hand", "torch, 1 process"
    eager = *by_torch, "autograd", "pylops-mpi"
    torch, engines = ("torch DDP", "torch + mpi4py"), ("spmd", "spmd, MPI")
    yield Target("w1", "batch 256", (JAX, *torch), 1, ours=engines)
    yield Target("w1", "batch 4096", (JAX, *torch), 1, ours=engines)
    yield Target("w1", "batch 256", ("spmd, MPI",), 1 / 1.2)
    yield Target("w2", "512 tokens, 1024-4096-1024", (JAX,), 1.1)
    yield Target("w2", "512 tokens, 1024-4096-1024", ("torch DTensor",), 1.15)
    yield Target("w3", "(4, 16, 256, 256)", (JAX, "jax, 1 device", *by_torch), 1)
    yield Target("w4", "2048x2048, 100 steps", ("jax, 1 device", *eager), 1)
    yield Target("w4", "2048x2048, 100 steps", (JAX,), 1, ours=("spmd, NumPy alone",))
    yield Target("w5", "4096x4096, round trip", ("mpi4py-fft",), 1)
    yield Target("w5", "4096x4096, round trip", (JAX, "torch DTensor"), 5)
    yield Target("w6", "256x256x256", ("mpi4py-fft",), 1, ours=engines)
    yield Target("w6", "256x256x256", (JAX, "jax, 1 device"), 1.5, ours=engines)
    for case in "256x256x256 complex", "256x256x256 real":
        for engine in engines:
            yield Target("fft", case, ("scipy, 2 threads", "mpi4py-fft"), 1, ours=(engine,))
    yield Target("w7", "20 operations and a sum", ("jax eager, 2 devices",), 100, ours=engines)
    yield Target("w7", "20 operations and a sum", ("torch DTensor",), 5, ours=engines)
    yield Target("w7", "20 operations and a sum", ("jax jitted, 2 devices",), 1 / 1.2, ours=("spmd, MPI, jit",))
    yield Target("w7", "20 operations and a sum", ("jax jitted, 2 devices",), 1 / 1.5, ours=("spmd, jit",))
    yield from _of_loops()
    yield from _of_plans()
    yield from _of_sharding()
    yield from _of_pipelines()
    for case in (*WRITES, *READS):
        yield Target("saving", case, ("torch DCP", "torch DCP, a file each"), 1)
        yield Target("saving", case, ("cp",), 0.5)
    yield Target("costs", "empty map, auto", (), 60e-6, "seconds")
    yield Target("costs", "import", ("numpy",), 1 / 1.5)
    yield Target("costs", "the example of digits", (), 20, "seconds")
    for jitted in "", ", jitted":
        yield Target("profiles", f"data=2, model=2{jitted}", ("spmd, no profile",), 1 / 1.05)
    yield Target("profiles", "data=2, two processes", ("spmd, mpi, no profile",), 1 / 1.05, ours=("spmd, mpi",))
    for case in "batch 256", "batch 4096":
        for engine in engines:
            yield Target("w1", case, (*torch, "torch, by hand"), 1, "memory", (engine,))
    yield Target("w2", "512 tokens, 1024-4096-1024", ("torch DTensor", "torch, by hand"), 1, "memory")
    yield Target("w3", "(4, 16, 256, 256)", by_torch, 1, "memory")
    yield Target("w4", "2048x2048, 100 steps", eager, 1, "memory")


def _of_loops() -> Iterator[Target]:
    for side, most in {64: 5, 256: 1.5, 1024: 0.8}.items():
        yield Target("loops", f"shallow water, {side}x{side}, 200 steps", ("numpy, by hand",), 1 / most)
    yield Target("loops", "shallow water, 1024x1024, 200 steps", (JAX,), 1 / 1.2)
    yield Target("loops", "shallow water, 64x64, 200 steps, first call", (JAX,), 2)
    yield Target("loops", BLOCK, (), 0.6 * 35e-3, "seconds")  # of what a step took before it was recorded as a whole
    for workers, most in {2: 2, 4: 3, 8: 5}.items():
        for way in "", ", fori_loop":
            case = f"stencil, 64x64, 20 steps{way}"
            yield Target("loops", case, ("spmd, 1 worker",), 1 / most, ours=(f"spmd, {workers} workers",))


def _of_plans() -> Iterator[Target]:
    engines, of = ("spmd, MPI", "spmd, gloo"), titles(quick=False)
    for name, peer in {"block": "torch DTensor", "unet": "torch, by hand"}.items():
        yield Target("plans", of[name], (peer,), 1, ours=engines)
        for engine in engines:
            yield Target("plans", of[name], (peer,), 1, "memory", (engine,))
    yield Target("plans", of["lenet"], ("torch, 1 process",), 1 / 1.5, ours=engines)


def _of_sharding() -> Iterator[Target]:
    engines, peers = (
        ("spmd tensors, MPI", "spmd tensors, gloo"),
        {"sharded": "torch fully_shard", "data parallel": "torch DDP"},
    )
    for (kind, _), case in sharding.titles(quick=False).items():
        yield Target("sharding", case, (peers[kind],), 1, ours=engines)
        if kind == "sharded":
            for engine in engines:
                yield Target("sharding", case, (peers[kind],), 1, "memory", (engine,))


def _of_pipelines() -> Iterator[Target]:
    engines = "spmd tensors, MPI", "spmd tensors, gloo"
    for case in (*pipelines.SLEEPING.values(), *pipelines.REMOTE.values()):
        for engine in ("spmd, MPI", *engines):
            yield Target("pipelines", case, ("ideal",), 1 / 1.05, ours=(engine,))
    for case in pipelines.PERCEPTRONS.values():
        yield Target("pipelines", case, ("torch pipelining",), 1, ours=engines)
        for engine in engines:
            yield Target("pipelines", case, ("torch pipelining",), 1, "memory", (engine,))


TARGETS = tuple(_targets())


@dataclass(frozen=True)
class Found:
    """What a run found of a target: of which of our engines, against which peer, and what the limit would have. value:
    None where it was not measured. absent: the peers that were not there. told: the value against the best of those
    peers whose C library is told what is best for them, if there are any."""

    target: Target
    value: float | None
    ours: str
    peer: str
    limit: float | None = None
    absent: tuple[str, ...] = ()
    told: float | None = None

    @property
    def met(self) -> bool:
        return self.value is not None and self._holds(self.value)

    @property
    def out_of_reach(self) -> bool:
        return self.limit is not None and not self._holds(self.limit)

    def _holds(self, value: float) -> bool:
        return value >= self.target.need if self.target.of == "ratio" else value <= self.target.need


def found(tables: Sequence[Table]) -> list[Found]:
    """The targets of the cases that a run has measured."""
    rows = {(table.section.name, case): row for table in tables for case, row in table.rows.items()}
    return [_compare(t, rows[t.section, t.case]) for t in TARGETS if (t.section, t.case) in rows]


def _compare(target: Target, row: dict[str, Measured]) -> Found:
    ours, peers = ({n: row[n] for n in names if n in row} for names in (target.ours, target.peers))
    if target.of == "memory":
        ours, peers = ({n: m for n, m in some.items() if m.peak} for some in (ours, peers))
    absent = tuple(n for n in target.peers if n not in peers)
    if not ours or (target.peers and not peers):
        return Found(target, None, target.ours[0], "", absent=absent)
    mine = min(ours, key=lambda n: ours[n].median)
    if target.of == "memory":
        best = min(peers, key=lambda n: peers[n].peak or 0)
        return Found(target, (ours[mine].peak or 0) / (peers[best].peak or 1), mine, best, absent=absent)
    best = min(peers, key=lambda n: peers[n].median) if peers else ""

    def value(time: float, theirs: float = peers[best].median if peers else 0.0) -> float:
        return theirs / time if target.of == "ratio" else time - theirs

    tuned = [row[n + TOLD].median for n in target.peers if n + TOLD in row]
    told = value(ours[mine].median, min(tuned)) if tuned else None
    limit = None if LIMIT in target.peers else row.get(LIMIT + mine.removeprefix("spmd"), row.get(LIMIT))
    beyond = None if limit is None or limit.median > ours[mine].median else value(limit.median)
    return Found(target, value(ours[mine].median), mine, best, beyond, absent, told)
