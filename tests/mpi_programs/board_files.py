"""Four processes where there is little room for files, or none. Argument 1 says which: `plenty`; `none` (no process can
write much to a file), `one has none` (the last one cannot); `one maps none` (that cannot map the file of the others);
`full` (/dev/shm is full), `no inodes` (nor can a file be made there). Argument 2 says what they do then: `sums`, or
what `hanging.py` does with it.
"""

from __future__ import annotations

import os
import resource
import runpy
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np
import up  # noqa: F401

import spmd
from spmd import P
from spmd.transport.processes import shared_files

ROOM, WHAT = sys.argv[1:3]
if "RANK" in os.environ:
    RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
else:
    from mpi4py import MPI  # MPI's own files are made before there is no room.

    RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
if ROOM == "none" or (ROOM == "one has none" and RANK == SIZE - 1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))  # less than the board takes; logs are shorter
if ROOM == "one maps none" and RANK == SIZE - 1:

    def refuse(*args: object) -> None:
        raise OSError(12, os.strerror(12))

    shared_files.SharedFile.__init__ = refuse
if ROOM in ("full", "no inodes"):
    time.sleep(0.5)  # all are here
    with suppress(OSError):
        for k in count():
            with Path(f"/dev/shm/filled-{os.getpid()}-{k}").open("wb") as file:
                if ROOM == "full":
                    os.posix_fallocate(file.fileno(), 0, 4096)
    time.sleep(0.5)  # all have done so

if WHAT != "sums":
    sys.argv[1:] = [WHAT]
    runpy.run_path(str(Path(__file__).with_name("hanging.py")), run_name="__main__")
else:
    with spmd.Mesh(x=SIZE) as mesh:
        f = spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P())
        small, large = f(np.ones(SIZE)), f(np.ones((SIZE, 1 << 18)))
        board = mesh.transport.status_board
        mails = [channel.mailbox is not None for channel in mesh.transport.channels.values()]
        where = "nowhere" if board.file is None else board.file.path.parent
        print(f"sums {small.numpy()[0]} {large.numpy().sum()} in {where}, {any(mails)}\n", end="", flush=True)
