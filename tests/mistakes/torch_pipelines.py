"""Mistakes with pipelines of modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import spmd
from mistakes import Row
from spmd import P
from spmd.bridge import torch as spt
from spmd.errors import LayoutError, ReplicaError, SpecError, StateError

WHERE = "spt.pipeline: argument "
X = torch.ones(4, 2)


def made(
    stages: Any = None,
    use: Callable[[Any, torch.Tensor], Any] | None = None,
    check: bool = True,
    **options: Any,
) -> Callable[[], Any]:
    """A pipeline of two stages, and its use; without checks beside an axis of data."""

    def body(x: torch.Tensor) -> None:
        own = [nn.Linear(2, 2), nn.Linear(2, 2)] if stages is None else stages()
        step = spt.pipeline(own, "stage", **{"microbatches": 2, "loss": torch.mean, **options})
        (use or (lambda step, x: step.backward(x)))(step, x)

    mesh = spmd.Mesh(stage=2) if check else spmd.Mesh(data=2, stage=2)
    return lambda: spt.map(body, P(), None, mesh=mesh, check=check)(X)


class Summed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return spt.psum(spt.pvary(x, "stage"), "stage")


class Sparse(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).to_sparse()


class Total(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum()


class Keeping(nn.Linear):
    """Adds what it has computed for the microbatch before."""

    kept: torch.Tensor | float = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x + self.kept
        return super().forward(self.kept)


class Named(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return {x.shape: x}


ROWS = [
    Row(f"pipeline: {name}", call, error, WHERE + argument, got, need, mend)
    for name, call, error, argument, got, need, mend in (
        (
            "three stages on two workers",
            made(lambda: [nn.Linear(2, 2)] * 3),
            SpecError,
            "stages",
            "3 stages",
            "a list of all stages",
            "spt.split_stages(model, 2)",
        ),
        (
            "no loss",
            made(loss=None),
            SpecError,
            "loss",
            "None",
            "the loss of the last stage's output",
            "loss=f",
        ),
        (
            "a loss with dimensions",
            made(loss=lambda y: y),
            StateError,
            "loss",
            "a function that returns",
            "a tensor without dimensions",
            "mse_loss",
        ),
        (
            "another reduction",
            made(reduction="total"),
            SpecError,
            "reduction",
            "'total'",
            '"mean" or "sum"',
            '"mean"',
        ),
        (
            "a collective along the axis in a stage",
            made(lambda: [Summed(), Summed()]),
            StateError,
            "stages",
            "within a stage, which other workers along 'stage' do not run",
            "no collective along the axes of the pipeline",
            "tied",
        ),
        (
            "what is no tensor between stages",
            made(lambda: [Named(), Named()]),
            StateError,
            "stages",
            "a stage that returns",
            "in tuples, lists and dicts",
            "x.whole()",
        ),
        (
            "a sparse tensor between stages",
            made(lambda: [Sparse(2, 2), nn.Linear(2, 2)]),
            StateError,
            "stages",
            "a stage that returns",
            "dense tensors",
            "x.to_dense()",
        ),
        (
            "a graph that goes on in the next microbatch",
            made(lambda: [nn.Linear(2, 2), Keeping(2, 2)], schedule="gpipe"),
            StateError,
            "stages",
            "the input of an earlier microbatch",
            "a graph of its own for each microbatch",
            "h.detach()",
        ),
        (
            "outputs without dimensions",
            made(lambda: [nn.Linear(2, 2), Total(2, 2)], use=lambda step, x: step(x)),
            LayoutError,
            "stages",
            "results of microbatches 0 and 0 with shapes [[]] and [[]]",
            "joined in dimension 0",
            "x[None]",
        ),
        (
            "a layer that two stages share",
            made(lambda: [nn.Linear(2, 2)] * 2),
            SpecError,
            "tied",
            "(0, 'weight') and (1, 'weight'), on several workers",
            "parameters of one stage each, or named in `tied`",
            "tied=[[(0, 'weight'), (1, 'weight')]]",
        ),
        (
            "a tied parameter without such a name",
            made(tied=[[(0, "weight"), (1, "wieght")]]),
            SpecError,
            "tied",
            "(1, 'wieght')",
            "a parameter of the stage: weight, bias",
            "embedding.weight",
        ),
        (
            "a tied parameter of no stage",
            made(tied=[[(0, "weight"), (2, "weight")]]),
            SpecError,
            "tied",
            "(2, 'weight')",
            "a stage from 0 to 1",
            "embedding.weight",
        ),
        (
            "layers that are changed after the pipeline is made",
            made(
                use=lambda step, x: (
                    step.stages[str(spt.worker_index("stage"))].register_buffer("b", x) or step.state_dict()
                )
            ),
            StateError,
            "stages",
            "stage 0, which has 'b' by now",
            "the parameters and buffers with which the pipeline was made",
            "change the layers before spt.pipeline",
        ),
        (
            "tied parameters of two shapes",
            made(lambda: [nn.Linear(2, 2), nn.Linear(2, 3)], tied=[[(0, "weight"), (1, "weight")]]),
            SpecError,
            "tied",
            "parameters of shapes [2, 2] and [3, 2]",
            "parameters of one shape",
            "nn.Embedding(n, d)",
        ),
        (
            "a batch that differentiates",
            made(use=lambda step, x: step.backward(x.detach().requires_grad_())),
            StateError,
            "x",
            "which is differentiated",
            "data, or of_input=True",
            "of_input=True",
        ),
        (
            "a target that differentiates",
            made(use=lambda step, x: step.backward(x, x.detach().requires_grad_())),
            StateError,
            "target",
            "which is differentiated",
            "data",
            "target.detach()",
        ),
        (
            "targets of other samples",
            made(use=lambda step, x: step.backward(x, x[:3])),
            LayoutError,
            "target",
            "3 entries in dimension 0, and 4 of x",
            "a target for each sample",
            "x[indices] and y[indices]",
        ),
        (
            "a batch for each worker along the pipeline",
            made(use=lambda step, x: step.backward(spt.varying(x, "stage"))),
            StateError,
            "x",
            "each worker along 'stage' has another one",
            "x goes in at its first worker",
            "spt.keep(x, 'stage', 0)",
        ),
        (
            "a batch of arrays",
            made(use=lambda step, x: step.backward(x.numpy())),
            SpecError,
            "x",
            "ndarray float32[4, 2]",
            "tensors of one length in dimension 0",
            "torch.as_tensor(x)",
        ),
        (
            "a batch without dimensions",
            made(use=lambda step, x: step.backward(x[0, 0])),
            LayoutError,
            "x",
            "tensor float32[]",
            "along which they are cut into microbatches",
            "closed over",
        ),
        (
            "a mean without states beside another axis",
            made(check=False),
            StateError,
            "loss_axis_name",
            "None, in a body without states",
            "the axes over which loss takes the mean",
            "loss_axis_name='data', or ()",
        ),
    )
]

ROWS.append(
    Row(
        "pipeline: a batch that each worker made",
        made(use=lambda step, x: step.backward(torch.ones(4, 2) * spt.worker_index("stage"))),
        ReplicaError,
        "spt.pipeline at ",
        "differs between worker",
        "one value on all workers along 'stage'",
        "spmd.varying(a, 'stage')",
    )
)


def lbfgs(step: Any, x: torch.Tensor) -> None:
    optimizer = torch.optim.LBFGS(step.parameters())
    optimizer.step(lambda: step.backward(x))


ROWS.append(
    Row(
        "pipeline: an optimiser that sees all parameters",
        made(use=lbfgs),
        StateError,
        "optimizer.step: argument params",
        "parameters of this worker's stages of a pipeline along 'stage'",
        "an optimiser whose step of a parameter needs that parameter alone",
        "torch.optim.AdamW(model.parameters())",
    )
)
