"""What all tests share: draws that are the same on every machine, and the two schedulers of virtual workers.

SPMD_TEST_DEVICE=cuda runs them with meshes of a GPU, wherever a test does not say otherwise; "emulated" does so on any
machine, with the stand-in for CuPy, `emulator.fake_cupy`.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import os
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from host_pair import pair_of_hosts
from hypothesis import HealthCheck, settings

settings.register_profile(
    "spmd",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("spmd")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a background job of a shell; programs inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    # Otherwise each of the many processes that tests start would compile the whole library again.
    _bytecode = tempfile.mkdtemp(prefix="bytecode_of_tests_")
    os.environ["PYTHONPYCACHEPREFIX"] = _bytecode
    atexit.register(shutil.rmtree, _bytecode, ignore_errors=True)

DEVICE = os.environ.get("SPMD_TEST_DEVICE", "cpu")
if DEVICE != "cpu":
    os.environ["SPMD_DEVICE"] = "cuda"
if DEVICE == "emulated":
    from emulator import fake_cupy

    sys.modules.update(fake_cupy.make())
    _site = str(Path(fake_cupy.__file__).parent / "site")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_site, os.environ.get("PYTHONPATH")]))


if DEVICE != "cpu":
    from spmd.device import to_host

    def _on_host(tree):
        if isinstance(tree, list | tuple):
            return [_on_host(x) for x in tree]
        return {k: _on_host(x) for k, x in tree.items()} if isinstance(tree, dict) else to_host(tree)

    def _of_the_host(check):
        """A comparison of NumPy's that takes arrays of a device too."""

        @functools.wraps(check)
        def run(*args, **kwargs):
            return check(*map(_on_host, args), **kwargs)

        return run

    for _name in ("assert_array_equal", "assert_allclose", "assert_equal"):
        setattr(np.testing, _name, _of_the_host(getattr(np.testing, _name)))


def placed(x: np.ndarray):
    """An array of the host where meshes have their blocks: what is computed of it has the same bits there."""
    if DEVICE == "cpu":
        return x
    import cupy

    return cupy.asarray(x)


SCHEDULERS = ("lockstep", "threads")


# Of the session, so that tests that draw their cases may use it as well.
@pytest.fixture(params=SCHEDULERS, scope="session")
def scheduler(request) -> str:
    """The test runs once with each scheduler; of several cases the ordinary run has each with one of them."""
    return request.param


@pytest.fixture(autouse=True, scope="module")
def survivors_are_frozen() -> None:
    """What outlives the tests of earlier files is not traversed again: at the end of a run a collection would take
    seconds, and many tests call `gc.collect`."""
    gc.collect()
    gc.freeze()


_stderr = os.dup(2)


@pytest.fixture
def no_hang() -> Iterator[None]:
    """A test that hangs ends the run, and says where it hung."""
    faulthandler.dump_traceback_later(60, exit=True, file=_stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


OPTIONAL = ("torch", "cupy")
"""Packages that the test extra does not install. A test that needs one has a mark of its name."""


def pytest_runtest_setup(item) -> None:
    """Skip a test without the package that it needs, and one that holds on the host only where a device is tested."""
    for package in OPTIONAL:
        if item.get_closest_marker(package):
            pytest.importorskip(package)
    mark = item.get_closest_marker("host")
    if DEVICE != "cpu" and mark is not None:
        pytest.skip(mark.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Without garbage collection, which would traverse tens of thousands of tests again and again: all of them stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items) -> None:
    """Tests marked gpu are left out where there is no GPU: they run other tests' cases a second time, on CuPy.

    A file that starts many jobs, or compiles much, names the tests of the ordinary run in ORDINARY; its others are
    long searches. So is what runs under MPICH and again under Open MPI, if it is not marked `both`.
    A file that imports PyTorch or CuPy at its head needs it for all its tests.
    """
    for item in items:
        for package in OPTIONAL:
            if hasattr(item.module, package):
                item.add_marker(package)
        if item.get_closest_marker("openmpi") and not item.get_closest_marker("both"):
            item.add_marker("full")
        ordinary = getattr(item.module, "ORDINARY", None)
        if ordinary is not None and item.originalname not in ordinary and item.name not in ordinary:
            item.add_marker("full")
    _one_scheduler_for_each_case(items)
    if any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        left = [item for item in items if item.get_closest_marker("gpu")]
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=left)


def _one_scheduler_for_each_case(items) -> None:
    """Where a test has several cases and both schedulers, each case has one scheduler; with the other it is `full`.

    The cases are ordered by a hash, and the schedulers alternate along them: each has half, in no regular pattern.
    The tests of transports, among them those of the schedulers themselves, have both in every case.
    """
    tests: dict[tuple, dict[str, dict]] = {}
    for item in items:
        scheduler = item.callspec.params.get("scheduler") if hasattr(item, "callspec") else None
        if scheduler in SCHEDULERS and "transport" not in item.path.parts:
            words = item.callspec.id.split("-")
            words.remove(scheduler)
            case = "-".join(words)
            tests.setdefault((item.path, item.cls, item.originalname), {}).setdefault(case, {})[scheduler] = item
    for cases in tests.values():
        for k, case in enumerate(sorted(cases, key=lambda case: zlib.crc32(case.encode(errors="surrogatepass")))):
            if len(cases) > 1 and cases[case].keys() == set(SCHEDULERS):
                cases[case][SCHEDULERS[k % 2]].add_marker("full")


def _has_gpu() -> bool:
    try:
        import cupy

        return cupy.cuda.runtime.getDeviceCount() > 0
    except Exception:  # no CuPy, no driver, or no device: each has an error class of its own
        return False


@pytest.fixture(scope="module")
def hosts() -> Iterator[str]:
    """The name of a pair of hosts that no other test uses."""
    with pair_of_hosts() as name:
        yield name
