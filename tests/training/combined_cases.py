"""Techniques of training in random combinations, against a serial program in plain NumPy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import spmd
from spmd import P, optim
from spmd.data import Loader, Sampler
from spmd.training import accumulate, evaluate, gathered, shard_specs
from training.sharded_cases import assert_close, batch_axes

STEPS = 10
MESHES: dict[int, list[dict[str, int]]] = {
    4: [{"data": 4}, {"data": 2, "model": 2}, {"model": 2, "data": 2}, {"data": 2, "replica": 2}],
    8: [{"data": 8}, {"data": 4, "model": 2}, {"model": 2, "data": 4}, {"replica": 2, "data": 2, "model": 2}],
}
RATES = {
    "constant": 2e-3,
    "one cycle": optim.one_cycle(5e-3, 10),
    "cosine": optim.cosine(5e-3, 6, warmup=2),
    "step": optim.step_decay(5e-3, 3),
    "linear": optim.linear(5e-3, 8, end=1e-3, warmup=1),
}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": optim.sgd,
    "momentum": lambda rate: optim.sgd(rate, 0.9),
    "nesterov": lambda rate: optim.sgd(rate, 0.8, nesterov=True),
    "adam": lambda rate: optim.adam(rate, eps=1e-6),
    "adamw": lambda rate: optim.adamw(rate, eps=1e-6),
}
WRAPPERS: dict[str, Callable[[optim.Optimizer], optim.Optimizer]] = {
    "clipped": lambda o: optim.clipped(o, 0.5),
    "ema": lambda o: optim.ema(o, 0.8),
    "groups": lambda o: optim.groups(
        {"first.*": o, "*.scale": optim.frozen(), "blocks.1.*": optim.sgd(1e-3, 0.5), "*": o}
    ),
    "mixed": lambda o: optim.mixed_precision(o, scale=4.0, growth=2.0, interval=3),
}


@dataclass(frozen=True)
class Case:
    """A combination.

    legs: meshes, and the steps on each; the run is saved and loaded between them. split: what lies split over the axis
    of data parallelism: "nothing", "states", or "parameters", which are gathered unit by unit. axes: that split them.
    where: the loop over minibatches is "in the body"; or the step is mapped; or it is made of global arrays "outside",
    where donate gives up what it updates. parts: of each minibatch, 0: no `accumulate`. mean: the loss is a mean over
    the axes, else each worker's sum. contributions: gradients at parameters that vary. recompute: "nothing", each
    "layer", or the "loop" over layers.
    """

    legs: tuple[tuple[dict[str, int], int], ...]
    split: str
    both_axes: bool
    where: str
    prefetch: int
    parts: int
    mean: bool
    contributions: bool
    optimizer: str
    rate: str
    wrappers: tuple[str, ...]
    recompute: str
    jit: bool
    donate: bool
    tied: bool
    samples: int
    batch_size: int
    order: str
    ahead: int

    @property
    def plain(self) -> optim.Optimizer:
        """The optimiser of one worker."""
        optimizer = OPTIMIZERS[self.optimizer](RATES[self.rate])
        for name in self.wrappers:
            optimizer = WRAPPERS[name](optimizer)
        return optimizer


def drawn(seed: int, size: int = 0) -> Case:
    """A random combination. size: of the mesh; 0: 4 or 8."""
    rng = np.random.default_rng(seed)

    def one(*choices):
        return choices[rng.integers(len(choices))]

    meshes, broken = MESHES[size or one(4, 8)], one(0, 0, 1, 4, 7)
    first, second = one(*meshes), one(*meshes)
    return Case(
        legs=((first, broken), (second, STEPS - broken)) if broken else ((first, STEPS),),
        split=one("nothing", "states", "parameters", "parameters"),
        both_axes=one(False, True),
        where=one("in the body", "mapped", "outside"),
        prefetch=one(0, 1, 2),
        parts=one(0, 1, 2, 3),
        mean=one(False, True),
        contributions=one(False, True),
        optimizer=one(*OPTIMIZERS),
        rate=one(*RATES),
        wrappers=tuple(map(str, rng.permutation([*WRAPPERS])[: rng.integers(len(WRAPPERS) + 1)])),
        recompute=one("nothing", "nothing", "layer", "loop"),
        jit=one(False, True),
        donate=one(False, True),
        tied=one(False, True),
        samples=one(11, 17, 29),
        batch_size=one(3, 7, 12),
        order=one("blocked", "strided"),
        ahead=one(0, 2),
    )


# The model


def params_of() -> dict[str, Any]:
    """Uneven shapes, arrays without dimensions, one without entries and one of a single entry."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return np.asarray(rng.standard_normal(shape)) / 2

    def block():
        return {"up": normal(6, 9), "bias": normal(9), "down": normal(9, 6), "scale": normal()}

    return {
        "first": {"w": normal(5, 6), "b": normal(6)},
        "blocks": [block() for _ in range(3)],
        "last": {"w": normal(6, 3), "one": normal(1, 1), "empty": normal(0, 2)},
    }


def units_of(tree: Any, tied: bool) -> list[Any]:
    """The units of the parameters, or of their specs, in the order of their use. tied: one block is used twice."""
    again = [tree["blocks"][0]] if tied else []
    return [tree["first"], *tree["blocks"], *again, tree["last"]]


def layer(w, x, add=lambda y: y):
    """add: sums over the workers among which the hidden entries of a block are split."""
    if "up" in w:
        return x + add(np.tanh(x @ w["up"] + w["bias"]) @ w["down"]) * w["scale"]
    if "b" in w:
        return np.tanh(x @ w["w"] + w["b"])
    return x @ w["w"].T.reshape(3, 6).T + w["one"] + np.sum(w["empty"])


def squares(units, x, y, use=layer):
    """The squared error of each sample."""
    for w in units:
        x = use(w, x)
    return np.sum((x - y) ** 2, axis=1)


def data_of(samples: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((samples, 5)), rng.standard_normal((samples, 3))


def scale_of(state):
    """The scale of the loss, wherever the state of mixed precision lies."""
    while state and not hasattr(state, "scale"):
        state = state[0] if type(state) is tuple else getattr(state, "state", None)
    return state.scale if state else 1.0


# One worker


def minibatches(case: Case) -> Iterator[np.ndarray]:
    """The indices of the sequential program."""
    epoch = 0
    while True:
        order = np.random.default_rng([5, epoch]).permutation(case.samples)
        yield from (order[k : k + case.batch_size] for k in range(0, case.samples, case.batch_size))
        epoch += 1


def serial(case: Case) -> tuple[list[float], Any, Any, Any]:
    """Losses, parameters, state, and the mean error of validation."""
    x, y = data_of(case.samples)
    optimizer, params = case.plain, params_of()
    state, losses = optimizer.init(params), []
    for chosen, _ in zip(minibatches(case), range(STEPS), strict=False):
        scale = scale_of(state)
        loss, grads = spmd.value_and_grad(
            lambda p, rows=chosen, scale=scale: scale * np.mean(squares(units_of(p, case.tied), x[rows], y[rows]))
        )(params)
        params, state = optimizer.update(grads, state, params)
        losses.append(loss / scale)
    return losses, params, state, np.mean(squares(units_of(params, case.tied), *data_of(13, 2)))


# Several workers


class Leg:
    """The run on one mesh."""

    def __init__(self, case: Case, axes: dict[str, int]):
        self.case, self.batch = case, batch_axes(axes)
        self.names = self.batch if case.both_axes else ("data",)
        self.model = "model" if "model" in axes else None
        block = {"up": P(None, self.model), "bias": P(self.model), "down": P(self.model), "scale": P()}
        whole = {"first": P(), "blocks": [block] * 3, "last": P()}
        params = params_of()
        plain = shard_specs(params, (), whole)
        self.specs = shard_specs(params, self.names, plain) if case.split == "parameters" else plain
        self.optimizer = self._optimizer()
        self.state_specs = self.optimizer.specs(self.specs, params)

    def _optimizer(self) -> optim.Optimizer:
        """Of states that lie split over the axes along which the parameters are copies."""
        if self.case.split == "nothing":
            return self.case.plain
        names = self.names
        if self.case.split == "parameters":
            names = tuple(n for n in self.batch if n not in self.names)
        return optim.shard(self.case.plain, names) if names else self.case.plain

    @property
    def _contributes(self) -> tuple[str, ...]:
        """The axes over which gradients are each worker's own until the optimiser sums them."""
        case = self.case
        if not case.contributions or case.where == "outside" or case.split == "nothing":
            return ()
        return self.batch if case.split == "states" else tuple(n for n in self.batch if n not in self.names)

    def errors(self, params, x, y):
        """The squared error of each sample, in a body."""
        case = self.case
        add = (lambda z: spmd.psum(z, self.model)) if self.model else (lambda z: z)
        use = lambda w, x: layer(w, x, add)
        use = spmd.checkpoint(use) if case.recompute == "layer" else use

        def of(params, x, y):
            units = units_of(params, case.tied)
            if case.split == "parameters":
                units = gathered(units, units_of(self.specs, case.tied), self.names, prefetch=case.prefetch)
            return squares(units, x, y, use)

        return (spmd.checkpoint(of) if case.recompute == "loop" else of)(params, x, y)

    def gradient(self, params, scale, x, y):
        """The loss of a minibatch and its gradient, in a body."""
        case = self.case
        count = spmd.psum(x.shape[0], self.batch)

        def loss(p, x, y):
            errors = self.errors(p, x, y)
            return scale * spmd.mean(errors, self.batch) if case.mean else np.sum(errors) * scale / count

        at = spmd.pvary(params, self._contributes) if self._contributes else params
        if case.parts:
            value, grads = accumulate(loss, case.parts, reduction="mean" if case.mean else "sum")(at, x, y)
        else:
            value, grads = spmd.value_and_grad(loss)(at, x, y)
        return (value if case.mean else spmd.psum(value, self.batch)) / scale, grads

    def step(self, params, state, x, y):
        value, grads = self.gradient(params, scale_of(state), x, y)
        return (value, *self.optimizer.update(grads, state, params))

    def loader(self, position) -> Loader:
        case = self.case
        sampler = Sampler(case.samples, case.batch_size, self.batch, order=case.order, seed=5)
        if position is not None:
            sampler.load_state_dict(position)
        return Loader(data_of(case.samples), sampler, prefetch=case.ahead)

    def taken(self, step, steps, params, state, position):
        """So many steps on the minibatches from a position on."""
        loader, losses = self.loader(position), []
        for epoch in loader.epochs(1000):
            for x, y in epoch:
                loss, params, state = step(params, state, x, y)
                losses.append(loss)
                if len(losses) == steps:
                    return losses, params, state, loader.state_dict()
        raise AssertionError("an epoch without samples")

    def trained(self, steps, params, state, position):
        """Losses, parameters, state and the position in the data, after so many steps."""
        case = self.case
        if case.where != "in the body":
            return self.taken(self._step_of_global_arrays(), steps, params, state, position)
        positions = []

        def body(params, state):
            *results, at = self.taken(self.step, steps, params, state, position)
            positions.append(at)
            return tuple(results)

        results = spmd.map(body, (self.specs, self.state_specs), (P(), self.specs, self.state_specs))(params, state)
        return *results, positions[0]

    def _step_of_global_arrays(self):
        case, split = self.case, P(self.batch)
        if case.where == "mapped":
            in_specs, out_specs = (self.specs, self.state_specs, split, split), (P(), self.specs, self.state_specs)
            step = spmd.map(self.step, in_specs, out_specs)
        else:
            gradient = spmd.map(self.gradient, (self.specs, P(), split, split), (P(), self.specs))

            def step(params, state, x, y):
                loss, grads = gradient(params, scale_of(state), x, y)
                return loss, *self.optimizer.update(grads, state, params, donate=case.donate)

        return spmd.jit(step) if case.jit else step

    def evaluated(self, params):
        """The mean error of validation."""

        def body(params):
            data = data_of(13, 2)
            batches = Loader(data, Sampler(13, 4, self.batch, order=self.case.order)).epoch(0)
            return evaluate(lambda batch: self.errors(params, *batch), batches, self.batch)

        return spmd.map(body, (self.specs,), P())(params)


def run(seed: int, folder: Path, size: int = 0, **mesh_options) -> None:
    """Ten steps of a combination are those of one worker. folder: for the checkpoint."""
    case = drawn(seed, size)
    losses, position, error = [], None, None
    params: Any = None
    for number, (axes, steps) in enumerate(case.legs):
        with spmd.Mesh(**axes, **mesh_options):
            leg = Leg(case, axes)
            placed = spmd.put(params_of(), leg.specs)
            like = placed, leg.optimizer.init(placed)
            params, state = spmd.load(folder / f"{seed}", like=like) if number else like
            more, params, state, position = leg.trained(steps, params, state, position)
            losses += map(float, more)
            assert [p.spec for p in spmd.tree.leaves(params)] == [p.spec for p in spmd.tree.leaves(placed)]
            if number + 1 < len(case.legs):
                spmd.save(folder / f"{seed}", (params, state))
            else:
                error = leg.evaluated(params)
    assert_close((losses, params, state, error), serial(case))
