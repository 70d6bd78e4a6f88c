"""Random combinations with pipelines of modules, on four processes: the steps of one worker. Prints their number.

combined_module_pipelines.py FIRST STOP    which seeds
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch_pipeline_combinations import agree, drawn

import spmd

torch.set_num_threads(1)
first, stop = map(int, sys.argv[1:])
for seed in range(first, stop):
    agree(drawn(seed, workers=4))
if spmd.is_main():
    print(stop - first)
