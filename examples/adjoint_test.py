"""Test the adjoint of a distributed operator of your own, and find the bug in it.

The operator is an upwind difference along a line that is split over workers, y_k = x_k - x_(k-1): each worker needs
the last entry of its left neighbour. Its adjoint is g_k - g_(k+1). The first version forgets to send an entry back to
the neighbour, which no test on one worker shows. The dot test finds the error on the smallest possible mesh, and names
the wrong entries. The second version is correct, and so is the adjoint of the tape.

    python examples/adjoint_test.py                  virtual workers
    mpiexec -n 3 python examples/adjoint_test.py     processes
    python examples/adjoint_test.py --picture a.png  draws the matrices of the operator and of both adjoints
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import spmd
from spmd import P
from spmd.testing import check_adjoint, table


def difference(x):
    """y_k = x_k - x_(k-1), with zero before the first."""
    before = spmd.shift(x[-1:], "line", 1, wrap=False)  # the last entry of the left neighbour
    return x - np.concatenate([before, x[:-1]])


def forgetful(g):
    """The adjoint without the entry for the left neighbour."""
    return (g - np.concatenate([g[1:], np.zeros_like(g[:1])]),)


def mended(g):
    """The adjoint: the first entry is sent to the left neighbour."""
    after = spmd.shift(g[:1], "line", -1, wrap=False)
    return (g - np.concatenate([g[1:], after]),)


def matrix(f, mesh, n=11):
    """The matrix of a linear body: the whole program applied to each unit vector."""
    whole = spmd.map(f, P("line"), P("line"), mesh=mesh)
    return np.stack([whole(unit).numpy() for unit in np.eye(n)], axis=1)


def draw(path, mesh):
    """The transpose of the operator's matrix beside the matrices of both adjoints; entries that differ are framed."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    wanted = matrix(difference, mesh).T
    adjoints = {
        "transpose of the operator": wanted,
        "adjoint, first version": matrix(lambda g: forgetful(g)[0], mesh),
        "adjoint, mended": matrix(lambda g: mended(g)[0], mesh),
    }
    figure = Figure(figsize=(11, 4), layout="constrained")
    for ax, (title, entries) in zip(figure.subplots(1, 3), adjoints.items(), strict=True):
        spmd.plot.field(spmd.put(entries, P("line"), mesh), cmap="RdBu", title=title, ax=ax)
        ax.images[0].set_clim(-1.5, 1.5)
        for row, column in np.argwhere(entries != wanted):
            ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, color="#D55E00", linewidth=3, zorder=9))
    if spmd.is_main():
        figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", metavar="FILE", help="draw the matrices of the operator and of both adjoints")
    args = parser.parse_args()
    mesh = spmd.Mesh(line=3)
    given = {"mesh": mesh, "in_specs": P("line"), "exact": True, "raises": False}
    reports = {
        "the adjoint by hand, first version": check_adjoint(difference, (11,), adjoint=forgetful, **given),
        "the adjoint by hand, mended": check_adjoint(difference, (11,), adjoint=mended, **given),
        "the adjoint from the tape": check_adjoint(difference, (11,), **given),
    }
    if spmd.is_main():
        for name, report in reports.items():
            print(f"{name}:\n{report}\n")
        print(table(reports.values()))
    if args.picture:
        draw(args.picture, mesh)
    first, *others = reports.values()
    return int(first.passed or not all(report.passed for report in others))


if __name__ == "__main__":
    sys.exit(main())
