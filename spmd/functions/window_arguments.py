"""Arguments of functions over windows: one int for all spatial dimensions, or one for each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from spmd.errors import SpecError, describe
from spmd.kernels.windows import same_padding

__all__ = ["check_spatial", "paddings", "per_dimension", "tuples"]

Pairs = tuple[tuple[int, int], ...]


def check_spatial(where: str, x: Any) -> None:
    """Raise unless x is (N, C, *spatial)."""
    if not 3 <= x.ndim <= 5:
        need = "shape (N, C, *spatial), with one to three spatial dimensions"
        mend = "np.reshape(x, (N, C, *spatial))"
        if x.ndim < 3:
            mend = "x[np.newaxis] for a single example; x[None, None] for a single image without channels"
        raise SpecError.at(where, argument="x", got=describe(x), need=need, mend=mend)


def per_dimension(where: str, argument: str, value: Any, dims: int, minimum: int = 1) -> tuple[int, ...]:
    """An int of at least `minimum` for each of the dimensions."""
    ints = _ints(value if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * dims)
    if ints is None or len(ints) != dims or min(ints, default=minimum) < minimum:
        raise SpecError.at(
            where,
            argument=argument,
            got=repr(value),
            need=f"an int of at least {minimum}, or one for each of the {dims} spatial dimensions",
            mend=f"{argument}={(max(minimum, 2),) * dims}",
        )
    return ints


def paddings(
    where: str,
    value: Any,
    shape: tuple[int, ...],
    window: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    minimum: int | None = 0,
) -> Pairs:
    """(low, high) for each of the dimensions. value: an int, an int or a pair for each, "SAME", "SAME_LOWER", "VALID".

    minimum: of each number; None for any.
    """
    keyword = value.upper() if isinstance(value, str) else None
    if keyword == "VALID":
        return ((0, 0),) * len(shape)
    if keyword in ("SAME", "SAME_LOWER"):
        dimensions = zip(shape, window, stride, dilation, strict=True)
        return tuple(same_padding(n, k, s, r, lower=keyword == "SAME_LOWER") for n, k, s, r in dimensions)
    pairs = _pairs(value, len(shape)) if keyword is None else None
    if pairs is None or (minimum is not None and min((p for pair in pairs for p in pair), default=minimum) < minimum):
        raise SpecError.at(
            where,
            argument="padding",
            got=repr(value),
            need=("an int" if minimum is None else f"an int of at least {minimum}")
            + f', one or a pair (low, high) for each of the {len(shape)} spatial dimensions, "SAME" or "VALID"',
            mend=f"padding={((0, 1),) * len(shape)}",
        )
    return pairs


def tuples(value: Any) -> Any:
    """A value with tuples for all its sequences, so that it is hashable."""
    return tuple(map(tuples, value)) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _pairs(value: Any, dims: int) -> Pairs | None:
    ends = value if isinstance(value, Sequence) else (value,) * dims
    pairs = [_ints(p if isinstance(p, Sequence) and not isinstance(p, str) else (p, p)) for p in ends]
    if len(pairs) != dims or any(p is None or len(p) != 2 for p in pairs):
        return None
    return tuple((p[0], p[1]) for p in pairs if p is not None)


def _ints(values: Sequence[Any]) -> tuple[int, ...] | None:
    """The values as ints; None if one of them is not an int."""
    try:
        return None if any(isinstance(v, bool) for v in values) else tuple(map(operator.index, values))
    except TypeError:
        return None
