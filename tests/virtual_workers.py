"""Virtual workers as the tests of their transport run them: here, and in a process of its own."""

from __future__ import annotations

import gc

import numpy as np
from launch import run_python

import spmd


def mesh_of(scheduler: str, **axes: int) -> spmd.Mesh:
    return spmd.Mesh(transport="local", scheduler=scheduler, **(axes or {"x": 4}))


def run(mesh: spmd.Mesh, body) -> dict:
    """body(worker) on every worker, on bare arrays."""
    return mesh.run(body, tracked=False).results


def all_is_well(mesh: spmd.Mesh) -> bool:
    """Whether the workers work: what every test asks for after a failure."""
    axes = tuple(mesh.axes)
    return run(mesh, lambda w: int(spmd.psum(np.int64(w.index), axes))) == dict.fromkeys(
        range(mesh.size), mesh.size * (mesh.size - 1) // 2
    )


def living(kind: type) -> int:
    """How many objects of this class there are; some other one may be a proxy whose object is gone."""
    return sum(issubclass(type(o), kind) for o in gc.get_objects())


PROGRAM = """
import os, signal, sys, threading, time
import numpy as np
import spmd
signal.signal(signal.SIGINT, signal.default_int_handler)  # It is ignored in processes that started in the background.
mesh = spmd.Mesh(x=4, transport="local", scheduler=sys.argv[1])
def run(body): return mesh.run(body, tracked=False).results
def all_is_well(): assert set(run(lambda w: int(spmd.psum(np.int64(w.index), "x"))).values()) == {6}
def later(seconds, action): threading.Thread(target=lambda: (time.sleep(seconds), action()), daemon=True).start()
def interrupt(): os.kill(os.getpid(), signal.SIGINT)
def waits(w):
    while True: spmd.psum(np.ones(1), "x")
def computes(w):
    spmd.psum(np.ones(1), "x")
    while True: pass
def stuck(w):
    if w.index == 2:
        while True: pass
    spmd.psum(np.ones(1), "x")
"""


def in_process(scheduler: str, program: str, *args: str, timeout: float = 30) -> str:
    """Run a program in a process of its own; what it prints."""
    ended = run_python("-X", "faulthandler", "-c", PROGRAM + program, scheduler, *args, timeout=timeout)
    assert ended.returncode == 0, str(ended)
    assert ended.stderr == "", str(ended)
    return ended.stdout
