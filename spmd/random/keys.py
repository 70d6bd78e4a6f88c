"""Keys of random numbers."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff.static_array import AnyArray
from spmd.autodiff.tracer import value_of
from spmd.errors import SpecError, describe
from spmd.random.arguments import Shape, checked_shape, key_words, varying_axes
from spmd.random.drawing import FOLD_STREAM, SPLIT_STREAM, Place, draw, with_state
from spmd.tracebacks import api_boundary

__all__ = ["fold_in", "key", "split"]


@api_boundary
def key(seed: int) -> AnyArray:
    """The key of a seed, an integer from 0 to 2^64 - 1: an array of two uint32.

    >>> spmd.random.key(42)
    array([42,  0], dtype=uint32)
    """
    try:
        number = operator.index(seed)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 64:
        raise SpecError.at(
            "spmd.random.key",
            argument="seed",
            got=describe(seed),
            need="an integer from 0 to 2**64 - 1",
            mend="key(0); spmd.random.fold_in(key, i) takes a second number in",
        )
    return np.array([number & 0xFFFFFFFF, number >> 32], np.uint32)


@api_boundary
def split(key: Any, num: Shape = 2) -> AnyArray:
    """New keys, uint32 of shape (num, 2): `a, b = split(key)`. num: a number, or a shape. The old key is used up.

    >>> first, second = spmd.random.split(spmd.random.key(0))
    >>> spmd.random.randint(first, (3,), 0, 10), spmd.random.randint(second, (3,), 0, 10)
    (array([0, 8, 9]), array([5, 2, 0]))
    """
    shape = (*checked_shape("spmd.random.split", num, "num"), 2)
    return draw("spmd.random.split", key, "random_bits", np.uint32, Place(shape), SPLIT_STREAM)


@api_boundary
def fold_in(key: Any, data: Any) -> AnyArray:
    """A new key from a key and an integer from 0 to 2^62, such as a step, a layer, or `spmd.axis_index`.

    >>> key = spmd.random.key(0)
    >>> [spmd.random.randint(spmd.random.fold_in(key, step), (), 0, 100).item() for step in range(3)]
    [1, 66, 31]
    """
    where, bare = "spmd.random.fold_in", value_of(data)
    try:
        number = operator.index(bare.item() if getattr(bare, "shape", None) == () else bare)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 62:
        raise SpecError.at(
            where,
            argument="data",
            got=describe(data),
            need="one integer, not negative",
            mend="fold_in(key, step); of several numbers one after the other",
        )
    words = key_words(where, key)
    box = ((2 * number, 2 * number + 2),)
    new_words = kernels.of(words).random_bits(words, (1 << 63,), box, np.uint32, FOLD_STREAM)
    return with_state(new_words, varying_axes(key) | varying_axes(data))
