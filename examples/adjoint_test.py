"""Test the adjoint of a distributed operator of your own, and find the bug in it.

The operator is an upwind difference along a line that is split over workers, y_k = x_k - x_(k-1): each worker needs
the last entry of its left neighbour. Its adjoint, g_k - g_(k+1), was written by hand. The first version forgets to
send back what the neighbour lent; every worker alone looks right. The dot test finds it, on the smallest mesh that
shows it, and names the entries that are wrong. The second version is right, and so is the one that the tape derives.

    python examples/adjoint_test.py                  virtual workers
    mpiexec -n 3 python examples/adjoint_test.py     processes
"""

from __future__ import annotations

import numpy as np

import spmd
from spmd import P
from spmd.testing import check_adjoint, table


def difference(x):
    """y_k = x_k - x_(k-1), with zero before the first."""
    before = spmd.shift(x[-1:], "line", 1, wrap=False)  # the last entry of the left neighbour
    return x - np.concatenate([before, x[:-1]])


def forgetful(g):
    """The adjoint, but for what the left neighbour is owed."""
    return (g - np.concatenate([g[1:], np.zeros_like(g[:1])]),)


def mended(g):
    """The adjoint: the first entry goes back to the left neighbour."""
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
    raise SystemExit(main())
