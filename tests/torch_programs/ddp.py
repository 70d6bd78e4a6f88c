"""Ten steps of torch's DistributedDataParallel in two processes, over gloo; prints the parameters as JSON."""

import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def randn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(rank, n, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=n)
    net = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 4))
    for k, p in enumerate(net.parameters()):
        p.data.copy_(randn(*p.shape, seed=1000 + k))
    model = DistributedDataParallel(net)
    steps = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for k in range(10):
        x, t = randn(16, 20, seed=k), randn(16, 4, seed=100 + k)
        rows = slice(16 // n * rank, 16 // n * (rank + 1))
        steps.zero_grad()
        F.mse_loss(model(x[rows]), t[rows]).backward()
        steps.step()
    dist.barrier()
    if rank == 0:
        # The buffers of the others are those of the first before the next forward only.
        found = {name: v.double().tolist() for name, v in net.state_dict().items()}
        Path(folder, "found").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(train, (2, folder), nprocs=2)
        print(Path(folder, "found").read_text())
