"""Names and paths with any characters in them, where the library writes code or texts that hold them."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
from launch import run_python

import spmd
from spmd import P
from spmd.autodiff.staging.program import _RESERVED, COMM, Built, Line, Ref, ValueInfo

ODD = [
    "it's",
    '"',
    "a\nraise SystemExit(3)\n",
    "{x}",
    "{",
    "%s%d",
    "\\",
    "\\n",
    "#",
    "x²",
    "\u017f",
    "\udc80",
    "\r",
    "\x0c",
    "\u2028",
    "'''",
]
NAMES = ["v0", "v1", "comm", "given", "found", "program", "slice", "class", "None", "1", "", *ODD]


def body(x):
    return spmd.psum(np.exp(x) * 2, "x")


def of_file(path: str, name: str):
    """A body as a file of this path would define it under this name."""
    space: dict = {"spmd": spmd, "np": np}
    code = body.__code__.replace(co_filename=path, co_name=name or "f")
    f = type(body)(code, space, name)
    f.__qualname__ = name
    return f


@pytest.mark.parametrize("seed", range(4))
def test_programs_of_bodies_with_any_name_from_any_path(seed):
    rng = random.Random(seed)
    mesh = spmd.Mesh(x=2, transport="local")
    x = np.arange(4.0)
    want = np.exp(x).reshape(2, 2).sum(0) * 2
    for _ in range(12):
        path, name = ("".join(rng.sample(ODD, 3)) for _ in range(2))
        f = spmd.jit(spmd.map(of_file(path, name), P("x"), P(), mesh=mesh))
        for _ in range(3):
            np.testing.assert_allclose(f(x).numpy(), want)
        compile(f.text().encode("utf-8"), "text", "exec")
        assert "raise SystemExit(3)" not in [line.strip() for line in f.text().splitlines()]


@pytest.mark.parametrize("name", NAMES)
def test_programs_of_functions_with_any_name(name):
    """Whatever a line calls has a name in the program that is no other's."""

    def double(x):
        return 2 * x

    double.__name__ = name
    like = ValueInfo((3,), np.dtype(float), True, 24, True)
    line = Line("call", double, (Ref(0),), {}, [0], [((), 1)], False, False, True, False, None, name)
    second = line._replace(args=(Ref(1),), used=[1], parts=[((), 2)])
    built = Built([line, second], [like] * 3, {}, [0], [Ref(2)], name)
    np.testing.assert_array_equal(built.run(COMM, [np.arange(3.0)])[0], 4 * np.arange(3.0))
    assert all(_RESERVED.fullmatch(n) is None for n in built._constants)


FOLDERS = ["it's", "{x}", "a\nb", "%s", "back\\slash", 'quote"']


@pytest.mark.parametrize("name", ["".join(FOLDERS), *(pytest.param(name, marks=pytest.mark.full) for name in FOLDERS)])
def test_programs_in_folders_with_any_name(name, tmp_path):
    """Errors, programs of spmd.jit and loops kept on disk."""
    folder = tmp_path / name
    folder.mkdir()
    program = folder / "program.py"
    program.write_text(
        """
import numpy as np, spmd
from spmd import P
from spmd.errors import MismatchError
mesh = spmd.Mesh(x=2, transport="local")
x = np.arange(4.0)
f = spmd.jit(spmd.map(lambda x: spmd.psum(spmd.functions.softmax(x), "x"), P("x"), P(), mesh=mesh))
for _ in range(3): assert abs(f(x).numpy().sum() - 2) < 1e-9
def parts(x): return spmd.psum(x, "x") if spmd.worker_index("x") else spmd.pmax(x, "x")
try:
    spmd.map(parts, P("x"), P(), mesh=mesh)(x)
except MismatchError as error:
    assert str(error).count(__file__) == 2, error
def fails(x): raise ValueError("{x} %s")
try:
    spmd.map(fails, P("x"), P(), mesh=mesh)(x)
except ValueError as error:
    assert str(error) == "{x} %s" and error.__notes__
print("well")
"""
    )
    ended = run_python(program, timeout=120, NUMBA_CACHE_DIR=os.fspath(folder))
    assert ended.returncode == 0, str(ended)
    assert ended.stdout == "well\n"
