"""An affine layer whose input, weights and output lie on different numbers of workers: broadcast, multiply, sum-reduce.

Twelve workers hold the weights as a 4 × 3 grid. The input comes in three blocks, on workers 0 to 2; the output leaves
in four, on workers 4 to 7. Every size is uneven. The program prints who holds what, checks the layer and its gradients
against NumPy on one worker, counts the messages, and fits the layer to data.

Run: python examples/affine.py, or mpiexec -n 12 python examples/affine.py.
"""

from __future__ import annotations

import numpy as np

import spmd
from spmd import Layout

AXES = {"w": 12}
BATCH, FEATURES, TARGETS = 41, 13, 6
ROWS, COLUMNS = 4, 3  # of the grid of weights

# Block j of the features is needed by all that hold column j of the weights: a copy each, of values that vary.
holders = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
x_layout = Layout.grid((BATCH, FEATURES), (1, COLUMNS), AXES, workers=[0, 1, 2])
x_needed = Layout.grid((BATCH, FEATURES), (1, COLUMNS, ROWS), AXES, workers=holders.T.ravel())
w_layout = Layout.grid((TARGETS, FEATURES), (ROWS, COLUMNS), AXES)
b_layout = Layout.grid((TARGETS,), (ROWS,), AXES, workers=[4, 5, 6, 7])
# Each row of the weights gives partial sums of one block of the output, one for each column.
y_parts = Layout.grid((BATCH, TARGETS), (1, ROWS, COLUMNS), AXES, workers=holders.ravel())
y_layout = Layout.grid((BATCH, TARGETS), (1, ROWS), AXES, workers=[4, 5, 6, 7])


def affine(w, b, x):
    """x wᵀ + b, each array in its own layout."""
    x = spmd.repartition(x, x_layout, x_needed)  # a broadcast along the columns of the grid
    y = spmd.accumulate(x @ w.T, y_parts, y_layout)  # a sum-reduce along its rows
    return y + b


def loss(w, b, x, y):
    """The mean squared error, known to all workers."""
    error = affine(w, b, x) - y
    return spmd.psum(np.sum(error * error), "w") / (BATCH * TARGETS)


def blocks(layout: Layout, whole: np.ndarray):
    """This worker's block of an array."""
    k = spmd.worker_index("w")
    block = np.zeros(layout.block_shape(k)) if layout.positions(k) is None else whole[layout.slices(k)]
    return spmd.varying(block, "w")


def assembled(layout: Layout, block):
    """The whole array, on every worker."""
    everyone = Layout(layout.shape, spmd.P(), AXES)
    return spmd.repartition(block, layout, everyone)


def train(w, b, x, y, steps: int, rate: float):
    """Losses of gradient descent, and the whole gradients of the first step."""

    def body(w, b, x, y):
        w, b = blocks(w_layout, spmd.block(w)), blocks(b_layout, spmd.block(b))
        x, y = blocks(x_layout, spmd.block(x)), blocks(y_layout, spmd.block(y))
        losses, first = [], None
        for _ in range(steps):
            value, (gw, gb) = spmd.value_and_grad(loss, (0, 1))(w, b, x, y)
            first = first or (assembled(w_layout, gw), assembled(b_layout, gb))
            w, b = w - rate * gw, b - rate * gb
            losses.append(value)
        return np.stack(losses), first, assembled(y_layout, affine(w, b, x))

    P = spmd.P
    return spmd.map(body, in_specs=(P(), P(), P(), P()), out_specs=(P(), (P(), P()), P()))(w, b, x, y)


def main() -> None:
    rng = np.random.default_rng(0)
    x, true = rng.normal(size=(BATCH, FEATURES)), rng.normal(size=(TARGETS, FEATURES))
    y = x @ true.T + 0.5
    w, b = np.zeros((TARGETS, FEATURES)), np.zeros(TARGETS)
    with spmd.Mesh(**AXES):
        if spmd.is_main():
            for name, layout in {"input": x_layout, "weights": w_layout, "output": y_layout}.items():
                print(layout.picture(name), "\n")
        with spmd.ledger() as log:
            losses, (gw, gb), fitted = train(w, b, x, y, steps=300, rate=0.5)

    serial = spmd.grad(lambda w, b: np.mean((x @ w.T + b - y) ** 2), (0, 1))
    sw, sb = serial(w, b)
    if spmd.is_main():
        losses = losses.numpy()
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.1e} after {len(losses)} steps")
        print(f"largest error of the fit {np.abs(fitted.numpy() - y).max():.1e}")
        apart = max(np.abs(gw.numpy() - sw).max(), np.abs(gb.numpy() - sb).max())
        print(f"gradients against NumPy on one worker: {apart:.1e} apart")
        print(f"worker 0 sent {log.messages} messages; operators: {dict(log.operators)}")


if __name__ == "__main__":
    main()
