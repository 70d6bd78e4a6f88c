"""Which transport a mesh of four takes here, and that a process which has no part in MPI's end ends."""

from __future__ import annotations

import sys

import numpy as np

import spmd
from spmd import P

mesh = spmd.Mesh(x=4)
with mesh:
    total = spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P())(np.arange(4.0))
    if spmd.is_main():
        print(f"{mesh.transport.name} {float(total.item())} {'mpi4py' in sys.modules}", flush=True)
