"""What all families of kernels have in common."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from emulator import device
from launch import ROOT

from spmd import functions, kernels
from spmd.kernels import FAMILIES, jit, jit_cache
from spmd.kernels.memory import pool

NAMES = [(family, name) for family, names in FAMILIES.items() for name in names]


ENGINES = ["reference", "cpu", pytest.param("gpu", marks=pytest.mark.cupy)]


def source(engine: str, family: str):
    return importlib.import_module(f"spmd.kernels.{engine}.{family}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_the_kernels_of_the_family(engine, family):
    assert all(callable(getattr(source(engine, family), name)) for name in FAMILIES[family])


HELPERS = {"form", "philox4x32"}
"""Public functions of the reference that are no kernels."""


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kernel_of_the_reference_is_registered(family):
    module = source("reference", family)
    public = {name for name, f in vars(module).items() if inspect.isfunction(f) and not name.startswith("_")}
    assert {name for name in public if getattr(module, name).__module__ == module.__name__} - HELPERS == {
        *FAMILIES[family]
    }


@pytest.mark.parametrize(("family", "name"), NAMES)
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_signatures_are_those_of_the_reference(engine, family, name):
    def parameters(engine):
        actual = inspect.signature(getattr(source(engine, family), name)).parameters.values()
        return [(p.name, p.kind, p.default) for p in actual]

    assert parameters(engine) == parameters("reference")


def test_no_family_has_the_name_of_a_kernel():
    assert set(FAMILIES).isdisjoint(name for _, name in NAMES)


@pytest.mark.parametrize(("family", "name"), NAMES)
def test_every_kernel_has_cases(family, name):
    cases = importlib.import_module(f"kernels.test_{family}").family.cases
    assert name in {case.name for case in cases}


def test_the_module_fits_the_array():
    assert kernels.of(np.zeros(3)) is kernels.cpu
    if device.available():
        with device.emulated() as gpu:
            assert kernels.of(device.put(np.zeros(3))) is gpu


def test_an_unknown_kernel_is_an_error():
    with pytest.raises(AttributeError, match="no kernel 'soft'"):
        kernels.cpu.soft  # noqa: B018


def test_loops_are_not_compiled_before_all_they_call_is_declared(monkeypatch):
    """Workers compile at the same time: one that finds nothing left to declare may find another still at it."""
    extending = pytest.importorskip("numba.extending")
    began, go, done = threading.Event(), threading.Event(), []

    def overload(*_args, **_options):
        began.set()
        go.wait(10)
        return lambda f: done.append("declared")

    monkeypatch.setattr(extending, "overload", overload)
    monkeypatch.setattr(jit, "_helpers", [(len, len, ())])

    def nothing(x):
        pass

    loops = jit.Loops(nothing, (), frozenset())
    threads = [threading.Thread(target=lambda: (loops._compile(), done.append("compiled"))) for _ in range(2)]
    threads[0].start()
    assert began.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    assert done == []
    go.set()
    for thread in threads:
        thread.join(10)
    assert done == ["declared", "compiled", "compiled"]


# The memory pool


def test_large_memory_is_reused_when_the_last_view_is_gone():
    pool.release()
    x = pool.empty((1024, 256))
    at, view = x.ctypes.data, x[3:].T
    del x
    assert pool.idle() == 0
    assert pool.empty((1024, 256)).ctypes.data != at
    del view
    pool.release()
    x = pool.empty((1024, 256), np.float64)
    at = x.ctypes.data
    del x
    assert pool.idle() > 0
    assert pool.empty((512, 512), np.float64).ctypes.data == at


def test_the_oldest_idle_slab_is_dropped_first():
    free = pool._FreeList(5 << 20)
    slabs = [pool.Slab(megabytes << 20) for megabytes in (2, 1, 2, 1)]
    for slab in slabs:
        free.give(slab)
    assert free.nbytes == 4 << 20, "the oldest one of 2 MB had to go"
    assert free.take(3 << 20) is None
    assert [free.take(1 << 20) for _ in range(3)] == [slabs[3], slabs[1], None]
    assert [free.take(2 << 20) for _ in range(2)] == [slabs[2], None]
    assert free.nbytes == 0
    free.give(pool.Slab(6 << 20))
    assert free.nbytes == 0, "more than may lie idle at all"


def test_slabs_that_are_idle_for_long_are_dropped():
    free = pool._FreeList(99 << 20)
    slabs = [pool.Slab(megabytes << 20) for megabytes in (2, 1, 2, 1, 3)]
    for slab in slabs:
        free.give(slab)
    free.release_old(9 << 20, 5)
    assert free.nbytes == 9 << 20, "after none were so many others left"
    free.release_old(1, 2)
    assert free.nbytes == 7 << 20, "the oldest one is enough"
    free.release_old(9 << 20, 2)
    assert free.nbytes == 4 << 20
    assert free.take(2 << 20) is None
    free.release_old(9 << 20, 0)
    assert free.nbytes == 0
    free.release_old(9 << 20, 0)


def test_slabs_of_a_source_have_half_of_the_idle_memory():
    taken = []

    def source(nbytes):
        if len(taken) < 2:
            taken.append(pool.Storage(nbytes, np.uint8))
            return taken[-1]
        return None

    total = pool._free.limit
    assert pool.source_limit() == 0
    pool.set_source(source)
    try:
        assert pool.source_limit() + pool._free.limit == total
        xs = [pool.empty(1 << 22, np.uint8) for _ in range(3)]
        assert [x.base.slab.sourced for x in xs] == [True, True, False]
        del xs
        xs = [pool.empty(1 << 22, np.uint8) for _ in range(3)]
        assert [x.base.slab.sourced for x in xs] == [True, True, False]
        assert {id(x.base.slab.storage) for x in xs[:2]} == {*map(id, taken)}
        del xs
        taken.clear()
        xs = [pool.empty(1 << 22, np.uint8) for _ in range(4)]
        assert [x.base.slab.sourced for x in xs] == [True] * 4, "the source is asked before NumPy's are used again"
    finally:
        pool.set_source(None)
    assert pool._free.limit == total
    assert pool.idle() == 0


@pytest.mark.parametrize("dtype", ["f4", "c16", "i1", "bfloat16"])
def test_pooled_arrays_are_ordinary_ones(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    x = pool.zeros((7, 1 << 18), dtype)
    assert type(x) is np.ndarray
    assert (x.dtype, x.shape) == (np.dtype(dtype), (7, 1 << 18))
    assert x.flags.c_contiguous
    assert x.flags.writeable
    assert x.ctypes.data % 64 == 0
    assert not x.any()


def test_idle_memory_is_bounded(monkeypatch):
    pool.release()
    monkeypatch.setattr(pool._free, "limit", 5 << 20)
    held = [pool.empty(1 << 21, np.uint8) for _ in range(4)]
    del held
    assert 0 < pool.idle() <= 5 << 20
    pool.empty(1 << 24, np.uint8)  # larger than all that may lie idle: it goes at once
    assert pool.idle() <= 5 << 20
    pool.release()
    assert pool.idle() == 0


@pytest.mark.parametrize("nbytes", [1 << 16, 100_000, 1 << 18, 300_001, 1 << 20, 5_000_000, 1 << 24, 22_369_495])
def test_margins_are_a_64th_of_an_array_on_each_side(nbytes):
    x = pool.empty(nbytes, np.uint8)
    x[:] = np.arange(nbytes) % 251
    room = nbytes // 65
    assert pool.has_room(x, room, nbytes + 2 * room)
    assert not pool.has_room(x, nbytes // 8, nbytes + nbytes // 8)
    assert not pool.has_room(x, 0, nbytes + nbytes // 4)
    to, whole = pool.extended(x, room, (nbytes + 2 * room,))
    to[:room] = to[-room:] = 255
    assert np.array_equal(whole, np.pad(x, room, constant_values=255))
    assert pool.address(whole) == whole.ctypes.data == x.ctypes.data - room
    assert not x.flags.writeable
    assert not whole.flags.writeable


def test_one_array_at_a_time_is_extended_around_another():
    pool.release()
    x = pool.zeros((1000, 100))
    same, part = x.reshape(-1), x[:900]
    assert pool.extended(part, 0, (901, 100)) is None, "the rest may be somebody's"
    assert pool.extended(np.zeros((1000, 100)), 0, (1001, 100)) is None, "it lies elsewhere"
    first = pool.extended(same, 800, (1002 * 100,))[1]
    assert not same.flags.writeable
    assert pool.extended(x, 800, (1002, 100)) is None
    assert pool.extended(first, 0, (1002 * 100,)) is None, "it has no margins of its own"
    view = first[5:]
    del first
    assert pool.extended(x, 800, (1002, 100)) is None, "a view has them"
    del view
    second = pool.extended(x, 800, (1002, 100))[1]
    at = x.ctypes.data
    del x, same, part
    assert pool.idle() == 0, "the larger array has the memory"
    del second
    assert pool.idle() > 0
    assert pool.empty((1000, 100)).ctypes.data == at
    assert pool.extended(pool.empty((1000, 100)), 800, (1002, 100)) is not None


@pytest.mark.parametrize("nbytes", [1 << 16, 1 << 18, 300_001, 1 << 20])
def test_arrays_begin_at_multiples_of_a_line(nbytes):
    held = [pool.empty(nbytes, np.uint8) for _ in range(12)]
    assert {x.ctypes.data % 64 for x in held} == {0}
    assert {x.ctypes.data for x in held} == {pool.address(x) for x in held}


def test_a_cached_slab_is_reused_when_no_array_has_it():
    pool.release()
    shape = (256, 300)
    x = pool.empty(shape)
    at, view, idle = x.ctypes.data, x[3:].T, pool.idle()
    assert idle == 0
    del x
    assert pool.empty(shape).ctypes.data != at, "a view has it"
    del view
    assert pool.idle() >= 2 * 256 * 300 * 8
    assert at in {x.ctypes.data for x in [pool.empty(shape) for _ in range(2)]}
    assert len({pool.address(pool.empty(shape)) for _ in range(5)}) == 1, "the latest first"
    x = pool.empty(shape)
    pool.release()
    assert pool.idle() == 0
    at = x.ctypes.data
    assert pool.empty(shape).ctypes.data != at, "let go of, and still in use"
    del x
    assert pool.idle() > 0


def test_more_slabs_of_a_size_than_are_cached():
    pool.release()
    held = [pool.empty(1 << 17, np.uint8) for _ in range(40)]
    for k, x in enumerate(held):
        x.fill(k)
    more = [pool.empty(1 << 17, np.uint8) for _ in range(40)]
    for x in more:
        x.fill(255)
    assert [x[0] for x in held] == [x[-1] for x in held] == list(range(40))
    assert pool._cache.nbytes <= 8 * (1 << 17) * 1.2
    del held, more, x
    assert pool.idle() >= 80 << 17


def test_cached_slabs_are_bounded(monkeypatch):
    pool.release()
    monkeypatch.setattr(pool._cache, "limit", 1 << 19)
    for k in range(1, 60):
        for _ in range(3):
            pool.empty(k << 14, np.uint8)
        assert pool._cache.nbytes <= 1 << 19
        assert pool._cache.nbytes == sum(n * len(some) for n, some in pool._cache.sizes.items())
    pool.release()


def test_threads_are_never_given_the_same_memory():
    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        held: list[tuple[np.ndarray, int]] = []
        for k in range(400):
            x = pool.empty(int(rng.integers(4, 8)) << 14, np.uint8)
            x.fill(mark := (seed * 31 + k) % 251)
            held.append((x, mark))
            if len(held) > rng.integers(1, 12):
                y, mark = held.pop(int(rng.integers(len(held))))
                if not (y[0] == y[-1] == mark and (y == mark).all()):
                    torn.append(seed)

    torn: list[int] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    finally:
        sys.setswitchinterval(before)
    assert torn == []


def test_every_function_stands_on_its_page():
    page = (ROOT / "docs" / "reference" / "models.md").read_text()
    assert [name for name in functions.__all__ if f"`{name}`" not in page] == []


@pytest.mark.skipif(not jit.available(), reason="needs numba")
def test_cached_loops_are_of_these_sources(tmp_path):
    """numba looks for changes in the file of a loop alone, and loops call helpers of other files."""
    package = tmp_path / "kernels"
    package.mkdir()
    for module in (jit, jit_cache):
        source = Path(module.__file__).read_text().replace("spmd.kernels", "kernels")
        (package / Path(module.__file__).name).write_text(source)
    (package / "__init__.py").write_text("")
    (package / "loops.py").write_text(
        "from kernels.helpers import twice\nfrom kernels.jit import loops\n\n\n@loops('out')\ndef run(out, x):\n"
        "    for i in range(x.size):\n        out[i] = twice(x[i])\n"
    )
    program = """
import importlib, pathlib, sys
import numpy as np

for factor in (2, 3):
    helper = f"from kernels.jit import helper\\n\\n\\n@helper\\ndef twice(x):\\n    return {factor} * x\\n"
    pathlib.Path("kernels/helpers.py").write_text(helper)
    for name in [name for name in sys.modules if name.partition(".")[0] == "kernels"]:
        del sys.modules[name]
    out = np.zeros(1)
    importlib.import_module("kernels.loops").run(out, np.ones(1))
    print(out[0], len(list(pathlib.Path("kernels/__pycache__").glob("*.nbc"))))
"""
    # -B: Python itself takes files of one second and one length for the same.
    run = [sys.executable, "-B", "-c", program]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2.0 1", "3.0 1"], "the file of other sources is deleted"


def test_files_of_the_cache(tmp_path):
    one, other = (jit_cache._Files(tmp_path, f"a.loop-{line}.py311", "now") for line in (3, 9))
    one.save("f4", {"code": 4})
    one.save("f8", {"code": 8})
    (tmp_path / "a.loops-3.py311.then.0.nbc").touch()
    assert [one.load(key) for key in ("f4", "f8", "i4")] == [{"code": 4}, {"code": 8}, None]
    other.save("f4", 5)
    assert [one.load("f4"), other.load("f4")] == [{"code": 4}, 5]
    for broken in tmp_path.glob("a.loop-9*"):
        broken.write_bytes(broken.read_bytes()[:-3])
    assert other.load("f4") is None
    jit_cache._Files(tmp_path, "a.loop-9.py311", "later").save("f4", 6)
    assert [one.load("f4"), other.load("f4")] == [None, None], "of other sources"
    assert len(list(tmp_path.iterdir())) == 2, "another function's stay"
    other.flush()
    assert [path.name for path in tmp_path.iterdir()] == ["a.loops-3.py311.then.0.nbc"]
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        jit_cache._Files(tmp_path / "file", "a.loop-3.py311", "now").save("f4", 4)


CACHED = """
import importlib
import numba, numpy as np
from numba.core import caching, dispatcher
import small_loop

def hits(*kinds):
    '''How many of the loops for these types are found on disk, by what a new process would compile.'''
    run = importlib.reload(small_loop).run
    for kind in kinds:
        x, total = np.arange(4).astype(kind), np.zeros(1)
        run(total, x)
        assert total == 14
    return sum(run._compiled.stats.cache_hits.values())

"""
SMALL_LOOP = """
from spmd.kernels.jit import loops

@loops("total")
def run(total, x):
    for i in range(x.size):
        total[0] += x[i] * x[i]
"""


def hits(folder, *lines: str) -> list[int]:
    """What a process prints line by line, in which `hits("f4")` counts the loops that are found on disk."""
    (folder / "small_loop.py").write_text(SMALL_LOOP)
    run, env = [sys.executable, "-c", CACHED + "\n".join(lines)], os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    done = subprocess.run(run, env=env, cwd=folder, capture_output=True, text=True, check=True)
    return [int(line) for line in done.stdout.splitlines()]


@pytest.mark.skipif(not jit.available(), reason="needs numba")
def test_loops_are_cached_by_all_their_inputs(tmp_path):
    assert hits(tmp_path, 'print(hits("f4"))', 'print(hits("f4", "f8"))') == [0, 1]
    assert not list(tmp_path.glob("*/*.nbi")), (
        "numba's index may name a file with another process's code for other types"
    )
    assert len(list(tmp_path.glob("*/*.nbc"))) == 2
    assert hits(tmp_path, 'print(hits("f8", "f4"))', 'numba.__version__ += "x"', 'print(hits("f8"))') == [2, 0]
    assert len(list(tmp_path.glob("*/*.nbc"))) == 1, "those of another numba are deleted"


@pytest.mark.skipif(not jit.available(), reason="needs numba")
def test_loops_run_where_nothing_can_be_cached(tmp_path):
    refuse = """
def refuse(*args):
    raise {}
right = {}
{} = refuse
print(hits("f8"))
{} = right
"""
    found = hits(
        tmp_path,
        *(
            refuse.format(error, *[what] * 3)
            for error, what in (
                ("RuntimeError('no locator')", "dispatcher.Dispatcher.enable_caching"),
                ("PermissionError('folder')", "caching.Cache.save_overload"),
            )
        ),
    )
    assert found == [0, 0]
    assert not list(tmp_path.glob("*/*.nbc"))


@pytest.mark.skipif(not jit.available(), reason="needs numba")
def test_loops_with_other_constants_are_compiled_anew(tmp_path):
    """numba's key has none of them."""
    program = """
import importlib, pathlib, sys
import numpy as np

for factor in (2.5, 3.25):
    loop = f"from spmd.kernels.jit import loops\\n\\n@loops('out')\\ndef run(out):\\n    out[0] = {factor}\\n"
    pathlib.Path("loop.py").write_text(loop)
    sys.modules.pop("loop", None)
    out = np.zeros(1)
    importlib.import_module("loop").run(out)
    print(out[0])
"""
    run = [sys.executable, "-B", "-c", program]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2.5", "3.25"]
    assert list(tmp_path.glob("__pycache__/*.nbc"))
