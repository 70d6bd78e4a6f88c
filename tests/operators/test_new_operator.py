"""One class and one row add an operator: all else is derived, as is tested here on one from a string."""

from __future__ import annotations

import json
import re

import pytest
from launch import run_python

OPERATOR = '''
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

import spmd
from spmd import P, testing
from spmd.operators import Operator
from spmd.transport.plan import Forward, Plan


@dataclass(frozen=True)
class Rotate(Operator):
    """V -> V: every worker gets the block of the one `by` places below."""

    by: int = 1
    function: ClassVar[str] = "rotate"

    def plan(self, group, shape, dtype):
        n, me = group.size, group.index
        parts = [... if k == (me + self.by) % n else None for k in range(n)]
        return Plan("exchange", group, shape, dtype, parts, Forward((me - self.by) % n), lambda shapes: self)

    @property
    def H(self):
        return Rotate(self.axes, -self.by)


testing._CASES[Rotate] = lambda a, n: [
    testing.Case(Rotate(a), (2 * n + 1, 2), P(a)),
    testing.Case(Rotate(a, 2), (1, 3), P(a)),
]
'''

DERIVED = """
rng = np.random.default_rng(0)
for scheduler in "lockstep", "threads":
    for n in 1, 2, 3, 5:
        mesh = spmd.Mesh(x=n, scheduler=scheduler)
        x, w = rng.standard_normal((2, n, 3))
        rotated = spmd.map(lambda x: Rotate(("x",))(x), P("x"), P("x"), mesh=mesh)
        recorded = spmd.jit(rotated)
        for _ in range(3):
            np.testing.assert_array_equal(rotated(x).numpy(), np.roll(x, 1, 0))
            np.testing.assert_array_equal(recorded(x).numpy(), np.roll(x, 1, 0))
        loss = spmd.map(lambda x, w: spmd.sum(Rotate(("x",))(x) ** 2 * w, "x"), (P("x"), P("x")), P(), mesh=mesh)
        np.testing.assert_allclose(spmd.grad(loss)(x, w), 2 * x * np.roll(w, -1, 0))
        for case in testing.operator_cases(Rotate, mesh):
            assert spmd.check_adjoint(case.operator, case.shape, mesh=mesh, in_specs=case.spec).passed
        both = (Rotate(("x",)) @ Rotate(("x",), 2)).H
        assert both == Rotate(("x",), -2) @ Rotate(("x",), -1)
        with spmd.ledger() as log:
            rotated(x)
        moved = [log.workers[k].messages for k in range(n)] if n > 1 else [0]
        assert moved == [int(n > 1)] * n, moved
print("derived")
"""

TORCH = """
import torch
import spmd.bridge.torch as spt

mesh = spmd.Mesh(x=3)
x = torch.arange(6.0, dtype=torch.float64).reshape(3, 2).requires_grad_()
weights = torch.arange(6.0, dtype=torch.float64).reshape(3, 2)

def body(x, w):
    return spt.psum((Rotate(("x",))(x) ** 2 * w).sum(), "x")

loss = spt.map(body, (P("x"), P("x")), P(), mesh=mesh)(x, weights)
(g,) = torch.autograd.grad(loss, x, create_graph=True)
torch.testing.assert_close(g, 2 * x * weights.roll(-1, 0))
torch.testing.assert_close(torch.autograd.grad(g.sum(), x)[0], 2 * weights.roll(-1, 0))
print("in torch")
"""


def run(tmp_path, *parts: str) -> str:
    program = tmp_path / "program.py"
    program.write_text("\n".join((OPERATOR, *parts)))
    ended = run_python(program)
    assert ended.returncode == 0, str(ended)
    return ended.stdout


def test_what_follows_from_an_operator(tmp_path):
    assert run(tmp_path, DERIVED) == "derived\n"


@pytest.mark.torch
def test_it_is_a_function_of_torch_too(tmp_path):
    assert run(tmp_path, TORCH) == "in torch\n"


def test_the_command_line_tests_it(tmp_path):
    command = """
from spmd import __main__ as command
every = command.operator_classes()
command.operator_classes = lambda: [kind for kind in every if kind.__name__ in ("Rotate", "Sum")]  # others take time
for more in ["--trials", "2", "--json"], ["--trials", "1"]:
    status = command.main(["adjoint", "--mesh", "x=3", *more])
    print("status", status)
"""
    out, shown, _ = run(tmp_path, command).split("status 0\n")
    (row,) = [row for row in json.loads(out) if row["operator"] == "Rotate"]
    assert row["passed"], row
    assert re.search(r"^Rotate +spmd.rotate .* exact$", shown, re.M), shown


def test_its_plan_prints(tmp_path):
    line = 'print(Rotate(("x",)).plan(spmd.Mesh(x=3).group(1, ("x",)), (4, 2), np.dtype(float)))\n'
    assert run(tmp_path, line).splitlines() == [
        "exchange along x: member 1 of 3",
        "  block  float64[4, 2]",
        "  sends  the block to member 2",
        "  makes  what comes from member 0",
        "  costs  1 message, 64 bytes",
    ]
