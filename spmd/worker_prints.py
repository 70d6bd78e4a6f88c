"""What the workers of a body print, in their order."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

import numpy as np

from spmd.autodiff.staging.recorder import slot_of
from spmd.autodiff.staging.together import RECORDING
from spmd.autodiff.tracer import Array, value_of
from spmd.axes import is_main
from spmd.device import to_host
from spmd.errors import JitError, MeshError
from spmd.mesh import WORKER, Worker
from spmd.transport.call import Call

__all__ = ["print_by_worker"]

_WHERE = "spmd.debug.print"


def print_by_worker(
    values: Sequence[Any], sep: str, end: str, file: TextIO | None, only: int | Mapping[str, int] | None
) -> None:
    """See `spmd.debug.print`."""
    worker = WORKER.get()
    if worker is None:
        _print_outside(values, sep, end, file)
        return
    if only is not None and not _is_meant(worker, only):
        return
    bare = tuple(map(value_of, values))
    if worker.program is None:
        _print_here(bare, sep, end, file, only is None)
    else:
        worker.program.call(_print_here, (bare, sep, end, file, only is None), effect=True)


def _print_outside(values: Sequence[Any], sep: str, end: str, file: TextIO | None) -> None:
    if RECORDING.get() is not None:
        raise JitError.at(
            _WHERE,
            got="a call within spmd.jit, outside of any body",
            need="values, which a function that is recorded does not have",
            mend="call it in the body of a map, or on what the jitted function returns",
        )
    if is_main():
        print(*map(_text, values), sep=sep, end=end, file=file)


def _is_meant(worker: Worker, only: int | Mapping[str, int]) -> bool:
    """Whether `only` names this worker."""
    axes = worker.mesh.axes
    if isinstance(only, Mapping):
        if all(n in axes and 0 <= k < axes[n] for n, k in only.items()):
            return all(worker.coordinates[n] == k for n, k in only.items())
    elif isinstance(only, int | np.integer) and 0 <= only < worker.mesh.size:
        return worker.index == only
    name = next(iter(axes), "x")
    raise MeshError.at(
        _WHERE,
        argument="only",
        got=repr(only),
        need=f"the number of a worker, less than {worker.mesh.size}, or indices along axes of {worker.mesh}",
        mend=f"only=0, or only={{{name!r}: 0}}",
    )


def _print_here(values: Sequence[Any], sep: str, end: str, file: TextIO | None, in_order: bool) -> None:
    """Print what this worker has; in order: at the first worker, with what the others have."""
    worker = WORKER.get()
    assert worker is not None
    text = _with_place(worker, sep.join(map(_text, values)) + end)
    excluded = getattr(worker.comm, "axes", ())  # inside spmd.at_root only the root runs
    group = worker.group(tuple(n for n in worker.mesh.axes if n not in excluded))
    if in_order and group.size > 1:
        own = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        call = Call(_WHERE, group.axes, own.dtype, own.shape, same_shape=None, frame=sys._getframe(2))
        texts = worker.comm.gather(group, call, own, 0).wait()
        if group.index:
            return
        text = "".join(bytes(to_host(t)).decode("utf-8", "surrogatepass") for t in texts)
    print(text, end="", file=file, flush=True)


def _with_place(worker: Worker, text: str) -> str:
    """A text with the place of the worker in front; its other lines are indented."""
    place = ",".join(f"{n}={k}" for n, k in worker.coordinates.items()) or "worker 0"
    mark = f"[{place}] "
    first, *lines = text.split("\n")
    return "\n".join([mark + first, *(" " * len(mark) + line if line else line for line in lines)])


def _text(value: Any) -> str:
    """A value as `print` shows it. Arrays that have a derivative show their values only."""
    value = slot_of(value_of(value) if type(value) is Array else value)
    if hasattr(value, "detach"):
        value = value.detach()
    return str(value)
