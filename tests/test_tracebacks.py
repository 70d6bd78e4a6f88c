"""What is printed above the message of an error: the user's frames, and not those of the library."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import launch, mpiexec, run_python

import spmd
from spmd import tracebacks

ROOT = Path(__file__).resolve().parent.parent
MOST = 12
HEAD = """
import numpy as np
import spmd
from spmd import P


def helper(x):
    {site}


def body(x):
    return helper(x)


def step():
    {call}


if __name__ == "__main__":
    with spmd.{mesh}:
        step()
"""

# What goes wrong in a body, and the last line of the user's that is to be seen.
SITES = {
    "raised by the user": "raise KeyError('mine')",
    "a state": "return spmd.psum(spmd.psum(x, 'x'), 'x')",
    "an axis": "return spmd.psum(x, 'nowhere')",
    "numpy's shapes": "return np.concatenate([x, np.ones((2, 2))])",
    "an immutable array": "x[0] = 1.0",
    "a conversion": "return float(x[0])",
    "a layout": "return spmd.halo_exchange(x, P('x'), 1, 'wrap')",
    "a function": "return spmd.functions.softmax_cross_entropy(x, 3, reduction='batchmean')",
    "a keyword": "return spmd.psum(x, 'x', axis_index_groups=None)",
    "random": "return x * spmd.random.normal(3.0, (2,))",
    "a mismatch": "return spmd.psum(x, 'x') if spmd.worker_index('x') else spmd.pmax(x, 'x')",
    "solve": "return np.linalg.inv(np.outer(x * 0.0, x))",
    "a tree": "return spmd.tree.map(lambda a: a @ np.ones(7), [x])[0]",
}
CALLS = {
    "map": "spmd.map(body, P('x'), P('x'))(np.arange(4.0))",
    "grad of map": "spmd.grad(spmd.map(lambda x: body(x), P('x'), P()))(np.arange(4.0))",
    "vjp of map": "spmd.vjp(spmd.map(body, P('x'), P('x')), np.arange(4.0))",
    "jit": "spmd.jit(spmd.map(body, P('x'), P('x')))(spmd.put(np.arange(4.0), P('x')))",
    "grad in body": (
        "spmd.map(lambda x: spmd.grad(lambda y: spmd.sum(body(y), 'x'))(x), P('x'), P('x'))(np.arange(4.0))"
    ),
    "nested grad": (
        "spmd.map(lambda x: spmd.grad(lambda y: spmd.grad(lambda z: spmd.sum(body(z), 'x'))(y).sum())(x), "
        "P('x'), P('x'))(np.arange(4.0))"
    ),
    "checkpoint": "spmd.grad(spmd.map(spmd.checkpoint(body), P('x'), P()))(np.arange(4.0))",
    "jacobian": "spmd.map(lambda x: spmd.jacrev(body)(x), P('x'), P('x'))(np.arange(4.0))",
}
# What goes wrong outside of bodies.
OUTSIDE = {
    "no body": "spmd.psum(np.ones(3), 'x')",
    "no body, halo": "spmd.halo_exchange(np.ones(3), P('x'), 1)",
    "no body, mean": "spmd.mean(np.ones(3), 'x')",
    "no body, index": "spmd.axis_index('x')",
    "spec": "P(3)",
    "mesh": "spmd.Mesh(x=2, scheduler='thread')",
    "put": "spmd.put(np.ones(4), P('y'))",
    "operators": "spmd.put(np.ones(4), P('x')) + np.ones(3)",
    "functions": "np.sort(spmd.put(np.ones(4), P('x')), axis=3)",
    "attribute": "spmd.put(np.ones(4), P('x')).strides",
    "name": "spmd.vmap",
    "keyword": "spmd.solvers.lsqr(None, None, iter_lim=3)",
    "grad": "spmd.grad(lambda x: x)(3)",
    "no rule": "spmd.grad(lambda x: np.asarray(x).sum())(np.ones(3))",
    "check_adjoint": "spmd.check_adjoint(lambda x: x**2, (4,), in_specs=P('x'), out_specs=P('x'))",
    "solver": "spmd.solvers.cg(3, np.ones(3))",
    "optimizer": "spmd.optim.adam('a')",
    "at": "spmd.at(np.ones(3))[5].set(3.0)",
    "tree": "spmd.tree.map(lambda x, y: x, [1, 2], {1: 2})",
    "debug": "spmd.debug(nans=3)",
    "pullback": "spmd.vjp(lambda x: x, np.ones(3))[1](np.ones(4))",
    "layout": "spmd.Layout((3,), P('q'), {'x': 2})",
}
LOCKSTEP, THREADS = "Mesh(x=2, scheduler='lockstep')", "Mesh(x=2, scheduler='threads')"


def written(tmp_path: Path, **parts: str) -> Path:
    program = tmp_path / "program.py"
    program.write_text(HEAD.format(**{"site": "return x", "call": "pass", "mesh": LOCKSTEP} | parts))
    return program


def above(printed: str) -> tuple[list[str], list[str]]:
    """The lines above the message of the last error, and the files of its frames."""
    lines = printed[printed.rindex("Traceback (most recent call last)") :].splitlines()
    end = next(k for k, line in enumerate(lines) if k and not line.startswith(" "))
    return lines[:end], re.findall(r'File "([^"]+)"', "\n".join(lines[:end]))


def check(printed: str, program: Path, *lines: str, library: int = 0) -> None:
    """library: how many of its frames there may be."""
    shown, files = above(printed)
    assert sum(file != str(program) for file in files) <= library, printed
    # Each of the user's frames takes up to three lines; a sampled program has more of them than `MOST` allows for.
    assert len(shown) <= max(MOST, 1 + 3 * sum(file == str(program) for file in files)), printed
    for line in lines:
        assert line in "\n".join(shown), printed


def sampled(sites, contexts, every):
    """Each site in some contexts, each context with some sites: a Latin pattern."""
    return [(s, c) for i, s in enumerate(sites) for j, c in enumerate(contexts) if (i + j) % every == 0]


@pytest.mark.parametrize(("site", "call"), sampled(SITES, CALLS, 9))
@pytest.mark.parametrize("mesh", [LOCKSTEP, THREADS], ids=["lockstep", "threads"])
def test_users_frames_of_the_body_and_of_the_call(tmp_path, site, call, mesh):
    program = written(tmp_path, site=SITES[site], call=CALLS[call], mesh=mesh)
    ended = run_python(program)
    assert ended.returncode == 1, ended
    check(ended.stderr, program, SITES[site], CALLS[call][:60], "step()")


@pytest.mark.parametrize("site", OUTSIDE)
def test_users_frames_of_calls_from_outside(tmp_path, site):
    program = written(tmp_path, call=OUTSIDE[site])
    ended = run_python(program)
    assert ended.returncode == 1, ended
    check(ended.stderr, program, OUTSIDE[site], "step()", library=2 * ("no body" in site))
    assert len(above(ended.stderr)[0]) <= MOST


def test_all_frames_are_there_when_asked_for(tmp_path):
    program = written(tmp_path, site="raise KeyError(3)", call=CALLS["grad of map"])
    ended = run_python(program, SPMD_TRACEBACK="full")
    files = above(ended.stderr)[1]
    assert any("mapping.py" in file for file in files), ended
    assert len(files) > 10


def test_chained_errors_are_shortened_and_those_of_the_library_not_shown(tmp_path):
    site = "\n    ".join(
        ["try:", "    {}[1]", "except KeyError as error:", "    raise ValueError(spmd.tree.map(str, 3)) from error"]
    )
    program = written(tmp_path, site=site, call=CALLS["grad of map"])
    printed = run_python(program).stderr
    assert printed.count("Traceback") == 2, printed
    assert "the direct cause" in printed
    assert {*re.findall(r'File "([^"]+)"', printed)} == {str(program)}
    # np.linalg raises and handles an error of its own on the way.
    program = written(tmp_path, call="spmd.map(lambda x: np.linalg.inv(x), P('x'), P('x'))(np.ones(4))")
    printed = run_python(program).stderr
    assert printed.count("Traceback") == 1, printed


def test_frames_of_a_deep_recursion_are_the_users(tmp_path):
    program = written(tmp_path, site="return helper(x)", call=CALLS["map"])
    printed = run_python(program).stderr
    assert "RecursionError" in printed
    assert {*re.findall(r'File "([^"]+)"', printed)} == {str(program)}


def test_a_callback_of_the_users_below_several_functions_keeps_every_frame_in_order():
    def inner(x):
        raise KeyError("mine")

    def outer(x):
        return spmd.grad(inner)(x)

    with pytest.raises(KeyError) as caught:
        spmd.grad(outer)(1.0)
    names = [entry.frame.code.name for entry in caught.traceback]
    assert names[1:] == ["outer", "inner"]


def test_shortening_keeps_groups_and_cycles():
    one, two = ValueError("one"), ValueError("two")
    one.__context__, two.__context__ = two, one
    with pytest.raises(ExceptionGroup) as caught:
        raise ExceptionGroup("several", [one, two])
    tracebacks.shorten(caught.value)
    assert caught.value.__traceback__ is not None
    assert caught.value.__traceback__.tb_frame is sys._getframe()


@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
@pytest.mark.parametrize("site", ["raised by the user", "a mismatch", "a state"])
@pytest.mark.parametrize("call", ["map", "grad of map"])
def test_users_frames_under_mpi(tmp_path, site, call):
    program = written(tmp_path, site=SITES[site], call=CALLS[call], mesh="Mesh(x=2)")
    ended = launch(program, n=2)
    assert ended.returncode, ended
    check(ended.stderr, program, SITES[site], CALLS[call][:60])


TORCH = {
    "raised by the user": "raise KeyError('mine')",
    "an axis": "return spt.psum(x, 'nowhere')",
    "torch's shapes": "return torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(7, 3))(x)",
    "a mismatch": "return spt.psum(x, 'x') if spmd.worker_index('x') else spt.pmax(x, 'x')",
    "backward in the body": "x.sum().backward()",
}


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")
@pytest.mark.parametrize("site", TORCH)
def test_users_frames_of_torch_bodies(tmp_path, site):
    call = "import torch; globals().update(torch=torch, spt=__import__('spmd.bridge.torch').bridge.torch); "
    call += "spt.map(body, P('x'), P('x'))(torch.ones(4))"
    program = written(tmp_path, site=TORCH[site], call=call, mesh="Mesh(x=2)")
    ended = run_python(program, timeout=120)
    assert ended.returncode == 1, ended
    check(ended.stderr, program, TORCH[site], "step()")


@pytest.mark.torch
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no torch")
def test_backward_of_torch_names_the_line_of_the_forward_call(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, spmd\n"
        "from spmd import P\n"
        "from spmd.bridge import torch as spt\n"
        "def body(x):\n"
        "    a = spt.all_gather(x * x, 'x')\n"
        "    b = spt.shift(x * 2, 'x')\n"
        "    return (a.sum() if spmd.worker_index('x') else b.sum())[None]\n"
        "x = torch.ones(4, requires_grad=True)\n"
        "with spmd.Mesh(x=2):\n"
        "    spt.map(body, P('x'), P('x'))(x).sum().backward()\n"
    )
    ended = run_python(program, timeout=120)
    assert f"{program}:5 in body" in ended.stderr, ended
    assert f"{program}:6 in body" in ended.stderr, ended
    assert "threading.py" not in ended.stderr
    check(ended.stderr, program, ".backward()", library=2)  # torch's own two, above the map


def test_pytest_shows_the_users_frames(tmp_path):
    program = tmp_path / "test_program.py"
    program.write_text(
        HEAD.format(site="raise KeyError('mine')", call=CALLS["grad of map"], mesh=LOCKSTEP)
        + "\n\ndef test_of_the_user():\n    with spmd.Mesh(x=2):\n        step()\n"
        + "\n\ndef test_outside():\n    with spmd.Mesh(x=2):\n        spmd.psum(np.ones(3), 'x')\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, program]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout
    assert "2 failed" in printed, printed
    assert not re.search(r"^\S*spmd/\S+\.py:\d+", printed, re.MULTILINE), printed
    assert printed.count("test_program.py:") >= 5  # the test, step, the call, body and helper


@pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="no IPython")
def test_ipython_shows_the_users_frames(tmp_path):
    program = written(tmp_path, site="raise KeyError('mine')", call=CALLS["grad of map"])
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "--no-banner", program]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120).stdout
    assert "KeyError" in printed
    assert "mapping.py" not in printed, printed
