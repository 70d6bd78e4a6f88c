"""Derivative rules by family. A rule is one line of mathematics; see `spmd.autodiff.primitive`.

`special` holds the rules of scipy.special; it is loaded when one of its functions first meets an Array.
"""

from spmd.autodiff.array_methods import define_operators
from spmd.autodiff.indexing import define_indexing
from spmd.autodiff.primitive import lazy_rules
from spmd.autodiff.rules import elementwise, index, linalg, reduce, shape

__all__ = ["elementwise", "index", "linalg", "reduce", "shape"]

define_operators()
define_indexing()
lazy_rules.update(
    {f"spmd.autodiff.rules.{name}": None for name in "statistics decompose fourier refused series sets".split()}
)
lazy_rules["spmd.autodiff.rules.special"] = "scipy.special"
