"""`python -m spmd bench kernels`: what each kernel achieves, beside what a copy and a matrix product reach.

A row is a kernel at one size. On the CPU every core runs the kernel on a block of its own, as workers do, and so do the
limits: the copy, the sum of two arrays, and the product of two float32 matrices. On a GPU events tell the time; the
copy is that of the driver, from device to device, and the product that of cuBLAS. All run in turn, round after round,
and the medians are shown. The blocks are larger than the caches, so a kernel that is bound by memory is compared with
copies from main memory.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from spmd import kernels
from spmd.device import imported
from spmd.errors import message
from spmd.kernels import jit
from spmd.spellings import closest
from spmd.transport.blas_threads import blas_threads, usable_cores

__all__ = ["FAMILIES", "Row", "bench_kernels", "rows", "table"]

FAMILIES = tuple(kernels.FAMILIES)


@dataclass(frozen=True)
class Row:
    """A kernel at one size.

    kernel: its name. what: shapes, dtype and options, as a reader wants to see them. make: rng -> its arguments, for
    one worker. moved: the bytes that have to go to and from memory, each operand and result counted once. flops: its
    additions and multiplications; 0 for a kernel that is bound by memory.
    """

    kernel: str
    what: str
    make: Callable[[np.random.Generator], tuple]
    moved: int
    flops: int = 0


def rows(only: str = "") -> list[Row]:
    """The rows of all families: each has a module of its name here. only: a part of the kernel's name."""
    found = [row for family in FAMILIES for row in import_module(f"spmd.bench.{family}").ROWS]
    return [row for row in found if only in row.kernel]


def bench_kernels(device: str = "cpu", only: str = "", rounds: int = 7) -> dict[str, Any]:
    """Measure. Gives the limits and a record per row, as `table` shows them and JSON takes them."""
    if device not in ("cpu", "cuda"):
        raise ValueError(
            message(
                "spmd.bench.bench_kernels",
                argument="device",
                got=repr(device),
                need='"cpu", or "cuda"',
                mend=f'device="{closest(device, ("cpu", "cuda"))}"',
            )
        )
    return _on_cpu(rows(only), rounds) if device == "cpu" else _on_gpu(rows(only), rounds)


def _on_cpu(chosen: list[Row], rounds: int) -> dict[str, Any]:
    cores = usable_cores()
    n = (64 << 20) // 8
    sources = [[np.full(n, 1.0 + w) for _ in range(3)] for w in range(cores)]
    matrices = [[np.full((1536, 1536), 0.5, np.float32) for _ in range(3)] for _ in range(cores)]

    def copy(w: int) -> None:
        np.copyto(sources[w][2], sources[w][0])

    def add(w: int) -> None:
        np.add(sources[w][0], sources[w][1], out=sources[w][2])

    def multiply(w: int) -> None:
        np.matmul(matrices[w][0], matrices[w][1], out=matrices[w][2])

    with ThreadPoolExecutor(cores) as pool, blas_threads(1):
        limits: dict[str, list[float]] = {"copy": [], "add": [], "gemm": []}
        records = []
        for row in chosen:
            kernel = getattr(kernels.cpu, row.kernel)
            args = [row.make(np.random.default_rng(w)) for w in range(cores)]

            def run(w: int, kernel=kernel, args=args) -> None:
                kernel(*args[w])

            _together(pool, cores, run)  # what is compiled is compiled now
            seconds = []
            for _ in range(rounds):
                for name, limit in (("copy", copy), ("add", add), ("gemm", multiply)):
                    limits[name].append(_together(pool, cores, limit))
                seconds.append(_together(pool, cores, run))
            records.append({"row": row, "seconds": statistics.median(seconds), "workers": cores})
    found = {name: statistics.median(times) for name, times in limits.items()}
    return _report(
        records,
        copy=cores * 2 * n * 8 / found["copy"],
        add=cores * 3 * n * 8 / found["add"],
        gemm=cores * 2 * 1536**3 / found["gemm"],
        device=f"{cores} cores",
    )


def _on_gpu(chosen: list[Row], rounds: int) -> dict[str, Any]:
    """On one GPU: events around each call tell the seconds, and the host waits for the last one only."""
    cp = imported("python -m spmd bench kernels")
    events = cp.cuda.Event
    n, side = (256 << 20) // 8, 4096
    a, b, c = (cp.full(n, 1.0 + k) for k in range(3))
    left, right, product = (cp.full((side, side), 0.5, np.float32) for _ in range(3))

    def copy() -> None:
        c.data.copy_from_device_async(a.data, a.nbytes)

    def add() -> None:
        cp.add(a, b, out=c)

    def multiply() -> None:
        cp.matmul(left, right, out=product)

    def timed(run: Callable[[], Any]) -> tuple[Any, Any]:
        begun, ended = events(), events()
        begun.record()
        run()
        ended.record()
        return begun, ended

    marks: dict[Any, list[tuple[Any, Any]]] = {"copy": [], "add": [], "gemm": []}
    seconds: list[float] = []

    def took(name: Any) -> float:
        return statistics.median(cp.cuda.get_elapsed_time(*pair) for pair in marks[name]) / 1e3

    for run in (copy, add, multiply):
        run()  # what is compiled, or chosen, is so now
    for k, row in enumerate(chosen):
        kernel = getattr(kernels.of(a), row.kernel)
        args = [_there(cp, x) for x in row.make(np.random.default_rng(0))]
        call = partial(kernel, *args)
        call()
        marks[k] = []
        for _ in range(rounds):
            for name, run in (("copy", copy), ("add", add), ("gemm", multiply), (k, call)):
                marks[name].append(timed(run))
        cp.cuda.Device().synchronize()
        seconds.append(took(k))
        del args, call
    if not chosen:
        return _report([], copy=1, add=1, gemm=1, device="one GPU")
    return _report(
        [{"row": row, "seconds": s, "workers": 1} for row, s in zip(chosen, seconds, strict=True)],
        copy=2 * a.nbytes / took("copy"),
        add=3 * a.nbytes / took("add"),
        gemm=2 * side**3 / took("gemm"),
        device=f"GPU {cp.cuda.Device().id}, of compute capability {cp.cuda.Device().compute_capability}",
    )


def _there(cp: Any, x: Any) -> Any:
    """An argument on the device: arrays, also those in lists and tuples."""
    if isinstance(x, list | tuple):
        return type(x)(_there(cp, y) for y in x)
    return cp.asarray(x) if isinstance(x, np.ndarray) else x


def _together(pool: ThreadPoolExecutor, workers: int, run: Callable[[int], None]) -> float:
    """Seconds from when all workers begin together to when the last one has ended."""
    start = threading.Barrier(workers)
    times: list[tuple[float, float]] = []

    def one(w: int) -> None:
        start.wait()
        begun = time.perf_counter()
        run(w)
        times.append((begun, time.perf_counter()))

    list(pool.map(one, range(workers)))
    return max(t[1] for t in times) - min(t[0] for t in times)


def _report(records: list[dict[str, Any]], *, copy: float, add: float, gemm: float, device: str) -> dict[str, Any]:
    shown = []
    for record in records:
        row, seconds, workers = record["row"], record["seconds"], record["workers"]
        bandwidth, speed = workers * row.moved / seconds, workers * row.flops / seconds
        shown.append(
            {
                "kernel": row.kernel,
                "what": row.what,
                "milliseconds": seconds * 1e3,
                "GB/s": bandwidth / 1e9,
                "of copy": bandwidth / copy,
                "GFLOP/s": speed / 1e9,
                "of gemm": speed / gemm,
                "bound by": "arithmetic" if row.flops else "memory",
            }
        )
    limits = {"copy GB/s": copy / 1e9, "add GB/s": add / 1e9, "gemm GFLOP/s": gemm / 1e9}
    return {"device": device, "numba": jit.available(), "limits": limits, "kernels": shown}


def table(found: dict[str, Any]) -> str:
    """What was measured, as text."""
    limits = found["limits"]
    lines = [
        f"kernels on {found['device']}, numba {'on' if found['numba'] else 'off'}: every worker has a block of its own",
        f"limits in this run: copy {limits['copy GB/s']:.1f} GB/s, add {limits['add GB/s']:.1f} GB/s, "
        f"float32 matrix product {limits['gemm GFLOP/s']:.0f} GFLOP/s",
        "",
        f"{'kernel':24}{'what':44}{'ms':>8}{'GB/s':>8}{'of copy':>9}{'GFLOP/s':>9}{'of gemm':>9}",
    ]
    for r in found["kernels"]:
        work = f"{r['GFLOP/s']:9.1f}{r['of gemm']:9.0%}" if r["GFLOP/s"] else ""
        lines.append(f"{r['kernel']:24}{r['what']:44}{r['milliseconds']:8.2f}{r['GB/s']:8.1f}{r['of copy']:9.0%}{work}")
    return "\n".join(lines)
