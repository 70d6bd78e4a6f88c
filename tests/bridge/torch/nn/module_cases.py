"""A layer of `spt.nn` against torch's module on one worker: values, gradients, initial values, states."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import spmd
from spmd import Grid, Layout, P
from spmd.bridge import torch as spt

Specs = dict[str, P | Layout | Grid | None]


class Case(NamedTuple):
    """A layer, how it is made, and what goes in and comes out.

    name: the class, in `torch.nn` and in `spt.nn`. options: of torch's constructor. specs: of ours. shapes: of the
    whole inputs; a tensor in place of a shape is that input. in_specs: how they lie. out_spec: how the result lies; a
    tuple for several results, as the leaves of what the layer gives.
    axes: those of the mesh. call: of the layer, with the inputs. whole: has the class for one worker.
    """

    name: str
    options: dict[str, Any]
    specs: Specs
    shapes: Sequence[Any]
    in_specs: Sequence[P | Layout]
    out_spec: Any
    axes: dict[str, int]
    call: Callable[..., Any] = lambda layer, *inputs: layer(*inputs)
    whole: Any = nn

    def ours(self) -> nn.Module:
        return getattr(spt.nn, self.name)(**self.options, **self.specs)

    def theirs(self) -> nn.Module:
        return getattr(self.whole, self.name)(**self.options)


def table(*cases: Case) -> Any:
    """The cases as parameters of a test, named by class and number."""
    return pytest.mark.parametrize("case", [pytest.param(c, id=f"{c.name}-{k}") for k, c in enumerate(cases)])


def tensors(case: Case, seed: int = 0) -> list[torch.Tensor]:
    """The whole inputs."""
    generator = torch.Generator().manual_seed(seed)
    make = lambda s: torch.randn(tuple(s), generator=generator, dtype=torch.float64)
    return [s if isinstance(s, torch.Tensor) else make(s) for s in case.shapes]


def check_module(
    case: Case,
    *,
    close: Callable[[Any, Any], None] | None = None,
    theirs: Callable[[], nn.Module] | None = None,
    train: bool = True,
) -> None:
    """The layer of a case does what torch's does on one worker, with states and without; states go over and back.

    close: how values are compared; None: to 1e-10. theirs: makes torch's module, if that is not `case.theirs`.
    """
    close = close or (lambda a, b: torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10))
    mesh = spmd.Mesh(**case.axes)
    with double_precision():
        torch.manual_seed(3)
        whole = (theirs or case.theirs)().train(train)
        inputs = tensors(case)
        expected = _run(case, copy.deepcopy(whole), inputs)
        for check in (True, False):
            torch.manual_seed(3)
            run = spt.map(
                lambda *blocks: _in_body(case, whole, blocks, train),
                tuple(case.in_specs),
                (case.out_spec, None),
                mesh=mesh,
                check=check,
            )
            leaves = [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in inputs]
            results, gradients = run(*leaves)
            outputs = results if isinstance(results, tuple) else (results,)
            _compare(outputs, expected[0], close)
            cotangents = _cotangents(outputs)
            differentiated = [x for x in leaves if x.requires_grad]
            if differentiated:
                found = torch.autograd.grad(
                    outputs, differentiated, cotangents, allow_unused=True, materialize_grads=True
                )
                _compare(found, expected[1], close)
            _compare_dicts(gradients, expected[2], close)


def double_precision() -> Any:
    """A context in which torch makes float64 by default."""

    class Double:
        def __enter__(self):
            self.outer = torch.get_default_dtype()
            torch.set_default_dtype(torch.float64)

        def __exit__(self, *_: Any):
            torch.set_default_dtype(self.outer)

    return Double()


def outputs_of(case: Case, module: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The results of a module, in one tuple."""
    return tuple(x for x in pytree.tree_leaves(case.call(module, *inputs)) if isinstance(x, torch.Tensor))


def _in_body(case: Case, whole: nn.Module, blocks: Sequence[torch.Tensor], train: bool) -> tuple[Any, dict[str, Any]]:
    layer = case.ours().train(train)
    assert isinstance(layer, type(whole))
    state = spt.state_dict(layer)
    assert list(state) == list(whole.state_dict())
    for name, value in whole.state_dict().items():  # initial values
        assert torch.equal(state[name], value), name
    back = layer.to_torch()
    assert type(back) is type(whole)
    assert repr(back) == repr(whole)
    for name, value in whole.state_dict().items():
        assert torch.equal(back.state_dict()[name], value), name
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), whole.parameters(), strict=True))
    layer = getattr(spt.nn, case.name).from_torch(whole, **case.specs)
    results = outputs_of(case, layer, blocks)
    # The gradients of parameters, for the cotangents that the caller uses; their sum is that of the whole.
    gradients = _parameter_gradients(case, layer, results)
    return (results if len(results) > 1 else results[0]), gradients


def _parameter_gradients(case: Case, layer: nn.Module, results: Sequence[torch.Tensor]) -> dict[str, Any]:
    parameters = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    if not parameters:
        return {}
    specs = case.out_spec if isinstance(case.out_spec, tuple) else (case.out_spec,)
    total = 0
    for y, spec in zip(results, specs, strict=True):
        if not y.requires_grad:
            continue
        whole = _gathered(y, spec)
        g = _cotangents([whole])[0]
        g = _part(g, y, spec)  # of complex results autograd takes the real part of g* y
        total = total + _total((y * g.conj()).real if y.is_complex() else y * g, spec)
    found = torch.autograd.grad(total, list(parameters.values()), retain_graph=True, allow_unused=True)
    return {name: None if g is None else _whole(g) for name, g in zip(parameters, found, strict=True)}


def _gathered(y: torch.Tensor, spec: Any) -> torch.Tensor:
    """A tensor of the shape of the whole result."""
    if isinstance(spec, Layout):
        return torch.zeros(spec.shape, dtype=y.dtype)
    shape = list(y.shape)
    for d, names in enumerate(spec.dims):
        if names:
            shape[d] = int(spt.block(spt.psum(spt.varying(torch.tensor(shape[d]), names), names)))
    return torch.zeros(shape, dtype=y.dtype)


def _part(g: torch.Tensor, y: torch.Tensor, spec: Any) -> torch.Tensor:
    worker = spmd.mesh.here("a test")
    if isinstance(spec, Layout):
        return g[spec.slices(worker.index)]
    for d, names in enumerate(spec.dims):
        if names:
            lengths = spt.block(spt.all_gather(spt.varying(torch.tensor([y.shape[d]]), names), names, tiled=True))
            k = worker.group(names).index
            start = int(lengths[:k].sum())
            g = g.narrow(d, start, y.shape[d])
    return g


def _total(y: torch.Tensor, spec: Any) -> torch.Tensor:
    axes = tuple(spec.axes) if isinstance(spec, P) or spec.spec is None else spec.spec.axes
    return spt.psum(y.sum(), axes) if axes else y.sum()


def _whole(g: Any) -> torch.Tensor:
    return spt.block(g.whole() if hasattr(g, "whole") else g).detach()


def _cotangents(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A cotangent for each result: the same for equal shapes."""
    cotangents = []
    for y in outputs:
        generator = torch.Generator().manual_seed(y.numel())
        dtype = torch.complex128 if y.is_complex() else torch.float64
        cotangents.append(torch.randn(tuple(y.shape), generator=generator, dtype=dtype).to(y.dtype))
    return cotangents


def _run(case: Case, module: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[Any, Any, dict[str, Any]]:
    """What torch gives on one worker: results, gradients of inputs and of parameters."""
    leaves = [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in inputs]
    outputs = outputs_of(case, module, leaves)
    wanted = [*(x for x in leaves if x.requires_grad), *(p for p in module.parameters() if p.requires_grad)]
    if not wanted:
        return outputs, (), {}
    found = torch.autograd.grad(outputs, wanted, _cotangents(outputs), allow_unused=True, materialize_grads=True)
    n = sum(x.requires_grad for x in leaves)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    return outputs, found[:n], dict(zip(names, found[n:], strict=True))


def _compare(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], close: Callable[[Any, Any], None]):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        close(a.detach(), b.detach())


def _compare_dicts(found: dict[str, Any], expected: dict[str, torch.Tensor], close: Callable[[Any, Any], None]):
    assert list(found) == list(expected)
    for name, value in expected.items():
        close(torch.zeros_like(value) if found[name] is None else found[name], value)
