"""Find where water stood high from what gauges recorded later: a time-stepping loop, its gradient, and its memory.

    python examples/shallow_water.py                     four virtual workers
    mpiexec -n 4 python examples/shallow_water.py        four processes: the same numbers
    python examples/shallow_water.py --picture a.png     draws the true height, the found one, and the gauges

The loop is `spmd.scan`. Under `spmd.jit` one step is recorded once, forward and back. With checkpoint="sqrt" the
gradient keeps a few states, and runs the steps between them again.
"""

import argparse

import numpy as np

import spmd
from spmd import P

PLANE = P("x", "y")


def step(state, gauges):
    """One step of the shallow water equations on this worker's block, periodic; y: the heights at the gauges."""
    h, u, v = state
    wide = spmd.halo_exchange(h, PLANE, widths=((0, 1), (0, 1)), boundary="periodic")
    here, right, above = wide[:-1, :-1], wide[1:, :-1], wide[:-1, 1:]
    u, v = u - 0.3 * (right - here), v - 0.3 * (above - here)
    across = spmd.halo_exchange(u * (here + right) / 2, PLANE, widths=((1, 0), (0, 0)), boundary="periodic")
    along = spmd.halo_exchange(v * (here + above) / 2, PLANE, widths=((0, 0), (1, 0)), boundary="periodic")
    h = h - 0.3 * (across[1:] - across[:-1] + along[:, 1:] - along[:, :-1])
    return (h, u, v), spmd.psum(np.sum(gauges * h, (1, 2)), ("x", "y"))


def record(h, gauges, steps, checkpoint=None):
    """What the gauges record in so many steps, from water that stands at height h."""
    _, heights = spmd.scan(lambda s, _: step(s, gauges), (h, 0 * h, 0 * h), length=steps, checkpoint=checkpoint)
    return heights


def misfit(h, gauges, recorded, steps, checkpoint):
    return np.sum((record(h, gauges, steps, checkpoint) - recorded) ** 2)


def draw(path, truth, found, gauges, misfits) -> None:
    """The true and the found height with the blocks of workers and the gauges, and the misfit of each iteration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.8), layout="constrained")
    *maps, curve = figure.subplots(1, 3)
    _, rows, columns = np.nonzero(gauges)
    for ax, name, height in zip(maps, ("true height and gauges", "found height"), (truth, found), strict=True):
        spmd.plot.field(spmd.put(height, PLANE), title=name, vmin=truth.min(), vmax=truth.max(), ax=ax)
    maps[0].plot(columns, rows, "o", color="#D55E00", markeredgecolor="white")
    curve.semilogy(misfits, ".-", color="black")
    curve.set(title="misfit", xlabel="iteration")
    if spmd.is_main():
        figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="2,2", help="workers along x and y (default 2,2)")
    parser.add_argument("--points", type=int, default=24, help="points along each side (default 24)")
    parser.add_argument("--steps", type=int, default=40, help="steps of time (default 40)")
    parser.add_argument("--iterations", type=int, default=30, help="of the search (default 30)")
    parser.add_argument("--picture", metavar="FILE", help="draw the true height, the found one, and the gauges")
    args = parser.parse_args()

    x, y = np.meshgrid(*[np.linspace(-1, 1, args.points)] * 2, indexing="ij")
    truth, h = 1 + 0.3 * np.exp(-12 * ((x - 0.3) ** 2 + (y + 0.2) ** 2)), np.ones_like(x)
    gauges = np.zeros((16, *h.shape))
    gauges[np.arange(16), np.arange(16) * 7 % args.points, np.arange(16) * 5 % args.points] = 1.0
    specs = (PLANE, P(None, "x", "y"))
    with spmd.Mesh(**dict(zip("xy", map(int, args.mesh.split(",")), strict=True))):
        recorded = spmd.map(record, (*specs, None), P())(truth, gauges, args.steps)
        loss = spmd.value_and_grad(spmd.jit(spmd.map(misfit, (*specs, P(), None, None), P())))
        (value, g), (_, every) = (loss(h, gauges, recorded, args.steps, c) for c in ("sqrt", None))
        apart = np.abs(np.asarray(g) - np.asarray(every)).max() / np.abs(np.asarray(every)).max()
        search = spmd.optim.adam(0.02)
        state, misfits = search.init(h), [float(value)]
        for _ in spmd.progress(range(args.iterations), label="search"):
            h, state = search.update(np.asarray(g), state, h)
            value, g = loss(h, gauges, recorded, args.steps, "sqrt")
            misfits.append(float(value))
        if args.picture:
            draw(args.picture, truth, h, gauges, misfits)
        if spmd.is_main():
            print(f"gradients of all states kept, and of few: {apart:.1e} apart")
            print(f"misfit {misfits[0]:.3e} at first, {misfits[-1]:.3e} after {args.iterations} iterations")
            print(f"error of the height {np.abs(h - truth).max() / 0.3:.2f} of the mound")


if __name__ == "__main__":
    main()
