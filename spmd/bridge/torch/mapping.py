"""spt.map: bodies in torch, on the workers of a mesh; tensors in, tensors out, differentiable from outside.

It is `spmd.map` with tensors: the same specs lay out the arguments, and the same code checks and joins the results.
Each worker keeps the graph of its body. The caller's graph has one node for the whole map, whose backward runs backward
through the graphs of all workers. A second derivative is a map of the arguments and the cotangents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, overload

import torch

from spmd import mapping
from spmd.autodiff.signatures import Parameters, Result
from spmd.bridge.torch.functorch import unwrapped
from spmd.bridge.torch.interop import check_device, shaped_like
from spmd.bridge.torch.map_call import MapCall
from spmd.bridge.torch.sharded_tensors.tensor import ShardedTensor, sharded_layout
from spmd.bridge.torch.tensor import Tensor
from spmd.errors import LayoutError, MeshError, StateError, describe
from spmd.map_interpreters import called_in_body
from spmd.mapping import Mapped
from spmd.mesh import WORKER, Mesh
from spmd.placement import mesh_for
from spmd.spec_trees import REQUIRED, Leaf
from spmd.tracebacks import api_boundary

__all__ = ["TorchMapped", "map"]


@overload
def map(
    f: None = None, in_specs: Any = ..., out_specs: Any = ..., *, mesh: Mesh | None = ..., check: bool = ...
) -> TorchMapDecorator: ...


@overload
def map(
    f: Callable[Parameters, Result],
    in_specs: Any = ...,
    out_specs: Any = ...,
    *,
    mesh: Mesh | None = ...,
    check: bool = ...,
) -> TorchMapped[Parameters, Result]: ...


@api_boundary
def map(
    f: Callable | None = None,
    in_specs: Any = REQUIRED,
    out_specs: Any = REQUIRED,
    *,
    mesh: Mesh | None = None,
    check: bool = True,
) -> Any:
    """A function on global tensors that runs `f`, a body in torch, on the block of every worker.

    f: a function of this worker's blocks, which are tensors, with collectives (`spt.psum(x, "data")`).
    in_specs, out_specs, mesh: as for `spmd.map`. Arguments are tensors, NumPy arrays, numbers, `PartitionedArray`s or
    `ShardedTensor`s; arrays reach the body as tensors. What lies on the mesh is used as it lies where that fits
    in_specs, else laid out anew. A tensor argument is not copied, and a body that writes to one is an error.
    check: the tensors of bodies carry their state (`spt.Tensor`), and results that out_specs say are Invariant are
    verified. With check=False, and nothing differentiated from outside, bodies get plain tensors and call `spt.pvary`
    themselves.

    Returns plain, whole tensors, on every process. Where some argument is a `ShardedTensor`, results that their specs
    split stay on the workers, as `ShardedTensor`s. `loss.backward()` outside reaches the arguments, and leaves that the
    body closes over, such as parameters of a module. These count as Invariant, and get one gradient. A training loop
    may also run inside the body, with `loss.backward()` there.

    The workers are threads of this process, or processes under mpiexec or torchrun. Gradients: as for `spmd.map`, to
    any order; `torch.func`'s transformations work on the mapped function too. Without f it is a decorator.

    Raises SpecError, LayoutError or StateError that name the argument or result by its path; MeshError without mesh;
    TransportError on a mesh with scheduler="lockstep".

        >>> w = torch.ones(3, requires_grad=True)
        >>> loss = spt.map(lambda w, x: spt.psum((x @ w).sum(), "x"), in_specs=(P(), P("x")), out_specs=P())
        >>> with spmd.Mesh(x=2):
        ...     loss(w, torch.arange(12.0).reshape(4, 3)).backward()
        >>> w.grad
        tensor([18., 22., 26.])
    """
    if f is not None and callable(f) and REQUIRED not in (in_specs, out_specs):
        return TorchMapped(f, in_specs, out_specs, mesh, check)
    mapped = mapping.map(f, in_specs, out_specs, mesh=mesh, check=check)  # raises for wrong arguments
    if f is None:
        return lambda body: map(body, in_specs, out_specs, mesh=mesh, check=check)
    return mapped


class TorchMapDecorator(Protocol):
    """What `spt.map` returns if it is given no body."""

    def __call__(self, f: Callable[Parameters, Result], /) -> TorchMapped[Parameters, Result]: ...


class TorchMapped(Mapped[Parameters, Result]):
    """A body in torch with its specs; see `spt.map`."""

    __value_and_grad__: Any = None  # torch differentiates it

    def __init__(
        self, f: Callable, in_specs: Any, out_specs: Any, mesh: Mesh | None, check: bool, where: str | None = None
    ):
        where = where or f"spt.map of {getattr(f, '__name__', None) or type(f).__name__}"
        super().__init__(f, in_specs, out_specs, mesh, check, where)

    @api_boundary
    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return _called(self, args, kwargs)

    def _call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        if WORKER.get() is not None:
            raise called_in_body(self.where)
        mesh = mesh_for(self.mesh, self.where)
        leaves, rebuild = self.arguments.bind(mesh, args, kwargs, self._admit)
        return MapCall(self, mesh, leaves, rebuild).result()

    def _admit(self, mesh: Mesh, leaf: Leaf) -> Leaf:
        """An argument that is a tensor, or one of `spmd.map`, checked."""
        x = leaf.value
        if not isinstance(x, torch.Tensor):
            return self.arguments.admit(mesh, leaf)
        if isinstance(x, Tensor):
            raise StateError.at(
                self.where,
                argument=leaf.path,
                got=f"{describe(x)} of a body",
                need="a tensor from outside",
                mend="return it from its map with an out_spec, or pass spt.block(x)",
            )
        if sharded_layout(x) is not None:
            self._check_sharded(mesh, leaf.path, unwrapped(x))
        check_device(x, mesh, self.where, leaf.path)
        if x.layout is not torch.strided:
            raise StateError.at(
                self.where,
                argument=leaf.path,
                got=f"a tensor of layout {x.layout}",
                need="a dense tensor",
                mend="x.to_dense(), or the spec None to pass it as it is",
            )
        self.arguments.admit(mesh, leaf._replace(value=shaped_like(x)))
        return leaf

    def _check_sharded(self, mesh: Mesh, path: str, x: ShardedTensor) -> None:
        """Raise for an argument that lies on another mesh than that of the call, or is a view of another shape."""
        if x.mesh != mesh:
            raise MeshError.at(
                self.where,
                argument=path,
                got=f"{describe(x)} on {x.mesh}",
                need=f"a tensor on {mesh}",
                mend="spt.put(x.whole(), spec, mesh), or x.whole()",
            )
        if tuple(x.shape) != x.block_layout.shape:
            raise LayoutError.at(
                self.where,
                argument=path,
                got=f"a view of shape {list(x.shape)} of what lies as {x.block_layout}",
                need=f"the shape {list(x.block_layout.shape)}",
                mend="x.reshape(...) back to it before, and the view in the body",
            )


_called: Any = torch.compiler.disable(TorchMapped._call)
"""Compiled functions call it uncompiled."""
