"""Parameters of which each worker holds a block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.partitioned.placement import layout_of, own_placement, unpacked_shape
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor, leaf_of_block, new_leaf, with_gradient_layout
from spmd.bridge.torch.tensor_state import INVARIANT, plain, state_of_tensor
from spmd.errors import StateError, describe
from spmd.mesh import here

__all__ = ["Parameter"]

_disabled = torch._C.DisableTorchFunctionSubclass


class _ParameterMeta(type(torch.Tensor)):
    """As for `nn.Parameter`: `nn.Parameter(x)` of a partitioned tensor is an instance."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return super().__instancecheck__(instance) or (
            cls is Parameter and isinstance(instance, PartitionedTensor) and getattr(instance, "_is_param", False)
        )


class Parameter(PartitionedTensor, metaclass=_ParameterMeta):
    """A parameter of which each worker holds a block.

        class Scale(nn.Module):
            def __init__(self, features):
                super().__init__()
                self.scale = spt.Parameter(torch.ones(features), P("model"))

            def forward(self, x):
                return x * self.scale.block()

    whole: the tensor from which the block is taken, the same on all workers. spec: a spec or a Grid, for balanced
    blocks, or a Layout of the whole. Construct it in a body. Nothing is communicated.
    unpacked: the shape in which spec splits the whole, for dimensions that are several in one: the weights of queries,
    keys and values of attention, (3 n, n), lie by `P(None, "model")` with unpacked=(3, n, n), so that each worker has
    rows of all three. `shape` and gradients stay those of the whole; `packed_block()` is the block in that shape.

    It is an `nn.Parameter` of the shape of the whole. Its gradient has its layout. Elementwise functions keep the
    layout, so optimisers work on blocks. Functions that reduce a split dimension (norms, sums), or contract it outside
    of autograd, give the value of the whole; all workers that hold a block call them. Functions of `nn.init` give the
    values that they give on one worker. Other functions raise LayoutError and name `block()`, for forward, and
    `whole()`.
    `load_state_dict` of the module takes whole tensors; `spt.state_dict(module)` gives them.

    Raises LayoutError where spec and shape do not fit, StateError for a whole that varies, MeshError outside of bodies.

        >>> def body():
        ...     w = spt.Parameter(torch.ones(4, 2), P("x"))
        ...     return w.shape, tuple(w.block().shape)
        >>> with spmd.Mesh(x=2):
        ...     spt.map(body, (), None)()
        (torch.Size([4, 2]), (2, 2))
    """

    _is_param = True

    @staticmethod
    def __new__(
        cls, whole: torch.Tensor, spec: LayoutLike, requires_grad: bool = True, *, unpacked: Sequence[int] | None = None
    ) -> Any:
        where = "spt.Parameter"
        worker = here(where)
        shape = tuple(whole.shape) if unpacked is None else unpacked_shape(where, whole, unpacked)
        layout = layout_of(where, shape, spec, worker)
        if isinstance(whole, PartitionedTensor) or state_of_tensor(whole).varying:
            raise StateError.at(
                where,
                argument="whole",
                got=describe(whole),
                need="one tensor, the same on all workers",
                mend="spt.Parameter.from_block(block, spec) takes this worker's block",
            )
        placement = own_placement(layout, worker)
        own = plain(whole).detach()
        block = own.reshape(shape)[placement.slices].clone(memory_format=torch.contiguous_format)
        like = None if unpacked is None else own.new_empty(own.shape, device="meta")
        return new_leaf(cls, block, placement, INVARIANT, requires_grad, like)

    @classmethod
    def from_block(cls, block: torch.Tensor, spec: LayoutLike, requires_grad: bool = True) -> Parameter:
        """The parameter of which this worker holds this block, on its memory.

        spec: a Layout of the whole. Or a spec or a Grid: the workers then exchange their shapes, which is collective
        and sends no bytes; blocks may be uneven.
        Raises LayoutError where blocks and layout do not fit.
        """
        parameter = leaf_of_block(cls, "spt.Parameter.from_block", block, spec)
        with _disabled():
            parameter.requires_grad_(requires_grad)
        return with_gradient_layout(parameter)


_new_parameter: Any = nn.Parameter.__new__


def _new_parameter_of(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
    """nn.Parameter(p) of a `Parameter`, as parametrizations call it: a parameter that lies alike."""
    return _new_parameter(cls, data.detach() if type(data) is Parameter else data, requires_grad)


nn.Parameter.__new__ = staticmethod(_new_parameter_of)  # type: ignore[assignment]
