"""A checkpoint of 1 GiB, of which two processes have half each: written, read, and saved in the background.

Files are not flushed, and lie in the memory of the system: before each repetition what is to go to the disk has gone.
They are in the folder for temporary files; TMPDIR=/dev/shm measures without a disk. "over" replaces the checkpoint that
is there: ours by new files, of which a rename commits, torch's by writing into the old ones. torch reads into tensors
that are there; ours makes new arrays, and compares checksums. `cp` copies the same bytes: two at once, half of them
each. "held" is the time that saving in the background keeps the program from going on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contest import ONE_THREAD, Builders, Case, Section, own_folder, torch_with

SAVING = Section("saving", "a checkpoint of 1 GiB, of two processes", 0)

ARRAYS = [
    ((8192, 16384), np.float32),
    ((4096, 8192), np.float64),
    *[((2048, 1024), np.float64)] * 8,
    *[((1024, 1024), np.float32)] * 32,
]
"""1 GiB: 512 and 256 MiB, 8 of 16 MiB, 32 of 4 MiB."""
QUICK_ROWS = 16
"""Quick runs take one row of so many."""
WRITES, READS = ("write over", "write anew"), ("read rows", "read columns")
HELD = "held by a save in the background"


def shapes(quick: bool) -> list[tuple[tuple[int, int], Any]]:
    return [((rows // (QUICK_ROWS if quick else 1), columns), dtype) for (rows, columns), dtype in ARRAYS]


def rows_of(rank: int, quick: bool) -> list[np.ndarray]:
    """A process's rows of each array."""
    rng = np.random.default_rng(rank)
    return [rng.random((rows // 2, columns), dtype) for (rows, columns), dtype in shapes(quick)]


def samples(blocks: list[np.ndarray]) -> list[np.ndarray]:
    return [np.ascontiguousarray(block[::7, ::11]) for block in blocks]


def timed(
    step: Callable[[], Any],
    together: Callable[[], Any] = lambda: None,
    before: Callable[[], Any] = lambda: None,
    after: Callable[[Any], Any] = lambda _: None,
) -> Callable[[int], float]:
    """Seconds of a step, begun together, with what is not timed before and after each."""

    def run(count: int) -> float:
        took = 0.0
        for _ in range(count):
            before()
            os.sync()
            together()
            begun = time.perf_counter()
            result = step()
            took += time.perf_counter() - begun
            after(result)
        return took / count

    return run


def cases(build: Callable[[str, bool], Case], names: tuple[str, ...], quick: bool) -> Builders:
    return {name: partial(build, name, quick) for name in names}


def ours(name: str, quick: bool) -> Case:
    import spmd
    from spmd import P

    mesh = spmd.Mesh(x=2, transport="mpi")
    (rank,) = mesh.local_workers
    together = partial(mesh.transport.share, {rank: None})
    place = folder_for_all(rank, together)
    tree = [spmd.from_blocks({rank: block}, P("x"), mesh) for block in rows_of(rank, quick)]
    specs = [P(None, "x") if name == "read columns" else P("x")] * len(ARRAYS)

    def read() -> list[Any]:
        return spmd.load(place, specs=specs, mesh=mesh)

    def tell() -> list[np.ndarray]:
        return samples([np.asarray(x.blocks[rank]) for x in read()])

    if name == HELD:
        manager = spmd.io.CheckpointManager(place / "steps", max_to_keep=1)
        run = timed(lambda: manager.save(0, tree), together, after=lambda _: manager.wait())
        return Case(run, list)
    if name in WRITES:
        before = partial(remove, place, rank) if name == "write anew" else lambda: None
        return Case(timed(lambda: spmd.save(place, tree), together, before), tell)
    spmd.save(place, tree)
    tree.clear()
    return Case(timed(read, together), tell)


def folder_for_all(rank: int, together: Callable[[], Any]) -> Path:
    """An empty folder of the processes of a job."""
    remove(own_folder(), rank)
    if rank == 0:
        own_folder().mkdir()
    together()
    return own_folder() / "checkpoint"


def remove(folder: Path, rank: int) -> None:
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


@SAVING.contestant("spmd", launcher="mpiexec", processes=2, env={**ONE_THREAD, "SPMD_FSYNC": "0"})
def _(quick: bool) -> Builders:
    return cases(ours, (*WRITES, *READS, HELD), quick)


def by_torch(one_file: bool, name: str, quick: bool) -> Case:
    torch = torch_with(1, group=True)
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    place = folder_for_all(rank, dist.barrier)
    dim = int(name == "read columns")

    def tree(blocks: list[np.ndarray], dim: int) -> dict[str, Any]:
        tensors = map(torch.from_numpy, blocks)
        return {f"{k}": DTensor.from_local(x, mesh, [Shard(dim)], run_check=False) for k, x in enumerate(tensors)}

    def empty() -> dict[str, Any]:
        halves = [((m, n // 2) if dim else (m // 2, n), dtype) for (m, n), dtype in shapes(quick)]
        return tree([np.zeros(shape, dtype) for shape, dtype in halves], dim)

    def writer() -> Any:
        return dcp.FileSystemWriter(place, single_file_per_rank=one_file, sync_files=False)

    def read(into: dict[str, Any]) -> None:
        dcp.load(into, storage_reader=dcp.FileSystemReader(place))

    def tell_of(into: dict[str, Any]) -> list[np.ndarray]:
        read(into)
        return samples([x.to_local().numpy() for x in into.values()])

    mine = tree(rows_of(rank, quick), 0)
    if name == HELD:
        save = partial(dcp.async_save, mine)
        run = timed(lambda: save(storage_writer=writer()), dist.barrier, after=lambda future: future.result())
        return Case(run, list)
    if name in WRITES:
        before = partial(remove, place, rank) if name == "write anew" else lambda: None
        run = timed(lambda: dcp.save(mine, storage_writer=writer()), dist.barrier, before)
        return Case(run, lambda: tell_of(empty()))
    dcp.save(mine, storage_writer=writer())
    mine.clear()
    into = empty()
    return Case(timed(partial(read, into), dist.barrier), lambda: tell_of(into))


@SAVING.contestant("torch DCP", launcher="torchrun", processes=2, needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return cases(partial(by_torch, True), (*WRITES, *READS, HELD), quick)


@SAVING.contestant("torch DCP, a file each", launcher="torchrun", processes=2, needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    """Also of each process a file for each array."""
    return cases(partial(by_torch, False), (*WRITES, *READS), quick)


def copied(name: str, quick: bool) -> Case:
    folder = folder_for_all(0, lambda: None).parent
    files = [folder / f"{rank}" for rank in range(2)]
    for rank, file in enumerate(files):
        with file.open("wb") as stream:
            for block in rows_of(rank, quick):
                stream.write(block.data)
    copies = [file.with_suffix(".copy") for file in files]

    def step() -> None:
        both = [subprocess.Popen(["cp", file, copy]) for file, copy in zip(files, copies, strict=True)]
        assert [one.wait() for one in both] == [0, 0]

    def before() -> None:
        for copy in copies if name != "write over" else ():
            copy.unlink(missing_ok=True)

    return Case(timed(step, before=before), list)


@SAVING.contestant("cp", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return cases(copied, (*WRITES, *READS), quick)
