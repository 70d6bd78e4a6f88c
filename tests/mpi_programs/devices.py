"""Blocks on GPUs in MPI processes give the bits of virtual workers on the host."""

from __future__ import annotations

import numpy as np
from device_cases import results

import spmd

got, want = results(), results(transport="local", device="cpu")
assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
with spmd.Mesh(x=2, y=2) as mesh:
    if spmd.is_main():
        print(mesh.transport.name, type(mesh.transport).__name__, mesh.device)
