"""Sharded layers in processes: training, checkpoints and movements give what the serial program gives."""

from __future__ import annotations

import torch
from torch import nn

import spmd
from spmd import P
from spmd.bridge import torch as spt

Grid = spt.Grid
MESH = spmd.Mesh(x=4)
F64 = torch.float64


def serial() -> tuple[dict, torch.Tensor]:
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(7, 9, dtype=F64), nn.Tanh(), nn.Linear(9, 6, dtype=F64), nn.Linear(6, 5, dtype=F64))
    x = torch.linspace(-1, 1, 21, dtype=F64).reshape(3, 7)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        optimiser.zero_grad()
        net(x).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
    return net.state_dict(), norm


def main(check: bool, expected: dict, norm: torch.Tensor) -> None:
    k = spmd.worker_index("x")
    net = nn.Sequential(
        spt.nn.Linear(7, 9, w_spec=P("x"), dtype=F64),
        nn.Tanh(),
        spt.nn.Linear(9, 6, w_spec=P(None, "x"), out_spec=P("x"), dtype=F64),
        spt.nn.Linear(
            6, 5, spec=Grid((4, 1)), w_spec=Grid((2, 2), (1, 2, 3, 0)), out_spec=Grid((2,), (3, 1)), dtype=F64
        ),
    )
    x = torch.linspace(-1, 1, 21, dtype=F64).reshape(3, 7)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        optimiser.zero_grad()
        net(x).square().sum().backward()
        found = spt.clip_grad_norm_(net, 1.0)
        optimiser.step()
    torch.testing.assert_close(found, norm.to(F64), rtol=1e-10, atol=1e-10)
    state = net.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)
    other = nn.Sequential(spt.nn.Linear(7, 9, w_spec=P(None, "x"), dtype=F64))
    other.load_state_dict({"0.weight": state["0.weight"], "0.bias": state["0.bias"]})
    linear = other[0].to_torch()
    assert torch.equal(linear.weight, state["0.weight"])

    y = spt.varying(torch.full((k + 1, 2), float(k), requires_grad=True), "x")
    rows = spt.nn.Repartition(P("x"), Grid((2, 1), (3, 0)))(y)
    assert rows.shape == ({0: (5, 2), 3: (5, 2)}.get(k, (0, 0)))
    back = spt.nn.Repartition(Grid((2, 1), (3, 0)), P("x"))(rows)
    assert back.shape == ((3, 2) if k < 2 else (2, 2))
    back.sum().backward()


if __name__ == "__main__":
    expected, norm = serial()
    for check in (True, False):
        torch.manual_seed(3)
        spt.map(main, None, None, mesh=MESH, check=check)(check, expected, norm)
    print(f"rank {MESH.local_workers[0]} is through\n", end="", flush=True)
