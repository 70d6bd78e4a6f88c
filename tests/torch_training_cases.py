"""Training programs in torch, by options: on one worker, and on a mesh with `spt.data_parallel` and sharded states."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from bridge.torch.plans.plain_models import Block
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import spmd
from spmd.bridge import torch as spt
from spmd.layout import P, block_sizes, offsets
from spmd.training import evaluate

F64 = torch.float64
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    "adam_foreach": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=True, maximize=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "adamw_fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    # With a smaller eps one rounding of a parameter moves a step of the centred one by more than the tests allow.
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True, eps=1e-2),
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

    model: of `MODELS`. axes: of the mesh. then: another mesh, on which a run that was saved after `saved_after` steps
    goes on. by: what splits layers over "model", if it has that axis: "plan", by which gradients are sums, or "layers"
    of `spt.nn` in a perceptron. shard: "none", "states", "gradients" too, or "parameters", by units, with prefetch and
    kept_wholes of `spt.shard_parameters`. reduction: of gradients of workers' own data. clip: the norm; 0: none.
    microbatches: the number of backwards before a step. schedule, optimizer: names. groups: two groups, of other rates
    and decays, one of which is added later. frozen: a layer that is frozen for three steps. unused: a layer that every
    other step does not use. recompute: "no", or by `checkpoint`, reentrant or not. ema: an average of the parameters.
    samples, batch, order: of the sampler. evaluate: whether the model, or its average, is validated at the end.
    """

    model: str = "perceptron"
    axes: dict[str, int] = field(default_factory=lambda: {"data": 2})
    then: dict[str, int] | None = None
    saved_after: int = 4
    by: str = "plan"
    optimizer: str = "adam"
    shard: str = "gradients"
    units: bool = True
    prefetch: int = 1
    kept_wholes: bool = False
    reduction: str = "sum"
    clip: float = 0.0
    microbatches: int = 1
    schedule: str = "none"
    groups: bool = False
    frozen: bool = False
    unused: bool = False
    recompute: str = "no"
    ema: bool = False
    samples: int = 30
    batch: int = 11
    order: str = "blocked"
    evaluate: bool = False
    bucket_bytes: int = 1000
    check: bool = True
    steps: int = 10

    def __str__(self) -> str:
        usual = asdict(Program())
        return ",".join(f"{k}={v}" for k, v in asdict(self).items() if v != usual[k]).replace(" ", "") or "usual"


MESHES: dict[int, list[dict[str, int]]] = {
    4: [{"data": 4}, {"data": 2, "model": 2}, {"model": 2, "data": 2}],
    8: [{"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 3}, {"model": 4, "data": 2}],
}


def drawn_program(seed: int, size: int = 0) -> Program:
    """A random combination. size: of the mesh; 0: 4, or up to 8."""
    draw = random.Random(seed)
    model = draw.choice(list(MODELS))
    meshes = MESHES[size or draw.choice([4, 8])]
    return Program(
        model=model,
        axes=draw.choice(meshes),
        then=draw.choice([None, None, *meshes]),
        saved_after=draw.randint(1, 9),
        by=draw.choice(["plan", "layers"]) if model == "perceptron" else "plan",
        # The gradient of a bias of keys is rounding alone, whose signs Rprop takes.
        optimizer=draw.choice([name for name in OPTIMIZERS if name != "rprop" or model != "text"]),
        shard=draw.choice(["none", "states", "gradients", "parameters", "parameters", "parameters"]),
        units=draw.random() < 0.7,
        prefetch=draw.choice([0, 1, 2]),
        kept_wholes=draw.random() < 0.3,
        reduction=draw.choice(["sum", "mean"]),
        clip=draw.choice([0.0, 0.05, 0.5]),
        microbatches=draw.choice([1, 2, 3]),
        schedule=draw.choice(list(SCHEDULES)),
        groups=draw.random() < 0.5,
        frozen=draw.random() < 0.4,
        unused=draw.random() < 0.4,
        recompute=draw.choice(["no", "reentrant", "not reentrant"]),
        ema=draw.random() < 0.5,
        samples=draw.choice([30, 47]),
        batch=draw.choice([7, 11, 24]),
        order=draw.choice(["blocked", "strided"]),
        evaluate=draw.random() < 0.5,
        bucket_bytes=draw.choice([1, 300, 4 << 20]),
        check=draw.random() < 0.7,
    )


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class Net(nn.Module):
    """Layers with weights that no number of workers divides, a number, and a layer that is not always used.

    A subclass says what is between the data and the results. A module gives the losses of samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.make()
        self.double()
        for k, p in enumerate(self.parameters()):
            p.data.copy_(1.0 + numbers(*p.shape, seed=k) if p.ndim == 0 else numbers(*p.shape, seed=k) / 2)
        self.recompute = "no"
        self.uses_extra = True

    def make(self) -> None:
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 7), nn.Linear(7, 3)
        self.extra, self.scale = nn.Linear(3, 3), nn.Parameter(torch.ones(()))

    def recomputed(self, f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if self.recompute == "no":
            return f(x)
        x = x if x.requires_grad or not torch.is_grad_enabled() else x.requires_grad_()
        return checkpoint(f, x, use_reentrant=self.recompute == "reentrant")  # type: ignore[return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.recomputed(self.hidden, x) * self.scale
        return self.extra(torch.tanh(y)) if self.uses_extra else y

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Text(Net):
    """A small GPT whose head is its embedding."""

    def make(self) -> None:
        self.embed, self.places, self.norm = nn.Embedding(11, 6), nn.Embedding(5, 6), nn.LayerNorm(6)
        self.blocks = nn.ModuleList(Block(6, 3, None) for _ in range(2))
        self.extra, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(()))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.embed(rows) + self.places(torch.arange(rows.shape[1]))
        for block in self.blocks:
            x = self.recomputed(block, x)
        x = self.norm(x) * self.scale
        return self.head(self.extra(x) if self.uses_extra else x)


class Image(Net):
    """A convolutional net."""

    def make(self) -> None:
        self.conv1, self.conv2 = nn.Conv2d(1, 5, 3, padding=1), nn.Conv2d(5, 4, 3, stride=2)
        self.norm, self.extra, self.head = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.recomputed(self.features, x) * self.scale)
        return self.head(self.extra(y) if self.uses_extra else y)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv2(torch.tanh(self.conv1(x))).mean((2, 3))


class Losses(nn.Module):
    """A net with the losses of samples."""

    def __init__(self, net: Net, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.loss(self.net(x), t)


class Model(NamedTuple):
    """make: of the net. loss: of each sample. data: of so many samples. plan: what splits it. unit: of its parts."""

    make: type[Net]
    loss: Callable[[Any, Any], torch.Tensor]
    data: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    plan: dict[str, Any]
    unit: Any


def squares(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return ((y - t) ** 2).mean(1)


def entropies(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(y.transpose(1, 2), t, reduction="none").mean(1)


def letters(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(0, 11, (samples, 6), generator=torch.Generator().manual_seed(samples))
    return rows[:, :-1], rows[:, 1:]


MODELS = {
    "perceptron": Model(
        Net,
        squares,
        lambda n: (numbers(n, 5, seed=100 + n), numbers(n, 3, seed=200 + n)),
        {"*up": spt.column("model"), "*down": spt.row("model")},
        nn.Linear,
    ),
    "text": Model(
        Text,
        entropies,
        letters,
        {
            "*.attn": spt.heads("model"),
            "*.up": spt.column("model"),
            "*.down": spt.row("model"),
            "*embed": spt.vocab("model"),
            "*head": spt.vocab("model"),
        },
        Block,
    ),
    "image": Model(
        Image,
        squares,
        lambda n: (numbers(n, 1, 6, 5, seed=100 + n), numbers(n, 3, seed=200 + n)),
        {"*conv1": spt.column("model"), "*conv2": spt.row("model")},
        nn.Conv2d,
    ),
}


@dataclass
class Result:
    """What a training gives: losses, norms of gradients and rates of all steps; parameters, states, averages; a loss
    of other data."""

    losses: list[float]
    norms: list[float]
    rates: list[list[float]]
    parameters: dict[str, torch.Tensor]
    states: dict[str, dict[str, Any]]
    average: dict[str, torch.Tensor]
    validation: float


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


def distributed(program: Program, module: Losses) -> tuple[Any, Any]:
    """The module with split layers, and what is called in its place."""
    net = module.net
    if "model" in program.axes and program.by == "plan":
        net.recompute = "not reentrant" if program.recompute == "reentrant" else program.recompute  # plans refuse it
        module = spt.parallelize(module, MODELS[program.model].plan, in_specs=P("data"), out_specs=P("data"))
    elif "model" in program.axes:
        net.up = spt.nn.Linear.from_torch(net.up, w_spec=P("model"))
        net.down = spt.nn.Linear.from_torch(net.down, w_spec=P(None, "model"))
    if program.shard == "parameters":
        options = {"prefetch": program.prefetch, "reshard_after_forward": not program.kept_wholes}
        unit = MODELS[program.model].unit if program.units else None
        module = spt.shard_parameters(module, "data", unit=unit, reduction=program.reduction, **options)
        return module, module
    if "model" in program.axes and program.by == "plan":
        return module, module
    return module, spt.data_parallel(module, "data", bucket_bytes=program.bucket_bytes, reduction=program.reduction)


class Training:
    """A training on one worker, or as a worker of a mesh along "data"."""

    def __init__(self, program: Program, worker: int | None):
        self.program, self.worker = program, worker
        model = MODELS[program.model]
        self.data = torch.utils.data.TensorDataset(*model.data(program.samples))
        module = Losses(model.make(), model.loss)
        module.net.recompute = program.recompute
        self.module, self.model = (module, module) if worker is None else distributed(program, module)
        self.net = self.module.net
        self.optimizer = optimizer_of(program, self.module)
        if worker is not None and program.shard in ("states", "gradients"):
            split = program.shard == "gradients"
            self.optimizer = spt.shard_optimizer(self.optimizer, "data", split_gradients=split)
        if program.groups:
            self.optimizer.add_param_group({"params": [next(self.module.parameters())], "lr": 0.005})
        self.scheduler = SCHEDULES[program.schedule](self.optimizer)
        self.average = None
        if program.ema:
            average = swa_utils.get_ema_multi_avg_fn(0.9)
            self.average = swa_utils.AveragedModel(self.model, multi_avg_fn=average)
        self.losses, self.norms, self.rates = [], [], []

    @property
    def is_global(self) -> bool:
        """Whether the module computes with global tensors, so that its gradients are sums."""
        return self.program.by == "plan" and "model" in self.program.axes

    @property
    def saved(self) -> dict[str, Any]:
        """What a checkpoint has."""
        found = {"net": self.module, "optimizer": self.optimizer, "sampler": self.sampler}
        if self.scheduler is not None:
            found["scheduler"] = self.scheduler
        if self.average is not None:
            found["average"] = self.average
        return found

    @cached_property
    def sampler(self) -> Any:
        return self._sampler(self.data, True)

    def _sampler(self, data: Any, shuffle: bool) -> Any:
        options = {"shuffle": shuffle, "seed": 3, "batch_size": self.program.batch, "order": self.program.order}
        split = {"num_replicas": 1, "rank": 0} if self.worker is None else {"axis_name": "data"}
        return spt.DistributedSampler(data, **options, **split)

    def minibatches(self) -> Iterator[Any]:
        while True:
            yield from self.sampler.loader()
            self.sampler.set_epoch(self.sampler.epoch + 1)

    def steps(self, start: int, stop: int) -> None:
        program = self.program
        for k, (x, t) in zip(range(start, stop), self.minibatches(), strict=False):
            self.net.norm.requires_grad_(not (program.frozen and 2 <= k < 5))
            self.net.uses_extra = not (program.unused and k % 2)
            self.optimizer.zero_grad()
            self.losses.append(self.accumulated(x, t))
            if program.clip:
                self.norms.append(float(clip_grad_norm_(self.module.parameters(), program.clip)))
            self.rates.append([group["lr"] for group in self.optimizer.param_groups])
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            if self.average is not None:
                self.average.update_parameters(self.model)

    def accumulated(self, x: torch.Tensor, t: torch.Tensor) -> float:
        """The loss of a minibatch, and its gradient, of several backwards and one sum."""
        total, count = 0.0, len(x)
        if self.worker is not None:
            count = int(spt.psum(spt.varying(torch.tensor(len(x)), "data"), "data"))
        for m in range(self.program.microbatches):
            part = [split_rows(a, self.program.microbatches, m) for a in (x, t)]
            is_last = m == self.program.microbatches - 1
            with nullcontext() if is_last or not hasattr(self.model, "no_sync") else self.model.no_sync():
                total += self.pulled(self.model(*part).sum() / count)
        return total

    def pulled(self, own: torch.Tensor) -> float:
        """Run backward from this worker's part of a loss. Returns the loss."""
        if self.worker is None:
            own.backward()
            return float(own.detach())
        loss = spt.psum(own, "data")
        is_sum = self.program.reduction == "sum" or self.is_global
        (loss if is_sum else own * self.program.axes["data"]).backward()
        return float(loss.detach())

    def result(self) -> Result:
        named = dict(self.module.named_parameters())
        states = {
            name: {k: whole(v) for k, v in self.optimizer.state[p].items()}
            for name, p in named.items()
            if p in self.optimizer.state
        }
        average = {}
        if self.average is not None:
            average = {name: whole(p) for name, p in zip(named, self.average.parameters(), strict=True)}
        parameters = {name: whole(p) for name, p in named.items()}
        return Result(self.losses, self.norms, self.rates, parameters, states, average, self.evaluated())

    def evaluated(self) -> float:
        """The mean loss of other data."""
        if not self.program.evaluate:
            return 0.0
        data = torch.utils.data.TensorDataset(*MODELS[self.program.model].data(13))
        batches = self._sampler(data, False).loader()
        model = self.model if self.average is None else self.average
        with torch.no_grad():
            if self.worker is None:
                return float(torch.cat([model(*batch) for batch in batches]).mean())
            return float(evaluate(lambda batch: model(*batch), batches, "data"))


def train(program: Program) -> Result:
    """The training on one worker."""
    training = Training(program, None)
    training.steps(0, program.steps)
    return training.result()


def train_on_mesh(program: Program, path: Any = None) -> list[Result]:
    """The results of all workers of a mesh. path: for the checkpoint from which a run goes on."""
    results: dict[int, Result] = {}
    stop = program.steps if program.then is None else program.saved_after

    def first() -> None:
        training = Training(program, spt.worker_index("data"))
        training.steps(0, stop)
        if program.then is None:
            results[spt.worker_index(tuple(program.axes))] = training.result()
        else:
            spmd.save(path, training.saved)
            lists[spt.worker_index(tuple(program.axes))] = training.losses, training.norms, training.rates

    lists: dict[int, Any] = {}
    spt.map(first, (), None, mesh=spmd.Mesh(**program.axes), check=program.check)()
    if program.then is None:
        return [results[k] for k in sorted(results)]
    later = replace(program, axes=program.then)

    def second() -> None:
        training = Training(later, spt.worker_index("data"))
        spmd.load(path, like=training.saved)
        training.losses, training.norms, training.rates = map(list, next(iter(lists.values())))
        training.steps(stop, program.steps)
        results[spt.worker_index(tuple(later.axes))] = training.result()

    spt.map(second, (), None, mesh=spmd.Mesh(**later.axes), check=program.check)()
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
