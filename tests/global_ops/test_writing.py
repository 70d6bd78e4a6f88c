"""Functions that write global arrays into files and into arrays, or would write into global ones."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from launch import launch

import spmd
from spmd import P
from spmd.errors import LayoutError, SpecError

A = np.arange(21.0).reshape(7, 3)


def test_files_of_arrays_that_are_here(tmp_path):
    with spmd.Mesh(x=3):
        u = spmd.put(A, P("x"))
        np.save(tmp_path / "u.npy", u)
        np.savetxt(tmp_path / "u.txt", u)
        np.savez(tmp_path / "u.npz", u=u, v=A)
        assert np.array_equal(np.load(tmp_path / "u.npy"), A)
        assert np.array_equal(np.loadtxt(tmp_path / "u.txt"), A)
        assert np.array_equal(np.load(tmp_path / "u.npz")["u"], A)


PARTS = """
import sys, numpy as np, spmd
from spmd import P

with spmd.Mesh(x=2):
    u = spmd.put(np.arange(7.0), P("x"))
    try:
        np.save(sys.argv[1], u)
    except spmd.errors.LayoutError as error:
        print("x.numpy() on all processes" in str(error))
"""


def test_files_of_arrays_of_which_a_process_has_a_part(tmp_path):
    program = tmp_path / "parts.py"
    program.write_text(PARTS)
    ended = launch(program, str(tmp_path / "u.npy"), n=2, python=sys.executable, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert ended.stdout.split() == ["True", "True"]


def test_lists_and_arrays_of_bare_data():
    with spmd.Mesh(x=3):
        u = spmd.put(A, P("x"))
        assert u.tolist() == A.tolist()
        assert u.sum().tolist() == 210.0
        bare = np.zeros((7, 3))
        np.copyto(bare, u, where=A > 3)
        assert np.array_equal(bare, np.where(A > 3, A, 0))


IN_PLACE = {
    "copyto": lambda u: np.copyto(u, 0),
    "put": lambda u: np.put(u, [0], 1),
    "place": lambda u: np.place(u, A > 3, 1),
    "putmask": lambda u: np.putmask(u, A > 3, 1),
    "fill_diagonal": lambda u: np.fill_diagonal(u, 1),
    "put_along_axis": lambda u: np.put_along_axis(u, np.zeros((1, 3), int), 1, 0),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_global_arrays_are_not_written_to(name):
    with spmd.Mesh(x=3), pytest.raises(LayoutError, match=rf"np\.{name}\n.*\n.*immutable\n  mend: .*x = "):
        IN_PLACE[name](spmd.put(A, P("x")))


BY_POSITION = {
    "zeros": lambda: spmd.zeros((4, 4), P("x")),
    "ones": lambda: spmd.ones(4, P("x")),
    "full": lambda: spmd.full(4, 1.0, P("x")),
    "arange": lambda: spmd.arange(4, P("x")),
    "linspace": lambda: spmd.linspace(0, 1, 5, P("x")),
    "eye": lambda: spmd.eye(4, P("x")),
    "random.normal": lambda: spmd.random.normal(spmd.random.key(0), 4, P("x")),
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_specs_are_given_by_name(name):
    with spmd.Mesh(x=3), pytest.raises(SpecError, match=rf"spmd\.{name}: argument (.*\n)*.*mend:   spec=P\('x'\)"):
        BY_POSITION[name]()
