"""Mistakes with torch, a row each: the error names the function, what came, what was needed and the mend."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from mistakes import refused, torch_optimizers, torch_tensors

import spmd

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("row", [*torch_tensors.ROWS, *torch_optimizers.ROWS], ids=lambda row: row.name)
def test_a_mistake_with_torch_is_explained(row):
    with spmd.Mesh(**torch_tensors.AXES):
        refused(row)
