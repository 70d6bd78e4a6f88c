"""Array code for one block, once over the array module: no mesh, no tape.

`of(x)` gives the kernels that fit x: those for NumPy or those for CuPy, with the same names and signatures.
"""

from __future__ import annotations

from types import ModuleType

from spmd.kernels import cpu

__all__ = ["of"]


def of(x) -> ModuleType:
    """The kernels for the array x."""
    if type(x).__module__.split(".", 1)[0] == "cupy":
        from spmd.kernels import gpu

        return gpu
    return cpu
