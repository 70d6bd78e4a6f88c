"""Train a classifier of handwritten digits by whole steps that are recorded once: value, gradients, clipping, update.

    python examples/recorded_step.py                       four virtual workers in this process
    mpiexec -n 4 python examples/recorded_step.py          four processes: the same file, the same losses
    python examples/recorded_step.py --data 3 --model 1    another mesh; it need not divide the batch or the widths
    python examples/recorded_step.py --picture steps.png   draws how long each step took

The step is written twice: as a body, on the blocks of one worker, and as a function of global arrays. `spmd.jit` runs
the Python of each once, and replays its program from then on.
"""

import argparse
import time
from pathlib import Path

import numpy as np

import spmd
from spmd import P

DIGITS = Path(__file__).with_name("digits.npz")  # see DATA.md

# Every worker along `model` computes some of the hidden features.
SPECS = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None), "b2": P()}


def local_loss(params, x, labels):
    """On this worker's rows of the batch and its part of the hidden features."""
    hidden = spmd.relu(x @ params["w1"] + params["b1"])
    logits = spmd.psum(hidden @ params["w2"], "model") + params["b2"]
    return spmd.mean(spmd.softmax_cross_entropy(logits, labels), "data")


def loss(params, x, labels):
    """The same of global arrays."""
    hidden = np.maximum(x @ params["w1"] + params["b1"], 0)
    logits = hidden @ params["w2"] + params["b2"]
    shifted = logits - logits.max(axis=1, keepdims=True)
    of_label = (shifted * (labels[:, None] == np.arange(10))).sum(axis=1)
    return (np.log(np.exp(shifted).sum(axis=1)) - of_label).mean()


def step_of(loss, optimizer):
    """A whole step of training, for either loss."""

    def step(params, state, x, labels):
        value, grads = spmd.value_and_grad(loss)(params, x, labels)
        grads = spmd.optim.clip_by_global_norm(grads, 1.0)
        params, state = optimizer.update(grads, state, params)
        return params, state, value

    return step


def main():
    args = parse_args()
    rng = np.random.default_rng(0)  # every process draws the same numbers
    digits = np.load(DIGITS)
    x, labels = digits["images"].reshape(-1, 64) / 16, digits["labels"].astype(int)
    drawn = {
        "w1": rng.normal(0, np.sqrt(2 / 64), (64, args.hidden)),
        "b1": np.zeros(args.hidden),
        "w2": rng.normal(0, np.sqrt(2 / args.hidden), (args.hidden, 10)),
        "b2": np.zeros(10),
    }
    # All batches have one shape, for which the step is recorded.
    batches = rng.permutation(len(x))[: len(x) // args.batch * args.batch].reshape(-1, args.batch)
    steps = [batches[k % len(batches)] for k in range(args.steps)]

    optimizer = spmd.optim.adamw(spmd.optim.cosine(0.01, args.steps, warmup=5))
    state_specs = optimizer.specs(SPECS)

    with spmd.Mesh(data=args.data, model=args.model):
        by_body = spmd.map(
            step_of(local_loss, optimizer),
            in_specs=(SPECS, state_specs, P("data"), P("data")),
            out_specs=(SPECS, state_specs, P()),
        )
        ways = {
            "a body": by_body,
            "a body, recorded": spmd.jit(by_body),
            "global arrays": step_of(loss, optimizer),
            "global arrays, recorded": spmd.jit(step_of(loss, optimizer)),
        }
        every = {}
        for name, step in ways.items():
            params = spmd.put(drawn, SPECS)
            state = optimizer.init(params)
            times = []
            for rows in steps:
                batch = spmd.put((x[rows], labels[rows]), P("data"))
                start = time.perf_counter()
                params, state, value = step(params, state, *batch)
                times.append(time.perf_counter() - start)
            last, every[name] = float(value), times
            if spmd.is_main():
                print(f"{name:24} loss {last:.10f}   {np.median(times) * 1e3:6.2f} ms a step")
        if args.picture and spmd.is_main():
            draw(args.picture, every)


def draw(path, every):
    """The times of the steps, by the way in which they are run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3), layout="constrained")
    ax = figure.subplots()
    names = [*reversed(every)]
    boxes = [np.multiply(every[name][1:], 1e3) for name in names]  # the first step records the others
    ax.boxplot(boxes, orientation="horizontal", whis=(5, 95), showfliers=False, medianprops={"color": "#D55E00"})
    ax.set_yticks(range(1, len(names) + 1), names)
    ax.set(title="time of a step: median, quartiles, 5 to 95 %", xlabel="milliseconds", xscale="log")
    ax.grid(axis="x", which="both", alpha=0.3)
    figure.savefig(path, dpi=120)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=int, default=2, help="workers that share a batch")
    parser.add_argument("--model", type=int, default=2, help="workers that share the hidden features")
    parser.add_argument("--batch", type=int, default=64, help="scans per step")
    parser.add_argument("--hidden", type=int, default=32, help="hidden features")
    parser.add_argument("--steps", type=int, default=100, help="steps of training")
    parser.add_argument("--picture", metavar="FILE", help="draw how long each step took")
    return parser.parse_args()


if __name__ == "__main__":
    main()
