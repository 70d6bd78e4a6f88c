"""Full-waveform inversion on a domain that is split over workers: recover wave speeds from recordings.

The wave speeds are made from the elevation of the Jacksboro fault. Four sources at the edges emit waves, and receivers
on all sides record them. The program recovers the speeds from the recordings, by gradients through the steps of the
wave equation. Every worker holds a block of the domain and gets its neighbours' edges by a halo exchange. The gradient,
communication included, comes from the tape. It is compared with an adjoint derived by hand, on one worker.

    python examples/wave.py                          2 x 2 virtual workers
    python examples/wave.py --mesh 3,1 --steps 10    another split, fewer iterations
    mpiexec -n 4 python examples/wave.py             four processes, the same figures
    python examples/wave.py --picture wave.png       draws the speeds and the convergence

It needs SciPy and Matplotlib: pip install "spmd[examples]".
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from scipy.optimize import minimize

import spmd
from spmd import P

SPEC = P(None, "x", "y")  # of fields: shot, row, column


def elevation(points: int) -> np.ndarray:
    """Matplotlib's elevation model, averaged to this number of rows, and scaled to 0 to 1."""
    from matplotlib import cbook

    heights = cbook.get_sample_data("jacksboro_fault_dem.npz")["elevation"].astype(float)
    step = min(heights.shape) // points
    rows = heights[: step * points, : step * points].reshape(points, step, points, step).mean((1, 3))
    return (rows - rows.min()) / (rows.max() - rows.min())


def laplacian(u):
    """The five-point stencil on this worker's block, with zeros beyond the domain."""
    u = spmd.halo_exchange(u, SPEC, widths=(0, 1, 1), boundary=("none", "zero", "zero"))
    return u[:, 2:, 1:-1] + u[:, :-2, 1:-1] + u[:, 1:-1, 2:] + u[:, 1:-1, :-2] - 4.0 * u[:, 1:-1, 1:-1]


def misfit(m, sources, receivers, wavelet, recorded):
    """Half the squared difference of recordings: `recorded` holds them by time, zero where no receiver stands."""

    @spmd.checkpoint  # keeps two fields for each stretch of time, and computes the others again
    def stretch(m, u, old, start):
        total = 0.0
        for t in range(start, min(start + 16, len(wavelet))):
            u, old = 2.0 * u - old + m * laplacian(u) + wavelet[t] * sources, u
            r = receivers * u - recorded[t]
            total = total + np.sum(r * r)
        return u, old, total

    u = old = 0.0 * sources * m
    total = 0.0
    for start in range(0, len(wavelet), 16):
        u, old, part = stretch(m, u, old, start)
        total = total + part
    return 0.5 * spmd.psum(total, ("x", "y"))


def record(m, sources, receivers, wavelet):
    """What the receivers record, by time: the same steps."""
    u = old = 0.0 * sources * m
    fields = []
    for t in range(len(wavelet)):
        u, old = 2.0 * u - old + m * laplacian(u) + wavelet[t] * sources, u
        fields.append(receivers * u)
    return np.stack(fields)


def by_hand(m, sources, receivers, wavelet, recorded):
    """The misfit and its gradient on one worker, by the adjoint of the leapfrog, derived on paper.

    u_(t+1) = 2 u_t - u_(t-1) + m L u_t + s_t has the adjoint  v_t = 2 v_(t+1) - v_(t+2) + L (m v_(t+1)) + r_t, where
    r_t are the residuals, and the gradient is the sum of v_(t+1) L u_t over shots and time. L is symmetric.
    """

    def stencil(u):
        u = np.pad(u, ((0, 0), (1, 1), (1, 1)))
        return u[:, 2:, 1:-1] + u[:, :-2, 1:-1] + u[:, 1:-1, 2:] + u[:, 1:-1, :-2] - 4.0 * u[:, 1:-1, 1:-1]

    u = old = np.zeros_like(sources)
    bent, residuals, value = [], [], 0.0
    for t in range(len(wavelet)):
        bent.append(stencil(u))
        u, old = 2.0 * u - old + m * bent[-1] + wavelet[t] * sources, u
        residuals.append(receivers * u - recorded[t])
        value += 0.5 * np.sum(residuals[-1] ** 2)
    gradient, v, later = np.zeros_like(m), np.zeros_like(sources), np.zeros_like(sources)
    for t in reversed(range(len(wavelet))):
        v, later = 2.0 * v - later + stencil(m * v) + receivers * residuals[t], v
        gradient += np.sum(v * bent[t], 0)
    return value, gradient


def invert(loss, m, steps: int, report):
    """L-BFGS between the speeds that the scheme is stable for; misfits by iteration, and the last model.

    Under MPI every process runs it, on the same bits, and so takes the same steps.
    """
    values: list[float] = []

    def value_and_gradient(flat):
        value, gradient = loss(flat.reshape(m.shape))
        return float(value), np.asarray(gradient).ravel()

    def note(intermediate_result):
        values.append(intermediate_result.fun)
        report(len(values), values[-1])

    options = {"maxiter": steps, "maxcor": 20}
    bounds = [(0.02, 0.45)] * m.size
    found = minimize(
        value_and_gradient, m.ravel(), jac=True, method="L-BFGS-B", bounds=bounds, callback=note, options=options
    )
    return values, found.x.reshape(m.shape)


def draw(path: str, truth, start, found, values) -> None:
    """Squared speeds with the blocks of the workers, and the misfit of each iteration."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 3.8), layout="constrained")
    *maps, curve = figure.subplots(1, 4)
    colours = {"cmap": "terrain", "vmin": truth.min(), "vmax": truth.max()}
    for ax, field, title in zip(maps, (truth, start, found), ("true", "start", "found"), strict=True):
        title = f"squared speed (Δt c / Δx)², {title}"
        spmd.plot.field(spmd.put(field, P("x", "y")), title=title, ax=ax, **colours)
    curve.semilogy(np.array(values) / values[0], "k.-")
    curve.set(title="misfit", xlabel="iteration", ylabel="relative to the start")
    curve.grid(alpha=0.3)
    if spmd.is_main():
        figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="2,2", help="workers along x and y (default 2,2)")
    parser.add_argument("--points", type=int, default=40, help="grid points along each side (default 40)")
    parser.add_argument("--times", type=int, default=160, help="steps of time (default 160)")
    parser.add_argument("--steps", type=int, default=25, help="iterations (default 25)")
    parser.add_argument("--picture", metavar="FILE", help="write a picture")
    args = parser.parse_args()

    n = args.points
    truth = 0.10 + 0.08 * elevation(n)  # (Δt c / Δx)²
    start = np.full_like(truth, truth.mean())
    sources, receivers = np.zeros((4, n, n)), np.zeros((1, n, n))
    for shot, place in enumerate([(1, n // 2), (n - 2, n // 3), (n // 2, 1), (n // 3, n - 2)]):
        sources[shot, *place] = 1.0
    receivers[0, 2::2, 2] = receivers[0, 2::2, -3] = receivers[0, 2, 2::2] = receivers[0, -3, 2::2] = 1.0
    t = 0.18 * (np.arange(args.times) - 16.0)
    wavelet = (1.0 - t * t) * np.exp(-0.5 * t * t)  # Ricker's

    x, y = map(int, args.mesh.split(","))
    with spmd.Mesh(x=x, y=y):
        fields = (P("x", "y"), SPEC, SPEC, P())
        recorded = spmd.map(record, in_specs=fields, out_specs=P(None, None, "x", "y"))(
            truth, sources, receivers, wavelet
        )
        f = spmd.map(misfit, in_specs=(*fields, P(None, None, "x", "y")), out_specs=P())
        loss = lambda m: spmd.value_and_grad(f)(m, sources, receivers, wavelet, recorded)

        value, gradient = loss(start)
        hand_value, hand = by_hand(start, sources, receivers, wavelet, recorded.numpy())
        with spmd.ledger() as log:
            loss(start)
        if spmd.is_main():
            apart = np.abs(gradient - hand).max() / np.abs(hand).max()
            print(f"{n} x {n} points, {args.times} steps of time, 4 shots, {x} x {y} workers")
            print(f"misfit {float(value):.6e}, by hand on one worker {hand_value:.6e}")
            print(f"gradient by the tape against the adjoint by hand: {apart:.1e} apart")
            print(f"a gradient takes {log.messages} messages and {log.bytes / 1e6:.1f} MB of worker 0\n")

        began = time.perf_counter()

        def report(k: int, value: float) -> None:
            if spmd.is_main() and (k % 5 == 0 or k == args.steps):
                print(f"iteration {k:3d}   misfit {value:.3e}   {time.perf_counter() - began:5.1f} s")

        values, found = invert(loss, start, args.steps, report)
        values.insert(0, float(value))
        if args.picture:
            draw(args.picture, truth, start, found, values)
        if spmd.is_main():
            error = np.linalg.norm(found - truth) / np.linalg.norm(start - truth)
            print(f"\nmisfit {values[-1] / values[0]:.1e} of the start, error of the model {error:.2f} of the start")


if __name__ == "__main__":
    main()
