"""Training by spt.data_parallel with all that it knows; prints for each worker, in order, digests of what it has.

Takes the number of workers. Run under mpiexec, torchrun, or alone: the output is the same.
"""

import hashlib
import sys

import numpy as np
import torch
from torch import nn

import spmd
from spmd import P
from spmd.bridge import torch as spt
from spmd.layout import block_sizes, offsets


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(7, 3)
        self.norm = nn.BatchNorm1d(7)
        self.body = nn.Linear(5, 7, dtype=torch.float64)
        self.extra = nn.Linear(7, 3, dtype=torch.bfloat16)

    def forward(self, x, extra):
        y = self.norm(torch.tanh(self.body(x)).float())
        return self.head(y) + self.extra(y.bfloat16()).float() if extra else self.head(y)


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def digest(tensors):
    data = b"".join(b"-" if x is None else x.detach().double().numpy().tobytes() for x in tensors)
    return np.frombuffer(hashlib.sha256(data).digest()[:6], np.uint8).copy()


def train():
    n, k = spt.axis_size("data"), spt.worker_index("data")
    net = Net()
    for j, p in enumerate(net.parameters()):
        p.data.copy_(randn(*p.shape, seed=100 * k + j))
    model = spt.data_parallel(net, "data", bucket_bytes=150)
    steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    found = []
    for step in range(4):
        steps.zero_grad()
        x = randn(4 * n + 3, 5, seed=step)
        at = offsets(block_sizes(len(x), n))
        mine = spt.varying(x[at[k] : at[k + 1]], "data")
        if step == 2:
            with model.no_sync():
                spt.mean(model(mine, True).square().sum(1), "data").backward()
        # Only some workers use the extra layer, and none in the last step.
        out = model(mine, step < 3 and k % 2 == 1)
        spt.mean(out.square().sum(1), "data").backward()
        found.append(digest(p.grad for p in model.parameters()))
        steps.step()
    found[-1] = digest([*model.parameters(), *model.buffers()])
    return spt.varying(torch.from_numpy(np.stack(found)), "data")


with spmd.Mesh(data=int(sys.argv[1])):
    rows = spt.map(train, (), P("data"))()
if spmd.is_main():
    for row in rows:
        print(bytes(row.to(torch.uint8).tolist()).hex())
