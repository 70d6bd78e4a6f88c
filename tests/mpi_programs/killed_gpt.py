"""Train the network of examples/torch_gpt.py; the process of one worker kills itself.

killed_gpt.py VICTIM STEP OPTIONS    the worker that is killed in the middle of which step; options of the example
"""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from pathlib import Path

from loaded import load

import spmd

gpt = load(Path(__file__).resolve().parents[2] / "examples" / "torch_gpt.py")


def main(victim: int, step: int) -> None:
    gradients, counts = gpt.gradients, Counter()

    def killed(*args):
        worker = spmd.worker_index(("stage", "data", "expert", "model"))
        counts[worker] += 1
        loss = gradients(*args)
        if worker == victim and counts[worker] == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    gpt.gradients = killed
    gpt.main()
    print("not killed")


if __name__ == "__main__":
    victim, step, *options = sys.argv[1:]
    sys.argv[1:] = options
    main(int(victim), int(step))
