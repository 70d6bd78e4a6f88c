"""What it costs that processes check that they call alike, and watch each other while they wait: a sum over MPI with
that and, by SPMD_CHECK=0, without.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.contest import ONE_THREAD, Builders, Case, Section, repeated

CHECKS = Section("checks", "a sum between processes, checked and not", 1e-9)
NUMBERS = 1, 1_000, 100_000


def summed(numbers: int) -> Case:
    import spmd
    from spmd import P

    mesh = spmd.Mesh(x=2, transport="mpi")

    def timed(x, count):
        return np.array([repeated(lambda: spmd.psum(x, "x"))(count)])

    x = spmd.put(np.random.default_rng(0).standard_normal(2 * numbers), P("x"), mesh)
    run = mesh.map(timed, in_specs=(P("x"), None), out_specs=P("x"))
    total = mesh.map(lambda x: spmd.psum(x, "x"), in_specs=P("x"), out_specs=P())
    return Case(lambda count: float(run(x, count).numpy()[0]), lambda: [total(x).numpy()])


@CHECKS.contestant("spmd, SPMD_CHECK=0", launcher="mpiexec", processes=2, env={**ONE_THREAD, "SPMD_CHECK": "0"})
@CHECKS.contestant("spmd", launcher="mpiexec", processes=2, env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return {f"{n} numbers of 8 bytes": partial(summed, n) for n in NUMBERS}


@CHECKS.contestant("mpi4py", launcher="mpiexec", processes=2, env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return {f"{n} numbers of 8 bytes": partial(by_hand, n) for n in NUMBERS}


def by_hand(numbers: int) -> Case:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    x = np.random.default_rng(0).standard_normal(2 * numbers).reshape(2, numbers)[comm.rank].copy()
    total = np.empty_like(x)
    step = repeated(lambda: comm.Allreduce(x, total))
    return Case(step, lambda: [total])
