"""Compiled layers give what they give when they are not: every function of `spt.functions`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from launch import ROOT, launch, mpiexec  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import StateError  # noqa: E402
from spmd.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")

L = spt.functions
ROWS, COLUMNS, SPACE, TIME = P("x"), P(None, "x"), P(None, None, "x"), P("x")
WHOLE = P()


class Case(NamedTuple):
    """A call of a layer on blocks. shapes: of the whole arrays; a tensor in place of a shape is that array. specs: how
    they are split. traced: whether the graph holds torch's operators, and not the layer as one."""

    call: Callable[..., Any]
    shapes: Sequence[Any]
    specs: Sequence[Any]
    traced: bool = False


def labels(n: int, *shape: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(3).integers(0, n, shape))


def cell(gates: int, features: int = 4, hidden: int = 5) -> list[tuple[int, ...]]:
    """The shapes of the parameters of a recurrent layer."""
    return [(gates * hidden, features), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,)]


def named(parameters: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"), parameters, strict=True))


def along_classes(layer: Any) -> list[Case]:
    """The cases of a softmax: along the dimension that is split, and along another."""
    return [
        Case(lambda x: layer(x, spec=COLUMNS), [(4, 7)], [COLUMNS], True),
        Case(lambda x: layer(x, 0, spec=COLUMNS), [(4, 7)], [COLUMNS], True),
    ]


def entrywise(loss: Any, positive: bool = False, **options: Any) -> list[Case]:
    """The cases of a loss of entries."""
    made = (lambda x: torch.sigmoid(x)) if positive else (lambda x: x)
    target = torch.rand(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [
        Case(lambda x, t: loss(made(x), t, spec=ROWS, **options), [(7, 3), target], [ROWS, ROWS], True),
        Case(lambda x, t: loss(made(x), t, reduction="none", **options), [(7, 3), target], [ROWS, ROWS], True),
    ]


TAPS = spmd.functions.plan_resize(6, 9)
UNEVEN = (2, 3, 7, 5)

CASES: dict[str, list[Case]] = {
    "adaptive_max_pool": [Case(lambda x: L.adaptive_max_pool(x, 3, True, spec=SPACE), [UNEVEN], [SPACE])],
    "attention_with_weights": [
        Case(lambda q, k, v: L.attention_with_weights(q, k, v), [(2, 4, 6, 3)] * 3, [ROWS] * 3, True)
    ],
    "attention": [
        Case(lambda q, k, v: L.attention(q, k, v, causal=True), [(2, 4, 6, 3)] * 3, [ROWS] * 3, True),
        Case(
            lambda q, k, v: L.attention(q, k, v, causal=True, spec=SPACE, kv_spec=SPACE),
            [(1, 2, 7, 3)] * 3,
            [SPACE] * 3,
        ),
        Case(lambda q, k, v: L.attention(q, k, v, spec=COLUMNS, kv_spec=COLUMNS), [(1, 6, 4, 3)] * 3, [COLUMNS] * 3),
    ],
    "avg_pool": [
        Case(lambda x: L.avg_pool(x, 3, 2, 1, spec=SPACE), [UNEVEN], [SPACE]),
        Case(lambda x: L.avg_pool(x, 2, spec=ROWS), [UNEVEN], [ROWS], True),
    ],
    "batch_norm": [
        Case(
            lambda x, w, b, m, v: L.batch_norm(x, w, b, (m.detach(), v.detach()), spec=ROWS),
            [(7, 3, 4), (3,), (3,), torch.zeros(3).double(), torch.ones(3).double()],
            [ROWS, WHOLE, WHOLE, WHOLE, WHOLE],
            True,
        ),
        Case(lambda x, w: L.batch_norm(x, w, spec=SPACE), [UNEVEN, (3,)], [SPACE, WHOLE], True),
    ],
    "binary_cross_entropy": entrywise(L.binary_cross_entropy, positive=True),
    "binary_cross_entropy_with_logits": entrywise(L.binary_cross_entropy_with_logits),
    "conv": [
        Case(
            lambda x, w, b: L.conv(x, w, b, padding=1, spec=SPACE), [UNEVEN, (4, 3, 3, 3), (4,)], [SPACE, WHOLE, WHOLE]
        ),
        Case(lambda x, w, b: L.conv(x, w, b, 2), [UNEVEN, (4, 3, 3, 3), (4,)], [ROWS, WHOLE, WHOLE], True),
        Case(lambda x, w: L.conv(x, w, None, w_spec=ROWS), [UNEVEN, (4, 3, 3, 3)], [WHOLE, ROWS], True),
    ],
    "conv_transpose": [
        Case(lambda x, w: L.conv_transpose(x, w, stride=2, spec=SPACE), [UNEVEN, (3, 2, 3, 3)], [SPACE, WHOLE]),
    ],
    "cross_entropy": [
        Case(lambda x, t: L.cross_entropy(x, t, spec=ROWS), [(7, 5), labels(5, 7)], [ROWS, ROWS], True),
        Case(lambda x, t: L.cross_entropy(x, t, spec=COLUMNS), [(7, 5), labels(5, 7)], [COLUMNS, WHOLE]),
        Case(lambda x, t: L.cross_entropy(x, t, label_smoothing=0.1), [(7, 5), labels(5, 7)], [ROWS, ROWS], True),
    ],
    "dropout": [Case(lambda x, key: L.dropout(x, 0.5, key, ROWS), [(7, 5), spmd.random.key(3)], [ROWS, None])],
    "embedding": [
        Case(lambda t, i: L.embedding(t, i, table_spec=ROWS), [(7, 3), labels(7, 4, 2)], [ROWS, WHOLE]),
        Case(lambda t, i: L.embedding(t, i, spec=ROWS), [(7, 3), labels(7, 5, 2)], [WHOLE, ROWS]),
        Case(lambda t, i: L.embedding(t, i, padding_idx=2), [(7, 3), labels(7, 5, 2)], [WHOLE, ROWS]),
    ],
    "group_norm": [
        Case(
            lambda x, w, b: L.group_norm(x, 2, w, b, spec=SPACE), [(2, 4, 7), (4,), (4,)], [SPACE, WHOLE, WHOLE], True
        ),
        Case(lambda x, w: L.group_norm(x, 2, w, spec=COLUMNS), [(2, 6, 5), (6,)], [COLUMNS, ROWS]),
    ],
    "gru": [
        Case(
            lambda x, h, *p: L.gru(x, h, named(p)),
            [(3, 5, 4), (1, 5, 5), *cell(3)],
            [COLUMNS, COLUMNS, *[WHOLE] * 4],
            True,
        ),
        Case(lambda x, *p: L.gru(x, None, named(p), spec=TIME), [(4, 3, 4), *cell(3)], [TIME, *[WHOLE] * 4]),
    ],
    "huber_loss": entrywise(L.huber_loss, delta=0.5),
    "instance_norm": [Case(lambda x: L.instance_norm(x, spec=SPACE), [UNEVEN], [SPACE], True)],
    "kl_div": entrywise(L.kl_div),
    "l1_loss": entrywise(L.l1_loss),
    "layer_norm": [
        Case(lambda x, w, b: L.layer_norm(x, w, b, spec=COLUMNS), [(4, 7), (7,), (7,)], [COLUMNS, ROWS, ROWS], True),
        Case(lambda x, w, b: L.layer_norm(x, w, b, spec=ROWS), [(4, 7), (7,), (7,)], [ROWS, WHOLE, WHOLE], True),
    ],
    "linear": [
        Case(lambda x, w, b: L.linear(x, w, b), [(4, 7), (5, 7), (5,)], [ROWS, WHOLE, WHOLE], True),
        Case(lambda x, w, b: L.linear(x, w, b, w_spec=ROWS), [(4, 7), (5, 7), (5,)], [WHOLE, ROWS, ROWS], True),
        Case(
            lambda x, w, b: L.linear(x, w, b, spec=COLUMNS, w_spec=COLUMNS),
            [(4, 7), (5, 7), (5,)],
            [COLUMNS, COLUMNS, WHOLE],
            True,
        ),
        Case(
            lambda x, w, b: L.linear(x, w, b, spec=COLUMNS, w_spec=ROWS),
            [(2, 7, 4), (5, 4), (5,)],
            [COLUMNS, ROWS, ROWS],
            True,
        ),
        Case(
            lambda x, w: L.linear(x, w, spec=SPACE, w_spec=COLUMNS, out_spec=COLUMNS),
            [(2, 7, 4), (5, 4)],
            [SPACE, COLUMNS],
            True,
        ),
        Case(lambda x, w: L.linear(x, w, spec=ROWS, w_spec=COLUMNS), [(7, 4), (5, 4)], [ROWS, COLUMNS]),
    ],
    "load_balance_loss": [Case(lambda x: L.load_balance_loss(x, "x"), [(7, 4)], [ROWS])],
    "log_softmax": along_classes(L.log_softmax),
    "lstm": [
        Case(
            lambda x, h, c, *p: L.lstm(x, (h, c), named(p)),
            [(3, 5, 4), (1, 5, 5), (1, 5, 5), *cell(4)],
            [COLUMNS, COLUMNS, COLUMNS, *[WHOLE] * 4],
            True,
        ),
        Case(lambda x, *p: L.lstm(x, None, named(p), spec=TIME), [(4, 3, 4), *cell(4)], [TIME, *[WHOLE] * 4]),
    ],
    "max_pool": [
        Case(lambda x: L.max_pool(x, 3, 2, 1, return_indices=True, spec=SPACE), [UNEVEN], [SPACE]),
        Case(lambda x: L.max_pool(x, 2, spec=ROWS), [UNEVEN], [ROWS], True),
    ],
    "mse_loss": entrywise(L.mse_loss),
    "nll_loss": [Case(lambda x, t: L.nll_loss(x, t, spec=ROWS), [(7, 5), labels(5, 7)], [ROWS, ROWS], True)],
    "pad": [
        Case(lambda x: L.pad(x, ((0, 0), (0, 0), (1, 2), (2, 0)), "reflect", spec=SPACE), [UNEVEN], [SPACE]),
        Case(lambda x: L.pad(x, {3: (1, 1)}), [UNEVEN], [ROWS], True),
    ],
    "poisson_nll_loss": entrywise(L.poisson_nll_loss),
    "resample": [Case(lambda x: L.resample(x, TAPS), [(7, 6)], [ROWS], True)],
    "resize": [
        Case(lambda x: L.resize(x, size=(9, 4), spec=SPACE), [UNEVEN], [SPACE]),
        Case(lambda x: L.resize(x, size=(9, 4)), [UNEVEN], [ROWS], True),
    ],
    "rms_norm": [Case(lambda x, w: L.rms_norm(x, w, spec=COLUMNS), [(4, 7), (7,)], [COLUMNS, ROWS], True)],
    "rnn": [
        Case(
            lambda x, n, *p: L.rnn(x, None, named(p), lengths=n, spec=COLUMNS),
            [(3, 5, 4), torch.tensor([3, 1, 2, 3, 0]), *cell(1)],
            [COLUMNS, ROWS, *[WHOLE] * 4],
        ),
    ],
    "rope": [
        Case(lambda x: L.rope(x), [(7, 5, 4)], [ROWS], True),
        Case(lambda x: L.rope(x, spec=COLUMNS), [(2, 7, 4)], [COLUMNS]),
    ],
    "router_z_loss": [Case(lambda x: L.router_z_loss(x, "x"), [(7, 4)], [ROWS], True)],
    "smooth_l1_loss": entrywise(L.smooth_l1_loss, beta=0.5),
    "softmax": along_classes(L.softmax),
    "softmin": along_classes(L.softmin),
    "softmax_cross_entropy": [
        Case(lambda x, t: L.softmax_cross_entropy(x, t, axis_name="x"), [(4, 7), labels(7, 4)], [COLUMNS, WHOLE]),
        Case(lambda x, t: L.softmax_cross_entropy(x, t), [(7, 5), labels(5, 7)], [ROWS, ROWS], True),
    ],
    "spectral_conv": [
        Case(
            lambda x, w: L.spectral_conv(x, torch.complex(w, w), spec=SPACE),
            [(2, 3, 8, 7), (3, 2, 3, 2)],
            [SPACE, WHOLE],
        ),
    ],
}


def test_every_function_has_a_case():
    left = {"experts"}  # compiled functions leave their graph for it: test_torch_experts.py
    assert set(CASES) == set(L.__all__) - left


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled is left from other tests: each counts its own."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def arrays(case: Case, size: int) -> list[Any]:
    rng = np.random.default_rng(size)
    draw = lambda s: torch.from_numpy(rng.standard_normal(s))
    return [draw(s) if isinstance(s, tuple) else s for s in case.shapes]


def leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for part in value for leaf in leaves(part)] if isinstance(value, tuple) else [value]


def loss_of(call: Callable) -> Callable:
    """A number of all results of a layer, and the results."""

    def loss(*xs: Any) -> Any:
        results = leaves(call(*xs))
        return sum((torch.sin(y) * y).sum() for y in results if y.requires_grad), results

    return loss


def run_on(mesh: Mesh, case: Case, function: Callable, xs: Sequence[Any], steps: int = 1) -> dict[int, list[Any]]:
    """By worker: the value, the results and the gradients."""
    found: dict[int, list[Any]] = {}

    def body(*blocks: Any) -> None:
        for _ in range(steps):
            own = [
                b.clone().requires_grad_(b.is_floating_point()) if isinstance(b, torch.Tensor) else b for b in blocks
            ]
            value, results = function(*own)
            inputs = [b for b in own if isinstance(b, torch.Tensor) and b.requires_grad]
            grads = torch.autograd.grad(value, inputs, allow_unused=True)
            zeros = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]
            found[spmd.worker_index("x")] = [value.detach(), *(y.detach() for y in results), *zeros]

    spt.map(body, tuple(case.specs), None, mesh=mesh, check=False)(*xs)
    return found


def equal(found: dict[int, list[Any]], expected: dict[int, list[Any]]) -> None:
    assert found.keys() == expected.keys()
    for worker, values in expected.items():
        for a, b in zip(found[worker], values, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def check(case: Case, mesh: Mesh) -> None:
    from torch._dynamo.backends.common import aot_autograd

    nodes: set[str] = set()

    def compiler(graph: Any, _: Any) -> Any:
        nodes.update(str(n.target) for n in graph.graph.nodes)
        return graph.forward

    loss, xs = loss_of(case.call), arrays(case, mesh.size)
    expected = run_on(mesh, case, loss, xs)
    fast = torch.compile(loss, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))
    equal(run_on(mesh, case, fast, xs), expected)
    equal(run_on(mesh, case, fast, xs), expected)
    assert case.traced in (None, "spmd.opaque.default" not in nodes)


LATER = pytest.mark.full
"""Of the ordinary run is the first case of each function."""


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=LATER) for n in (1, 2))])
@pytest.mark.parametrize(
    ("name", "k"),
    [
        pytest.param(n, k, id=f"{n}-{k}", marks=[LATER] * (k > 0))
        for n, cases in CASES.items()
        for k in range(len(cases))
    ],
)
def test_compiled_is_eager(name, k, size):
    case = CASES[name][k]
    check(case if size > 1 else case._replace(traced=None), Mesh(x=size))


# What stands around layers


def network(x: Any, w: Any, v: Any, u: Any) -> Any:
    """A convolution, whose result has lengths that other workers decide, and layers after it."""
    y = L.conv(x, w, None, padding=1, spec=SPACE)
    y = L.max_pool(torch.relu(y), 2, spec=SPACE)
    y = L.layer_norm(y.mean(3).transpose(1, 2), v)
    return L.mse_loss(L.linear(y, u), torch.zeros(()).double().expand(*y.shape[:2], 2), spec=COLUMNS)


NETWORK = Case(network, [(2, 3, 9, 7), (4, 3, 3, 3), (4,), (2, 4)], [SPACE, WHOLE, WHOLE, WHOLE])


@pytest.mark.parametrize("size", [2, 3])
def test_a_network(size):
    mesh, xs = Mesh(x=size), arrays(NETWORK, size)
    loss = loss_of(network)
    fast = torch.compile(loss, fullgraph=True, backend="aot_eager")
    equal(run_on(mesh, NETWORK, fast, xs), run_on(mesh, NETWORK, loss, xs))


@pytest.mark.full
def test_a_network_with_inductor():
    mesh, xs = Mesh(x=2), arrays(NETWORK, 2)
    loss = loss_of(network)
    equal(run_on(mesh, NETWORK, torch.compile(loss, fullgraph=True), xs), run_on(mesh, NETWORK, loss, xs))


def test_batches_of_several_sizes_share_a_graph():
    """Each worker has a graph for the first size, and one for all others: of a layer that is traced, and of an op."""
    from torch._dynamo.testing import CompileCounterWithBackend

    def call(x: Any, w: Any, k: Any) -> Any:
        return L.conv(L.linear(x, w, spec=P(), w_spec=P(None)), k, padding=1, spec=SPACE)

    specs = [SPACE, WHOLE, WHOLE]
    graphs = CompileCounterWithBackend("aot_eager")
    loss, mesh = loss_of(call), Mesh(x=2)
    fast = torch.compile(loss, fullgraph=True, backend=graphs)
    for n in (2, 5, 3, 4, 7):
        case = Case(call, [(n, 3, 8, 5), (4, 5), (2, 3, 3, 3)], specs)
        xs = arrays(case, n)
        equal(run_on(mesh, case, fast, xs), run_on(mesh, case, loss, xs))
    assert graphs.frame_count <= 2 * mesh.size


def test_nothing_is_compiled_again():
    from torch._dynamo.testing import CompileCounterWithBackend

    graphs, mesh, xs = CompileCounterWithBackend("aot_eager"), Mesh(x=2), arrays(NETWORK, 2)
    fast = torch.compile(loss_of(network), fullgraph=True, backend=graphs)
    run_on(mesh, NETWORK, fast, xs, steps=2)
    first = graphs.frame_count
    for _ in range(2):
        run_on(mesh, NETWORK, fast, xs, steps=2)
    assert graphs.frame_count == first <= mesh.size


def test_states_are_refused_by_name():
    fast = torch.compile(lambda x, w: L.linear(x, w, w_spec=ROWS), fullgraph=True, backend="aot_eager")
    with pytest.raises(StateError, match="check=False"):
        spt.map(fast, (P(), ROWS), COLUMNS, mesh=Mesh(x=2))(torch.ones(3, 4), torch.ones(4, 4))


def test_wrong_arguments_are_named():
    fast = torch.compile(lambda x, w: L.conv(x, w, spec=SPACE), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="argument w"):
        spt.map(fast, (SPACE, P()), SPACE, mesh=Mesh(x=2), check=False)(torch.ones(1, 2, 6), torch.ones(1, 3, 3))


def test_calls_in_flight_and_graphs_without_backward():
    """Two forward passes before the first backward, in any order, and one that never comes."""
    mesh, found = Mesh(x=2), {}

    def body(x: Any, w: Any) -> None:
        call = lambda x, w: L.conv(x, w, padding=1, spec=SPACE).square().sum()
        fast = torch.compile(call, fullgraph=True, backend="aot_eager")
        own = [w.clone().requires_grad_() for _ in range(3)]
        a, b, _ = (fast(k * x, v) for k, v in enumerate(own, 1))
        b.backward()
        a.backward()
        again = [w.clone().requires_grad_() for _ in range(2)]
        for k, v in enumerate(again, 1):
            call(k * x, v).backward()
        assert own[2].grad is None
        found[spmd.worker_index("x")] = [(v.grad, e.grad) for v, e in zip(own, again, strict=False)]

    x, w = arrays(Case(len, [(2, 3, 7), (4, 3, 3)], []), 0)
    spt.map(body, (SPACE, P()), None, mesh=mesh, check=False)(x, w)
    for pairs in found.values():
        for g, e in pairs:
            torch.testing.assert_close(g, e, rtol=1e-12, atol=1e-12)


def test_checkpointed_layers():
    from torch.utils.checkpoint import checkpoint

    def call(x: Any, w: Any) -> Any:
        part = lambda x: torch.tanh(L.conv(torch.sin(x), w, padding=1, spec=SPACE))
        return checkpoint(part, x, use_reentrant=False)

    case = Case(call, [(2, 3, 7), (3, 3, 3)], [SPACE, WHOLE])
    mesh, xs, loss = Mesh(x=2), arrays(case, 2), loss_of(call)
    fast = torch.compile(loss, fullgraph=True, backend="aot_eager")
    equal(run_on(mesh, case, fast, xs), run_on(mesh, case, loss, xs))


def test_a_second_derivative_is_refused():
    def body(x: Any, w: Any) -> None:
        w = w.clone().requires_grad_()
        y = torch.compile(lambda w: L.conv(x, w, spec=SPACE).pow(3).sum(), fullgraph=True, backend="aot_eager")(w)
        (g,) = torch.autograd.grad(y, w, create_graph=True)
        g.sum().backward()

    with pytest.raises(RuntimeError, match="double backward"):
        spt.map(body, (SPACE, P()), None, mesh=Mesh(x=1), check=False)(torch.ones(1, 2, 6), torch.ones(1, 2, 3))


@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_are_those_of_eager_mode(autocast):
    def call(x: Any, w: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return L.conv(x, w, padding=1, spec=SPACE), L.linear(x, v, w_spec=WHOLE)

    x, w, v = (a.float() for a in arrays(Case(len, [(2, 3, 7), (4, 3, 3), (5, 3)], []), 0))
    mesh, found = Mesh(x=2), {}

    def body(x: Any, w: Any, v: Any) -> None:
        fast = torch.compile(call, fullgraph=True, backend="aot_eager")
        x = x[..., :3]
        leaves = [w.clone().requires_grad_(), v.clone().requires_grad_()]
        runs = []
        for f in (call, fast):
            results = f(x, *leaves)
            runs.append([*results, *torch.autograd.grad(sum(y.float().square().sum() for y in results), leaves)])
        found[spmd.worker_index("x")] = runs

    spt.map(body, (SPACE, WHOLE, WHOLE), None, mesh=mesh, check=False)(x, w, v)
    for eager, compiled in found.values():
        for a, b in zip(compiled, eager, strict=True):
            torch.testing.assert_close(a, b)
        assert eager[0].dtype == (torch.bfloat16 if autocast else torch.float32)


def test_outside_of_bodies():
    """Nothing is split: torch's operators alone."""
    fast = torch.compile(lambda x, w: L.linear(torch.sin(x), w), fullgraph=True, backend="aot_eager")
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    torch.testing.assert_close(fast(x, w), torch.sin(x) @ w.T)


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_a_network_in_processes():
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    ended = launch(ROOT / "tests" / "bridge" / "torch" / "test_compiled_layers.py", n=2, timeout=300, PYTHONPATH=path)
    assert ended.returncode == 0, ended


if __name__ == "__main__":  # by mpiexec
    test_a_network(2)
