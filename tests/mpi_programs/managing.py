"""Checkpoints of processes in the background: kept steps, damage, a member that fails. Argument: a folder."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import spmd
from spmd import P
from spmd.errors import CheckpointError
from spmd.io import saving
from spmd.io.files import remove, rename, replace_file, write_file

folder = Path(sys.argv[1]) / "run"
whole = np.random.default_rng(0).normal(size=(7, 3))
with spmd.Mesh(x=3) as mesh:
    (own,) = mesh.local_workers
    state = {"w": spmd.put(whole, P("x")), "b": whole[0], "step": 0}
    checkpoints = spmd.io.CheckpointManager(folder, max_to_keep=2, keep_every=3)
    assert checkpoints.latest() is None
    for step in range(1, 5):
        checkpoints.save(step, {"w": state["w"] + step, "b": whole[0], "step": step})
    assert checkpoints.all_steps() == [3, 4], checkpoints.all_steps()

    # One process cannot write while another still does: all raise that at the next call, and nothing has changed.
    write_files = saving.write_files

    def full(*arguments):
        raise OSError(28, "No space left on device")

    def late(path, text, new):
        write_file(path.with_name(new), text)
        time.sleep(0.5)
        rename(path.with_name(new), path)

    saving.write_files = full if own == 1 else write_files
    saving.replace_file = late if own == 2 else replace_file
    checkpoints.save(5, state)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.wait()
    saving.write_files, saving.replace_file = write_files, replace_file
    assert checkpoints.latest() == 4

    checkpoints.save(5, {"w": state["w"] + 5, "b": whole[0], "step": 5}, wait=True)
    assert checkpoints.all_steps() == [3, 4, 5]
    if own == 2:  # the last process alone sees that step 5 is damaged: all go on to another one
        remove((folder / "step-4").glob("data-*"))
        (data,) = (folder / "step-5").glob("data-*-00002-*")
        text = bytearray(data.read_bytes())
        text[-1] ^= 1
        data.write_bytes(text)
    checkpoints.wait()
    mesh.transport.share({own: None})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = checkpoints.restore(like={**state, "w": spmd.put(whole, P(None, "x"))})
    assert restored["step"] == 3
    assert len([w for w in caught if "is skipped" in str(w.message)]) == 2 * spmd.is_main()
    np.testing.assert_array_equal(restored["w"].numpy(), whole + 3)
    checkpoints.save(5, state)
print("whole")
