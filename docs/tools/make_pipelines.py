"""Draw the pictures of docs/how_to/pipelines.md, of pipelines that run: `python docs/tools/make_pipelines.py`.

The stages of four workers compute nothing: they sleep, as long forward as for the gradient of the input and for that of
the weights.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import spmd
from spmd import P

FOLDER = Path(__file__).parents[1] / "how_to" / "pictures"
WORKERS, MICROBATCHES, SECONDS = 4, 8, 0.1
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}
"""Stages on each worker."""


def sleeping(forward: float, backward: float) -> Callable[[Any], Any]:
    """The identity, which takes so long forward and backward."""

    @spmd.custom_vjp
    def f(x: Any) -> Any:
        time.sleep(forward)
        return x

    def backward_of(kept: None, g: Any) -> tuple[Any]:
        time.sleep(backward)
        return (g,)

    f.defvjp(lambda x: (f(x), None), backward_of)
    return f


def run(schedule: str, virtual: int, trace: str) -> None:
    """One step of a pipeline, whose profile is written to a file."""
    seconds = SECONDS / virtual
    of_input, of_weights = sleeping(seconds, seconds), sleeping(0.0, seconds)
    stages = [lambda w, x: of_input(x) * of_weights(w)] * (WORKERS * virtual)
    step = spmd.training.pipeline(stages, microbatches=MICROBATCHES, schedule=schedule, loss=np.mean)
    body = spmd.map(lambda x: step.value_and_grad([1.0 * np.ones(1)] * len(stages), x, of_input=True)[0], P(), P())
    with spmd.Mesh(stage=WORKERS, scheduler="threads"):
        body(np.ones(MICROBATCHES))  # once before, so that nothing runs for the first time
        with spmd.profile(trace):
            body(np.ones(MICROBATCHES))


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for schedule, virtual in SCHEDULES.items():
        figure = Figure(figsize=(9, 2.2), layout="constrained")
        with tempfile.TemporaryDirectory() as folder:
            run(schedule, virtual, f"{folder}/trace.json")
            ax = spmd.plot.pipeline(f"{folder}/trace.json", ax=figure.subplots())
        ax.set_yticks(range(WORKERS), [f"stage={w}" for w in range(WORKERS)])
        ax.set_title(f"{schedule}: {ax.get_title()}", fontsize="medium")
        figure.savefig(FOLDER / f"pipeline_{schedule}.png", dpi=90)


if __name__ == "__main__":
    main()
