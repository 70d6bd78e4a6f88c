"""Rank 1 forks a child at a moment, and the child does something: arguments are what, and when. The job goes on."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

import spmd
from spmd import P

WHAT, MOMENT = sys.argv[1:3]
NAMES = "PMI_RANK", "OMPI_COMM_WORLD_RANK", "RANK"
ME = next(int(os.environ[name]) for name in NAMES if name in os.environ)
SIZE = next(int(os.environ[n]) for n in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE") if n in os.environ)
NOT_YET = [True]


def in_a_child(x) -> None:
    if WHAT == "exit":
        sys.exit(3)
    if WHAT == "raise":
        raise ValueError("only in the child")
    if WHAT == "interrupt":  # is the child's, and nobody else's
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        except KeyboardInterrupt:
            os._exit(0)
    if WHAT == "call":
        try:
            spmd.psum(spmd.pvary(x, "x"), "x") if MOMENT == "inside" else f(np.ones(SIZE))
        except spmd.errors.TransportError as error:
            print(f"refused: {error}\n", end="", flush=True)
        alone = spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P(), mesh=spmd.Mesh(x=2, transport="local"))
        if MOMENT != "inside":
            print(f"by itself: {float(alone(np.ones(2)).numpy()[0])}\n", end="", flush=True)
        os._exit(0)


def at(moment: str, x=None) -> None:
    if ME == 1 and moment == MOMENT and NOT_YET:
        NOT_YET.clear()
        child = os.fork()
        if child == 0:
            in_a_child(x)
            sys.exit(0)
        os.waitpid(child, 0)
        time.sleep(0.5)  # in which others may find that it has left


def body(x):
    x = spmd.psum(x, "x")
    at("inside", x)
    return spmd.psum(spmd.pvary(x, "x"), "x")


at("imported")
mesh = spmd.Mesh(x=SIZE)
at("mesh")
f = spmd.map(body, P("x"), P(), mesh=mesh)
f(np.ones(SIZE))
at("between")
print(f"got {float(f(np.ones(SIZE)).numpy()[0])}\n", end="", flush=True)
