"""Rows of a table by index. table: (rows, ...). ids: integers of any shape, from -1 to rows - 1; -1 is no row."""

from __future__ import annotations

import numpy as np


def take_rows(table, ids):
    """The rows of ids, of shape ids.shape + table.shape[1:]; zeros where there is none. Adjoint: add_rows."""
    padded = np.concatenate([table, np.zeros_like(table, shape=(1, *table.shape[1:]))])
    return padded[ids]


def add_rows(ids, g, rows):
    """A table of so many rows, each the sum of the entries of g, (*ids.shape, ...), with its id. Adjoint: take_rows."""
    table = np.zeros_like(g, shape=(rows + 1, *g.shape[np.ndim(ids) :]))
    np.add.at(table, ids, g)
    return table[:rows]
