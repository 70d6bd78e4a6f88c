"""What calls cost by themselves: a chain of small operations, eagerly (W7), single costs, and memory of a traced step.

W7: value and gradient of 20 operations on 16 float32 of each of two workers, and a sum over both, with nothing jitted:
JAX op by op through shard_map on two devices; DTensor, and plain tensors with an all-reduce by hand, on two processes
over gloo with a thread each. JAX jitted, and spmd.jit beside it, are there for reference: they are not eager. The limit
is NumPy by hand.
Costs: an import is timed in fresh processes, from its first line on; a first call from the end of the import on, with
its caches on disk as they are. An operation is one of a chain in one process, with one thread: in a body of two
virtual workers that take turns, where the arrays carry their states (spmd) or not (check=False), beside the same loop
on plain arrays; or in value and gradient by a tape, beside plain NumPy, which computes the value only. A parameter is
one of many that two virtual workers have; torch has them in one process.
Memory: value and gradient by a tape, beside NumPy as one writes forward and backward by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.contest import ONE_THREAD, TWO_DEVICES, Builders, Case, Section, by_steps, repeated, torch_with

W7 = Section("w7", "20 small operations and a sum over two workers, eagerly, value and gradient", 1e-5)
COSTS = Section("costs", "what single calls cost", 1e-9)
MEMORY = Section(
    "memory", "value and gradient by a tape, its time and peak memory, beside NumPy by hand", 1e-9, memory=True
)


def pair() -> np.ndarray:
    """A row for each of two workers."""
    return np.random.default_rng(0).standard_normal((2, 16), np.float32)


def links(x: Any, tanh: Callable[[Any], Any]) -> Any:
    """20 operations: slices, products, sums, tanh."""
    for _ in range(4):
        x = tanh(x[:, 1:] * x[:, :-1] + 0.5)
    return x


def small(case: Callable[[], Case]) -> Callable[[bool], Builders]:
    return lambda quick: {"20 operations and a sum": case}


def small_spmd(transport: str, once: bool = False) -> Case:
    """once: its body is run once (spmd.jit)."""
    import spmd
    from spmd import P

    mesh = spmd.Mesh(x=2, transport=transport)

    def local(x):
        return spmd.psum(np.sum(links(x, np.tanh)), "x")

    mapped = mesh.map(local, in_specs=P("x"), out_specs=P())
    step = spmd.value_and_grad(spmd.jit(mapped) if once else mapped)
    with mesh:
        x = spmd.put(pair(), P("x"))
    return Case(repeated(lambda: step(x)), lambda: [a.numpy() for a in step(x)])


W7.contestant("spmd")(small(partial(small_spmd, "local")))
W7.contestant("spmd, jit")(small(partial(small_spmd, "local", True)))
W7.contestant("spmd, MPI", launcher="mpiexec", processes=2, env=ONE_THREAD)(small(partial(small_spmd, "mpi")))
W7.contestant("spmd, MPI, jit", launcher="mpiexec", processes=2, env=ONE_THREAD)(
    small(partial(small_spmd, "mpi", True))
)


def small_numpy() -> Case:
    """Both workers' operations, one after the other, and the sum: what NumPy itself takes, without a tape."""
    blocks = [pair()[k : k + 1].copy() for k in range(2)]

    def of_one(x):
        kept = []
        for _ in range(4):
            a, b = x[:, 1:], x[:, :-1]
            y = np.tanh(a * b + 0.5)
            kept.append((a, b, y))
            x = y
        g = np.ones_like(x)
        for a, b, y in reversed(kept):
            g = g * (1 - y * y)
            whole = np.zeros((1, a.shape[1] + 1), x.dtype)
            whole[:, 1:] += g * b
            whole[:, :-1] += g * a
            g = whole
        return np.sum(x), g

    def step():
        (u, g), (v, h) = map(of_one, blocks)
        return u + v, np.concatenate([g, h])

    return Case(repeated(step), lambda: list(step()))


W7.contestant("limit")(small(small_numpy))


def small_jax(jitted: bool) -> Case:
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = Mesh(np.array(jax.devices()), ("x",))

    def local(x):
        return lax.psum(jnp.sum(links(x, jnp.tanh)), "x")

    step = jax.value_and_grad(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P()))
    step = jax.jit(step) if jitted else step
    x = jax.device_put(pair(), NamedSharding(mesh, P("x")))
    return Case(repeated(lambda: jax.block_until_ready(step(x))), lambda: [np.asarray(a) for a in step(x)])


W7.contestant("jax eager, 2 devices", needs=("jax",), env=TWO_DEVICES)(small(partial(small_jax, False)))
W7.contestant("jax jitted, 2 devices", needs=("jax",), env=TWO_DEVICES)(small(partial(small_jax, True)))


def small_dtensor() -> Case:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    torch = torch_with(1)
    x = distribute_tensor(torch.from_numpy(pair()), init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()

    def step():
        x.grad = None
        loss = links(x, torch.tanh).sum().redistribute(placements=[Replicate()]).to_local()
        loss.backward()
        return loss, x.grad

    def tell():
        loss, grad = step()
        return [loss.detach().numpy(), grad.full_tensor().numpy()]

    return Case(repeated(step), tell)


W7.contestant("torch DTensor", launcher="torchrun", processes=2, needs=("torch",), env=ONE_THREAD)(small(small_dtensor))


def small_torch() -> Case:
    torch = torch_with(1, group=True)
    dist = torch.distributed
    rank = dist.get_rank()
    x = torch.from_numpy(pair()[rank : rank + 1].copy()).requires_grad_()

    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            x = x.clone()
            dist.all_reduce(x)
            return x

        @staticmethod
        def backward(ctx, g):
            return g

    def step():
        x.grad = None
        loss = Total.apply(links(x, torch.tanh).sum())
        loss.backward()
        return loss, x.grad

    def tell():
        loss, grad = step()
        parts = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(parts, grad)
        return [loss.detach().numpy(), torch.cat(parts).numpy()]

    return Case(repeated(step), tell)


W7.contestant("torch, by hand", launcher="torchrun", processes=2, needs=("torch",), env=ONE_THREAD)(small(small_torch))


# Costs: what a fresh process does

FIRST = {
    "spmd": """
from spmd import P
f = spmd.map(lambda x: spmd.psum(x, "x"), in_specs=P("x"), out_specs=P(), mesh=spmd.Mesh(x=2, transport="local"))
f(np.ones(2)).numpy()
""",
    "jax": """
from jax.sharding import Mesh, PartitionSpec as P
mesh = Mesh(np.array(jax.devices()), ("x",))
f = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))
np.asarray(f(np.ones(2)))
""",
}
"""The sum over two workers, to its number."""
EXAMPLE = str(Path(__file__).parent.parent / "examples" / "digits.py")
DIGITS = """
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()):
    runpy.run_path(example, run_name="__main__")
"""
"""Data, 15 epochs of training and its checks, all in one."""


def fresh(before: str, program: str) -> Case:
    """The time of a program, in processes of their own, without what comes before it."""
    start, end = "import time", "print(time.perf_counter() - begun)"
    lines = "\n".join([start, before, "begun = time.perf_counter()", program, end])

    def run(count: int) -> float:
        command = [sys.executable, "-c", lines]
        done = [subprocess.run(command, stdout=subprocess.PIPE, check=True, env=os.environ) for _ in range(count)]
        return median(float(d.stdout) for d in done)

    return Case(run, list)


def processes(name: str) -> Builders:
    cases = {"import": partial(fresh, "", f"import {name}")}
    if name in FIRST:
        cases["first call"] = partial(fresh, f"import {name}, numpy as np", FIRST[name])
    if name == "spmd":
        cases["the example of digits"] = partial(
            fresh, f"import runpy, sys; sys.argv = ['digits.py']; example = {EXAMPLE!r}", DIGITS
        )
    return cases


# Costs: what a call and an operation cost in a process that goes on

COUNT, TIMES = 1000, 50
OPERATIONS = ("x * c", "x + c", "tanh(x)", "x[::-1]", "m @ x", "tanh(m @ x + c)[::-1] * c")


def operation(name: str, np_: Any, c: Any, m: Any) -> Callable[[Any], Any]:
    tanh = np_.tanh
    flip = (lambda x: x.flip(0)) if np_.__name__ == "torch" else (lambda x: x[::-1])
    return {
        "x * c": lambda x: x * c,
        "x + c": lambda x: x + c,
        "tanh(x)": tanh,
        "x[::-1]": flip,
        "m @ x": lambda x: m @ x,
        "tanh(m @ x + c)[::-1] * c": lambda x: flip(tanh(m @ x + c)) * c,
    }[name]


def vectors(n: int = 16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal(n), rng.uniform(0.9, 1.1, n), rng.standard_normal((n, n)) / n


def each(run: Callable[[int], float], operations: int) -> Callable[[int], float]:
    """The seconds of one operation, where a step consists of so many."""
    return lambda count: run(max(1, count // operations)) / operations


def empty_spmd(scheduler: str) -> Case:
    import spmd

    call = spmd.Mesh(x=2, transport="local", scheduler=scheduler).map(lambda: None, in_specs=(), out_specs=None)
    return Case(repeated(call), list)


def identity_spmd(scheduler: str) -> Case:
    import spmd
    from spmd import P

    mesh = spmd.Mesh(x=2, transport="local", scheduler=scheduler)
    call = mesh.map(lambda x: x, in_specs=P("x"), out_specs=P("x"))
    x = spmd.put(np.arange(2.0), P("x"), mesh)
    return Case(repeated(lambda: call(x)), lambda: [call(x).numpy()])


def identity_jax() -> Case:
    import jax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_enable_x64", True)
    mesh = Mesh(np.array(jax.devices()), ("x",))
    call = jax.jit(jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("x"), out_specs=P("x")))
    x = jax.device_put(np.arange(2.0), NamedSharding(mesh, P("x")))
    return Case(repeated(lambda: jax.block_until_ready(call(x))), lambda: [np.asarray(call(x))])


def in_body(name: str, check: bool) -> Case:
    import spmd
    from spmd import P

    x, c, m = vectors()
    step = operation(name, np, c, m)

    def local(x):
        for _ in range(COUNT):
            y = step(x)
        return y

    mesh = spmd.Mesh(x=2, transport="local", scheduler="lockstep")
    call = mesh.map(local, in_specs=P("x"), out_specs=P("x"), check=check)
    x = spmd.put(np.concatenate([x, x[::-1]]), P("x"), mesh)
    return Case(each(repeated(lambda: call(x)), 2 * COUNT), lambda: [call(x).numpy()])


def in_loop(name: str) -> Case:
    x, c, m = vectors()
    step = operation(name, np, c, m)

    def both():
        for y in (x, x[::-1].copy()):
            for _ in range(COUNT):
                step(y)

    return Case(each(repeated(both), 2 * COUNT), lambda: [np.concatenate([step(x), step(x[::-1].copy())])])


def chained(name: str, np_: Any, c: Any, m: Any) -> Callable[[Any], Any]:
    step = operation(name, np_, c, m)

    def f(x):
        for _ in range(TIMES):
            x = step(x)
        return x.sum()

    return f


def taped(name: str, transform: Callable[[Callable[[Any], Any]], Callable[[Any], Any]], np_: Any = np) -> Case:
    x, c, m = vectors()
    f = transform(chained(name, np_, c, m))
    return Case(each(repeated(lambda: f(x)), TIMES), lambda: list(f(x)))


def taped_torch(name: str) -> Case:
    torch = torch_with(1)
    x, c, m = map(torch.from_numpy, vectors())
    f = chained(name, torch, c, m)
    x.requires_grad_()

    def step():
        x.grad = None
        value = f(x)
        value.backward()
        return value.detach(), x.grad

    return Case(each(repeated(step), TIMES), lambda: [a.numpy() for a in step()])


def plain(name: str) -> Case:
    x, c, m = vectors()
    f = chained(name, np, c, m)
    return Case(each(repeated(lambda: f(x)), TIMES), list)


PARAMETERS, RATE = 64, 0.01
STEPPING = f"a step of training, each of {PARAMETERS} small parameters"


def parameters() -> tuple[list[np.ndarray], np.ndarray]:
    """Many small ones, and what they are added to, a row for each of two workers."""
    rng = np.random.default_rng(0)
    return [0.1 * rng.standard_normal(16) for _ in range(PARAMETERS)], pair().astype(float)


def stepping(start: Callable[[], Any], step: Callable[[Any], tuple[Any, Any]], whole: Callable[[Any], list]) -> Case:
    """A step of training, for each parameter."""
    once, third = by_steps(start, step)

    def tell():
        value, params = third()
        return [value, *whole(params)]

    return Case(each(repeated(once), PARAMETERS), tell)


def stepping_spmd() -> Case:
    import spmd
    from spmd import P

    def local(params, x):
        for p in params:
            x = x + p
        return spmd.psum(np.sum(np.tanh(x)), "x")

    mesh, optimizer = spmd.Mesh(x=2, transport="local"), spmd.optim.sgd(RATE)
    loss_and_grads = spmd.value_and_grad(spmd.jit(mesh.map(local, in_specs=(P(), P("x")), out_specs=P())))
    x = spmd.put(parameters()[1], P("x"), mesh)

    def start():
        params = spmd.put(parameters()[0], P(), mesh)
        return params, optimizer.init(params)

    def step(trained):
        params, state = trained
        value, grads = loss_and_grads(params, x)
        return value, optimizer.update(grads, state, params, donate=True)

    return stepping(start, step, lambda trained: [p.numpy() for p in trained[0]])


def stepping_torch() -> Case:
    """One process has all rows, and sends nothing."""
    torch = torch_with(1)
    x = torch.from_numpy(parameters()[1])

    def start():
        params = [torch.nn.Parameter(torch.from_numpy(p)) for p in parameters()[0]]
        return params, torch.optim.SGD(params, lr=RATE, foreach=True)

    def step(trained):
        params, optimizer = trained
        optimizer.zero_grad()
        y = x
        for p in params:
            y = y + p
        value = torch.sum(torch.tanh(y))
        value.backward()
        optimizer.step()
        return value.detach().numpy(), trained

    return stepping(start, step, lambda trained: [p.detach().numpy() for p in trained[0]])


def bodies(case: Callable[[str], Case]) -> Builders:
    return {f"in a body, {name}": partial(case, name) for name in OPERATIONS}


def tapes(case: Callable[[str], Case]) -> Builders:
    return {f"by the tape, {name}": partial(case, name) for name in OPERATIONS}


@COSTS.contestant("spmd", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    import spmd

    empty = {f"empty map, {s}": partial(empty_spmd, s) for s in ("lockstep", "threads", "auto")}
    same = {f"map of the identity, {s}": partial(identity_spmd, s) for s in ("lockstep", "threads", "auto")}
    typed = bodies(lambda name: in_body(name, True))
    each_parameter = {STEPPING: stepping_spmd}
    traced = tapes(lambda name: taped(name, spmd.value_and_grad))
    return processes("spmd") | empty | same | typed | traced | each_parameter


@COSTS.contestant("spmd, check=False", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return bodies(lambda name: in_body(name, False))


@COSTS.contestant("numpy", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return processes("numpy") | bodies(in_loop) | tapes(plain)


@COSTS.contestant("autograd", needs=("autograd",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    import autograd
    import autograd.numpy as anp

    return processes("autograd") | tapes(lambda name: taped(name, autograd.value_and_grad, anp))


@COSTS.contestant("torch", needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return processes("torch") | tapes(taped_torch) | {STEPPING: stepping_torch}


@COSTS.contestant("jax, 2 devices", needs=("jax",), env=TWO_DEVICES)
def _(quick: bool) -> Builders:
    same = {f"map of the identity, {s}": identity_jax for s in ("lockstep", "threads", "auto")}
    return processes("jax") | same


# Memory: value and gradient by a tape, and by hand


def recurrence(x, c, tanh):
    for _ in range(5):
        x = tanh(x * c + x)
    return x.sum()


def recurrence_by_hand(x, c):
    kept = []
    for _ in range(5):
        x = np.tanh(x * c + x)
        kept.append(x)
    value, g = np.sum(x), np.ones_like(x)
    while kept:
        y = kept.pop()
        g = g - g * y * y
        g = g * c + g
    return value, g


def layers(x, c, tanh):
    return (tanh(tanh(x @ c) @ c) ** 2).sum()


def layers_by_hand(x, c):
    y = np.tanh(x @ c)
    z = np.tanh(y @ c)
    g = 2 * z * (1 - z * z)
    g = (g @ c.T) * (1 - y * y)
    return np.sum(z * z), g @ c.T


def heated(x, c, tanh):
    for _ in range(4):
        x = x[1:-1] + 0.1 * (x[2:] - 2 * x[1:-1] + x[:-2])
    return (x * x).sum()


def heated_by_hand(x, c):
    for _ in range(4):
        x = x[1:-1] + 0.1 * (x[2:] - 2 * x[1:-1] + x[:-2])
    value, g = np.sum(x * x), 2 * x
    for _ in range(4):
        d, wider = 0.1 * g, np.zeros(len(g) + 2)
        wider[1:-1] = g - 2 * d
        wider[2:] += d
        wider[:-2] += d
        g = wider
    return value, g


def residual(x, c, tanh):
    r = tanh(x) * c - 1.0
    return (r * r).sum()


def residual_by_hand(x, c):
    y = np.tanh(x)
    r = y * c - 1.0
    return np.sum(r * r), 2 * r * c * (1 - y * y)


def cubic(x, c, tanh):
    return (((x * c + 1.0) * x - c) * x).sum()


def cubic_by_hand(x, c):
    p = x * c + 1.0
    q = p * x - c
    return np.sum(q * x), q + x * p + x * x * c


def programs(quick: bool) -> dict[str, tuple[Callable, Callable, np.ndarray, np.ndarray]]:
    """By tape, by hand, and at what."""
    n, side, rng = (10**5, 300, np.random.default_rng(0)) if quick else (10**7, 2000, np.random.default_rng(0))
    line, c = rng.standard_normal(n), rng.standard_normal(n)
    square, weights = rng.standard_normal((side, side)), rng.standard_normal((side, side)) / side**0.5
    return {
        f"x = tanh(x * c + x), 5 times, {n} entries": (recurrence, recurrence_by_hand, line, c),
        f"two layers of {side}x{side}": (layers, layers_by_hand, square, weights),
        f"heat equation, 4 steps, {n} entries": (heated, heated_by_hand, line, c),
        f"squares of tanh(x) * c - 1, {n} entries": (residual, residual_by_hand, line, c),
        f"a cubic, {n} entries": (cubic, cubic_by_hand, line, c),
    }


def traced(transform: Callable[..., Callable[..., Any]], tanh: Callable[[Any], Any], quick: bool) -> Builders:
    def case(program, x, c):
        f = transform(lambda x: program(x, c, tanh))
        return Case(repeated(lambda: f(x)), lambda: list(f(x)))

    return {name: partial(case, tape, x, c) for name, (tape, _, x, c) in programs(quick).items()}


@MEMORY.contestant("spmd", env=ONE_THREAD)
@MEMORY.contestant("spmd, NumPy alone", env={**ONE_THREAD, "SPMD_NUMBA": "0"})
def _(quick: bool) -> Builders:
    import spmd

    return traced(spmd.value_and_grad, np.tanh, quick)


@MEMORY.contestant("numpy, by hand", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    def case(by_hand, x, c):
        return Case(repeated(lambda: by_hand(x, c)), lambda: list(by_hand(x, c)))

    return {name: partial(case, by_hand, x, c) for name, (_, by_hand, x, c) in programs(quick).items()}


@MEMORY.contestant("autograd", needs=("autograd",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    import autograd
    import autograd.numpy as anp

    return traced(autograd.value_and_grad, anp.tanh, quick)


@MEMORY.contestant("torch", needs=("torch",), env=ONE_THREAD)
def _(quick: bool) -> Builders:
    torch = torch_with(1)

    def transform(f):
        def step(x):
            leaf = torch.from_numpy(x).requires_grad_()
            value = f(leaf)
            value.backward()
            return value.detach().numpy(), leaf.grad.numpy()

        return step

    def case(program, x, c):
        c = torch.from_numpy(c)
        f = transform(lambda x: program(x, c, torch.tanh))
        return Case(repeated(lambda: f(x)), lambda: list(f(x)))

    return {name: partial(case, program, x, c) for name, (program, _, x, c) in programs(quick).items()}
