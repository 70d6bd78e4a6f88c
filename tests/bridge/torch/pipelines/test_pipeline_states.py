"""spt.state_dict of a pipeline: the states of all stages, whole, on every worker."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


def made() -> list[nn.Module]:
    """Stages with different numbers of parameters, of several dtypes, one with buffers and one with nothing."""
    torch.manual_seed(0)
    return [
        nn.Linear(3, 5, dtype=torch.float64),
        nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False)),
        nn.Tanh(),
        nn.Embedding(3, 2, dtype=torch.bfloat16),
    ]


@pytest.mark.parametrize("axes", [{"stage": 1}, {"stage": 2}, {"stage": 4}, {"model": 2, "stage": 2}], ids=str)
def test_every_worker_gets_the_states_of_all_stages(axes):
    expected = {f"stages.{k}.{name}": x for k, m in enumerate(made()) for name, x in m.state_dict().items()}
    plan = {"0": spt.column("model"), "2": spt.row("model")}

    def body():
        stages = made()
        if "model" in axes and spt.worker_index("stage") == 1:  # collectives that the others do not make
            stages[1] = spt.parallelize(stages[1], plan)
        schedule = "1f1b" if axes["stage"] == 4 else "interleaved"
        step = spt.pipeline(stages, "stage", microbatches=2, schedule=schedule)
        found = spt.state_dict(step)
        assert [*found] == [*expected]
        for name, x in expected.items():
            assert found[name].dtype == x.dtype
            assert torch.equal(found[name], x), name
        seen.append(spt.worker_index("stage"))
        return spt.state_dict(step)  # what comes after is counted alike by all

    seen: list[int] = []
    with spmd.Mesh(**axes):
        spt.map(body, (), None)()
    assert sorted(seen) == sorted([*range(axes["stage"])] * axes.get("model", 1))
