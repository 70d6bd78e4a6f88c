"""An adjoint that goes the wrong way on uneven blocks raises on some workers: all get the report."""

import spmd
from spmd import P
from spmd.operators.permute import Permute


class _Backwards(Permute):
    @property
    def H(self):
        return Permute(self.axes, self.perm)


ring = _Backwards(("x",), ((0, 1), (1, 2), (2, 3), (3, 0)))
report = spmd.check_adjoint(ring, (6, 2), in_specs=P("x"), mesh=spmd.Mesh(x=4), raises=False)
assert report.kind == "raises DifferentiationError", str(report)
assert "a cotangent of shape [1, 2] for a value of shape [2, 2]" in str(report)
assert report.smallest.mesh == "Mesh(x=2)", str(report)
if spmd.is_main():
    print("one verdict")
