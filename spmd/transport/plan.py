"""What a collective moves, and what is made of what comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from spmd import kernels
from spmd.device import contiguous, copied, zeros
from spmd.layout import Box, block_sizes
from spmd.transport.call import Group, Shape
from spmd.transport.handles import sealed

if TYPE_CHECKING:
    pass

__all__ = ["Boxes", "Eager", "Make", "all_reduce_cost", "gather_cost", "root_cost", "scatter_cost"]


class Boxes(NamedTuple):
    """How an array is put together of what several members send: of[k] is the box that member k gives. Elsewhere stand
    zeros. Where boxes overlap, `adds` says whether they are added up; else the last one counts. like: beside what."""

    shape: Shape
    of: Mapping[int, Box]
    like: Any
    adds: bool = False

    def filled(self, received: Mapping[int, np.ndarray], fresh: bool = False) -> np.ndarray:
        """The array of what each member has sent. fresh: never one of these arrays itself."""
        parts = [received[k] for k in self.of]
        if not parts:
            return sealed(zeros(self.shape, self.like))
        if len(parts) == 1 and parts[0].shape == self.shape:
            return sealed(copied(parts[0]) if fresh else contiguous(parts[0]))
        engine = kernels.of(self.like)
        return sealed((engine.add_boxes if self.adds else engine.unpack)(self.shape, tuple(self.of.values()), parts))


class Join(Protocol):
    """Puts the blocks of all members together. fresh: never in place, where they lie side by side."""

    def __call__(self, blocks: Sequence[Any], fresh: bool = False, /) -> Any: ...


Make = Callable[[np.ndarray, list[Any]], np.ndarray]
"""What makes a new block of the own one and of what comes from each member."""


class Eager(NamedTuple):
    """What there is to a collective of a block of some shape, for lines that call the same again: between processes it
    may go along with what workers tell each other before. MPI calls such messages eager.

    group: who meets. parts: for each member the index of what goes to it, this worker among them: `...` for the whole
    block, None for nothing. maker: given the shapes of what comes from each member (None: nothing), gives what makes
    the new block, of the own one and of what came, which is to be read by then, and not kept; and the operator bound to
    these shapes. It may raise.
    same: all members make the same of the same blocks. taken: where the new block is that of a member as it is, who
    that is, if anyone sends one. supposed: (d, lengths): the members' blocks have these lengths in dimension d, or it
    goes another way. slight: the new block is made around the own one, if that lies as it does now, so that little is
    written however large it is. apart: by `launch` each member makes its own result, at the same time where they have
    cores; else the last to come makes those of all.
    """

    group: Group
    parts: Sequence[Any]
    maker: Callable[[tuple[Any, ...]], tuple[Make, Any]]
    same: bool = False
    taken: tuple[int, ...] | None = None
    supposed: tuple[int, tuple[int, ...]] | None = None
    slight: bool = False
    apart: bool = False

    @property
    def light(self) -> bool:
        """Whether little is written, however large the blocks are."""
        return self.slight or self.taken is not None


Sends = Callable[[Sequence[Shape]], Mapping[int, np.ndarray] | None]
"""What goes to whom, where all members' blocks have these shapes."""


Way = Callable[[Any, np.ndarray], tuple[Any, Any]]
"""How a collective goes: of the Comm and a block it makes the new block and the operator bound to the shapes it met."""


def all_reduce_cost(group: Group, *xs: np.ndarray) -> tuple[int, int]:
    """Messages and bytes this member sends in an all-reduce: a reduce-scatter, then an all-gather, of chunks."""
    n, nbytes = group.size, sum(x.nbytes for x in xs)
    own = block_sizes(sum(x.size for x in xs), n)[group.index] * (xs[0].itemsize if xs else 0)
    return 2 * (n - 1), nbytes - own + own * (n - 1) if n > 1 else 0


def gather_cost(group: Group, x: np.ndarray) -> tuple[int, int]:
    """Messages and bytes this member sends in an all-gather: its block to each of the others."""
    return group.size - 1, (group.size - 1) * x.nbytes


def scatter_cost(group: Group, parts: Sequence[np.ndarray]) -> tuple[int, int]:
    """Messages and bytes this member sends in a reduce-scatter or an all-to-all: its parts for the others."""
    return group.size - 1, sum(p.nbytes for k, p in enumerate(parts) if k != group.index)


def exchange_cost(group: Group, sends: Mapping[int, np.ndarray]) -> tuple[int, int]:
    """Messages and bytes this member sends in an exchange: one to each of the others that it has something for."""
    others = [x for k, x in sends.items() if k != group.index]
    return len(others), sum(x.nbytes for x in others)


def root_cost(group: Group, root: int, nbytes: int, *, down: bool) -> tuple[int, int]:
    """Messages and bytes this member sends in a broadcast (down: the root to all others) or a reduce (up)."""
    n = (group.size - 1 if down else 0) if group.index == root else (0 if down else 1)
    return n, n * nbytes
