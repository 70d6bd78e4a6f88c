"""Functions that need all entries of a global array at one place: each worker gathers them, if they are few."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.autodiff.primitive import name_of
from spmd.global_ops.call import Arguments, Template, check_gathered, on_blocks
from spmd.layout import P

__all__ = ["whole"]


def _make(fun: Callable, template: Template) -> Callable:
    def body(*arrays: Any) -> Any:
        args, kwargs = template.filled(arrays)
        return fun(*args, **kwargs)

    return body


def whole(fun: Callable, args: tuple, kwargs: dict) -> Any:
    """fun(*args, **kwargs) on every worker, of all entries. The results are the same on all of them."""
    where = name_of(fun)
    arguments = Arguments(where, args, kwargs)
    check_gathered(
        where, arguments.globals, "a body that works on the blocks: spmd.map(f, in_specs=..., out_specs=...)"
    )
    specs = [P()] * len(arguments.arrays)
    return on_blocks(where, _make, (fun, arguments.template), arguments.arrays, specs, P(), arguments.mesh)
