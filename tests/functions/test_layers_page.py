"""The table of docs/reference/layers.md says what layers send."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.host("messages between devices are counted by other algorithms")
def test_the_table_is_what_is_counted():
    spec = importlib.util.spec_from_file_location("make_layers", DOCS / "tools" / "make_layers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = module.PAGE.read_text()
    assert module.text(page) == page, f"run `{module.COMMAND}`"
