"""What functions over windows ask of their arguments: one int for all spatial dimensions, or one for each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from spmd.errors import SpecError
from spmd.kernels.windows import same_padding

__all__ = ["each", "paddings"]

Pairs = tuple[tuple[int, int], ...]


def each(where: str, argument: str, value: Any, dims: int, least: int = 1) -> tuple[int, ...]:
    """An int of at least `least` for each of the dimensions."""
    found = _ints(value if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * dims)
    if found is None or len(found) != dims or min(found, default=least) < least:
        raise SpecError.at(
            where,
            argument=argument,
            got=repr(value),
            need=f"an int of at least {least}, or one for each of the {dims} spatial dimensions",
            mend=f"{argument}={(max(least, 2),) * dims}",
        )
    return found


def paddings(
    where: str,
    value: Any,
    shape: tuple[int, ...],
    window: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    least: int | None = 0,
) -> Pairs:
    """(low, high) for each of the dimensions. value: an int, an int or a pair for each, "SAME", "SAME_LOWER", "VALID".

    least: the least number that is allowed; None for any.
    """
    word = value.upper() if isinstance(value, str) else None
    if word == "VALID":
        return ((0, 0),) * len(shape)
    if word in ("SAME", "SAME_LOWER"):
        of = zip(shape, window, stride, dilation, strict=True)
        return tuple(same_padding(n, k, s, r, lower=word == "SAME_LOWER") for n, k, s, r in of)
    found = _pairs(value, len(shape)) if word is None else None
    if found is None or (least is not None and min((p for pair in found for p in pair), default=least) < least):
        raise SpecError.at(
            where,
            argument="padding",
            got=repr(value),
            need=("an int" if least is None else f"an int of at least {least}")
            + f', one or a pair (low, high) for each of the {len(shape)} spatial dimensions, "SAME" or "VALID"',
            mend=f"padding={((0, 1),) * len(shape)}",
        )
    return found


def _pairs(value: Any, dims: int) -> Pairs | None:
    ends = value if isinstance(value, Sequence) else (value,) * dims
    pairs = [_ints(p if isinstance(p, Sequence) and not isinstance(p, str) else (p, p)) for p in ends]
    if len(pairs) != dims or any(p is None or len(p) != 2 for p in pairs):
        return None
    return tuple((p[0], p[1]) for p in pairs if p is not None)


def _ints(values: Sequence[Any]) -> tuple[int, ...] | None:
    """The values as ints; None if one of them is none."""
    try:
        return None if any(isinstance(v, bool) for v in values) else tuple(map(operator.index, values))
    except TypeError:
        return None
