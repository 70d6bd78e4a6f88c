"""Registers all functions of global arrays."""

from spmd.array import MAPPED
from spmd.autodiff.dispatch import creators
from spmd.global_ops import (  # noqa: F401
    along,
    contractions,
    elementwise,
    indexing,
    matrices,
    methods,
    reductions,
    shapes,
    transforms,
    updates,
)
from spmd.global_ops.whole import whole

MAPPED[None] = lambda fun, *args, **kwargs: whole(fun, args, kwargs)

# np.zeros(3, like=x): NumPy hands on what it was called with, but not x. The result is bare.
MAPPED.update({fun: fun for fun in creators})
