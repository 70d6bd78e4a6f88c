"""Virtual workers whose blocks are on GPUs: the rendezvous of `local`, with ordered streams.

Each worker records an event after its contribution. The stream of the last worker to come waits for all of these
events. That worker computes the result and records another event, for which the other streams wait. The host never
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from spmd import kernels
from spmd.cuda import Place
from spmd.kernels import on_device
from spmd.transport.base import Comm
from spmd.transport.call import Call, Group
from spmd.transport.handles import Handle, read_only
from spmd.transport.local.comm import LocalComm, handed
from spmd.transport.local.rendezvous import Rendezvous, Run, Waiting
from spmd.transport.plan import NeedsLengths, Plan

__all__ = ["DeviceComm"]


class Contribution(NamedTuple):
    """A worker's contribution, and the event recorded after it: None without device arrays."""

    payload: Any
    place: Place
    event: Any


class CombinedResult(NamedTuple):
    """The result, the place of the worker that computed it, and the event recorded after it."""

    result: Any
    place: Place
    event: Any


class BorrowedArrays:
    """A list or dict of other workers' arrays, borrowed when they are read."""

    __slots__ = ("borrow", "inner")

    def __init__(self, inner: Any, borrow: Callable[[Any], Any]):
        self.inner = inner
        self.borrow = borrow

    def __getitem__(self, k: Any) -> Any:
        return list(map(self.borrow, self.inner[k])) if isinstance(k, slice) else self.borrow(self.inner[k])

    def pop(self, k: Any) -> Any:
        return self.borrow(self.inner.pop(k))

    def __contains__(self, k: object) -> bool:
        return k in self.inner

    def __iter__(self) -> Iterator[Any]:
        return map(self.borrow, self.inner)

    def __len__(self) -> int:
        return len(self.inner)


class RendezvousView:
    """The contributions and the result of a rendezvous, borrowed by one worker."""

    __slots__ = ("contributions", "result")

    def __init__(self, contributions: Any, result: Any):
        self.contributions = contributions
        self.result = result


class StreamWaiting(Waiting):
    """A handle that restores this worker's current stream: other workers may have run in this thread."""

    __slots__ = ()

    def wait(self) -> Any:
        try:
            return super().wait()
        except BaseException:
            self.comm.place.enter()  # type: ignore[attr-defined]
            raise


class DeviceComm(LocalComm):
    """A virtual worker's `Comm`. place: its device and stream. callers: gives the caller's place on a device."""

    def __init__(self, run: Run, worker: int, place: Place, callers: Callable[[int], Place]):
        super().__init__(run, worker)
        self.place = place
        self.caller = callers(place.device)

    def given(self, x: Any) -> Any:
        return self.place.borrow(x, self.caller)

    def returned(self, x: Any) -> Any:
        """A result of the body, borrowed by the caller."""
        return self.caller.borrow(x, self.place)

    def _meet(self, group: Group, call: Call, payload: Any, take: Callable[[Rendezvous], Any], finish=None) -> Handle:
        if group.size == 1:
            return super()._meet(group, call, payload, take, finish)
        place = self.place

        def view(contributions: list[Contribution]) -> BorrowedArrays:
            return BorrowedArrays(contributions, lambda b: self._borrow(b.payload, b.place))

        def complete(contributions: list[Contribution]) -> CombinedResult:
            events = [b.event for b in contributions if b.event is not None]
            for b in contributions:
                if b.event is not None and b.place != place:
                    place.stream.wait_event(b.event)
            result = finish(view(contributions)) if finish is not None else None
            return CombinedResult(result, place, place.mark() if events else None)

        def take_on_device(rendezvous: Rendezvous) -> Any:
            place.enter()
            combined: CombinedResult = rendezvous.result
            if combined.event is not None and combined.place != place:
                place.stream.wait_event(combined.event)
            result = combined.result if combined.place == place else place.borrow(combined.result, combined.place)
            return take(RendezvousView(view(rendezvous.contributions), result))  # type: ignore[arg-type]

        own = Contribution(payload, place, place.mark() if _has_arrays(payload) else None)
        return StreamWaiting(self, self.execution.post(self, group, call, own, complete), take_on_device)

    def _run(self, plan: Plan, call: Call, x: Any) -> Handle:
        """Each worker creates its new block on its own device."""
        return Comm._run(self, plan, call, x)

    def _run_with_lengths(self, needs: NeedsLengths, call: Call, x: Any) -> Handle:
        """In two rendezvous: the parts to send are ordered on this worker's stream."""
        return Comm._run_with_lengths(self, needs, call, x)

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[Any], spare: Sequence[bool]) -> Handle:
        """No sum overwrites a block: streams may still read it."""

        def finish(all_xs: list[Sequence[Any]]) -> list[Any]:
            return [read_only(kernels.of(blocks[0]).combine(blocks)) for blocks in zip(*all_xs, strict=True)]

        return self._meet(group, call, [read_only(x) for x in xs], lambda m: m.result, finish)

    def _reduce(self, group: Group, call: Call, x: Any, root: int) -> Handle:
        """The root computes the sum on its own device."""

        def take(m: Rendezvous) -> Any:
            return read_only(kernels.of(x).combine(list(m.contributions))) if group.index == root else None

        return self._meet(group, call, read_only(x) if group.index == root else handed(call, x), take)

    def _borrow(self, x: Any, home: Place) -> Any:
        if isinstance(x, list | dict):
            return BorrowedArrays(x, lambda y: self._borrow(y, home))
        return x if home == self.place else self.place.borrow(x, home)


def _has_arrays(payload: Any) -> bool:
    if isinstance(payload, list | tuple):
        return any(map(on_device, payload))
    if isinstance(payload, dict):
        return any(map(on_device, payload.values()))
    return on_device(payload)
