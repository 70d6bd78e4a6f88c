"""Training programs in torch, by options: on one worker, and on a mesh with `spt.data_parallel` and sharded states."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import spmd
from spmd.bridge import torch as spt
from spmd.layout import P, block_sizes, offsets

F64 = torch.float64
PLAN = {"up": spt.column("model"), "down": spt.row("model")}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "adam_foreach": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True, maximize=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.05, initial_accumulator_value=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "adamax": lambda ps: torch.optim.Adamax(ps, lr=0.01),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.01),
    "asgd": lambda ps: torch.optim.ASGD(ps, lr=0.05, t0=2),
    "adadelta": lambda ps: torch.optim.Adadelta(ps, lr=1.0),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "none": lambda o: None,
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "step": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=5),
    "warm_up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.2, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 0.05, total_steps=12, cycle_momentum=bool({"momentum", "betas"} & {*o.defaults})
    ),
}


@dataclass(frozen=True)
class Program:
    """What a training does besides its steps.

    axes: of the mesh. by: what splits layers over "model", if it has that axis: "plan", by which gradients are sums, or
    "layers" of `spt.nn` under `spt.data_parallel`. shard: "none", "states", or "gradients" too. clip: the
    norm; 0: none. microbatches: the number of backwards before a step. schedule, optimizer: names. groups: two
    groups, of other rates and decays, one of which is added later. frozen: a layer that is frozen for three steps.
    unused: a layer that every other step does not use. recompute: "no", or by `checkpoint`, reentrant or not. ema: an
    average of the parameters. master: masters of a higher precision, for parameters of this dtype.
    """

    axes: dict[str, int] = field(default_factory=lambda: {"data": 2})
    by: str = "plan"
    optimizer: str = "adam"
    shard: str = "gradients"
    clip: float = 0.0
    microbatches: int = 1
    schedule: str = "none"
    groups: bool = False
    frozen: bool = False
    unused: bool = False
    recompute: str = "no"
    ema: bool = False
    batch: int = 11
    bucket_bytes: int = 1000
    steps: int = 10

    def __str__(self) -> str:
        usual = asdict(Program())
        return ",".join(f"{k}={v}" for k, v in asdict(self).items() if v != usual[k]).replace(" ", "") or "usual"


def drawn_program(seed: int) -> Program:
    """A random combination."""
    draw = random.Random(seed)
    meshes = [{"data": 4}, {"data": 2, "model": 2}, {"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 3}]
    return Program(
        axes=draw.choice(meshes),
        by=draw.choice(["plan", "layers"]),
        optimizer=draw.choice(list(OPTIMIZERS)),
        shard=draw.choice(["none", "states", "gradients", "gradients"]),
        clip=draw.choice([0.0, 0.05, 0.5]),
        microbatches=draw.choice([1, 2, 3]),
        schedule=draw.choice(list(SCHEDULES)),
        groups=draw.random() < 0.5,
        frozen=draw.random() < 0.4,
        unused=draw.random() < 0.4,
        recompute=draw.choice(["no", "reentrant", "not reentrant"]),
        ema=draw.random() < 0.5,
        batch=draw.choice([7, 11, 24]),
        bucket_bytes=draw.choice([1, 300, 4 << 20]),
    )


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class Net(nn.Module):
    """Layers with weights that no number of workers divides, a number, and a layer that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 3)
        self.extra, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(()))
        self.double()
        for k, p in enumerate(self.parameters()):
            p.data.copy_(1.0 + numbers(*p.shape, seed=k) if p.ndim == 0 else numbers(*p.shape, seed=k) / 2)
        self.recompute = "no"
        self.uses_extra = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute == "no":
            y = self.hidden(x)
        else:
            y = checkpoint(self.hidden, x.requires_grad_(), use_reentrant=self.recompute == "reentrant")
        y = y * self.scale
        return self.extra(torch.tanh(y)) if self.uses_extra else y

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


@dataclass
class Result:
    """What a training gives: losses, norms of gradients and rates of all steps; parameters, states, averages."""

    losses: list[float]
    norms: list[float]
    rates: list[list[float]]
    parameters: dict[str, torch.Tensor]
    states: dict[str, dict[str, Any]]
    average: dict[str, torch.Tensor]


def whole(x: Any) -> Any:
    """A value of a tensor in blocks as one worker has it."""
    if not isinstance(x, torch.Tensor):
        return x
    with torch.no_grad():
        return (x.whole() if isinstance(x, spt.PartitionedTensor) else x).detach().clone()


def split_rows(x: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    at = offsets(block_sizes(len(x), parts))
    return x[at[index] : at[index + 1]]


def optimizer_of(program: Program, net: nn.Module) -> Any:
    make = OPTIMIZERS[program.optimizer]
    named = dict(net.named_parameters())
    if not program.groups:
        return make(named.values())
    biases = [p for name, p in named.items() if name.endswith("bias")]
    others = [p for name, p in named.items() if not name.endswith("bias")]
    return make([{"params": others[1:], "lr": 0.02}, {"params": biases}])


def distributed(program: Program, net: Net) -> tuple[Any, Any]:
    """The module with split layers, and what is called in its place."""
    if "model" in program.axes and program.by == "plan":
        net.recompute = "not reentrant" if program.recompute == "reentrant" else program.recompute  # plans refuse it
        net = spt.parallelize(net, PLAN, in_specs=P("data"), out_specs=P("data"))
        return net, net
    if "model" in program.axes:
        net.up = spt.nn.Linear.from_torch(net.up, w_spec=P("model"))
        net.down = spt.nn.Linear.from_torch(net.down, w_spec=P(None, "model"))
    return net, spt.data_parallel(net, "data", bucket_bytes=program.bucket_bytes)


def train(program: Program, worker: int | None) -> Result:
    """The training on one worker, or as a worker of a mesh along "data"."""
    net = Net()
    net.recompute = program.recompute
    model: Any = net
    if worker is not None:
        net, model = distributed(program, net)
    optimizer = optimizer_of(program, net)
    if worker is not None and program.shard != "none":
        optimizer = spt.shard_optimizer(optimizer, "data", split_gradients=program.shard == "gradients")
    if program.groups:
        optimizer.add_param_group({"params": [next(net.parameters())], "lr": 0.005})
    scheduler = SCHEDULES[program.schedule](optimizer)
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)) if program.ema else None
    losses, norms, rates = [], [], []
    for k in range(program.steps):
        x, t = numbers(program.batch, 5, seed=100 + k), numbers(program.batch, 3, seed=200 + k)
        net.norm.requires_grad_(not (program.frozen and 2 <= k < 5))
        net.uses_extra = not (program.unused and k % 2)
        optimizer.zero_grad()
        losses.append(accumulate(program, model, x, t, worker))
        if program.clip:
            norms.append(float(clip_grad_norm_(net.parameters(), program.clip)))
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if average is not None:
            average.update_parameters(model)
    named = dict(net.named_parameters())
    return Result(
        losses,
        norms,
        rates,
        {name: whole(p) for name, p in named.items()},
        {
            name: {k: whole(v) for k, v in optimizer.state[p].items()}
            for name, p in named.items()
            if p in optimizer.state
        },
        {} if average is None else {name: whole(p) for name, p in zip(named, average.parameters(), strict=True)},
    )


def accumulate(program: Program, model: Any, x: torch.Tensor, t: torch.Tensor, worker: int | None) -> float:
    """The loss of a minibatch, and its gradient, of several backwards and one sum."""
    total = 0.0
    for m in range(program.microbatches):
        own_x, own_t = (split_rows(a, program.microbatches, m) for a in (x, t))
        weight = len(own_x) / len(x)
        is_last = m == program.microbatches - 1
        if worker is None:
            loss = ((model(own_x) - own_t) ** 2).mean() * weight
            loss.backward()
        else:
            parts = program.axes["data"]
            own_x, own_t = (spt.varying(split_rows(a, parts, worker).clone(), "data") for a in (own_x, own_t))
            with nullcontext() if is_last or not isinstance(model, spt.DataParallel) else model.no_sync():
                loss = spt.mean((model(own_x) - own_t) ** 2, "data") * weight
                loss.backward()
        total += float(loss.detach())
    return total


def train_on_mesh(program: Program, check: bool = True) -> list[Result]:
    """The results of all workers of a mesh."""
    results: dict[int, Result] = {}

    def body() -> None:
        result = train(program, spt.worker_index("data"))
        results[spt.worker_index(tuple(program.axes))] = result

    spt.map(body, (), None, mesh=spmd.Mesh(**program.axes), check=check)()
    return [results[k] for k in sorted(results)]


def assert_same(result: Result, expected: Result) -> None:
    """All numbers alike to 1e-10."""
    for name, value in vars(expected).items():
        _assert_near(getattr(result, name), value, name)


def _assert_near(value: Any, expected: Any, where: str) -> None:
    if isinstance(expected, dict | list):
        pairs = expected.items() if isinstance(expected, dict) else enumerate(expected)
        assert len(value) == len(expected), (where, value, expected)
        for key, each in pairs:
            _assert_near(value[key], each, f"{where}[{key!r}]")
    elif isinstance(expected, torch.Tensor):
        assert (value.shape, value.dtype) == (expected.shape, expected.dtype), where
        assert torch.allclose(value, expected, rtol=1e-10, atol=1e-10), (where, value, expected)
    else:
        assert abs(value - expected) <= 1e-10 * max(1.0, abs(expected)), (where, value, expected)
