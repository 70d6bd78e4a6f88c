"""`python -m spmd info` and `python -m spmd adjoint`: what they print, their exit status, alone and under mpiexec."""

from __future__ import annotations

import json
import re
from math import prod

import numpy as np
import pytest
from launch import launch, mpiexec, run_python

import spmd
from spmd import __main__ as command_line
from spmd.__main__ import main, parse_mesh
from spmd.testing import operator_classes
from spmd.transport.algorithms.cost import Cost
from spmd.transport.algorithms.table import FUNCTIONS
from spmd.transport.plan import Plan

OPERATORS = [kind.__name__ for kind in operator_classes() if kind.__module__.startswith("spmd.")]

PLANTED = '''
import sys
from spmd import __main__ as command, testing
from spmd.operators.sums import Sum, Vary


class Planted(Sum):
    """Its adjoint sums once more."""

    @property
    def H(self):
        return Sum(self.axes)


if "--without-row" not in sys.argv:
    testing._CASES[Planted] = lambda axes, n: [testing.Case(Planted(axes), (3, 2)), testing.Case(Planted(axes), ())]
if "--alone" in sys.argv:  # without the other operators, which take time
    command.operator_classes = lambda: [Planted]
if "--few" in sys.argv:
    command.operator_classes = lambda: [Sum, Vary, Planted]
sys.exit(command.main([a for a in sys.argv[1:] if a not in ("--without-row", "--alone", "--few")]))
'''

FEW = """
import sys
from spmd import __main__ as command
from spmd.operators.sums import Sum, Vary

command.operator_classes = lambda: [Sum, Vary]  # the others take time
sys.exit(command.run())
"""


@pytest.fixture
def planted(tmp_path):
    program = tmp_path / "planted.py"
    program.write_text(PLANTED)
    return program


@pytest.fixture
def few_operators(monkeypatch) -> list[str]:
    """The names of the operators that commands in this process test; all of them take time, and have tests of their
    own."""
    few = [kind for kind in operator_classes() if kind.__name__ in ("Sum", "Vary", "HaloExchange")]
    monkeypatch.setattr(command_line, "operator_classes", lambda: few)
    return [kind.__name__ for kind in few]


def said(capsys, *args: str) -> str:
    """What the command prints in this process."""
    assert main(list(args)) == 0
    out = capsys.readouterr()
    assert not out.err
    return out.out


# cost


def table_of(text: str) -> dict[str, list[int]]:
    """By algorithm, what is chosen with an asterisk: messages, bytes, rounds, path."""
    lines = text.splitlines()[4:]
    rows = lines[: lines.index("")]
    return {(row[:2].strip() + row[2:46]).strip(): [int(word) for word in row[46:].split()] for row in rows}


def test_cost_of_the_algorithms_of_a_sum(capsys):
    text = said(capsys, "cost", "psum", "--n", "1024", "--bytes", "4e6", "--hosts", "64")
    assert text.startswith("spmd.psum of 4000000 bytes, 1024 workers on 64 hosts: all_reduce\n")
    found = table_of(text)
    assert found["recursive doubling"] == [10, 10 * 4000000, 10, 10]
    assert found["pairwise"][::2] == [2 * 1023, 2]
    levels = found["two levels, halving and doubling"]
    assert [levels[0], *levels[2:]] == [2 * 15 + 2 * 6, 2 + 12, 2 * 15 + 2 * 6]  # 16 on each of 64 hosts
    chosen = found["*halving and doubling"]
    assert [chosen[0], *chosen[2:]] == [20, 20, 20]
    assert 0 <= chosen[1] - 2 * 1023 / 1024 * 4000000 <= 1024  # chunks differ by a byte
    assert sum(name.startswith("*") for name in found) == 1


@pytest.mark.parametrize(
    ("args", "chosen", "figures"),
    [
        (("psum", "--n", "5"), "*recursive doubling", [3, 24, 4, 4]),  # of five, two act as one
        (("spmd.pmax", "--n", "6", "--hosts", "4"), "*recursive doubling", [3, 24, 4, 4]),
        (("all_gather", "--n", "6"), "*Bruck", [3, 40, 3, 3]),
        (("all_gather", "--n", "6", "--bytes", "1e5"), "*Bruck, then directly", [3 + 5, 500000, 4, 3 + 5]),
        (
            ("all_gather", "--n", "8", "--bytes", "1e5", "--hosts", "2"),
            "*Bruck, then around a ring",
            [10, 700000, 10, 10],
        ),
        (("all_to_all", "--n", "8", "--bytes", "64"), "*Bruck", [3, 3 * 32, 3, 3]),
        (("psum_scatter", "--n", "8", "--bytes", "64"), "*halving", [3, 56, 3, 3]),
        (("sum_reduce", "--n", "8"), "*binomial tree", [1, 8, 3, 3]),
        (("broadcast", "--n", "8"), "*binomial tree", [3, 24, 2, 3]),
        (("scatter", "--n", "8", "--bytes", "64"), "*binomial tree", [3, 56, 2, 3]),
        (("gather", "--n", "8"), "*binomial tree", [1, 32, 3, 3]),
        (("shift", "--n", "4096"), "*directly, to each partner", [1, 8, 1, 1]),
        (("halo_exchange", "--n", "4096"), "*directly, to each partner", [2, 16, 1, 2]),
        (("pvary",), "*nothing moves", [0, 0, 0, 0]),
        (("psum", "--n", "1"), "*nothing moves", [0, 0, 0, 0]),
    ],
)
def test_cost(capsys, args, chosen, figures):
    assert table_of(said(capsys, "cost", *args))[chosen] == figures


def test_cost_as_json(capsys):
    (first, *_) = json.loads(said(capsys, "cost", "psum", "--n", "8", "--json"))
    assert first == {
        "algorithm": "recursive doubling",
        "messages": 3,
        "nbytes": 24,
        "rounds": 3,
        "path": 3,
        "chosen": True,
    }


def test_the_cost_of_every_operator_is_known():
    functions = {kind.function for kind in operator_classes()} - {"map"}
    assert functions <= set(FUNCTIONS)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("psun",), "did you mean psum?"),
        (("psum", "--n", "0"), "got '0', needed an int of at least 1"),
        (("psum", "--bytes", "1.5"), "needed a whole number of bytes"),
        (("psum", "--bytes", "-1"), "--bytes"),
        (("psum", "--bytes", "nan"), "needed a whole number of bytes"),
        (("psum", "--n", "4", "--hosts", "5"), "argument --hosts: got 5, needed at most --n, 4"),
    ],
)
def test_cost_of_what_is_not_there(capsys, args, words):
    try:
        status = main(["cost", *args])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert words in capsys.readouterr().err


# info


def facts(text: str) -> dict[str, str]:
    return {line[:14].strip(): line[14:] for line in text.splitlines()}


def test_info(monkeypatch):
    monkeypatch.delenv("SPMD_DEVICE", raising=False)
    ended = run_python("-m", "spmd", "info")
    assert ended.returncode == 0, str(ended)
    assert not ended.stderr
    found = facts(ended.stdout)
    assert found["spmd"].startswith(("0.", "a bare checkout"))
    assert f"numpy {np.__version__}" in found["packages"]
    assert found["MPI launcher"] == "no"
    assert found["MPI world"] == "1 process"
    assert re.match(r"[1-9]\d* usable", found["cores"])
    assert "threads)" in found["BLAS"]
    assert found["variables"] == "none set"
    assert found["transport"] == "local: virtual workers in this process"
    assert found["scheduler"] == "auto"
    assert "MPI library" in found


def test_info_tells_of_the_environment(monkeypatch):
    monkeypatch.delenv("SPMD_DEVICE", raising=False)
    ended = run_python("-m", "spmd", "info", SPMD_TRANSPORT="local", SPMD_SCHEDULER="lockstep")
    found = facts(ended.stdout)
    assert found["variables"] == "SPMD_TRANSPORT=local, SPMD_SCHEDULER=lockstep"
    assert found["scheduler"] == "lockstep"
    ended = run_python("-m", "spmd", "info", SPMD_TRANSPORT="pigeon")
    assert ended.returncode == 0, str(ended)
    assert facts(ended.stdout)["transport"] == "pigeon: no such transport"


def test_info_tells_of_the_mesh():
    with spmd.Mesh(a=2, b=3, scheduler="threads"):
        found = facts(spmd.info())
    assert found["mesh"] == "Mesh(a=2, b=3)"
    assert found["transport"] == "local: virtual workers in this process"
    assert found["scheduler"] == "threads"
    assert found["BLAS threads"].endswith("per worker")


# adjoint


def test_adjoint_prints_a_row_for_every_operator():
    ended = run_python("-m", "spmd", "adjoint", "--mesh", "x=2,y=1", "--trials", "1")
    assert ended.returncode == 0, str(ended)
    assert not ended.stderr
    title, about, _, head, *rows = ended.stdout.splitlines()
    assert title == "dot tests on Mesh(x=2, y=1), transport local: integers, exact equality"
    assert about.startswith("messages and bytes: what all workers send")
    heads = ["operator", "function", "states", "adjoint", "cases", "exact", "messages", "bytes", "declared", "verdict"]
    assert head.split() == heads
    assert [row.split()[0] for row in rows] == OPERATORS
    form = r"\w+ +spmd\.\w+ +\w+ → \w+ +\w+ +([1-9]\d*) +\1 +\d+ +\d+  as sent +exact"
    assert all(re.fullmatch(form, row) for row in rows)
    assert all(row.index("  as sent ") == rows[0].index("  as sent ") for row in rows)
    assert len({row.index("spmd.") for row in rows}) == 1


def test_adjoint_in_json(capsys):
    rows = json.loads(said(capsys, "adjoint", "--mesh", "x=2,y=1", "--json", "--trials", "1"))
    assert [row["operator"] for row in rows] == OPERATORS
    by_name = {row["operator"]: row for row in rows}
    for row in rows:
        assert row["passed"] is True
        assert row["failures"] == []
        assert row["cases"] == row["exact"] > 0
        assert (row["messages"], row["bytes"]) == (row["declared_messages"], row["declared_bytes"])
        assert (row["messages"] > 0) == (row["operator"] not in ("Vary", "Keep", "Slice", "Unroot", "Enroot"))
        assert callable(getattr(spmd, row["function"].removeprefix("spmd.")))
        assert by_name[row["adjoint"]]["adjoint"] == row["operator"]
        assert by_name[row["adjoint"]]["states"] == " → ".join(reversed(row["states"].split(" → ")))


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_adjoint_in_another_dtype(capsys, monkeypatch, few_operators, dtype):
    dtypes = []
    check = command_line.check_adjoint
    monkeypatch.setattr(
        command_line,
        "check_adjoint",
        lambda *args, **options: dtypes.append(options["dtype"]) or check(*args, **options),
    )
    text = said(capsys, "adjoint", "--dtype", dtype, "--trials", "1", "--seed", "4")
    assert text.count("exact\n") == len(few_operators)
    assert {*dtypes} == {np.dtype(dtype)}


def test_trials_multiply_the_cases(capsys, few_operators):
    few, many = (json.loads(said(capsys, "adjoint", "--mesh", "x=1", "--json", "--trials", n)) for n in ("1", "3"))
    assert [row["operator"] for row in few] == few_operators
    assert [3 * row["cases"] for row in few] == [row["cases"] for row in many]


def test_meshes_by_their_text():
    assert parse_mesh("x=3,y=2") == spmd.Mesh(x=3, y=2)
    assert parse_mesh(" x = 3 , data=1 ").axes == {"x": 3, "data": 1}
    assert parse_mesh("transport=2").axes == {"transport": 2}


@pytest.mark.parametrize("text", ["", "x", "x=", "=2,x", "x=2,", "x=a", "x=2=3", "x=0", "x=-1", "x=2,x=3", "x=1.5"])
def test_a_bad_mesh_is_explained(capsys, text):
    with pytest.raises(SystemExit) as caught:
        main(["adjoint", "--mesh", text])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert f"argument --mesh: got {text!r}, needed axis sizes by name, as in x=3,y=2" in said
    assert ("needed: " in said) == (text in ("x=0", "x=-1", "x=2,x=3"))


def test_a_bad_mesh_ends_with_a_status():
    """Not the one of a wrong operator."""
    ended = run_python("-m", "spmd", "adjoint", "--mesh", "x=0")
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert "spmd.Mesh: argument x" in ended.stderr
    assert not ended.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "required: command"),
        (["adjoin"], "invalid choice: 'adjoin'"),
        (["adjoint", "--dtype", "floaty"], "--dtype"),
        (["adjoint", "--dtype", "int32"], "argument --dtype: got 'int32', needed a floating or complex dtype"),
        (["adjoint", "--trials", "many"], "--trials"),
        (["adjoint", "--trials", "0"], "argument --trials: got '0', needed an int of at least 1"),
        (["adjoint", "--trials", "-1"], "--trials"),
        (["adjoint", "--seed", "-1"], "argument --seed: got '-1', needed an int of at least 0"),
        (["info", "--mesh", "x=2"], "unrecognized arguments"),
    ],
)
def test_bad_arguments(capsys, args, words):
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "python -m spmd" in out
    assert "adjoint" in out
    assert "info" in out


def test_a_wrong_operator_gives_status_1(planted):
    ended = run_python(planted, "--few", "adjoint", "--mesh", "x=3")
    assert ended.returncode == 1, str(ended)
    rows = {line.split()[0]: line for line in ended.stdout.splitlines() if line.rstrip().endswith(("exact", "ADJOINT"))}
    assert rows.keys() == {"Sum", "Vary", "Planted"}
    assert [name for name, line in rows.items() if line.endswith("NOT ADJOINT")] == ["Planted"]
    assert "Planted(axes=('x',)) of (3, 2) on Mesh(x=3): NOT adjoint (exact, 3 trials)" in ended.stdout
    assert "smallest case that fails: Planted(axes=('x',)) of () on Mesh(x=2)" in ended.stdout
    assert "reproduce: import spmd; spmd.check_adjoint(Planted(axes=('x',)), (), mesh=spmd.Mesh(x=2)" in ended.stdout


def test_a_wrong_operator_in_json(planted):
    ended = run_python(planted, "--alone", "adjoint", "--mesh", "x=3", "--trials", "1", "--json")
    assert ended.returncode == 1, str(ended)
    failed = [row for row in json.loads(ended.stdout) if not row["passed"]]
    assert [row["operator"] for row in failed] == ["Planted"]
    assert len(failed[0]["failures"]) == len(failed[0]["reports"]) == 2
    report = failed[0]["reports"][0]
    assert report["smallest"]["entries"][0]["needed"] == 1.0
    assert report["kind"] == "value"
    assert all("integers must agree" in text for text in failed[0]["failures"])


def test_a_wrong_cost_gives_status_1(capsys, monkeypatch, few_operators):
    right = Plan.costs

    def wrong(plan: Plan, *more) -> Cost:
        return Cost(1, 8 * prod(plan.shape)) if plan.kind == "all_reduce" else right(plan, *more)

    monkeypatch.setattr(Plan, "costs", wrong)
    assert main(["adjoint", "--mesh", "x=3", "--trials", "1"]) == 1
    out = capsys.readouterr().out
    (row,) = [line for line in out.splitlines() if line.endswith("COST DIFFERS")]
    # Of three workers, the first gives its block to the second, which exchanges sums with the third, and answers.
    assert re.match(r"Sum .* 3 +3 +12 +224  9, 168 +COST DIFFERS$", row), row
    assert "Sum(axes=('x',)) of (3, 2) on Mesh(x=3): sends 4 messages of" in out
    assert main(["adjoint", "--mesh", "x=3", "--trials", "1", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["operator"] for row in rows if not row["passed"]] == ["Sum"]


def test_an_operator_without_cases_is_missed(planted):
    ended = run_python(planted, "adjoint", "--mesh", "x=2", "--trials", "1", "--without-row")
    assert ended.returncode != 0
    assert "add a row to spmd/testing.py: Planted" in ended.stderr


# Under mpiexec

needs_mpiexec = pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")


@pytest.fixture
def command(tmp_path):
    """A program that is `python -m spmd`."""
    program = tmp_path / "command.py"
    program.write_text("import runpy\nrunpy.run_module('spmd', run_name='__main__', alter_sys=True)\n")
    return program


@pytest.mark.mpi
@needs_mpiexec
def test_info_under_mpiexec(command):
    ended = launch(command, "info", n=4)
    assert ended.returncode == 0, str(ended)
    found = facts(ended.stdout)
    assert found["MPI world"] == "4 processes"
    assert found["MPI launcher"].startswith("yes (")
    assert found["transport"] == "mpi for a mesh of 4 workers; others need transport='local'"
    assert ended.stdout.count("MPI world") == 1  # one process prints


@pytest.mark.mpi
@needs_mpiexec
@pytest.mark.parametrize(
    ("n", "mesh", "trials"),
    [(3, "x=3", "1"), *(pytest.param(4, *case, marks=pytest.mark.full) for case in (("x=4", "1"), ("x=2,y=2", "3")))],
)
def test_adjoint_under_mpiexec(command, capsys, n, mesh, trials):
    ended = launch(command, "adjoint", "--mesh", mesh, "--trials", trials, n=n, timeout=300)
    assert ended.returncode == 0, str(ended)
    alone = said(capsys, "adjoint", "--mesh", mesh, "--trials", trials)
    assert ended.stdout == alone.replace("transport local", "transport mpi")


@pytest.mark.mpi
@needs_mpiexec
def test_a_wrong_operator_gives_a_status_under_mpiexec(planted):
    ended = launch(planted, "--alone", "adjoint", "--mesh", "x=3", "--trials", "1", "--json", n=3, timeout=120)
    assert ended.returncode not in (0, None), str(ended)
    alone = run_python(planted, "--alone", "adjoint", "--mesh", "x=3", "--trials", "1", "--json")
    assert json.loads(ended.stdout) == json.loads(alone.stdout)


@pytest.mark.mpi
@needs_mpiexec
def test_a_mesh_of_another_size_than_the_world(command):
    ended = launch(command, "adjoint", "--mesh", "x=3", n=2)
    assert ended.returncode not in (0, None), str(ended)
    assert "Mesh(x=3) of 3 workers, and an MPI world of 2 processes" in ended.stderr
    assert 'transport="local"' in ended.stderr
    assert "Traceback" not in ended.stderr
    command.write_text(FEW)
    alone = launch(command, "adjoint", "--mesh", "x=1", "--trials", "1", n=2, SPMD_TRANSPORT="local")
    assert alone.returncode == 0, str(alone)
    assert alone.stdout.count("dot tests on Mesh(x=1), transport local") == 2  # each process by itself


# Standard output that is closed early, or has few characters

COMMANDS = [
    ("info",),
    ("adjoint", "--mesh", "x=1", "--trials", "1"),
    ("adjoint", "--mesh", "x=1", "--trials", "1", "--json"),
    ("bench", "kernels", "--only", "exp_sums", "--rounds", "1"),
    ("adjoint", "--help"),
]
ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}


@pytest.fixture
def program(args, tmp_path) -> list[str]:
    """What Python runs for a command: of `adjoint`, the one with few operators."""
    if args[:2] != ("adjoint", "--mesh"):
        return ["-m", "spmd"]
    (tmp_path / "few.py").write_text(FEW)
    return [str(tmp_path / "few.py")]


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_who_reads_no_further_ends_a_command_in_silence(args, program):
    program = f"""
import os, subprocess, sys
reader, writer = os.pipe()
os.close(reader)  # From the first character on nobody reads.
done = subprocess.run([sys.executable, *{program!r}, *{args!r}], stdout=writer, stderr=subprocess.PIPE, text=True)
print(done.returncode, repr(done.stderr))
"""
    ended = run_python("-c", program, timeout=120, SPMD_NUMBA="0")  # nothing is compiled
    assert ended.stdout in ("141 ''\n", "0 ''\n" if "--help" in args else ""), str(ended)


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_commands_print_in_ascii(args, program):
    ended = run_python(*program, *args, timeout=120, **ASCII)
    assert ended.returncode == 0, str(ended)
    assert ended.stderr == ""
    assert ended.stdout.isascii()
    if args[0] == "adjoint" and len(args) == 5:
        assert " V -> I " in ended.stdout


def test_meshes_and_layouts_print_in_ascii():
    program = """
import numpy as np, spmd
from spmd import P
mesh = spmd.Mesh(x=2, y=2)
layout = mesh.layout((5, 8), P("x", "y"))
x = spmd.put(np.ones((5, 8)), P("x", "y"), mesh)
for thing in (mesh, layout, x, spmd.map(lambda x: x, P("x"), P("x"), mesh=mesh), P("x"), layout.picture("w")):
    print(thing, repr(thing))
"""
    ended = run_python("-c", program, **ASCII)
    assert ended.returncode == 0, str(ended)
    assert "+----------+" in ended.stdout
    assert "\u250c" in run_python("-c", program, PYTHONIOENCODING="utf-8").stdout
