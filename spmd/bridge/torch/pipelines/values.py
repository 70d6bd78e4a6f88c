"""What goes from stage to stage: tensors in tuples, lists and dicts, and messages of these.

Tensors enter a stage as results of one node of autograd, `_Enter`. So a stage may write to them in place, as to those
of a layer before, and the gradients of all of them arrive in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from spmd.bridge.torch.interop import borrowed, tensor_of
from spmd.bridge.torch.tensor import with_state
from spmd.bridge.torch.tensor_state import is_partitioned, plain, state_of_tensor
from spmd.device import contiguous, to_host
from spmd.errors import StateError, describe
from spmd.operators.messages import packed, unpacked
from spmd.state import state_of

__all__ = ["Entry", "Value", "entered", "held_as", "message_of", "value_of_message", "value_of_output"]

WHERE = "spt.pipeline"


class Value(NamedTuple):
    """Tensors, the structure that they lie in as JSON, and for each whether a gradient of it is wanted."""

    structure: Any
    tensors: list[torch.Tensor]
    needs: list[bool]


def value_of_output(out: Any) -> tuple[Value, list[torch.Tensor]]:
    """The output of a stage as a value without history, and its differentiable tensors with theirs."""
    tensors: list[torch.Tensor] = []
    structure = _structure(out, tensors)
    needs = [x.requires_grad for x in tensors]
    return Value(structure, [x.detach() for x in tensors], needs), [x for x in tensors if x.requires_grad]


def _structure(x: Any, tensors: list[torch.Tensor]) -> Any:
    """Containers as lists of their kind and parts; tensors as their numbers."""
    if isinstance(x, torch.Tensor) and x.layout is torch.strided and not (is_partitioned(x) or x.is_nested):
        tensors.append(x)
        return len(tensors) - 1
    if x is None or isinstance(x, bool | int | float | str):
        return ["constant", x]
    if type(x) in (tuple, list):
        return [type(x).__name__, [_structure(part, tensors) for part in x]]
    if isinstance(x, dict) and all(type(key) in (str, int, bool) for key in x):
        return ["dict", [[key, _structure(part, tensors)] for key, part in x.items()]]
    raise StateError.at(
        WHERE,
        argument="stages",
        got=f"a stage that returns {describe(x)}",
        need="dense tensors, numbers, strings and None, in tuples, lists and dicts, for the next stage",
        mend="return the tensors; x.to_dense() or padded ones of sparse and nested ones; of what lies in blocks "
        "x.whole(), or this worker's x.block()",
    )


def structured(structure: Any, tensors: Sequence[Any]) -> Any:
    """The tensors in their structure."""
    if isinstance(structure, int):
        return tensors[structure]
    kind, parts = structure
    if kind == "constant":
        return parts
    if kind == "dict":
        return {key: structured(part, tensors) for key, part in parts}
    return (tuple if kind == "tuple" else list)(structured(part, tensors) for part in parts)


class Entry:
    """The tensors that enter a stage, and their gradients. node: of autograd; None where no gradient is wanted."""

    __slots__ = ("_gradients", "anchor", "node", "tensors")

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self.tensors: Sequence[torch.Tensor] = tensors
        self._gradients: Sequence[torch.Tensor | None] | None = [None] * len(tensors)
        self.anchor: torch.Tensor | None = None
        self.node: Any = None

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add what a backward brings. Raises StateError after they were taken."""
        if self._gradients is None:
            raise StateError.at(
                WHERE,
                argument="stages",
                got="a backward that reaches the input of an earlier microbatch, whose gradient has been sent",
                need="a graph of its own for each microbatch",
                mend="h.detach() of what a stage keeps from one microbatch for the next",
            )
        pairs = zip(self._gradients, gradients, strict=True)
        self._gradients = [a if b is None else b if a is None else a + b for a, b in pairs]

    def take(self) -> Sequence[torch.Tensor | None]:
        """The gradients, once all have arrived."""
        assert self._gradients is not None
        gradients, self._gradients = self._gradients, None
        return gradients


class _Enter(torch.autograd.Function):
    """The first node of a stage."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, entry: Entry) -> Any:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        tensors, entry.tensors = entry.tensors, ()
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.entry.add(gradients)
        return None, None


def entered(value: Value, differentiated: bool) -> tuple[Any, Entry | None]:
    """The input of a stage, and the entry at which its gradients arrive, if any are wanted."""
    places = [k for k, need in enumerate(value.needs) if need] if differentiated else []
    if not places:
        return structured(value.structure, value.tensors), None
    entry = Entry([plain(value.tensors[k]).detach() for k in places])
    entry.anchor = torch.empty(0, requires_grad=True)
    inside = _Enter.apply(entry.anchor, entry)
    entry.node = inside[0].grad_fn
    tensors = list(value.tensors)
    for k, x in zip(places, inside, strict=True):
        tensors[k] = held_as(x, state_of_tensor(value.tensors[k]).varying)
    return structured(value.structure, tensors), entry


def held_as(x: torch.Tensor, axes: Any) -> torch.Tensor:
    """A tensor that varies along some axes; without a state where there are none."""
    return with_state(plain(x), state_of(axes)) if axes else plain(x)


def message_of(value: Value) -> np.ndarray:
    """A value as bytes."""
    states = [sorted(state_of_tensor(x).varying) for x in value.tensors]
    arrays = [to_host(contiguous(borrowed(x))) for x in value.tensors]
    return packed(arrays, [value.structure, states, value.needs])


def value_of_message(message: np.ndarray, device: torch.device) -> Value:
    """The value of a message, on its memory."""
    if not message.flags.writeable:
        message = _writable(message)
    arrays, (structure, states, needs) = unpacked(message)
    tensors = [held_as(tensor_of(x).to(device), axes) for x, axes in zip(arrays, states, strict=True)]
    return Value(structure, tensors, needs)


def _writable(message: np.ndarray) -> np.ndarray:
    """The same memory, which nobody else has: whoever sent it has let it go."""
    chain = [message]
    while isinstance(chain[-1].base, np.ndarray):
        chain.append(chain[-1].base)
    try:
        for array in reversed(chain):
            array.setflags(write=True)
    except ValueError:
        return message.copy()
    return message
