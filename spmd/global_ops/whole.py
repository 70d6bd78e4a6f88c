"""Functions that need all entries of a global array at one place: each worker gathers them, if they are few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.autodiff.primitive import name_of
from spmd.global_ops.call import Arguments, check_gathered
from spmd.layout import P

__all__ = ["whole"]


def whole(fun: Callable, args: tuple, kwargs: dict) -> Any:
    """fun(*args, **kwargs) on every worker, of all entries. The results are the same on all of them."""
    arguments = Arguments(args, kwargs)
    mend = "a body that works on the blocks: spmd.map(f, in_specs=..., out_specs=...)"
    check_gathered(name_of(fun), arguments.globals, mend)
    return arguments.run(fun, [P()] * len(arguments.arrays), P())
