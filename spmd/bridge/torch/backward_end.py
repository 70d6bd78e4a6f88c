"""What sums gradients in backward: on which worker it acts, and when a backward ends."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch

from spmd.bridge.torch.worker_context import WorkerContext, assigned, context_of
from spmd.errors import MeshError
from spmd.mesh import WORKER, Worker

__all__ = ["FollowsBackward", "Token"]

_engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


class Token:
    """Lives as long as a backward: its final callback holds it, and torch drops both if backward raises."""

    __slots__ = ("__weakref__",)


class FollowsBackward:
    """Base of what sums the gradients of one worker's module in backward.

    context: of the worker, for which threads of torch act. token: of the backward that runs.
    A subclass says in `_abort` what happens if backward raises, and in `_end` what happens at its end.
    """

    _bond: ClassVar[tuple[str, str, str]]
    """The user's function, what binds the module to its worker, and what to do on another one: for errors."""
    context: WorkerContext
    token: weakref.ref[Token] | None = None

    def bind(self, worker: Worker, new: bool = False) -> None:
        """Act for this worker from now on. Raises MeshError if the module was made on another worker."""
        if not new and (worker.index != self.context.index or worker.mesh != self.context.mesh):
            raise self._bound_elsewhere(worker)
        if new or self.context.worker is not worker:
            self.context = context_of(worker)

    def _bound_elsewhere(self, worker: Worker) -> MeshError:
        where, bond, mend = self._bond
        own = self.context
        return MeshError.at(
            f"a module of {where}",
            got=f"{worker.mesh.describe(worker.index)} of {worker.mesh}",
            need=f"{own.mesh.describe(own.index)} of {own.mesh}, {bond}",
            mend=mend,
        )

    @contextmanager
    def acting(self) -> Iterator[Worker]:
        """The worker, set as the current one; threads of torch run parts of backward."""
        worker = self.context.acting_worker()
        with nullcontext() if WORKER.get() is worker else assigned(WORKER, worker):
            yield worker

    def follow_backward(self) -> bool:
        """Call `_end` at the end of the backward that runs, or `_abort` if it raises. Returns False if it will be."""
        if self.token is not None and self.token() is not None:
            return False
        token, reference = Token(), weakref.ref(self)

        def raised(_: Any) -> None:
            follower = reference()
            if follower is not None:
                follower._abort()

        self.token = weakref.ref(token, raised)
        _engine.queue_callback(partial(self._end, token))
        return True

    def _abort(self) -> None:
        raise NotImplementedError

    def _end(self, token: Token) -> None:
        raise NotImplementedError
