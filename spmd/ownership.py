"""Who may write to an array: frozen arrays, copies, and memory that nobody else uses."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from spmd.autodiff.admission import BARE, admit
from spmd.device import copied
from spmd.errors import (
    LayoutError,
    StateError,
    describe,
)
from spmd.kernels import on_device
from spmd.kernels.memory.pool import Lease
from spmd.tracebacks import api_boundary
from spmd.transport.handles import sealed

__all__ = ["Frozen", "freeze", "owned", "reclaimed", "thaw"]


class Frozen(np.ndarray):
    """An array whose owner has promised not to write to it any more."""


BARE.add(Frozen)


@api_boundary
def freeze(a: np.ndarray) -> np.ndarray:
    """Promise that nobody writes to `a` any more: maps then share it with their bodies instead of copying it.

    Gives a read-only view; writing to `a` through another view afterwards breaks the promise.
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
    """x as an array that may be written to: in a body with check=False, for libraries that work in place.

    x: a bare array, of NumPy or CuPy. What collectives and maps give is read-only, for others may have it too.
    Gives a C-contiguous array of the same shape and dtype. That is x itself where nobody else has it, not even by a
    name: `f = scipy.fft.fft(spmd.thaw(spmd.repartition(f, old, new)), overwrite_x=True)` copies nothing. (Python tells
    so up to 3.13.) Otherwise it is a copy; large ones lie in memory that is used again, which is there in a third of
    the time that `np.array(x)` takes.
    Raises StateError for anything else: of an array of a body `spmd.block(x)` is the bare one.
    """
    if type(x) is np.ndarray and sys.getrefcount(x) == _ALONE and _made_writable(x):
        return x
    _check_bare(x)
    return copied(x if on_device(x) else np.asarray(x))


@api_boundary
def _check_bare(x: Any) -> None:
    """Raise where `thaw` is given no bare array."""
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
    """How many references a function finds to an argument that nobody else has. -1 where it finds no more to one that
    its caller keeps, as Python does that lends its variables, and where somebody looks on who holds it too."""
    kept = object()
    return 2 if _references(object()) == 2 and _references(kept) == 3 else -1


_ALONE = _references_alone()


def reclaimed(blocks: list[np.ndarray], k: int) -> bool:
    """Whether nobody but this list has an array of NumPy, or one that lies in its memory. Then it may be written to."""
    if _ALONE != 2 or type(blocks[k]) is not np.ndarray or sys.getrefcount(blocks[k]) != 2:
        return False
    return _made_writable(blocks[k])


def _made_writable(x: np.ndarray) -> bool:
    """Make x writable where no other array lies in its memory, and that is not much larger: whether it is so."""
    if not x.flags.c_contiguous:
        return False
    views, root = [x], x
    while not root.flags.owndata:
        base: Any = root.base
        # That of the view, this name, and the one that is asked; and it may stay at hand.
        if sys.getrefcount(base) != 3 + getattr(base, "at_hand", 0):
            return False
        root = base
        if type(base) is Lease:
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
    """A C-contiguous read-only array with the data of a: a copy, unless the owner has frozen it."""
    bare = np.asarray(a)
    if isinstance(a, Frozen) and not a.flags.writeable and a.flags.c_contiguous:
        return bare
    return sealed(copied(bare))
