"""A run that is killed again and again, and goes on, each time on another mesh.

    python examples/restart.py                               the whole story: four runs, three of which kill themselves
    python examples/restart.py --folder run --kill-in 35     one run, which saves there and kills itself in step 35
    mpiexec -n 4 python examples/restart.py --folder run     another one, of four processes, which goes on from there
    python examples/restart.py --picture restart.png         draws the losses of the whole story

The parameters of a small network, the state of its optimiser, the generator that draws the batches and the step are
saved in the background every five steps. `--kill-in` sends SIGKILL, which no program can catch: files that were being
written stay as they are. The last checkpoint that is whole is loaded, onto whatever mesh there is.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile

import numpy as np

import spmd
from spmd import P

SPECS = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model")}
STORY = [
    ("two by two workers", ["--data", "2", "--model", "2", "--kill-in", "12"]),
    ("three by one", ["--data", "3", "--model", "1", "--kill-in", "31"]),
    ("one by five", ["--data", "1", "--model", "5", "--kill-in", "44"]),
    ("one worker", ["--data", "1", "--model", "1"]),
]


def local_loss(params, x, y):
    """The mean squared error over the whole batch, of this worker's share of the batch and of the hidden features."""
    hidden = np.tanh(x @ params["w1"] + params["b1"])
    return spmd.mean((spmd.psum(hidden @ params["w2"], "model") - y) ** 2, "data")


def train(args):
    """Train from the last checkpoint in the folder on. The last loss."""
    rng = np.random.default_rng(0)  # every process draws the same numbers
    drawn = {"w1": rng.normal(size=(8, 30)), "b1": np.zeros(30), "w2": rng.normal(size=30) / 30}
    optimizer = spmd.optim.adam(0.01)
    loss = spmd.map(local_loss, in_specs=(SPECS, P("data"), P("data")), out_specs=P())
    loss_and_grads = spmd.value_and_grad(loss)
    with spmd.Mesh(data=args.data, model=args.model) as mesh:
        params = spmd.put(drawn, SPECS)
        losses = np.full(args.steps, np.nan)
        run = {"params": params, "optimizer": optimizer.init(params), "rng": rng, "step": 0, "losses": losses}
        checkpoints = spmd.io.CheckpointManager(args.folder, max_to_keep=2)
        if checkpoints.latest() is not None:
            run = checkpoints.restore(like=run)
        say(f"  {mesh}: from step {run['step']} on")
        while run["step"] < args.steps:
            x = rng.normal(size=(50, 8))  # the generator of `run` is this one: it was loaded in place
            value, grads = loss_and_grads(run["params"], x, np.sin(x).sum(axis=1))
            params, state = optimizer.update(grads, run["optimizer"], run["params"])
            run["losses"][run["step"]] = value
            run |= {"params": params, "optimizer": state, "step": run["step"] + 1}
            if run["step"] % 5 == 0:
                checkpoints.save(run["step"], run)
            if run["step"] == args.kill_in:
                say(f"  killed in step {run['step']}, loss {float(value):.12f}")
                os.kill(os.getpid(), signal.SIGKILL)
        say(f"  step {run['step']}, loss {float(value):.12f}")
        checkpoints.wait()


def say(text):
    if spmd.is_main():
        print(text, flush=True)


def tell_story(args):
    """Run this file four times, each time on the folder that the run before has left; then once without a break."""
    with tempfile.TemporaryDirectory() as folder:
        for workers, options in STORY:
            print(workers)
            command = [sys.executable, __file__, "--steps", str(args.steps), "--folder", f"{folder}/killed", *options]
            ended = subprocess.run(command, check=False)
            if ended.returncode not in (0, -signal.SIGKILL):
                sys.exit(ended.returncode)
        print("\none worker, without a break")
        subprocess.run([*command[:4], "--folder", f"{folder}/whole", "--data", "1", "--model", "1"], check=True)
        print("\nthe last checkpoint of the run that was killed")
        print(spmd.io.inspect(f"{folder}/killed/step-{args.steps}"))
        if args.picture:
            last = [spmd.load(f"{folder}/{run}/step-{args.steps}")["losses"] for run in ("killed", "whole")]
            draw(args.picture, *last)


def draw(path, losses, whole):
    """The losses by the mesh that computed them, those of the run without a break, and where runs were killed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    ax = figure.subplots()
    ax.semilogy(range(1, len(whole) + 1), whole, color="lightgray", linewidth=7, label="one worker, without a break")
    first = 0
    for (name, options), colour in zip(STORY, ("#E69F00", "#0072B2", "#009E73", "#CC79A7"), strict=True):
        killed = int(options[-1]) if "--kill-in" in options else len(losses)
        last = killed if killed == len(losses) else killed // 5 * 5  # of these steps the next run begins with
        ax.semilogy(range(first + 1, last + 1), losses[first:last], ".-", color=colour, label=name)
        if killed < len(losses):
            ax.axvspan(last + 0.5, killed, color=colour, alpha=0.25, linewidth=0)
            ax.axvline(killed, color=colour, linestyle=":")
        first = last
    ax.set(title="loss; dotted: killed, shaded: steps that were lost and run again", xlabel="step")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description="A run that is killed, and goes on.")
    parser.add_argument("--folder", help="of the checkpoints; without it, the whole story in a temporary folder")
    parser.add_argument("--data", type=int, default=2, help="workers that share a batch")
    parser.add_argument("--model", type=int, default=2, help="workers that share the hidden features")
    parser.add_argument("--steps", type=int, default=60, help="how many steps to train")
    parser.add_argument("--kill-in", type=int, help="the step in which the run kills itself")
    parser.add_argument("--picture", metavar="FILE", help="draw the losses of the whole story")
    args = parser.parse_args()
    train(args) if args.folder else tell_story(args)


if __name__ == "__main__":
    main()
