"""Training steps of every kind, and what memory and objects they leave behind: two processes, or virtual workers."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import spmd
from spmd import P
from spmd.bridge import torch as spt
from spmd.kernels.memory import pool

FEATURES, ROWS = 128, 32
"""A parameter has 64 KiB."""
BEGIN, END = 20, 200
BYTES, OBJECTS = 4 << 20, 90
"""What END - BEGIN steps may leave: about a third of a parameter in each step, and an object in every second step."""
PLANS = {"spmd.functions.experts": 900}
"""How many objects more tables of plans may gain in that time, which are emptied when they have grown long."""

RNG = np.random.default_rng(0)
Steps = Callable[[int], Any]


def array(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) / 8).astype(np.float32)


def loss_of(w: Any, x: Any) -> Any:
    return spmd.mean(np.tanh(x @ w), "data")


def by_torch(make: Callable[[], tuple[nn.Module, Callable[[], Any]]]) -> Steps:
    """Steps of a module that each worker makes once. make: the module, and its backward."""
    made: dict[int, Any] = {}

    def main(count: int) -> None:
        worker = spt.worker_index("data")
        if worker not in made:
            net, backward = make()
            made[worker] = net, backward, torch.optim.AdamW(net.parameters(), lr=1e-3)
        _, backward, optimizer = made[worker]
        for _ in range(count):
            optimizer.zero_grad()
            backward()
            optimizer.step()

    return spt.map(main, (None,), None)


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))


def samples() -> torch.Tensor:
    return spt.varying(torch.ones(ROWS, FEATURES), "data")


def on_samples(net: Any) -> tuple[Any, Callable[[], Any]]:
    x = samples()
    return net, lambda: spt.mean(net(x).square(), "data").backward()


def of_pipeline() -> tuple[nn.Module, Callable[[], Any]]:
    step, x = spt.pipeline(layers(), "data", microbatches=4, loss=torch.mean), torch.ones(ROWS, FEATURES)
    return step, lambda: step.backward(x)


def of_experts() -> Steps:
    experts, gate = [layers() for _ in range(3)], nn.Linear(FEATURES, 3)
    return by_torch(lambda: on_samples(spt.nn.Experts(experts, copy.deepcopy(gate), "data")))


def repeated(step: Callable[..., Any], *state: Any) -> Steps:
    """Steps that each take what the one before gives."""

    def run(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state = step(*state)

    return run


def split_optimizer() -> Steps:
    optimizer, params = spmd.optim.shard(spmd.optim.adam(1e-3), "data"), {"w": array(FEATURES, FEATURES)}

    def body(params: Any, state: Any, x: Any) -> Any:
        grads = spmd.grad(lambda p: loss_of(p["w"], x))(spmd.pvary(params, "data"))
        return optimizer.update(grads, state, params)

    state, x = optimizer.init(params), array(ROWS, FEATURES)
    specs = P(), optimizer.specs(P(), params)
    step = spmd.map(body, (*specs, P("data")), specs)
    return repeated(lambda params, state: step(params, state, x), params, state)


def split_layers() -> Steps:
    def loss(layers: Any, x: Any) -> Any:
        for w in spmd.training.gathered(layers, P("data"), "data"):
            x = np.tanh(x @ w)
        return spmd.mean(x, "data")

    step = spmd.grad(spmd.map(loss, (P("data"), P("data")), P()))
    x = spmd.put(array(ROWS, FEATURES), P("data"))
    return repeated(lambda w: (step(w, x),), [spmd.put(array(FEATURES, FEATURES), P("data")) for _ in range(3)])


def stages() -> Steps:
    step = spmd.training.pipeline([lambda w, x: np.tanh(x @ w)] * 2, "data", microbatches=4, loss=np.mean)

    def body(w: Any, x: Any) -> Any:
        _, grads = step.value_and_grad([w[0], w[0]], x)
        return sum(grads.params)[None]

    run, x = spmd.map(body, (P("data"), P()), P("data")), array(ROWS, FEATURES)
    return repeated(lambda w: (run(w, x),), array(2, FEATURES, FEATURES))


def mixture() -> Steps:
    def loss(w: Any, x: Any, scores: Any) -> Any:
        return spmd.mean(spmd.functions.experts(x, scores, lambda w, h: h @ w, "data", params=w), "data")

    step, x, scores = spmd.map(spmd.grad(loss), P("data"), P("data")), array(ROWS, FEATURES), array(ROWS, 3)
    return repeated(lambda w: (step(w, x, scores),), spmd.put(array(3, FEATURES, FEATURES), P("data")))


KINDS: dict[str, Callable[[], Steps]] = {
    "spt.data_parallel": lambda: by_torch(lambda: on_samples(spt.data_parallel(layers(), "data"))),
    "spt.shard_parameters": lambda: by_torch(
        lambda: on_samples(spt.shard_parameters(layers(), "data", unit=nn.Linear))
    ),
    "spt.pipeline": lambda: by_torch(of_pipeline),
    "spt.nn.Experts": of_experts,
    "spmd.optim.shard": split_optimizer,
    "spmd.training.gathered": split_layers,
    "spmd.training.pipeline": stages,
    "spmd.functions.experts": mixture,
}


def taken() -> tuple[int, int]:
    """The bytes of this process, and the objects of Python in it."""
    gc.collect()
    pool.release()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(gc.get_objects())


def growth() -> Iterator[str]:
    """Which kinds leave more than they may."""
    for name, build in KINDS.items():
        run = build()
        run(BEGIN)
        begin = taken()
        run(END - BEGIN)
        nbytes, objects = (b - a for a, b in zip(begin, taken(), strict=True))
        if nbytes > BYTES or objects > OBJECTS + PLANS.get(name, 0):
            yield f"{name}: {nbytes} bytes and {objects} objects more after {END - BEGIN} steps"


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with spmd.Mesh(data=2):
        print("\n".join(growth()), end="")
