"""Train LeNet-5 in PyTorch on real digits, on a 2 x 2 mesh of workers, as one worker would.

    python examples/torch_lenet.py                          four virtual workers in this process
    mpiexec -n 4 python examples/torch_lenet.py             four processes, the same losses
    torchrun --nproc-per-node 4 examples/torch_lenet.py     the same, without MPI
    python examples/torch_lenet.py --rows 3 --channels 1    another mesh; it need not divide anything
    python examples/torch_lenet.py --check                  trains on one worker too, and compares
    python examples/torch_lenet.py --picture lenet.png      draws the losses, and scans with the cut between workers

The images and all maps of features are split over the mesh axis `rows`: a worker fetches the edges of its neighbours'
rows that its own results are made of. Channels are split over the axis `channels`: the first convolution makes some of
them on each worker, the second takes those, and one sum over `channels` completes it. The linear layers split features
over all workers.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import P
from spmd.bridge import torch as spt

DIGITS = Path(__file__).with_name("digits.npz")  # see DATA.md

# How images and maps of features lie on the mesh. Dimensions: image, channel, row, column.
IMAGES = P(None, None, "rows")
MAPS = P(None, "channels", "rows")
WORKERS = ("rows", "channels")  # those that split the features between linear layers


def lenet() -> nn.Sequential:
    """The network of LeCun et al. (1998), for images of 32 x 32 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
    )


def split(whole: nn.Sequential) -> nn.Sequential:
    """The same network, with the same parameters, on blocks."""
    conv1, _, pool1, conv2, _, pool2, _, linear1, _, linear2, _, linear3 = whole
    n = spt.nn
    return nn.Sequential(
        *(n.Conv2d.from_torch(conv1, spec=IMAGES, out_spec=MAPS, in_size=32), nn.Tanh()),
        n.AvgPool2d.from_torch(pool1, spec=MAPS, in_size=28),
        # Every worker gets the whole maps, which are small: rows of blocks are no consecutive features.
        *(n.Conv2d.from_torch(conv2, spec=MAPS, out_spec=P(), in_size=14), nn.Tanh(), pool2, nn.Flatten()),
        *(n.Linear.from_torch(linear1, w_spec=P(WORKERS)), nn.Tanh()),
        *(n.Linear.from_torch(linear2, w_spec=P(None, WORKERS)), nn.Tanh()),
        n.Linear.from_torch(linear3),
    )


def gathered(module: nn.Module) -> list[torch.Tensor]:
    """The parameters of a network on blocks as whole tensors."""
    return list(spt.state_dict(module).values())


def train(model: nn.Module, x: torch.Tensor, labels: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """Train a network, whole or in blocks; the losses of all steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    generator = torch.Generator().manual_seed(args.seed)  # the same minibatches on every worker
    losses = []
    for epoch in range(1, args.epochs + 1):
        batches = torch.randperm(len(x), generator=generator).split(args.batch)[: args.steps]
        for batch in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if spmd.is_main():
            mean = sum(losses[-len(batches) :]) / len(batches)
            print(f"epoch {epoch}/{args.epochs}  loss {mean:.8f}", flush=True)
    return losses


def load_data(dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, ...]:
    """1797 scans of 8 x 8 pixels, enlarged to 32 x 32, and their labels: 80 % to train on, each also shifted in four
    directions, and 20 % to test."""
    digits = np.load(DIGITS)
    images, labels = torch.from_numpy(digits["images"]), torch.from_numpy(digits["labels"].astype(int))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x = F.interpolate(images.to(dtype)[order, None] / 16, size=(32, 32), mode="bilinear")
    labels = labels[order]
    n, (row, column) = len(x) // 5, (2, 3)
    shifts = [(0, row), (2, row), (-2, row), (2, column), (-2, column)]
    shifted = torch.cat([x[n:].roll(by, dimension) for by, dimension in shifts])
    return shifted, labels[n:].repeat(len(shifts)), x[:n], labels[:n]


def main() -> None:
    args = parse_args()
    torch.set_default_dtype(getattr(torch, args.dtype))
    torch.manual_seed(args.seed)  # every process draws the same parameters
    whole, (x, labels, x_test, labels_test) = lenet(), load_data(torch.get_default_dtype(), args.seed)

    def body(x, labels, x_test, labels_test):
        model = split(whole)
        losses = train(model, x, labels, args)
        with torch.no_grad():
            guesses = model(x_test).argmax(1)
        return torch.tensor(losses), gathered(model), (guesses == labels_test).double().mean(), guesses

    with spmd.Mesh(rows=args.rows, channels=args.channels) as mesh:
        run = spt.map(body, in_specs=(IMAGES, P(), IMAGES, P()), out_specs=P(), check=not args.unchecked)
        start = time.perf_counter()
        losses, parameters, accuracy, guesses = run(x, labels, x_test, labels_test)
        seconds = time.perf_counter() - start
        if spmd.is_main():
            print(f"test accuracy {accuracy:.1%}")
            print(f"{mesh}, {mesh.transport.name} transport: {seconds / args.epochs:.1f} s per epoch")
            if args.picture:
                draw(args, losses, x_test, labels_test, guesses)
        if args.check and spmd.is_main():
            print("\nthe same on one worker")
            start = time.perf_counter()
            losses_of_one = train(whole, x, labels, args)
            seconds = time.perf_counter() - start
            apart = max(abs(a - b) for a, b in zip(losses.tolist(), losses_of_one, strict=True))
            pairs = zip(parameters, whole.parameters(), strict=True)
            apart_at_last = max((a.reshape(b.shape) - b).abs().max().item() for a, b in pairs)
            print(f"one worker: {seconds / args.epochs:.1f} s per epoch")
            print(f"losses of {len(losses)} steps: at most {apart:.1e} apart")
            print(f"all parameters at last: at most {apart_at_last:.1e} apart")


def draw(args: argparse.Namespace, losses, scans, labels, guesses) -> None:
    """The loss of each step, and some scans that were not trained on, with the cuts between the workers' rows."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.8), layout="constrained")
    left, right = figure.subfigures(1, 2)
    curve = left.subplots()
    curve.semilogy(range(1, len(losses) + 1), losses, color="black", linewidth=0.8)
    curve.set(title="loss", xlabel="step")
    right.suptitle("test scans, as the network reads them; lines between workers", fontsize="medium")
    cuts = np.cumsum(spmd.Layout((32,), P("rows"), {"rows": args.rows}).cuts[0])[:-1]
    for ax, scan, label, guess in zip(right.subplots(2, 5).flat, scans, labels, guesses, strict=False):
        ax.imshow(scan[0], cmap="gray_r")
        ax.set_title(f"{int(guess)}", fontsize="small", color="black" if guess == label else "#D55E00", pad=2)
        ax.set_axis_off()
        for cut in cuts:
            ax.axhline(cut - 0.5, color="#0072B2", linewidth=1.5)
    figure.savefig(args.picture, dpi=120)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train LeNet-5 on digits, split over rows and channels.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=2, help="workers that share the rows of images and maps")
    parser.add_argument("--channels", type=int, default=2, help="workers that share the channels")
    parser.add_argument("--epochs", type=int, default=5, help="how often to go through the data")
    parser.add_argument("--steps", type=int, help="steps per epoch; None: through all the data")
    parser.add_argument("--batch", type=int, default=64, help="scans per step")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of SGD with momentum 0.9")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the parameters and the order of the scans")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64", help="of data and parameters")
    parser.add_argument("--picture", metavar="FILE", help="draw the losses, and scans with the cut between workers")
    parser.add_argument("--check", action="store_true", help="train on one worker too, and compare step by step")
    parser.add_argument("--unchecked", action="store_true", help="a body of plain tensors: spt.map(..., check=False)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
