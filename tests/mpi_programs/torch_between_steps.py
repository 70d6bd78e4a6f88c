"""Sharded tensors in processes: each finds what one worker finds, and holds its own blocks only."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import bridge.torch.sharded_cases as cases
import torch

import spmd
from spmd import P
from spmd.bridge import torch as spt


def main(folder: str) -> None:
    with spmd.Mesh(x=3) as mesh:
        for shape, spec in (((7, 2), P("x")), ((2, 4), P("x")), ((3, 5), P(None, "x"))):
            for name in cases.ELEMENTWISE:
                cases.check_elementwise(name, shape, spec)
            for name in cases.REDUCTIONS:
                cases.check_reduction(name, shape, spec)
            cases.check_in_place(shape, spec)
        cases.check_lists([(5, 2), (4,), (3,), (3, 7)], [P("x"), P("x"), P(), P(None, "x")])
        cases.check_map(5, 4, P("x"), P("x"))
        cases.check_map(5, 4, P("x"), P(None, "x"))
        cases.check_training()
        cases.check_optimizer(lambda p: torch.optim.AdamW(p, lr=0.05, foreach=True))
        x = spt.put(cases.numbers(7, 2), P("x"))
        assert [*x.blocks] == [*mesh.local_workers]
        spmd.save(f"{folder}/saved", {"x": x})
        y = spmd.load(f"{folder}/saved", like={"x": spt.put(torch.zeros(7, 2).double(), P(None, "x"))})["x"]
        cases.alike(y, cases.numbers(7, 2), exact=True)


if __name__ == "__main__":
    main(sys.argv[1])
    print("a process is through\n", end="", flush=True)
