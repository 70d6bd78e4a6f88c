"""Worker 0 waits for worker 1, which sleeps; then the launcher passes an interrupt on to it alone."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np

import spmd
from spmd import P

mesh = spmd.Mesh(x=2)
me = mesh.local_workers[0]


def body(x):
    x = spmd.psum(x, "x")
    if me == 1:
        time.sleep(60)
    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    return spmd.psum(spmd.pvary(x, "x"), "x")


started = time.monotonic()
try:
    spmd.map(body, P("x"), P(), mesh=mesh)(np.ones(2))
except KeyboardInterrupt:
    print(f"interrupted after {time.monotonic() - started:.1f} s", flush=True)
    raise
