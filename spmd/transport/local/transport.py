"""Virtual workers of this process, with two schedulers.

Workers meet in a `Rendezvous`: each leaves its block there, the last to come completes it, and each takes its result.
Blocks are passed on read-only, and copied only where they are borrowed. The last to come makes new blocks for all, so
nobody needs the others' blocks afterwards.

`lockstep` runs the workers as greenlets of one thread: the order is deterministic, a switch costs about 1 us, and a
deadlock shows at once. `threads` runs them in a persistent pool. In both, a deadlock is reported with what each waits
for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmd.transport.base import Comm, Transport
from spmd.transport.blas_threads import blas_threads, share_of_cores
from spmd.transport.call import ONE_BY_ONE
from spmd.transport.handles import Outcome
from spmd.transport.local.comm import LocalComm
from spmd.transport.local.lockstep import LockstepRun
from spmd.transport.local.threads import ThreadRun

if TYPE_CHECKING:
    from spmd.cuda import Places

__all__ = ["LocalTransport"]


class LocalTransport(Transport):
    """n virtual workers in this process. places: the GPUs of their arrays, if any."""

    name = "local"

    def __init__(self, size: int, places: Places | None = None):
        self.size = size
        self.local = range(size)
        self.places = places

    def threads(self) -> int:
        return share_of_cores(self.size)

    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        in_threads = scheduler == "threads" and self.size > 1
        execution = (
            ThreadRun(self.size, describe) if in_threads else LockstepRun(self.size, describe, scheduler == ONE_BY_ONE)
        )
        limit = blas_threads(self.threads())
        with limit, limit:
            try:
                if self.places is not None:
                    return self._on_devices(execution, body)
                execution.comms = [LocalComm(execution, w) for w in range(self.size)]
                return execution.execute(body)
            finally:
                execution.close()

    def _on_devices(self, execution: LockstepRun | ThreadRun, body: Callable[[Comm], Any]) -> Outcome:
        """Run each worker on its own stream, between the caller's earlier and later work."""
        from spmd.transport.local.gpu import DeviceComm

        places = self.places
        assert places is not None

        def work(comm: Any) -> Any:
            comm.place.enter()
            return comm.returned(body(comm))

        with places.joined(self.size) as callers:
            execution.comms = [DeviceComm(execution, w, places(w), callers) for w in range(self.size)]
            return execution.execute(work)

    def share(self, local: dict[int, Any]) -> dict[int, Any]:
        return local
