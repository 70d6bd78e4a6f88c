"""A convolution with halos and a chain of stencils, value and gradients, beside PyTorch and JAX at their best.

    conv      4x16x256x256 float32, 16 filters 3x3, split by rows over two workers.
              PyTorch: two processes over gloo, with a halo exchange by hand.
    stencil   five points on 2048x2048 float64, 100 steps, the energy after them, split by rows over two workers.
              JAX: jitted, on one device, which uses all cores, and on two.

Run: python benchmarks/fields.py [conv] [stencil]. It needs `pip install -e ".[bench,numba]"`.
Every contestant is a process of its own that waits while others work; they run in turn, round after round, and all must
find the same numbers.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

ROUNDS = 9
STEPS, POINTS = 100, 2048
OFFSETS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
WEIGHTS = (0.6, 0.1, 0.1, 0.1, 0.1)

Contestant = tuple[Callable[[], Any], Callable[[Any], list[np.ndarray]]]
"""One step, and what turns its result into the value and the gradients."""


def images() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (4, 16, 256, 256), (16, 16, 3, 3), (4, 16, 256, 256)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


def plane() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((POINTS, POINTS))


def conv_spmd() -> Contestant:
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
        args = spmd.put(tuple(images()), (spec, P(), spec))
    return lambda: step(*args), lambda found: [found[0], *found[1]]


def conv_torch() -> Contestant:
    """This process is the first worker; it starts the second, which follows it step by step."""
    import torch
    import torch.distributed as dist

    rank = int(os.environ.get("FIELDS_RANK", "0"))
    if rank == 0:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            os.environ["MASTER_PORT"] = str(free.getsockname()[1])
        subprocess.Popen([sys.executable, __file__, "--follow"], env={**os.environ, "FIELDS_RANK": "1"})
    os.environ["MASTER_ADDR"] = "localhost"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x, w, g = map(torch.tensor, images())
    rows = slice(128 * rank, 128 * rank + 128)
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

    def step():
        x.grad = w.grad = None
        loss = (torch.nn.functional.conv2d(Halo.apply(x), w, padding=(0, 1)) * g).sum()
        loss.backward()
        value = loss.detach().clone()
        dist.all_reduce(value)
        dist.all_reduce(w.grad)
        return value, x.grad, w.grad

    def tell(found):
        value, dx, dw = found
        parts = [torch.empty_like(dx) for _ in range(2)]
        dist.all_gather(parts, dx)
        return [value.numpy(), torch.cat(parts, 2).numpy(), dw.numpy()]

    def together(f, order):
        def run(*args):
            if rank == 0:
                dist.broadcast(torch.tensor(order), 0)
            return f(*args)

        return run

    if rank == 1:
        order, found = torch.tensor(0), None
        while True:
            dist.broadcast(order, 0)
            if order == 0:
                found = step()
            elif order == 1:
                tell(found)
            else:
                sys.exit()
    conv_torch.stop = lambda: dist.broadcast(torch.tensor(2), 0)  # type: ignore[attr-defined]
    return together(step, 0), together(tell, 1)


def stencil_spmd() -> Contestant:
    import spmd
    from spmd import P

    def local(u):
        for _ in range(STEPS):
            u = spmd.stencil(u, P("x"), OFFSETS, WEIGHTS)
        return spmd.psum(0.5 * np.sum(u * u), "x")

    mesh = spmd.Mesh(x=2, transport="local")
    step = spmd.value_and_grad(mesh.map(local, in_specs=P("x"), out_specs=P()))
    with mesh:
        u = spmd.put(plane(), P("x"))
    return lambda: step(u), list


def stencil_jax(devices: int) -> Contestant:
    if devices > 1:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_enable_x64", True)

    def points(p):
        mid, rest = p[1:-1, 1:-1], p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2]
        return WEIGHTS[0] * mid + WEIGHTS[1] * rest

    def whole(u):
        u, _ = lax.scan(lambda u, _: (points(jnp.pad(u, 1)), None), u, None, length=STEPS)
        return 0.5 * jnp.sum(u * u)

    def advance(u, _):
        above, below = lax.ppermute(u[-1:], "x", [(0, 1)]), lax.ppermute(u[:1], "x", [(1, 0)])
        return points(jnp.pad(jnp.concatenate([above, u, below]), ((0, 0), (1, 1)))), None

    def local(u):
        u, _ = lax.scan(advance, u, None, length=STEPS)
        return lax.psum(0.5 * jnp.sum(u * u), "x")

    u = jnp.asarray(plane())
    if devices > 1:
        mesh = Mesh(np.array(jax.devices()), ("x",))
        u = jax.device_put(u, NamedSharding(mesh, P("x")))
        whole = jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P())
    step = jax.jit(jax.value_and_grad(whole))
    return lambda: jax.block_until_ready(step(u)), lambda found: [np.asarray(a) for a in found]


WORK: dict[str, dict[str, tuple[Callable[[], Contestant], dict[str, str]]]] = {
    "conv": {
        "spmd, numba": (conv_spmd, {}),
        "spmd, NumPy alone": (conv_spmd, {"SPMD_NUMBA": "0"}),
        "torch, 2 processes": (conv_torch, {"OMP_NUM_THREADS": "1"}),
    },
    "stencil": {
        "spmd, numba": (stencil_spmd, {}),
        "spmd, NumPy alone": (stencil_spmd, {"SPMD_NUMBA": "0"}),
        "jax, 1 device": (lambda: stencil_jax(1), {}),
        "jax, 2 devices": (lambda: stencil_jax(2), {}),
    },
}


TITLES = {
    "conv": "4x16x256x256 float32, 16 filters 3x3, halos between two workers",
    "stencil": f"{STEPS} steps of five points on {POINTS}x{POINTS} float64",
}


def serve(work: str, name: str) -> None:
    """A contestant: a step and its seconds for every line that comes, the numbers at the end."""
    out, sys.stdout = sys.stdout, sys.stderr
    step, tell = WORK[work][name][0]()
    found = step()
    for line in sys.stdin:
        if line == "tell\n":
            value, *grads = (np.asarray(a, np.float64) for a in tell(found))
            print(float(value), *(float(np.sum(np.abs(g))) for g in grads), file=out, flush=True)
            break
        start = time.perf_counter()
        found = step()
        print(time.perf_counter() - start, file=out, flush=True)
    getattr(conv_torch, "stop", lambda: None)()


def compare(work: str) -> None:
    running = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--serve", work, name],
            env={**os.environ, **extra},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, (_, extra) in WORK[work].items()
    }

    def ask(name: str, what: str) -> list[float]:
        process = running[name]
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{what}\n")
        process.stdin.flush()
        return [float(n) for n in process.stdout.readline().split()]

    for name in running:
        ask(name, "warm up")
    seconds: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(ROUNDS):
        for name in running:
            seconds[name] += ask(name, "go")
    told = {name: ask(name, "tell") for name in running}
    for process in running.values():
        process.wait(timeout=60)
    ours = median(seconds["spmd, numba"])
    print(f"\n{work}: {TITLES[work]}, value and gradients, median of {ROUNDS}")
    for name, times in seconds.items():
        np.testing.assert_allclose(told[name], told["spmd, numba"], rtol=1e-3 if work == "conv" else 1e-9)
        print(f"  {name:22}{median(times) * 1e3:9.1f} ms   {median(times) / ours:5.2f} of ours with numba")


def main() -> None:
    match sys.argv[1:]:
        case ["--serve", work, name]:
            serve(work, name)
        case ["--follow"]:
            conv_torch()
        case chosen:
            for work in chosen or WORK:
                compare(work)


if __name__ == "__main__":
    main()
