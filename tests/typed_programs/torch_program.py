"""A typed program of a user of PyTorch. `tests/test_editors.py` checks it by pyright in strict mode, and runs it."""

# Functions of torch itself, as torch.manual_seed and Tensor.backward, have parameters without types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor, nn

import spmd
from spmd import P
from spmd.bridge import torch as spt


def local_loss(x: Tensor, y: Tensor) -> Tensor:
    error = spt.functions.softmax(x, -1) - y
    return assert_type(spt.psum(torch.sum(error**2), "data"), Tensor)


@spt.map(in_specs=P("data"), out_specs=P("data"))
def doubled(x: Tensor) -> Tensor:
    return 2.0 * x


loss = spt.map(local_loss, in_specs=(P("data"), P("data")), out_specs=P())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def train(x: Tensor, y: Tensor) -> Tensor:
    torch.manual_seed(0)
    net = spt.data_parallel(Net(), "data")
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    value = torch.zeros(())
    for _ in range(2):
        optimizer.zero_grad()
        value = spt.psum(torch.sum((net(x) - y) ** 2), "data")
        value.backward()
        optimizer.step()
    return value


def split(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    net = spt.parallelize(Net(), {"up": spt.column("data"), "down": spt.row("data")})
    out: Tensor = net(x)
    return out


def main() -> None:
    x, y = torch.ones(4, 4), torch.zeros(4, 2)
    x.requires_grad_()
    with spmd.Mesh(data=2):
        value = loss(x, x)
        assert_type(value, Tensor)
        value.backward()
        assert_type(doubled(x), Tensor)
        placed: Tensor = spt.put(x.detach(), P("data"))
        print(placed, doubled(placed))
        print(spt.map(train, in_specs=(P("data"), P("data")), out_specs=P())(x.detach(), y))
        print(spt.map(split, in_specs=P(), out_specs=P())(x.detach()))


if __name__ == "__main__":
    main()
