"""Rules that are loaded when a function first meets a traced array, in several threads at once."""

from __future__ import annotations

import pytest
from launch import run_python

PROGRAM = """
import sys
import threading

import numpy as np

import spmd

sys.setswitchinterval(1e-6)
CALLS = [
    np.median,
    np.linalg.inv,
    lambda x: np.fft.fft(x).real,
    lambda x: np.polyval(x[0], 2.0),
    np.add.reduce,
    np.var,
    lambda x: np.linalg.qr(x)[0],
    lambda x: np.percentile(x, 30.0),
]
start, wrong = threading.Barrier(len(CALLS)), []


def work(f):
    start.wait()
    try:
        spmd.grad(lambda x: np.sum(f(x)))(np.eye(3) + np.arange(9.0).reshape(3, 3) ** 2)
    except Exception as error:
        wrong.append(repr(error))


threads = [threading.Thread(target=work, args=(f,)) for f in CALLS]
for t in threads:
    t.start()
for t in threads:
    t.join()
assert not wrong, wrong
"""


@pytest.mark.parametrize("trial", range(4))
def test_threads_load_rules_at_once(tmp_path, trial):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = run_python(program)
    assert ended.returncode == 0, ended.stderr
