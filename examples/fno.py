"""Train a Fourier neural operator: from the permeability of the ground to the pressure of the water in it.

Darcy's law: -div(a grad u) = 1 on the unit square, u = 0 at its edges. Random permeabilities a have two values, and the
program solves for u by finite differences. The network (Li et al., 2021) learns the map from a to u. The batch, the
channels and the rows of the grid are split over the mesh axes `data`, `model` and `space`.

    python examples/fno.py                                   2 x 1 x 2 virtual workers
    python examples/fno.py --data 1 --model 3 --space 1      another mesh, the same losses
    mpiexec -n 4 python examples/fno.py                      four processes, the same losses
    python examples/fno.py --picture fno.png                 draws truth, prediction, and which worker holds what

It needs SciPy, and Matplotlib for the picture: pip install "spmd[examples]".
"""

from __future__ import annotations

import argparse

import numpy as np
import scipy.fft
import scipy.sparse
import scipy.sparse.linalg

import spmd
from spmd import P
from spmd.functions import gelu, linear, spectral_conv

FIELD = P("data", "space")  # samples, rows, columns, channels; the channels are whole
HIDDEN = P("data", "space", None, "model")
MODES = P("data", "model", "space")  # the same with the channels before the rows, as spectral_conv takes it
COLUMNS = (P("model"), P("model"))  # the specs of the weights and biases of a layer that splits its outputs


def permeability(rng, points):
    """3 or 12 in each cell, by the sign of a smooth random field."""
    k = np.pi * np.arange(points)
    decay = 1 / (k[:, None] ** 2 + k**2 + 9)
    smooth = scipy.fft.idctn(rng.standard_normal((points, points)) * decay, norm="ortho")
    return np.where(smooth > 0, 12.0, 3.0)


def pressure(a):
    """The solution for a permeability in cells: the flow between two cells sees the harmonic mean of their values."""
    n = len(a)
    index = np.arange(n * n).reshape(n, n)
    rows, columns, values = [], [], []
    diagonal = np.zeros((n, n))
    for axis in (0, 1):
        low, high = np.take(index, range(n - 1), axis), np.take(index, range(1, n), axis)
        mean = 2 / (1 / a.flat[low] + 1 / a.flat[high])
        rows += [low.ravel(), high.ravel()]
        columns += [high.ravel(), low.ravel()]
        values += [-mean.ravel()] * 2
        np.add.at(diagonal.reshape(-1), low, mean)
        np.add.at(diagonal.reshape(-1), high, mean)
        for edge in (0, -1):  # half a cell from the middle to the edge of the square
            at = (slice(None),) * axis + (edge,)
            diagonal[at] += 2 * a[at]
    inner = np.concatenate([*rows, index.ravel()]), np.concatenate([*columns, index.ravel()])
    values = np.concatenate([*values, diagonal.ravel()])
    matrix = scipy.sparse.csc_array((values * n**2, inner), shape=(n * n, n * n))
    return scipy.sparse.linalg.spsolve(matrix, np.ones(n * n)).reshape(n, n)


def samples(rng, count, points):
    """Inputs, of which the channels are the permeability and the coordinates, and the solutions."""
    a = np.stack([permeability(rng, points) for _ in range(count)])
    u = np.stack([pressure(each) for each in a])
    middle = (np.arange(points) + 0.5) / points
    x, y = np.broadcast_arrays(middle[:, None], middle)
    grid = np.broadcast_to(np.stack([x, y], -1), (count, points, points, 2))
    return np.concatenate([(a[..., None] - 7.5) / 4.5, grid], -1), 100 * u


def draw_params(rng, width, modes, layers):
    """Random weights of a layer that lifts, of those with Fourier modes, and of two that project."""

    def pointwise(n, m):
        return rng.normal(0, 1 / np.sqrt(n), (m, n)), np.zeros(m)

    shape = (2, width, width, modes, modes // 2 + 1)  # real and imaginary parts
    fourier = [(rng.normal(0, 1 / width, shape), pointwise(width, width)) for _ in range(layers)]
    return pointwise(3, width), fourier, (pointwise(width, 2 * width), pointwise(2 * width, 1))


def param_specs(layers):
    return COLUMNS, [(P(None, None, "model"), COLUMNS)] * layers, (COLUMNS, (P(None, "model"), P()))


def network(params, x):
    """The pressures of this worker's block: of its samples and rows, the same on all workers along `model`."""
    lift, fourier, (widen, project) = params
    v = linear(x, *lift, spec=FIELD, w_spec=P("model"))
    for parts, pointwise in fourier:
        modes = spectral_conv(np.moveaxis(v, -1, 1), parts[0] + 1j * parts[1], spec=MODES, w_spec=P(None, "model"))
        v = gelu(np.moveaxis(modes, 1, -1) + linear(v, *pointwise, spec=HIDDEN, w_spec=P("model")))
    v = gelu(linear(v, *widen, spec=HIDDEN, w_spec=P("model")))
    u = linear(v, *project, spec=HIDDEN, w_spec=P(None, "model"))[..., 0]
    return u * np.sin(np.pi * x[..., 1]) * np.sin(np.pi * x[..., 2])  # zero at the edges


def relative_error(params, x, u):
    """The mean over samples of the norm of the error over that of the solution."""
    squares = lambda v: spmd.psum(np.sum(v * v, (1, 2)), "space")
    return spmd.mean(np.sqrt(squares(network(params, x) - u) / squares(u)), "data")


def draw(path, a, truth, guess, layout):
    """Permeability, truth, prediction and error of the first sample, and the blocks of its rows on the workers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    holders = {}
    for worker in range(layout.size):
        (start, stop), (top, bottom), _ = layout.boxes[worker]
        if start == 0 < stop and top < bottom:
            holders.setdefault((top, bottom), []).append(worker)
    figure, axes = plt.subplots(1, 4, figsize=(15, 3.8), constrained_layout=True)
    limits = {"vmin": 0, "vmax": truth.max()}
    error, most = guess - truth, abs(guess - truth).max()
    panels = [("permeability", a, {}), ("solver", truth, limits), ("network", guess, limits)]
    panels += [("error", error, {"cmap": "RdBu", "vmin": -most, "vmax": most})]
    for axis, (title, field, options) in zip(axes, panels, strict=True):
        image = axis.imshow(field, **options)
        axis.set(title=title, xticks=[], yticks=[])
        figure.colorbar(image, ax=axis, shrink=0.85)
        for (top, bottom), workers in holders.items():
            if bottom < len(a):
                axis.axhline(bottom - 0.5, color="white" if field is not error else "black", lw=2)
            label = f"worker{'s' * (len(workers) > 1)} {', '.join(map(str, workers))}"
            if axis is axes[0]:
                axis.text(-1, (top + bottom) / 2, label, rotation=90, ha="right", va="center")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=int, default=2, help="workers along the samples (default 2)")
    parser.add_argument("--model", type=int, default=1, help="workers along the channels (default 1)")
    parser.add_argument("--space", type=int, default=2, help="workers along the rows of the grid (default 2)")
    parser.add_argument("--points", type=int, default=24, help="cells along each side (default 24)")
    parser.add_argument("--samples", type=int, default=96, help="to train on; a quarter more to test (default 96)")
    parser.add_argument("--width", type=int, default=12, help="channels (default 12)")
    parser.add_argument("--modes", type=int, default=9, help="Fourier modes along each side (default 9)")
    parser.add_argument("--layers", type=int, default=3, help="with Fourier modes (default 3)")
    parser.add_argument("--epochs", type=int, default=25, help="default 25")
    parser.add_argument("--batch", type=int, default=16, help="samples of a step (default 16)")
    parser.add_argument("--picture", metavar="PATH", help="write a picture")
    args = parser.parse_args()

    rng = np.random.default_rng(0)  # every process draws the same numbers
    x, u = samples(rng, args.samples + args.samples // 4, args.points)
    x, u, x_test, u_test = x[: args.samples], u[: args.samples], x[args.samples :], u[args.samples :]
    specs = param_specs(args.layers)
    with spmd.Mesh(data=args.data, model=args.model, space=args.space):
        loss = spmd.map(relative_error, in_specs=(specs, FIELD, FIELD), out_specs=P())
        predict = spmd.map(network, in_specs=(specs, FIELD), out_specs=FIELD)
        step = spmd.value_and_grad(spmd.jit(loss))
        params = spmd.put(draw_params(rng, args.width, args.modes, args.layers), specs)
        steps = args.epochs * (args.samples // args.batch)
        optimizer = spmd.optim.adam(lambda t: 0.01 * np.cos(np.pi / 2 * t / steps))
        state = optimizer.init(params)
        for epoch in range(args.epochs):
            total, order = 0.0, rng.permutation(args.samples)
            for k in range(args.samples // args.batch):
                chosen = order[k * args.batch : (k + 1) * args.batch]
                value, grads = step(params, x[chosen], u[chosen])
                params, state = optimizer.update(grads, state, params)
                total += float(value) / (args.samples // args.batch)
            if spmd.is_main() and (epoch % 5 == 4 or epoch in (0, args.epochs - 1)):
                print(f"epoch {epoch + 1:3}: loss {total:.10f}")
        error = float(loss(params, x_test, u_test))
        guess = predict(params, x_test)
        layout, guess = guess.layout, guess.numpy()
        if spmd.is_main():
            blank = np.linalg.norm(u_test - u.mean(0)) / np.linalg.norm(u_test)
            print(f"relative error against the solver {error:.4f}; the mean of all solutions has {blank:.4f}")
            if args.picture:
                draw(args.picture, 7.5 + 4.5 * x_test[0, ..., 0], u_test[0] / 100, guess[0] / 100, layout)
                print(f"drawn: {args.picture}")


if __name__ == "__main__":
    main()
