"""Reverse-mode differentiation of plain NumPy code: a tape, a traced array, and rules that are mathematics.

It knows nothing of meshes. What operands of different state mean to each other enters by one hook (`tracer.Mixing`).
"""

from typing import TYPE_CHECKING

from spmd.autodiff import dispatch, namespace, rules, tree  # noqa: F401  (they give Array its protocols)
from spmd.autodiff.checkpoint import checkpoint
from spmd.autodiff.dtypes import float0
from spmd.autodiff.forward import jvp, linear_transpose, linearize
from spmd.autodiff.indexing import at
from spmd.autodiff.tracer import Array
from spmd.autodiff.transforms import grad, stop_gradient, value_and_grad, vjp
from spmd.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from spmd.autodiff.check import check_grads, check_vjp
    from spmd.autodiff.custom import custom_jvp, custom_vjp
    from spmd.autodiff.jacobian import hessian, hvp, jacfwd, jacrev

__all__ = [
    "Array",
    "at",
    "check_grads",
    "check_vjp",
    "checkpoint",
    "custom_jvp",
    "custom_vjp",
    "float0",
    "grad",
    "hessian",
    "hvp",
    "jacfwd",
    "jacrev",
    "jvp",
    "linear_transpose",
    "linearize",
    "rules",
    "stop_gradient",
    "tree",
    "value_and_grad",
    "vjp",
]

if not TYPE_CHECKING:  # Type checkers know the imports above, and so what is misspelt.
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "spmd.autodiff.check": ("check_grads", "check_vjp"),
            "spmd.autodiff.custom": ("custom_jvp", "custom_vjp"),
            "spmd.autodiff.jacobian": ("hessian", "hvp", "jacfwd", "jacrev"),
        },
    )
