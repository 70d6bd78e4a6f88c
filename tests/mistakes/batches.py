"""Mistakes with minibatches: data without a number of samples, other axes, and means of batches."""

from __future__ import annotations

import numpy as np

import spmd
from mistakes import D, Row, X, run
from spmd.data import Loader, Sampler
from spmd.errors import DifferentiationError, LayoutError, MeshError, StateError
from spmd.training import evaluate


def sampled(*args, **options):
    """A sampler in a body."""
    return lambda: spmd.map(lambda: [*Sampler(*args, **options).epoch(0)], (), None)()


def evaluated(f, axis_name="data"):
    return lambda: run(lambda x: evaluate(f, [x], axis_name), out=spmd.P())


def _of_another_mesh():
    sampler = Sampler(X, 2, "data")
    with spmd.Mesh(data=3):
        return next(iter(Loader(X, sampler).epoch(0)))


def _outside_for_a_body():
    sampler = Sampler(X, 2, "data")
    return spmd.map(lambda: [*sampler.epoch(0)], (), None)()


SAMPLERS = [
    Row(name, call, error, f"spmd.data.{head}", got, need, mend)
    for name, call, error, head, got, need, mend in (
        (
            "no axis in a body",
            sampled(X, 2),
            MeshError,
            "Sampler: argument axis_name",
            "none, in a body on Mesh(data=2, model=2)",
            "the axes along which minibatches are split",
            "axis_name='data', or axis_name=() for whole minibatches",
        ),
        (
            "an axis and numbers",
            sampled(X, 2, "data", rank=0),
            MeshError,
            "Sampler: argument axis_name",
            "'data', with num_replicas=None, rank=0",
            "the axis, or the two numbers",
            "leave out one of them",
        ),
        (
            "a rank without a number of workers",
            lambda: Sampler(X, 2, rank=0),
            MeshError,
            "Sampler",
            "num_replicas=None, rank=0",
            "the number of workers",
            "num_replicas=4, rank=k",
        ),
        (
            "a sampler of whole minibatches in a body",
            _outside_for_a_body,
            MeshError,
            "Sampler: argument axis_name",
            "'data' of a sampler that was made outside of the body",
            "a sampler of this worker's shares",
            "make it inside the function that is mapped",
        ),
        (
            "arrays of two lengths to sample",
            lambda: Sampler({"x": X, "y": X[:2]}, 2),
            LayoutError,
            "Sampler: argument data",
            "3 samples in data['x'], and 2 in data['y']",
            "arrays of one first dimension",
            "spmd.data.Sampler(len(x), batch_size=64)",
        ),
        (
            "padding of an odd minibatch",
            lambda: Sampler(X, 3, num_replicas=2, rank=0, padding=True),
            LayoutError,
            "Sampler: argument batch_size",
            "3, with padding=True, for 2 workers",
            "a multiple of the number of workers",
            "batch_size=4",
        ),
        (
            "a number to load",
            lambda: Loader({"x": X, "rate": 2.0}, Sampler(X, 2)),
            LayoutError,
            "Loader: argument arrays_or_function['rate']",
            "float 2.0",
            "an array whose first dimension counts samples",
            "a function of indices",
        ),
        (
            "a global array to load",
            lambda: Loader(spmd.put(X, D), Sampler(X, 2)),
            LayoutError,
            "Loader: argument arrays_or_function",
            "PartitionedArray",
            "an array whose first dimension counts samples",
            "index it in the program",
        ),
        (
            "fewer samples than arrays have",
            lambda: next(iter(Loader(X, Sampler(2, 2)).epoch(0))),
            LayoutError,
            "Loader: argument sampler",
            "2 samples, and arrays of 3",
            "as many samples as the arrays have",
            "spmd.data.Sampler(arrays, batch_size=64)",
        ),
        (
            "a sampler of another mesh",
            _of_another_mesh,
            MeshError,
            "Loader: argument axis_name",
            "'data' of a sampler for (2,) workers, on Mesh(data=3)",
            "the mesh on which the sampler was made",
            "make the sampler within this `with mesh:`",
        ),
    )
]

METRICS = [
    Row(name, call, error, f"spmd.training.evaluate{head}", got, need, mend)
    for name, call, error, head, got, need, mend in (
        (
            "a mean of a batch",
            evaluated(lambda x: {"loss": np.mean(x)}),
            LayoutError,
            " of <lambda>: result['loss'] of f",
            "for a batch of",
            "a value per sample",
            "leave out the mean",
        ),
        (
            "a mean of all workers",
            evaluated(lambda x: spmd.mean(x, "data")),
            LayoutError,
            " of <lambda>: result of f",
            "for a batch of",
            "a value per sample",
            "evaluate takes it over all samples of all workers",
        ),
        (
            "a loss",
            lambda: run(lambda x: spmd.grad(lambda x: evaluate(lambda x: x, [x], "data"))(x)),
            DifferentiationError,
            " of <lambda>: result of f",
            "traced Varying(data)",
            "an array that is not differentiated",
            'spmd.mean(errors, "data") as a loss',
        ),
        (
            "a metric that is alike on all workers",
            evaluated(lambda x: np.ones(x.shape)),
            StateError,
            " of <lambda>: result of f",
            "which every worker has alike",
            "an array that varies over 'data'",
            "spmd.varying(x, 'data') of bare data",
        ),
        (
            "a metric that varies over another axis",
            evaluated(lambda x: spmd.pvary(x, "model")),
            StateError,
            " of <lambda>: result of f",
            "which varies over axis 'model' too",
            "an array that varies over 'data'",
            "or name these axes too",
        ),
        (
            "weights of another shape",
            evaluated(lambda x: (x, x[:, :1])),
            LayoutError,
            " of <lambda>: result of f",
            "weights of shape",
            "a weight per sample",
            "weights.reshape(values.shape)",
        ),
        (
            "no axis for the metrics",
            evaluated(lambda x: x, None),
            MeshError,
            ": argument axis_name",
            "none, in a body on Mesh(data=2, model=2)",
            "the axes over which samples are split",
            "axis_name='data'",
        ),
        (
            "metrics of no batch",
            lambda: evaluate(lambda x: x, []),
            LayoutError,
            " of <lambda>: argument batches",
            "no batch",
            "the metrics are known from it",
            "spmd.data.Loader gives all workers equally many batches",
        ),
    )
]

ROWS = [*SAMPLERS, *METRICS]
