"""`spt.functions.experts` against all experts on all tokens on one worker."""

from __future__ import annotations

import copy
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launch import PROGRAMS, TORCHRUN, launch, mpiexec

torch = pytest.importorskip("torch")
from functions.expert_cases import check_tensors, close, random_case  # noqa: E402
from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402


def check(seed: int, stacked: bool, checked: bool) -> None:
    case = random_case(seed)
    check_tensors(case, spmd.Mesh(**case.axes, transport="local"), stacked, checked)


@given(st.integers(0, 10**6), st.booleans(), st.booleans())
@settings(max_examples=30)
def test_they_are_the_dense_computation(seed, stacked, checked):
    check(seed, stacked, checked)


@pytest.mark.full
@given(st.integers(0, 10**6), st.booleans(), st.booleans())
@settings(max_examples=500)
def test_they_are_the_dense_computation_in_many_cases(seed, stacked, checked):
    check(seed, stacked, checked)


# The layer


@pytest.fixture
def double():
    outer = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(outer)


def make(count: int) -> tuple[list[nn.Module], nn.Module]:
    """Experts and a gate."""
    return [nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) for _ in range(count)], nn.Linear(4, count)


def steps(model, forward, x, target, sum_of=lambda loss: loss) -> list[float]:
    """Losses of five steps; the scores of the gate are balanced too."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 0.01), []
    for _ in range(5):
        optimizer.zero_grad()
        y, balance = forward(x)
        loss = sum_of(((y - target) ** 2).sum()) + balance
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_alone(experts, gate, x, target) -> tuple[list[float], nn.ModuleList]:
    """Five steps of all experts on all tokens, masked."""
    model = copy.deepcopy(nn.ModuleList([*experts, gate]))

    def forward(x):
        scores = model[-1](x)
        best, indices = scores.topk(2, -1)
        weights = torch.zeros_like(scores).scatter(1, indices, best.softmax(-1))
        y = sum(weights[:, e : e + 1] * expert(x) for e, expert in enumerate([*model][:-1]))
        shares = (weights > 0).double().mean(0) / 2
        return y, len(experts) * (shares * scores.softmax(-1).mean(0)).sum()

    return steps(model, forward, x, target), model


@pytest.mark.parametrize("axes", [{"e": 1}, {"e": 2}, {"e": 3}, {"e": 7}, {"data": 2, "e": 3}], ids=str)
def test_training_the_layer_is_training_on_one_worker(double, axes):
    """Uneven numbers of experts, on some workers none; their parameters, which are saved whole, are those of one."""
    experts, gate = make(5)
    x, target, names = torch.randn(11, 4), torch.randn(11, 4), tuple(axes)
    losses, alone = trained_alone(experts, gate, x, target)

    def body(x, target):
        layer = spt.nn.Experts(experts, copy.deepcopy(gate), "e")

        def forward(x):
            y, scores = layer(x, with_scores=True)
            return y, spt.functions.load_balance_loss(scores, names)

        found = steps(layer, forward, x, target, lambda loss: spmd.psum(loss, names))
        return found, {name: value.clone() for name, value in layer.state_dict().items()}

    mesh = spmd.Mesh(**axes, transport="local")
    found, state = spt.map(body, in_specs=P(names), out_specs=(None, None), mesh=mesh)(x, target)
    close(found, losses)
    for name, own in alone[-1].named_parameters():
        close(state[f"gate.{name}"], own.detach())
    for e in range(5):
        for name, own in alone[e].named_parameters():
            close(state[name.replace(".", "__")][e], own.detach())


class Scaled(nn.Module):
    """An expert whose attributes say what it computes."""

    def __init__(self, scale: float, function):
        super().__init__()
        self.linear, self.scale, self.function = nn.Linear(4, 4), scale, function
        self.dropout = nn.Dropout(0.9)

    def forward(self, x):
        return self.scale * self.dropout(self.function(self.linear(x)))


def differing_experts() -> list[nn.Module]:
    """Other attributes, other hooks; a part that is not in training."""
    experts = [Scaled(1.0, torch.tanh), Scaled(2.0, torch.relu), Scaled(3.0, torch.sin)]
    for e, expert in enumerate(experts):
        expert.dropout.eval()
        expert.register_forward_hook(lambda module, inputs, output, e=e: output + e)
    return experts


def tied_experts() -> list[nn.Module]:
    """Experts of two layers with one weight."""
    experts = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(3)]
    for expert in experts:
        expert[2].weight = expert[0].weight
    return experts


@pytest.mark.parametrize("make_experts", [differing_experts, tied_experts])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_expert_is_the_module_that_was_given(double, make_experts, n):
    experts, gate, x = make_experts(), nn.Linear(4, 3), torch.randn(9, 4)

    def body(x):
        own_gate = copy.deepcopy(gate)
        layer = spt.nn.Experts(experts, own_gate, "e")
        found = layer(x)
        spt.psum((found**2).sum(), "e").backward()
        layer.eval()
        return found.detach(), layer(x).detach(), own_gate.weight.grad

    y, again, grad = spt.map(body, P("e"), (P("e"), P("e"), P()), mesh=spmd.Mesh(e=n, transport="local"))(x)
    best, indices = gate(x).topk(2, -1)
    weights = torch.zeros(9, 3).scatter(1, indices, best.softmax(-1))
    expected = sum(weights[:, e : e + 1] * expert(x) for e, expert in enumerate(experts))
    (expected**2).sum().backward()
    close(y, expected.detach())
    close(again, expected.detach())
    close(grad, gate.weight.grad)


def test_losses_take_the_scores_of_the_layer(double):
    experts, gate = make(3)
    x = torch.randn(4, 5, 4)

    def body(x):
        _, scores = spt.nn.Experts(experts, gate, "e")(x, with_scores=True)
        return spt.functions.load_balance_loss(scores, "e"), spt.functions.router_z_loss(scores, "e")

    found, alone = (spt.map(body, P("e"), P(), mesh=spmd.Mesh(e=n))(x) for n in (2, 1))
    for loss, expected in zip(found, alone, strict=True):
        close(loss.detach(), expected.detach())


def test_frozen_gates_train_experts_where_some_workers_have_none(double):
    """Neither tokens nor scores are differentiated: only workers with experts know that there is a backward pass."""
    experts, gate = make(2)
    x = torch.randn(7, 4)
    gate.requires_grad_(False)
    scores = gate(x)

    def body(x, scores):
        own = [copy.deepcopy(m) for m in experts[spmd.worker_index("e") : spmd.worker_index("e") + 1]]
        spt.functions.experts(x, scores, own, "e").sum().backward()
        return tuple(p.grad.clone() for m in own for p in m.parameters()) or None

    mesh = spmd.Mesh(e=4, transport="local")
    found = []
    spt.map(lambda x, s: found.append(body(x, s)), in_specs=P("e"), out_specs=None, mesh=mesh, check=False)(x, scores)
    weights = scores.softmax(-1)
    sum((weights[:, e : e + 1] * m(x)).sum() for e, m in enumerate(experts)).backward()
    wanted = [[p.grad for p in m.parameters()] for m in experts]
    assert sum(grads is not None for grads in found) == 2
    for grads in found:
        assert grads is None or any(all(map(torch.allclose, grads, want)) for want in wanted)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_the_layer_is_loaded_on_another_mesh(double, n, tmp_path):
    """Saved by three workers, with two, two and one of five experts."""
    (experts, gate), (others, another), x = make(5), make(5), torch.randn(11, 4)

    def saved(x):
        layer = spt.nn.Experts(experts, gate, "e")
        spmd.save(tmp_path / "layer", layer)
        return layer(x)

    def loaded(x):
        layer = spt.nn.Experts(others, another, "e")
        spmd.load(tmp_path / "layer", layer)
        return layer(x)

    y, z = (
        spt.map(body, in_specs=P("e"), out_specs=P("e"), mesh=spmd.Mesh(e=size, transport="local"))(x).detach()
        for body, size in ((saved, 3), (loaded, n))
    )
    close(z, y)


def test_compiled_functions_leave_their_graph(double):
    experts, gate = make(3)
    x = torch.randn(6, 4)

    def body(x):
        layer = spt.nn.Experts(experts, gate, "e")
        return torch.compile(lambda x: layer(torch.sin(x)) * 2, backend="eager")(x)

    y = spt.map(body, in_specs=P("e"), out_specs=P("e"), mesh=spmd.Mesh(e=2), check=False)(x)
    expected = spt.map(lambda x: spt.nn.Experts(experts, gate, "e")(x), P("e"), P("e"), mesh=spmd.Mesh(e=1))
    close(y.detach(), 2 * expected(torch.sin(x)).detach())


def test_short_numbers_and_autocast():
    """The result has the dtype of tokens; scores may be of another."""
    x, scores = torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor([[1.0, 0.0]] * 3)

    def body(x, scores):
        own = nn.Linear(2, 2)
        with torch.autocast("cpu", torch.bfloat16):
            narrow = spt.functions.experts(x.float(), scores, [own], "e")
        return narrow, spt.functions.experts(x, scores, [lambda rows: 2 * rows], "e")

    mesh = spmd.Mesh(e=2)
    narrow, y = spt.map(body, in_specs=P("e"), out_specs=P("e"), mesh=mesh, check=False)(x, scores)
    assert narrow.dtype == torch.float32
    assert torch.equal(y, 2 * x)


@pytest.mark.parametrize(
    ("python", "n"),
    [pytest.param(sys.executable, 4, marks=pytest.mark.mpi, id="mpi"), pytest.param(TORCHRUN, 2, id="torchrun")],
)
def test_processes(python, n):
    """Under the mpiexec of this environment: the one with Open MPI has no torch."""
    if python == sys.executable and mpiexec() is None:
        pytest.skip("no mpiexec beside this Python")
    ended = launch(PROGRAMS / "experts.py", "6", str(n), "torch", n=n, python=python, timeout=180)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.count("are the dense computation") == n, str(ended)


@pytest.mark.parametrize("held", [(3, 1), (4, 0)], ids=str)
def test_gradients_that_some_workers_would_not_sum_are_refused(double, held):
    """Experts close over one array of all workers: each would sum its gradient as often as it has experts."""
    x, scores, w = torch.randn(6, 3), torch.randn(6, 4), torch.randn(4, 3, 3)

    def body(x, scores, w, varied):
        w = w.detach().requires_grad_()
        v, k = spt.pvary(w, "e") if varied else w, spmd.worker_index("e")
        own = range(sum(held[:k]), sum(held[: k + 1]))
        y = spt.functions.experts(x, scores, [lambda rows, e=e: rows @ v[e] for e in own], "e")
        spt.psum(y.sum(), "e").backward()
        return w.grad.clone()

    def run(varied):
        mesh = spmd.Mesh(e=2, transport="local")
        ins = (P("e"), P("e"), P())
        return spt.map(lambda *xs: body(*xs, varied), in_specs=ins, out_specs=P(), mesh=mesh)(x, scores, w)

    with pytest.raises(spmd.errors.StateError, match=r"closes over a differentiated array(.|\n)*pvary"):
        run(False)
    if 0 not in held:
        alone = w.clone().requires_grad_()
        spt.functions.experts(x, scores, [lambda rows, v=v: rows @ v for v in alone.unbind()]).sum().backward()
        close(run(True), alone.grad)
