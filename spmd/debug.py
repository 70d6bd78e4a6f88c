"""Finding what went wrong: `with spmd.debug(mutation=True):`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spmd.autodiff.watch import WATCHING

__all__ = ["debug"]


@contextmanager
def debug(*, mutation: bool = True) -> Iterator[None]:
    """Checks that are too dear to be always on, for what runs within the block; also a decorator.

    mutation: a tape keeps the bare arrays that its rules ask for as they are, without a copy. Whoever writes into one
    before the backward sweep changes the gradient in silence. With this on, a checksum of each is taken where it is
    recorded and compared where a backward sweep begins. Raises MutationError, which names the function and the line
    that recorded it. Costs two passes over all that is kept.

        with spmd.debug(mutation=True):
            value, pull = spmd.vjp(f, x)
            x += 1          # f(x) was recorded with the old x
            pull(1.0)       # MutationError
    """
    token = WATCHING.set(mutation)
    try:
        yield
    finally:
        WATCHING.reset(token)
