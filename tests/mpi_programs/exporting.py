"""Two processes export arrays to a folder that is named on the command line, and find errors together."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np

import spmd
from spmd import P
from spmd.errors import CheckpointError
from spmd.io.files import PlacedWriter

folder = Path(sys.argv[1])
mesh = spmd.Mesh(x=2)
(own,) = mesh.local_workers
rng = np.random.default_rng(5)
w, v = rng.normal(size=(37, 50)), rng.normal(size=(50, 3)).astype(np.float32)
tree = {
    "w": spmd.put(w, P(None, "x"), mesh),
    "v": spmd.put(v, spmd.Layout((50, 3), P("x"), mesh.axes, [(48, 2), None]), mesh),
    "b": np.arange(5),
}

written = []
write = PlacedWriter.write
PlacedWriter.write = lambda self, at, data: (written.append(len(data)), write(self, at, data))
spmd.io.export(folder / "one", tree)
own_bytes = 37 * 25 * 8 + (48 * 3 * 4, 2 * 3 * 4)[own]
# The bare array goes to the process that has less to write; the header, of some 300 bytes, to the first.
bare = 5 * 8
header = written[0] if own == 0 else 0
assert sum(written) - header - own_bytes == (bare if own else 0), (own, written)
assert written.count(25 * 8) == 37  # a row of w is one call
spmd.io.export(folder / "several", tree, max_file_bytes=1000)


def error_of(place: Path, tree: dict) -> Exception:
    try:
        spmd.io.export(place, tree)
    except (CheckpointError, OSError) as error:
        return error
    raise AssertionError(place)


for wrong, words in (
    (tree | {"n": 3}, "leaves that are no arrays: 'n'"),
    (tree | {"b": np.arange(5) + own}, "values that differ"),
    (tree | {"b": np.arange(5 + own)}, "int64[5]"),
):
    text = str(error_of(folder / "wrong", wrong))
    assert words in text, text
assert not (folder / "wrong").exists()


def full(self, at, data):
    if own == 1:
        raise OSError(28, "No space left on device")
    write(self, at, data)


PlacedWriter.write = full
before = sorted(os.listdir(folder / "several"))
error = error_of(folder / "several", tree)
assert "No space left on device" in str(error)
assert isinstance(error, CheckpointError)
mesh.transport.share({own: 0})  # all have removed theirs
assert sorted(os.listdir(folder / "several")) == before
