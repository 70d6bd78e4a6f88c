"""Arrays of other libraries in bodies: who applies an operator to them.

Bodies are written in NumPy's syntax, and in that of any library that has registered the class of its arrays here, as
`spmd.bridge.torch` does when it is imported. The functions of bodies ask `frontend(x)`, and leave to it what differs:
how such an array is differentiated, and where it keeps its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from spmd.mesh import Worker
    from spmd.state import State

__all__ = ["Frontend", "frontend", "register"]


class Frontend(Protocol):
    """What the functions of bodies ask of the arrays of another library."""

    def begin(self, op: Any, x: Any, worker: Worker, frame: FrameType | None) -> Callable[[], Any]:
        """Start a collective on this worker's block, and say how to finish. Checks states as for NumPy's arrays."""
        ...

    def state(self, x: Any) -> State:
        """The state of an array of a body that tracks states; Invariant if it carries none."""
        ...

    def vary(self, x: Any, names: Sequence[str], worker: Worker) -> Any:
        """x as one value per worker along these axes; its cotangents are summed over them."""
        ...

    def declare(self, x: Any, names: Sequence[str], worker: Worker) -> Any:
        """Bare data that differs from worker to worker along these axes; what carries a state already is varied."""
        ...

    def carrying(self, value: Any, state: State, tracked: bool) -> Any:
        """A number or an array of NumPy that comes up in a body of this library, as such bodies have them."""
        ...

    def dtype(self, x: Any) -> np.dtype:
        """NumPy's dtype of an array."""
        ...

    def tied(self, x: Any, others: Sequence[Any]) -> Any:
        """x, whose backward goes through the others too, with cotangents of zero."""
        ...

    def where(self, mask: Any, x: Any, y: Any) -> Any:
        """x where a mask of NumPy's is true, y elsewhere."""
        ...

    def bare(self, x: Any) -> Any:
        """The data alone, without state or history."""
        ...

    def data(self, x: Any) -> Any:
        """The data as an array of NumPy or CuPy that nobody writes to through it; None where it is not at hand."""
        ...

    def cast(self, x: Any, dtype: np.dtype) -> Any:
        """x in the dtype of its library that is this one of NumPy's."""
        ...

    def total(self, x: Any, dims: tuple[int, ...], dtype: np.dtype | None = None) -> Any:
        """The sum over dimensions, in this dtype of NumPy's; None: that of the library's sums."""
        ...

    def extremum(self, x: Any, dims: tuple[int, ...], how: str) -> Any:
        """The largest ("max") or smallest ("min") entry over dimensions."""
        ...


_registered: dict[type, Frontend] = {}
_found: dict[type, Frontend | None] = {}


def register(kind: type, by: Frontend) -> None:
    """From now on arrays of this class, and of those derived from it, are admitted in bodies."""
    _registered[kind] = by
    _found.clear()


def frontend(x: object) -> Frontend | None:
    """Whoever speaks for an array of another library; None for what no library has registered."""
    if not _registered:
        return None
    kind = type(x)
    if kind not in _found:
        _found[kind] = next((_registered[k] for k in kind.__mro__ if k in _registered), None)
    return _found[kind]
