"""Registers all functions of global arrays."""

from spmd.global_ops import (  # noqa: F401
    along,
    contractions,
    elementwise,
    indexing,
    making,
    matrices,
    methods,
    reductions,
    shapes,
    transforms,
    updates,
    writing,
)
from spmd.global_ops.registry import implements
from spmd.global_ops.whole import whole
from spmd.layout_rules import Rule

implements(None, rule=Rule.WHOLE)(lambda fun, *args, **kwargs: whole(fun, args, kwargs))
