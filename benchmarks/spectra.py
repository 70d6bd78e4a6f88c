"""Fourier transforms in three dimensions by `spmd.fft`, forward, between two workers (FFT).

256x256x256 complex128 and float64, split by planes; the result lies as it comes. Ours by `spmd.fft` in a body, by
`spmd.fft` of global arrays, and in two processes; mpi4py-fft as slabs, by plans that FFTW has measured, whose input is
copied, as its place is overwritten. SciPy, with two threads in one process, needs no repartition. The limit is SciPy's
transforms alone, by two threads, on blocks that lie right from the start.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.contest import ONE_THREAD, Builders, Case, Section, in_two_threads, repeated
from benchmarks.transposes import mine

FFT = Section("fft", "Fourier transform in three dimensions by spmd.fft, forward, on two workers", 1e-9)


def cube(n: int, real: bool) -> np.ndarray:
    u = np.random.default_rng(0).standard_normal((n, n, n))
    return u if real else u + 1j * u[::-1]


def cases(case: Any, quick: bool) -> Builders:
    n = 32 if quick else 256
    return {f"{n}x{n}x{n} {name}": partial(case, n, name == "real") for name in ("complex", "real")}


def spmd_case(transport: str, in_body: bool, n: int, real: bool) -> Case:
    import spmd
    from spmd import P

    mesh = spmd.Mesh(x=2, transport=transport)
    whole = spmd.fft.rfftn if real else spmd.fft.fftn
    plan = spmd.fft.plan((n, n, n), P("x"), real=real, mesh=mesh)
    body = mesh.map(lambda u: whole(u, spec=P("x"), shape=(n, n, n)), P("x"), plan.out, check=False)
    u = spmd.put(cube(n, real), P("x"), mesh)
    step = body if in_body else whole
    return Case(repeated(lambda: step(u)), lambda: [step(u).numpy()])


@FFT.contestant("spmd", needs=("scipy",))
def _(quick: bool) -> Builders:
    return cases(partial(spmd_case, "local", True), quick)


@FFT.contestant("spmd, global arrays", needs=("scipy",))
def _(quick: bool) -> Builders:
    return cases(partial(spmd_case, "local", False), quick)


@FFT.contestant("spmd, MPI", launcher="mpiexec", processes=2, needs=("scipy",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return cases(partial(spmd_case, "mpi", True), quick)


def mpi4py_fft_case(n: int, real: bool) -> Case:
    from mpi4py import MPI
    from mpi4py_fft import PFFT

    comm = MPI.COMM_WORLD
    plan = PFFT(comm, (n, n, n), axes=((0,), (1, 2)), dtype=np.float64 if real else np.complex128, slab=True)
    u = cube(n, real)[plan.local_slice(False)].copy()

    def step():
        return plan.forward(u, normalize=False)

    def tell():
        whole = np.empty((n, n, n // 2 + 1 if real else n), complex)
        for place, block in comm.allgather((plan.local_slice(True), step())):
            whole[place] = block
        return [whole]

    return Case(repeated(step), tell)


@FFT.contestant("mpi4py-fft", launcher="mpiexec", processes=2, needs=("mpi4py_fft",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return cases(mpi4py_fft_case, quick)


def scipy_case(n: int, real: bool) -> Case:
    from scipy import fft

    u, whole = cube(n, real), fft.rfftn if real else fft.fftn
    return Case(repeated(lambda: whole(u, workers=2)), lambda: [whole(u, workers=2)])


@FFT.contestant("scipy, 2 threads", needs=("scipy",))
def _(quick: bool) -> Builders:
    return cases(scipy_case, quick)


def limit_case(n: int, real: bool) -> Case:
    from scipy import fft

    planes = partial(fft.rfftn if real else fft.fftn, axes=(1, 2))
    slabs = [cube(n, real)[mine(n, k)].copy() for k in range(2)]
    others = [np.ones((n, n // 2, n // 2 + 1 if real else n), complex) for _ in range(2)]

    def work(k: int) -> None:
        planes(slabs[k])
        fft.fft(others[k], axis=0, overwrite_x=True)
        others[k] *= 1 / n  # so that the numbers stay what they are

    def tell():
        return [fft.fft(np.concatenate([planes(u) for u in slabs]), axis=0)]

    return Case(repeated(in_two_threads(work)), tell)


@FFT.contestant("limit", needs=("scipy",))
def _(quick: bool) -> Builders:
    return cases(limit_case, quick)
