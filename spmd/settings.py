"""The environment variables of the library: their allowed values, and the error for other ones."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from spmd.errors import MeshError
from spmd.spellings import closest

__all__ = ["SETTINGS", "check_all", "chosen_setting", "complaints", "gather_limit", "setting"]


class _Setting(NamedTuple):
    """One variable. parse: the value of a text; ValueError if it has none. need: the allowed texts, in words.

    default: the value of an unset variable. choices: the allowed texts, if there are few. purpose: what it sets.
    """

    parse: Callable[[str], Any]
    need: str
    default: Any
    choices: tuple[str, ...]
    purpose: str


def _one_of(purpose: str, *texts: str) -> _Setting:
    def parse(text: str) -> str:
        if text not in texts:
            raise ValueError
        return text

    words = [f'"{name}"' for name in texts]
    return _Setting(parse, f"one of {', '.join(words)}" if len(words) > 1 else words[0], None, texts, purpose)


def _switch(purpose: str, default: bool) -> _Setting:
    return _Setting(("0", "1").index, '"0" or "1"', default, ("0", "1"), purpose)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not (text.isascii() and 0 <= seconds < math.inf):
        raise ValueError
    return seconds


def _megabytes(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError
    return int(text)


SETTINGS = {
    "SPMD_TRANSPORT": _one_of(
        "where workers are, if Mesh(transport=...) does not say it; unset: in the processes of the launcher, if there "
        "are as many as the mesh has workers, else virtual workers",
        *("local", "mpi", "torch", "nccl", "counting"),
    ),
    "SPMD_SCHEDULER": _one_of("how virtual workers take turns", "auto", "lockstep", "threads"),
    "SPMD_DEVICE": _one_of("where blocks lie, if Mesh(device=...) does not say it", "cpu", "cuda"),
    "SPMD_TIMEOUT": _Setting(
        _seconds, "seconds, or 0 for no limit", 300.0, ("600",), "how long workers wait for another one in a collective"
    ),
    "SPMD_CHECK": _switch("compare replicated values, and watch other processes", True),
    "SPMD_BUFFERS": _Setting(
        _megabytes,
        "a whole number of megabytes",
        None,
        ("1024",),
        "memory that is kept for later arrays; unset: a sixteenth of the machine's; 0: none",
    ),
    "SPMD_GATHER_LIMIT": _Setting(
        _megabytes, "a whole number of mebibytes", 64, ("1024",), "what a function of global arrays may gather"
    ),
    "SPMD_NUMBA": _switch("use numba's kernels, if it is installed", True),
    "SPMD_TRACEBACK": _one_of("show the library's frames in tracebacks too", "full"),
    "SPMD_MPI_CUDA": _switch("give memory of the GPU to MPI, if it can take that", False),
    "SPMD_NCCL_FIXED_ORDER": _switch("add in the same order as other transports, not in NCCL's", False),
    "SPMD_FSYNC": _switch("flush files of checkpoints to the disk", True),
}
"""The settings by name. A variable with an empty text counts as not set."""


def setting(name: str) -> Any:
    """The value of a variable, or its default if it is not set. Raises MeshError for a text without a value."""
    spec, text = SETTINGS[name], os.environ.get(name, "")
    if not text:
        return spec.default
    try:
        value = spec.parse(text)
    except ValueError:
        raise _setting_error(name, text) from None
    return bool(value) if isinstance(spec.default, bool) else value


def _setting_error(name: str, text: str) -> MeshError:
    spec = SETTINGS[name]
    mend = f"{name}={closest(_SWITCH_WORDS.get(text.lower(), text), spec.choices)}, or leave the variable out"
    where = f"the environment variable {name}"
    return MeshError.at("spmd.Mesh", argument=where, got=repr(text), need=spec.need, mend=mend)


_SWITCH_WORDS = {"true": "1", "on": "1", "yes": "1", "false": "0", "off": "0", "no": "0"}


def complaints() -> list[MeshError]:
    """The errors of all variables with invalid values."""
    errors = []
    for name in SETTINGS:
        try:
            setting(name)
        except MeshError as error:
            errors.append(error)
    return errors


def check_all(overridden: Collection[str]) -> None:
    """Raise MeshError for the first variable with an invalid value, even if this process does not need it.

    So an error does not depend on the transport. overridden: variables that are replaced by an argument.
    """
    for name in SETTINGS:
        if name in os.environ and name not in overridden:
            setting(name)


def chosen_setting(where: str, option: str, value: str | None) -> str | None:
    """An option from its argument, checked, or its environment variable."""
    variable = f"SPMD_{option.upper()}"
    values = SETTINGS[variable].choices
    if value is None:
        return setting(variable)
    if value not in values:
        raise MeshError.at(
            where,
            argument=option,
            got=repr(value),
            need=f"one of {', '.join(map(repr, values))}",
            mend=f'make_mesh(({value},), ("{option}",)) for an axis of this name'
            if isinstance(value, int)
            else f'{option}="{closest(value, values)}"',
        )
    return value


def gather_limit() -> int:
    """The bytes that a worker may gather of global arrays."""
    return setting("SPMD_GATHER_LIMIT") << 20
