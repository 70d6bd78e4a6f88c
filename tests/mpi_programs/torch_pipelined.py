"""Pipelines of modules in processes: each finds what one worker finds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch_pipeline_cases import Case, agree

FOUR = [
    Case(stages=4, axes={"stage": 4}, n=11, microbatches=5, tied=True, clip=0.1),
    Case("zero_bubble", stages=4, axes={"stage": 4}, n=9),
    Case("interleaved", stages=8, axes={"stage": 4}, n=9, microbatches=6),
    Case("gpipe", axes={"data": 2, "stage": 2}, n=13, shard=True, parts=2, clip=0.1),
]
TWO = [Case("interleaved", stages=4, n=7, microbatches=3), Case(n=5, tied=True, clip=0.1), Case("zero_bubble", n=3)]

if __name__ == "__main__":
    for case in TWO if os.environ.get("WORLD_SIZE") == "2" or sys.argv[1:] == ["2"] else FOUR:
        agree(case)
    print("a process is through\n", end="", flush=True)
