"""Four workers on two hosts, of which one fails. Arguments: the fault, its moment, the rank, and whether all catch it.

A moment is the number of a collective of the body, before which the worker fails; or `before` any map, `between` two
maps, `end` of the body, or a number of milliseconds (`20ms`) into a map of large collectives, whatever goes on there.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
import up  # noqa: F401

import spmd
from spmd import P

FAULT, MOMENT, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])
CATCH = sys.argv[4:] == ["catch"]
BOTH = ("h", "p")
LARGE = 1 << 17

mesh = spmd.Mesh(h=2, p=2)
me = mesh.local_workers[0]


def say(*words: object) -> None:
    print(" ".join(map(str, (f"rank {me}", *words))) + "\n", end="", flush=True)


def strike(x):
    """Fail, in the way that was asked for."""
    say("strikes", time.time())
    if FAULT == "raise":
        raise ValueError("struck")
    if FAULT in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if FAULT == "kill" else signal.SIGSTOP)
    if FAULT == "os_exit":
        os._exit(3)
    if FAULT == "sys_exit":
        sys.exit(3)
    if FAULT in ("away", "late"):
        time.sleep(1000 if FAULT == "away" else 8)
    if FAULT == "mismatch":
        spmd.pmax(x, BOTH)
    return x


def total(x, axes):
    return spmd.psum(spmd.pvary(x, axes), axes)


STEPS = [
    lambda x: total(x, BOTH) / 4,
    lambda x: total(x, "h") / 2,
    lambda x: total(x, "p") / 2,
    lambda x: spmd.all_gather(spmd.varying(x, BOTH), "h")[0],
    lambda x: spmd.shift(spmd.varying(x, BOTH), "h", 1, wrap=True),
    lambda x: total(np.tile(x, LARGE), BOTH)[: x.shape[0]] / 4,
    lambda x: spmd.all_gather(spmd.varying(np.tile(x, LARGE), BOTH), BOTH)[0][: x.shape[0]],
    lambda x: spmd.shift(spmd.varying(np.tile(x, LARGE), BOTH), "h", 1, wrap=True)[: x.shape[0]],
]


def body(x):
    for number, step in enumerate(STEPS):
        if me == RANK and armed and str(number) == MOMENT:
            strike(spmd.varying(x, BOTH))
        x = step(x)
    if me == RANK and armed and MOMENT == "end":
        strike(x)
    return total(x, BOTH) / 4


def storm(x):
    """Large collectives for some seconds, while a timer strikes."""
    for _ in range(200):
        x = STEPS[5](x)
        x = spmd.psum(STEPS[7](x), BOTH) / 4
    return x


def run(f=body) -> float:
    return float(np.sum(np.asarray(spmd.map(f, P(), P(), mesh=mesh, check=False)(np.ones(3)))))


def strike_outside() -> None:
    """Fail outside of any map, which the others take no part in."""
    try:
        strike(np.ones(3))
    except ValueError as error:
        say("raised", type(error).__name__, time.time())
        if not CATCH:
            raise


def attempt() -> None:
    if me == RANK and MOMENT == "before":
        strike_outside()
    if MOMENT.endswith("ms"):
        if me == RANK:
            threading.Timer(float(MOMENT[:-2]) / 1e3, strike, [np.ones(3)]).start()
        run(storm)
        return
    run()
    if me == RANK and MOMENT == "between":
        strike_outside()
    if MOMENT == "between":
        run()


armed = True
try:
    attempt()
    say("got through")
except (Exception, SystemExit) as error:
    say("raised", type(error).__name__, time.time(), repr(str(error).splitlines()[0][:60]))
    if not CATCH:
        raise
armed = False
say("got", run())
