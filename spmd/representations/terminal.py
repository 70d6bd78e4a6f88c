"""Reports on a terminal."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from spmd.representations.tables import Report, Table

__all__ = ["say", "show"]


def show(report: Report | Table) -> None:
    """Print a report: by rich if that is installed and standard output is a terminal, otherwise as plain text."""
    if sys.stdout is not None and sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.console import Console

        Console().print(report)
    else:
        say(report.text())


def say(text: str) -> None:
    """Print a text. Characters that standard output cannot encode are escaped as in Python's `ascii`."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))
