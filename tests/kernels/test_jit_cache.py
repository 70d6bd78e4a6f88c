"""The folder of compiled loops: its files are executed, so nobody else may write there."""

from __future__ import annotations

import os

import pytest
from launch import run_python

from spmd.kernels import jit, jit_cache

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no owners and modes here")


@pytest.mark.parametrize(
    ("mode", "words"),
    [(0o700, ""), (0o755, ""), (0o777, "mode 777"), (0o1777, "mode 1777"), (0o757, "mode 757"), (0o775, "mode 775")],
)
def test_modes_of_the_folder(mode, words, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getgid", lambda: os.getuid() + 1)  # The group is not one of this user alone.
    tmp_path.chmod(mode)
    reason = jit_cache.unsafe(tmp_path)
    assert words in reason
    assert bool(reason) == bool(words)


def test_a_group_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getgid", lambda: tmp_path.stat().st_gid)
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_gid)
    tmp_path.chmod(0o775)
    assert jit_cache.unsafe(tmp_path) == ""
    tmp_path.chmod(0o777)
    assert "mode 777" in jit_cache.unsafe(tmp_path)


def test_the_folder_of_another_user(tmp_path, monkeypatch):
    monkeypatch.setattr(jit_cache, "_owners", lambda: {os.getuid() + 1})
    assert f"belongs to user {os.getuid()}" in jit_cache.unsafe(tmp_path)


def test_the_file_of_another_user_is_not_run(tmp_path, monkeypatch):
    files = jit_cache._Files(tmp_path, "a.loop-3.py311", "now")
    files.save("f4", 5)
    assert files.load("f4") == 5
    monkeypatch.setattr(jit_cache, "_owners", lambda: {os.getuid() + 1})
    assert files.load("f4") is None


PROGRAM = """
import importlib, os, sys, warnings
import numpy as np
import small_loop

for mode in sys.argv[1:]:
    for folder, _, files in os.walk(os.environ["NUMBA_CACHE_DIR"]):
        if any(name.endswith(".nbc") for name in files):
            os.chmod(folder, int(mode, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = importlib.reload(small_loop).run  # compiled, or found on disk, as by a new process
        x, total = np.arange(4.0), np.zeros(1)
        run(total, x)
    assert total == 14
    print(sum("numba" in str(w.message) for w in caught), sum(run._compiled.stats.cache_hits.values()))
    for w in caught: print(w.message)
    print("--")
"""
SMALL_LOOP = """
from spmd.kernels.jit import loops

@loops("total")
def run(total, x):
    for i in range(x.size):
        total[0] += x[i] * x[i]
"""


@pytest.mark.skipif(not jit.available(), reason="needs numba")
def test_loops_are_cached_only_where_nobody_else_may_write(tmp_path):
    (tmp_path / "small_loop.py").write_text(SMALL_LOOP)
    (tmp_path / "program.py").write_text(PROGRAM)
    cache = tmp_path / "cache"

    def run(*modes: str) -> list[str]:
        """What is printed of the loop in a folder of each of these modes."""
        ended = run_python(tmp_path / "program.py", *modes, NUMBA_CACHE_DIR=str(cache), timeout=120)
        assert ended.returncode == 0, str(ended)
        return ended.stdout.split("--\n")[:-1]

    assert run("755") == ["0 0\n"]
    (folder,) = {path.parent for path in cache.rglob("*.nbc")}
    files = len(list(folder.iterdir()))
    second, others, again = run("755", "777", "755")
    assert second == "0 1\n", "the second process finds it"
    first, _, message = others.partition("\n")
    assert first == "1 0", "nothing is run that others may have put there"
    assert f"the folder {str(folder)!r} to cache them in; its mode 777 lets others write to it" in message
    assert f"chmod go-w {folder}" in message
    assert len(list(folder.iterdir())) == files
    assert again == "0 1\n"
