"""Pipelines of modules with all that may be combined with them, drawn together: ten steps are those of one worker.

Stages take and give (samples, positions, features). Samples lie over `data`, positions over `sequence`, inner widths
over `model`, experts over `sequence`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_pipeline_cases import assert_alike, of_stage

import spmd
from spmd import P
from spmd.bridge import torch as spt
from spmd.operators.partial_comm import whole_comm
from spmd.training.pipelines.batches import sizes_of
from spmd.training.pipelines.schedules import SCHEDULES, schedule_of
from spmd.training.pipelines.simulation import alive

STEPS = 10
WORDS, EXPERTS = 5, 3


class Dense(nn.Module):
    def __init__(self, a: int, b: int):
        super().__init__()
        self.layer = nn.Linear(a, b)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return F.relu(self.layer(h), inplace=True) + 0.1


class Wide(nn.Module):
    """Two layers, whose inner width lies over `model`; recomputed in backward, or not."""

    def __init__(self, a: int, b: int, recompute: bool = False):
        super().__init__()
        self.up, self.down, self.recompute = nn.Linear(a, 5), nn.Linear(5, b), recompute

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        inner = lambda h: self.down(torch.tanh(self.up(h)))
        return checkpoint(inner, h, use_reentrant=False) if self.recompute else inner(h)


class Context(nn.Module):
    """The mean over all positions, which lie over an axis."""

    def __init__(self, a: int, b: int):
        super().__init__()
        self.layer, self.axis_name, self.length = nn.Linear(a, b), None, 1

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        total = h.sum(1, keepdim=True)
        if self.axis_name:  # pvary: without states nothing else says that what follows differs
            total = spt.pvary(spt.psum(total, self.axis_name), self.axis_name)
        return torch.tanh(self.layer(h + total / self.length))


class Mixture(nn.Module):
    """Two experts of each position."""

    def __init__(self, a: int, b: int):
        super().__init__()
        self.gate, self.axis_name = nn.Linear(a, EXPERTS, bias=False), None
        self.experts = nn.Parameter(torch.empty(EXPERTS, a, b))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        rows = h.flatten(0, 1)
        w = self.experts.block() if isinstance(self.experts, spt.Parameter) else self.experts
        y = spt.functions.experts(rows, self.gate(rows), lambda w, h: torch.tanh(h @ w), self.axis_name, params=w)
        return y.unflatten(0, h.shape[:2])


class Normed(nn.Module):
    """A batch norm, which learns and keeps statistics microbatch by microbatch, or is in eval mode."""

    def __init__(self, a: int, b: int, learns: bool):
        super().__init__()
        self.layer, self.norm = nn.Linear(a, b, bias=False), nn.BatchNorm1d(b).train(learns)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.layer(h)).transpose(1, 2)).transpose(1, 2)


KINDS: dict[str, Callable[[int, int], nn.Module]] = {
    "dense": Dense,
    "wide": Wide,
    "recomputed": lambda a, b: Wide(a, b, True),
    "context": Context,
    "mixture": Mixture,
    "batch norm": lambda a, b: Normed(a, b, True),
    "batch norm in eval": lambda a, b: Normed(a, b, False),
    "dropout": lambda a, b: nn.Sequential(nn.Linear(a, b), nn.Dropout(0.3)),
    "nothing": lambda a, b: nn.Identity(),
}


class Stage(nn.Module):
    """Takes and hands on (features, what passes by). form: of what is handed on; None at the last stage."""

    def __init__(self, inner: nn.Module, form: str | None):
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, x: Any) -> Any:
        h, by = (x, None) if isinstance(x, torch.Tensor) else x.values() if isinstance(x, dict) else x
        y = self.inner(h)
        if by is not None:
            scale, mask = by
            y = y * scale + mask.any(-1, keepdim=True)
        mask = h > 0 if h.ndim == 3 else h[..., None] > 1
        by = (y.detach().abs().mean((1, 2), keepdim=True) * 0 + 1.5, mask)
        return {None: y, "tensor": y, "tuple": (y, by), "dict": {"h": y, "by": by}}[self.form]


@dataclass(frozen=True)
class Case:
    """kinds: of the stages but the first and the last; frozen: the stage that is. parts: batches of one step. wrap: how
    gradients are summed over workers: by "data_parallel", "shard_parameters" or, by their states, "nothing"."""

    schedule: str
    axes: dict[str, int]
    kinds: tuple[str, ...]
    widths: tuple[int, ...]
    form: str
    n: int
    length: int
    microbatches: int
    words: bool
    tied: bool
    frozen: int | None
    loss: str
    reduction: str
    optimizer: str
    clip: float
    parts: int
    wrap: str
    shard: bool
    check: bool

    @property
    def split(self) -> tuple[str, ...]:
        """The axes over which batches lie."""
        return tuple(n for n in ("data", "sequence") if n in self.axes)


def drawn(seed: int, workers: int | None = None) -> Case:
    """A case. workers: of its mesh; None: at most eight."""
    rng = np.random.default_rng(seed)
    pick = lambda *options: options[rng.integers(len(options))]
    while True:
        axes = {"stage": pick(2, 2, 3, 4), "data": pick(1, 1, 2, 3), "model": pick(1, 1, 2), "sequence": pick(1, 1, 2)}
        if math.prod(axes.values()) in ([workers] if workers else range(2, 9)):
            break
    schedule = pick(*SCHEDULES)
    stages = axes["stage"] * (pick(1, 2, 3) if schedule == "interleaved" else 1)
    alone = axes["data"] == axes["sequence"] == 1
    kinds = [k for k in KINDS if alone or k not in ("batch norm", "dropout")]
    check = bool(rng.integers(4))
    kinds = kinds if check else [k for k in kinds if k not in ("mixture", "wide", "recomputed")]
    inner = [pick(*kinds) for _ in range(stages - 2)]
    widths = [4, *(pick(2, 3, 4, 6) for _ in inner), 4]
    for k, kind in enumerate(inner):
        widths[k + 1] = widths[k] if kind in ("nothing", "mixture") else widths[k + 1]
    words = bool(rng.integers(2))
    tied = words and bool(rng.integers(2))
    axes = {str(n): axes[n] for n in rng.permutation([*axes]) if axes[n] > 1}
    summed = "data" in axes or "sequence" in axes
    wrap = pick("data_parallel", "shard_parameters", "nothing") if summed and check else "data_parallel"
    if "mixture" in inner or (wrap == "shard_parameters" and (tied or "data" not in axes)):
        wrap = "nothing"
    reduction = pick("mean", "sum")
    return Case(
        schedule,
        axes,
        tuple(inner),
        tuple(widths),
        pick("tensor", "tuple", "dict"),
        int(rng.integers(1, 13)),
        int(rng.integers(2, 5)),
        int(rng.integers(1, 8)),
        words,
        tied,
        None if tied or rng.integers(3) else int(rng.integers(stages)),
        "own" if not summed or (reduction == "sum" and rng.integers(2)) else "one value",
        reduction,
        pick("sgd", "adamw"),
        pick(0.0, 0.2),
        pick(1, 1, 2),
        wrap,
        bool("data" in axes and wrap == "data_parallel" and rng.integers(2)),
        check,
    )


def made_stages(case: Case) -> list[Stage]:
    """The stages on one worker, with parameters that depend on the case alone."""
    generator = torch.Generator().manual_seed(len(case.kinds))
    inner: list[nn.Module] = [nn.Embedding(WORDS, 4) if case.words else nn.Linear(2, case.widths[0])]
    inner += [KINDS[kind](a, b) for kind, a, b in zip(case.kinds, case.widths, case.widths[1:], strict=False)]
    if case.words and not case.tied:
        inner[0] = nn.Sequential(inner[0], nn.Linear(4, case.widths[0]))
    before = case.widths[len(case.kinds)]
    inner.append(nn.Sequential(nn.Linear(before, 4), nn.Linear(4, WORDS, bias=False)))
    stages = [Stage(m.double(), case.form if k < len(inner) - 1 else None) for k, m in enumerate(inner)]
    with torch.no_grad():
        for stage in stages:
            for p in stage.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)
    for module in nn.ModuleList(stages).modules():
        if isinstance(module, Context):
            module.length = case.length
    if case.tied:
        stages[-1].inner[1].weight.data.copy_(stages[0].inner.weight)
    if case.frozen is not None:
        stages[case.frozen].requires_grad_(False)
    return stages


def batch(case: Case, part: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + part)
    shape = case.n, case.length
    x = torch.randint(0, WORDS, shape, generator=generator)
    if not case.words:
        x = torch.randn(*shape, 2, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, WORDS, shape, generator=generator)


def errors_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y.flatten(0, 1), target.flatten(), reduction="none")


def made_optimizer(case: Case, parameters: Any) -> torch.optim.Optimizer:
    groups = [{"params": [*parameters]}]  # which may be empty
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1)


def by_one_worker(case: Case) -> dict[str, Any]:
    """Losses, parameters, buffers and states of optimisers, by the names `stage.parameter`."""
    stages = made_stages(case)
    if case.tied:
        stages[-1].inner[1].weight = stages[0].inner.weight
    model = nn.Sequential(*stages)
    optimizer = made_optimizer(case, model.parameters())
    cuts = sizes_of(case.n, case.microbatches, True) if "batch norm" in case.kinds else [case.n]
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(case.parts):
            total = 0.0
            for x, t in zip(*(tensor.split(cuts) for tensor in batch(case, step * case.parts + part)), strict=True):
                loss = errors_of(model(x), t).sum() / (case.n * case.length)
                if loss.requires_grad:
                    loss.backward()
                total += loss.item()
            losses.append(total)
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    assert max(losses) < 1e2, "a case that diverges shows nothing"
    found: dict[str, Any] = {"losses": losses}
    for k, stage in enumerate(stages):
        found |= of_stage(k, stage, optimizer) | {f"{k}.{name}": x for name, x in stage.named_buffers()}
    return found


def laid_out(case: Case, stage: Stage) -> nn.Module:
    """A stage of this worker, on the mesh."""
    for module in stage.modules():
        if isinstance(module, Wide) and "model" in case.axes:
            spt.parallelize(module, {"up": spt.column("model"), "down": spt.row("model")})
        elif isinstance(module, Context | Mixture) and "sequence" in case.axes:
            module.axis_name = "sequence"
            if isinstance(module, Mixture):
                module.experts = spt.Parameter(
                    module.experts.detach(), P("sequence"), requires_grad=module.experts.requires_grad
                )
    if not case.split or case.wrap == "nothing":
        return stage
    if case.wrap == "shard_parameters":
        return spt.shard_parameters(stage, "data", varying="stage")
    return spt.data_parallel(stage, case.split, varying="stage")


def loss_of(case: Case) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
    """The loss of a microbatch, and what is said about it."""
    axes, entries = case.split, case.n * case.length
    if case.reduction == "mean":
        said = {} if case.check else {"loss_axis_name": axes}
        return lambda y, t: spt.mean(errors_of(y, t), axes) if axes else errors_of(y, t).mean(), said
    of_sum = lambda y, t: errors_of(y, t).sum() / entries
    if case.loss == "own":
        return of_sum, {"reduction": "sum"}
    return lambda y, t: spt.psum(of_sum(y, t), axes), {"reduction": "sum"}


def wholly(x: Any) -> Any:
    """What lies over several workers, as one worker has it."""
    x = x.whole() if isinstance(x, spt.PartitionedTensor) else x
    return spt.block(x) if isinstance(x, spt.Tensor) else x


def trained(case: Case, **options: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """The same in a pipeline, as each worker has it; and how many microbatches each kept at most."""
    workers, stages = case.axes["stage"], len(case.kinds) + 2

    def body(*batches: torch.Tensor) -> None:
        own: list[Any] = [None] * stages
        for k in range(spt.worker_index("stage"), stages, workers):
            with whole_comm(here().comm).uncounted():
                own[k] = laid_out(case, copy.deepcopy(made[k]))
        loss, said = loss_of(case)
        tied = [[(0, "inner.weight"), (stages - 1, "inner.1.weight")]] if case.tied else ()
        step = spt.pipeline(own, microbatches=case.microbatches, schedule=case.schedule, loss=loss, tied=tied, **said)
        optimizer = made_optimizer(case, step.parameters())
        if case.shard:
            with whole_comm(here().comm).uncounted():
                optimizer = spt.shard_optimizer(optimizer, "data")
        losses = []
        for k in range(STEPS):
            optimizer.zero_grad()
            for place in range(2 * k * case.parts, 2 * (k + 1) * case.parts, 2):
                value = step.backward(*batches[place : place + 2])
                whole = case.loss == "one value" or not case.split
                losses.append(float(spt.block(value if whole else spt.psum(value, case.split))))
            if case.clip:
                spt.clip_grad_norm_(step, case.clip)
            with whole_comm(here().comm).uncounted():
                optimizer.step()
        found: dict[str, Any] = {"losses": losses}
        for k, stage in step.modules_by_stage.items():
            with whole_comm(here().comm).uncounted():
                found |= {name: wholly(x) for name, x in of_stage(k, stage, optimizer).items()}
            found |= {f"{k}.{name}": x for name, x in stage.named_buffers()}
        kept[here().index], results[here().index] = step.most, found

    mesh = spmd.Mesh(**case.axes, **options)
    made = made_stages(case)
    kept: dict[int, int] = {}
    results: dict[int, Any] = {}
    here = lambda: spmd.mesh.WORKER.get()
    batches = [x for k in range(STEPS * case.parts) for x in batch(case, k)]
    spec = P(*(n if n in case.axes else None for n in ("data", "sequence")))
    torch.manual_seed(0)
    spt.map(body, (spec,) * len(batches), None, mesh=mesh, check=case.check)(*batches)
    return [results[k] for k in sorted(results)], [kept[k] for k in sorted(kept)]


def agree(case: Case, **options: Any) -> None:
    """Raise unless each worker of the pipeline has what one worker has, and keeps what the schedule says."""
    if "dropout" in case.kinds:  # whose draws are those of the stages, on any number of workers
        ((expected,), _) = trained(replace(case, schedule="interleaved", axes={"stage": 1}), transport="local")
    else:
        expected = by_one_worker(case)
    results, kept = trained(case, **options)
    seen = assert_alike(results, expected, case)
    mesh, workers = spmd.Mesh(**case.axes, **options), case.axes["stage"]
    if len(results) < mesh.size:  # each process has its own
        return
    assert seen == set(expected), set(expected) - seen
    together = case.check and not case.split or {*case.axes} == {"stage"}
    count = len(sizes_of(case.n, case.microbatches, together))
    plan = schedule_of(case.schedule, workers, count, (len(case.kinds) + 2) // workers)
    assert kept == [alive(plan, mesh.coordinates(w)["stage"]) for w in range(mesh.size)]
