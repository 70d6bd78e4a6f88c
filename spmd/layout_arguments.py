"""Check the arguments of layouts."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from typing import Any

from spmd.errors import LayoutError
from spmd.spellings import closest


def checked_integers(where: str, argument: str, values: Any, minimum: int | None, mend: str) -> tuple[int, ...]:
    """Values as plain integers, checked."""
    try:
        integers = tuple(int(index(n)) for n in values)
        if minimum is None or min(integers, default=minimum) >= minimum:
            return integers
    except TypeError:
        pass
    need = "integers" if minimum is None else f"integers of at least {minimum}"
    raise LayoutError.at(where, argument=argument, got=repr(values), need=need, mend=mend)


def checked_axes(where: str, axes: Any) -> dict[str, int]:
    """The names and sizes of mesh axes, checked."""
    if not isinstance(axes, Mapping):
        raise LayoutError.at(
            where, argument="axes", got=repr(axes), need="the sizes of the axes by name", mend="mesh.axes"
        )
    return dict(zip(axes, checked_integers(where, "axes", [*axes.values()], 1, "mesh.axes"), strict=True))


def checked_copies(copies: str) -> str:
    if copies not in ("invariant", "varying"):
        raise LayoutError.at(
            "spmd.Layout",
            argument="copies",
            got=repr(copies),
            need='"invariant" (one value, counted once) or "varying" (a value each)',
            mend=f'copies="{closest(copies, ("varying", "invariant"))}"',
        )
    return copies
