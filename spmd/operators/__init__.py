"""Data movement as linear operators, each declared once together with its adjoint.

`print(operator.plan(group, shape, dtype))` shows what an operator moves. docs/explanation/operators.md says how to add
one.
"""

from __future__ import annotations

from spmd.lazy_imports import lazy_attributes

__getattr__, __dir__ = lazy_attributes(
    "spmd.operators",
    {
        "spmd.operators.all_to_all": ("AllToAll", "RaggedAllToAll"),
        "spmd.operators.base": ("Operator",),
        "spmd.operators.gather": ("AllGather", "Collect", "ReduceScatter", "Slice"),
        "spmd.operators.halo": ("HaloAccumulate", "HaloExchange"),
        "spmd.operators.move": ("Move",),
        "spmd.operators.permute": ("Permute",),
        "spmd.operators.repartition": ("Accumulate", "Repartition"),
        "spmd.operators.root": ("Broadcast", "Enroot", "Gather", "Keep", "Replicate", "Scatter", "SumReduce", "Unroot"),
        "spmd.operators.stencil": ("Stencil",),
        "spmd.operators.sums": ("Sum", "Vary"),
    },
)
