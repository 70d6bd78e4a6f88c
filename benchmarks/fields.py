"""Fields on a grid: a convolution with halos (W3), and a chain of stencils (W4), value and gradients.

W3: 4x16x256x256 float32, 16 filters 3x3, split by rows over two workers. torch: two processes over gloo with a halo
exchange by hand, and one process of two threads; both with the channels last, as its convolutions are faster. JAX
jitted, on two devices and on one, with the channels where they are faster.

W4: five points on 2048x2048 float64, 100 steps, the energy after them, split by rows. JAX jitted, on one device, which
uses all cores, and on two. torch, in two processes over gloo and in one of two threads: all steps are one function of
autograd's, which is its own adjoint, between two tensors in turn, so many rows at a time, to stay in the cache; conv2d
takes 25 times as long, and new memory for each step makes it up to 2.5 times as long. HIPS autograd traces NumPy in one
thread and keeps memory that is freed: the grid lies in one row with zeros around it, so that a neighbour is a roll, and
what has come around the ends is multiplied by zero; slices take more than twice as long. PyLops-MPI: a halo (MPIHalo),
ten steps on each block by a sparse matrix (MPIBlockDiag of MatrixMult), and the inner rows of that; all as one
operator, with its adjoint. Its MPILaplacian within a ring of zeros gives the same numbers in six times the time. The
limit of NumPy alone is the steps by hand in two threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.contest import (
    KEEPING,
    LARGE_PAGES,
    ONE_THREAD,
    TOLD,
    TWO_DEVICES,
    Builders,
    Case,
    Section,
    faster,
    in_two_threads,
    jitted,
    repeated,
    torch_with,
)
from benchmarks.layers import TORCH, TORCHRUN

OFFSETS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
WEIGHTS = (0.6, 0.1, 0.1, 0.1, 0.1)
ROWS = (8, 16, 32, 64, 128)
"""How many rows of a grid may be worked on at a time."""

W3 = Section("w3", "3x3 convolution with halos between two workers, value and gradients", 1e-3, memory=True)
W4 = Section("w4", "five-point stencil split over two workers, value and gradient", 1e-9, memory=True)


def shape(quick: bool) -> tuple[int, ...]:
    return (4, 16, 64, 64) if quick else (4, 16, 256, 256)


def images(quick: bool) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = shape(quick), (16, 16, 3, 3), shape(quick)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def plane(points: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((points, points))


def conv_spmd(quick: bool) -> Case:
    import spmd
    from spmd import P
    from spmd.functions import conv

    spec = P(None, None, "x")

    def local(x, w, g):
        return spmd.psum(np.vdot(conv(x, w, padding=1, spec=spec), g), "x")

    mesh = spmd.Mesh(x=2, transport="local")
    step = spmd.value_and_grad(mesh.map(local, in_specs=(spec, P(), spec), out_specs=P()), (0, 1))
    with mesh:
        args = spmd.put(tuple(images(quick)), (spec, P(), spec))

    def tell():
        value, grads = step(*args)
        return [value, *map(np.asarray, grads)]

    return Case(repeated(lambda: step(*args)), tell)


@W3.contestant("spmd")
@W3.contestant("spmd, NumPy alone", env={"SPMD_NUMBA": "0"})
def _(quick: bool) -> Builders:
    return {f"{shape(quick)}": lambda: conv_spmd(quick)}


def swapping(torch: Any) -> tuple[Callable[[Any], Any], slice]:
    """What gives the other process's edge for ours; and where the rows of a block are that border on the other's."""
    dist, rank = torch.distributed, torch.distributed.get_rank()

    def swapped(edge):
        edge = edge.contiguous()
        theirs = torch.empty_like(edge)
        both = [dist.P2POp(dist.isend, edge, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        for request in dist.batch_isend_irecv(both):
            request.wait()
        return theirs

    return swapped, slice(-1, None) if rank == 0 else slice(0, 1)


def joined(torch: Any, part: Any, dim: int) -> np.ndarray:
    """The whole of which the two processes hold parts."""
    parts = [torch.empty(part.shape, dtype=part.dtype) for _ in range(2)]
    torch.distributed.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim).numpy()


def conv_torch(processes: int, quick: bool) -> Case:
    """In one process or, with a halo exchange by hand, in two."""
    torch, several = torch_with(2 // processes, group=processes > 1), processes > 1
    dist, last = torch.distributed, {"memory_format": torch.channels_last}
    part = dist.get_rank() if several else 0
    x, w, g = map(torch.from_numpy, images(quick))
    x, g = (a.chunk(processes, 2)[part].clone(**last) for a in (x, g))
    args = x.requires_grad_(), w.contiguous(**last).requires_grad_()
    swapped, near = swapping(torch) if several else (None, None)

    class Halo(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = torch.nn.functional.pad(x, (0, 0, 1, 1))
            out[:, :, near] = swapped(x[:, :, near])
            return out

        @staticmethod
        def backward(ctx, g):
            dx = g[:, :, 1:-1].clone(**last)
            dx[:, :, near] += swapped(g[:, :, near])
            return dx

    def conv(x, w):
        if several:
            return torch.nn.functional.conv2d(Halo.apply(x), w, padding=(0, 1))
        return torch.nn.functional.conv2d(x, w, padding=1)

    def flat(a):
        return a.permute(0, 2, 3, 1).reshape(-1)

    def step():
        value = torch.dot(flat(conv(*args)), flat(g))
        dx, dw = torch.autograd.grad(value, args)
        value = value.detach()
        if several:
            dist.all_reduce(value)
            dist.all_reduce(dw)
        return value, dx, dw

    def tell():
        value, dx, dw = step()
        return [value.numpy(), joined(torch, dx, 2) if several else dx.numpy(), dw.numpy()]

    return Case(repeated(step), tell)


@W3.contestant("torch, by hand", **TORCHRUN)
def _(quick: bool) -> Builders:
    return {f"{shape(quick)}": lambda: conv_torch(2, quick)}


@W3.contestant("torch, 1 process" + TOLD, needs=("torch",), env={**TORCH["env"], **LARGE_PAGES, **KEEPING})
@W3.contestant("torch, 1 process", **TORCH)
def _(quick: bool) -> Builders:
    return {f"{shape(quick)}": lambda: conv_torch(1, quick)}


def conv_jax(devices: int, quick: bool) -> Case:
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    def case(axes: str) -> Case:
        """Images with their axes in that order; filters have theirs likewise, the outputs' in the place of N."""
        order, rows = [("NCHW").index(a) for a in axes], axes.index("H")
        padded, filters = [(1, 1)] * 2, axes.replace("N", "O").replace("C", "I")

        def whole(x, w, g, padding=padded):
            return jnp.sum(lax.conv_general_dilated(x, w, (1, 1), padding, dimension_numbers=(axes, filters, axes)) * g)

        def local(x, w, g):
            above = lax.ppermute(lax.slice_in_dim(x, -1, None, axis=rows), "x", [(0, 1)])
            below = lax.ppermute(lax.slice_in_dim(x, 0, 1, axis=rows), "x", [(1, 0)])
            h = jnp.concatenate([above, x, below], rows)
            return lax.psum(whole(h, w, g, [(0, 0), (1, 1)]), "x")

        args, loss = [jnp.asarray(a.transpose(order)) for a in images(quick)], whole
        if devices > 1:
            mesh, spec = Mesh(np.array(jax.devices()), ("x",)), P(*["x" if a == "H" else None for a in axes])
            args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, (spec, P(), spec), strict=True)]
            loss = jax.shard_map(local, mesh=mesh, in_specs=(spec, P(), spec), out_specs=P())
        made = jitted(jax.value_and_grad(loss, (0, 1)), *args)

        def tell():
            value, *grads = made.tell()
            return [value, *(a.transpose(np.argsort(order)) for a in grads)]

        return Case(made.run, tell)

    return faster(case("NCHW"), case("NHWC"))


@W3.contestant("jax, 1 device", needs=("jax",))
def _(quick: bool) -> Builders:
    return {f"{shape(quick)}": lambda: conv_jax(1, quick)}


@W3.contestant("jax, 2 devices", needs=("jax",), env=TWO_DEVICES)
def _(quick: bool) -> Builders:
    return {f"{shape(quick)}": lambda: conv_jax(2, quick)}


def stencil_spmd(points: int, steps: int) -> Case:
    import spmd
    from spmd import P

    def local(u):
        for _ in range(steps):
            u = spmd.stencil(u, P("x"), OFFSETS, WEIGHTS)
        return spmd.psum(0.5 * np.vdot(u, u), "x")

    mesh = spmd.Mesh(x=2, transport="local")
    step = spmd.value_and_grad(mesh.map(local, in_specs=P("x"), out_specs=P()))
    with mesh:
        u = spmd.put(plane(points), P("x"))
    return Case(repeated(lambda: step(u)), lambda: [np.asarray(a) for a in step(u)])


def tuned(case: Callable[[int, int, int], Case], points: int, steps: int) -> Case:
    """A case with so many rows at a time as are the fastest."""
    tried = [case(rows, points, 2) for rows in ROWS]
    return case(ROWS[tried.index(faster(*tried))], points, steps)


def stencil_numpy(rows: int, points: int, steps: int) -> Case:
    """The same steps forward and back, each worker in a thread, so many rows at a time, to stay in the cache: the
    neighbours are added up before they are multiplied, in memory that is there, with zeros around. What is above and
    to the left of one entry is to the right and below of another, and is added up once. Rows are read and written as
    one, and all views are made beforehand."""
    wide = points + 2
    grids = [np.zeros((wide, wide)) for _ in range(2)]

    def calls(to: np.ndarray, of: np.ndarray, worker: int) -> list[tuple[Any, ...]]:
        half, made = points // 2, []
        room, pairs = np.empty(rows * wide), np.empty((rows + 1) * wide)
        for y in range(1 + worker * half, 1 + worker * half + half, rows):
            stop = min(y + rows, 1 + worker * half + half)
            lo, hi = y * wide + 1, stop * wide - 1
            source, out, total = of.reshape(-1), to.reshape(-1)[lo:hi], room[: hi - lo]
            pair, again = pairs[: hi - lo + wide + 1], pairs[wide + 1 : hi - lo + wide + 1]
            made += [
                (np.add, source[lo - wide : hi + 1], source[lo - 1 : hi + wide], pair),
                (np.add, pair[: hi - lo], again, total),
                (np.multiply, total, WEIGHTS[1], total),
                (np.multiply, source[lo:hi], WEIGHTS[0], pair[: hi - lo]),
                (np.add, pair[: hi - lo], total, out),
                (np.multiply, to[y:stop, :: points + 1], 0, to[y:stop, :: points + 1]),
            ]
        return made

    ways = [[calls(grids[1 - k], grids[k], worker) for worker in range(2)] for k in range(2)]

    def into(k: int, worker: int) -> None:
        for f, *args in ways[k][worker]:
            f(*args)

    one_way = in_two_threads(*[partial(into, k % 2) for k in range(steps)])
    u = grids[0][1:-1, 1:-1]

    def step():
        one_way()
        value = 0.5 * np.vdot(grids[0], grids[0])
        one_way()
        return value

    def tell():
        u[:] = plane(points)
        return [step(), u]

    tell()
    return Case(repeated(step), tell, kept=sum(g.nbytes for g in grids))


@W4.contestant("limit, NumPy alone")
def _(quick: bool) -> Builders:
    return planes(partial(tuned, stencil_numpy), quick)


def stencil_torch(processes: int, rows: int, points: int, steps: int) -> Case:
    torch, several = torch_with(2 // processes, group=processes > 1), processes > 1
    part = torch.distributed.get_rank() if several else 0
    u = torch.from_numpy(plane(points)).chunk(processes)[part].clone().requires_grad_()
    swapped, near = swapping(torch) if several else (None, None)
    centre, side = WEIGHTS[:2]

    def stepped(out, u):
        for y in range(0, len(u), rows):
            mid, to = u[y : y + rows], out[y : y + rows]
            above, below = u[max(y - 1, 0) : y + rows - 1], u[y + 1 : y + rows + 1]
            torch.mul(mid, centre, out=to)
            to[:, 1:].add_(mid[:, :-1], alpha=side)
            to[:, :-1].add_(mid[:, 1:], alpha=side)
            to[len(to) - len(above) :].add_(above, alpha=side)
            to[: len(below)].add_(below, alpha=side)
        if several:
            out[near].add_(swapped(u[near]), alpha=side)
        return out

    def chain(u):
        rooms = [torch.empty_like(u) for _ in range(2)]
        for k in range(steps):
            u = stepped(rooms[k % 2], u)
        return u

    class Steps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, u):
            return chain(u)

        @staticmethod
        def backward(ctx, g):
            return chain(g)

    def energy(v):
        return 0.5 * torch.dot(v, v)

    def step():
        value = energy(Steps.apply(u).view(-1))
        (grad,) = torch.autograd.grad(value, u)
        value = value.detach()
        if several:
            torch.distributed.all_reduce(value)
        return value, grad

    def tell():
        value, grad = step()
        return [value.numpy(), joined(torch, grad, 0) if several else grad.numpy()]

    return Case(repeated(step), tell)


@W4.contestant("torch, by hand", **TORCHRUN)
def _(quick: bool) -> Builders:
    return planes(partial(tuned, partial(stencil_torch, 2)), quick)


@W4.contestant("torch, 1 process", **TORCH)
def _(quick: bool) -> Builders:
    return planes(partial(tuned, partial(stencil_torch, 1)), quick)


def stencil_autograd(points: int, steps: int) -> Case:
    from autograd import numpy as anp
    from autograd import value_and_grad

    u, wide = plane(points), points + 2
    side = np.pad(np.full(u.shape, WEIGHTS[1]), 1).reshape(-1)

    def loss(u):
        p = anp.pad(u, 1, "constant").reshape(-1)
        for _ in range(steps):
            beside = anp.roll(p, 1) + anp.roll(p, -1) + anp.roll(p, wide) + anp.roll(p, -wide)
            p = side * (WEIGHTS[0] / WEIGHTS[1] * p + beside)
        return 0.5 * anp.dot(p, p)

    step = partial(value_and_grad(loss), u)
    return Case(repeated(step), lambda: list(step()))


@W4.contestant("autograd", needs=("autograd",), env=KEEPING)
def _(quick: bool) -> Builders:
    return planes(stencil_autograd, quick)


def stencil_pylops(points: int, steps: int) -> Case:
    """A halo as wide as the steps that are made from it. There is none beyond the ends, where zeros would not stay."""
    from mpi4py import MPI
    from pylops import MatrixMult
    from pylops_mpi import DistributedArray, MPIBlockDiag, MPIHalo
    from scipy import sparse

    at_once, comm = 10, MPI.COMM_WORLD
    halo = MPIHalo((points, points), at_once, (2, 1))
    rows, columns = (sparse.diags_array([1.0, 1.0], offsets=[-1, 1], shape=(n, n)) for n in halo.local_extent)
    matrix = WEIGHTS[1] * sparse.kronsum(columns, rows)
    matrix.setdiag(WEIGHTS[0])
    forward = halo.H @ MPIBlockDiag([MatrixMult(matrix.tocsr()) ** at_once]) @ halo
    backward, u = forward.H, DistributedArray.to_dist(plane(points).reshape(-1))

    def step():
        v = u
        for _ in range(steps // at_once):
            v = forward @ v
        value = 0.5 * v.dot(v)
        for _ in range(steps // at_once):
            v = backward @ v
        return value, v

    def tell():
        value, grad = step()
        return [value, np.concatenate(comm.allgather(grad.local_array)).reshape(points, points)]

    return Case(repeated(step), tell)


@W4.contestant(
    "pylops-mpi",
    launcher="mpiexec",
    processes=2,
    needs=("pylops_mpi",),
    env={**ONE_THREAD, "CUPY_PYLOPS": "0", "NCCL_PYLOPS_MPI": "0"},
)
def _(quick: bool) -> Builders:
    return planes(stencil_pylops, quick)


def stencil_jax(devices: int, points: int, steps: int) -> Case:
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_enable_x64", True)

    def around(p):
        mid, rest = p[1:-1, 1:-1], p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2]
        return WEIGHTS[0] * mid + WEIGHTS[1] * rest

    def whole(u):
        u, _ = lax.scan(lambda u, _: (around(jnp.pad(u, 1)), None), u, None, length=steps)
        return 0.5 * jnp.sum(u * u)

    def padded(u, before, after):
        return lax.pad(u, jnp.zeros((), u.dtype), [(*pair, 0) for pair in zip(before, after, strict=True)])

    def advance(u, _):
        """Zeros around each term: so XLA makes one loop of all, which takes a third of the time of slices of a block
        with its halo."""
        above, below, more = lax.ppermute(u[-1:], "x", [(0, 1)]), lax.ppermute(u[:1], "x", [(1, 0)]), len(u) - 1
        rest = padded(u[:-1], (1, 0), (0, 0)) + padded(u[1:], (0, 0), (1, 0))
        rest += padded(u[:, :-1], (0, 1), (0, 0)) + padded(u[:, 1:], (0, 0), (0, 1))
        rest += padded(above, (0, 0), (more, 0)) + padded(below, (more, 0), (0, 0))
        return WEIGHTS[0] * u + WEIGHTS[1] * rest, None

    def local(u):
        u, _ = lax.scan(advance, u, None, length=steps)
        return lax.psum(0.5 * jnp.sum(u * u), "x")

    u = jnp.asarray(plane(points))
    if devices > 1:
        mesh = Mesh(np.array(jax.devices()), ("x",))
        u = jax.device_put(u, NamedSharding(mesh, P("x")))
        whole = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P())
    return jitted(jax.value_and_grad(whole), u)


def planes(case: Callable[[int, int], Case], quick: bool) -> Builders:
    points, steps = (256, 10) if quick else (2048, 100)
    return {f"{points}x{points}, {steps} steps": lambda: case(points, steps)}


@W4.contestant("spmd")
@W4.contestant("spmd, NumPy alone", env={"SPMD_NUMBA": "0"})
def _(quick: bool) -> Builders:
    return planes(stencil_spmd, quick)


@W4.contestant("jax, 1 device", needs=("jax",))
def _(quick: bool) -> Builders:
    return planes(lambda *size: stencil_jax(1, *size), quick)


@W4.contestant("jax, 2 devices", needs=("jax",), env=TWO_DEVICES)
def _(quick: bool) -> Builders:
    return planes(lambda *size: stencil_jax(2, *size), quick)
