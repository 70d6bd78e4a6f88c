"""The cost of a collective as plans and verbs have it: from the group, the dtype, and the parts that a member sends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import numpy as np

from spmd.kernels.cpu.chunks import accurate
from spmd.transport.algorithms import choice, cost
from spmd.transport.algorithms.cost import NOTHING, Cost, Sizes
from spmd.transport.call import Group

__all__ = ["cost_of", "cost_of_sums"]


def cost_of(
    kind: str,
    group: Group,
    dtype: np.dtype,
    size: int,
    parts: Sequence[int | None] = (),
    root: int = 0,
    per_host: int = 1,
    came: int = 0,
) -> Cost:
    """What a member sends in a collective of this kind.

    size: the entries of its block. parts: the entries of its parts for each member; None for nothing. per_host: see
    `choice.members_per_host`. came: the bytes of what came from the root, where only the root knew it.

    Blocks of others that a member passes on are counted as if they were as large as its own: its block, in gathers;
    the part that goes as far, in an all-to-all; the part that came, in a scatter.
    """
    n, me, itemsize = group.size, group.index, dtype.itemsize
    partial = accurate(dtype).itemsize
    if n == 1 or kind == "none":
        return NOTHING
    if kind == "all_reduce":
        return cost.all_reduce(n, me, size, itemsize, partial, per_host)
    if kind == "reduce":
        return cost.reduce(n, me, root, size, itemsize, partial)
    if kind == "broadcast":
        return cost.broadcast(n, me, root, size * itemsize if me == root else came)
    if kind in ("all_gather", "gather"):
        sizes = Sizes.equal(n, size * itemsize)
        return cost.all_gather(n, me, sizes, per_host) if kind == "all_gather" else cost.gather(n, me, root, sizes)
    if kind == "scatter" and me != root:
        return cost.scatter(n, me, root, Sizes.equal(n, came))
    entries = [part or 0 for part in parts]
    if kind == "reduce_scatter":
        return cost.reduce_scatter(n, me, entries, itemsize, partial)
    each = [part * itemsize for part in entries]
    if kind == "scatter":
        return cost.scatter(n, me, root, Sizes(each))
    if kind == "all_to_all":
        return cost.all_to_all(n, me, each)
    others = [k for k, part in enumerate(parts) if part is not None and k != me]
    return cost.exchange([each[k] for k in others])


def cost_of_sums(group: Group, dtype: np.dtype, shapes: Sequence[tuple[int, ...]], per_host: int = 1) -> Cost:
    """What a member sends where several blocks are summed at once: small ones are packed together."""
    return _cost_of_sums(group.size, group.index, dtype, tuple(shapes), per_host)


@lru_cache(maxsize=1024)
def _cost_of_sums(size: int, index: int, dtype: np.dtype, shapes: tuple[tuple[int, ...], ...], per_host: int) -> Cost:
    group = Group((), (), tuple(range(size)), index)
    sizes = [prod(shape) for shape in shapes]
    separate = [size for size in sizes if size * dtype.itemsize >= choice.SEPARATE_MIN]
    packed = sum(sizes) - sum(separate)
    total = NOTHING
    for size in (*separate, *[packed] * (len(separate) < len(sizes))):
        total += cost_of("all_reduce", group, dtype, size, per_host=per_host)
    return total
