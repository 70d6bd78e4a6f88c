"""The threads that BLAS may take while a map runs: each worker its share of the cores, never more than the user."""

from __future__ import annotations

import threading

import pytest
from launch import run_python
from threadpoolctl import ThreadpoolController, threadpool_limits
from virtual_workers import PROGRAM, in_process, mesh_of, run

from spmd.transport.blas_threads import blas_threads, share_of_cores

pytestmark = pytest.mark.usefixtures("no_hang")


def now() -> set[int]:
    """How many threads the libraries may take."""
    return {lib.num_threads for lib in ThreadpoolController().select(user_api="blas").lib_controllers}


def test_the_limit_on_blas_threads_is_the_least_asked_for_and_is_lifted_by_the_last():
    with threadpool_limits(4, user_api="blas"):
        with blas_threads(3):
            assert now() == {3}
            other = blas_threads(2)
            other.__enter__()
            assert now() == {2}
            with blas_threads(4):
                assert now() == {2}
            with blas_threads(1):
                assert now() == {1}
            assert now() == {2}
        assert now() == {2}
        other.__exit__(None, None, None)
        assert now() == {4}
    with threadpool_limits(1, user_api="blas"):  # As the user wants it: never more.
        with blas_threads(8):
            assert now() == {1}
        assert now() == {1}


def test_any_thread_limits_blas_and_the_last_one_lifts_the_limit():
    """threadpoolctl lets only the first thread that has changed a library change it again."""

    def elsewhere(f) -> None:
        thread = threading.Thread(target=f)
        thread.start()
        thread.join()

    seen = []

    def inside() -> None:
        with blas_threads(1):
            seen.append(now())

    with threadpool_limits(3, user_api="blas"):
        inside()  # which this thread does, and lives
        elsewhere(inside)
        assert seen == [{1}, {1}]
        assert now() == {3}
        mine = blas_threads(2)
        mine.__enter__()
        elsewhere(lambda: mine.__exit__(None, None, None))
        assert now() == {3}
        elsewhere(mine.__enter__)
        assert now() == {2}
        mine.__exit__(None, None, None)
        assert now() == {3}


def test_blas_is_limited_in_bodies_and_free_after_them(scheduler):
    mesh = mesh_of(scheduler)
    with threadpool_limits(6, user_api="blas"):
        assert run(mesh, lambda w: now())[3] == {min(6, share_of_cores(4))}
        assert now() == {6}
        with pytest.raises(ZeroDivisionError):
            run(mesh, lambda w: 1 // 0)
        assert now() == {6}


def test_the_users_one_thread_stays_one():
    program = """
from threadpoolctl import ThreadpoolController
mesh = spmd.Mesh(x=1, transport="local")
def now(): return {x.num_threads for x in ThreadpoolController().select(user_api="blas").lib_controllers}
print(run(lambda w: now())[0], now())
import scipy.linalg  # It brings a library of its own.
print(run(lambda w: now())[0], now())
"""
    ended = run_python("-c", PROGRAM + program, "threads", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
    assert ended.stdout == "{1} {1}\n{1} {1}\n", str(ended)


def test_libraries_that_come_later_are_limited_too():
    program = """
from threadpoolctl import ThreadpoolController
def now(): return [x.num_threads for x in ThreadpoolController().select(user_api="blas").lib_controllers]
all_is_well()
before = len(now())
import scipy.linalg
print(len(now()) > before, set(run(lambda w: now())[0]))
"""
    ended = run_python("-c", PROGRAM + program, "threads")
    assert ended.stdout in (f"{more} {{{share_of_cores(4)}}}\n" for more in (True, False)), str(ended)


def test_after_a_fork_the_limit_of_the_parents_maps_is_gone():
    program = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
from threadpoolctl import threadpool_limits, ThreadpoolController
from spmd.transport.blas_threads import blas_threads
def now(): return {x.num_threads for x in ThreadpoolController().select(user_api="blas").lib_controllers}
threadpool_limits(2, user_api="blas")
with blas_threads(1):
    child = os.fork()
    if child == 0:
        free = now() == {2}
        with blas_threads(1): limited = now() == {1}
        os._exit(7 if free and limited and now() == {2} else 8)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("well")
"""
    assert in_process("threads", program) == "well\n"
