"""Test the adjoint of a distributed operator of your own, and find the bug in it.

The operator is an upwind difference along a line that is split over workers, y_k = x_k - x_(k-1): each worker needs
the last entry of its left neighbour. Its adjoint is g_k - g_(k+1). The first version forgets to send an entry back to
the neighbour, which no test on one worker shows. The dot test finds the error on the smallest possible mesh, and names
the wrong entries. The second version is correct, and so is the adjoint of the tape.

    python examples/adjoint_test.py                  virtual workers
    mpiexec -n 3 python examples/adjoint_test.py     processes
"""

from __future__ import annotations

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


def main() -> int:
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
    first, *others = reports.values()
    return int(first.passed or not all(report.passed for report in others))


if __name__ == "__main__":
    sys.exit(main())
