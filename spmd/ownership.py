"""Which arrays may be written to: frozen arrays, owned copies, donated ones, and memory that nothing else uses."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from spmd.autodiff.admission import BARE, admit
from spmd.autodiff.staging.recorder import is_slot
from spmd.device import contiguous, copied
from spmd.errors import DonatedError, LayoutError, StateError, describe
from spmd.kernels import on_device
from spmd.kernels.memory.pool import PooledBase
from spmd.tracebacks import api_boundary
from spmd.transport.handles import read_only

__all__ = ["DONATED", "Frozen", "donated_error", "freeze", "owned", "reclaimed", "thaw"]


class Frozen(np.ndarray):
    """An array whose owner has promised not to write to it any more."""


BARE.add(Frozen)


@api_boundary
def freeze(a: np.ndarray) -> np.ndarray:
    """Promise not to write to `a` any more, so that maps share it with their bodies instead of copying it.

    Returns a read-only view. Writing to `a` through another view breaks the promise.

        >>> a = spmd.freeze(np.arange(4.0))
        >>> a.flags.writeable
        False
        >>> with spmd.Mesh(x=2):
        ...     spmd.put(a, P("x"))
        PartitionedArray([0., 1., 2., 3.], dtype=float64, spec=P('x'))
    """
    if on_device(a):
        raise LayoutError.at(
            "spmd.freeze",
            argument="a",
            got=describe(a),
            need="an array of NumPy, which can be made read-only",
            mend="spmd.put(a, spec): blocks that are on the mesh already are not copied again",
        )
    view = np.asarray(admit(a, "spmd.freeze", "a")).view(Frozen)
    view.flags.writeable = False
    return view


def thaw(x: np.ndarray) -> np.ndarray:
    """x as a writable array, for libraries that work in place, in a body with check=False.

    x: a bare NumPy or CuPy array. Results of collectives and maps are read-only, because others may hold them too.
    Returns a C-contiguous array of the same shape and dtype. It is x itself if nothing else refers to x, not even a
    name: `f = scipy.fft.fft(spmd.thaw(spmd.repartition(f, old, new)), overwrite_x=True)` copies nothing. (Python up to
    3.13 can tell.) Otherwise it is a copy. Large copies lie in reused memory, which takes a third of the time of
    `np.array(x)`. Raises StateError for anything else; the bare array of an array in a body is `spmd.block(x)`.

        >>> def body(x):
        ...     y = spmd.thaw(spmd.shift(x, "x"))
        ...     y *= 2
        ...     return y
        >>> with spmd.Mesh(x=2):
        ...     spmd.map(body, P("x"), P("x"), check=False)(np.arange(4.0))
        PartitionedArray([4., 6., 0., 2.], dtype=float64, spec=P('x'))
    """
    if type(x) is np.ndarray and sys.getrefcount(x) == _ALONE and _made_writable(x):
        return x
    _check_bare(x)
    return copied(x if on_device(x) else np.asarray(x))


@api_boundary
def _check_bare(x: Any) -> None:
    """Raise if the argument of `thaw` is not a bare array."""
    masked = isinstance(x, np.ma.MaskedArray)
    if masked or not (isinstance(x, np.ndarray) or on_device(x)):
        mend = {
            "Array": "spmd.thaw(spmd.block(x)), or x.at[i].set(v), which gives a changed copy",
            "PartitionedArray": "spmd.thaw(x.numpy()), or inside a map of it",
        }.get(type(x).__name__, "x.filled(0) before: a mask is not moved" if masked else "np.asarray(x) before")
        raise StateError.at("spmd.thaw", argument="x", got=describe(x), need="a bare array of NumPy or CuPy", mend=mend)


def _references(x: Any) -> int:
    return sys.getrefcount(x)


def _references_alone() -> int:
    """The reference count of an argument that nothing else refers to.

    -1 if the count is the same for an argument that its caller keeps (Python versions that borrow references), and
    under a debugger or profiler, which holds references too.
    """
    named = object()
    return 2 if _references(object()) == 2 and _references(named) == 3 else -1


_ALONE = _references_alone()


def reclaimed(blocks: list[np.ndarray], k: int) -> bool:
    """Whether nothing but this list refers to a NumPy array or to its memory. The array then becomes writable."""
    if _ALONE != 2 or type(blocks[k]) is not np.ndarray or sys.getrefcount(blocks[k]) != 2:
        return False
    return _made_writable(blocks[k])


def _made_writable(x: np.ndarray) -> bool:
    """Make x writable if no other array uses its memory and the memory is not much larger. Returns whether."""
    if not x.flags.c_contiguous:
        return False
    views, root = [x], x
    while not root.flags.owndata:
        base: Any = root.base
        # References: of the view, of this name, of the call, and of the pool if it caches the memory.
        if sys.getrefcount(base) != 3 + getattr(base, "cached", 0):
            return False
        root = base
        if type(base) is PooledBase:
            break
        if type(base) is not np.ndarray:
            return False
        views.append(base)
    if root.nbytes > 2 * x.nbytes:
        return False
    for view in reversed(views):
        view.setflags(write=True)
    return True


def owned(a: np.ndarray) -> np.ndarray:
    """A C-contiguous read-only array with the data of a: a copy, unless a is frozen."""
    if is_slot(a):
        return contiguous(a)
    bare = np.asarray(a)
    if isinstance(a, Frozen) and not a.flags.writeable and a.flags.c_contiguous:
        return bare
    return read_only(copied(bare))


class _Donated:
    """Stands for the blocks of a donated array, whose memory may be reused."""

    __slots__ = ()

    def _refuse(self, *_: Any) -> Any:
        raise donated_error("a PartitionedArray")

    __getitem__ = __iter__ = __len__ = __contains__ = __bool__ = __getattr__ = __reduce_ex__ = _refuse


DONATED: Any = _Donated()


def donated_error(where: str, argument: str | None = None) -> Exception:
    return DonatedError.at(
        where,
        argument=argument,
        got="an array that was given away (donate=True)",
        need="the one that came in its place",
        mend="params, state = optimizer.update(grads, state, params, donate=True); without donate the old stay",
    )
