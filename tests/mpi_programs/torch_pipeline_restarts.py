"""Pipelines of modules in processes, which stop and go on on other meshes.

torch_pipeline_restarts.py FOLDER SEED...    draws, of four workers each
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch_restart_cases import drawn, goes_on

if __name__ == "__main__":
    folder, *seeds = sys.argv[1:]
    for seed in seeds:
        goes_on(drawn(int(seed), workers=4), Path(folder) / seed)
    print("a process is through\n", end="", flush=True)
