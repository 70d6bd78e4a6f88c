"""Collectives by themselves, forward and with their adjoints: between virtual workers, and over MPI.

A size is that of the block a worker brings, of float32; of 4 B a worker brings a number for each worker where the
block is to be split. Blocks of the halo exchange are squares, with a row of each neighbour around them and zeros beyond
the ends; the matrix of the repartition is the square whose blocks come nearest to the size. "adjoint": the result, and
then the adjoint of it; ours by a tape, by hand the calls alone. All tell what every worker has.

local. Ours is timed by worker 0, in the body of a map, checked, as by default. Its arrays are the body's, which nobody
writes to, as JAX's are: so what only moves is handed over. "spmd, written to" has writable arrays of NumPy instead, as
torch and MPI have: each repetition declares its own, and pays for the copy that keeps it safe. "jax" is a jitted
shard_map, called once a repetition; in "one program" the repetitions are a loop within it, of which each needs the one
before; with "large pages" its C library asks for such, and keeps them. "torch, gloo" is two processes with one thread
each, and tensors that are there beforehand. Adjoints are written by hand, without autograd. Reduce-scatter and
all-gather are an exchange with the other process, which is faster than gloo's own; of the other calls and an exchange,
and of its two forms, it is found out in each case which is. The limit is what it takes to add the two blocks into
memory that is there, and to copy them where the result is a copy: the fastest of one thread and of two, with half each,
by NumPy and past the caches; from 256 KB on.

mpi. Two processes. "mpi4py" is the plain call on buffers that are there beforehand, the repartition an Alltoallw of
subarray types that are made once. The limit is mpi4py that keeps what we promise: first both tell each other what they
call, in 1 KB, so that nobody gets what was not meant for it. Then comes the plain call, or for sums the exchange of
both blocks, and their sum in the order of the workers.

Whoever exchanges halos by hand may keep the block within a larger one, of which only edges move: that is "halo in
place". Otherwise the block is copied there, because it is another's to keep. Ours is in an array that spmd has made,
around which there is room: as long as the result is there only edges move, and the block stays what it was. So "halo in
place" is what ours is to be held against too. Blocks that are "written to" are copied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import isqrt, sqrt
from typing import Any

import numpy as np

from benchmarks.contest import (
    KEEPING,
    LARGE_PAGES,
    ONE_THREAD,
    TOLD,
    TWO_DEVICES,
    Builders,
    Case,
    Section,
    by_the_faster,
    faster,
    in_turns,
    in_two_threads,
    repeated,
    room,
    torch_with,
)

VERBS = (
    "all-reduce",
    "broadcast",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "permute",
    "halo exchange",
    "repartition",
)
SPLIT = ("reduce-scatter", "all-to-all")
NUMBERS = {"4 B": 1, "256 KB": 1 << 16, "1 MB": 1 << 18, "4 MB": 1 << 20, "64 MB": 1 << 24}

LOCAL = Section("local", "collectives between virtual workers of one process, two if not said otherwise", 1e-12)
MPI = Section("mpi", "collectives between two processes over MPI", 1e-12)


@dataclass(frozen=True)
class Work:
    """What a case asks for."""

    verb: str
    size: str
    adjoint: bool = False
    workers: int = 2

    @property
    def name(self) -> str:
        before = "" if self.workers == 2 else f"{self.workers} workers: "
        return f"{before}{self.verb} {self.size}{' adjoint' if self.adjoint else ''}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block that a worker brings."""
        n, p = NUMBERS[self.size], self.workers
        if self.verb == "halo exchange":
            return isqrt(n), isqrt(n)
        if self.verb == "repartition":
            rows = max(1, round(sqrt(n / p)))
            return rows, rows * p
        return (max(n, p) if self.verb in SPLIT else n,)

    def block(self, worker: int) -> np.ndarray:
        return np.random.default_rng(worker).standard_normal(self.shape, np.float32)

    def whole(self) -> np.ndarray:
        return np.concatenate([self.block(k) for k in range(self.workers)])


def works(sizes: tuple[str, ...], quick: bool, workers: int = 2) -> Iterator[Work]:
    for verb in VERBS:
        for adjoint in (False, True):
            for size in sizes[:2] if quick else sizes:
                yield Work(verb, size, adjoint, workers)


local = partial(works, ("4 B", "256 KB", "4 MB", "64 MB"))
over_mpi = partial(works, ("4 B", "1 MB", "4 MB", "64 MB"))


def cases(build: Callable[[Work], Case], asked: Iterator[Work]) -> Builders:
    return {work.name: partial(build, work) for work in asked}


def together(step: Callable[[], Any], meet: Callable[[], Any]) -> Callable[[int], float]:
    """Seconds per step, from when all are there to when all are done: a root could run ahead of those it sends to."""

    def run(count: int) -> float:
        meet()
        begun = time.perf_counter()
        for _ in range(count):
            step()
        meet()
        return (time.perf_counter() - begun) / count

    return run


# Ours


def verb_spmd(work: Work, mesh: Any) -> Callable[[Any], Any]:
    """What a case does, as a function of an array of the body."""
    import spmd
    from spmd import P

    rows, *rest = work.shape
    whole = (rows * work.workers, *rest)
    if work.verb == "repartition":
        src, dst = mesh.layout(whole, P("x")), mesh.layout(whole, P(None, "x"))
        return lambda x: spmd.repartition(x, src, dst)
    ring = [(k, (k + 1) % work.workers) for k in range(work.workers)]
    return {
        "all-reduce": lambda x: spmd.psum(x, "x"),
        "broadcast": lambda root: spmd.broadcast(root, "x"),
        "all-gather": lambda x: spmd.all_gather(x, "x", tiled=True),
        "reduce-scatter": lambda x: spmd.psum_scatter(x, "x", tiled=True),
        "all-to-all": lambda x: spmd.all_to_all(x, "x", 0, 0, tiled=True),
        "permute": lambda x: spmd.ppermute(x, "x", ring),
        "halo exchange": lambda x: spmd.halo_exchange(x, P("x"), (1, 0), ("zero", "none"), shape=whole),
    }[work.verb]


def ours(work: Work, transport: str, scheduler: str | None = None, written: bool = False) -> Case:
    import spmd
    from spmd import P

    mesh = spmd.Mesh(x=work.workers, transport=transport, scheduler=scheduler)
    verb = verb_spmd(work, mesh)

    def both(x):
        y, pull = spmd.vjp(verb, x)
        return y, *pull(y)

    def declared(a):
        """An array for the verb, of bare data: of a broadcast it is the root's, and nothing moves yet."""
        return spmd.keep(a, "x") if work.verb == "broadcast" else spmd.varying(a, "x")

    def step(x):
        """Give the repetition, and what it is of: nothing in it is kept."""
        act = both if work.adjoint else verb
        if written:
            a = np.array(spmd.block(x))
            return lambda: act(declared(a))
        x = declared(spmd.block(x))
        return lambda: act(x)

    def timed(x, count):
        return np.array([together(step(x), lambda: spmd.psum(0, "x"))(count)])

    def told(x):
        found = step(x)()
        y, *back = found if work.adjoint else [found]
        if back and work.verb == "broadcast":  # which only the root has
            (of_root,) = back
            back = [np.where(spmd.worker_index("x") == 0, spmd.broadcast(of_root, "x"), 0)]
        return [np.array(spmd.block(a)).reshape(-1) for a in (y, *back)]

    x = spmd.put(work.whole(), P("x"), mesh)
    run = mesh.map(timed, in_specs=(P("x"), None), out_specs=P("x"))
    tell = mesh.map(told, in_specs=P("x"), out_specs=P("x"))
    return Case(lambda count: float(run(x, count).numpy()[0]), lambda: [a.numpy() for a in tell(x)])


@LOCAL.contestant("spmd")
def _(quick: bool) -> Builders:
    build = partial(ours, transport="local")
    return cases(build, local(quick)) | cases(build, local(quick, 4))


@LOCAL.contestant("spmd, lockstep")
def _(quick: bool) -> Builders:
    build = partial(ours, transport="local", scheduler="lockstep")
    return cases(build, local(quick)) | cases(build, local(quick, 4))


@LOCAL.contestant("spmd, threads")
def _(quick: bool) -> Builders:
    build = partial(ours, transport="local", scheduler="threads")
    return cases(build, local(quick)) | cases(build, local(quick, 4))


@LOCAL.contestant("spmd, written to")
def _(quick: bool) -> Builders:
    build = partial(ours, transport="local", written=True)
    return cases(build, local(quick)) | cases(build, local(quick, 4))


@MPI.contestant("spmd, Open MPI", launcher="mpiexec-openmpi", processes=2)
@MPI.contestant("spmd", launcher="mpiexec", processes=2)
def _(quick: bool) -> Builders:
    return cases(partial(ours, transport="mpi"), over_mpi(quick))


# JAX


def verb_jax(work: Work) -> Callable[[Any], Any]:
    from jax import lax
    from jax import numpy as jnp

    def halo(x):
        above, below = lax.ppermute(x[-1:], "x", [(0, 1)]), lax.ppermute(x[:1], "x", [(1, 0)])
        return jnp.concatenate([above, x, below])

    return {
        "all-reduce": lambda x: lax.psum(x, "x"),
        # Of a masked sum, the root's entry of an all-gather and this it is the fastest but for the smallest.
        "broadcast": lambda x: jnp.where(lax.axis_index("x") == 0, x, lax.ppermute(x, "x", [(0, 1)])),
        "all-gather": lambda x: lax.all_gather(x, "x", tiled=True),
        "reduce-scatter": lambda x: lax.psum_scatter(x, "x", tiled=True),
        "all-to-all": lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True),
        "permute": lambda x: lax.ppermute(x, "x", [(0, 1), (1, 0)]),
        "halo exchange": halo,
        "repartition": lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True),
    }[work.verb]


def on_devices(work: Work, looped: bool) -> Case:
    import jax
    from jax import lax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh, verb = Mesh(np.array(jax.devices()), ("x",)), verb_jax(work)
    x = jax.device_put(work.whole(), NamedSharding(mesh, P("x")))

    def both(x):
        y, pull = jax.vjp(verb, x)
        return y, *pull(y)

    def loop(x, count):
        def again(_, x):
            """A number of the result goes into what comes next; the barrier has all of the result made."""
            found = lax.optimization_barrier(act(x))
            return x.at[(0,) * x.ndim].set(sum(y[(-1,) * y.ndim] for y in jax.tree_util.tree_leaves(found)))

        return lax.fori_loop(0, count, again, x)

    def run(count: int) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(program(x, count))
        return (time.perf_counter() - begun) / count

    act = both if work.adjoint else verb
    spec = P() if work.verb == "all-reduce" else P("x")
    out_specs = (spec, P("x")) if work.adjoint else spec
    step = jax.jit(jax.shard_map(act, mesh=mesh, in_specs=P("x"), out_specs=out_specs))
    program = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))

    def verified(found):
        """Raise unless the loop goes on with numbers of the same results."""
        for shard in program(x, 1).addressable_shards:
            ours = [np.asarray(s.data) for y in found for s in y.addressable_shards if s.device == shard.device]
            last = sum(y[(-1,) * y.ndim] for y in ours)
            if not np.allclose(np.asarray(shard.data)[(0,) * x.ndim], last, rtol=1e-5, atol=1e-5):
                raise RuntimeError("the loop in one program computes something else than the step")

    def tell():
        """What lies on each device."""
        found = jax.tree_util.tree_leaves(step(x))
        if looped:
            verified(found)
        lie = [{s.device: np.asarray(s.data).reshape(-1) for s in y.addressable_shards} for y in found]
        return [np.concatenate([shards[d] for d in jax.devices()]) for shards in lie]

    return Case(run if looped else repeated(lambda: jax.block_until_ready(step(x))), tell)


@LOCAL.contestant("jax, 2 devices" + TOLD, needs=("jax",), env={**TWO_DEVICES, **LARGE_PAGES, **KEEPING})
@LOCAL.contestant("jax, 2 devices", needs=("jax",), env=TWO_DEVICES)
def _(quick: bool) -> Builders:
    return cases(partial(on_devices, looped=False), local(quick))


@LOCAL.contestant("jax, 2 devices, one program", needs=("jax",), env=TWO_DEVICES)
def _(quick: bool) -> Builders:
    return cases(partial(on_devices, looped=True), local(quick))


# By hand


def then_added(move: Callable[[], Any], mine: np.ndarray, y: np.ndarray) -> Callable[[], None]:
    """A call after which mine is added to what has come into y."""

    def call() -> None:
        move()
        np.add(mine, y, out=y)

    return call


def then_copied(move: Callable[[], Any], to: np.ndarray, x: np.ndarray) -> Callable[[], None]:
    """A call after which x is copied."""

    def call() -> None:
        move()
        np.copyto(to, x)

    return call


class Gloo:
    """Two processes of torch.distributed, on the memory of NumPy's arrays. Each method prepares a call."""

    def __init__(self):
        torch = torch_with(1, group=True)
        dist = torch.distributed
        self.dist, self.tensor = dist, torch.from_numpy
        self.rank, self.workers = dist.get_rank(), dist.get_world_size()
        self.other = 1 - self.rank
        self.meet = dist.barrier

    def _fastest(self, *ways: Callable[[], Any]) -> Callable[[], Any]:
        """Of several ways the one that takes the least time, alike in both processes."""
        seconds = np.array(in_turns(*(together(way, self.meet) for way in ways)))
        self.dist.all_reduce(self.tensor(seconds))
        return ways[int(seconds.argmin())]

    def all_reduce(self, x, y):
        total = self.tensor(y)
        return self._fastest(lambda: self.dist.all_reduce(total), then_added(self.exchange(x, y), x, y))

    def broadcast(self, y):
        dist, y = self.dist, self.tensor(y)
        alone = partial(dist.send, y, 1) if self.rank == 0 else partial(dist.recv, y, 0)
        return self._fastest(lambda: dist.broadcast(y, 0), alone)

    def reduce(self, x, y):
        dist, total = self.dist, self.tensor(y)
        if self.rank == 0:
            alone = then_added(partial(dist.recv, total, 1), x, y)
        else:
            alone = partial(dist.send, self.tensor(x), 0)
        return self._fastest(lambda: dist.reduce(total, 0), alone)

    def all_gather(self, x, y):
        parts = y.reshape(2, -1)
        return then_copied(self.exchange(x, parts[self.other]), parts[self.rank], x)

    def reduce_scatter(self, x, y):
        parts = x.reshape(2, -1)
        return then_added(self.exchange(parts[self.other], y), parts[self.rank], y)

    def all_to_all(self, x, y):
        there, here = (a.reshape(2, -1) for a in (x, y))
        exchange = self.exchange(there[self.other], here[self.other])
        return self._fastest(self._of_all(x, y), then_copied(exchange, here[self.rank], there[self.rank]))

    def _of_all(self, x, y):
        return partial(self.dist.all_to_all_single, self.tensor(y), self.tensor(x))

    def exchange(self, x, y):
        dist, other, x, y = self.dist, self.other, self.tensor(x), self.tensor(y)
        both = [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]

        def at_once():
            for request in dist.batch_isend_irecv(both):
                request.wait()

        def one_by_one():
            request = dist.irecv(y, other)
            dist.send(x, other)
            request.wait()

        return self._fastest(at_once, one_by_one)

    def _squares(self, x):
        """The squares side by side in x, one after the other."""
        rows = len(x)
        return x.reshape(rows, self.workers, rows).transpose(1, 0, 2)

    def repartition(self, x, y):
        columns, mine, other = self._squares(x), self.rank, self.other
        packed, here = room(columns.shape), y.reshape(columns.shape)
        whole, half = self._of_all(packed, here), self.exchange(packed[other], here[other])

        def all_packed():
            np.copyto(packed, columns)
            whole()

        def half_packed():
            np.copyto(packed[other], columns[other])
            half()
            np.copyto(here[mine], columns[mine])

        return self._fastest(all_packed, half_packed)

    def repartition_back(self, y, x):
        columns, mine, other = self._squares(x), self.rank, self.other
        packed, there = room(columns.shape), y.reshape(columns.shape)
        whole, half = self._of_all(there, packed), self.exchange(there[other], packed[other])

        def half_packed():
            half()
            np.copyto(columns[other], packed[other])
            np.copyto(columns[mine], there[mine])

        return self._fastest(then_copied(whole, columns, packed), half_packed)


class Messages:
    """mpi4py on NumPy's arrays. Each method prepares a call."""

    def __init__(self):
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.rank, self.workers = self.comm.Get_rank(), self.comm.Get_size()
        self.type, self.meet = MPI.FLOAT, self.comm.Barrier

    def _calling(self, call, *arrays):
        """Buffers whose types are named are not asked for them at each call."""
        return partial(call, *([a, self.type] for a in arrays))

    def all_reduce(self, x, y):
        return self._calling(self.comm.Allreduce, x, y)

    def broadcast(self, y):
        return self._calling(self.comm.Bcast, y)

    def reduce(self, x, y):
        return self._calling(self.comm.Reduce, x, y)

    def all_gather(self, x, y):
        return self._calling(self.comm.Allgather, x, y)

    def reduce_scatter(self, x, y):
        return self._calling(self.comm.Reduce_scatter_block, x, y)

    def all_to_all(self, x, y):
        return self._calling(self.comm.Alltoall, x, y)

    def exchange(self, x, y):
        other = 1 - self.rank
        return partial(self.comm.Sendrecv, [x, self.type], other, 0, [y, self.type], other, 0)

    def _squares(self, x, y):
        """The buffers of a repartition: the squares side by side in x and one above the other in y."""
        rows, p = len(x), self.workers
        square, once = (rows, rows), ([1] * p, [0] * p)
        beside = [self.type.Create_subarray(x.shape, square, (0, rows * k)).Commit() for k in range(p)]
        above = [self.type.Create_subarray(y.shape, square, (rows * k, 0)).Commit() for k in range(p)]
        return [x, once, beside], [y, once, above]

    def repartition(self, x, y):
        there, here = self._squares(x, y)
        return partial(self.comm.Alltoallw, there, here)

    def repartition_back(self, y, x):
        here, there = self._squares(x, y)
        return partial(self.comm.Alltoallw, there, here)


class Agreeing(Messages):
    """mpi4py, after both have told each other what they call."""

    def _calling(self, call, *arrays):
        return self._agreed(super()._calling(call, *arrays))

    def _agreed(self, move: Callable[[], Any]) -> Callable[[], Any]:
        mine, theirs, other = np.zeros(128, np.int64), np.zeros(128, np.int64), 1 - self.rank
        swap = partial(self.comm.Sendrecv, mine, other, 1, theirs, other, 1)

        def call():
            swap()
            move()

        return call

    def _pairs(self, there: np.ndarray, here: np.ndarray) -> Callable[[], Any]:
        return super().exchange(there, here)

    def exchange(self, x, y):
        return self._agreed(self._pairs(x, y))

    def _sum(self, mine: np.ndarray, there: np.ndarray, y: np.ndarray) -> Callable[[], Any]:
        """The sum of mine and of what comes for `there`, into what came; there it is made of the same two."""
        return then_added(self._agreed(self._pairs(there, y)), mine, y)

    def all_reduce(self, x, y):
        return self._sum(x, x, y)

    def reduce_scatter(self, x, y):
        parts = x.reshape(2, -1)
        return self._sum(parts[self.rank], parts[1 - self.rank], y)

    def repartition(self, x, y):
        return self._agreed(super().repartition(x, y))

    def repartition_back(self, y, x):
        return self._agreed(super().repartition_back(y, x))


def halo_by_hand(engine: Any, shape: tuple[int, ...], in_place: bool) -> tuple[np.ndarray, ...]:
    """Block, result and cotangent of a halo exchange, and the calls forward and back."""
    rows, columns = shape
    y = room((rows + 2, columns))
    x, g = (y[1:-1], y[1:-1]) if in_place else (room(shape) for _ in range(2))
    edge = room(columns)
    inner, outer = (-1, -1) if engine.rank == 0 else (0, 0)
    there = engine.exchange(x[inner], y[outer])
    back = engine.exchange(y[outer], edge)

    def forward():
        if not in_place:
            np.copyto(y[1:-1], x)
        there()

    def backward():
        back()
        if not in_place:
            np.copyto(g, y[1:-1])
        g[inner] += edge

    return x, y, g, forward, backward


def calls_by_hand(engine: Any, work: Work) -> tuple[Any, ...]:
    """Block, result and cotangent of a collective, and the calls forward and back."""
    (n, *_), p = work.shape, engine.workers
    x, g = room(work.shape), room(work.shape)
    if work.verb == "all-reduce":
        y = room(work.shape)
        return x, y, y, engine.all_reduce(x, y), lambda: None  # its adjoint hands over what all have
    if work.verb == "broadcast":
        return x, x, g, engine.broadcast(x), engine.reduce(x, g)
    if work.verb == "all-gather":
        y = room(n * p)
        return x, y, g, engine.all_gather(x, y), engine.reduce_scatter(y, g)
    if work.verb == "reduce-scatter":
        y = room(n // p)
        return x, y, g, engine.reduce_scatter(x, y), engine.all_gather(y, g)
    if work.verb == "repartition":
        y = room((n * p, n))
        return x, y, g, engine.repartition(x, y), engine.repartition_back(y, g)
    y = room(work.shape)
    if work.verb == "all-to-all":
        return x, y, g, engine.all_to_all(x, y), engine.all_to_all(y, g)
    return x, y, g, engine.exchange(x, y), engine.exchange(y, g)


def by_hand(work: Work, engine: Callable[[], Any], in_place: bool = False) -> Case:
    made = engine()
    if work.verb == "halo exchange":
        x, y, g, forward, backward = halo_by_hand(made, work.shape, in_place)
    else:
        x, y, g, forward, backward = calls_by_hand(made, work)

    def step():
        forward()
        if work.adjoint:
            backward()

    def tell():
        x[...] = work.block(made.rank)
        if work.verb == "all-reduce":
            y[...] = x  # for who adds in place, as below
        forward()
        found = [y.copy()]
        if work.adjoint:
            if work.verb == "broadcast":
                g[...] = y
            backward()
            if work.verb == "broadcast" and made.rank:
                g.fill(0)
            found.append(g.copy())
        return [everyones(a) for a in found]

    def everyones(a: np.ndarray) -> np.ndarray:
        whole = room(made.workers * a.size)
        made.all_gather(a.reshape(-1), whole)()
        return whole

    tell()  # so that all memory is in use, and holds numbers
    return Case(together(step, made.meet), tell)


def halos(asked: Iterator[Work]) -> Iterator[Work]:
    return (work for work in asked if work.verb == "halo exchange")


@LOCAL.contestant("torch, gloo", launcher="torchrun", processes=2, needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return cases(partial(by_hand, engine=Gloo), local(quick))


@LOCAL.contestant("torch, halo in place", launcher="torchrun", processes=2, needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return cases(partial(by_hand, engine=Gloo, in_place=True), halos(local(quick)))


@MPI.contestant("mpi4py, Open MPI", launcher="mpiexec-openmpi", processes=2)
@MPI.contestant("mpi4py", launcher="mpiexec", processes=2)
def _(quick: bool) -> Builders:
    return cases(partial(by_hand, engine=Messages), over_mpi(quick))


@MPI.contestant("limit, Open MPI", launcher="mpiexec-openmpi", processes=2)
@MPI.contestant("limit", launcher="mpiexec", processes=2)
def _(quick: bool) -> Builders:
    return cases(partial(by_hand, engine=Agreeing), over_mpi(quick))


@MPI.contestant("mpi4py, Open MPI, halo in place", launcher="mpiexec-openmpi", processes=2)
@MPI.contestant("mpi4py, halo in place", launcher="mpiexec", processes=2)
def _(quick: bool) -> Builders:
    return cases(partial(by_hand, engine=Messages, in_place=True), halos(over_mpi(quick)))


# The limit


def moved(work: Work) -> Case:
    """One thread, or two with half of the numbers each. They are what the others have: zeros would be copied in nine
    tenths of the time."""
    a, b, *out = (room(work.shape) for _ in range(4))
    a[...], b[...] = work.block(0), work.block(1)
    halves = slice(len(a) // 2), slice(len(a) // 2, None)

    def made(copy: Callable[..., Any], add: Callable[..., Any]) -> Case:
        def added(half: slice) -> None:
            add(out[0][half], a[half], b[half])

        def copied(half: slice) -> None:
            copy(out[0][half], a[half])
            copy(out[1][half], b[half])

        some = added if work.verb in ("all-reduce", "reduce-scatter") else copied
        alone = Case(repeated(lambda: some(slice(None))), list)
        return faster(alone, Case(repeated(in_two_threads(lambda k: some(halves[k]))), list))

    return by_the_faster(made)


@LOCAL.contestant("limit")
def _(quick: bool) -> Builders:
    limited = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "halo exchange", "repartition")
    return cases(moved, (w for w in local(quick) if w.verb in limited and not w.adjoint and w.size != "4 B"))
