"""Handles on values that another worker may hold, and what NumPy and others say to whoever uses one as an array."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import numpy as np

from spmd.errors import MissingMethodError, StateError, describe, message
from spmd.frontends import frontend

__all__ = ["Elsewhere", "Rooted", "as_written", "dtype_of", "rooted"]


class Elsewhere:
    """A value that one worker holds, which is no array on the others. Mixing it with arrays is an error."""

    __slots__ = ()
    as_rooted: ClassVar[str] = "spmd.keep(x, axis_name, root) or spmd.sum_reduce(x, axis_name, root) make one"
    """How to make a Rooted value of it, as errors say."""

    def __spmd_describe__(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{self.__spmd_describe__()}>"

    def _mend(self) -> str:
        raise NotImplementedError

    def _refusal(self, where: str) -> str:
        return message(where, got=describe(self), need="a value that this worker has", mend=self._mend())

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise StateError(self._refusal("an operation on arrays"))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise MissingMethodError(lambda: self._refusal(f"x.{name}"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        found = (*args, *(kwargs or {}).values())
        next(x for a in found for x in (a if isinstance(a, tuple | list) else (a,)) if isinstance(x, cls))._refuse()

    __array__ = __array_ufunc__ = __array_function__ = __getitem__ = __bool__ = __float__ = __int__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __lt__ = __le__ = __gt__ = __ge__ = __len__ = _refuse


class Rooted(Elsewhere):
    """A handle on a value that one worker along some axes holds; the others hold a zero-volume block.

    shape, dtype: of the value, known to all. axes, root: who holds it: the worker at place `root` along `axes`.
    Only collectives take it. Mixing it with arrays is an error.
    """

    __slots__ = ("axes", "block", "dtype", "root", "shape")

    def __init__(self, block: Any, shape: tuple[int, ...], dtype: Any, axes: tuple[str, ...], root: int):
        self.block = block
        self.shape = shape
        self.dtype = dtype
        self.axes = axes
        self.root = root

    def holding(self, block: Any) -> Rooted:
        """This handle on another block: the same value on another level of differentiation."""
        return Rooted(block, self.shape, self.dtype, self.axes, self.root)

    def is_held_as(self, other: Rooted) -> bool:
        """Whether the same workers hold both."""
        return (self.axes, self.root) == (other.axes, other.root)

    def __spmd_describe__(self) -> str:
        return f"Rooted({self.root} along {', '.join(self.axes)}) value {self.dtype}{list(self.shape)}"

    def _mend(self) -> str:
        at = f"x, {as_written(self.axes)}, {self.root}"
        return f"spmd.replicate({at}) makes it Invariant, spmd.broadcast({at}) Varying"


def as_written(axes: tuple[str, ...]) -> str:
    """Axes as an argument."""
    return repr(axes[0] if len(axes) == 1 else axes)


def dtype_of(block: Any) -> Any:
    """The dtype of a value, as its library names it."""
    return block.dtype if frontend(block) is not None else np.result_type(getattr(block, "dtype", block))


def rooted(x: Any, names: tuple[str, ...], root: int, where: str, argument: str = "root") -> Rooted:
    """x, a value that is Rooted there, or an error. argument: the one that says where."""
    if type(x) is Rooted and x.axes == names and x.root == root:
        return x
    mend = x.as_rooted if isinstance(x, Elsewhere) else Elsewhere.as_rooted
    if type(x) is Rooted:
        axes = "" if x.axes == names else f"axis_name={as_written(x.axes)}, "
        mend = f"{axes}{argument}={x.root}, where it is"
        mend += "" if axes else f"; or spmd.move(x, {as_written(names)}, {x.root}, {root}) first"
    raise StateError.at(
        f"spmd.{where}",
        argument="x",
        got=describe(x),
        need=f"a value that is Rooted({root}) along {' and '.join(map(repr, names))}",
        mend=mend,
    )
