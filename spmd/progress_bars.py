"""Progress of loops, on a terminal or in a notebook."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, TypeVar

from spmd.axes import is_main
from spmd.tracebacks import api_boundary

__all__ = ["progress"]

T = TypeVar("T")

_INTERVAL = 0.2
"""Seconds between two lines."""


@api_boundary
def progress(iterable: Iterable[T], total: int | None = None, label: str = "") -> Iterable[T]:
    """The same items, with a line on standard error that says how far a loop over them is.

    iterable: of anything. total: how many items there are; by default len(iterable), if it has a length. label: in
    front of the line. The first process shows it, if standard error is a terminal or the program is a notebook;
    otherwise, and in bodies on all workers but the first, nothing is shown and the iterable itself comes back. The line
    is tqdm's if tqdm is installed, and plain text if not. Cost: nothing is sent.

        >>> [step**2 for step in spmd.progress(range(4), label="training")]
        [0, 1, 4, 9]
    """
    in_notebook = _in_notebook()
    if not is_main() or not (in_notebook or _is_terminal()):
        return iterable
    if total is None and hasattr(iterable, "__len__"):
        total = len(iterable)  # type: ignore[arg-type]
    if find_spec("tqdm") is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # in notebooks without ipywidgets it shows text
            from tqdm.auto import tqdm
        return tqdm(iterable, desc=label or None, total=total, leave=True)
    return _lines(iterable, total, label)


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


def _in_notebook() -> bool:
    """Whether IPython runs this program for a notebook."""
    shell: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _lines(iterable: Iterable[T], total: int | None, label: str) -> Iterator[T]:
    """The items, and a line that is written over again and again."""
    start = shown = time.perf_counter()
    count, last = 0, ""
    try:
        for item in iterable:
            yield item
            count += 1
            now = time.perf_counter()
            if now - shown >= _INTERVAL:
                last, shown = _write(_line(count, total, label, now - start), last), now
    finally:
        _write(_line(count, total, label, time.perf_counter() - start), last)
        print(file=sys.stderr, flush=True)


def _line(count: int, total: int | None, label: str, seconds: float) -> str:
    of = "" if total is None else f"/{total}"
    share = f" {count / total:4.0%}" if total else ""
    left = f", {seconds / count * (total - count):.0f} s left" if total and 0 < count < total else ""
    return f"{f'{label}: ' if label else ''}{count}{of}{share}, {seconds:.1f} s{left}"


def _write(line: str, last: str) -> str:
    print("\r" + line.ljust(len(last)), end="", file=sys.stderr, flush=True)
    return line
