"""`functions.rnn`, `lstm` and `gru`: against torch.nn on one worker, and in blocks against one worker."""

from __future__ import annotations

import itertools
import json
from typing import Any, NamedTuple

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import recurring

import spmd
from functions.layer_cases import FRONTENDS, random_cuts, random_layout, random_mesh
from spmd import P, functions
from spmd.functions.recurrent import _network
from spmd.functions.recurrent_plan import (
    has_gates_apart,
    hidden_layout,
    inner_layout,
    lengths_layout,
    plan,
    split_layout,
    state_layout,
)
from spmd.layout import Layout

GATES = {"rnn": 1, "lstm": 4, "gru": 3}


class Problem(NamedTuple):
    """Layers, and the arrays that they take."""

    kind: str
    options: dict[str, Any]
    params: dict[str, np.ndarray]
    x: np.ndarray
    states: tuple[np.ndarray, ...]
    lengths: np.ndarray | None

    def __call__(self, x, states, params, lengths=None, **more):
        """A flat tuple of the results."""
        fun = getattr(functions, self.kind)
        state = states or None if self.kind == "lstm" else states[0] if states else None
        y, ends = fun(x, state, params, lengths=lengths, **self.options, **more)
        return (y, *ends) if self.kind == "lstm" else (y, ends)


def random_problem(
    rng: np.random.Generator, kind: str | None = None, draw: Any = None, dropout: bool = False
) -> Problem:
    kind = kind or rng.choice([*GATES])
    draw = draw or (lambda shape: rng.normal(size=shape))
    time, batch, inputs, hidden = (int(rng.integers(low, 7)) for low in (0, 0, 1, 1))
    layers, directions, bias = int(rng.integers(1, 4)), int(rng.integers(1, 3)), rng.random() < 0.7
    features = int(rng.integers(1, hidden)) if kind == "lstm" and hidden > 1 and rng.random() < 0.4 else hidden
    params = {}
    for layer, way in itertools.product(range(layers), ("", "_reverse")[:directions]):
        rows, columns = GATES[kind] * hidden, inputs if layer == 0 else directions * features
        params[f"weight_ih_l{layer}{way}"] = draw((rows, columns))
        params[f"weight_hh_l{layer}{way}"] = draw((rows, features))
        if bias:
            params[f"bias_ih_l{layer}{way}"], params[f"bias_hh_l{layer}{way}"] = draw((rows,)), draw((rows,))
        if features != hidden:
            params[f"weight_hr_l{layer}{way}"] = draw((features, hidden))
    count = layers * directions
    states = (draw((count, batch, features)), draw((count, batch, hidden)))[: 1 + (kind == "lstm")]
    options = {"nonlinearity": str(rng.choice(["tanh", "relu"]))} if kind == "rnn" else {}
    if dropout and rng.random() < 0.4:
        options |= {"dropout": 0.4, "key": spmd.random.key(int(rng.integers(100)))}
    lengths = rng.integers(0, time + 1, batch) if rng.random() < 0.5 else None
    return Problem(kind, options, params, draw((time, batch, inputs)), states, lengths)


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-10, atol=1e-11)


class Layouts(NamedTuple):
    """Where the operands of a layer lie as blocks, and its results. params: as blocks are cut from them."""

    spec: P | Layout
    w_spec: P | Layout | None
    params: dict[str, np.ndarray]
    operands: tuple[Any, ...]
    results: tuple[Layout, ...]


def random_layouts(rng: np.random.Generator, problem: Problem, mesh: spmd.Mesh) -> Layouts:
    gates, params = GATES[problem.kind], problem.params
    spec, w_spec = random_layout(rng, problem.x.shape, mesh), None
    w_layouts = {n: mesh.layout(a.shape, P()) for n, a in params.items()}
    if rng.random() < 0.5:
        hidden = params["weight_hh_l0"].shape[0] // gates
        names = tuple(n for n in mesh.axes if rng.random() < 0.5)
        cut = random_cuts(rng, hidden, int(np.prod([mesh.axes[n] for n in names], dtype=int)))
        cut = cut if rng.random() < 0.3 else None
        w_spec = P(names or None) if cut is None else Layout((hidden,), P(names or None), mesh.axes, [cut])
        params = {n: apart(gates, n, a) for n, a in params.items()}
        w_layouts = {n: split_layout(n, a.shape, names, cut, mesh.axes) for n, a in params.items()}
    x = spec if isinstance(spec, Layout) else mesh.layout(problem.x.shape, spec)
    names, cut = hidden_layout(w_layouts["weight_hh_l0"])
    batch = x if x.spec is None else inner_layout(x, names)
    whole = "weight_hr_l0" in params
    states = tuple(
        state_layout(batch, s.shape, () if whole and k == 0 else names, cut) for k, s in enumerate(problem.states)
    )
    lengths = None if problem.lengths is None else lengths_layout(batch)
    cell = problem.options.get("nonlinearity", problem.kind)
    net = _network("a test", cell, params)
    others = [w_layouts[n] for n in net.names if n != "weight_hh_l0"]
    h, c = (*states, None)[:2]
    results = plan(net, None, 0.0, w_layouts["weight_hh_l0"], x, h, c, lengths, None, *others).out
    return Layouts(spec, w_spec, params, (spec, states, w_layouts, lengths), results)


def apart(gates: int, name: str, a: np.ndarray) -> np.ndarray:
    return a if has_gates_apart(name, a.ndim) else a.reshape(gates, a.shape[0] // gates, *a.shape[1:])


def put(tree: Any, specs: Any, mesh: spmd.Mesh) -> Any:
    return None if tree is None else spmd.put(tree, specs, mesh)


def all_close(found: Any, expected: Any) -> None:
    for a, b in zip(spmd.tree.leaves(found), spmd.tree.leaves(expected), strict=True):
        close(a.numpy() if hasattr(a, "numpy") else a, np.asarray(b).reshape(np.shape(a)))


def check(seed: int, torch: bool) -> None:
    """In bodies, with states and without, on both schedulers; as tensors; and as global arrays."""
    rng = np.random.default_rng(seed)
    problem, mesh = random_problem(rng, dropout=True), random_mesh(rng)
    at = random_layouts(rng, problem, mesh)
    states = problem.states if rng.random() < 0.8 else ()
    microbatches = rng.choice([None, 1, 2, 3, 9])
    in_specs = at.operands[0], at.operands[1][: len(states)], *at.operands[2:]

    def fun(x, states, params, lengths):
        options = {"spec": at.spec, "w_spec": at.w_spec, "microbatches": microbatches}
        return problem(x, states, params, lengths, **options)

    args = problem.x, states, at.params
    value, pullback = spmd.vjp(lambda *a: problem(*a, problem.lengths), *args)
    g = tuple(rng.normal(size=v.shape) for v in value)
    expected = pullback(g)
    if torch:
        return check_tensors(fun, value, expected, (*args, problem.lengths), in_specs, at.results, mesh, g)
    for scheduler, tracked in (("lockstep", True), ("threads", False)):
        on = spmd.Mesh(**mesh.axes, scheduler=scheduler)
        mapped = on.map(fun, in_specs=in_specs, out_specs=at.results, check=tracked)
        *placed, lengths = (put(a, s, on) for a, s in zip((*args, problem.lengths), in_specs, strict=True))
        found, back = spmd.vjp(lambda *a, mapped=mapped, n=lengths: mapped(*a, n), *placed)
        all_close(found, value)
        all_close(back(spmd.put(g, at.results, on)), expected)
    check_global(rng, problem, args, mesh, value, expected, g)


def check_global(rng, problem, args, mesh, value, expected, g) -> None:
    """Global arrays in layouts that have nothing to do with each other."""
    *placed, lengths = (
        None if tree is None else spmd.tree.map(lambda a: spmd.put(a, random_layout(rng, a.shape, mesh), mesh), tree)
        for tree in (*args, problem.lengths)
    )
    found, back = spmd.vjp(lambda *a: problem(*a, lengths), *placed)
    all_close(found, value)
    all_close(back(tuple(spmd.put(a, f.layout, mesh) for a, f in zip(g, found, strict=True))), expected)


def check_tensors(fun, value, expected, args, in_specs, out_specs, mesh, g) -> None:
    import torch

    from spmd.bridge import torch as spt

    tensors = spmd.tree.map(lambda a: torch.tensor(a, requires_grad=a.dtype.kind == "f"), args)
    found = spt.map(fun, in_specs=in_specs, out_specs=out_specs, mesh=mesh)(*tensors)
    all_close([y.detach() for y in found], value)
    sum((y * torch.tensor(a)).sum() for y, a in zip(found, g, strict=True)).backward()
    all_close([t.grad for t in spmd.tree.leaves(tensors[:3])], expected)


@FRONTENDS
@pytest.mark.parametrize("seed", range(25))
def test_any_layouts(seed, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_layouts(seed, torch):
    check(seed, torch)


def module_of(problem: Problem, dtype: Any) -> Any:
    """The module of torch.nn with these parameters."""
    import torch

    params = problem.params
    (rows, inputs), hh = params["weight_ih_l0"].shape, params["weight_hh_l0"]
    options = {**problem.options, "bias": "bias_ih_l0" in params}
    if "weight_hr_l0" in params:
        options["proj_size"] = hh.shape[1]
    layers = sum(n.startswith("weight_hh") and "reverse" not in n for n in params)
    kind = getattr(torch.nn, problem.kind.upper())
    both = "weight_hh_l0_reverse" in params
    module = kind(inputs, rows // GATES[problem.kind], layers, bidirectional=both, **options).to(dtype)
    module.load_state_dict({n: torch.tensor(a) for n, a in params.items()})
    return module


@pytest.mark.torch
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 1e-4)])
@pytest.mark.parametrize("seed", range(12))
def test_as_torch(seed, dtype, tolerance):
    """Values and gradients; with lengths as of packed sequences, which may not be empty for torch."""
    import torch

    rng = np.random.default_rng(seed)
    problem = random_problem(rng)
    if not problem.x.size:
        problem = problem._replace(x=rng.normal(size=(3, 2, problem.x.shape[2])), lengths=None)
        problem = problem._replace(states=tuple(rng.normal(size=(len(s), 2, s.shape[2])) for s in problem.states))
    problem = Problem(
        *spmd.tree.map(lambda a: a.astype(dtype) if hasattr(a, "dtype") and a.dtype == float else a, tuple(problem))
    )
    lengths = None if problem.lengths is None else np.maximum(problem.lengths, 1)
    module = module_of(problem, getattr(torch, dtype))
    x, *states = (torch.tensor(a, requires_grad=True) for a in (problem.x, *problem.states))
    utils = torch.nn.utils.rnn
    packed = x if lengths is None else utils.pack_padded_sequence(x, torch.tensor(lengths), enforce_sorted=False)
    y, ends = module(packed, tuple(states) if problem.kind == "lstm" else states[0])
    y = y if lengths is None else utils.pad_packed_sequence(y, total_length=len(x))[0]
    wanted = (y, *ends) if problem.kind == "lstm" else (y, ends)
    g = tuple(rng.normal(size=tuple(w.shape)).astype(dtype) for w in wanted)
    sum((w * torch.tensor(a)).sum() for w, a in zip(wanted, g, strict=True)).backward()
    found, pullback = spmd.vjp(lambda *a: problem(*a, lengths), problem.x, problem.states, problem.params)
    gradients = pullback(g)
    named = dict(module.named_parameters())
    pairs = [*zip(found, wanted, strict=True), (gradients[0], x.grad)]
    pairs += [(a, s.grad) for a, s in zip(gradients[1], states, strict=True)]
    pairs += [(a, named[n].grad) for n, a in gradients[2].items()]
    for a, b in pairs:
        assert a.dtype == dtype
        np.testing.assert_allclose(np.asarray(a), b.detach().numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", [*GATES])
def test_second_order(kind):
    rng = np.random.default_rng(3)
    problem = random_problem(rng, kind)
    problem.options.update(nonlinearity="tanh") if kind == "rnn" else None
    fun = lambda *a: sum(np.sum(y * y) for y in problem(*a, problem.lengths))
    spmd.check_grads(fun, (problem.x, problem.states, problem.params), order=2, modes=("rev",))


@pytest.mark.parametrize(
    ("kind", "spec"),
    [("lstm", P()), ("gru", P(None, "a")), ("rnn", P("a")), ("lstm", P("b", "a"))],
)
def test_a_program_has_the_step_once(kind, spec):
    """One step of each layer, however many there are; and the numbers are those without jit."""
    rng = np.random.default_rng(0)
    problem = random_problem(rng, kind)

    def lines(steps: int) -> int:
        x = rng.normal(size=(steps, 4, problem.params["weight_ih_l0"].shape[1]))

        def loss(x, params):
            y, *_ = problem(x, None, params, spec=spec, microbatches=2)
            return spmd.sum(y * y, spec.axes) if spec.axes else np.sum(y * y)

        with spmd.Mesh(a=2, b=2):
            mapped = spmd.map(loss, in_specs=(spec, P()), out_specs=P())
            program = spmd.jit(spmd.value_and_grad(mapped, (0, 1)))
            found = program(x, problem.params)
            if steps < 100:
                all_close(found, spmd.value_and_grad(mapped, (0, 1))(x, problem.params))
        return len(program.text().splitlines())

    assert lines(90) == lines(200)


@each_mpi
def test_processes_give_the_bits_of_virtual_workers(python):
    ended = launch(PROGRAMS / "recurring.py", python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert json.loads(ended.stdout) == recurring.results(transport="local", scheduler="threads")


def check_packed(seed: int, as_tensors: bool) -> None:
    """Packed data in place of padded: the same outputs, packed, states and gradients."""
    rng = np.random.default_rng(seed)
    problem = random_problem(rng, dropout=True)
    while not problem.x.size:
        problem = random_problem(rng, dropout=True)
    time, batch, _ = problem.x.shape
    lengths = np.sort(rng.integers(1, time + 1, batch))[::-1]
    present = np.arange(time)[:, None] < lengths
    sizes = present.sum(1).tolist()
    value, pullback = spmd.vjp(lambda *a: problem(*a, lengths.copy()), problem.x, problem.states, problem.params)
    g = [rng.normal(size=v.shape) for v in value]
    g[0] = np.where(present[:, :, None], g[0], 0)
    expected = pullback(tuple(g))
    value, g = ((a[0][present], *a[1:]) for a in (value, g))
    expected = (expected[0][present], *expected[1:])
    args = problem.x[present], problem.states, problem.params
    if not as_tensors:
        found, back = spmd.vjp(lambda *a: problem(*a, batch_sizes=sizes), *args)
        all_close(found, value)
        return all_close(back(g), expected)
    fun = lambda *a: problem(*a, batch_sizes=sizes)
    check_tensors(fun, value, expected, args, (P(), P(), P()), P(), spmd.Mesh(x=2), g)


@FRONTENDS
@pytest.mark.parametrize("seed", range(6))
def test_packed(seed, torch):
    check_packed(seed, torch)


def test_packed_in_blocks_of_hidden_features():
    rng = np.random.default_rng(0)
    x, sizes = rng.normal(size=(6, 3)), (3, 2, 1)
    params = recurring.parameters(rng, 3)
    wanted = functions.gru(x, None, params, batch_sizes=sizes)
    mesh = spmd.Mesh(m=2)
    fun = lambda x, p: functions.gru(x, None, p, batch_sizes=sizes, w_spec=P("m"))
    found = mesh.map(fun, in_specs=(P(), P(None, "m")), out_specs=(P(), P(None, None, "m")))(x, params)
    all_close(found, wanted)


@pytest.mark.parametrize(("spec", "w_spec"), [(P("a"), None), (P(None, "b"), P("a")), (P("b"), P("a"))])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_second_order_in_blocks(kind, spec, w_spec):
    rng = np.random.default_rng(5)
    x, params = rng.normal(size=(4, 3, 3)), recurring.parameters(rng, GATES[kind])
    layer = getattr(functions, kind)

    def energy(x, params):
        y, _ = layer(x, None, params, spec=spec, w_spec=w_spec)
        return spmd.psum(np.sum(y**3), spec.axes)

    def curvature(energy):
        return spmd.grad(
            lambda x, p: sum(np.sum(g**2) for g in spmd.tree.leaves(spmd.grad(energy, (0, 1))(x, p))), (0, 1)
        )

    wanted = curvature(lambda x, p: np.sum(layer(x, None, p)[0] ** 3))(x, params)
    w_specs = P() if w_spec is None else P(None, *w_spec)
    with spmd.Mesh(a=2, b=2):
        mapped = spmd.map(energy, in_specs=(spec, w_specs), out_specs=P())
        found = curvature(mapped)(spmd.put(x, spec), spmd.put(params, w_specs))
    all_close(found, wanted)
