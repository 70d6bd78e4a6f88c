"""What every verb and every operator gives, worker by worker, as digests. The same file runs with any transport.

Arguments: "placed", to read blocks where they lie; "share", for a drawn third of the cases.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import numpy as np

import spmd
from spmd import P
from spmd.autodiff import tree
from spmd.autodiff.allocation import writable
from spmd.device import copied, to_host
from spmd.kernels import on_device
from spmd.kernels.memory import pool
from spmd.transport.call import Call
from spmd.transport.plan import Concatenate, PlaceBoxes, Plan
from spmd.transport.processes.headers import HEADER_NBYTES, INLINE_LIMIT

DTYPES = "bool int8 int32 int64 float16 float32 float64 complex64 complex128".split()
SMALL = [(), (0, 3), (3, 5)]
LARGE = 4099  # In float64 a little more than what an all-reduce over MPI sends whole, and odd.


def draw(worker: int, shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return laid(_drawn(worker, shape, dtype, seed).copy(), worker, seed)


@lru_cache(maxsize=32)
def _drawn(worker: int, shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng([worker, seed, *shape])
    x = rng.normal(size=shape) * 50
    if dtype.startswith("complex"):
        x = x + 1j * rng.normal(size=shape)
    return np.asarray(x > 0 if dtype == "bool" else x, dtype)


def anywhere(x: np.ndarray, worker: int, seed: int) -> np.ndarray:
    return x


laid: Callable[[np.ndarray, int, int], np.ndarray] = anywhere
"""Where an array of a worker is laid."""


def read_where_they_lie() -> list[int]:
    """From now on all blocks but the tiniest are read where they lie, if that is in memory that others can read: most
    do, and of the rest small ones are copied there. Gives the bytes of those that were offered, as they come."""
    from spmd.transport.processes import announce, comm, mailbox, run_plan, shared_memory

    global laid

    def mostly(x: np.ndarray, worker: int, seed: int) -> np.ndarray:
        if (worker + seed) % 4 == 3:
            return x
        out = pool.empty(x.shape, x.dtype)
        out[...] = x
        return out

    def place(self: shared_memory.SharedMemory, x: np.ndarray) -> int | None:
        at = found(self, x)
        if at is not None:
            offered.append(x.nbytes)
        return at

    offered: list[int] = []
    found, shared_memory.SharedMemory.place = shared_memory.SharedMemory.place, place
    announce.INLINE_LIMIT = comm.INLINE_LIMIT = run_plan.INLINE_LIMIT = 16
    mailbox._COPY_MAX = 100
    pool.POOL_MIN, laid = 1, mostly
    shared_memory.shared_memory().serve()
    return offered


def digest(x) -> str:
    """The bits of arrays in nested lists and dicts, and whether they may be written to."""
    if isinstance(x, list):
        return "[" + " ".join(digest(a) for a in x) + "]"
    if isinstance(x, dict):
        return "{" + " ".join(f"{k}:{digest(a)}" for k, a in x.items()) + "}"
    if x is None:
        return "None"
    assert on_device(x) or not x.flags.writeable, "a received array is writable"
    assert x.flags.c_contiguous
    x = to_host(x)
    return f"{x.dtype}{list(x.shape)}" + hashlib.sha256(x.tobytes()).hexdigest()[:12]


def verbs(worker, axes: tuple[str, ...], dtype: str, shape: tuple[int, ...]) -> dict[str, object]:
    """All verbs over a group, on blocks of this shape; uneven ones where the verb takes them."""
    comm, group, me = worker.comm, worker.group(axes), worker.index
    n, k = group.size, group.index
    x = draw(me, shape, dtype)

    def call(name: str, x, alike: bool | None = False) -> Call:
        return Call(name, axes, x.dtype, x.shape, same_shape=alike)

    def planned(kind: str, name: str, x, parts: list, combine) -> np.ndarray:
        plan = Plan(kind, group, x.shape, x.dtype, parts, combine, lambda _: None)
        return comm.run(plan, call(name, x), x).wait()[0]

    parts = [draw(me, (*shape, j + 1), dtype, j) for j in range(n)]
    uneven = draw(me, (*shape, k + 1), dtype)
    sends = {j: draw(me, (*shape, j, k + 1), dtype, j) for j in range(n) if (j + k) % 3 != 1}
    found = {
        "reduce_scatter": comm.reduce_scatter(group, call("scatter", x, True), parts).wait(),
        "all_gather": comm.all_gather(group, call("gather", uneven), uneven).wait(),
        "all_gather_as": planned("all_gather", "gather", uneven, [...] * n, Concatenate(len(shape), True)),
        "all_to_all": comm.all_to_all(group, call("all_to_all", uneven), parts).wait(),
        "all_to_all_as": planned(
            "all_to_all", "all_to_all", uneven, list(map(constant, parts)), Concatenate(len(shape), True)
        ),
        "exchange": comm.exchange(group, call("exchange", uneven), sends, list(sends)).wait(),
    }
    for how in ("sum",) if dtype.startswith("complex") else ("sum", "max", "min"):
        found[how] = comm.all_reduce(group, call(how, x, True), draw(me, shape, dtype), how).wait()
    ys = [draw(me, shape, dtype, 1), draw(me, (3,), dtype), draw(me, (), dtype)]
    packed = np.empty(sum(y.size for y in ys), dtype)
    found["many"] = comm.all_reduce_many(group, call("many", packed, True), ys).wait()
    for root in range(n):
        mine = draw(me, shape, dtype, root) if k == root else None
        found[f"broadcast {root}"] = comm.broadcast(group, call("broadcast", x, None), mine, root).wait()
        found[f"reduce {root}"] = comm.reduce(group, call("reduce", x, True), x, root).wait()
    for how in ("rows", "columns", "holes", "overlaps"):
        found[how] = boxes(comm, group, call, shape, dtype, how)
    # Nor what it is a view of: else whoever hands it on copies it first.
    assert not any(map(writable, tree.leaves(found))), "a received array is writable"
    return found


def constant(x) -> Callable:
    """A part that is this array, whatever the block."""
    return lambda _: x


def boxes(comm, group, call, shape: tuple[int, ...], dtype: str, how: str):
    """What all members send, put together: along the first dimension, where boxes are contiguous, or along the second;
    with nothing of the last member; or each over those before. The first member sends little."""
    n, d = group.size, int(how == "columns")
    givers = range(max(1, n - 1) if how == "holes" else n)
    lengths = [1, *[40] * (n - 1)]
    ends = [0, *itertools.accumulate(lengths)]
    piece = [tuple(m if e == d else 2 for e in range(2)) + shape for m in lengths]
    whole = tuple(ends[-1] if e == d else m for e, m in enumerate(piece[0]))
    starts = [0 if how == "overlaps" else ends[j] for j in range(n)]
    places = {
        j: tuple((starts[j], starts[j] + m) if e == d else (0, m) for e, m in enumerate(piece[j])) for j in givers
    }

    def sent(giver: int, taker: int) -> np.ndarray:
        return draw(group.members[giver], piece[giver], dtype, taker)

    x = sent(group.index, group.index)
    sends = {j: sent(group.index, j) for j in range(n)} if group.index in givers else {}
    parts = [constant(sends[j]) if j in sends else None for j in range(n)]
    plan = Plan("exchange", group, x.shape, x.dtype, parts, PlaceBoxes(whole, places), lambda _: None)
    made, _ = comm.run(plan, call("boxes", x), x).wait()
    expected = np.zeros(whole, dtype)
    for j, box in places.items():
        expected[tuple(slice(a, b) for a, b in box)] = sent(j, group.index)
    np.testing.assert_array_equal(to_host(made), expected)
    return made


FUNCTIONS: list[Callable] = [
    spmd.psum,
    spmd.pmax,
    spmd.pmin,
    spmd.pmean,
    lambda x, axes: spmd.sum(x, axes, 1),
    spmd.mean,
    lambda x, axes: spmd.max(x, axes, (0, 2)),
    lambda x, axes: spmd.all_gather(x, axes, to="invariant"),
    lambda x, axes: spmd.pslice(x, axes, axis=1, tiled=True),
    lambda x, axes: spmd.ppermute(x, axes, [(1, 0)]),
    lambda x, axes: spmd.replicate(spmd.keep(x, axes, 1), axes, 1),
    lambda x, axes: spmd.all_gather(x, axes, axis=1, tiled=True),
    lambda x, axes: spmd.psum_scatter(x, axes, scatter_dimension=1, tiled=True),
    lambda x, axes: spmd.all_to_all(x, axes, 0, 2, tiled=True),
    spmd.shift,
    lambda x, axes: spmd.halo_exchange(x, P(axes), ((1, 2),), "periodic"),
    lambda x, axes: spmd.broadcast(spmd.sum_reduce(x, axes, 1), axes, 1),
]


def strided(worker, axes: tuple[str, ...]) -> dict[str, object]:
    """Operators on blocks that are not C-contiguous, or whose bytes have another order."""
    base = draw(worker.index, (12, 8, 6), "float64")
    ways = {"F": np.asfortranarray(base), "strided": base[::2, ::-1, 1::2], "T": base.T, "swapped": base.astype(">f8")}
    return {name: [ready(function(x, axes)) for function in FUNCTIONS] for name, x in ways.items()}


def lent(worker, axes: tuple[str, ...]) -> dict[str, object]:
    """Operators on blocks that are written to as soon as the collective is over, small ones and large ones."""
    found: dict[str, object] = {}
    for name, shape in {"small": (12, 8, 6), "large": (24, 40, 48)}.items():
        results = []
        for function in FUNCTIONS:
            x = draw(worker.index, shape, "float64")
            results.append(function(x, axes))
            x.fill(np.nan)
        spmd.psum(0, axes)
        found[name] = [ready(y) for y in results]
    return found


def thawed(worker, axes: tuple[str, ...]) -> dict[str, object]:
    """Results that are written to as soon as they are there; lines that do so again, and what they were of."""
    found: dict[str, object] = {}
    for name, shape in {"small": (12, 8, 6), "large": (24, 40, 48)}.items():
        drawn = draw(worker.index, shape, "float64")
        results = []
        for x in drawn, drawn if on_device(drawn) else spmd.freeze(drawn.copy()):
            for function in FUNCTIONS:
                for _ in range(3):
                    y = spmd.thaw(array(function(x, axes)))
                    results.append(ready(y.copy()))
                    y.fill(np.nan)
            spmd.psum(0, axes)
            results.append(ready(x))
        found[name] = results
    return found


def around(worker, axes: tuple[str, ...]) -> dict[str, object]:
    """Blocks of about as many bytes as travel with what is told before each collective, a little more and a little
    less on some workers, and to some; and several sums at once, small ones and large ones."""
    comm, group, k = worker.comm, worker.group(axes), worker.group(axes).index
    n = group.size
    found: dict[str, object] = {}
    for most in (INLINE_LIMIT - 1, INLINE_LIMIT, INLINE_LIMIT + 1, HEADER_NBYTES):

        def block(length: int) -> np.ndarray:
            return draw(worker.index, (length,), "int8", length)

        x, uneven = block(most), block(most + k - 1)
        parts = [block(most + j - 1) for j in range(n)]
        same, any_shape = (Call("around", axes, y.dtype, y.shape, same_shape=y is x) for y in (x, uneven))
        found[f"{most}"] = [
            comm.all_reduce(group, same, x).wait(),
            comm.all_gather(group, any_shape, uneven).wait(),
            comm.all_to_all(group, any_shape, parts).wait(),
            comm.reduce_scatter(group, same, parts).wait(),
            comm.exchange(group, any_shape, {j: parts[j] for j in range(n) if j != k}, set(range(n)) - {k}).wait(),
            *(comm.broadcast(group, same, x if k == root else None, root).wait() for root in range(n)),
        ]
    for dtype in ("float64", "complex64"):
        xs = [draw(worker.index, shape, dtype) for shape in [(7,), (70001,), (), (3, 40000), (0,), (12,)]]
        for some in (xs, xs[1:2], xs[3:]):
            call = Call("many", axes, np.dtype(dtype), (sum(y.size for y in some),), same_shape=True)
            found[f"{len(some)} of {dtype}"] = comm.all_reduce_many(group, call, some).wait()
    for dtype in ("float16", "float32", "complex64"):
        xs = [draw(worker.index, shape, dtype) for shape in [(150001,), (7,), (3, 50000)]]
        call = Call("spare", axes, np.dtype(dtype), (sum(y.size for y in xs),), same_shape=True)
        found[f"spare of {dtype}"] = comm.all_reduce_many(group, call, list(map(copied, xs)), [True] * 3).wait()
    return found


def again(worker, axes: tuple[str, ...]) -> dict[str, object]:
    """Lines that call the same again and again, most often with small blocks: what they bring themselves is the same
    more often than what others bring, which may be large, or of a shape that does not fit."""
    group, mesh = worker.group(axes), worker.mesh
    n, k = group.size, group.index
    split, whole = (mesh.layout((4 * n, 3), spec) for spec in (P(axes), P(None, axes)))
    copies = spmd.Layout((4 * n, 3), P(), mesh.axes, copies="varying")

    def mine(x: np.ndarray, turn: int) -> Any:
        if turn % 5 == k:
            x = ready(x)  # It may be shared, and stays where it lies.
        return spmd.varying(x, axes)

    def uneven(turn: int, dtype: str = "float32") -> Any:
        length = (2, 2, 3, 2, 300, 0, 2)[turn % 7] if k == n - 1 else 2
        return mine(draw(worker.index, (length, 3), dtype, turn), turn)

    def even(turn: int, shape: tuple[int, ...] = (4, 3), dtype: str = "float32") -> Any:
        return mine(draw(worker.index, shape, dtype, turn), turn)

    def rooted(turn: int, root: int) -> Any:
        return spmd.keep(draw(7, ((2, 3, 2, 2, 400, 2, 0)[turn % 7], 3), "float32", turn), axes, root)

    lines: dict[str, Callable[[int], Any]] = {
        "psum": lambda turn: spmd.psum(even(turn, (4, 3) if turn % 4 < 3 else (400, 3)), axes),
        "pmax": lambda turn: spmd.pmax(even(turn), axes),
        "half": lambda turn: spmd.psum(even(turn, dtype="float16"), axes),
        "gather": lambda turn: spmd.all_gather(uneven(turn), axes, tiled=True),
        "collect": lambda turn: spmd.all_gather(uneven(turn, "complex64"), axes, tiled=True, to="invariant"),
        "gather columns": lambda turn: spmd.all_gather(even(turn), axes, axis=1, tiled=True),
        "stack": lambda turn: spmd.all_gather(uneven(turn), axes, axis=1),
        "swapped": lambda turn: spmd.all_gather(uneven(turn, ">f4"), axes, tiled=True),
        "scatter": lambda turn: spmd.psum_scatter(even(turn, (4 * n + 1, 2)), axes, tiled=True),
        "scatter rows": lambda turn: spmd.psum_scatter(even(turn, (n, 2)), axes),
        "all to all": lambda turn: spmd.all_to_all(uneven(turn), axes, 1, 0, tiled=True),
        "transpose": lambda turn: spmd.all_to_all(even(turn, (n, 5)), axes, 0, 1),
        "permute": lambda turn: spmd.ppermute(uneven(turn), axes, [(n - 1, 0), (1, 1)]),
        "shift": lambda turn: spmd.shift(uneven(turn), axes),
        "broadcast": lambda turn: spmd.broadcast(rooted(turn, n - 1), axes, n - 1),
        "replicate": lambda turn: spmd.replicate(rooted(turn, 0), axes, 0),
        "reduce": lambda turn: spmd.broadcast(spmd.sum_reduce(even(turn), axes, 1), axes, 1),
        "halo": lambda turn: spmd.halo_exchange(even(turn), P(axes), ((1, 2),), "reflect", shape=(4 * n, 3)),
        "wide halo": lambda turn: spmd.halo_exchange(even(turn), P(axes), ((5, 0),), "zero", shape=(4 * n, 3)),
        "learnt halo": lambda turn: spmd.halo_exchange(uneven(turn), P(axes), ((1, 1),), "zero"),
        "trimmed halo": lambda turn: spmd.halo_exchange(even(turn), P(axes), ((2, -1),), "periodic", shape=(4 * n, 3)),
        "edge halo": lambda turn: spmd.halo_exchange(even(turn), P(axes), ((3, 2),), "edge", shape=(4 * n, 3)),
        "halo around one row": lambda turn: spmd.halo_exchange(
            even(turn, (int(k == n - 1), 3)), P(axes), ((2, 3),), "reflect", sizes=[(0,) * (n - 1) + (1,)]
        ),
        "halo of columns": lambda turn: spmd.halo_exchange(
            even(turn), P(None, axes), ((0, 0), (1, 2)), shape=(4, 3 * n)
        ),
        "halo that does not fit": lambda turn: spmd.halo_exchange(
            even(turn, (4, 3 + (turn % 4 == 3 and k == 0))), P(axes), ((1, 1),), "periodic", sizes=[(4,) * n]
        ),
    }
    if axes == tuple(mesh.axes):
        lines["repartition"] = lambda turn: spmd.repartition(even(turn), split, whole)
        lines["back"] = lambda turn: spmd.repartition(
            spmd.varying(draw(worker.index, whole.block_shape(k), "float64", turn), axes), whole, split
        )
        lines["accumulate"] = lambda turn: spmd.accumulate(even(turn, (4 * n, 3)), copies, split)
    found: dict[str, list[np.ndarray]] = {name: [] for name in lines}
    for turn in range(16):
        # Who counts what it sends takes the long way, and meets those that do not.
        counting = spmd.ledger() if turn % 5 == 4 and k == 0 else nullcontext()
        with counting:
            for name, line in lines.items():
                try:
                    x = spmd.block(line(turn))
                except spmd.errors.LayoutError as error:
                    x = np.frombuffer(str(error).encode(), np.uint8)
                assert x.flags.c_contiguous, name
                assert not x.flags.writeable, name
                found[name].append(x)
    # What came is in memory of its own: nothing that has come since was written there.
    return {name: [ready(x) for x in some] for name, some in found.items()}


def in_flight(worker, axes: tuple[str, ...]) -> dict[str, object]:
    """Several collectives of several groups under way at once."""
    comm, all_axes = worker.comm, tuple(worker.mesh.axes)
    handles = []
    for k, over in enumerate([axes, all_axes, axes, axes]):
        for size in (7, 50000):
            x = draw(worker.index, (size,), "float64", k)
            call = Call("sum", over, x.dtype, x.shape, same_shape=True)
            handles.append(comm.all_reduce(worker.group(over), call, x))
            group, call = worker.group(over), Call("swap", over, x.dtype, x.shape)
            handles.append(comm.exchange(group, call, {0: x, 1: x[:3]}, range(group.size if group.index < 2 else 0)))
    return {"in flight": [h.wait() for h in handles]}


def products(worker, axes: tuple[str, ...]) -> dict[str, object]:
    """Products of matrices: their bits depend on the number of BLAS threads."""
    found = {}
    for dtype in ("float32", "float64"):
        a, b = draw(worker.index, (301, 257), dtype), draw(worker.index, (257, 401), dtype, 1)
        found[dtype] = ready(spmd.psum(a @ b, axes))
    return found


def array(x):
    """A number of NumPy as an array."""
    return np.asarray(x) if isinstance(x, np.generic) else x


def ready(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(to_host(x))
    x.flags.writeable = False
    return x


def cases(axes: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """dtypes and shapes: all of them along one axis of four, a few along others."""
    if axes == ("x",):
        yield from ((dtype, shape) for dtype in DTYPES for shape in SMALL)
    yield from (("float64", (LARGE,)), ("complex64", (5,)), ("float16", (0,)), (">f4", (3, 5)))


def bodies(mesh: spmd.Mesh) -> Iterator[tuple[str, Callable]]:
    orders = [("y",), ("x", "y"), ("y", "x")] if "y" in mesh.axes else [("x",)]
    for axes in orders:
        name = f"{mesh} {','.join(axes)}"
        for dtype, shape in cases(axes):
            yield f"{name} {dtype}{list(shape)}", lambda w, a=axes, d=dtype, s=shape: verbs(w, a, d, s)
        yield f"{name} strided", lambda w, a=axes: strided(w, a)
        yield f"{name} lent", lambda w, a=axes: lent(w, a)
        yield f"{name} thawed", lambda w, a=axes: thawed(w, a)
        yield f"{name} around", lambda w, a=axes: around(w, a)
        yield f"{name} in flight", lambda w, a=axes: in_flight(w, a)
        yield f"{name} products", lambda w, a=axes: products(w, a)


def gradients(mesh: spmd.Mesh) -> dict[str, str]:
    """A small network with sums over both axes, differentiated from outside, twice."""
    axis = next(iter(mesh.axes))
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(6, 7)), rng.normal(size=(10, 6))

    def body(w, x):
        h = np.tanh(x @ w)
        return spmd.mean(h * spmd.psum(h.sum(), axis), axis)

    loss = spmd.map(body, in_specs=(P(), P(axis)), out_specs=P(), mesh=mesh)
    value, grad = spmd.value_and_grad(loss)(w, x)
    second = spmd.grad(lambda w: (spmd.grad(loss)(w, x) * w).sum())(w)
    return {k: digest(ready(np.asarray(v))) for k, v in {"value": value, "grad": grad, "second": second}.items()}


def results_again(mesh: spmd.Mesh) -> dict[str, dict[str, str]]:
    """For each of some axes the digests of all workers."""
    found: dict[str, dict[str, str]] = {}
    for axes in [("y",), ("y", "x"), ("x", "y")] if "y" in mesh.axes else [("x",)]:
        outcome = mesh.run(lambda w, a=axes: {k: digest(v) for k, v in again(w, a).items()})
        for worker, said in mesh.transport.share(outcome.results).items():
            found[f"{mesh} {','.join(axes)} again worker {worker}"] = said
    return found


def results(share: bool = False, **options) -> dict[str, dict[str, str]]:
    """For each case the digests of all workers. share: of every third case of `bodies`, drawn alike by all."""
    found: dict[str, dict[str, str]] = {}
    rng = np.random.default_rng(0)
    for mesh in (spmd.Mesh(x=4, **options), spmd.Mesh(x=2, y=2, **options)):
        for name, body in bodies(mesh):
            if share and rng.integers(3):
                continue
            outcome = mesh.run(lambda w, body=body: {k: digest(v) for k, v in body(w).items()}, tracked=False)
            for worker, said in mesh.transport.share(outcome.results).items():
                found[f"{name} worker {worker}"] = said
        found |= results_again(mesh)
        found[f"{mesh} gradients"] = gradients(mesh)
    return found


if __name__ == "__main__":
    offered = read_where_they_lie() if "placed" in sys.argv else None
    found = results("share" in sys.argv)
    assert offered is None or len(offered) > 1000, len(offered)
    assert len(found) > 50
    if spmd.is_main():
        print(json.dumps(found))
