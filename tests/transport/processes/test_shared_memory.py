"""Memory that processes of a host read of each other: what lies in it, what comes back to it, and who writes to it."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest

from spmd.transport.processes.shared_memory import window

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="arenas are Linux's")

BEGIN = """
import gc, os, time
import numpy as np
from spmd.kernels.memory import pool
from spmd.transport.processes.shared_memory import shared_memory, window

mine = shared_memory()
assert mine is shared_memory()

def filled(value, nbytes=1 << 20):
    x = pool.empty(nbytes, np.uint8)
    x.fill(value)
    return x

def resident():
    return os.fstat(mine.file).st_blocks * 512
"""


def run(program: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(program)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    assert not ended.stderr


def test_large_arrays_lie_where_others_can_read_them():
    run(
        """
        seen = window(os.getpid(), mine.file)
        assert seen is window(os.getpid(), mine.file)
        x = filled(7).reshape(1024, 1024)
        part = x[3:900:2, ::-5]
        x[3, -1] = 9
        at = mine.place(part)
        assert at == mine.place(x) + 3 * 1024 + 1023
        there = np.ndarray(part.shape, part.dtype, seen, at, part.strides)
        assert np.array_equal(there, part)
        assert there[0, 0] == 9
        assert not there.flags.writeable
        for elsewhere in (np.zeros(1 << 20), np.zeros(1 << 20)[5:], np.zeros(3), np.float64(1)):
            assert mine.place(np.asarray(elsewhere)) is None
        large = filled(5, 100 << 20)
        assert (np.ndarray(large.shape, large.dtype, seen, mine.place(large)) == 5).all()
        """
    )


def test_what_nobody_uses_goes_back_to_the_system():
    run(
        """
        before = resident()
        xs = [filled(k) for k in range(3)]
        places = [mine.place(x) for x in xs]
        assert resident() - before >= 3 << 20
        del xs
        assert sorted(mine.place(filled(1)) for _ in range(3))[0] in places, "what lies idle is used again"
        pool.release()
        assert resident() - before < 1 << 20
        x = filled(0)
        assert mine.place(x) in places, "and where it lay is taken again"
        """
    )


def test_other_files_are_no_arenas():
    run(
        """
        file = os.open("/dev/null", os.O_RDONLY)
        for other in (file, 10**6):
            try:
                window(os.getpid(), other)
            except OSError:
                continue
            raise AssertionError("that is no arena")
        """
    )


def test_a_child_keeps_what_it_had_and_writes_for_itself():
    run(
        """
        x, y = filled(1), filled(2)
        told, tell = os.pipe()
        done, say = os.pipe()
        child = os.fork()
        if child == 0:
            x[:10] = 5
            os.write(say, b"x")
            os.read(told, 1)
            right = shared_memory() is None and (x[:10] == 5).all() and (x[10:] == 1).all() and (y == 2).all()
            right = right and mine.place(filled(3)) is None
            os._exit(0 if right else 1)
        os.read(done, 1)
        assert (x == 1).all(), "the child wrote into what is its parent's"
        places = {mine.place(x), mine.place(y)}
        del x, y
        z = [filled(8) for _ in range(4)]
        assert not places & {mine.place(a) for a in z}, "a child may still look there"
        os.write(tell, b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        more = [filled(9) for _ in range(4)]
        assert places < {mine.place(a) for a in more}, "now nobody does"
        """
    )


def test_a_child_closes_nothing_of_its_own():
    run(
        """
        x, y = filled(1), filled(2)
        child = os.fork()
        if child == 0:
            pipes = [os.pipe() for _ in range(4)]
            for _, say in pipes:
                os.write(say, b"hello")
            del x, y
            gc.collect()
            os._exit(0 if all(os.read(told, 9) == b"hello" for told, _ in pipes) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        """
    )


OWNER = """
x = filled(7)
kept = [x]
kept.append(kept)
print(os.getpid(), mine.file, mine.place(x), flush=True)
input()
"""


def test_what_others_read_stays_when_its_owner_ends():
    program = [sys.executable, "-c", BEGIN + OWNER]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        pid, file, at = map(int, owner.stdout.readline().split())
        seen = np.ndarray(1 << 20, np.uint8, window(pid, file), at)
        owner.stdin.write("end\n")
        owner.stdin.close()
        assert owner.wait(30) == 0
    assert (seen == 7).all()


def test_forks_do_not_use_memory_up():
    run(
        """
        import subprocess
        kept = filled(1)
        for turn in range(200):
            x, y = filled(2), filled(3)
            child = os.fork()
            if child == 0:
                if turn % 3 == 0:
                    os.execvp("true", ["true"])
                grandchild = os.fork()
                os._exit(0 if grandchild == 0 or os.waitpid(grandchild, 0)[1] == 0 else 1)
            if turn % 50 == 0:
                subprocess.run(["true"], preexec_fn=lambda: None, check=True)
            assert os.waitpid(child, 0)[1] == 0
        assert resident() < 32 << 20, resident()
        assert len(os.listdir("/proc/self/fd")) < 20
        assert (kept == 1).all()
        """
    )


def test_the_last_arrays_go_when_the_interpreter_ends():
    run("x = filled(1); kept = [x, x[3:]]; kept.append(kept)")


def test_arrays_that_outlive_the_modules_go_without_a_word():
    run("x = filled(1); np.kept = [x, x[3:], pool.empty(1 << 21)]")


def test_places_are_used_again_for_other_sizes():
    run(
        """
        pool._source_free.limit = 40 << 20
        mine.nbytes = 100 << 20
        rng = np.random.default_rng(0)
        kept = {}
        for turn in range(250):
            x = filled(turn % 251, int(rng.integers(1 << 20, 9 << 20)))
            assert mine.place(x) is not None, "there is room, if not in one place"
            kept[turn] = x
            del x
            spare = [k for k in kept if rng.random() < 0.5 or sum(v.nbytes for v in kept.values()) > 24 << 20]
            for k in spare:
                assert (kept.pop(k) == k % 251).all()
            pool.release()
            assert mine.used <= 40 << 20 and mine.end <= mine.nbytes
            places = sorted((mine.place(v), v.nbytes) for v in kept.values())
            assert all(a + n <= b for (a, n), (b, _) in zip(places, places[1:]))
        kept.clear()
        pool.release()
        x = filled(1, 36 << 20)
        assert mine.place(x) is not None, "all of it, in one piece"
        assert mine.used == pool._free.nbytes + x.base.slab.storage.nbytes
        """
    )


def test_there_is_no_more_than_there_is():
    run(
        """
        mine.nbytes = mine.end + (5 << 19)
        xs = [filled(k) for k in range(5)]
        where = [mine.place(x) is not None for x in xs]
        assert where == [True, True, False, False, False]
        assert [int(x[0]) for x in xs] == [0, 1, 2, 3, 4]
        """
    )


def test_there_is_no_more_than_may_be_kept_for_later_and_that_is_kept():
    run(
        """
        pool._source_free.limit, pool._free.limit = 20 << 20, 8 << 20
        for turn in range(3):
            xs = [filled(k, 3 << 20) for k in range(9)]
            places = [mine.place(x) for x in xs]
            assert None not in places[:6] and places[6:] == [None] * 3, "what others can read is taken first"
            assert turn == 0 or {*places} == before
            before = {*places}
            assert [int(x[0]) for x in xs] == [*range(9)]
            for k in (0, 7, 1, 8, 2, 6, 3, 4, 5):
                xs[k] = None
            assert resident() >= 18 << 20
            assert pool.idle() > 24 << 20, "of NumPy's memory two are kept too"
        """
    )


def test_what_has_lain_idle_for_long_makes_room_for_other_sizes():
    run(
        """
        pool._source_free.limit = 20 << 20
        old = [filled(k, 3 << 20) for k in range(6)]
        for turn in range(1000):
            if turn == 500:
                del old
            young, again = filled(1, 5 << 20), filled(turn % 251, 1 << 19)
            if mine.place(young) is not None:
                break
        assert 500 + pool._SOURCE_AGE // 2 < turn < 900, f"turn {turn}: not what is in use, nor what was left just now"
        assert mine.used <= 20 << 20
        """
    )


def test_threads_may_take_and_give_at_once():
    run(
        """
        import threading
        pool._source_free.limit = 30 << 20
        wrong = []
        def work(seed):
            rng = np.random.default_rng(seed)
            kept = []
            for turn in range(500):
                x = filled(seed, int(rng.integers(1 << 16, 4 << 20)))
                cycle = [x]
                cycle.append(cycle)
                kept.append(x)
                if len(kept) > 3:
                    y = kept.pop(int(rng.integers(4)))
                    if not (y[:: 4096] == seed).all():
                        wrong.append(seed)
        threads = [threading.Thread(target=work, args=(k,)) for k in range(1, 5)]
        for t in threads: t.start()
        for t in threads: t.join()
        assert not wrong
        gc.collect()
        pool.release()
        filled(0, 1 << 22)
        pool.release()
        mine._collect_freed()
        assert mine.used == 0, mine.used
        """
    )
