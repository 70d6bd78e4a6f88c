"""What a collective of tensors costs, beside torch's functional collectives and beside the same on NumPy's arrays.

    small    4 bytes: the time of a call, forward alone and with backward. Ours on virtual workers, over MPI and over
             torch.distributed; torch's functional collectives on two processes over gloo.
    large    4 MB and 64 MB on virtual workers, tensors beside arrays that are the user's own (written to by others:
             both have to be safe from that).

Run: python benchmarks/bridge.py [small] [large]. It needs `pip install -e ".[bench]"`.
Every contestant is a job of its own that waits while others work; they run in turn, round after round. Medians of the
medians of rounds, microseconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS = 7
SIZES = {"small": (1,), "large": (1 << 20, 16 << 20)}
VERBS = ("all_reduce", "all_reduce + backward", "permute", "all_gather")
Timed = dict[str, float]


def timed(call: Callable[[], Any]) -> float:
    """The median of calls in microseconds; all workers make the same number of calls."""
    found = []
    for _ in range(COUNTS["n"]):
        begun = time.perf_counter()
        call()
        found.append(time.perf_counter() - begun)
    return median(found) * 1e6


COUNTS: dict[str, int] = {}


def ours(kind: str, transport: str) -> Callable[[], Timed]:
    """Tensors on the workers of a mesh of two."""
    import torch

    import spmd
    from spmd.bridge import torch as spt

    mesh = spmd.Mesh(x=2, **({} if transport == "auto" else {"transport": transport}))
    ring = [(0, 1), (1, 0)]

    def body(what: str, n: int):
        x = torch.ones(n)
        y = torch.ones(n, requires_grad=True)
        calls = {
            "all_reduce": lambda: spt.psum(x, "x"),
            "all_reduce + backward": lambda: spt.psum(y, "x").backward(x),
            "permute": lambda: spt.ppermute(x, "x", ring),
            "all_gather": lambda: spt.all_gather(x, "x", tiled=True),
        }
        return timed(calls[what])

    run = spt.map(body, (None, None), None, mesh=mesh, check=False)
    return lambda: {f"{v} {4 * n} B": at(n, lambda v=v, n=n: run(v, n)) for n in SIZES[kind] for v in VERBS}


def core(kind: str) -> Callable[[], Timed]:
    """Arrays of NumPy on the workers of a mesh of two, that the user may write to."""
    import numpy as np

    import spmd

    mesh = spmd.Mesh(x=2, transport="local", scheduler="threads")
    ring = [(0, 1), (1, 0)]

    def body(what: str, n: int):
        x = np.ones(n, np.float32)
        calls = {
            "all_reduce": lambda: spmd.psum(x, "x"),
            "permute": lambda: spmd.ppermute(x, "x", ring),
            "all_gather": lambda: spmd.all_gather(x, "x", tiled=True),
        }
        return timed(calls[what])

    run = spmd.map(body, (None, None), None, mesh=mesh, check=False)
    verbs = [v for v in VERBS if "backward" not in v]
    return lambda: {f"{v} {4 * n} B": at(n, lambda v=v, n=n: run(v, n)) for n in SIZES[kind] for v in verbs}


def functional(kind: str) -> Callable[[], Timed]:
    """torch's functional collectives on this process and another."""
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as collectives

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    group = dist.group.WORLD

    def once(what: str, n: int) -> float:
        x = torch.ones(n)
        y = torch.ones(n, requires_grad=True)
        wait = collectives.wait_tensor
        calls = {
            "all_reduce": lambda: wait(collectives.all_reduce(x, "sum", group)),
            "all_reduce + backward": lambda: DistSum.apply(y).backward(x),
            "permute": lambda: wait(collectives.permute_tensor(x, [1, 0], group)),
            "all_gather": lambda: wait(collectives.all_gather_tensor(x, 0, group)),
        }
        return timed(calls[what])

    class DistSum(torch.autograd.Function):
        """torch has no differentiable functional all-reduce: the sum, whose backward hands the cotangent on."""

        @staticmethod
        def forward(ctx, x):
            return collectives.wait_tensor(collectives.all_reduce(x, "sum", group))

        @staticmethod
        def backward(ctx, g):
            return g

    return lambda: {f"{v} {4 * n} B": at(n, lambda v=v, n=n: once(v, n)) for n in SIZES[kind] for v in VERBS}


def at(n: int, run: Callable[[], float]) -> float:
    COUNTS["n"] = 400 if n == 1 else 20 if n < 4 << 20 else 6
    return run()


CONTESTANTS: dict[str, tuple[tuple[str, ...], str, Callable[[str], Callable[[], Timed]]]] = {
    "spt, virtual workers": (("small", "large"), "alone", lambda kind: ours(kind, "local")),
    "spt, MPI": (("small",), "mpi", lambda kind: ours(kind, "mpi")),
    "spt, torch.distributed": (("small",), "torchrun", lambda kind: ours(kind, "torch")),
    "torch functional, gloo": (("small",), "torchrun", functional),
    "NumPy, virtual workers": (("large",), "alone", core),
}


def contend(name: str, kind: str) -> None:
    """A contestant: a round for each line that comes to the first process."""
    import torch

    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", os.environ.get("PMI_RANK", "0")))
    step = CONTESTANTS[name][2](kind)
    # Every process reads its own copy of the lines, from a file that grows: no engine has to carry the start.
    path = Path(os.environ["BRIDGE_LINES"])
    done = 0
    while True:
        lines = path.read_text().splitlines()
        if len(lines) > done:
            if lines[done] == "end":
                return
            found = step()
            done += 1
            if rank == 0:
                print(json.dumps(found), flush=True)
        else:
            time.sleep(0.02)


def launched(name: str, kind: str, lines: Path) -> subprocess.Popen[str]:
    how = CONTESTANTS[name][1]
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    alone = [sys.executable, __file__, "--contend", name, kind]
    command = {
        "alone": alone,
        "mpi": [str(Path(sys.executable).with_name("mpiexec")), "-n", "2", *alone],
        "torchrun": [*torchrun.split(), *alone[1:]],
    }[how]
    env = {**os.environ, "BRIDGE_LINES": str(lines), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def compare(kind: str) -> None:
    import tempfile

    names = [n for n, (kinds, _, _) in CONTESTANTS.items() if kind in kinds]
    with tempfile.TemporaryDirectory() as folder:
        files = {n: Path(folder, f"{k}") for k, n in enumerate(names)}
        for file in files.values():
            file.write_text("")
        jobs = {n: launched(n, kind, files[n]) for n in names}
        rounds: dict[str, list[Timed]] = {n: [] for n in names}
        for k in range(ROUNDS + 1):
            for n in names:
                with files[n].open("a") as file:
                    file.write("go\n")
                stdout = jobs[n].stdout
                assert stdout is not None
                line = stdout.readline()
                while line and not line.startswith("{"):
                    line = stdout.readline()
                if k:  # the first round warms up
                    rounds[n].append(json.loads(line))
        for n in names:
            with files[n].open("a") as file:
                file.write("end\n")
            jobs[n].wait()
    rows = list(rounds[names[0]][0])
    print(f"\n{kind}, microseconds")
    print(f"{'':32}" + "".join(f"{n:>26}" for n in names))
    for row in rows:
        cells = [median(r[row] for r in rounds[n]) if row in rounds[n][0] else None for n in names]
        print(f"{row:32}" + "".join(f"{'' if c is None else f'{c:.1f}':>26}" for c in cells))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--contend"]:
        contend(sys.argv[2], sys.argv[3])
    else:
        for kind in sys.argv[1:] or SIZES:
            compare(kind)
