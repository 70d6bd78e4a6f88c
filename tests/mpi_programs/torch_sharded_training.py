"""Sharded training in processes: what each finds is what one worker finds.

torch_sharded_training.py FOLDER FIRST STOP   the seeds of combinations; the folder is for checkpoints
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch_training_cases import Program, assert_same, drawn_program, train, train_on_mesh

EVERYTHING = {"clip": 0.1, "microbatches": 2, "schedule": "one_cycle", "groups": True, "frozen": True, "ema": True}
PROGRAMS = [
    Program(axes={"data": 4}, **EVERYTHING),
    Program(axes={"data": 4}, shard="states", optimizer="nadam", unused=True, recompute="reentrant"),
    Program(axes={"data": 2, "model": 2}, by="layers", optimizer="adamw_fused", batch=7, **EVERYTHING),
    Program(axes={"data": 2, "model": 2}, optimizer="sgd", clip=0.1, bucket_bytes=1),
]

if __name__ == "__main__":
    folder, *seeds = sys.argv[1:]
    PROGRAMS += [drawn_program(seed, size=4) for seed in range(*map(int, seeds))]
    for number, program in enumerate(PROGRAMS):
        for result in train_on_mesh(program, Path(folder) / str(number)):
            assert_same(result, train(program))
    print("a process is through\n", end="", flush=True)
