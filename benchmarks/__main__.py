"""python -m benchmarks [sections]: ours, the peers that are installed and the limit of the machine, in one run."""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from benchmarks import contest, report

OUTPUT = Path(__file__).parent / "output"
"""Where results are written by default; git ignores it."""
SECTIONS = {
    "local": ("benchmarks.collectives", "LOCAL"),
    "mpi": ("benchmarks.collectives", "MPI"),
    "w1": ("benchmarks.layers", "W1"),
    "w2": ("benchmarks.layers", "W2"),
    "w3": ("benchmarks.fields", "W3"),
    "w4": ("benchmarks.fields", "W4"),
    "w5": ("benchmarks.transposes", "W5"),
    "w6": ("benchmarks.transposes", "W6"),
    "fft": ("benchmarks.spectra", "FFT"),
    "w7": ("benchmarks.overhead", "W7"),
    "costs": ("benchmarks.overhead", "COSTS"),
    "loops": ("benchmarks.loops", "LOOPS"),
    "memory": ("benchmarks.overhead", "MEMORY"),
    "growth": ("benchmarks.growth", "GROWTH"),
    "updates": ("benchmarks.updates", "UPDATES"),
    "functions": ("benchmarks.functions", "FUNCTIONS"),
    "bridge": ("benchmarks.bridge", "BRIDGE"),
    "plans": ("benchmarks.plans", "PLANS"),
    "sharding": ("benchmarks.sharding", "SHARDING"),
    "pipelines": ("benchmarks.pipelines", "PIPELINES"),
    "saving": ("benchmarks.saving", "SAVING"),
    "checks": ("benchmarks.checks", "CHECKS"),
    "profiles": ("benchmarks.profiles", "PROFILES"),
}


def folder(path: str) -> Path:
    """A folder that files can be written to; checked first, because a run may take an hour."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"nothing can be written there ({error})") from error
    return Path(path)


def main() -> int:
    if sys.argv[1:2] == ["--contend"]:
        contest.main(sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"of {', '.join(SECTIONS)}; all without any")
    parser.add_argument("--quick", action="store_true", help="few rounds and small sizes")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names hold this")
    parser.add_argument(
        "--output",
        type=folder,
        default=str(OUTPUT),
        metavar="FOLDER",
        help="write results.md, results.json and, with matplotlib, a picture of each section there, in place of those "
        "of the run before (default: benchmarks/output)",
    )
    args = parser.parse_args()
    unknown = [s for s in args.sections if s not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    tables: list[contest.Table] = []
    for name in args.sections or SECTIONS:
        tables.append(
            contest.compete(*SECTIONS[name], args.quick, args.only, lambda line: print(line, file=sys.stderr))
        )
        print(report.text(tables[-1], tables), end="\n\n", flush=True)
        # After each section: who interrupts a long run keeps what there is.
        (args.output / "results.md").write_text(report.markdown(tables))
        (args.output / "results.json").write_text(report.as_json(tables))
        if find_spec("matplotlib"):
            report.picture(tables[-1], args.output / f"{name}.png")
    if any(table.offered for table in tables) and not any(table.rows for table in tables):
        there = "\n".join(f"  {t.section.name}: {', '.join(t.offered) or 'none'}" for t in tables)
        parser.error(f"--only {args.only!r} is in the name of no case; there are\n{there}")
    if aims := report.aims(tables):
        print(aims, flush=True)
    return 1 if any(t.parted for t in tables) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted: the sections above are complete")
