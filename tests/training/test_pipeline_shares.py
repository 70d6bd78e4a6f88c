"""Pipelines on `data` x `stage`: shares of any lengths give the loss and gradients of the whole minibatch."""

from __future__ import annotations

import numpy as np
import pytest

import spmd
from spmd import P

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(53, 4)), RNG.normal(size=(53, 2))
WEIGHTS = [{"w": RNG.normal(size=(4, 3))}, {"w": RNG.normal(size=(3, 2)), "b": RNG.normal(size=2)}]


def stage(params, x):
    return np.tanh(x @ params["w"] + params.get("b", 0.0))


def by_one(x, y):
    def loss(params):
        return np.mean((stage(params[1], stage(params[0], x)) - y) ** 2)

    return spmd.value_and_grad(loss)(WEIGHTS)


def near(found, want):
    for a, b in zip(spmd.tree.leaves(found), spmd.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a.numpy() if hasattr(a, "numpy") else a, b, rtol=0, atol=1e-12)


LOSSES = {
    "mean": (lambda h, y, n: spmd.mean((h - y) ** 2, "data"), "mean", False),
    "own mean": (lambda h, y, n: np.mean((h - y) ** 2), "mean", True),
    "sum": (lambda h, y, n: spmd.sum((h - y) ** 2, "data") / (2 * n), "sum", False),
    "own sum": (lambda h, y, n: np.sum((h - y) ** 2) / (2 * n), "sum", True),
    "own sum by means": (lambda h, y, n: np.mean((h - y) ** 2) * len(y) / n, "sum", True),
    "one value by counts": (lambda h, y, n: np.sum((h - y) ** 2) / (2 * spmd.psum(len(y), "data")), "mean", True),
}
"""A loss of a microbatch of n samples in all, its reduction, and whether it is each worker's own."""

SHARES = [
    (13, 3, 2, "1f1b"),
    (13, 2, 2, "zero_bubble"),
    (7, 3, 2, "gpipe"),
    (5, 3, 2, "zero_bubble"),
    (1, 3, 2, "1f1b"),
    (2, 3, 1, "1f1b"),
    (53, 8, 3, "gpipe"),
    (2, 4, 3, "1f1b"),
]
"""Samples, microbatches, workers along data, and a schedule."""


@pytest.mark.filterwarnings("error", "ignore:Mean of empty slice")
@pytest.mark.parametrize("shares", SHARES, ids=lambda shares: "-".join(map(str, shares)))
@pytest.mark.parametrize("kind", ["mean", "sum", "own sum", "own sum by means"])
def test_uneven_shares_are_what_one_worker_does(scheduler, kind, shares):
    """Value and gradient together, and the gradient alone: then nothing compares copies of the value."""
    n, microbatches, workers, schedule = shares
    loss, reduction, own = LOSSES[kind]
    step = spmd.training.pipeline(
        [stage] * 2,
        microbatches=microbatches,
        schedule=schedule,
        loss=lambda h, y: loss(h, y, n),
        reduction=reduction,
    )

    def body(params, x, y):
        value, grads = step.value_and_grad(params, x, y)
        return spmd.psum(value, "data") if own else value, grads.params

    with spmd.Mesh(data=workers, stage=2, scheduler=scheduler):
        specs = spmd.training.stage_specs(WEIGHTS)
        ins = (specs, P("data"), P("data"))
        found = spmd.map(body, ins, (P(), specs))(WEIGHTS, X[:n], Y[:n])
        alone = spmd.map(lambda *a: step.value_and_grad(*a)[1].params, ins, specs)(WEIGHTS, X[:n], Y[:n])
    want = by_one(X[:n], Y[:n])
    near(found, want)
    near(alone, want[1])


@pytest.mark.parametrize("kind", ["own mean", "one value by counts"])
@pytest.mark.parametrize("shares", [(13, 3, 2), (7, 3, 2), (53, 8, 4)], ids=lambda shares: "-".join(map(str, shares)))
def test_it_gives_what_accumulate_gives(scheduler, kind, shares):
    """Losses that vary over data: by the worker's own counts, or by those of all workers where that is said."""
    n, microbatches, workers = shares
    loss = LOSSES[kind][0]
    over = "data" if kind == "one value by counts" else None
    step = spmd.training.pipeline(
        [stage] * 2, microbatches=microbatches, loss=lambda h, y: loss(h, y, n), loss_axis_name=over
    )

    def whole(params, x, y):
        return loss(stage(params[1], stage(params[0], x)), y, n)

    def body(params, x, y):
        value, grads = step.value_and_grad(params, x, y)
        expected = spmd.training.accumulate(whole, microbatches, axis_name=over)(WEIGHTS, x, y)
        return spmd.psum(value - expected[0], "data"), grads.params, expected[1]

    with spmd.Mesh(data=workers, stage=2, scheduler=scheduler):
        specs = spmd.training.stage_specs(WEIGHTS)
        out = spmd.map(body, (specs, P("data"), P("data")), (P(), specs, P()))(WEIGHTS, X[:n], Y[:n])
    assert abs(float(out[0])) < 1e-12
    near(out[1], [spmd.tree.map(lambda a: a.numpy(), own) for own in out[2]])
    if over:
        near(out[1], by_one(X[:n], Y[:n])[1])


def test_copies_are_compared_under_debug(scheduler):
    step = spmd.training.pipeline([stage] * 2, microbatches=3, loss=lambda h, y: spmd.mean((h - y) ** 2, "data"))
    with spmd.Mesh(data=2, stage=2, scheduler=scheduler), spmd.debug(replicas=True):
        specs = spmd.training.stage_specs(WEIGHTS)
        body = lambda *a: step.value_and_grad(*a)[1].params
        near(spmd.map(body, (specs, P("data"), P("data")), specs)(WEIGHTS, X[:13], Y[:13]), by_one(X[:13], Y[:13])[1])


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_an_error_says_in_which_action_it_arose(scheduler, kind):
    @spmd.custom_vjp
    def odd(x):
        if kind == "forward" and len(x) == 1:
            raise ArithmeticError("not of one")
        return x

    def back(n, g):
        if n == 1:
            raise ArithmeticError("not of one")
        return (g,)

    odd.defvjp(lambda x: (odd(x), len(x)), back)
    step = spmd.training.pipeline([lambda w, x: w * x, lambda w, x: odd(w * x)], microbatches=3, loss=np.mean)
    f = spmd.map(lambda x: step.value_and_grad([2.0] * 2, x)[0], P(), P(), mesh=spmd.Mesh(stage=2, scheduler=scheduler))
    with pytest.raises(ArithmeticError) as caught:
        f(np.ones(5))
    notes = [note for note in caught.value.__notes__ if "of the pipeline" in note]
    assert notes == [f"raised in the {kind} action of stage 1 of the pipeline, for microbatch 2"]
