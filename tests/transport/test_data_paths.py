"""No pickling on any data path: what the transports call of mpi4py are its buffer methods, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from launch import ROOT

SPMD = ROOT / "spmd"
FILES = [*SPMD.glob("**/*.py")]

# mpi4py's methods that pickle their arguments; those of upper case take buffers.
LOWER = set(
    "send recv isend irecv ssend issend bsend ibsend sendrecv mprobe improbe bcast gather scatter allgather alltoall "
    "reduce allreduce scan exscan ibcast".split()
)


def calls(path: Path):
    """The names of the methods that a file calls, with what they are called on."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.attr, ast.unparse(node.func.value), node.lineno


USE_MPI = [path for path in FILES if path.relative_to(SPMD).parts[0] == "transport" and "mpi4py" in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SPMD)))
def test_nothing_is_pickled(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not {n.split(".")[0] for n in names} & {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    if path in USE_MPI:
        found = [(name, line) for name, owner, line in calls(path) if name in LOWER and "comm" in owner.lower()]
        assert not found


def test_the_search_finds_what_it_is_for(tmp_path):
    assert SPMD / "transport" / "processes" / "mpi.py" in USE_MPI
    program = tmp_path / "pickles.py"
    program.write_text("comm.bcast(x)\nself.transport.subcomm(m).allreduce(x)\ncomm.Allreduce(x, y)\n")
    assert [(name, line) for name, owner, line in calls(program) if name in LOWER and "comm" in owner] == [
        ("bcast", 1),
        ("allreduce", 2),
    ]
