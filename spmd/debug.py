"""Find errors in programs: `with spmd.debug(...):`."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import _GeneratorContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TextIO

import numpy as np

from spmd.autodiff import apply
from spmd.autodiff.sanitizers import FINITE, WATCHING, check_finite
from spmd.autodiff.tracer import Array
from spmd.device import contiguous, to_host
from spmd.errors import MeshError, NonFiniteError, ReplicaError, caller, source_line
from spmd.mesh import WORKER
from spmd.resharding import SHOWN
from spmd.state import REPLICAS
from spmd.tracebacks import api_boundary
from spmd.transport.call import Call
from spmd.worker_prints import print_by_worker

__all__ = ["debug"]


class _Debug:
    """Expensive checks for the code inside the block; also a decorator.

    Other checks keep their setting from outside of the block.

    mutation: a tape keeps the bare arrays that its rules need without copying them. Writing to one before the backward
    sweep silently changes the gradient. This check takes a checksum of each array when it is recorded, and compares it
    when a backward sweep begins. A MutationError names the function and the line that recorded the array. It costs two
    passes over all recorded arrays.

    nans: stop at the first NaN or infinity ("nan": at NaNs only) in arrays of bodies, traced arrays and cotangents.
    A NonFiniteError names the operation, the line, the worker and the index; for a cotangent the line that recorded its
    operation. It costs a pass over every result. Bare arrays, such as those of a map with check=False, are not checked.

    replicas: compare every Invariant array of a body with those of the other workers, which should be equal. All
    workers must make the same arrays: an array that only one makes, for example to print a sum, waits for the others
    forever. Put that into `at_root`, or use bare data, `spmd.block(x)`. A ReplicaError at the first difference names
    the line, two workers and the first differing index. It costs a small message per result.

    reshards: print, to standard error, each global array that is laid out anew: the line, the layouts, the operators
    that do it, and how many messages and bytes all workers send for it.

        with spmd.debug(mutation=True):
            value, pull = spmd.vjp(f, x)
            x += 1          # f(x) was recorded with the old x
            pull(1.0)       # MutationError

    `spmd.debug.print(x)`, in a body, says which worker prints, in the order of the workers:

        >>> with spmd.Mesh(x=2):
        ...     y = spmd.map(lambda x: spmd.debug.print("sum", x.sum()), P("x"), None)(np.arange(4.0))
        [x=0] sum 1.0
        [x=1] sum 5.0
    """

    @api_boundary
    def __call__(
        self,
        *,
        mutation: bool | None = None,
        nans: bool | str | None = None,
        replicas: bool | None = None,
        reshards: bool | None = None,
    ) -> _GeneratorContextManager[None]:
        if not (nans is None or isinstance(nans, bool) or nans == "nan"):
            raise MeshError.at(
                "spmd.debug", argument="nans", got=repr(nans), need='True, False or "nan"', mend="nans=True for both"
            )
        kinds = {True: "nan or inf", False: ""}[nans] if isinstance(nans, bool) else nans
        return _debugging(mutation, kinds, replicas, reshards)

    @api_boundary
    def print(
        self,
        *values: Any,
        sep: str = " ",
        end: str = "\n",
        file: TextIO | None = None,
        only: int | Mapping[str, int] | None = None,
    ) -> None:
        """`print` in a body, in front of each line the place of the worker: `[data=0,model=1] 3.5`.

        values, sep, end, file: as for `print`; the values of traced arrays are printed. What all workers print comes
        out as one, in the order of their numbers, of the first process under MPI and torchrun.
        only: the number of a worker, or indices along axes, as {"data": 0}: those workers print at once, each by
        itself, and nothing is sent.
        Outside of bodies the first process prints, and nothing stands in front.
        In `spmd.jit` of a map it prints at each call. Where `spmd.checkpoint` runs a body again, it prints again.
        Collective along all axes of the map without `only`: every worker must call it, as often as the others; in
        `spmd.at_root` the root alone prints. Cost: a message from each worker but the first.
        Raises MeshError for workers that do not exist, JitError within `spmd.jit` outside of bodies.
        """
        print_by_worker(values, sep, end, file, only)


debug = _Debug()


@contextmanager
def _debugging(
    mutation: bool | None, kinds: str | None, replicas: bool | None, reshards: bool | None
) -> Iterator[None]:
    settings: list[tuple[ContextVar[Any], Any]] = [
        *((WATCHING, mutation), (FINITE, kinds)),
        *((REPLICAS, replicas), (SHOWN, reshards)),
    ]
    tokens = [(variable, variable.set(value)) for variable, value in settings if value is not None]
    checks_arrays = bool(kinds or replicas)
    _count_checks(checks_arrays)
    try:
        yield
    finally:
        _count_checks(-checks_arrays)
        for variable, token in tokens:
            variable.reset(token)


_plain_init: Any = Array.__init__
_lock = threading.RLock()
_check_count = 0


def _count_checks(count: int) -> None:
    """Count the blocks in which every new array is checked. Outside of them making an array costs nothing more."""
    global _check_count
    with _lock:
        _check_count += count
        Array.__init__ = _checking_init if _check_count else _plain_init  # type: ignore[method-assign]
        apply.looked_at = bool(_check_count)


def _checking_init(self: Array, value, state=None, tape=None, node=None) -> None:
    _plain_init(self, value, state, tape, node)
    if type(value) is Array:
        return
    kinds = FINITE.get()
    if kinds:
        try:
            check_finite(value, kinds, _operation_text)
        except NonFiniteError as error:
            if not str(error).startswith("empty"):  # np.empty_like is uninitialised
                raise
    if state is not None and REPLICAS.get():
        _compare_replicas(self, value)


_NAMES = ("prim", "op", "fun", "ufunc")


def _operation_text() -> str:
    """The operation that makes the result, and the line of the user's code."""
    name, frame = "", sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").split(".", 1)[0] == "spmd":
        for local in _NAMES:
            value = frame.f_locals.get(local)
            text = getattr(value, "name", None) or getattr(value, "function", None) or getattr(value, "__name__", None)
            if not name and isinstance(text, str):
                name = text
        frame = frame.f_back
    if not name:
        return "an argument"
    user = caller(sys._getframe(1))
    return name + (f" at {source_line(user.f_code, user.f_lasti)}" if user is not None else "")


def _compare_replicas(x: Array, value) -> None:
    """Raise if an Invariant array is not the same on all workers."""
    worker = WORKER.get()
    if worker is None:
        return
    excluded = getattr(worker.comm, "axes", ())  # inside spmd.at_root only the root runs
    axes = tuple(n for n in worker.mesh.axes if n not in x.state.varying and n not in excluded)
    group = worker.group(axes)
    if group.size == 1:
        return
    token = REPLICAS.set(False)
    try:
        block = contiguous(value)
        call = Call(
            "spmd.debug(replicas=True)", axes, block.dtype, block.shape, same_shape=None, frame=sys._getframe(2)
        )
        others = [to_host(x) for x in worker.comm.all_gather(group, call, block).wait()]
    finally:
        REPLICAS.reset(token)
    holders = _holders(worker, group, [other.shape for other in others])
    one = holders[0]
    for k in holders[1:]:
        first, other = others[one], others[k]
        if other.shape != first.shape:
            texts = [f"of shape {list(o.shape)}" for o in (first, other)]
            raise _differs(worker, (group.members[one], group.members[k]), texts, axes)
        differ = ~((other == first) | ((other != other) & (first != first)))
        if differ.any():
            index = tuple(int(i) for i in np.argwhere(differ)[0]) if differ.ndim else ()
            texts = [f"with {o[index]} at {index}" for o in (first, other)]
            texts[1] += f"; {int(differ.sum())} of {differ.size} entries differ"
            raise _differs(worker, (group.members[one], group.members[k]), texts, axes)


def _holders(worker, group, shapes: list[tuple[int, ...]]) -> list[int]:
    """The workers that should hold one value. A Rooted value counts at one index along its axes only."""
    holding = [k for k, shape in enumerate(shapes) if shape != (0,)]
    places = [worker.mesh.coordinates(group.members[k]) for k in holding]
    counts = [len({place[n] for place in places}) for n in group.axes]
    is_rooted = all(count in (1, worker.mesh.axes[n]) for count, n in zip(counts, group.axes, strict=True))
    return holding if is_rooted and math.prod(counts) == len(holding) else [*range(group.size)]


def _differs(worker, members: tuple[int, int], texts: list[str], axes: tuple[str, ...]) -> ReplicaError:
    (first, second), (one, other) = texts, map(worker.mesh.describe, members)
    return ReplicaError.at(
        _operation_text(),
        got=f"an Invariant array {first} on {one}, and on {other} {second}",
        need=f"one value along {' and '.join(map(repr, axes))}, within spmd.debug(replicas=True)",
        mend="data made from a worker's place, from random numbers, files or the clock is Varying: declare it with "
        "spmd.varying(a, axis_name)",
    )
