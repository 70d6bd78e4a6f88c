"""Functions of NumPy that write: into files, and into arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.primitive import name_of
from spmd.errors import LayoutError, describe
from spmd.global_ops.call import global_value
from spmd.global_ops.registry import implements
from spmd.layout_rules import Rule

__all__: list[str] = []


def _of_bare(fun: Callable[..., Any]) -> None:
    """A function that needs bare arrays: it gets them where this process holds all entries."""

    @implements(fun, rule=Rule.KNOWN)
    def handler(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree.map(lambda x: x if global_value(x) is None else np.asarray(x), (args, kwargs))
        return fun(*args, **kwargs)


for _saving in (np.save, np.savez, np.savez_compressed, np.savetxt):
    _of_bare(_saving)


def _in_place(fun: Callable[..., Any], mend: str) -> None:
    """A function that writes into its first argument, which is bare if it is none that raises."""

    @implements(fun, rule=Rule.KNOWN)
    def handler(dst: Any, *args: Any, **kwargs: Any) -> Any:
        if global_value(dst) is not None:
            raise LayoutError.at(name_of(fun), got=describe(dst), need="arrays are immutable", mend=mend)
        args, kwargs = tree.map(lambda x: x if global_value(x) is None else np.asarray(x), (args, kwargs))
        return fun(dst, *args, **kwargs)


_in_place(np.copyto, "x = np.where(mask, v, x), or x.at[i].set(v)")
_in_place(np.put, "x = x.at[np.unravel_index(i, x.shape)].set(v)")
_in_place(np.place, "x = np.where(mask, v, x)")
_in_place(np.putmask, "x = np.where(mask, v, x)")
_in_place(np.put_along_axis, "x = x.at[i].set(v)")
_in_place(np.fill_diagonal, "i = np.arange(min(x.shape)); x = x.at[i, i].set(v)")
