"""Training of a model in stages that stops and goes on on other meshes, with all that goes with pipelines, drawn at
random: losses, parameters and states of the optimiser are those of one worker."""

from __future__ import annotations

import copy
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import spmd
from spmd import P
from spmd.bridge import torch as spt
from spmd.training.pipelines.schedules import SCHEDULES

STEPS, TOKENS = 6, 5
PLAN = {"up": spt.column("model"), "down": spt.row("model")}


@dataclass(frozen=True)
class Run:
    """A mesh, and what runs on it. stages: in all; None: one worker without `spmd`. sharding: "" for copies of the
    parameters, "states" or "parameters" for what lies split over `data`. parts: of a batch, whose gradients are added
    up."""

    axes: dict[str, int]
    stages: int | None = None
    schedule: str = "1f1b"
    microbatches: int = 3
    sharding: str = ""
    parts: int = 1


@dataclass(frozen=True)
class Case:
    """widths: of the layers between. n: samples in a batch. runs: between which training stops."""

    widths: tuple[int, ...]
    runs: tuple[Run, ...]
    tied: bool = True
    n: int = 7
    optimizer: str = "adamw"
    clip: float = 0.2
    scaled: bool = False


def drawn(seed: int, workers: int | None = None) -> Case:
    """workers: of each mesh; None: at most eight, and one run may be that of one worker without a mesh."""
    draw = random.Random(seed)
    widths = tuple(draw.choices(range(1, 8), k=draw.randint(1, 4)))
    runs = [_drawn_run(draw, len(widths) + 3, workers) for _ in range(draw.randint(2, 3))]
    if workers is None and draw.random() < 0.4:
        runs[draw.randrange(len(runs))] = Run({}, parts=draw.randint(1, 2))
    optimizer, scaled = draw.choice(["adamw", "sgd", "groups"]), draw.random() < 0.5
    return Case(
        widths, tuple(runs), draw.random() < 0.6, draw.randint(3, 9), optimizer, draw.choice([0.2, 1e9]), scaled
    )


def _drawn_run(draw: random.Random, layers: int, workers: int | None) -> Run:
    while True:
        axes = {"stage": draw.randint(1, 4), "data": draw.randint(1, 3), "model": draw.randint(1, 2)}
        if axes["stage"] <= layers and math.prod(axes.values()) in ([workers] if workers else range(2, 9)):
            break
    most = layers // axes["stage"]
    schedule = draw.choice([*SCHEDULES] if most > 1 else [name for name in SCHEDULES if name != "interleaved"])
    stages = axes["stage"] * (draw.randint(2, most) if schedule == "interleaved" else 1)
    mesh = dict(draw.sample([*axes.items()], 3))
    return Run(
        mesh, stages, schedule, draw.randint(1, 5), draw.choice(["", "states", "parameters"]), draw.randint(1, 2)
    )


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(TOKENS, 4), nn.Parameter(torch.zeros(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens) + self.places


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def made(case: Case) -> nn.Sequential:
    """The model of one worker."""
    generator = torch.Generator().manual_seed(len(case.widths))
    model = nn.Sequential(Embedded(), *map(Wide, case.widths), nn.LayerNorm(4), nn.Linear(4, TOKENS, bias=False))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2
    if case.tied:
        model[-1].weight = model[0].table.weight
    return model


def batch(case: Case, step: int) -> torch.Tensor:
    """Tokens, and those to be found, in columns."""
    return torch.randint(0, TOKENS, (case.n, 2), generator=torch.Generator().manual_seed(step))


def staged(case: Case, run: Run) -> nn.Module:
    stages: list[Any] = spt.split_stages(made(case), run.stages)
    for k in range(len(stages)):
        if k % run.axes["stage"] != spt.worker_index("stage"):
            stages[k] = None
            continue
        if case.tied:  # two stages of one worker may not share a parameter that is summed or split for each
            stages[k] = copy.deepcopy(stages[k])
        names = {name.rpartition(".")[2] for name, _ in stages[k].named_modules()}
        plan = {name: style for name, style in PLAN.items() if name in names}
        if run.axes["model"] > 1:
            stages[k] = spt.parallelize(stages[k], plan, in_specs=P("data"), out_specs=P("data"))
        if run.sharding == "parameters":
            stages[k] = spt.shard_parameters(stages[k], "data", varying="stage")
        elif run.axes["model"] == 1:
            stages[k] = spt.data_parallel(stages[k], "data", varying="stage")
    last = f"{len(case.widths) + 2}.weight"
    tied = [[(0, "0.table.weight"), (len(stages) - 1, last)]] if case.tied else ()
    return spt.pipeline(
        stages,
        microbatches=run.microbatches,
        schedule=run.schedule,
        loss=lambda y, t: F.cross_entropy(y, t, reduction="sum") / case.n,
        reduction="sum",
        tied=tied,
    )


def optimizer_of(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "groups":  # a stage may have none of one group
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        for p in model.parameters():
            kinds[p.ndim > 1].append(p)
        groups = [{"params": kinds[True], "weight_decay": 0.1}, {"params": kinds[False], "lr": 0.05}]
        return torch.optim.AdamW(groups, lr=0.02)
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def trained(case: Case, run: Run, folder: Path | None, first: int, end: int, rows: Any) -> dict[str, Any]:
    """Losses of the steps from first on, and the parameters and states after them; what one worker has, or a worker of
    a mesh. rows(x): those of a batch that it has."""
    alone = run.stages is None
    model = made(case) if alone else staged(case, run)
    optimizer = optimizer_of(case, model)
    if run.sharding == "states":
        optimizer = spt.shard_optimizer(optimizer, "data")
    scaler = (torch.amp.GradScaler if alone else spt.GradScaler)("cpu", init_scale=64.0, growth_interval=2)
    state: dict[str, Any] = {"net": model, "optimizer": optimizer, "step": 0}
    state |= {"scaler": scaler} if case.scaled else {}
    if first:
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        state = spmd.load(folder, like=state)
        assert state["step"] == first
    losses = []
    for step in range(first, end):
        optimizer.zero_grad()
        scale = (
            (lambda x, step=step: scaler.scale(x) * (torch.inf if step == 1 else 1.0)) if case.scaled else lambda x: x
        )
        total = 0.0
        for part in map(rows, batch(case, step).chunk(run.parts)):
            x, t = part.unbind(1)
            if alone:
                loss = F.cross_entropy(model(x), t, reduction="sum") / case.n
                scale(loss).backward()
                total += loss.item()
            else:
                total += float(spt.block(spt.psum(model.backward(x, t, scale=scale), "data")))
        if case.scaled:
            scaler.unscale_(optimizer)
        spt.clip_grad_norm_(model, case.clip)
        if case.scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        losses.append(total)
    state["step"] = end
    if folder is not None:
        spmd.save(folder, state)
    return {"losses": losses, "scale": scaler.get_scale() if case.scaled else 1.0} | spt.state_dict(model)


def on_mesh(case: Case, run: Run, folder: Path, first: int, end: int, **options: Any) -> dict[str, Any]:
    if run.stages is None:
        return trained(case, run, folder, first, end, lambda x: x)
    rows = lambda x: spt.put(x, P("data")).block()
    with spmd.Mesh(**run.axes, **options):
        return spt.map(lambda: trained(case, run, folder, first, end, rows), (), None)()


def goes_on(case: Case, folder: Path, **options: Any) -> None:
    """Raise unless the runs, one after the other, are that of one worker."""
    losses: list[float] = []
    ends = [STEPS * (k + 1) // len(case.runs) for k in range(len(case.runs))]
    for run, end in zip(case.runs, ends, strict=True):
        found = on_mesh(case, run, folder, len(losses), end, **options)
        losses += found.pop("losses")
    expected = trained(case, Run({}), folder.with_name("one"), 0, STEPS, lambda x: x)
    assert_same([losses, found], [expected.pop("losses"), expected])
    if spmd.is_main():
        assert_same(*(spmd.load(at)["optimizer"] for at in (folder, folder.with_name("one"))))


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            # Numbers of parameters are those of one optimiser.
            assert_same(*([*sorted(y)] if name == "params" else y for y in (found[name], x)))
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, float | torch.Tensor | np.ndarray | np.generic):
        torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=1e-10)
    else:
        assert found == expected
