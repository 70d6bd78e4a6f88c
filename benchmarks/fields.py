"""Fields on a grid: a convolution with halos (W3), and a chain of stencils (W4), value and gradients.

W3: 4x16x256x256 float32, 16 filters 3x3, split by rows over two workers; torch on two processes over gloo with a halo
exchange by hand, JAX jitted on two devices and on one. W4: five points on 2048x2048 float64, 100 steps, the energy
after them, split by rows; JAX jitted, on one device, which uses all cores, and on two. The limit of NumPy alone is the
steps by hand in two threads, without the energy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.contest import TWO_DEVICES, Builders, Case, Section, in_two_threads, jitted, repeated

OFFSETS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
WEIGHTS = (0.6, 0.1, 0.1, 0.1, 0.1)

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
        h = spmd.halo_exchange(x, spec, (0, 0, 1, 1), ("none", "none", "zero", "zero"))
        return spmd.psum(np.sum(conv(h, w) * g), "x")

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


def conv_torch(quick: bool) -> Case:
    """Two processes, and a halo exchange by hand."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
    rank = dist.get_rank()
    x, w, g = map(torch.tensor, images(quick))
    half = x.shape[2] // 2
    rows = slice(half * rank, half * rank + half)
    x, g = x[:, :, rows].contiguous().requires_grad_(), g[:, :, rows].contiguous()
    w.requires_grad_()

    def swapped(edge):
        """The other's edge for ours."""
        theirs = torch.empty_like(edge)
        both = [dist.P2POp(dist.isend, edge, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        for request in dist.batch_isend_irecv(both):
            request.wait()
        return theirs

    near = slice(-1, None) if rank == 0 else slice(0, 1)

    class Halo(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = torch.nn.functional.pad(x, (0, 0, 1, 1))
            out[:, :, near] = swapped(x[:, :, near].contiguous())
            return out

        @staticmethod
        def backward(ctx, g):
            dx = g[:, :, 1:-1].clone()
            dx[:, :, near] += swapped(g[:, :, near].contiguous())
            return dx

    def drop():
        x.grad = w.grad = None

    def step():
        drop()
        loss = (torch.nn.functional.conv2d(Halo.apply(x), w, padding=(0, 1)) * g).sum()
        loss.backward()
        value = loss.detach().clone()
        dist.all_reduce(value)
        dist.all_reduce(w.grad)
        return value, x.grad, w.grad

    def tell():
        value, dx, dw = step()
        parts = [torch.empty_like(dx) for _ in range(2)]
        dist.all_gather(parts, dx)
        return [value.numpy(), torch.cat(parts, 2).numpy(), dw.numpy()]

    return Case(repeated(step), tell, drop)


@W3.contestant("torch, by hand", launcher="torchrun", processes=2, needs=("torch",), env={"OMP_NUM_THREADS": "1"})
def _(quick: bool) -> Builders:
    return {f"{shape(quick)}": lambda: conv_torch(quick)}


def conv_jax(devices: int, quick: bool) -> Case:
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    def conv(x, w, padding):
        return lax.conv_general_dilated(x, w, (1, 1), padding)

    def whole(x, w, g):
        return jnp.sum(conv(x, w, ((1, 1), (1, 1))) * g)

    def local(x, w, g):
        above = lax.ppermute(x[:, :, -1:], "x", [(0, 1)])
        below = lax.ppermute(x[:, :, :1], "x", [(1, 0)])
        h = jnp.concatenate([above, x, below], 2)
        return lax.psum(jnp.sum(conv(h, w, ((0, 0), (1, 1))) * g), "x")

    args, loss = [jnp.asarray(a) for a in images(quick)], whole
    if devices > 1:
        mesh, spec = Mesh(np.array(jax.devices()), ("x",)), P(None, None, "x")
        args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, (spec, P(), spec), strict=True)]
        loss = jax.shard_map(local, mesh=mesh, in_specs=(spec, P(), spec), out_specs=P())
    return jitted(jax.value_and_grad(loss, (0, 1)), *args)


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
        return spmd.psum(0.5 * np.sum(u * u), "x")

    mesh = spmd.Mesh(x=2, transport="local")
    step = spmd.value_and_grad(mesh.map(local, in_specs=P("x"), out_specs=P()))
    with mesh:
        u = spmd.put(plane(points), P("x"))
    return Case(repeated(lambda: step(u)), lambda: [np.asarray(a) for a in step(u)])


def stencil_numpy(rows: int, points: int, steps: int) -> Case:
    """The same steps forward and back, each worker in a thread, so many rows at a time, to stay in the cache: the
    neighbours are added up before they are multiplied, in memory that is there, with zeros around. Rows are read and
    written as one, and all views are made beforehand."""
    wide = points + 2
    grids = [np.zeros((wide, wide)) for _ in range(2)]
    grids[0][1:-1, 1:-1] = plane(points)

    def calls(to: np.ndarray, of: np.ndarray, worker: int) -> list[tuple[Any, ...]]:
        half, room, made = points // 2, np.empty(rows * wide), []
        for y in range(1 + worker * half, 1 + worker * half + half, rows):
            stop = min(y + rows, 1 + worker * half + half)
            lo, hi = y * wide + 1, stop * wide - 1
            out, total = to.reshape(-1)[lo:hi], room[: hi - lo]
            mid, left, right, above, below = (of.reshape(-1)[lo + d : hi + d] for d in (0, -1, 1, -wide, wide))
            made += [
                (np.multiply, mid, WEIGHTS[0], out),
                (np.add, above, left, total),
                (np.add, total, right, total),
                (np.add, total, below, total),
                (np.multiply, total, WEIGHTS[1], total),
                (np.add, out, total, out),
                (np.multiply, to[y:stop, :: points + 1], 0, to[y:stop, :: points + 1]),
            ]
        return made

    ways = [[calls(grids[1 - k], grids[k], worker) for worker in range(2)] for k in range(2)]

    def into(k: int, worker: int) -> None:
        for f, *args in ways[k][worker]:
            f(*args)

    return Case(repeated(in_two_threads(*[partial(into, 0), partial(into, 1)] * steps)), list)


@W4.contestant("limit, NumPy alone")
def _(quick: bool) -> Builders:
    def fastest(points: int, steps: int) -> Case:
        rows = min((8, 16, 32, 64, 128), key=lambda rows: stencil_numpy(rows, points, 1 + steps // 20).run(2))
        return stencil_numpy(rows, points, steps)

    return planes(fastest, quick)


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

    def advance(u, _):
        above, below = lax.ppermute(u[-1:], "x", [(0, 1)]), lax.ppermute(u[:1], "x", [(1, 0)])
        return around(jnp.pad(jnp.concatenate([above, u, below]), ((0, 0), (1, 1)))), None

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
