"""`python -m spmd info`, `doctor`, `adjoint`, `cost`, `checkpoint` and `bench kernels`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

import spmd
from spmd import doctor
from spmd.axes import is_main
from spmd.errors import CheckpointError, CorruptCheckpointError, MeshError, TransportError, nearest, prints
from spmd.info import information
from spmd.mesh import Mesh
from spmd.representations.tables import Report, Table
from spmd.representations.terminal import say, show
from spmd.testing import AdjointReport, check_adjoint, operator_cases, operator_classes, states
from spmd.transport.algorithms.table import FUNCTIONS, rows


def parse_mesh(text: str) -> Mesh:
    """`x=3,y=2` as a mesh."""
    try:
        names, sizes = zip(*(part.split("=") for part in text.split(",")), strict=True)
        mesh = spmd.make_mesh([int(n) for n in sizes], [name.strip() for name in names])
        if not all(name.isidentifier() for name in mesh.axes):
            raise ValueError("axes are named as Python's variables are")
        assert mesh.transport
        return mesh
    except (ValueError, RuntimeError) as error:
        reason = f"\n{error}" if isinstance(error, MeshError | TransportError) else ""
        raise argparse.ArgumentTypeError(f"got {text!r}, needed axis sizes by name, as in x=3,y=2{reason}") from error


def parse_dtype(text: str) -> np.dtype:
    """A dtype that has adjoints."""
    try:
        dtype = np.dtype(text)
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "fc":
        raise argparse.ArgumentTypeError(f"got {text!r}, needed a floating or complex dtype, as float32")
    return dtype


def parse_count(minimum: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if value < minimum:
            raise argparse.ArgumentTypeError(f"got {text!r}, needed an int of at least {minimum}")
        return value

    return parse


def parse_bytes(text: str) -> int:
    """`4e6` or `4000000`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (0 <= value < 1 << 62 and value == int(value)):
        raise argparse.ArgumentTypeError(f"got {text!r}, needed a whole number of bytes, as 4e6")
    return int(value)


def parse_function(text: str) -> str:
    """A function that the workers call together, as `psum` or `spmd.psum`."""
    name = text.removeprefix("spmd.")
    if name not in FUNCTIONS:
        close = nearest(name, FUNCTIONS, 1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise argparse.ArgumentTypeError(f"got {text!r}, needed one of {', '.join(FUNCTIONS)}{hint}")
    return name


def cost_table(args: argparse.Namespace) -> int:
    """What each algorithm of a function's collective costs."""
    if args.hosts > args.n:
        print(f"spmd cost: argument --hosts: got {args.hosts}, needed at most --n, {args.n}", file=sys.stderr)
        return 2
    found = rows(args.function, args.n, args.bytes, args.hosts)
    if args.json:
        say(json.dumps([row._asdict() for row in found], indent=2))
        return 0
    where = f"{args.n} workers on {args.hosts} host{'s' * (args.hosts > 1)}"
    lines = [f"spmd.{args.function} of {args.bytes} bytes, {where}: {FUNCTIONS[args.function]}"]
    lines += ["messages, bytes and rounds: of the worker that has most; path: messages that wait for each other", ""]
    form = "{:2}{:44}{:>10}{:>16}{:>8}{:>8}"
    lines.append(form.format("", "algorithm", "messages", "bytes", "rounds", "path"))
    lines += [form.format("*" * r.chosen, r.algorithm, r.messages, r.nbytes, r.rounds, r.path) for r in found]
    say("\n".join([*lines, "", "* is what transports use"]))
    return 0


def adjoint(args: argparse.Namespace) -> int:
    """The dot test of every operator, one row each. The exit status is 1 if one fails."""
    mesh = args.mesh
    rows = []
    for kind in operator_classes():
        cases = operator_cases(kind, mesh)
        options = {"mesh": mesh, "dtype": args.dtype, "trials": args.trials, "seed": args.seed, "raises": False}
        reports = [check_adjoint(case.operator, case.shape, in_specs=case.spec, **options) for case in cases]
        costs = [f"{r.of}: sends {_cost(r)}, declares {_cost(r, declared=True)}" for r in reports if not fits(r)]
        failures = [str(r) for r in reports if not r.passed]
        rows.append(
            {
                "operator": kind.__name__,
                "function": f"spmd.{kind.function}",
                "states": states(kind),
                "adjoint": type(cases[0].operator.H).__name__,
                "cases": len(cases) * args.trials,
                "exact": sum(r.passed and r.error == 0 for r in reports) * args.trials,
                "messages": sum(r.messages for r in reports),
                "bytes": sum(r.bytes for r in reports),
                "declared_messages": sum(r.declared[0] for r in reports if r.declared),
                "declared_bytes": sum(r.declared[1] for r in reports if r.declared),
                "passed": not failures and not costs,
                "failures": failures + costs,
                "reports": [r.to_dict() for r in reports if not r.passed],
            }
        )
    if is_main():
        if args.json:
            say(json.dumps(rows, indent=2))
        else:
            show(operator_report(mesh, rows))
    return int(not all(row["passed"] for row in rows))


def kernel_speeds(args: argparse.Namespace) -> int:
    """The speed of each kernel, and the limits of the machine."""
    from spmd.bench import bench_kernels, table

    try:
        report = bench_kernels(args.device, args.only, args.rounds)
    except TransportError as error:  # without a GPU there is nothing to measure
        print(error, file=sys.stderr)
        return 2
    say(json.dumps(report, indent=2) if args.json else table(report))
    return 0


def diagnosis(args: argparse.Namespace) -> int:
    """What works on this machine. The exit status is 1 if something that is installed does not."""
    if not is_main():
        return 0
    findings = doctor.examine()
    say(json.dumps([f._asdict() for f in findings], indent=2) if args.json else doctor.text_of(findings))
    return int(any(f.verdict == doctor.FAULT for f in findings))


def checkpoint(args: argparse.Namespace) -> int:
    """What a checkpoint holds. The exit status is 1 if something is damaged, and 2 if there is none."""
    from spmd.io.inspection import report

    if not is_main():
        return 0
    try:
        content, text, is_whole = report(args.path, args.verify)
    except (CheckpointError, OSError) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, CorruptCheckpointError) else 2
    say(json.dumps(content, indent=2) if args.json else text)
    return int(not is_whole)


def fits(report: AdjointReport) -> bool:
    """Whether an operator sent the messages that it declares; True if the test failed before that."""
    return report.declared is None or report.declared == (report.messages, report.bytes)


def _cost(report: AdjointReport, declared: bool = False) -> str:
    messages, size = report.declared or (0, 0) if declared else (report.messages, report.bytes)
    return f"{messages} messages of {size} bytes"


def operator_report(mesh: Mesh, rows: list[dict]) -> Report:
    """The rows of operators as a table, and what failed below it."""
    heading = (
        f"dot tests on {mesh}, transport {mesh.transport.name}: integers, exact equality\n"
        "messages and bytes: what all workers send, in one application of each case, against what is declared"
    )
    heads = ("operator", "function", "states", "adjoint", "cases", "exact", "messages", "bytes", "declared", "verdict")
    shown = []
    for r in rows:
        alike = (r["messages"], r["bytes"]) == (r["declared_messages"], r["declared_bytes"])
        cost = "as sent" if alike else f"{r['declared_messages']}, {r['declared_bytes']}"
        wrong = "COST DIFFERS" if r["exact"] == r["cases"] else "NOT ADJOINT"
        arrow = r["states"] if prints(r["states"]) else r["states"].replace("→", "->")
        figures = (r["cases"], r["exact"], r["messages"], r["bytes"], cost, "exact" if r["passed"] else wrong)
        shown.append((r["operator"], r["function"], arrow, r["adjoint"], *map(str, figures)))
    failures = ["\n".join(r["failures"]) for r in rows if r["failures"]]
    return Report(heading, [Table(shown, heads, right=range(4, 8)), *failures])


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    whole = argparse.ArgumentParser(prog="python -m spmd", description="Functional SPMD arrays.")
    commands = whole.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what was found and chosen: transports, schedulers, libraries")
    health = commands.add_parser("doctor", help="try MPI, torchrun, BLAS, shared memory and the GPU, and say each mend")
    health.add_argument("--json", action="store_true", help="print JSON")
    dot = commands.add_parser("adjoint", help="test every operator against its adjoint; works under mpiexec")
    dot.add_argument("--mesh", default="x=4", type=parse_mesh, help="axis sizes by name, as in x=3,y=2 (default: x=4)")
    dot.add_argument("--dtype", default="float64", type=parse_dtype, help="dtype of the blocks (default: float64)")
    dot.add_argument("--trials", default=3, type=parse_count(1), help="draws per case (default: 3)")
    dot.add_argument("--seed", default=0, type=parse_count(0), help="of the draws (default: 0)")
    dot.add_argument("--json", action="store_true", help="print JSON")
    bench = commands.add_parser("bench", help="what is achieved here, beside what the machine can do")
    bench.add_argument("what", choices=["kernels"], help="each kernel, beside a copy and a matrix product")
    bench.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where (default: cpu)")
    bench.add_argument("--only", default="", metavar="NAME", help="the kernels that have this in their name")
    bench.add_argument("--rounds", default=7, type=parse_count(1), help="medians of so many runs (default: 7)")
    bench.add_argument("--json", action="store_true", help="print JSON")
    costs = commands.add_parser("cost", help="messages and bytes of a collective, by each of its algorithms")
    costs.add_argument("function", type=parse_function, help="what the workers call, as psum")
    costs.add_argument("--n", default=4, type=parse_count(1), help="workers (default: 4)")
    about = "of a worker's block; of the root's, for broadcast, replicate and scatter (default: 8)"
    costs.add_argument("--bytes", default=8, type=parse_bytes, help=about)
    costs.add_argument("--hosts", default=1, type=parse_count(1), help="hosts that the workers are on (default: 1)")
    costs.add_argument("--json", action="store_true", help="print JSON")
    saved = commands.add_parser("checkpoint", help="what a checkpoint holds, and whether it is as it was written")
    saved.add_argument("path", type=Path, help="a folder of spmd.save or of a CheckpointManager, or safetensors files")
    saved.add_argument("--verify", action="store_true", help="read all and compare checksums; status 1 if damaged")
    saved.add_argument("--json", action="store_true", help="print JSON")
    return whole


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.command == "checkpoint":
        return checkpoint(args)
    if args.command == "cost":
        return cost_table(args)
    if args.command == "bench":
        return kernel_speeds(args)
    if args.command == "doctor":
        return diagnosis(args)
    if args.command == "info":
        if is_main():
            show(information())
        return 0
    return adjoint(args)


def run() -> int:
    """The command.

    If the reader of its output closes it early, as `head -1` does, the status is that of a program that SIGPIPE ends.
    """
    try:
        try:
            return main()
        finally:
            if sys.stdout is not None:  # also if it was closed before
                sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes it again at exit.
        return 128 + 13


if __name__ == "__main__":
    sys.exit(run())
