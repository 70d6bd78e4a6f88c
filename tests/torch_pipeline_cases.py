"""Ten steps of a model of torch in stages, in a pipeline and on one worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import spmd
from spmd import P
from spmd.bridge import torch as spt
from spmd.operators.partial_comm import whole_comm

STEPS = 10


@dataclass(frozen=True)
class Case:
    """A run. n: the length of the batch. axes: those of the mesh. widths: of the layers. sequence: of the stages, the
    numbers of layers. optimizer: "sgd" or "adamw". clip: the norm at which gradients are clipped. parts: the batches of
    one step, whose gradients are accumulated. shard: whether states lie split over `data`."""

    schedule: str = "1f1b"
    n: int = 8
    microbatches: int = 4
    stages: int = 2
    axes: dict[str, int] = field(default_factory=lambda: {"stage": 2})
    reduction: str = "mean"
    optimizer: str = "adamw"
    clip: float = 0.0
    parts: int = 1
    shard: bool = False
    tied: bool = False


class Embedded(nn.Module):
    """The first stage where the embedding is tied: tokens to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, dtype=torch.float64)
        self.layer = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, tokens: torch.Tensor) -> dict[str, Any]:
        return {"h": torch.tanh(self.layer(self.embedding(tokens))), "n": (tokens, None, 2)}


class Between(nn.Module):
    """A stage of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 6, dtype=torch.float64), nn.Tanh(), nn.Linear(6, 4, dtype=torch.float64)
        )

    def forward(self, x: dict[str, Any]) -> dict[str, Any]:
        return {**x, "h": x["h"] + x["n"][2] * self.layers(x["h"])}


class Head(nn.Module):
    """The last stage: vectors to the scores of tokens, by the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.float64)
        self.head = nn.Linear(3, 5, bias=False, dtype=torch.float64)

    def forward(self, x: dict[str, Any]) -> torch.Tensor:
        return self.head(self.layer(x["h"]))


def made_stages(case: Case) -> list[nn.Module]:
    """The stages, with parameters that depend on the case alone."""
    generator = torch.Generator().manual_seed(case.stages)
    if case.tied:
        stages: list[nn.Module] = [Embedded(), *(Between() for _ in range(case.stages - 2)), Head()]
    else:
        widths = [3, *torch.randint(2, 7, (case.stages,), generator=generator).tolist()]
        stages = [
            nn.Sequential(
                nn.Linear(widths[k], 5, dtype=torch.float64),
                nn.ReLU(inplace=True) if k % 2 else nn.Tanh(),
                *([nn.LayerNorm(5, dtype=torch.float64)] * (k % 3)),
                nn.Linear(5, widths[k + 1], dtype=torch.float64),
            )
            for k in range(case.stages)
        ]
    with torch.no_grad():
        for stage in stages:
            for p in stage.parameters():
                p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) / 2)
    if case.tied:
        stages[-1].head.weight.data.copy_(stages[0].embedding.weight)
    return stages


def batch(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    if case.tied:
        return tuple(torch.randint(0, 5, (2, case.n), generator=generator))  # type: ignore[return-value]
    x = torch.randn(case.n, 3, generator=generator, dtype=torch.float64)
    width = made_stages(case)[-1][-1].out_features
    return x, torch.randn(case.n, width, generator=generator, dtype=torch.float64)


def loss_of(case: Case, reduction: str) -> Callable[..., torch.Tensor]:
    f = nn.functional.cross_entropy if case.tied else nn.functional.mse_loss
    return lambda y, t: f(y, t, reduction=reduction)


def made_optimizer(case: Case, parameters: Any) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.1)


def by_one_worker(case: Case) -> dict[str, Any]:
    """Losses, parameters and states of optimisers, by the names `stage.parameter`."""
    stages = made_stages(case)
    if case.tied:
        stages[-1].head.weight = stages[0].embedding.weight
    model = nn.Sequential(*stages)
    optimizer = made_optimizer(case, model.parameters())
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(case.parts):
            x, t = batch(case, step * case.parts + part)
            loss = loss_of(case, case.reduction)(model(x), t)
            loss.backward()
            losses.append(loss.item())
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
    found = {"losses": losses}
    for k, stage in enumerate(stages):
        found |= of_stage(k, stage, optimizer)
    return found


def of_stage(k: int, stage: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The parameters of a stage, and their states."""
    found: dict[str, Any] = {}
    for name, p in stage.named_parameters():
        found[f"{k}.{name}"] = p.detach()
        for key, value in optimizer.state[p].items():
            whole = value.whole() if isinstance(value, spt.PartitionedTensor) else value
            found[f"{k}.{name} {key}"] = spt.block(whole) if isinstance(whole, spt.Tensor) else whole
    return found


def trained(case: Case, **options: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """The same in a pipeline, as each worker has it; and how many microbatches each kept at most."""
    data = ("data",) if "data" in case.axes else ()

    def body(*batches: torch.Tensor) -> Any:
        stages = made_stages(case)
        if data:
            stages = [
                spt.data_parallel(m, "data", varying="stage")
                if k % case.axes["stage"] == spt.worker_index("stage")
                else None
                for k, m in enumerate(stages)
            ]
        if case.tied:
            stages[-1].head.weight.data.zero_() if stages[-1] is not None else None
        local, reduction = loss_of(case, "sum"), "sum"

        def loss(y: Any, t: Any) -> Any:
            counted = 1 if case.reduction == "sum" else case.n * (1 if case.tied else y.shape[1])
            return local(y, t) / counted

        step = spt.pipeline(
            stages,
            "stage",
            microbatches=case.microbatches,
            schedule=case.schedule,
            loss=loss if data else loss_of(case, case.reduction),
            reduction=reduction if data else case.reduction,
            tied=[[(0, "embedding.weight"), (case.stages - 1, "head.weight")]] if case.tied else (),
        )
        optimizer = made_optimizer(case, step.parameters())
        if case.shard:
            optimizer = spt.shard_optimizer(optimizer, "data")
        losses = []
        for k in range(STEPS):
            optimizer.zero_grad()
            for part in range(case.parts):
                place = 2 * (k * case.parts + part)
                value = step.backward(*batches[place : place + 2])
                losses.append(float(spt.block(spt.psum(value, data) if data else value)))
            if case.clip:
                spt.clip_grad_norm_(step, case.clip)
            optimizer.step()
        found: dict[str, Any] = {"losses": losses}
        for k, stage in step.modules_by_stage.items():
            with whole_comm(here().comm).uncounted():
                found |= of_stage(k, stage, optimizer)
        kept[here().index] = step.most
        results[here().index] = found

    mesh = spmd.Mesh(**case.axes, **options)
    kept: dict[int, int] = {}
    results: dict[int, Any] = {}
    here = lambda: spmd.mesh.WORKER.get()
    batches = [x for k in range(STEPS * case.parts) for x in batch(case, k)]
    spt.map(body, (P(*data),) * len(batches), None, mesh=mesh)(*batches)
    return [results[k] for k in sorted(results)], [kept[k] for k in sorted(kept)]


def assert_alike(results: list[dict[str, Any]], expected: dict[str, Any], case: Any) -> set[str]:
    """Raise unless what each worker has is as expected. Returns the names of all that any has."""
    for found in results:
        for name, value in found.items():
            torch.testing.assert_close(
                torch.as_tensor(value, dtype=torch.float64),
                torch.as_tensor(expected[name], dtype=torch.float64),
                rtol=0,
                atol=1e-10,
                msg=lambda text, name=name: f"{case}: {name}: {text}",
            )
    return {name for found in results for name in found}


def agree(case: Case, **options: Any) -> list[int]:
    """Raise unless each worker of the pipeline has what one worker has; how many microbatches each kept."""
    expected = by_one_worker(case)
    results, kept = trained(case, **options)
    seen = assert_alike(results, expected, case)
    if len(results) == spmd.Mesh(**case.axes, **options).size:
        assert seen == set(expected), set(expected) - seen
    return kept
