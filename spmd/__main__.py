"""`python -m spmd info` and `python -m spmd adjoint`."""

from __future__ import annotations

import argparse
import json
import sys

import numpy as np

import spmd
from spmd.errors import MeshError, TransportError
from spmd.info import info
from spmd.mesh import Mesh, is_main
from spmd.testing import AdjointReport, check_adjoint, operator_cases, operator_classes, states


def parse_mesh(text: str) -> Mesh:
    """`x=3,y=2` as a mesh."""
    try:
        names, sizes = zip(*(part.split("=") for part in text.split(",")), strict=True)
        mesh = spmd.make_mesh([int(n) for n in sizes], [name.strip() for name in names])
        assert mesh.transport
        return mesh
    except (ValueError, RuntimeError) as error:
        reason = f"\n{error}" if isinstance(error, MeshError | TransportError) else ""
        raise SystemExit(f"--mesh: got {text!r}, needed axis sizes by name, as in x=3,y=2{reason}") from error


def adjoint(args: argparse.Namespace) -> int:
    """The dot test of every operator, a row each; the exit status says the verdict."""
    mesh = parse_mesh(args.mesh)
    rows = []
    for kind in operator_classes():
        cases = operator_cases(kind, mesh)
        reports: list[AdjointReport] = []
        for case in cases:
            given = {"mesh": mesh, "in_specs": case.spec, "dtype": args.dtype, "trials": args.trials, "seed": args.seed}
            reports.append(check_adjoint(case.operator, case.shape, raises=False, **given))
        failed = [r for r in reports if not r.passed]
        rows.append(
            {
                "operator": kind.__name__,
                "function": f"spmd.{kind.function}",
                "states": states(kind),
                "adjoint": type(cases[0].operator.H).__name__,
                "cases": len(cases) * args.trials,
                "passed": not failed,
                "failures": [str(r) for r in failed],
            }
        )
    if is_main():
        print(json.dumps(rows, indent=2) if args.json else table(mesh, rows))
    return int(not all(row["passed"] for row in rows))


def table(mesh: Mesh, rows: list[dict]) -> str:
    """The rows as text."""
    lines = [f"dot tests on {mesh}, transport {mesh.transport.name}: integers, exact equality", ""]
    form = "{:14} {:19} {:11} {:14} {:>6}  {}"
    lines.append(form.format("operator", "function", "states", "adjoint", "cases", "verdict"))
    for r in rows:
        verdict = "exact" if r["passed"] else "NOT ADJOINT"
        lines.append(form.format(r["operator"], r["function"], r["states"], r["adjoint"], r["cases"], verdict))
    for r in rows:
        lines += ["", *r["failures"]] if r["failures"] else []
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m spmd", description="Functional SPMD arrays.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what was found and chosen: transports, schedulers, libraries")
    dot = commands.add_parser("adjoint", help="test every operator against its adjoint; works under mpiexec")
    dot.add_argument("--mesh", default="x=4", help="axis sizes by name, as in x=3,y=2 (default: x=4)")
    dot.add_argument("--dtype", default="float64", type=np.dtype, help="dtype of the blocks (default: float64)")
    dot.add_argument("--trials", default=3, type=int, help="draws per case (default: 3)")
    dot.add_argument("--seed", default=0, type=int)
    dot.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    if args.command == "info":
        if is_main():
            print(info())
        return 0
    return adjoint(args)


if __name__ == "__main__":
    sys.exit(main())
