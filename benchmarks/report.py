"""The results of a run of the benchmarks as text, Markdown, JSON and pictures."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from statistics import median
from subprocess import run
from typing import Any

from benchmarks.contest import Table
from benchmarks.targets import TARGETS, found

__all__ = ["aims", "as_json", "markdown", "picture", "text"]

BUSY = 0.1
"""The share of two cores that other work may take before a table says so."""
SLOW = 1.25
"""How often a piece of Python may take its shortest time before a table says so: see `contest.pace`."""
MOST = 24
"""The cases that a section may have to be published as a whole: see `_published`."""


def seconds(s: float) -> str:
    """A time in the unit that suits it."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if abs(s) * factor < 1000:
            return f"{s * factor:.{0 if abs(s) * factor >= 100 else 1 if abs(s) * factor >= 10 else 2}f} {unit}"
    return f"{s:.2f} s"


def _cells(table: Table) -> list[list[str]]:
    """A header and a row for each case: medians, and how often ours goes into that of each other."""
    ours = table.section.ours
    names = [n for n in table.section.contestants if any(n in row for row in table.rows.values())]
    rows = [["", *names]]
    for case, row in table.rows.items():
        cells = [case]
        for n in names:
            if n not in row:
                cells.append("")
            elif n == ours or ours not in row:
                cells.append(seconds(row[n].median))
            else:
                cells.append(f"{seconds(row[n].median)} ({row[n].median / row[ours].median:.2f}×)")
        rows.append(cells)
        if any(m.peak is not None for m in row.values()):
            peaks = [f"{row[n].peak / 2**20:.0f} MiB" if n in row and row[n].peak is not None else "" for n in names]
            rows.append(["  peak memory", *peaks])
    return rows


def _remarks(table: Table, among: Sequence[Table], brief: bool = False) -> list[str]:
    """Who is absent or computed other numbers, and the cases in which the machine was busy or slow; brief: how many."""
    said = [f"{name} is absent: {why}" for name, why in table.absent.items()]
    said += [f"NOT THE SAME NUMBERS: {who}" for who in table.parted]
    busy = {case: median(shares) for case, shares in table.stolen.items() if shares and median(shares) > BUSY}
    fastest = min((p for t in (table, *among) for p in chain.from_iterable(t.paces.values())), default=0.0)
    slow = {case: median(p) / fastest for case, p in table.paces.items() if median(p) > SLOW * fastest}
    count = f"of {len(table.rows)} cases"
    if busy and brief:
        most = f"{max(busy.values()):.0%} of two cores"
        said.append(f"the machine was busy in {len(busy)} {count}: other work took up to {most}")
    elif busy:
        each = "the machine was busy: other work took {:.0%} of two cores in {}"
        said += [each.format(share, case) for case, share in busy.items()]
    if slow and brief:
        most = f"{max(slow.values()):.2f} times its shortest time"
        said.append(f"the cores were slow in {len(slow)} {count}: Python took up to {most}")
    elif slow:
        cases = ", ".join(f"{pace:.2f} in {case}" for case, pace in slow.items())
        said.append(f"the cores were slow; how often Python took its shortest time: {cases}")
    return said


def text(table: Table, among: Sequence[Table] = ()) -> str:
    """among: tables of the same run. Cores are slow or not by the shortest time that Python took in any of them."""
    rows = _cells(table)
    widths = [max(len(r[k]) for r in rows) for k in range(len(rows[0]))]
    lines = [f"{table.section.name}: {table.section.title}"]
    for row in rows:
        first, *rest = (c.ljust(w) if k == 0 else c.rjust(w) for k, (c, w) in enumerate(zip(row, widths, strict=True)))
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join([*lines, *(f"  {r}" for r in _remarks(table, among))])


def _aims(tables: Sequence[Table]) -> list[list[str]]:
    """A row for each target of the cases that were measured, with the columns of `_AIMS`."""
    rows = []
    for f in found(tables):
        t = f.target
        who = f"{t.section}: {t.case}" + (f" ({f.ours})" if f.ours != "spmd" else "")
        absent = ", ".join(f.absent)
        if f.value is None:
            rows.append([who, absent, "not measured", "", "", "", ""])
            continue
        if t.of == "ratio":
            got, need = f"{f.value:.2f}×", f"{t.need:.3g}×"
            limit = "" if f.limit is None else f"{f.limit:.2f}×"
        elif t.of == "memory":
            got, need, limit = f"{f.value:.2f} of its peak memory", "1", ""
        else:
            got, need = seconds(f.value) + " more" * (t.of == "more"), seconds(t.need)
            limit = "" if f.limit is None else seconds(f.limit) + " more" * (t.of == "more")
        verdict = "met" if f.met else "out of reach" if f.out_of_reach else "MISSED"
        told = "" if f.told is None else f"{f.told:.2f}×"
        rows.append([who, f.peer + (f", without {absent}" if absent else ""), got, need, limit, told, verdict])
    return rows


_AIMS = "target", "against", "measured", "required", "limit", "with large pages", "verdict"


def aims(tables: Sequence[Table]) -> str:
    """The targets of the cases that were measured, as text; empty where these have no target."""
    rows = _aims(tables)
    if not rows:
        return ""
    rows = [[*_AIMS], *rows]
    widths = [max(len(r[k]) for r in rows) for k in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_line(header), "|" + "---|" * len(header), *map(_line, rows)]


def _published(table: Table) -> Table:
    """The table with fewer cases: of a section with more than `MOST`, only those that a target names."""
    if len(table.rows) <= MOST:
        return table
    named = {t.case for t in TARGETS if t.section == table.section.name}
    rows, stolen, paces = ({c: v for c, v in d.items() if c in named} for d in (table.rows, table.stolen, table.paces))
    return replace(table, rows=rows, stolen=stolen, paces=paces)


def markdown(tables: Sequence[Table]) -> str:
    """The file of one machine: what it is, which targets are not met, and a table for each section."""
    machine = _machine()
    packages = ", ".join(f"{name} {number}" for name, number in machine["packages"].items())
    lines = [
        f"# Benchmarks: {machine['processor']}, {machine['cores']} cores",
        "",
        f"- Python {machine['python']}, {packages}; {machine['system']}.",
        f"- Commit of spmd: {machine['commit']}.",
        "- A cell is the median time of a case. In parentheses: that time over ours; above 1, ours is faster.",
    ]
    if rows := _aims(tables):
        missed = [r for r in rows if r[-1] != "met"]
        lines += ["", "## Targets", "", f"{len(rows) - len(missed)} of {len(rows)} are met."]
        lines += ["", *_grid(_AIMS, missed)] if missed else []
    for table in map(_published, tables):
        header, *rows = _cells(table)
        lines += ["", f"## {table.section.name}: {table.section.title}", "", *_grid(header, rows)]
        if remarks := _remarks(table, tables, brief=True):
            lines += ["", *(f"- {r}" for r in remarks)]
    return "\n".join(lines) + "\n"


def _short(x: float) -> float:
    return float(f"{x:.4g}")


def as_json(tables: Sequence[Table]) -> str:
    def one(table: Table) -> dict[str, Any]:
        return {
            "title": table.section.title,
            "cases": {
                c: {
                    n: {"seconds": [*map(_short, m.seconds)], "peak": m.peak, "median": _short(m.median)}
                    for n, m in row.items()
                }
                for c, row in table.rows.items()
            },
            "stolen": {case: [*map(_short, shares)] for case, shares in table.stolen.items()},
            "paces": {case: [*map(_short, paces)] for case, paces in table.paces.items()},
            "absent": table.absent,
            "parted": table.parted,
        }

    sections = {t.section.name: one(t) for t in tables}
    return json.dumps({"machine": _machine(), "sections": sections}, indent=1) + "\n"


def _machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": _commit(),
    }


_PACKAGES = "numpy", "numba", "jax", "jaxlib", "torch", "mpi4py", "mpich", "mpi4py-fft", "pylops-mpi", "autograd"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """The commit that was measured, with a "+" where files had been changed since; nothing outside of a repository."""
    with suppress(OSError):
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
        return run(git, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")


def picture(table: Table, path: Path) -> None:
    """The others' times over ours, a dot for each case, on one axis; of our other ways a ring. Nothing is drawn where
    there are no others."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ours = table.section.ours
    others = [n for n in table.section.contestants if n != ours]
    rows = {c: row for c, row in table.rows.items() if ours in row and any(n in row for n in others)}
    names = [n for n in others if any(n in row for row in rows.values())]
    if not rows:
        return
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.2 * len(rows)), layout="constrained")
    axes.axvline(1, color="0.2", linewidth=1)
    for k, name in enumerate(names):
        points = [(row[name].median / row[ours].median, y) for y, row in enumerate(rows.values()) if name in row]
        color = plt.get_cmap("tab10")(k % 10)
        face = "none" if name.startswith("spmd") else color
        axes.scatter(*zip(*points, strict=True), s=26, edgecolors=color, facecolors=face, label=name, zorder=3)
    axes.set_xscale("log")
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(axis="x", which="both", color="0.9")
    axes.set_title(f"{table.section.name}: {table.section.title}", fontsize=9, loc="left")
    axes.set_xlabel("the time of another over ours; right of the line we are faster", fontsize=8)
    figure.legend(fontsize=8, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=110)
    plt.close(figure)
