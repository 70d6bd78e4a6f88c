"""Read ahead in a background thread."""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from spmd.mesh import WORKER

__all__ = ["Prefetched"]


class Prefetched(Iterator[Any]):
    """read(step) for the steps of a range, up to `depth` of them ahead in a thread; with depth 0 when they are needed.

    An error of `read` is raised where its step is needed, with `note(step)` added. The thread ends at the end of the
    range, at an error, by `close`, and when the iterator is no longer referred to, so also when a loop is left. It has
    the context variables of the program, but is no worker: in it a collective is an error.
    """

    def __init__(self, read: Callable[[int], Any], steps: range, depth: int, note: Callable[[int], str]):
        self._read, self._note, self._steps = read, note, iter(steps)
        self._ahead = _Ahead(read, steps, depth) if depth and steps else None
        # It also runs at the end of the program.
        self._finalizer = None if self._ahead is None else weakref.finalize(self, self._ahead.close)

    def __next__(self) -> Any:
        try:
            step = next(self._steps)
        except StopIteration:
            self.close()
            raise
        if self._ahead is None:
            result, error = _tried(self._read, step)
        else:
            result, error = self._ahead.take()
        if error is None:
            return result
        self.close()
        if isinstance(error, StopIteration):  # it would end the loop of the program
            error = _as_runtime_error(error)
        error.add_note(self._note(step))
        raise error

    def close(self) -> None:
        """End the thread, after the step that it reads now. No further step is given."""
        self._steps = iter(())
        if self._finalizer is not None:
            self._finalizer()


class _Ahead:
    """The results that have been read and not taken, and the thread that reads. It does not refer to the iterator."""

    def __init__(self, read: Callable[[int], Any], steps: range, depth: int):
        self._changed = threading.Condition()
        self._results: deque[tuple[Any, BaseException | None]] = deque()
        self._depth, self._closed = depth, False
        context = contextvars.copy_context()
        context.run(WORKER.set, None)
        # A daemon: the end of the program does not wait for it, but closes it.
        self._thread = threading.Thread(
            target=context.run, args=(self._run, read, steps), name="spmd.data.Loader", daemon=True
        )
        self._thread.start()

    def _run(self, read: Callable[[int], Any], steps: range) -> None:
        for step in steps:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._results) < self._depth)
                if self._closed:
                    return
            result = _tried(read, step)
            with self._changed:
                self._results.append(result)
                self._changed.notify_all()
            if result[1] is not None:
                return

    def take(self) -> tuple[Any, BaseException | None]:
        """The next result, when it has been read."""
        with self._changed:
            self._changed.wait_for(lambda: self._results)
            result = self._results.popleft()
            self._changed.notify_all()
        return result

    def close(self) -> None:
        """End the thread and forget the results."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():  # where garbage is collected in it
            self._thread.join()
        self._results.clear()


def _tried(read: Callable[[int], Any], step: int) -> tuple[Any, BaseException | None]:
    """The result and no error, or no result and the error."""
    try:
        return read(step), None
    except BaseException as error:
        return None, error


def _as_runtime_error(error: StopIteration) -> RuntimeError:
    other = RuntimeError(f"the reader raised {error!r}")
    other.__cause__ = error
    return other
