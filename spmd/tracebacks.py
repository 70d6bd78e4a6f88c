"""Tracebacks that show the user's frames: public functions remove the library's frames from errors.

`api_boundary` marks a public function. An error that leaves it keeps the frames of the user's code, of the body and of
the caller of the map. The frames of the library, and of the packages through which it runs bodies, are removed from the
error itself, so plain Python, IPython and pytest show the same. SPMD_TRACEBACK=full keeps all frames.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from importlib import import_module
from types import FrameType, ModuleType, TracebackType
from typing import Any, TypeVar

from spmd.errors import message

__all__ = ["api_boundary", "boundary_like", "shorten"]

F = TypeVar("F", bound=Callable[..., Any])

_INTERNAL = frozenset(
    ("spmd", "numpy", "scipy", "torch", "optree", "greenlet", "mpi4py", "concurrent", "contextlib", "functools")
)
"""Packages and modules through which the library runs the user's code."""


def api_boundary(f: F) -> F:
    """Mark a public function: an error that leaves it shows the user's frames only."""

    return boundary_like(f)(f)  # type: ignore[return-value]


def boundary_like(fun: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The same for a function made from the user's `fun`, whose name and docstring it gets."""

    def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(fun)
        def boundary(*args: Any, **kwargs: Any) -> Any:
            try:
                return f(*args, **kwargs)
            except BaseException as error:
                shorten(error, f)
                raise  # a bare raise adds no frame

        return boundary

    return decorate


def shorten(error: BaseException, f: Callable[..., Any] | None = None) -> None:
    """Remove the library's frames from an error and from its causes.

    f: the public function that the error leaves.
    """
    if type(error) is TypeError:
        _explain(error, f)
    if os.environ.get("SPMD_TRACEBACK") == "full":
        return
    _hide(sys._getframe(1))
    for one in _chain(error):
        one.__traceback__ = _without_library_frames(one.__traceback__)
    for one in _chain(error):
        context = one.__context__
        if context is not None and one.__cause__ is None and context.__traceback__ is None:
            one.__suppress_context__ = True  # raised and caught inside the library


_NO_SUCH_KEYWORD = re.compile(r"(?:\w+\.)*(\w+)\(\) got an unexpected keyword argument '(\w+)'")


def _explain(error: TypeError, f: Callable[..., Any] | None) -> None:
    """Add to the error for an unknown keyword of a public function what to write instead."""
    match = _NO_SUCH_KEYWORD.match(str(error))
    last = error.__traceback__
    if match is None or last is None:
        return
    if f is None or not _is_of_call(f, last) or match[1] != f.__name__:  # the error of another call
        while last.tb_next is not None:
            last = last.tb_next
        f = _named(match[1], last.tb_frame)
    if f is not None:
        spellings = import_module("spmd.spellings")
        own, mend = spellings.keyword(f, match[2])
        got = "a keyword that this function does not have"
        error.args = (message(spellings.public_name(f), argument=match[2], got=got, need=own, mend=mend),)


def _is_of_call(f: Callable[..., Any], traceback: TracebackType) -> bool:
    """Whether an error is of the call of f itself, or of what f wraps; traceback: of the frame that calls f."""
    inner = traceback.tb_next
    return inner is None or (
        inner.tb_next is None and hasattr(f, "__wrapped__") and inner.tb_frame.f_code is getattr(f, "__code__", None)
    )


def _named(name: str, frame: FrameType) -> Callable[..., Any] | None:
    """The public function of this name that a frame calls, if it is one of the library's."""
    f = vars(sys.modules["spmd"]).get(name)
    if f is None or _is_internal(frame.f_globals.get("__name__", "")):
        return f
    seen = (*frame.f_locals.values(), *frame.f_globals.values())
    modules = [x for x in seen if isinstance(x, ModuleType) and x.__name__ in ("spmd", "spmd.bridge.torch")]
    called = name in frame.f_code.co_names and (modules or any(x is f for x in seen))
    return f if called else None


def _hide(frame: FrameType | None) -> None:
    """Let pytest hide the functions of the library between this frame and the user's call."""
    while frame is not None and _is_internal(frame.f_globals.get("__name__", "")):
        if frame.f_globals["__name__"].startswith("spmd"):
            frame.f_globals["__tracebackhide__"] = True
        frame = frame.f_back


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error, those of its group, and their causes and contexts."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]


def _without_library_frames(traceback: TracebackType | None) -> TracebackType | None:
    entries, internal = [], False
    while traceback is not None:
        if _is_internal(traceback.tb_frame.f_globals.get("__name__", "")):
            internal = True
        else:
            entries.append(traceback)
        traceback = traceback.tb_next
    if not internal:
        return entries[0] if entries else None
    rest = None
    for entry in reversed(entries):
        rest = TracebackType(rest, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return rest


@lru_cache(maxsize=4096)
def _is_internal(module: str) -> bool:
    return module.split(".", 1)[0] in _INTERNAL and module != "spmd.__main__"
