"""Compiled layers of `spt.nn` give what they give when they are not, in one graph, in bodies without states.

The layers are those of the files `behaviour_<family>.py`, and those of this one. A lazy layer is compiled as the layer
that it becomes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch.nn.modules.lazy import LazyModuleMixin  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import spmd  # noqa: E402
from spmd import Grid, Layout, P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.mesh import Mesh  # noqa: E402
from tests.bridge.torch.nn.module_cases import double_precision, tensors  # noqa: E402
from tests.bridge.torch.nn.test_behaviour import CASES, LATER  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")

ROWS, COLUMNS, WHOLE = P("x"), P(None, "x"), P()
THREE = {"x": 3}
FULL = pytest.mark.full


class Row(NamedTuple):
    """A layer, made in a body, and what goes in. shapes: of the whole inputs, or these. specs: how they lie."""

    make: Callable[[], Any]
    shapes: Sequence[Any]
    specs: Sequence[Any]
    axes: dict[str, int] = THREE


def linear(*args: Any, **specs: Any) -> Callable[[], Any]:
    return lambda: spt.nn.Linear(*args, **specs)


class SelfAttention(torch.nn.Module):
    """An attention whose query, key and value are one tensor."""

    def __init__(self, need_weights: bool, **specs: Any):
        super().__init__()
        self.need_weights = need_weights
        self.attention = spt.nn.MultiheadAttention(6, 3, **specs)

    def forward(self, x: torch.Tensor) -> Any:
        both = self.attention(x, x, x, need_weights=self.need_weights)
        return both if self.need_weights else both[0]


def attention(spec: P, need_weights: bool = False, **specs: Any) -> Row:
    return Row(lambda: SelfAttention(need_weights, spec=spec, **specs), [(5, 4, 6)], [spec])


def transform(name: str, shape: Sequence[int], spec: P, out_spec: P | None, **options: Any) -> Row:
    return Row(lambda: getattr(spt.nn, name)(spec=spec, out_spec=out_spec, **options), [shape], [spec])


MORE: dict[str, list[Row]] = {
    "MultiheadAttention": [
        attention(WHOLE, heads="x"),
        attention(COLUMNS, need_weights=True),
        attention(ROWS, method="ring"),
        attention(ROWS, need_weights=True, heads="x"),
    ],
    "FFT": [transform("FFT", (4, 7), ROWS, COLUMNS)],
    "RFFT": [transform("RFFT", (4, 7), COLUMNS, None, dim=(0, 1))],
    "GRUCell": [
        Row(lambda: spt.nn.GRUCell(3, 5, spec=ROWS), [(4, 3), (4, 5)], [ROWS, ROWS]),
        Row(lambda: spt.nn.GRUCell(3, 5, w_spec=ROWS), [(4, 3), (4, 5)], [WHOLE, COLUMNS]),
    ],
}
"""Further rows of layers that have a case."""

MODULES: dict[str, list[Row]] = {
    c.name: [Row(c.ours, c.shapes, c.in_specs, c.axes), *MORE.get(c.name, [])] for c in CASES
} | {
    "Linear": [
        Row(linear(7, 5, w_spec=ROWS), [(4, 7)], [WHOLE]),
        Row(linear(7, 5), [(4, 7)], [ROWS]),
        Row(linear(7, 5, False, w_spec=COLUMNS), [(4, 7)], [COLUMNS]),
        Row(linear(7, 5, w_spec=ROWS, spec=COLUMNS), [(2, 4, 7)], [COLUMNS]),
        Row(linear(7, 5, w_spec=ROWS, spec=ROWS), [(7, 7)], [ROWS]),
        Row(
            linear(7, 5, spec=Grid((3, 1)), w_spec=Grid((1, 1)), out_spec=Grid((1, 1))),
            [(7, 7)],
            [Layout.grid((7, 7), (3, 1), THREE)],
        ),
    ],
    "AllGather": [Row(lambda: spt.nn.AllGather("x", 1), [(4, 6)], [COLUMNS])],
    "AllSumReduce": [Row(lambda: spt.nn.AllSumReduce("x"), [(6, 4)], [ROWS])],
    "Broadcast": [Row(lambda: spt.nn.Broadcast(WHOLE, ROWS), [(7, 4)], [WHOLE])],
    "HaloExchange": [Row(lambda: spt.nn.HaloExchange(COLUMNS, (0, (1, 2))), [(2, 8)], [COLUMNS])],
    "ReduceScatter": [Row(lambda: spt.nn.ReduceScatter("x", 1), [(2, 6)], [WHOLE])],
    "Repartition": [Row(lambda: spt.nn.Repartition(ROWS, COLUMNS), [(7, 4)], [ROWS])],
    "SumReduce": [Row(lambda: spt.nn.SumReduce(ROWS, WHOLE), [(6, 4)], [ROWS])],
}


def test_every_layer_has_a_row():
    layers = {name for name in spt.nn.__all__ if inspect.isclass(getattr(spt.nn, name))} - {"Layer"}
    layers.remove("Experts")  # compiled functions leave their graph for it: tests/bridge/torch/test_torch_experts.py
    assert set(MODULES) == {n for n in layers if not issubclass(getattr(spt.nn, n), LazyModuleMixin)}


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled is left from other tests."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def own_part(x: torch.Tensor) -> torch.Tensor:
    return spt.block(x.packed_block() if isinstance(x, spt.PartitionedTensor) else x)


def run(module: Any, blocks: Sequence[Any]) -> list[torch.Tensor]:
    """The results, and the gradients of a number of them."""
    own = [x.clone().requires_grad_(x.is_floating_point() or x.is_complex()) for x in blocks]
    results = pytree.tree_leaves(module(*own))
    value = sum((torch.sin(y) * y).abs().sum() for y in results if y.requires_grad)
    leaves = [x for x in (*own, *module.parameters()) if x.requires_grad]
    found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True) if leaves else ()
    return [*(y.detach() for y in results), *(own_part(g) for g in found)]


def check(row: Row) -> None:
    found: dict[Any, list[list[torch.Tensor]]] = {}

    def body(*blocks: Any) -> None:
        torch.manual_seed(3)
        layer = row.make()
        fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
        initial = {name: own_part(b).clone() for name, b in layer.named_buffers()}
        runs = []
        for module in (layer, fast, fast):
            with torch.no_grad():
                for name, b in layer.named_buffers():
                    own_part(b).copy_(initial[name])
            runs.append([*run(module, blocks), *(own_part(b).clone() for b in layer.buffers())])
        found[spmd.mesh.here("a test").index] = runs

    with double_precision():
        spt.map(body, tuple(row.specs), None, mesh=Mesh(**row.axes), check=False)(*tensors(row))
    for eager, *compiled in found.values():
        for values in compiled:
            assert len(values) == len(eager)
            for a, b in zip(values, eager, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


REFUSED = ("RNN", "LSTM", "GRU")
"""Dynamo takes none of torch's classes of these names, nor those that derive from them."""


def marks(name: str, k: int) -> list[Any]:
    return [FULL] * (k > 0 or name in LATER)


@pytest.mark.parametrize("name", REFUSED)
def test_recurrent_layers_are_refused_as_those_of_torch(name):
    case = next(c for c in CASES if c.name == name)
    fast = torch.compile(case.theirs(), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN, GRU, or LSTM"):
        fast(*(x.float() for x in tensors(case)))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="RNN, GRU, or LSTM"):
        check(MODULES[name][0])


@pytest.mark.parametrize(
    ("name", "k"),
    [
        pytest.param(n, k, id=f"{n}-{k}", marks=marks(n, k))
        for n, rows in MODULES.items()
        for k in range(len(rows))
        if n not in REFUSED
    ],
)
def test_compiled_modules_are_eager(name, k):
    check(MODULES[name][k])
