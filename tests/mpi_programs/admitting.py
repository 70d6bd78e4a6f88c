"""Every kind of array through doors that move it: what it is afterwards, or the error. Runs with any transport."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import spmd

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a program it stands beside, not in, the package
from doors import ADMITTED, MOVES, REFUSED

MOVING = (
    "map",
    "shift of an argument",
    "from_blocks",
    "all_gather, check=True",
    "all_gather, check=False",
    "halo_exchange, check=False",
    "keep, check=True",
    "at_root",
)


def outcome(door: str, make, mesh: spmd.Mesh) -> list[str]:
    """The dtype and the entries of what comes out, or the error."""
    try:
        found = MOVES[door](make(), mesh).numpy()
    except Exception as error:
        return [type(error).__name__, *str(error).splitlines()[:4]]
    return [str(found.dtype), str(found.tolist())]


def results(**options) -> dict[str, list[str]]:
    mesh = spmd.Mesh(x=2, **options)
    kinds = {**ADMITTED, **{name: make for name, (make, _) in REFUSED.items()}}
    return {f"{kind}, {door}": outcome(door, make, mesh) for kind, make in kinds.items() for door in MOVING}


def swapped() -> str:
    """Records of as many bytes, whose fields lie otherwise, on one of the processes."""
    fields = [("a", "i4"), ("b", "f4")]

    def body(_):
        mine = np.zeros(2, fields if spmd.worker_index("x") else fields[::-1])
        return spmd.shift(mine, "x", 1, wrap=True)

    try:
        spmd.map(body, spmd.P("x"), spmd.P("x"), mesh=spmd.Mesh(x=2), check=False)(np.zeros(4))
    except spmd.errors.MismatchError:
        return "refused"
    return "taken for one another"


if __name__ == "__main__":
    found = {**results(), "swapped fields": [swapped()]}
    if spmd.is_main():
        print(json.dumps(found))
