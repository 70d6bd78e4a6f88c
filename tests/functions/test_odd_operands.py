"""Operands of layers that are views, of short or other dtypes, frozen, empty or of a wrong rank: the result is that of
torch's layer, or an error says what was needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import spmd
from functions.layer_cases import random_mesh
from functions.torch_layers import LAYERS, Lies, TorchLayer
from spmd import Layout, P
from spmd.errors import LayoutError, SpecError, StateError

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:reduction. .mean", "ignore:Using a target size")]


def of_floats(change: Callable[[Any], Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """What changes all operands but integers."""
    return lambda tensors: [change(t) if t.is_floating_point() else t for t in tensors]


def of_first(change: Callable[[Any], Any]) -> Callable[[Sequence[Any]], list[Any]]:
    return lambda tensors: [change(tensors[0]), *tensors[1:]]


def channels_last(x: Any) -> Any:
    import torch

    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def with_offset(x: Any) -> Any:
    return x.new_zeros(x.numel() + 3)[3:].reshape(x.shape).copy_(x)


KINDS: dict[str, Callable[[Sequence[Any]], list[Any]]] = {
    "as they are": list,
    "transposed": lambda tensors: [t.mT.contiguous().mT if t.ndim > 1 else t for t in tensors],
    "with an offset": lambda tensors: [*map(with_offset, tensors)],
    "strided": lambda tensors: [t.unsqueeze(-1).repeat_interleave(2, -1)[..., 0] for t in tensors],
    "expanded": lambda tensors: [t[:1].expand_as(t) for t in tensors],
    "channels_last": of_floats(channels_last),
    "float32": of_floats(lambda t: t.float()),
    "float16": of_floats(lambda t: t.half()),
    "bfloat16": of_floats(lambda t: t.bfloat16()),
    "complex": of_floats(lambda t: t + 1j * t.flip(0)),
    "integers": of_first(lambda t: (3 * t).long()),
    "of two dtypes": of_first(lambda t: t.float()),
    "one dimension too few": of_first(lambda t: t[0]),
    "no dimensions": of_first(lambda t: t.flatten()[0]),
    "one dimension too many": of_first(lambda t: t[None]),
    "empty": of_first(lambda t: t[:0]),
    "frozen": list,
}
TOLERANCES = {"float16": 3e-2, "bfloat16": 1e-1, "float32": 1e-3, "of two dtypes": 1e-3}
REFUSED = {"complex", "integers", "one dimension too few", "no dimensions", "one dimension too many", "of two dtypes"}
"""Of these kinds our layers may refuse what torch takes."""
CLEAR = (SpecError, LayoutError, StateError)


def result(fun: Callable[..., Any], tensors: Sequence[Any], wrt: Sequence[Any]) -> list[Any]:
    """The value, and the gradients of its mean square."""
    import torch

    y = fun(*tensors)
    grads = torch.autograd.grad(y.abs().square().double().mean(), wrt, allow_unused=True) if wrt else []
    return [y.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, wrt, strict=True))]


def lies_for(layer: TorchLayer, kind: str, tensors: Sequence[Any], rng: np.random.Generator, mesh: spmd.Mesh) -> Lies:
    """Layouts of these operands; of one of a wrong rank the specs of a right one."""
    shapes = [np.zeros(tuple(t.shape)) for t in tensors]
    if "dimension" not in kind:
        return layer.place(rng, shapes, mesh)
    lies = layer.place(rng, layer.draw(rng), mesh)
    whole = [P() if isinstance(s, Layout) else s for s in lies.specs]
    options = {k: P() if isinstance(v, Layout) else v for k, v in lies.options.items()}
    return lies._replace(specs=[P(*whole[0].dims[: tensors[0].ndim]), *whole[1:]], options=options)


def check(layer: TorchLayer, kind: str, rng: np.random.Generator, mesh: spmd.Mesh) -> None:
    import torch

    from spmd.bridge import torch as spt

    tensors = KINDS[kind]([torch.tensor(a) for a in layer.draw(rng)])
    chosen = layer.differentiated(tensors)
    if kind == "frozen":
        chosen = chosen[: int(rng.integers(0, len(chosen)))]
    floats = [t.is_floating_point() or t.is_complex() for t in tensors]
    tensors = [t.detach().requires_grad_(k in chosen and floats[k]) for k, t in enumerate(tensors)]
    wrt = [t for t in tensors if t.requires_grad]
    lies = lies_for(layer, kind, tensors, rng, mesh)
    body = lambda *blocks: layer.ours(*blocks, **lies.options)
    mapped = spt.map(body, tuple(lies.specs), lies.out, mesh=mesh, check=bool(rng.integers(2)))
    try:
        wanted = result(layer.theirs, tensors, wrt)
    except (RuntimeError, IndexError, ValueError):  # torch has no such layer: ours is right, or refuses clearly
        wanted = None
    try:
        found = result(mapped, tensors, wrt)
    except CLEAR:
        if wanted is None or kind in REFUSED:
            return
        raise
    for a, b in zip(found, wanted or found, strict=True):
        tolerance = TOLERANCES.get(kind, 1e-10)
        if kind != "of two dtypes":
            assert a.dtype == b.dtype
        a, b = a.to(torch.complex128), b.to(torch.complex128)
        size = max(1.0, float(b.abs().nan_to_num().max())) if b.numel() else 1.0
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=tolerance, atol=tolerance * size)


@pytest.mark.parametrize("name", LAYERS)
def test_some_kinds(name):
    rng = np.random.default_rng([0, len(name)])
    for kind in rng.choice([*KINDS], 3, replace=False):
        check(LAYERS[name], kind, rng, random_mesh(rng, 4))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYERS)
def test_all_kinds(name, kind):
    rng = np.random.default_rng([1000, len(name), len(kind)])
    for _ in range(3):
        check(LAYERS[name], kind, rng, random_mesh(rng))


@pytest.mark.parametrize("layer", ["linear", "conv", "conv_transpose", "rnn", "gru", "lstm"])
def test_weights_of_another_dtype_are_named(layer):
    import torch

    x, w, *_ = (torch.tensor(a) for a in LAYERS[layer].draw(np.random.default_rng(0)))
    rest = [torch.tensor(a) for a in LAYERS[layer].draw(np.random.default_rng(0))[2:]]
    with pytest.raises(SpecError, match="needed: the dtype of x, float64") as caught:
        LAYERS[layer].ours(x, w.float(), *rest)
    assert ".to(x.dtype)" in str(caught.value)


def test_complex_tables_are_differentiated():
    import torch

    table = torch.tensor([[1 + 2j], [3 - 1j], [0 + 1j]], requires_grad=True)
    y = LAYERS["embedding"].ours(table, torch.tensor([2, 0, 2]))
    y.abs().square().sum().backward()
    assert torch.equal(table.grad, 2 * table.detach() * torch.tensor([[1], [0], [2]]))
