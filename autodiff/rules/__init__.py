"""Derivative rules by family. A rule is one line of mathematics; see `spmd.autodiff.primitive`.

`special` holds the rules of scipy.special; it is loaded when one of its functions first meets an Array.
"""

from spmd.autodiff.indexing import define_indexing
from spmd.autodiff.rules import elementwise, index, linalg, reduce, shape
from spmd.autodiff.syntax import define_operators

__all__ = ["elementwise", "index", "linalg", "reduce", "shape"]

define_operators()
define_indexing()
