"""What an array is like, without its entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmd.errors import SpecError, describe
from spmd.layout import Spec
from spmd.layout_arguments import checked_integers
from spmd.tracebacks import api_boundary

__all__ = ["ShapeDtypeStruct"]


@dataclass(frozen=True, init=False, repr=False)
class ShapeDtypeStruct:
    """Shape, dtype and layout of an array that `spmd.load` is to make.

    shape, dtype: of the whole. spec: a P or a `Layout`: a global array on the mesh of the call; None: a bare array.

    Raises LayoutError, TypeError or SpecError for what is none.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, spmd.Mesh(model=2):
        ...     spmd.save(folder, {"w": np.arange(4.0)})
        ...     spmd.load(folder, like={"w": spmd.ShapeDtypeStruct((4,), np.float64, P("model"))})
        {'w': PartitionedArray([0., 1., 2., 3.], dtype=float64, spec=P('model'))}
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    spec: Spec | None

    @api_boundary
    def __init__(self, shape: Sequence[int], dtype: Any, spec: Spec | None = None):
        where = "spmd.ShapeDtypeStruct"
        if spec is not None and not isinstance(spec, Spec):
            raise SpecError.at(where, argument="spec", got=describe(spec), need="a P, a Layout or None", mend='P("x")')
        object.__setattr__(self, "shape", checked_integers(where, "shape", shape, 0, "the shape of the whole: (8, 3)"))
        object.__setattr__(self, "dtype", np.dtype(dtype))
        object.__setattr__(self, "spec", spec)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __repr__(self) -> str:
        return f"ShapeDtypeStruct({self.shape}, {self.dtype}{'' if self.spec is None else f', {self.spec}'})"
