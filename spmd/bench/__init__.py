"""`python -m spmd bench kernels`: the speed of each kernel, compared with a copy and a matrix product.

A row is a kernel at one size. On the CPU every core runs the kernel on a block of its own, as workers do, and so do the
limits: a copy, the sum of two arrays, and the product of two float32 matrices. On a GPU events measure the time; the
copy is the driver's, from device to device, and the product that of cuBLAS. All run in turn for several rounds, and the
medians are shown. The blocks are larger than the caches, so kernels that are bound by memory read main memory.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from spmd import kernels
from spmd.bench.cases import ROWS, Row
from spmd.device import imported
from spmd.errors import message
from spmd.kernels import jit
from spmd.spellings import closest
from spmd.transport.blas_threads import blas_threads, usable_cores

__all__ = ["FAMILIES", "Row", "bench_kernels", "rows", "table"]

FAMILIES = tuple(kernels.FAMILIES)


def rows(only: str = "") -> list[Row]:
    """The rows of all families. only: a part of the kernel's name."""
    return [row for family in FAMILIES for row in ROWS[family] if only in row.kernel]


def bench_kernels(device: str = "cpu", only: str = "", rounds: int = 7) -> dict[str, Any]:
    """Measure: the limits and the figures of each row, for `table` and JSON."""
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


def _on_cpu(selected: list[Row], rounds: int) -> dict[str, Any]:
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
        for row in selected:
            kernel = getattr(kernels.cpu, row.kernel)
            args = [row.make(np.random.default_rng(w)) for w in range(cores)]

            def run(w: int, kernel=kernel, args=args) -> None:
                kernel(*args[w])

            _seconds_together(pool, cores, run)  # compiles
            seconds = []
            for _ in range(rounds):
                for name, limit in (("copy", copy), ("add", add), ("gemm", multiply)):
                    limits[name].append(_seconds_together(pool, cores, limit))
                seconds.append(_seconds_together(pool, cores, run))
            records.append({"row": row, "seconds": statistics.median(seconds), "workers": cores})
    medians = {name: statistics.median(times) for name, times in limits.items()}
    return _report(
        records,
        copy=cores * 2 * n * 8 / medians["copy"],
        add=cores * 3 * n * 8 / medians["add"],
        gemm=cores * 2 * 1536**3 / medians["gemm"],
        device=f"{cores} cores",
    )


def _on_gpu(selected: list[Row], rounds: int) -> dict[str, Any]:
    """On one GPU: events around each call measure the time, and the host waits for the last one only."""
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
        start, stop = events(), events()
        start.record()
        run()
        stop.record()
        return start, stop

    event_pairs: dict[Any, list[tuple[Any, Any]]] = {"copy": [], "add": [], "gemm": []}
    seconds: list[float] = []

    def median_seconds(name: Any) -> float:
        return statistics.median(cp.cuda.get_elapsed_time(*pair) for pair in event_pairs[name]) / 1e3

    for run in (copy, add, multiply):
        run()  # compiles, or chooses an algorithm
    for k, row in enumerate(selected):
        kernel = getattr(kernels.of(a), row.kernel)
        args = [_to_device(cp, x) for x in row.make(np.random.default_rng(0))]
        call = partial(kernel, *args)
        call()
        event_pairs[k] = []
        for _ in range(rounds):
            for name, run in (("copy", copy), ("add", add), ("gemm", multiply), (k, call)):
                event_pairs[name].append(timed(run))
        cp.cuda.Device().synchronize()
        seconds.append(median_seconds(k))
        del args, call
    if not selected:
        return _report([], copy=1, add=1, gemm=1, device="one GPU")
    return _report(
        [{"row": row, "seconds": s, "workers": 1} for row, s in zip(selected, seconds, strict=True)],
        copy=2 * a.nbytes / median_seconds("copy"),
        add=3 * a.nbytes / median_seconds("add"),
        gemm=2 * side**3 / median_seconds("gemm"),
        device=f"GPU {cp.cuda.Device().id}, of compute capability {cp.cuda.Device().compute_capability}",
    )


def _to_device(cp: Any, x: Any) -> Any:
    """An argument with its arrays on the device, also those in lists and tuples."""
    if isinstance(x, list | tuple):
        return type(x)(_to_device(cp, y) for y in x)
    return cp.asarray(x) if isinstance(x, np.ndarray) else x


def _seconds_together(pool: ThreadPoolExecutor, workers: int, run: Callable[[int], None]) -> float:
    """Seconds from the common start of all workers to the end of the last one."""
    start = threading.Barrier(workers)
    times: list[tuple[float, float]] = []

    def timed(w: int) -> None:
        start.wait()
        started = time.perf_counter()
        run(w)
        times.append((started, time.perf_counter()))

    list(pool.map(timed, range(workers)))
    return max(t[1] for t in times) - min(t[0] for t in times)


def _report(records: list[dict[str, Any]], *, copy: float, add: float, gemm: float, device: str) -> dict[str, Any]:
    figures = []
    for record in records:
        row, seconds, workers = record["row"], record["seconds"], record["workers"]
        bandwidth, speed = workers * row.moved / seconds, workers * row.flops / seconds
        figures.append(
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
    return {"device": device, "numba": jit.available(), "limits": limits, "kernels": figures}


def table(report: dict[str, Any]) -> str:
    limits = report["limits"]
    lines = [
        f"kernels on {report['device']}, numba {'on' if report['numba'] else 'off'}: each worker has its own block",
        f"limits in this run: copy {limits['copy GB/s']:.1f} GB/s, add {limits['add GB/s']:.1f} GB/s, "
        f"float32 matrix product {limits['gemm GFLOP/s']:.0f} GFLOP/s",
        "",
        f"{'kernel':24}{'what':44}{'ms':>8}{'GB/s':>8}{'of copy':>9}{'GFLOP/s':>9}{'of gemm':>9}",
    ]
    for r in report["kernels"]:
        work = f"{r['GFLOP/s']:9.1f}{r['of gemm']:9.0%}" if r["GFLOP/s"] else ""
        lines.append(f"{r['kernel']:24}{r['what']:44}{r['milliseconds']:8.2f}{r['GB/s']:8.1f}{r['of copy']:9.0%}{work}")
    return "\n".join(lines)
