"""Two processes that save to one folder again and again, and two that load from it, for some seconds.

    python at_once.py FOLDER SECONDS

Prints how many saves were done, how many were refused since another one went on, and how many loads were done.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
from killed_saves import is_refused

import spmd
from spmd.errors import CheckpointError


def saves(folder: Path, until: float, own: int) -> list[int]:
    done = refused = 0
    while time.monotonic() < until:
        k = 2 * done + own
        try:
            spmd.save(folder, {f"x{i}": np.full(200 + i, k) for i in range(5)})
            done += 1
        except CheckpointError as error:
            if not is_refused(error):
                raise
            refused += 1
    return [done, refused, 0]


def loads(folder: Path, until: float, own: int) -> list[int]:
    done = 0
    while time.monotonic() < until:
        tree = spmd.load(folder)
        assert len(set(np.concatenate([*tree.values()]).tolist())) == 1, "parts of several checkpoints"
        done += 1
    return [0, 0, done]


def main(folder: Path, seconds: float) -> None:
    os.environ["SPMD_FSYNC"] = "0"
    spmd.save(folder, {f"x{i}": np.full(200 + i, -1) for i in range(5)})
    until = time.monotonic() + seconds
    children = [
        _child(lambda work=work, own=own: work(folder, until, own)) for work in (saves, loads) for own in (0, 1)
    ]
    counts = []
    for child, output in children:
        with os.fdopen(output) as file:
            counts.append([int(word) for word in file.read().split()])
        assert os.waitpid(child, 0)[1] == 0
    print(*(sum(column) for column in zip(*counts, strict=True)))


def _child(work: Callable[[], list[int]]) -> tuple[int, int]:
    """A forked process that works, and a pipe from which to read its result."""
    output, own_end = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(own_end, " ".join(map(str, work())).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(own_end)
    return child, output


main(Path(sys.argv[1]), float(sys.argv[2]))
