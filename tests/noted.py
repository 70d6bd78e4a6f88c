"""Several cases in one test: a failure says which case it was of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["noted"]


@contextmanager
def noted(case: object) -> Iterator[None]:
    """Whatever is raised within has a note that names the case.

    A parameter of pytest's makes a test of each case. Where thousands of cases take less time than pytest needs to
    collect, start and report a test, a loop over them goes here.
    """
    try:
        yield
    except BaseException as error:
        error.add_note(f"case: {case}")
        raise
