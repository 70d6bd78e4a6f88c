"""Random combinations of techniques of training, on four processes: the steps of one worker. Prints their number."""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training import combined_cases as cases

import spmd

seeds = [k for k in range(int(sys.argv[1]), int(sys.argv[2])) if math.prod(cases.drawn(k)[0].values()) == 4]
for seed in seeds:
    cases.run(seed)
if spmd.is_main():
    print(len(seeds))
