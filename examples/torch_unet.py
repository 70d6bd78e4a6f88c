"""Train a U-Net in PyTorch to segment shapes, split in space on a 2 x 2 mesh of workers, as one worker would.

    python examples/torch_unet.py                           four virtual workers in this process
    mpiexec -n 4 python examples/torch_unet.py              four processes, the same losses
    torchrun --nproc-per-node 4 examples/torch_unet.py      the same, without MPI
    python examples/torch_unet.py --rows 3 --columns 1      another mesh; it need not divide anything
    python examples/torch_unet.py --check                   trains on one worker too, and compares
    python examples/torch_unet.py --picture unet.png        draws input, truth and prediction (with matplotlib)

The program draws the images itself: circles, squares and triangles in noise. Rows of images and of all maps of features
are split over the mesh axis `rows`, and columns over `columns`. A worker fetches the edges of its neighbours' maps that
its own results are made of. Maps of the way down and of the way up lie alike, so that they are joined where they are.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import nn

import spmd
from spmd import P
from spmd.bridge import torch as spt

# How images and maps of features lie on the mesh. Dimensions: image, channel, row, column.
MAPS = P(None, None, "rows", "columns")
LABELS = P(None, "rows", "columns")

CLASSES = "background", "circle", "square", "triangle"


class Norm(nn.BatchNorm2d):
    """`nn.BatchNorm2d` by the statistics of all workers. spec: how the maps lie."""

    def __init__(self, channels: int, spec: P):
        super().__init__(channels)
        self.spec = spec

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        running = self.running_mean, self.running_var
        y, (self.running_mean, self.running_var) = spt.functions.batch_norm(
            input, self.weight, self.bias, running, training=self.training, spec=self.spec
        )
        return y


class UNet(nn.Module):
    """The network of Ronneberger et al. (2015), for images with one channel, with two steps down and up.

    width: the channels of the first maps. size: the rows and columns of images. spec: how the maps lie; None: they are
    whole, and all layers are torch's.
    """

    def __init__(self, width: int, size: int, spec: P | None = None):
        super().__init__()
        self.width, self.size, self.spec = width, size, spec
        self.down = nn.ModuleList([self.double(1, 1, 1), self.double(1, 2, 2), self.double(2, 4, 4)])
        self.pools = nn.ModuleList([self.layer("MaxPool2d", 2, at=at) for at in (1, 2)])
        self.ups = nn.ModuleList(
            [self.layer("ConvTranspose2d", 2 * c * width, c * width, 2, stride=2, at=2 * c) for c in (2, 1)]
        )
        self.joined = nn.ModuleList([self.double(4, 2, 2), self.double(2, 1, 1)])
        self.head = self.layer("Conv2d", width, len(CLASSES), 1, at=1)

    def layer(self, name: str, *args: int, at: int, **options: Any) -> nn.Module:
        """A layer of torch, or the same on blocks. at: how much smaller than the images its input is."""
        if self.spec is None:
            return getattr(nn, name)(*args, **options)
        return getattr(spt.nn, name)(*args, **options, spec=self.spec, in_size=self.size // at)

    def double(self, before: int, after: int, at: int) -> nn.Sequential:
        """Two convolutions with norms. before, after: channels as multiples of the width; images have one channel."""
        taken, made = 1 if at == before == after == 1 else before * self.width, after * self.width
        layers = []
        for channels in (taken, made):
            conv = self.layer("Conv2d", channels, made, 3, padding=1, bias=False, at=at)
            norm = nn.BatchNorm2d(made) if self.spec is None else Norm(made, self.spec)
            layers += [conv, norm, nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [self.down[0](x)]
        for pool, double in zip(self.pools, self.down[1:], strict=True):
            maps.append(double(pool(maps[-1])))
        x = maps.pop()
        for up, double in zip(self.ups, self.joined, strict=True):
            x = double(torch.cat([maps.pop(), up(x)], dim=1))  # all maps lie in balanced blocks
        return self.head(x)


def train(model: UNet, x: torch.Tensor, labels: torch.Tensor, args: argparse.Namespace) -> list[float]:
    """Train a network, whole or on blocks; the losses of all steps."""
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    generator = torch.Generator().manual_seed(args.seed)  # the same minibatches on every worker
    losses = []
    for epoch in range(1, args.epochs + 1):
        batches = torch.randperm(len(x), generator=generator).split(args.batch)[: args.steps]
        for batch in batches:
            optimizer.zero_grad()
            loss = spt.functions.cross_entropy(model(x[batch]), labels[batch], spec=model.spec)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if spmd.is_main():
            mean = sum(losses[-len(batches) :]) / len(batches)
            print(f"epoch {epoch}/{args.epochs}  loss {mean:.8f}", flush=True)
    return losses


def draw(count: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of shapes in noise, (count, 1, size, size), and the classes of their pixels, (count, size, size)."""
    rng = np.random.default_rng(seed)
    row, column = np.mgrid[:size, :size] + 0.5
    labels, images = np.zeros((count, size, size), int), np.zeros((count, size, size))
    for label, image in zip(labels, images, strict=True):
        for _ in range(3):
            kind, radius = rng.integers(1, len(CLASSES)), rng.uniform(0.1, 0.2) * size
            y, x = row - rng.uniform(radius, size - radius), column - rng.uniform(radius, size - radius)
            square = np.maximum(abs(y), abs(x)) < 0.9 * radius
            inside = (y * y + x * x < radius * radius, square, (abs(y) < radius) & (2 * abs(x) < y + radius))[kind - 1]
            label[inside], image[inside] = kind, rng.uniform(0.5, 1)
    images += 0.15 * rng.standard_normal(images.shape)
    return torch.from_numpy(images)[:, None].to(torch.get_default_dtype()), torch.from_numpy(labels)


def main() -> None:
    args = parse_args()
    torch.set_default_dtype(getattr(torch, args.dtype))
    x, labels = draw(args.images, args.size, args.seed)
    x_test, labels_test = draw(64, args.size, args.seed + 1)

    def body(x, labels, x_test):
        model = UNet(args.width, args.size, MAPS)
        losses = train(model, x, labels, args)
        with torch.no_grad():
            predicted = model.eval()(x_test).argmax(1)
        return torch.tensor(losses), [p.detach() for p in model.parameters()], predicted

    with spmd.Mesh(rows=args.rows, columns=args.columns) as mesh:
        torch.manual_seed(args.seed)  # every worker draws the parameters that one worker draws
        run = spt.map(body, (MAPS, LABELS, MAPS), (P(), P(), LABELS), check=not args.unchecked)
        start = time.perf_counter()
        losses, parameters, predicted = run(x, labels, x_test)
        seconds = time.perf_counter() - start
        if not spmd.is_main():
            return
        print(f"pixels of the right class: {(predicted == labels_test).double().mean():.1%} of new images")
        for k, name in enumerate(CLASSES):
            found, there = predicted == k, labels_test == k
            print(f"  {name}: intersection over union {(found & there).sum() / (found | there).sum():.2f}")
        print(f"{mesh}, {mesh.transport.name} transport: {seconds / args.epochs:.1f} s per epoch")
    if args.picture:
        picture(args, x_test, labels_test, predicted)
    if args.check:
        check(args, x, labels, losses.tolist(), parameters)


def check(
    args: argparse.Namespace, x: torch.Tensor, labels: torch.Tensor, losses: list[float], parameters: Any
) -> None:
    """Train on one worker, and tell how far apart the losses and the parameters are."""
    print("\nthe same on one worker")
    torch.manual_seed(args.seed)
    model = UNet(args.width, args.size)
    start = time.perf_counter()
    losses_of_one = train(model, x, labels, args)
    seconds = time.perf_counter() - start
    apart = max(abs(a - b) for a, b in zip(losses, losses_of_one, strict=True))
    apart_at_last = max((a - b).abs().max().item() for a, b in zip(parameters, model.parameters(), strict=True))
    print(f"one worker: {seconds / args.epochs:.1f} s per epoch")
    print(f"losses of {len(losses)} steps: at most {apart:.1e} apart")
    print(f"all parameters at last: at most {apart_at_last:.1e} apart")


def picture(args: argparse.Namespace, x: torch.Tensor, labels: torch.Tensor, predicted: torch.Tensor) -> None:
    """Save input, truth and prediction of some images, with the lines between the blocks of the workers."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: it needs matplotlib")
        return
    shown = 6
    blocks = spmd.Layout((args.size, args.size), P("rows", "columns"), {"rows": args.rows, "columns": args.columns})
    figure = Figure(figsize=(1.5 * shown, 5), layout="constrained")
    grid = figure.subplots(3, shown)
    for title, images, line in zip(("input", "truth", "prediction"), (x[:, 0], labels, predicted), grid, strict=True):
        line[0].set_ylabel(title)
        for axes, image in zip(line, images, strict=False):
            options = {"cmap": "gray"} if title == "input" else {"cmap": "viridis", "vmin": 0, "vmax": len(CLASSES) - 1}
            axes.imshow(image.numpy(), **options)
            axes.set(xticks=[], yticks=[])
            for cut, draw_line in zip(blocks.cuts, (axes.axhline, axes.axvline), strict=True):
                for end in np.cumsum(cut)[:-1]:
                    draw_line(end - 0.5, color="tab:red" if title == "input" else "white", linewidth=1)
    figure.savefig(args.picture, dpi=120)
    print(f"{args.picture}: lines separate the blocks of {args.rows * args.columns} workers")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a U-Net to segment shapes, split over rows and columns.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rows", type=int, default=2, help="workers that share the rows of images and maps")
    parser.add_argument("--columns", type=int, default=2, help="workers that share the columns")
    parser.add_argument("--images", type=int, default=128, help="how many images to draw for training")
    parser.add_argument("--size", type=int, default=32, help="rows and columns of an image, a multiple of 4")
    parser.add_argument("--width", type=int, default=8, help="channels of the first maps")
    parser.add_argument("--epochs", type=int, default=12, help="how often to go through the images")
    parser.add_argument("--steps", type=int, help="steps per epoch; None: through all images")
    parser.add_argument("--batch", type=int, default=8, help="images per step")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate of Adam")
    parser.add_argument("--seed", type=int, default=0, help="of the images, the parameters and the order of the images")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float64", help="of images and parameters")
    parser.add_argument("--check", action="store_true", help="train on one worker too, and compare step by step")
    parser.add_argument("--unchecked", action="store_true", help="a body of plain tensors: spt.map(..., check=False)")
    parser.add_argument("--picture", metavar="FILE", help="draw some images, their classes and the prediction as a PNG")
    return parser.parse_args()


if __name__ == "__main__":
    main()
