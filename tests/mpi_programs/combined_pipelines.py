"""Random combinations with pipelines, on four processes: the steps of one worker. Prints their number.

combined_pipelines.py FOLDER FIRST STOP    where files go, and which seeds
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training import pipelined_combinations as cases

import spmd

folder, first, stop = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for seed in range(first, stop):
    cases.run(seed, folder / str(seed), workers=4)
if spmd.is_main():
    print(stop - first)
