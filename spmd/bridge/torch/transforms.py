"""torch.func in bodies whose tensors carry their state.

The transformations wrap what a function is given, and unwrap what it gives, in plain tensors. So the few functions by
which torch does so are made to hand states on: a wrapper is in the state of what it wraps, and the other way round.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch import eager_transforms, vmap

from spmd.bridge.torch.tensor import Tensor

__all__: list[str] = []


def _keeping(function: Callable) -> Callable:
    @functools.wraps(function)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        y = function(x, *args, **kwargs)
        if isinstance(x, Tensor) and type(y) is torch.Tensor:
            # The class is changed in place: any operation would wrap the result again.
            y.__class__ = Tensor
            y._state = x.state  # type: ignore[attr-defined]
        return y

    return call


for _module, _name in (
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_unwrap_for_grad"),
    (vmap, "_add_batch_dim"),
    (vmap, "_remove_batch_dim"),
):
    setattr(_module, _name, _keeping(getattr(_module, _name)))
