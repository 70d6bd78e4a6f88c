"""Plain modules, split by plans, train in processes as on one worker."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch import nn

import spmd
from spmd import P
from spmd.bridge import torch as spt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bridge.torch.plans.plain_models import GPT, UNet

MESH = spmd.Mesh(data=2, model=2)
LANGUAGE = {
    "*.attn": spt.heads("model"),
    "*.up": spt.column("model"),
    "*.down": spt.row("model", sequence=1),
    "norm*": spt.sequence("model"),
    "embed": spt.vocab("model"),
    "head": spt.vocab("model"),
}


def train(net: nn.Module, args: tuple[torch.Tensor, ...]) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-6)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(*args)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(make, plan, args) -> None:
    torch.manual_seed(0)
    net = make().double()
    whole = copy.deepcopy(net)
    expected = train(whole, args)
    for check in (True, False):

        def body():
            split = spt.parallelize(net, plan)
            losses = train(split, tuple(spt.put(x, P("data")) for x in args))
            state = spt.state_dict(split)
            assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-10
            for name, value in whole.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-10)

        spt.map(body, (), None, mesh=MESH, check=check)()


text = torch.randint(1, 11, (5, 7), generator=torch.Generator().manual_seed(1))
main(GPT, LANGUAGE, (text, text.flip(0)))
images = torch.randn(3, 1, 24, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
labels = torch.randint(0, 3, (3, 24, 20), generator=torch.Generator().manual_seed(3))
main(UNet, {"enter": spt.spatial(P("data", None, "model"))}, (images, labels))
print("plans hold", flush=True)
