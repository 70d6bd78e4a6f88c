"""Pipelines of modules that stop, and go on with another number of stages, along with all that goes with them: what is
computed and saved is that of one worker."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest
from launch import PROGRAMS, TORCHRUN, launch, mpiexec

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch_restart_cases import Case, Run, drawn, goes_on, made, on_mesh, staged  # noqa: E402

import spmd  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import CheckpointError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("a body makes its tensors on the host")]

MPI = [pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")]
CASE = Case((3, 2), ())


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(k, marks=pytest.mark.full) for k in (0, *range(3, 60)))])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of the step whose gradients are infinite
def test_runs_that_go_on_elsewhere_are_those_of_one_worker(seed, tmp_path):
    goes_on(drawn(seed), tmp_path / "run")


@pytest.mark.parametrize(
    ("python", "seed"),
    [pytest.param(sys.executable, 3, id="mpiexec", marks=MPI), pytest.param(TORCHRUN, 8, id="torchrun")],
)
def test_processes_go_on_elsewhere(python, seed, tmp_path):
    """From two stages to four, with parameters that lie split; interleaved, or with scaled losses."""
    ended = launch(PROGRAMS / "torch_pipeline_restarts.py", tmp_path, str(seed), n=4, python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("a process is through") == 4


def body(run: Run, f: Any) -> Any:
    with spmd.Mesh(**run.axes):
        return spt.map(lambda: f(staged(CASE, run)), (), None)()


TWO = Run({"data": 1, "stage": 2, "model": 2}, 2)


def test_each_worker_writes_its_own_stage_once(tmp_path):
    on_mesh(CASE, TWO, tmp_path / "run", 0, 1)
    saved = spmd.load(tmp_path / "run")["net"]
    assert {name: x.shape for name, x in saved.items()} == {
        k: tuple(x.shape) for k, x in made(CASE).state_dict().items()
    }
    names = [set(), set()]  # of the tensors in the files of the workers of each stage
    for file in sorted((tmp_path / "run").glob("data-*.safetensors")):
        worker = int(file.name.split("-")[2])
        safetensors = pytest.importorskip("safetensors")
        with safetensors.safe_open(file, "np") as tensors:
            found = [*tensors.keys()]
        names[worker // 2] |= {n.removeprefix("net.").partition("[")[0] for n in found if n.startswith("net.")}
    first, second = spt.split_stages(made(CASE), 2)
    assert names == [set(first.state_dict()), set(second.state_dict())]


def test_a_whole_state_is_taken_by_any_number_of_stages():
    """That of `state_dict`, of plain modules too, also where the pipeline is a part of a module."""
    expected = {name: x + 1.0 for name, x in made(CASE).state_dict().items()}

    def loaded(step: nn.Module) -> Any:
        outer = nn.ModuleDict({"net": step, "other": nn.Linear(1, 1, bias=False)})
        state = {f"net.{name}": x for name, x in expected.items()} | {"other.weight": torch.ones(1, 1)}
        assert not any(outer.load_state_dict(state))
        with pytest.raises(RuntimeError, match=r"Unexpected key.*surplus"):
            step.load_state_dict(expected | {"surplus": torch.ones(1)})
        assert [name for name, _ in step.named_parameters()] == [
            name for name in expected if name in spt.state_dict(step, whole=False)
        ]
        assert spt.state_dict(outer).keys() == state.keys()
        assert step.state_dict().keys() == expected.keys()
        return spt.state_dict(step)

    for run in (
        TWO,
        Run({"data": 2, "stage": 3, "model": 1}, 3),
        Run({"data": 1, "stage": 2, "model": 1}, 4, "interleaved"),
    ):
        found = body(run, loaded)
        for name, x in expected.items():
            assert torch.equal(found[name], x), name


class Counted(nn.Module):
    """A state that is no tensor, buffers, and names of which one is a part of another."""

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("seen", torch.full((width,), float(width)))
        self.norm, self.count = nn.BatchNorm1d(width), width

    def get_extra_state(self) -> Any:
        return {"count": self.count, "each": [1, 2]}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_of_equal_names_and_of_any_states(stages, tmp_path):
    """A list of stages keeps its number on any number of workers; beside another module, in one optimiser."""

    def state(start: int) -> dict[str, Any]:
        step = spt.pipeline([Counted(start + k) for k in range(4)], microbatches=2, schedule="interleaved")
        head = nn.Linear(2, 2)
        optimizer = torch.optim.SGD([*step.parameters(), *head.parameters()], lr=0.1, momentum=0.5)
        for p in (*step.parameters(), *head.parameters()):
            p.grad = torch.full_like(p, float(p.numel()))
        optimizer.step()
        return {"modules": nn.ModuleDict({"deep": step}), "head": head, "optimizer": optimizer}

    def save() -> None:
        spmd.save(tmp_path, state(2))

    def load() -> Any:
        own = state(2)
        for p in own["modules"].parameters():
            own["optimizer"].state[p]["momentum_buffer"].zero_()
            p.data.zero_()
        for m in own["modules"].modules():
            if isinstance(m, Counted):
                m.count = 0
        spmd.load(tmp_path, like=own)
        for k, m in own["modules"]["deep"].modules_by_stage.items():
            assert m.count == k + 2
            assert m.norm.weight.detach().numpy() == pytest.approx(1 - 0.1 * (k + 2))
            assert torch.all(own["optimizer"].state[m.norm.bias]["momentum_buffer"] == k + 2)
        return None

    with spmd.Mesh(stage=2):
        spt.map(save, (), None)()
    with spmd.Mesh(stage=stages):
        spt.map(load, (), None)()
    saved = spmd.load(tmp_path)
    assert saved["modules"]["deep.stages.3.seen"].tolist() == [5.0] * 5
    assert saved["modules"]["deep.stages.1._extra_state"] == {"count": 3, "each": [1, 2]}
    numbers = saved["optimizer"]["param_groups"][0]["params"]
    assert sorted(numbers.values()) == [*range(10)]
    assert "head.weight" in numbers


def test_a_stage_without_parameters_goes_on(tmp_path):
    def run(stages: list[nn.Module], start: float) -> Any:
        step = spt.pipeline(stages, microbatches=1, loss=torch.mean)
        optimizer = torch.optim.SGD([{"params": [*step.parameters()]}], lr=0.1, momentum=0.5)
        state = {"net": step, "optimizer": optimizer}
        if not start:
            spmd.load(tmp_path, like=state)
        for p in step.parameters():
            p.grad = torch.full_like(p, start)
        optimizer.step()
        spmd.save(tmp_path, state)

    for stages, start in (([nn.Linear(2, 2), nn.Tanh()], 3.0), ([nn.Linear(2, 2)], 0.0)):
        with spmd.Mesh(stage=len(stages)):
            spt.map(lambda stages=stages, start=start: run(stages, start), (), None)()
    assert np.all(spmd.load(tmp_path)["optimizer"]["state"]["bias"]["momentum_buffer"] == 1.5)


def test_a_pipeline_is_exported_as_the_whole_model(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    body(TWO, lambda step: spmd.io.export(tmp_path, step))
    found = safetensors.load_file(tmp_path / "model.safetensors")
    for name, x in made(CASE).state_dict().items():
        assert torch.equal(found[name], x), name


def test_values_that_differ_beside_the_stages_are_refused(tmp_path):
    def save(step: nn.Module) -> None:
        with torch.no_grad():
            next(step.parameters()).add_(spt.worker_index("data") if spt.worker_index("stage") else 0.0)
        spmd.save(tmp_path, {"net": step})

    with pytest.raises(CheckpointError, match=r"leaf 'net\.2\.up\.weight'[\s\S]*values that differ") as caught:
        body(Run({"stage": 2, "data": 2, "model": 1}, 2), save)
    assert "worker 2" in str(caught.value)


def test_other_layers_are_refused_by_name(tmp_path):
    body(TWO, lambda step: spmd.save(tmp_path, {"net": step}))

    def other() -> None:
        stages = spt.split_stages(made(Case((3,), ())), 2)
        spmd.load(tmp_path, like={"net": spt.pipeline(stages, tied=[[(0, "0.table.weight"), (1, "3.weight")]])})

    with spmd.Mesh(stage=2), pytest.raises(CheckpointError, match=r"argument like\n") as caught:
        spt.map(other, (), None)()
    assert "'net.4.weight'" in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "inside"),
    [(torch.bfloat16, None), (torch.float32, torch.bfloat16), (torch.float32, torch.float16)],
    ids=str,
)
def test_mixed_precision_is_exactly_that_of_one_worker(dtype, inside, tmp_path):
    """Parameters in half precision with copies in float32, or autocast; scaled losses, of which one is infinite; saved
    and gone on with another number of stages. One worker adds up the same microbatches."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    autocast = lambda: torch.autocast("cpu", inside, enabled=inside is not None)

    def net() -> nn.Sequential:
        layers = [layer for _ in range(3) for layer in (nn.Linear(4, 4, dtype=dtype), nn.Tanh())]
        generator = torch.Generator().manual_seed(1)
        for layer in layers[::2]:
            for p in layer.parameters():
                p.data = torch.randn(p.shape, generator=generator).to(dtype) / 2
        return nn.Sequential(*layers)

    def loss(y: torch.Tensor) -> torch.Tensor:
        return y.float().square().sum()

    def train(stages: int | None, first: int, end: int) -> Any:
        model = (
            net()
            if stages is None
            else spt.pipeline(spt.split_stages(net(), stages), microbatches=3, loss=loss, reduction="sum")
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer = spt.shard_optimizer(optimizer, "data", master_dtype=torch.float32)
        scaler = spt.GradScaler(init_scale=8.0, growth_interval=2)
        state = {"net": model, "optimizer": optimizer, "scaler": scaler}
        if first:
            spmd.load(tmp_path, like=state)
        for k in range(first, end):
            optimizer.zero_grad()
            scale = lambda value, k=k: scaler.scale(value) * (torch.inf if k == 2 else 1.0)
            if stages is None:
                for part in x.chunk(3):
                    with autocast():
                        value = loss(model(part))
                    scale(value).backward()
            else:
                with autocast():
                    model.backward(x, scale=scale)
            scaler.unscale_(optimizer)
            spt.clip_grad_norm_(model, 0.5)
            scaler.step(optimizer)
            scaler.update()
        spmd.save(tmp_path if stages else tmp_path / "one", state)
        return spt.state_dict(model), scaler.get_scale()

    for first, end, stages in ((0, 2, 2), (2, 5, 3)):
        with spmd.Mesh(stage=stages, data=1):
            found, scale = spt.map(lambda f=first, e=end, s=stages: train(s, f, e), (), None)()
    with spmd.Mesh(data=1):
        expected, scale_of_one = spt.map(lambda: train(None, 0, 5), (), None)()
    assert scale == scale_of_one == 8.0 * 2 / 2 * 2
    for name, p in expected.items():
        assert torch.equal(found[name], p), name
    states = [spmd.load(at)["optimizer"]["state"] for at in (tmp_path, tmp_path / "one")]
    assert ("master" in states[1]["0.weight"]) == (dtype is torch.bfloat16)
    for name, entries in states[1].items():
        for key, value in entries.items():
            np.testing.assert_array_equal(states[0][name][key], value, f"{name} {key}")


def test_draws_cover_what_goes_together():
    cases = [drawn(seed) for seed in range(60)]
    runs = [run for case in cases for run in case.runs if run.stages is not None]
    assert {run.schedule for run in runs} == {"gpipe", "1f1b", "interleaved", "zero_bubble"}
    for name in ("stage", "data", "model"):
        assert len({run.axes[name] for run in runs}) > 1
    assert sum(case.runs[0].axes.get("stage") != case.runs[1].axes.get("stage") for case in cases) > 30
    assert any(run.stages is None for case in cases for run in case.runs)
    assert random.Random(0).random() == 0.8444218515250481, "seeds mean the same everywhere"
