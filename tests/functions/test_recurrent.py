"""`functions.rnn`, `lstm` and `gru`: against torch.nn on one worker, and in blocks against one worker."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

import spmd
from functions.layer_cases import FRONTENDS, integers, random_cuts, random_layout, random_mesh
from spmd import P, functions
from spmd.functions.recurrent import _network
from spmd.functions.recurrent_plan import has_gates_apart, hidden_layout, inner_layout, lengths_layout, state_layout
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


def random_problem(rng: np.random.Generator, kind: str | None = None, draw: Any = None) -> Problem:
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
    lengths = rng.integers(0, time + 1, batch) if rng.random() < 0.5 else None
    return Problem(kind, options, params, draw((time, batch, inputs)), states, lengths)


def close(a: Any, b: Any) -> None:
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-10, atol=1e-11)


def leaves(tree: Any) -> list[Any]:
    return spmd.tree.leaves(tree)


def with_gates_apart(problem: Problem) -> dict[str, np.ndarray]:
    gates = GATES[problem.kind]
    return {
        n: a if has_gates_apart(n, a.ndim) else a.reshape(gates, a.shape[0] // gates, *a.shape[1:])
        for n, a in problem.params.items()
    }


def check_blocks(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    problem, mesh = random_problem(rng), random_mesh(rng)
    hidden = problem.params["weight_hh_l0"].shape[0] // GATES[problem.kind]
    spec = random_layout(rng, problem.x.shape, mesh)
    w_spec = None
    params, w_specs = problem.params, {n: P() for n in problem.params}
    if rng.random() < 0.5:
        names = tuple(n for n in mesh.axes if rng.random() < 0.5)
        cuts = [random_cuts(rng, hidden, int(np.prod([mesh.axes[n] for n in names], dtype=int)))]
        w_spec = P(names or None)
        w_spec = Layout((hidden,), w_spec, mesh.axes, cuts) if rng.random() < 0.3 else w_spec
        params = with_gates_apart(problem)
        cut = w_spec.cuts[0] if isinstance(w_spec, Layout) else None
        w_specs = {
            n: Layout(a.shape, P(None, names), mesh.axes, [None, cut, *[None] * (a.ndim - 2)])
            for n, a in params.items()
        }
    used = problem.states if rng.random() < 0.8 else ()
    x_layout = spec if isinstance(spec, Layout) else mesh.layout(problem.x.shape, spec)
    weight = w_specs["weight_hh_l0"]
    weight = weight if isinstance(weight, Layout) else mesh.layout(params["weight_hh_l0"].shape, weight)
    names, cut = hidden_layout(weight)
    batch = x_layout if x_layout.spec is None else inner_layout(x_layout, names)
    projected = "weight_hr_l0" in params
    state_specs = tuple(
        state_layout(batch, s.shape, () if k == 0 and projected else names, cut) for k, s in enumerate(problem.states)
    )
    both = "weight_hh_l0_reverse" in params
    features = params["weight_hh_l0"].shape[-1] * (1 + both)
    if x_layout.spec is None:
        blocks = tuple(map(len, x_layout.cuts))
        y_cuts = [*x_layout.cuts[:2], None]
        y_spec = Layout.grid((*problem.x.shape[:2], features), blocks, mesh.axes, x_layout.workers, y_cuts)
    else:
        split = not both and not projected
        y_names = [*(d or None for d in batch.spec.dims[:2]), names if split else None]
        y_cuts = [*batch.cuts[:2], cut if split else None]
        y_spec = Layout((*problem.x.shape[:2], features), P(*y_names), mesh.axes, y_cuts)
    outs = (y_spec, *state_specs)
    microbatches = rng.choice([None, 1, 2, 3, 9])
    options = {"microbatches": microbatches}
    lengths = problem.lengths
    in_specs = (spec, state_specs[: len(used)], w_specs, None if lengths is None else lengths_layout(batch))

    def fun(x, states, params, lengths):
        return problem(x, states, params, lengths, spec=spec, w_spec=w_spec, **options)

    args = problem.x, used, params
    value, pullback = spmd.vjp(lambda *a: problem(*a, lengths), *args)
    g = tuple(rng.normal(size=v.shape) for v in value)
    expected = pullback(g)
    for scheduler, tracked in (("lockstep", True), ("threads", False)):
        on = spmd.Mesh(**mesh.axes, scheduler=scheduler)
        mapped = on.map(fun, in_specs=in_specs, out_specs=outs, check=tracked)
        placed = (
            [spmd.put(a, s, on) for a, s in zip((*args, lengths), in_specs, strict=True)]
            if lengths is not None
            else [*(spmd.put(a, s, on) for a, s in zip(args, in_specs[:3], strict=True)), None]
        )
        found, back = spmd.vjp(lambda *a: mapped(*a, placed[3]), *placed[:3])
        for a, b in zip(found, value, strict=True):
            close(a.numpy(), b)
        for a, b in zip(
            leaves(back(tuple(spmd.put(a, s, on) for a, s in zip(g, outs, strict=True)))), leaves(expected), strict=True
        ):
            close(a.numpy(), b)


@pytest.mark.parametrize("seed", range(40))
def test_blocks(seed):
    check_blocks(seed, False)
