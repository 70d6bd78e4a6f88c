"""Registers all functions of global arrays."""

from spmd.global_ops import along, contractions, elementwise, indexing, methods, reductions, shapes, updates  # noqa: F401
from spmd.global_ops.registry import implements
from spmd.global_ops.whole import whole
from spmd.layout_rules import Rule

implements(None, rule=Rule.WHOLE)(lambda fun, *args, **kwargs: whole(fun, args, kwargs))
