"""Frontends: the array libraries that bodies may be written in, besides NumPy.

A library registers the class of its arrays here, as `spmd.bridge.torch` does when it is imported. Functions of bodies
call `frontend(x)` for everything that depends on the library, such as differentiation and states. The `worker` of these
methods is the `spmd.mesh.Worker` that runs the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from spmd.state import State

__all__ = ["Frontend", "frontend", "register"]


class Frontend(Protocol):
    """The operations that functions of bodies need on the arrays of a library."""

    @property
    def namespace(self) -> Any:
        """The functions of the Array API standard on these arrays."""
        ...

    def local(self, family: str) -> Any:
        """The module of a family of local functions: see `spmd.functions.local`."""
        ...

    def run_layer(self, layer: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """layer(*args, **kwargs), with the arrays in the dtypes in which the library computes such a layer."""
        ...

    def begin(self, op: Any, x: Any, worker: Any, frame: FrameType | None) -> Callable[[], Any]:
        """Start a collective on this worker's block; the function returned finishes it. Checks states."""
        ...

    def state(self, x: Any) -> State:
        """The state of an array in a body that tracks states; Invariant if the array carries none."""
        ...

    def vary(self, x: Any, names: Sequence[str], worker: Any) -> Any:
        """x as one value per worker along these axes; its cotangents are summed over them."""
        ...

    def declare(self, x: Any, names: Sequence[str], worker: Any) -> Any:
        """Declare that bare data differs between workers along these axes; an array with a state is varied."""
        ...

    def carrying(self, value: Any, state: State, tracked: bool) -> Any:
        """A number or a NumPy array, as an array of this library with a state where states are tracked."""
        ...

    def dtype(self, x: Any) -> np.dtype:
        """The NumPy dtype of an array."""
        ...

    def tied(self, x: Any, others: Sequence[Any]) -> Any:
        """x, with a backward pass that reaches the other arrays too, with cotangents of zero."""
        ...

    def differentiated(self, x: Any) -> Any:
        """x, with a backward pass where anything may have one, whatever it was made of."""
        ...

    def where(self, mask: Any, x: Any, y: Any) -> Any:
        """x where a NumPy mask is true, y elsewhere."""
        ...

    def bare(self, x: Any) -> Any:
        """The data alone, without state or history."""
        ...

    def data(self, x: Any) -> Any:
        """The data as a NumPy or CuPy array, for reading only; None where there is no data to read."""
        ...

    def owner(self, x: Any) -> Any:
        """An object that exists as long as the memory of an array; None where there is no data to read."""
        ...

    def cast(self, x: Any, dtype: np.dtype) -> Any:
        """x in the dtype that corresponds to this NumPy dtype."""
        ...

    def sized(self, x: Any, shape: tuple[int, ...]) -> Any:
        """x, which has this shape, as layouts say: where its own is not known before a compiled graph runs."""
        ...

    def stack(self, xs: Sequence[Any]) -> Any:
        """Arrays of one shape as one, along a new first dimension."""
        ...

    def total(self, x: Any, dims: tuple[int, ...], dtype: np.dtype | None = None) -> Any:
        """The sum over dimensions in this NumPy dtype; None: in the dtype that the library chooses."""
        ...

    def extremum(self, x: Any, dims: tuple[int, ...], how: str) -> Any:
        """The largest ("max") or smallest ("min") entry over dimensions."""
        ...


_registered: dict[type, Frontend] = {}
_by_class: dict[type, Frontend | None] = {}


def register(cls: type, frontend: Frontend) -> None:
    """Admit arrays of this class, and of classes derived from it, in bodies."""
    _registered[cls] = frontend
    _by_class.clear()


def frontend(x: object) -> Frontend | None:
    """The frontend of an array; None for NumPy's arrays and other unregistered classes."""
    if not _registered:
        return None
    cls = type(x)
    if cls not in _by_class:
        _by_class[cls] = next((_registered[k] for k in cls.__mro__ if k in _registered), None)
    return _by_class[cls]
