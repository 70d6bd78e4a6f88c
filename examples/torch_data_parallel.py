"""Train a classifier of handwritten digits with spt.data_parallel; the port of torch_ddp.py.

python examples/torch_data_parallel.py                                 two virtual workers in this process
mpiexec -n 2 python examples/torch_data_parallel.py                    two processes, the same output
torchrun --nproc-per-node 2 examples/torch_data_parallel.py            the same without MPI
mpiexec -n 3 python examples/torch_data_parallel.py 3                  three workers, with a launcher or without
"""

import copy
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import spmd
from spmd.bridge import torch as spt

BATCH = 60


def main(net, x, y):
    n, rank = spt.axis_size("data"), spt.worker_index("data")
    train = TensorDataset(x[:1500], y[:1500])
    model = spt.data_parallel(copy.deepcopy(net), "data", reduction="mean")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sampler = DistributedSampler(train, n, rank, seed=0)
    loader = DataLoader(train, BATCH // n, sampler=sampler)

    for epoch in range(1, 6):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            total = total + loss.detach() / len(loader) / n
        total = spt.psum(total, "data")
        with torch.no_grad():
            right = model.module(x[1500:]).argmax(1) == y[1500:]
        if rank == 0:
            print(f"epoch {epoch}  loss {float(total):.4f}  test accuracy {float(right.float().mean()):.1%}")


if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    digits = np.load(Path(__file__).with_name("digits.npz"))
    x, y = torch.tensor(digits["images"] / 16, dtype=torch.float32).flatten(1), torch.tensor(digits["labels"]).long()
    with spmd.Mesh(data=int(sys.argv[1]) if len(sys.argv) > 1 else 2):
        spt.map(main, (None, None, None), None)(net, x, y)
