"""Random mixtures of experts between processes, against the dense computation. Arguments: how many, on how many
processes, and "torch" for tensors too."""

from __future__ import annotations

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from functions.expert_cases import MESHES, check_arrays, check_tensors, random_case

import spmd


def main(count: int, size: int, with_tensors: bool) -> None:
    meshes = [axes for axes in MESHES if math.prod(axes.values()) == size]
    for seed in range(count):
        case = random_case(seed, meshes)
        mesh = spmd.Mesh(**case.axes)
        check_arrays(case, mesh, bool(seed % 2))
        if with_tensors:
            check_tensors(case, mesh, bool(seed % 2), bool(seed % 3))
    print(f"{count} on {size} processes are the dense computation", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "torch" in sys.argv)
