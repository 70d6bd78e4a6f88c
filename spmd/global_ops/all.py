"""Registers all functions of global arrays."""

from spmd.array import MAPPED
from spmd.global_ops import (  # noqa: F401
    along,
    contractions,
    elementwise,
    indexing,
    making,
    methods,
    reductions,
    shapes,
    updates,
)
from spmd.global_ops.whole import whole

MAPPED[None] = lambda fun, *args, **kwargs: whole(fun, args, kwargs)
