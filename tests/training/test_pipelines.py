"""Pipelines with arrays of bodies: what one worker computes, in every schedule, with what each worker keeps counted."""

from __future__ import annotations

import numpy as np
import pytest
from mpi_programs.pipelined import agree
from process_cases import each_engine, ended_well

import spmd
from spmd import P
from spmd.errors import DifferentiationError, JitError, LayoutError, SpecError, StateError
from spmd.operators.messages import packed, unpacked
from spmd.operators.root import Rooted
from spmd.training.pipelines.schedules import SCHEDULES, schedule_of
from spmd.training.pipelines.simulation import alive

COMBINED = [
    ("gpipe", 2, 5, 3, {"stage": 2}),
    ("1f1b", 3, 8, 5, {"stage": 3}),
    ("1f1b", 2, 3, 5, {"stage": 2}),  # empty microbatches
    ("zero_bubble", 4, 8, 8, {"stage": 4}),
    ("interleaved", 4, 7, 3, {"stage": 2}),
    ("interleaved", 6, 7, 4, {"stage": 3}),
    ("interleaved", 3, 7, 4, {"stage": 1}),
    ("1f1b", 2, 9, 3, {"data": 3, "stage": 2}),
    ("1f1b", 3, 9, 3, {"stage": 3, "model": 2}),
    ("gpipe", 3, 5, 4, {"data": 2, "stage": 3, "model": 2}),
]
"""A schedule, stages, the length of the batch, microbatches, and the axes of the mesh."""


@pytest.mark.parametrize("case", COMBINED, ids=lambda case: "-".join(map(str, (*case[:4], *case[4]))))
def test_ten_steps_are_those_of_one_worker(scheduler, case):
    """Losses and parameters, and how many microbatches each worker keeps."""
    name, stages, n, microbatches, axes = case
    kept = agree(stages, n, name, microbatches, {"scheduler": scheduler}, **axes)
    mesh, schedule = spmd.Mesh(**axes), schedule_of(name, axes["stage"], microbatches, stages // axes["stage"])
    assert kept == {w: alive(schedule, mesh.coordinates(w)["stage"]) for w in range(mesh.size)}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_random_pipelines_are_what_one_worker_does(seed, scheduler):
    rng = np.random.default_rng(seed)
    name, workers = rng.choice([*SCHEDULES]), int(rng.integers(2, 5))
    virtual = int(rng.integers(1, 4)) if name == "interleaved" else 1
    axes = {"data": int(rng.integers(1, 3)), "stage": workers}
    agree(workers * virtual, int(rng.integers(2, 20)), name, int(rng.integers(1, 9)), {"scheduler": scheduler}, **axes)


@each_engine
def test_among_processes(python):
    assert ended_well("pipelined.py", python=python) == "trained\n"


FUNCTIONS = [lambda w, x: np.tanh(x * w), lambda w, x: (x * w, x), lambda w, x: {"y": x[0] - w * x[1]}]
W = [1.5, np.array([2.0, -1.0]), np.array([0.5, 3.0])]
X = np.random.default_rng(0).normal(size=(7, 2))


def applied(w, x):
    for f, own in zip(FUNCTIONS, w, strict=True):
        x = f(own, x)
    return x["y"]


@each_engine
def test_messages_longer_than_a_packet(python):
    assert (
        ended_well("wide_pipelines.py", "4x1,2x2", *SCHEDULES, n=4, python=python, timeout=240) == "as on one worker\n"
    )


@pytest.mark.full
@each_engine
@pytest.mark.parametrize(("axes", "n"), [("3x1", 3), ("8x1,4x2,2x4", 8)])
def test_messages_longer_than_a_packet_on_other_meshes(python, axes, n):
    assert ended_well("wide_pipelines.py", axes, *SCHEDULES, n=n, python=python, timeout=600) == "as on one worker\n"


def test_rooted_parameters_the_gradient_of_the_input_and_inference(scheduler):
    """Trees from stage to stage, parameters that each worker has as Rooted values."""
    step = spmd.training.pipeline(FUNCTIONS, microbatches=3, schedule="1f1b", loss=lambda out: np.mean(out["y"] ** 2))

    def body(x):
        params = [spmd.keep(np.asarray(w), "stage", k) for k, w in enumerate(W)]
        value, grads = step.value_and_grad(params, spmd.keep(x, "stage", 0), of_input=True)
        assert [type(g) for g in grads.params] == [Rooted] * 3
        assert [(g.root, g.shape) for g in grads.params] == [(k, np.shape(w)) for k, w in enumerate(W)]
        back = [spmd.replicate(g, "stage", k) for k, g in enumerate(grads.params)]
        return value, back, spmd.replicate(grads.x, "stage"), step(params, x)["y"]

    mesh = spmd.Mesh(stage=3, scheduler=scheduler)
    value, grads, of_x, y = spmd.map(body, P(), P(), mesh=mesh)(X)
    want, (want_w, want_x) = spmd.value_and_grad(lambda w, x: np.mean(applied(w, x) ** 2), (0, 1))(W, X)
    near = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
    near(value, want)
    near(of_x, want_x)
    near(y, applied(W, X))
    for g, w in zip(grads, want_w, strict=True):
        near(g, w)


def test_what_goes_from_stage_to_stage_is_counted(scheduler):
    """A message for each microbatch, forward and back; nothing from worker to worker beside the loss."""
    step = spmd.training.pipeline([lambda w, x: x * w] * 3, microbatches=4, loss=np.mean, schedule="1f1b")
    with spmd.ledger() as log:
        f = spmd.map(
            lambda x: step.value_and_grad([2.0] * 3, x)[0], P(), P(), mesh=spmd.Mesh(stage=3, scheduler=scheduler)
        )
        f(np.ones(8))
    sent = [log.workers[w].verbs["exchange"] for w in range(3)]
    assert sent == [8, 16, 8]  # sent or taken
    messages = [log.workers[w].messages for w in range(3)]
    assert [m - k for m, k in zip(messages, (4, 8, 4), strict=True)] in ([0, 0, 2], [1, 0, 1], [0, 1, 1])


def test_messages_hold_arrays_of_any_shapes():
    arrays = [
        np.arange(3.0),
        np.ones((0, 2), np.int8),
        np.array(True),
        np.float32(2) * np.ones((1, 2, 3)),
        np.array(1j),
    ]
    back, note = unpacked(packed(arrays, {"a": [1]}))
    assert note == {"a": [1]}
    for a, b in zip(arrays, back, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        np.testing.assert_array_equal(a, b)
    assert unpacked(packed([], None)) == ([], None)


def mistake(step, params=(2.0, 2.0), x=X, check=True):
    body = lambda x: step.value_and_grad(list(params), x)[0]
    spmd.map(body, P(), P(), mesh=spmd.Mesh(stage=2), check=check)(x)


def test_mistakes_are_explained():
    stages, loss = [lambda w, x: w * x] * 2, np.mean
    with pytest.raises(SpecError, match=r"(?s)argument schedule.*one of 'gpipe'"):
        mistake(spmd.training.pipeline(stages, schedule="gpip", loss=loss))
    with pytest.raises(SpecError, match=r"(?s)argument stages.*3 stages for 2 workers"):
        mistake(spmd.training.pipeline([*stages, stages[0]], loss=loss))
    with pytest.raises(SpecError, match=r"(?s)argument params.*each of the 2 stages"):
        mistake(spmd.training.pipeline(stages, loss=loss), params=(2.0,))
    with pytest.raises(SpecError, match=r"(?s)argument loss"):
        mistake(spmd.training.pipeline(stages))
    with pytest.raises(SpecError, match=r"(?s)argument reduction"):
        spmd.training.pipeline(stages, reduction="total")
    with pytest.raises(LayoutError, match=r"(?s)argument x.*dimension 0"):
        mistake(spmd.training.pipeline(stages, loss=loss), x=np.float64(3))
    with pytest.raises(StateError, match="check=True"):
        mistake(spmd.training.pipeline(stages, loss=loss), check=False)
    with pytest.raises(StateError, match=r"(?s)psum.*within a stage"):
        mistake(spmd.training.pipeline([lambda w, x: spmd.psum(w * x, "stage")] * 2, loss=loss))


def test_it_is_neither_differentiated_from_outside_nor_recorded():
    step = spmd.training.pipeline([lambda w, x: w * x] * 2, loss=np.mean)
    f = spmd.map(lambda w, x: step.value_and_grad([w, w], x)[0], P(), P(), mesh=spmd.Mesh(stage=2, device="cpu"))
    with pytest.raises(DifferentiationError, match=r"(?s)spmd.training.pipeline.*microbatch by microbatch"):
        spmd.grad(f)(np.ones(()), X)
    with (
        spmd.Mesh(stage=2, device="cpu"),
        pytest.raises(JitError, match=r"(?s)spmd.training.pipeline.*leave spmd.jit out"),
    ):
        spmd.jit(f)(np.ones(()), X)


def test_an_error_in_a_stage_is_raised_by_all(scheduler):
    def fails(w, x):
        raise ArithmeticError("no gradient today")

    step = spmd.training.pipeline([lambda w, x: w * x, fails, lambda w, x: w * x], loss=np.mean)
    with pytest.raises(ArithmeticError, match="today"):
        spmd.map(
            lambda x: step.value_and_grad([2.0] * 3, x)[0], P(), P(), mesh=spmd.Mesh(stage=3, scheduler=scheduler)
        )(X)
