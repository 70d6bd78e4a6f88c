"""The main job: it learns, its losses are the same bits wherever it runs, its gradients are those of one worker, and
it sends what the algebra says."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import optree
import pytest
from loaded import load

import spmd
from spmd import P

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "digits.py"
LAUNCHERS = ("OMPI_", "PMI", "PMIX_", "PRTE_", "MPI_", "SLURM_", "SPMD_SCHEDULER", "SPMD_TRANSPORT")


def environment(**more: str) -> dict[str, str]:
    """The caller's variables without those of launchers; this checkout comes first."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
    site = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p.endswith("emulator/site")]
    return clean | {"PYTHONPATH": os.pathsep.join([*site, str(ROOT)])} | more


def run(*options: str, launcher: tuple[str, ...] = (), python: str = sys.executable, **variables: str) -> list[str]:
    """The lines that the example prints."""
    command = [*launcher, python, str(EXAMPLE), *options]
    done = subprocess.run(command, cwd=ROOT, env=environment(**variables), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def losses(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("epoch")]


def number(lines: list[str], title: str) -> float:
    """The first number of a line of the report."""
    (line,) = [line for line in lines if line.startswith(title)]
    found = re.search(r"\d[\d.]*(e[+-]\d+)?", line[len(title) :])
    assert found
    return float(found[0])


def mpiexec(python: str, n: int) -> tuple[str, ...]:
    """The launcher of the environment that `python` belongs to."""
    path = Path(python).parent / "mpiexec"
    if not path.exists():
        pytest.skip(f"no mpiexec beside {python}")
    version = subprocess.run([path, "--version"], env=environment(), capture_output=True, text=True).stdout
    return str(path), *(["--oversubscribe"] if "Open MPI" in version else []), "-n", str(n)


@pytest.fixture(scope="module")
def example():
    """The example as a module."""
    return load(EXAMPLE)


# The program


def test_learns():
    lines = run()
    assert number(lines, "test accuracy") >= 96
    assert number(lines, "gradients") <= 1e-12
    assert len(losses(lines)) == 15
    assert "\r" not in "".join(lines)
    assert lines[-1].endswith("┘")


def test_adam_in_float32():
    lines = run("--optimizer", "adam", "--dtype", "float32", "--epochs", "8")
    assert number(lines, "test accuracy") >= 95
    assert number(lines, "gradients") <= 1e-5


UNEVEN = ("--data", "3", "--model", "1", "--batch", "50", "--hidden", "37", "--optimizer", "adam")
JOBS = {
    "even": (4, ()),
    "uneven": (4, ("--batch", "101", "--hidden", "37", "21", "19")),
    "odd": (3, UNEVEN),
}
LONG_JOBS = ["uneven", *(pytest.param(job, marks=pytest.mark.full) for job in ("even", "odd"))]


@functools.cache
def lockstep(job: str, python: str = sys.executable) -> list[str]:
    """What all other ways to run a job must print."""
    lines = run(*JOBS[job][1], "--epochs", "3", "--full-precision", "--scheduler", "lockstep", python=python)
    assert len(losses(lines)) == 3
    assert all(len(line.split()[3]) > 12 for line in losses(lines))
    return losses(lines) + counts(lines)


def counts(lines: list[str]) -> list[str]:
    """What a step sends and sums: the same in every transport."""
    found = [line for line in lines if line.startswith(("sent per step", "sums per step"))]
    assert len(found) == 2
    return found


@pytest.mark.parametrize("job", LONG_JOBS)
@pytest.mark.parametrize("scheduler", ["threads", "auto"])
def test_schedulers_give_the_same_bits(job, scheduler):
    lines = run(*JOBS[job][1], "--epochs", "3", "--full-precision", SPMD_SCHEDULER=scheduler)
    assert losses(lines) + counts(lines) == lockstep(job)


@pytest.mark.mpi
@pytest.mark.parametrize("job", LONG_JOBS)
def test_mpi_gives_the_same_bits(job):
    launcher = mpiexec(sys.executable, JOBS[job][0])
    lines = run(*JOBS[job][1], "--epochs", "3", "--full-precision", launcher=launcher)
    assert losses(lines) + counts(lines) == lockstep(job)  # three lines: only one process prints
    assert sum("mpi transport" in line for line in lines) == 1
    assert number(lines, "gradients") <= 1e-12


@pytest.mark.both
@pytest.mark.openmpi
def test_openmpi_gives_the_same_bits():
    python = os.environ.get("SPMD_TEST_OPENMPI_PYTHON") or pytest.skip("SPMD_TEST_OPENMPI_PYTHON is not set")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    lines = run("--epochs", "3", "--full-precision", launcher=mpiexec(python, 4), python=python, **root)
    assert losses(lines) + counts(lines) == lockstep("even", python)


def test_bar_on_a_terminal():
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [sys.executable, str(EXAMPLE), "--epochs", "2"]
    with subprocess.Popen(command, cwd=ROOT, env=environment(COLUMNS="80", PYTHONUTF8="1"), stdout=theirs) as process:
        os.close(theirs)
        text = b""
        try:
            while more := os.read(ours, 1 << 16):
                text += more
        except OSError:  # how Linux says that the other side has closed
            pass
    os.close(ours)
    assert process.returncode == 0
    states = text.decode().split("\r")
    steps = [s for s in states if "epoch" in s]
    assert len(steps) == 2 * -(-1438 // 64)
    assert steps[0].startswith("█░")
    assert "█" * 30 in steps[-1]
    assert max(map(len, states)) <= 80


def test_plain_characters_where_the_output_takes_no_others():
    lines = run("--epochs", "1", PYTHONIOENCODING="ascii")
    assert any(line.startswith("+---") for line in lines)


def test_bad_options_are_named():
    command = [sys.executable, str(EXAMPLE), "--hidden", "8", "8"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert "--hidden" in done.stderr


# Gradients


def serial(params, x, labels):
    """The loss and its gradients by hand, in NumPy alone."""
    kept = []
    for k, (w, b) in enumerate(params):
        kept.append(x)
        x = x @ w + b
        x = np.maximum(x, 0) if k < len(params) - 1 else x
    p = np.exp(x - x.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    rows = np.arange(len(x))
    loss = -np.log(p[rows, labels]).mean()
    p[rows, labels] -= 1
    g, grads = p / len(x), []
    for (w, _), h in zip(params[::-1], kept[::-1], strict=True):
        grads.append((h.T @ g, g.sum(axis=0)))
        g = (g @ w.T) * (h > 0)
    return loss, grads[::-1]


def network(example, widths, batch, mesh=None):
    """Parameters (on a mesh: laid out) and a batch of the sizes asked for, and the map that gives the loss."""
    rng = np.random.default_rng(4)
    x, labels, _, _ = example.load_data(rng, np.float64)
    params = example.draw_params([64, *widths, 10], rng, np.float64)
    params = [(w, rng.normal(0, 0.1, b.shape)) for w, b in params]
    specs = [example.COLUMN, example.ROW] * (len(params) // 2)
    if mesh is not None:
        put = functools.partial(spmd.put, mesh=mesh)
        params = [tuple(map(put, layer, spec)) for layer, spec in zip(params, specs, strict=True)]
    loss = spmd.map(example.local_loss, (specs, P("data"), P("data")), P(), mesh=mesh)
    return loss, params, x[:batch], labels[:batch]


MESHES = [
    (1, 1),
    (2, 1),
    (1, 2),
    (3, 1),
    (1, 3),
    (2, 2),
    (5, 1),
    (1, 5),
    (2, 3),
    (3, 2),
    (7, 1),
    (4, 2),
    (2, 4),
    (1, 8),
]
SIZES = {"even": ([128, 64, 128], 64), "uneven": ([37, 21, 19], 101), "empty": ([5, 3, 2], 3), "one": ([1], 1)}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: f"{m[0]}x{m[1]}")
@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_are_those_of_one_worker(example, mesh, sizes, scheduler):
    widths, batch = SIZES[sizes]
    on = spmd.Mesh(data=mesh[0], model=mesh[1], transport="local", scheduler=scheduler)
    loss, params, x, labels = network(example, widths, batch, on)
    value, grads = spmd.value_and_grad(loss)(params, x, labels)
    for w, g in zip(optree.tree_leaves(params), optree.tree_leaves(grads), strict=True):
        assert g.layout == w.layout

    one = spmd.Mesh(data=1, model=1, transport="local")
    loss, params, x, labels = network(example, widths, batch)
    with one:
        value_of_one, grads_of_one = spmd.value_and_grad(loss)(params, x, labels)
    grads = optree.tree_map(lambda g: g.numpy(), grads)
    assert example.largest_difference(grads, grads_of_one) <= 1e-12
    assert abs(float(value) - float(value_of_one)) <= 1e-12 * float(value_of_one)
    assert example.largest_difference(grads, serial(params, x, labels)[1]) <= 1e-12
    np.testing.assert_allclose(float(value), serial(params, x, labels)[0], rtol=1e-12)


# Counts


def sums(log) -> dict[str, int]:
    """How many sums worker 0 took part in, by mesh axis."""
    return {axes[0]: n for (name, axes), n in log.first.axes.items() if name == "Sum"}


@pytest.mark.parametrize("pairs", [1, 2, 3])
def test_tensor_parallel_pair_costs_one_sum_each_way(example, pairs):
    mesh = spmd.Mesh(data=2, model=2, transport="local")
    loss, params, x, labels = network(example, [8] * (2 * pairs - 1), 16, mesh)
    with spmd.ledger() as forward:
        loss(params, x, labels)
    # Of the loss: its sum and the number of scans.
    assert sums(forward) == {"model": pairs, "data": 2}
    with spmd.ledger() as both:
        spmd.value_and_grad(loss)(params, x, labels)
    # Backward a pair needs its sum only where something before it is differentiated; and each parameter needs one.
    assert sums(both) == {"model": pairs + pairs - 1, "data": 2 + 4 * pairs}
    with spmd.ledger() as log:
        spmd.value_and_grad(loss, argnums=(0, 1))(params, x, labels)
    assert sums(log) == {"model": 2 * pairs, "data": 2 + 4 * pairs}
    # Between two workers a sum is one message of each, and the sums of the parameters travel together.
    assert both.messages == 2 * pairs - 1 + 2 + 1


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_data_parallel_step_applies_one_sum_per_parameter(example, workers):
    mesh = spmd.Mesh(data=workers, model=1, transport="local")
    loss, params, x, labels = network(example, [9, 8, 7], 16, mesh)
    with spmd.ledger() as forward:
        loss(params, x, labels)
    with spmd.ledger() as both:
        spmd.value_and_grad(loss)(params, x, labels)
    leaves = len(optree.tree_leaves(params))
    assert sums(both)["data"] - sums(forward)["data"] == leaves == 8
    # Recursive doubling for the loss, the count, and all gradients together; of three, the first two act as one.
    assert both.messages == 3 * {1: 0, 2: 1, 3: 1, 4: 2}[workers]


def test_data_parallel_step_on_a_mesh_of_one_axis():
    def local_loss(params, x, labels):
        for w, b in params:
            x = np.tanh(x @ w + b)
        return spmd.mean(spmd.softmax_cross_entropy(x, labels), "data")

    rng = np.random.default_rng(5)
    params = [(rng.normal(size=(n, n + 1)), rng.normal(size=n + 1)) for n in (3, 4, 5)]
    x, labels = rng.normal(size=(10, 3)), rng.integers(6, size=10)
    with spmd.Mesh(data=4, transport="local"), spmd.ledger() as log:
        spmd.value_and_grad(spmd.map(local_loss, (P(), P("data"), P("data")), P()))(params, x, labels)
    assert sums(log) == {"data": 2 + 6}
    assert set(log.operators) == {"Sum", "Vary"}


def test_psum_moves_nothing_backward():
    with spmd.Mesh(x=4, transport="local"):
        _, pullback = spmd.vjp(spmd.map(lambda x: spmd.psum(x, "x"), P("x"), P()), np.arange(8.0))
        with spmd.ledger() as log:
            (g,) = pullback(np.ones(2))
    np.testing.assert_array_equal(g, np.ones(8))
    assert log.operators == {"Vary": 1}
    assert not log.verbs
    assert log.messages == 0


@pytest.mark.parametrize("optimizer", [spmd.optim.sgd(0.1, momentum=0.9), spmd.optim.adam()], ids=["sgd", "adam"])
def test_updates_send_nothing(example, optimizer):
    mesh = spmd.Mesh(data=2, model=2, transport="local")
    loss, params, x, labels = network(example, [9, 8, 7], 16, mesh)
    grads = spmd.grad(loss)(params, x, labels)
    with spmd.ledger() as log:
        after, _ = optimizer.update(grads, optimizer.init(params), params)
    assert not log.verbs
    for old, new in zip(optree.tree_leaves(params), optree.tree_leaves(after), strict=True):
        assert old.layout == new.layout
