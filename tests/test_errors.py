"""Bad input, a row each: the error names the function, the argument, what came, what was needed and the mend."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
from conftest import DEVICE
from mistakes import (
    EVEN,
    D,
    Row,
    X,
    arrays,
    attentions,
    batches,
    bodies,
    checkpoints,
    collectives,
    convolutions,
    experts,
    loops,
    maps,
    norms_and_losses,
    parsed,
    pictures,
    recurrent,
    refused,
    remote_calls,
    resampling,
    run,
    step,
    training,
    transforms,
    updates,
)

import spmd
from spmd import P, errors
from spmd.errors import LayoutError, MeshError
from spmd.operators.sums import Sum

EVERY = [
    *maps.ROWS,
    *collectives.ROWS,
    *bodies.ROWS,
    *arrays.ROWS,
    *loops.ROWS,
    *checkpoints.ROWS,
    *convolutions.ROWS,
    *recurrent.ROWS,
    *attentions.ROWS,
    *experts.ROWS,
    *remote_calls.ROWS,
    *resampling.ROWS,
    *norms_and_losses.ROWS,
    *transforms.ROWS,
    *pictures.ROWS,
    *batches.ROWS,
    *training.ROWS,
    *updates.ROWS,
]
if DEVICE != "cpu":  # Numbers on a device are not compared: that would wait for it.
    by_value = {"copies that differ", "a result that differs by value", "a gradient that differs by value"}
    EVERY = [row for row in EVERY if row.name not in by_value]


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_a_mistake_is_explained(row, scheduler):
    with spmd.Mesh(data=2, model=2, scheduler=scheduler):
        refused(row)


def test_the_pool_serves_after_every_error(scheduler):
    """One mesh lives through all of the mistakes, and computes rightly in between."""
    good = spmd.map(lambda x: spmd.psum(x.sum(), "data"), D, P())
    with spmd.Mesh(data=2, model=2, scheduler=scheduler):
        for row in EVERY[:: 3 if scheduler == "lockstep" else 5]:
            with pytest.raises(row.error):
                row.call()
            assert float(good(X)) == X.sum()


def test_without_a_mesh():
    words = ("no mesh, and no enclosing `with mesh:`", "a mesh to run on", "with spmd.Mesh(x=4): ..., or pass mesh=")
    for name, call in (
        ("spmd.map of step: argument mesh", lambda: spmd.map(step, P(), P())(X, rate=1.0)),
        ("spmd.put: argument mesh", lambda: spmd.put(X, P())),
        ("spmd.from_blocks: argument mesh", lambda: spmd.from_blocks([X], P())),
        ("spmd.from_callback: argument mesh", lambda: spmd.from_callback((3,), P(), np.ones)),
        ("spmd.check_adjoint: argument mesh", lambda: spmd.check_adjoint(Sum(("x",)), (3,))),
    ):
        refused(Row(name, call, MeshError, name, *words))


@pytest.mark.parametrize(
    ("variable", "known"),
    [("SPMD_TRANSPORT", '"local", "mpi"'), ("SPMD_SCHEDULER", '"auto", "lockstep", "threads"')],
)
def test_a_variable_of_the_environment(monkeypatch, variable, known):
    monkeypatch.setenv(variable, "bogus")
    head = f"spmd.Mesh: the environment variable {variable}"
    refused(Row(variable, lambda: spmd.Mesh(x=2), MeshError, head, "'bogus'", known, f"{variable}="))
    assert "bogus" in spmd.info()
    assert spmd.Mesh(x=2, transport="local", scheduler="threads").size == 2


@pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed")
def test_more_workers_than_mpi_processes():
    program = """
import numpy as np, spmd
from spmd.errors import TransportError
try:
    spmd.map(lambda x: x, spmd.P(), spmd.P(), mesh=spmd.Mesh(x=2, y=3, transport="mpi"))(np.ones(3))
except TransportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = parsed(RuntimeError(done.stdout.rstrip("\n")))
    assert said.head == "spmd.Mesh"
    assert said.got == "Mesh(x=2, y=3) of 6 workers, and an MPI world of 1 process"
    assert said.need == "as many processes as workers"
    assert '"mpiexec -n 6"' in said.mend
    assert 'Mesh(..., transport="local")' in said.mend


# Errors of the user


class Mine(Exception):
    pass


def test_an_error_of_a_body_keeps_its_type_and_says_which_worker(scheduler):
    def body(x):
        if spmd.worker_index("data") == 1 and spmd.worker_index("model") == 0:
            raise Mine("seven")
        return spmd.psum(x, ("data", "model"))

    with spmd.Mesh(data=2, model=2, scheduler=scheduler), pytest.raises(Mine) as caught:
        run(body, EVEN, ins=P("data", "model"), out=P())
    assert caught.value.args == ("seven",)
    assert any("worker 2 (data=1, model=0)" in note for note in caught.value.__notes__)
    frames = [frame.name for frame in caught.traceback]
    assert frames[-1] == "body"


def test_an_error_of_every_worker_is_told_once(scheduler):
    with spmd.Mesh(x=4, scheduler=scheduler), pytest.raises(ZeroDivisionError) as caught:
        run(lambda x: 1 / 0, ins=P("x"), out=P("x"))
    assert any("worker 0 (x=0)" in note for note in caught.value.__notes__)
    assert sum(note.count("division") for note in caught.value.__notes__) == 0


def test_different_errors_are_all_told(scheduler):
    def body(x):
        raise (ValueError, KeyError)[spmd.worker_index("x")](f"from {spmd.worker_index('x')}")

    with spmd.Mesh(x=2, scheduler=scheduler), pytest.raises(ValueError, match="from 0") as caught:
        run(body, ins=P("x"), out=P("x"))
    assert "KeyError: 'from 1'" in "\n".join(caught.value.__notes__)


def test_an_error_in_the_backward_sweep_says_which_worker(scheduler):
    @spmd.custom_vjp
    def bad(x):
        return x

    def backward(_residuals, g):
        if spmd.worker_index("x") == 1:
            raise Mine("backward")
        return (g,)

    bad.defvjp(lambda x: (x, None), backward)
    with spmd.Mesh(x=2, scheduler=scheduler), pytest.raises(Mine, match="backward") as caught:
        spmd.grad(spmd.map(lambda x: spmd.sum(bad(x), "x"), P("x"), P()))(X)
    assert any("worker 1 (x=1)" in note for note in caught.value.__notes__)


def test_hasattr_says_what_there_is():
    with spmd.Mesh(x=2):
        x = spmd.put(X, P("x"))
        assert hasattr(x, "mean")
        assert not hasattr(x, "sort")
        assert not hasattr(x, "no_such_name")
        assert hasattr(x, "astype")
        assert run(lambda b: b * (hasattr(b, "sum") and not hasattr(b, "expand_dims")), ins=P("x"), out=P("x")).shape


def test_every_error_class_is_documented_and_raised_somewhere():
    kinds = {getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert all(kind.__doc__ and issubclass(kind, Exception) for kind in kinds)
    elsewhere = {errors.TransportError, errors.StallError, errors.NonFiniteError, errors.ReplicaError}
    assert kinds - elsewhere <= {row.error for row in EVERY}  # those: test_mpi.py, test_debug.py


@pytest.mark.parametrize(
    ("name", "known", "found"),
    [
        ("dta", ["data", "model"], ["data"]),
        ("svd", ["std", "vdot", "exp"], ["std", "vdot"]),
        ("", ["data"], []),
        ("sum", ["cumsum", "psum"], ["psum", "cumsum"]),
    ],
)
def test_the_nearest_names(name, known, found):
    assert errors.nearest(name, known) == found


def test_values_are_described_briefly():
    assert errors.describe(X) == "ndarray float64[3, 2]"
    assert errors.describe(3) == "int 3"
    assert len(errors.describe("a" * 500)) < 80
    with spmd.Mesh(x=2):
        assert errors.describe(spmd.put(X, P("x"))) == "PartitionedArray float64[3, 2] laid out by P('x', None)"


def test_errors_of_other_processes_have_their_class_where_it_is_known():
    class TakesNothing(Exception):
        def __init__(self):
            super().__init__()

    for error in (ValueError("no"), LayoutError("no"), np.linalg.LinAlgError("no")):
        found = errors.rebuilt_error(errors.class_name(error), "no")
        assert (type(found), str(found)) == (type(error), "no")
    for name in ("nowhere.Lost", "builtins.print", "numpy.ndarray", errors.class_name(TakesNothing())):
        found = errors.rebuilt_error(name, "no")
        assert (type(found), str(found)) == (RuntimeError, f"{name}: no")
