"""Error classes, and the function that builds error messages.

Every message says where the error arose, in which argument, what came, what was needed, and how to mend it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, Self

__all__ = [
    "CheckpointError",
    "ClosureError",
    "CorruptCheckpointError",
    "DeadlockError",
    "DifferentiationError",
    "DonatedError",
    "DtypeError",
    "JitError",
    "LayoutError",
    "MeshError",
    "MismatchError",
    "MissingMethodError",
    "MutationError",
    "NonFiniteError",
    "ReplicaError",
    "SpecError",
    "StallError",
    "StateError",
    "TracedConversionError",
    "TransportError",
    "all_of",
    "axes_of",
    "caller",
    "class_name",
    "describe",
    "message",
    "nearest",
    "one_or_all",
    "prints",
    "rebuilt_error",
    "source_line",
    "user_stacklevel",
]


class _Located:
    """An error whose text says where it arose, what came, what was needed, and how to mend it."""

    @classmethod
    def at(cls, where: str, *, got: str, need: str, mend: str, argument: str | None = None) -> Self:
        """The error with the text that `message` builds."""
        return cls(message(where, got=got, need=need, mend=mend, argument=argument))  # type: ignore[call-arg]


class MeshError(_Located, ValueError):
    """No mesh, an unknown or repeated axis, or a mesh that does not fit the workers there are."""


class SpecError(_Located, ValueError):
    """A partition spec that does not fit its mesh, its array or the tree of its arguments."""


class LayoutError(_Located, ValueError):
    """Blocks, shapes or layouts that do not fit together."""


class StateError(_Located, TypeError):
    """An operation on an array whose state (Invariant, Varying, Rooted) it does not accept."""


class ClosureError(_Located, TypeError):
    """A body that uses an array from outside its map."""


class DifferentiationError(_Located, TypeError):
    """A function that has no derivative rule, or an argument that cannot be differentiated."""


class DtypeError(_Located, TypeError):
    """A value that an array's dtype cannot hold."""


class JitError(_Located, RuntimeError):
    """A body under spmd.jit depends on values, or on something that changes from call to call.

    reads_value: the code read a value; an operation that reads values may be recorded as a whole.
    """

    reads_value = False


class TracedConversionError(_Located, TypeError):
    """A traced array was converted to bare data, which would cut it off from its gradient."""


class MissingMethodError(_Located, AttributeError):
    """A method or attribute of NumPy's arrays, or a name of another library's module, that does not exist here.

    The text may be given as a function, which is called when the text is read: `hasattr` never reads it.
    """

    def __str__(self) -> str:
        text = self.args[0] if self.args else ""
        return str(text() if callable(text) else text)


class MutationError(_Located, RuntimeError):
    """A bare array changed between the forward run and the backward sweep, or a write would change a tensor's state."""


class TransportError(_Located, RuntimeError):
    """A transport is not available, or has another number of workers than the mesh."""


class MismatchError(_Located, RuntimeError):
    """Workers met in one collective with different calls."""


class DeadlockError(MismatchError):
    """Workers wait for others that never come."""


class NonFiniteError(_Located, FloatingPointError):
    """A NaN or an infinity inside spmd.debug(nans=True)."""


class DonatedError(_Located, RuntimeError):
    """A donated array (`donate=True`) that is used again."""


class ReplicaError(_Located, RuntimeError):
    """An Invariant array that differs between workers, or parameters that are not used alike on all workers."""


class CheckpointError(_Located, RuntimeError):
    """A checkpoint that cannot be saved or loaded: a path, a leaf, a name or a shape that does not fit."""


class CorruptCheckpointError(CheckpointError):
    """Bytes of a checkpoint are not those that were written."""


class StallError(_Located, RuntimeError):
    """A collective that has made no progress for SPMD_TIMEOUT seconds."""


def class_name(error: BaseException) -> str:
    """The class of an error, as `rebuilt_error` finds it in another process: `numpy.linalg.LinAlgError`."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def rebuilt_error(name: str, text: str) -> Exception:
    """The error of another process: an error of this class with this text.

    RuntimeError if the class does not exist here, or does not accept a text.
    """
    module, _, last = name.rpartition(".")
    kind = getattr(sys.modules.get(module or "builtins"), last, None)
    error = None
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(Exception):
            error = kind(text)
    return error if isinstance(error, Exception) else RuntimeError(f"{name}: {text}")


def message(where: str, *, got: str, need: str, mend: str, argument: str | None = None) -> str:
    """The text of an error: where it arose, what came, what was needed, how to mend it."""
    noun = "" if argument is None or argument.startswith(("result", "the ")) else "argument "
    head = where if argument is None else f"{where}: {noun}{argument}"
    return f"{head}\n  got:    {got}\n  needed: {need}\n  mend:   {mend}"


def prints(text: str) -> bool:
    """Whether standard output can encode a text."""
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def describe(x: object) -> str:
    """A short description of a value: its kind, dtype and shape where it has them."""
    description = getattr(x, "__spmd_describe__", None)
    if description is not None:
        return description()
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is not None and dtype is not None and not isinstance(x, type):
        return f"{type(x).__name__} {dtype}{list(shape)}"
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def all_of(names: Iterable[object]) -> str:
    """Names as a sentence lists them: `'x' and 'y'`."""
    return " and ".join(map(repr, names))


def axes_of(names: Sequence[str]) -> str:
    """Axes as a sentence names them: `axis 'x'`, `axes 'x' and 'y'`."""
    return f"{'axis' if len(names) == 1 else 'axes'} {all_of(names)}"


def one_or_all(names: Sequence[str]) -> str:
    """Axes as an argument `axis_name` takes them: `'x'`, `('x', 'y')`."""
    return repr(names[0] if len(names) == 1 else tuple(names))


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The known names that are most like `name`, best first."""
    from difflib import get_close_matches

    names = sorted(set(candidates))
    close = get_close_matches(name, names, n=count, cutoff=0.5)
    return close + [k for k in names if name and k not in close and (name in k or k in name)][: count - len(close)]


def caller(frame: Any = None) -> Any:
    """The nearest frame of the user's code, going up from `frame` (default: the caller's); None if there is none."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        users = _modules.get(module)
        if users is None:
            users = _modules[module] = _is_users(module)
        if users:
            return frame
        frame = frame.f_back
    return None


def user_stacklevel() -> int:
    """The `stacklevel` of a warning that is to point at the user's code."""
    frame, count = sys._getframe(1), 1
    user = caller(frame)
    while frame is not None and frame is not user:
        frame, count = frame.f_back, count + 1
    return count


_modules: dict[str, bool] = {}
"""Whether a module belongs to the user, by its name."""


def _is_users(module: str) -> bool:
    """Whether a module belongs to the user: not to this library, to torch, or to the start of a thread."""
    return module.split(".", 1)[0] not in ("spmd", "torch", "threading") or module == "spmd.__main__"


def source_line(code: CodeType | None, instruction: int) -> str:
    """`file.py:12 in f` for an instruction of the user's code."""
    if code is None:
        return "unknown source"
    line = next(itertools.islice(code.co_positions(), instruction // 2, None))[0]
    return f"{code.co_filename}:{line} in {code.co_name}"
