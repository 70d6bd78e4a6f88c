"""Registers all functions of global arrays."""

from spmd.array import MAPPED
from spmd.global_ops import along, contractions, elementwise, indexing, methods, reductions, shapes, updates  # noqa: F401
from spmd.global_ops.whole import whole

MAPPED[None] = lambda fun, *args, **kwargs: whole(fun, args, kwargs)
