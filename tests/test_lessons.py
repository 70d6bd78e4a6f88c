"""The pages that newcomers read: what they show as printed is what is printed."""

from __future__ import annotations

import doctest

import pytest
from test_readme import ROOT, blocks, marks, relative, run

FOLDERS = ("start", "tutorials")
HOW_TO = ("debug.md", "porting_mpi4py.md", "porting_pylops_mpi.md")
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
PAGES += [page for name in HOW_TO if (page := ROOT / "docs" / "how_to" / name).exists()]
HOST = pytest.mark.host("arrays of a device print as such")
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def shown(page):
    """For each block of Python the text that the next block says it prints; empty if the next block is no text."""
    found = blocks(page)
    after = [*found[1:], None]
    return [
        there.text if there is not None and there.language == "text" else ""
        for block, there in zip(found, after, strict=True)
        if block.language == "python"
    ]


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[HOST, *marks(p)]) for p in PAGES], ids=[relative(p) for p in PAGES]
)
def test_pages_show_what_is_printed(page, monkeypatch):
    monkeypatch.delenv("SPMD_SCHEDULER", raising=False)  # bodies that print do so in the order of the workers
    promised = shown(page)
    _, printed = run(page)
    checker = doctest.OutputChecker()
    wrong = [
        (text, got)
        for text, got in zip(promised, printed, strict=True)
        if not checker.check_output(text, got, OPTIONS)
    ]
    assert not wrong


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_lesson_ends_with_what_comes_next(folder):
    for page in (ROOT / "docs" / folder).glob("*.md"):
        last = page.read_text().rstrip().splitlines()
        assert page.name == "index.md" or any(
            line.startswith(("Next: [", "## What next")) for line in last[-15:]
        ), page.name
