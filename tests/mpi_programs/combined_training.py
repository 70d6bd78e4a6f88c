"""Random combinations of techniques of training, on four processes: the steps of one worker.

combined_training.py FOLDER FIRST STOP   the seeds; the folder is for checkpoints
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training import combined_cases as cases

warnings.simplefilter("ignore", RuntimeWarning)  # of means of microbatches without samples
folder, *seeds = sys.argv[1:]
for seed in range(*map(int, seeds)):
    cases.run(seed, Path(folder), size=4)
