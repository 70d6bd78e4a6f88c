"""The table of docs/reference/layers.md says what layers send."""

from __future__ import annotations

from pathlib import Path

import pytest
from loaded import load

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.host("messages between devices are counted by other algorithms")
def test_the_table_is_what_is_counted():
    module = load(DOCS / "tools" / "make_layers.py")
    page = module.PAGE.read_text()
    assert module.text(page) == page, f"run `{module.COMMAND}`"
