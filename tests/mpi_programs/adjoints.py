"""Sampled operators under mpiexec: argument 1 says how many of each kind on each mesh."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sampled import sample

import spmd
from spmd.testing import check_adjoint, operator_classes

MESHES = [spmd.Mesh(x=4), spmd.Mesh(x=2, y=2), spmd.Mesh(y=1, x=4)]

for kind in operator_classes():
    checked = 0
    for mesh in MESHES:
        for seed in range(int(sys.argv[1])):
            drawn = sample(kind, seed, mesh.axes)
            given = {"in_specs": drawn.spec, "mesh": mesh, "seed": seed, "trials": 1}
            report = check_adjoint(drawn.operator, drawn.shape, **given)
            assert report.error == 0
            assert (report.messages, report.bytes) == report.declared, str(report)
            checked += 1
    if spmd.is_main():
        print(kind.__name__, checked, "exact")
