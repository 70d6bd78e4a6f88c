"""Every operator as a function of torch, on blocks that are given flat, so that any shapes on any workers fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from case_blocks import MESHES, block_shapes

from spmd.bridge import torch as spt
from spmd.bridge.torch.tensor import with_state
from spmd.bridge.torch.tensor_state import plain
from spmd.layout import Layout, P
from spmd.mesh import Mesh, here
from spmd.operators.base import Operator
from spmd.state import INVARIANT, ROOTED, state_of
from spmd.testing import Case, operator_cases, operator_classes


class Applied(NamedTuple):
    """An operator of a case as a function of one vector of all workers' entries. size: of that vector."""

    function: Callable[[torch.Tensor], torch.Tensor]
    size: int
    mesh: Mesh


class Placed(NamedTuple):
    """A case on a mesh, whose blocks lie one behind the other in one vector.

    source, target: how the vectors of arguments and of results are cut. size: of the first. inner: the axes along
    which the argument varies.
    """

    operator: Operator
    mesh: Mesh
    shapes: list[tuple[int, ...]]
    source: Any
    target: P
    size: int
    inner: tuple[str, ...]

    def block(self, x: torch.Tensor) -> torch.Tensor:
        """In a body: this worker's block, of its part of the vector."""
        worker = here("a test")
        block = plain(x).reshape(self.shapes[worker.index])
        return with_state(block, state_of(self.inner)) if worker.tracked else block

    def flat(self, y: torch.Tensor) -> torch.Tensor:
        """In a body: this worker's part of the vector of results, of its block."""
        y = plain(y).reshape(-1)
        return with_state(y, state_of(self.target.varying)) if here("a test").tracked else y

    def results(self) -> Any:
        """How a vector of results is cut, as that of a cotangent."""

        def body(x):
            return torch.tensor([self.flat(self.operator(self.block(x))).numel()])

        if not self.target.varying:
            return P()
        mapped = spt.map(body, self.source, self.target, mesh=self.mesh, check=False)
        lengths = tuple(mapped(torch.zeros(self.size)).tolist())
        return Layout((sum(lengths),), self.target, self.mesh.axes, [lengths])

    def rows(self, n: int) -> Any:
        """How a matrix is cut of which every row belongs to an entry of the argument."""
        if not self.inner:
            return P()
        return Layout((self.size, n), P(self.inner), self.mesh.axes, [self.source.cuts[0], None])


def placed(case: Case, mesh: Mesh) -> Placed:
    """How the blocks of a case lie in vectors."""
    op, shapes = case.operator, block_shapes(case, mesh)
    taken = {n: op.takes(n) for n in op.axes}
    given = op.out_state(state_of(n for n in op.axes if taken[n] != INVARIANT)).varying
    copied_in = [n for n in mesh.axes if taken.get(n) == INVARIANT]
    copied_out = [n for n in op.axes if n not in given and op.target != ROOTED]
    inner = tuple(n for n in mesh.axes if n not in copied_in)
    sizes = {}
    for w, s in enumerate(shapes):
        sizes.setdefault(tuple(mesh.coordinates(w)[n] for n in inner), math.prod(s))
    lengths = [sizes[key] for key in sorted(sizes)]
    total = sum(lengths)
    source = Layout((total,), P(inner), mesh.axes, [tuple(lengths)]) if inner else P()
    target = P(tuple(n for n in mesh.axes if n not in copied_out))
    return Placed(op, mesh, shapes, source, target, total, inner)


def applied(case: Case, mesh: Mesh, call: Callable[[Any], Callable] = lambda op: op) -> Applied:
    """A case as a map of tensors. call: what is called in place of the operator."""
    at = placed(case, mesh)
    function = call(at.operator)

    def body(x):
        return at.flat(function(at.block(x)))

    return Applied(spt.map(body, at.source, at.target, mesh=mesh), at.size, mesh)


def cases(axes: dict[str, int]) -> list[tuple[str, Case]]:
    """All cases of all operators on a mesh, named."""
    mesh = Mesh(**axes)
    return [
        (f"{kind.__name__}-{k}", case)
        for kind in operator_classes()
        if kind.__module__.startswith("spmd.")
        for k, case in enumerate(operator_cases(kind, mesh))
    ]


def integers(rng: np.random.Generator, n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Random integers, so that sums of products are exact."""
    x = rng.integers(-9, 10, n).astype(float)
    if dtype.is_complex:
        return torch.from_numpy(x + 1j * rng.integers(-9, 10, n)).to(dtype)
    return torch.from_numpy(x).to(dtype)


__all__ = ["MESHES", "Applied", "Placed", "applied", "block_shapes", "cases", "integers", "placed"]
