"""Train the network of examples/torch_lenet.py, and stop or go on at a checkpoint, on any mesh.

torch_saving.py save FOLDER EPOCHS ROWS CHANNELS    trains so many epochs, and saves
torch_saving.py load FOLDER EPOCHS ROWS CHANNELS    loads, and trains so many epochs more
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import spmd
from spmd import P
from spmd.bridge import torch as spt

_PATH = Path(__file__).resolve().parents[2] / "examples" / "torch_lenet.py"
_SPEC = importlib.util.spec_from_file_location("torch_lenet", _PATH)
lenet = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(lenet)

ARGS = argparse.Namespace(lr=0.05, seed=0, batch=12, steps=2, epochs=3)


def train(model, x, labels, epochs: int, folder: str | None, loads: bool) -> list[float]:
    """As `torch_lenet.train`, with a learning rate that changes, and a checkpoint before or after."""
    optimizer = torch.optim.SGD(model.parameters(), lr=ARGS.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    generator = torch.Generator().manual_seed(ARGS.seed)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "shuffling": generator}
    if loads:
        spmd.load(folder, like=state)
    losses = []
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=generator).split(ARGS.batch)[: ARGS.steps]:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        scheduler.step()
    if folder is not None and not loads:
        spmd.save(folder, state)
    return losses


def run(folder: str | None, epochs: int, rows: int, channels: int, loads: bool = False) -> list[float]:
    """The losses of a run. Other parameters are drawn where a checkpoint is loaded."""
    outer = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(7 if loads else 0)
        whole, (x, labels, _, _) = lenet.lenet(), lenet.load_data(torch.float64, ARGS.seed)

        def body(x, labels):
            return torch.tensor(train(lenet.split(whole), x, labels, epochs, folder, loads))

        with spmd.Mesh(rows=rows, channels=channels):
            return spt.map(body, in_specs=(lenet.IMAGES, P()), out_specs=P())(x, labels).tolist()
    finally:
        torch.set_default_dtype(outer)


if __name__ == "__main__":
    action, folder, *numbers = sys.argv[1:]
    losses = run(folder, *map(int, numbers), loads=action == "load")
    if spmd.is_main():
        print(json.dumps(losses), flush=True)
