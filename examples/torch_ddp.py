"""Train a classifier of handwritten digits with torch's DistributedDataParallel; torch_data_parallel.py is its port.

torchrun --nproc-per-node 2 examples/torch_ddp.py
"""

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 60


def main(net, x, y):
    n, rank = dist.get_world_size(), dist.get_rank()
    train = TensorDataset(x[:1500], y[:1500])
    model = DistributedDataParallel(net)
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
        dist.all_reduce(total)
        with torch.no_grad():
            right = model.module(x[1500:]).argmax(1) == y[1500:]
        if rank == 0:
            print(f"epoch {epoch}  loss {float(total):.4f}  test accuracy {float(right.float().mean()):.1%}")


if __name__ == "__main__":
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    digits = np.load(Path(__file__).with_name("digits.npz"))
    x, y = torch.tensor(digits["images"] / 16, dtype=torch.float32).flatten(1), torch.tensor(digits["labels"]).long()
    dist.init_process_group("gloo")
    main(net, x, y)
    dist.destroy_process_group()
