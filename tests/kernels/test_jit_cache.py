"""The folder of compiled loops: its files are executed, so nobody else may write there."""

from __future__ import annotations

import os
from pathlib import Path

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
import os, warnings
import numpy as np
from spmd.kernels.jit import loops
from spmd.kernels.cpu.shifts import _products
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    g, total = np.arange(4.0), np.zeros((1, 1))
    _products(total, g, g, np.zeros((1, 4), np.int64), (1, 1, 1, 4), (1, 1, 1, 4))
assert total == 14
print(sum("numba" in str(w.message) for w in caught), sum(_products._compiled.stats.cache_hits.values()))
for w in caught: print(w.message)
"""


@pytest.mark.skipif(not jit.available(), reason="needs numba")
def test_loops_are_cached_only_where_nobody_else_may_write(tmp_path):
    def run() -> tuple[str, str]:
        ended = run_python("-c", PROGRAM, NUMBA_CACHE_DIR=str(tmp_path), timeout=120)
        assert ended.returncode == 0, str(ended)
        first, _, rest = ended.stdout.partition("\n")
        return first, rest

    assert [run()[0], run()[0]] == ["0 0", "0 1"], "the second process finds it"
    (folder,) = {path.parent for path in Path(tmp_path).rglob("*.nbc")}
    files = len(list(folder.iterdir()))
    folder.chmod(0o777)
    first, message = run()
    assert first == "1 0", "nothing is run that others may have put there"
    assert f"the folder {str(folder)!r} to cache them in; its mode 777 lets others write to it" in message
    assert f"chmod go-w {folder}" in message
    assert len(list(folder.iterdir())) == files
    folder.chmod(0o755)
    assert run()[0] == "0 1"
