"""A trace of a step of a module whose parameters lie split over two workers.

torch_gathering.py trace FOLDER   writes trace.json into the folder
"""

import sys
from pathlib import Path

import torch
from torch import nn

import spmd
from spmd.bridge import torch as spt

LAYERS = 4


def marked(x):
    """x, by a collective with an adjoint that moves something: it is seen in a trace, forward and backward."""
    return x + 0 * spt.all_gather(x[:1], "data", tiled=True)[:1]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(400, 400, bias=False)

    def forward(self, x):
        return torch.tanh(self.inner(marked(x)))


def trace(folder, transport=None):
    nets = {}

    def step():
        net = nets.get(spt.worker_index("data"))
        if net is None:
            net = spt.shard_parameters(nn.Sequential(*[Layer() for _ in range(LAYERS)]), "data", unit=Layer)
            nets[spt.worker_index("data")] = net
        net(spt.varying(torch.ones(2, 400, requires_grad=True), "data")).sum().backward()

    with spmd.Mesh(data=2, transport=transport):
        step = spt.map(step, (), None)
        for _ in range(2):  # the order of the units is learnt
            step()
        with spmd.profile(Path(folder, "trace.json")):
            step()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
