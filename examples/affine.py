"""An affine layer whose input, weights and output lie on different numbers of workers: broadcast, multiply, sum-reduce.

Twelve workers hold the weights as a 4 × 3 grid. Workers 0 to 2 hold the input, in three blocks, and workers 4 to 7 the
output, in four. Every size is uneven. The program prints the layouts, compares the layer and its gradients with NumPy
on one worker, counts the messages, and fits the layer to data.

    python examples/affine.py                         twelve virtual workers
    mpiexec -n 12 python examples/affine.py           processes
    python examples/affine.py --picture affine.png    draws where the arrays lie, and the loss
"""

from __future__ import annotations

import argparse

import numpy as np

import spmd
from spmd import Layout, P

AXES = {"w": 12}
BATCH, FEATURES, TARGETS = 41, 13, 6
STEPS, RATE = 100, 1.0
ROWS, COLUMNS = 4, 3  # of the grid of weights

# All workers with column j of the weights need a copy of block j of the features.
holders = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
x_layout = Layout.grid((BATCH, FEATURES), (1, COLUMNS), AXES, workers=[0, 1, 2])
x_needed = Layout.grid((BATCH, FEATURES), (1, COLUMNS, ROWS), AXES, workers=holders.T.ravel())
w_layout = Layout.grid((TARGETS, FEATURES), (ROWS, COLUMNS), AXES)
b_layout = Layout.grid((TARGETS,), (ROWS,), AXES, workers=[4, 5, 6, 7])
# Each row of the weights gives partial sums of one block of the output, one for each column.
y_parts = Layout.grid((BATCH, TARGETS), (1, ROWS, COLUMNS), AXES, workers=holders.ravel())
y_layout = Layout.grid((BATCH, TARGETS), (1, ROWS), AXES, workers=[4, 5, 6, 7])
ARRAYS = {"input": x_layout, "weights": w_layout, "output": y_layout}


def affine(w, b, x):
    """x wᵀ + b, each array in its own layout."""
    x = spmd.repartition(x, x_layout, x_needed)  # a broadcast along the columns of the grid
    y = spmd.accumulate(x @ w.T, y_parts, y_layout)  # a sum-reduce along its rows
    return y + b


def local_loss(w, b, x, y):
    """The mean squared error, known to all workers."""
    error = affine(w, b, x) - y
    return spmd.psum(np.sum(error * error), "w") / (BATCH * TARGETS)


def draw(path, losses) -> None:
    """Where input, weights and output lie, and the loss of each step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    *shown, curve = figure.subplots(1, 4)
    for ax, (name, layout) in zip(shown, ARRAYS.items(), strict=True):
        rows, columns = layout.shape
        spmd.plot.layout(layout, title=f"{name}, {rows} × {columns}", ax=ax)
    curve.semilogy(losses, color="black")
    curve.set(title="loss", xlabel="step")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", metavar="FILE", help="draw where the arrays lie, and the loss")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    x, true = rng.normal(size=(BATCH, FEATURES)), rng.normal(size=(TARGETS, FEATURES))
    y = x @ true.T + 0.5
    with spmd.Mesh(**AXES):
        if spmd.is_main():
            for name, layout in ARRAYS.items():
                print(layout.picture(name), "\n")
        layer = spmd.map(affine, in_specs=(w_layout, b_layout, x_layout), out_specs=y_layout)
        loss = spmd.map(local_loss, in_specs=(w_layout, b_layout, x_layout, y_layout), out_specs=P())
        parts_x, parts_y = spmd.put((x, y), (x_layout, y_layout))
        w, b = spmd.put((np.zeros((TARGETS, FEATURES)), np.zeros(TARGETS)), (w_layout, b_layout))
        losses, gradients = [], None
        with spmd.ledger() as log:
            for _ in range(STEPS):
                value, (gw, gb) = spmd.value_and_grad(loss, (0, 1))(w, b, parts_x, parts_y)
                gradients = gradients or (gw, gb)  # they lie as the parameters do
                w, b = w - RATE * gw, b - RATE * gb
                losses.append(float(value))
        fitted = layer(w, b, parts_x).numpy()
        gw, gb = (g.numpy() for g in gradients)

    serial = spmd.grad(lambda w, b: np.mean((x @ w.T + b - y) ** 2), (0, 1))
    sw, sb = serial(np.zeros((TARGETS, FEATURES)), np.zeros(TARGETS))
    if spmd.is_main():
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.1e} after {len(losses)} steps")
        print(f"largest error of the fit {np.abs(fitted - y).max():.1e}")
        apart = max(np.abs(gw - sw).max(), np.abs(gb - sb).max())
        print(f"gradients against NumPy on one worker: {apart:.1e} apart")
        print(f"worker 0 sent {log.messages} messages; operators: {dict(log.operators)}")
        if args.picture:
            draw(args.picture, losses)


if __name__ == "__main__":
    main()
