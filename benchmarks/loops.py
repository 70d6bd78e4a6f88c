"""Loops of many steps, recorded once: shallow water, a stencil, and a whole step of training, under `spmd.jit`.

Shallow water: depth and both momenta on a periodic grid of float64, 200 steps of the scheme of Lax and Friedrichs, half
the sum of squares at the end, and its gradient with respect to the state at first. Rows are split over two workers.
Ours is `spmd.scan` of a step with one halo exchange, beside it the same without jit. NumPy: the adjoint derived by
hand, in one process of one thread, each call into memory that is there, so many rows at a time, to stay in the cache.
JAX: `lax.scan` within `shard_map`, jitted, on two devices, with the states kept and each step run again on the way
back, which is faster than to keep what derivatives need; zeros around each term, rolls and barriers are no faster than
one block with its halo. Of 1024x1024 points that would be 25 GB, so ours keeps the states only, as NumPy does always.
First call: in fresh processes, from the end of the imports to the first gradient, recording or compiling included.

Stencil: `spmd.stencil` 20 times on 64x64 points, the sum of squares and its gradient, on one to eight virtual workers,
by steps written out in Python and by `spmd.fori_loop`; both jitted.

Transformer: a block of attention with four heads and a perceptron, on two sequences of 64 tokens of width 64, and a
step of AdamW; float64, so that all can be held to the same digits. Sequences are split over two workers, heads and
hidden features over two more. In ours the whole step is one jitted body; beside it the loss alone is jitted, and the
optimiser is called outside. JAX: `shard_map` on four devices, the step jitted, parameters and states donated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.contest import ONE_THREAD, TWO_DEVICES, Builders, Case, Section, by_steps, faster, jitted, repeated
from benchmarks.fields import OFFSETS, WEIGHTS, plane
from benchmarks.overhead import fresh

LOOPS = Section("loops", "loops of many steps and steps of training, recorded once, value and gradients", 1e-12)

# Shallow water

SIDES, STEPS = (64, 256, 1024), 200
GRAVITY, RATIO = 1.0, 0.2
"""RATIO: half a step of time over the distance of two points."""
TOO_LARGE = 512
"""From so many rows on ours keeps states only."""
ROWS = (32, 64, 128)
"""How many rows NumPy may work on at a time."""

Calls = list[tuple[Any, ...]]
"""Functions with their arguments, the last of which is written to."""


def lake(points: int) -> np.ndarray:
    """Depth and both momenta at first: a hill of water, and noise."""
    at = np.linspace(-1, 1, points, endpoint=False)
    fields = 0.01 * np.random.default_rng(0).standard_normal((3, points, points))
    fields[0] += 1 + 0.2 * np.exp(-8 * (at[:, None] ** 2 + at**2))
    return fields


def lakes(case: Callable[[int, int], Case], quick: bool, sides: tuple[int, ...] = SIDES) -> Builders:
    sides, steps = ((16, 32), 10) if quick else (sides, STEPS)
    return {f"shallow water, {n}x{n}, {steps} steps": partial(case, n, steps) for n in sides}


TERMS = (
    *(((0, *o), 0.25) for o in ((1, 0), (-1, 0), (0, 1), (0, -1))),
    *(((3, *o), -s * RATIO) for s, o in ((1, (1, 0)), (-1, (-1, 0)))),
    *(((6, *o), -s * RATIO) for s, o in ((1, (0, 1)), (-1, (0, -1)))),
)
"""A step as one stencil of nine planes, the fields, their fluxes down and their fluxes to the right: the offset of each
term, and its weight. The average of the neighbours less the differences of the fluxes."""


def planes(p: Any) -> list[Any]:
    """The fields of a state and their fluxes: of NumPy's arrays, ours or JAX's."""
    h, m, n = p[0], p[1], p[2]
    inverse, pressure = 1 / h, GRAVITY / 2 * (h * h)
    u, v = m * inverse, n * inverse
    across = m * v
    return [h, m, n, m, m * u + pressure, across, n, across, n * v + pressure]


def water_spmd(points: int, steps: int, jit: bool = True, workers: int = 2) -> Case:
    import spmd
    from spmd import P
    from spmd.functions import stencil

    spec, (offsets, weights) = P(None, "x"), zip(*TERMS, strict=True)

    def advance(q, _):
        p = spmd.halo_exchange(q, spec, (0, 1, 1), boundary=("none", "periodic", "periodic"))
        return stencil(np.stack(planes(p)), offsets, weights), None

    def local(q):
        q, _ = spmd.scan(advance, q, length=steps, checkpoint=steps if points >= TOO_LARGE else None)
        return spmd.psum(0.5 * np.vdot(q, q), "x")

    mesh = spmd.Mesh(x=workers, transport="local")
    mapped = mesh.map(local, in_specs=spec, out_specs=P())
    step = spmd.value_and_grad(spmd.jit(mapped) if jit else mapped)
    q = spmd.put(lake(points), spec, mesh)
    return Case(repeated(lambda: step(q)), lambda: [np.asarray(a) for a in step(q)])


@LOOPS.contestant("spmd")
def _(quick: bool) -> Builders:
    return lakes(water_spmd, quick) | first_calls("spmd", quick) | {BLOCK: partial(block_spmd, True)}


@LOOPS.contestant("spmd, not jitted")
def _(quick: bool) -> Builders:
    return lakes(partial(water_spmd, jit=False), quick, SIDES[:2])


class Ditch:
    """Water by NumPy alone. A state has a ring of one point around it, which is filled with what is at the other end;
    its rows are read and written as one, whatever becomes of the ring in between. All views are made beforehand."""

    def __init__(self, rows: int, points: int, steps: int):
        self.rows, self.points, self.wide = rows, points, points + 2
        self.states = np.zeros((steps + 1, 3, self.wide**2))
        self.cotangents = np.zeros((2, 3, self.wide**2))
        size = (rows + 2) * self.wide
        self.speed, self.flux, self.some = np.empty((2, size)), np.empty((3, size)), np.empty(size)
        self.down, self.right = np.empty((3, size)), np.empty((3, size))
        self.there: Calls = []
        for t in range(steps):
            self.there += self.forward(self.states[t], self.states[t + 1]) + self.around(self.states[t + 1])
        self.back: Calls = []
        for t in reversed(range(steps)):
            of, to = self.cotangents[(steps - 1 - t) % 2], self.cotangents[(steps - t) % 2]
            self.back += self.backward(self.states[t], of, to) + self.around(to)

    def square(self, state: np.ndarray) -> np.ndarray:
        return state.reshape(3, self.wide, self.wide)

    def around(self, state: np.ndarray) -> Calls:
        q = self.square(state)
        ends = (q[:, :, -2], q[:, :, 0]), (q[:, :, 1], q[:, :, -1]), (q[:, -2], q[:, 0]), (q[:, 1], q[:, -1])
        return [(np.positive, of, to) for of, to in ends]

    def strips(self) -> list[tuple[int, int]]:
        """Where the rows that are worked on at once begin and end, without the ring."""
        starts = range(1, self.points + 1, self.rows)
        return [(y * self.wide + 1, min(y + self.rows, self.points + 1) * self.wide - 1) for y in starts]

    def forward(self, q: np.ndarray, new: np.ndarray) -> Calls:
        """The state after q."""
        calls, wide = [], self.wide
        for lo, hi in self.strips():
            first, last = lo - wide - 1, hi + wide + 1
            x = q[:, first:last]
            speed, flux, p = (a[..., : last - first] for a in (self.speed, self.flux, self.some))
            d, e = (a[:, : hi - lo] for a in (self.down, self.right))
            above, below, left, right = (slice(lo - first + k, hi - first + k) for k in (-wide, wide, -1, 1))
            calls += [
                (np.divide, x[1:], x[0], speed),
                (np.multiply, x[1], speed, flux[:2]),
                (np.multiply, x[2], speed[1], flux[2]),
                (np.multiply, x[0], x[0], p),
                (np.multiply, p, GRAVITY / 2, p),
                (np.add, flux[::2], p, flux[::2]),
                (np.subtract, x[1, below], x[1, above], d[0]),
                (np.subtract, flux[:2, below], flux[:2, above], d[1:]),
                (np.subtract, x[2, right], x[2, left], e[0]),
                (np.subtract, flux[1:, right], flux[1:, left], e[1:]),
                (np.add, d, e, d),
                (np.multiply, d, 4 * RATIO, d),
                (np.add, x[:, below], x[:, above], e),
                (np.add, e, x[:, left], e),
                (np.add, e, x[:, right], e),
                (np.subtract, e, d, e),
                (np.multiply, e, 0.25, new[:, lo:hi]),
            ]
        return calls

    def backward(self, q: np.ndarray, r: np.ndarray, new: np.ndarray) -> Calls:
        """The cotangents of the state q, from those of the state after it.

        With the velocities u and v, the cotangents a = d1, b = e1 + d2 and c = e2 of the fluxes m u + p, m v and
        n v + p, where d and e are the differences of r down and to the right: m has d0 + 2 a u + b v, n has
        e0 + b u + 2 c v, and h has (a + c) g h - a u u - b u v - c v v."""
        calls, wide = [], self.wide
        for lo, hi in self.strips():
            above, below, left, right = (slice(lo + k, hi + k) for k in (-wide, wide, -1, 1))
            u, k, p = (a[..., : hi - lo] for a in (self.speed, self.flux, self.some))
            d, e, h, to = self.down[:, : hi - lo], self.right[:, : hi - lo], q[0, lo:hi], new[:, lo:hi]
            calls += [
                (np.divide, q[1:, lo:hi], h, u),
                (np.subtract, r[:, below], r[:, above], d),
                (np.subtract, r[:, right], r[:, left], e),
                (np.add, r[:, below], r[:, above], to),
                (np.add, to, r[:, left], to),
                (np.add, to, r[:, right], to),
                (np.add, e[1], d[2], p),
                (np.multiply, p, u[::-1], k[:2]),
                (np.add, d[0], k[0], d[0]),
                (np.add, e[0], k[1], e[0]),
                (np.multiply, k[0], u[0], k[0]),
                (np.add, d[1], e[2], p),
                (np.multiply, p, h, p),
                (np.multiply, p, GRAVITY, p),
                (np.subtract, p, k[0], p),
                (np.multiply, d[1], u[0], k[1]),
                (np.multiply, e[2], u[1], k[2]),
                (np.multiply, k[1:], u, u),
                (np.subtract, p, u[0], p),
                (np.subtract, p, u[1], k[0]),
                (np.multiply, k[1:], 2, k[1:]),
                (np.add, k[1], d[0], k[1]),
                (np.add, k[2], e[0], k[2]),
                (np.multiply, k, 4 * RATIO, k),
                (np.add, to, k, to),
                (np.multiply, to, 0.25, to),
            ]
        return calls

    def run(self, fields: np.ndarray) -> tuple[float, np.ndarray]:
        inner = np.s_[:, 1:-1, 1:-1]
        self.square(self.states[0])[inner] = fields
        for f, *args in self.around(self.states[0]) + self.there:
            f(*args)
        end = self.square(self.states[-1])[inner]
        value = 0.5 * np.sum(end * end)
        self.cotangents[0] = self.states[-1]
        for f, *args in self.back:
            f(*args)
        return value, self.square(self.cotangents[(len(self.states) - 1) % 2])[inner].copy()


def water_numpy(points: int, steps: int) -> Case:
    """With so many rows at a time as are the fastest, tried on few steps."""
    fields = lake(points)

    def case(rows: int, steps: int) -> Case:
        ditch = Ditch(min(rows, points), points, steps)
        return Case(repeated(lambda: ditch.run(fields)), lambda: list(ditch.run(fields)))

    tried = [case(rows, 2) for rows in ROWS]
    return case(ROWS[tried.index(faster(*tried))], steps)


@LOOPS.contestant("numpy, by hand", env=ONE_THREAD)
def _(quick: bool) -> Builders:
    return lakes(water_numpy, quick)


def water_jax(points: int, steps: int) -> Case:
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_enable_x64", True)

    @partial(jax.checkpoint, prevent_cse=False)
    def advance(q, _):
        above, below = (lax.ppermute(edge, "x", [(0, 1), (1, 0)]) for edge in (q[:, -1:], q[:, :1]))
        p = jnp.concatenate([above, q, below], 1)
        z = planes(jnp.concatenate([p[:, :, -1:], p, p[:, :, :1]], 2))
        return jnp.stack(
            [
                0.25 * (x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2])
                - RATIO * (f[2:, 1:-1] - f[:-2, 1:-1] + g[1:-1, 2:] - g[1:-1, :-2])
                for x, f, g in zip(z[:3], z[3:6], z[6:], strict=True)
            ]
        ), None

    def local(q):
        q, _ = lax.scan(advance, q, None, length=steps)
        return lax.psum(0.5 * jnp.sum(q * q), "x")

    mesh, spec = Mesh(np.array(jax.devices()), ("x",)), P(None, "x")
    q = jax.device_put(lake(points), NamedSharding(mesh, spec))
    return jitted(jax.value_and_grad(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P())), q)


@LOOPS.contestant("jax, 2 devices", needs=("jax",), env=TWO_DEVICES)
def _(quick: bool) -> Builders:
    return lakes(water_jax, quick) | first_calls("jax", quick)


def first_calls(engine: str, quick: bool) -> Builders:
    points, steps = (16, 10) if quick else (SIDES[0], STEPS)
    before = f"import {engine}, benchmarks.loops"
    program = f"benchmarks.loops.water_{engine}({points}, {steps}).run(1)"
    return {f"shallow water, {points}x{points}, {steps} steps, first call": partial(fresh, before, program)}


# Stencil

POINTS, TIMES = 64, 20


def stencil_spmd(workers: int, loop: bool) -> Case:
    import spmd
    from spmd import P

    def advance(_, u):
        return spmd.stencil(u, P("x"), OFFSETS, WEIGHTS)

    def local(u):
        if loop:
            u = spmd.fori_loop(0, TIMES, advance, u)
        else:
            for k in range(TIMES):
                u = advance(k, u)
        return spmd.psum(0.5 * np.sum(u * u), "x")

    mesh = spmd.Mesh(x=workers, transport="local")
    step = spmd.value_and_grad(spmd.jit(mesh.map(local, in_specs=P("x"), out_specs=P())))
    u = spmd.put(plane(POINTS), P("x"), mesh)
    return Case(repeated(lambda: step(u)), lambda: [np.asarray(a) for a in step(u)])


def stencils(workers: int, quick: bool) -> Builders:
    ways = {"": False, ", fori_loop": True}
    return {f"stencil, {POINTS}x{POINTS}, {TIMES} steps{n}": partial(stencil_spmd, workers, w) for n, w in ways.items()}


for _workers in (1, 2, 4, 8):
    LOOPS.contestant(f"spmd, {_workers} worker{'s' * (_workers > 1)}")(partial(stencils, _workers))


# Transformer

TOKENS, WIDTH, HEADS, RATE, DECAY = 64, 64, 4, 1e-3, 1e-2
BLOCK = f"a transformer block, {TOKENS} tokens, width {WIDTH}, a step of AdamW"
SPECS = {
    **dict.fromkeys(("queries", "keys", "values", "joined"), ("model",)),
    **dict.fromkeys(("shift", "down"), ("model",)),
    **dict.fromkeys(("gain1", "gain2"), ()),
    "up": (None, "model"),
}
"""The axes of the mesh that split each parameter."""


def parameters() -> dict[str, np.ndarray]:
    rng, size, hidden = np.random.default_rng(0), WIDTH // HEADS, 4 * WIDTH
    shapes = {
        **dict.fromkeys(("queries", "keys", "values"), (HEADS, WIDTH, size)),
        **dict.fromkeys(("gain1", "gain2"), (WIDTH,)),
        "joined": (HEADS, size, WIDTH),
        "up": (WIDTH, hidden),
        "shift": (hidden,),
        "down": (hidden, WIDTH),
    }
    return {name: rng.standard_normal(s) / np.sqrt(WIDTH) + name.startswith("gain") for name, s in shapes.items()}


def sequences() -> np.ndarray:
    """What goes in, and what should come out."""
    return np.random.default_rng(1).standard_normal((2, 2, TOKENS, WIDTH))


def block_loss(np_: Any, of: Any, p: dict[str, Any], x: Any, y: Any) -> Any:
    """The mean square of what a block gives less y. np_: NumPy or JAX's. of: the functions that these do not have."""
    h = of.rms_norm(x, p["gain1"])[:, None]
    q, k, v = (h @ p[name] for name in ("queries", "keys", "values"))
    weights = of.softmax((q @ k.swapaxes(-1, -2)) * (WIDTH // HEADS) ** -0.5)
    x = x + of.psum(np_.sum((weights @ v) @ p["joined"], 1), "model")
    h = of.gelu(of.rms_norm(x, p["gain2"]) @ p["up"] + p["shift"])
    x = x + of.psum(h @ p["down"], "model")
    return of.psum(np_.sum((x - y) ** 2), "data") * (1 / (2 * TOKENS * WIDTH))


def trained(start: Callable[[], Any], step: Callable[[Any], tuple[Any, Any]], whole: Callable[[Any], Any]) -> Case:
    """What steps take, and how far the parameters have gone in three."""
    once, third = by_steps(start, step)

    def tell():
        value, state = third()
        first = parameters()
        return [value, *(whole(state[0][name]) - first[name] for name in SPECS)]

    return Case(repeated(once), tell)


def block_spmd(whole_step: bool) -> Case:
    """whole_step: one jitted body of all. Otherwise the optimiser is called outside."""
    import spmd
    from spmd import P, functions, optim

    of = SimpleNamespace(rms_norm=functions.rms_norm, softmax=functions.softmax, gelu=functions.gelu, psum=spmd.psum)
    mesh = spmd.Mesh(data=2, model=2, transport="local")
    specs = {name: P(*axes) for name, axes in SPECS.items()}
    loss, optimizer = partial(block_loss, np, of), optim.adamw(RATE, weight_decay=DECAY)
    state_specs = optimizer.specs(specs)

    def local(params, state, x, y):
        value, grads = spmd.value_and_grad(loss)(params, x, y)
        return value, *optimizer.update(grads, state, params)

    data = P("data"), P("data")
    in_body = spmd.jit(mesh.map(local, in_specs=(specs, state_specs, *data), out_specs=(P(), specs, state_specs)))
    differentiated = spmd.value_and_grad(spmd.jit(mesh.map(loss, in_specs=(specs, *data), out_specs=P())))
    x, y = spmd.put(tuple(sequences()), P("data"), mesh)

    def start():
        params = spmd.put(parameters(), specs, mesh)
        return params, optimizer.init(params)

    def step(trained):
        params, state = trained
        if whole_step:
            value, params, state = in_body(params, state, x, y)
            return value, (params, state)
        value, grads = differentiated(params, x, y)
        return value, optimizer.update(grads, state, params, donate=True)

    return trained(start, step, lambda p: p.numpy())


@LOOPS.contestant("spmd, update outside")
def _(quick: bool) -> Builders:
    return {BLOCK: partial(block_spmd, False)}


def block_jax() -> Case:
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    jax.config.update("jax_enable_x64", True)
    of = SimpleNamespace(
        rms_norm=lambda x, gain: x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * gain,
        softmax=jax.nn.softmax,
        gelu=jax.nn.gelu,
        psum=lax.psum,
    )
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    specs = {name: P(*axes) for name, axes in SPECS.items()}
    loss = jax.shard_map(partial(block_loss, jnp, of), mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=P())

    def one(p, g, m, s, t):
        m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * (g * g)
        direction = (m / (1 - 0.9**t)) / (jnp.sqrt(s / (1 - 0.999**t)) + 1e-8)
        return p - RATE * (direction + DECAY * p), m, s

    @partial(jax.jit, donate_argnums=0)
    def update(trained, x, y):
        params, means, squares, t = trained
        value, grads = jax.value_and_grad(loss)(params, x, y)
        new = {name: one(p, grads[name], means[name], squares[name], t + 1.0) for name, p in params.items()}
        return value, (*({name: each[k] for name, each in new.items()} for k in range(3)), t + 1)

    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    x, y = (jax.device_put(a, NamedSharding(mesh, P("data"))) for a in sequences())

    def start():
        zeros = ({name: np.zeros_like(p) for name, p in parameters().items()} for _ in range(2))
        return *(jax.device_put(tree, shardings) for tree in (parameters(), *zeros)), jnp.zeros((), int)

    return trained(start, lambda state: jax.block_until_ready(update(state, x, y)), np.asarray)


@LOOPS.contestant("jax, 4 devices", needs=("jax",), env={"XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
def _(quick: bool) -> Builders:
    return {BLOCK: block_jax}
