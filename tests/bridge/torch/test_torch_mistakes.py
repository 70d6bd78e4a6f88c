"""Mistakes with torch, a row each: the error names the function, what came, what was needed and the mend."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from mistakes import refused, torch_optimizers, torch_pipelines, torch_sharding, torch_tensors

import spmd

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


ROWS = [*torch_tensors.ROWS, *torch_optimizers.ROWS, *torch_pipelines.ROWS, *torch_sharding.ROWS]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_mistake_with_torch_is_explained(row):
    with spmd.Mesh(**torch_tensors.AXES):
        refused(row)


@pytest.mark.parametrize(("call", "error", "words"), torch_sharding.builtin_errors())
def test_a_wrong_argument_of_shard_parameters(call, error, words):
    with spmd.Mesh(**torch_tensors.AXES), pytest.raises(error, match=words):
        call()
