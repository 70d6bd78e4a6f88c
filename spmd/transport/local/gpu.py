"""Virtual workers whose blocks lie on GPUs: rendezvous as in `local`, with the streams in order.

Each worker records an event after its contribution. The last one to come lets its stream wait for all of them, computes
the result, and records another event, which everyone's stream waits for. The host never waits.
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
from spmd.transport.plan import NeedsShapes, Plan

__all__ = ["DeviceComm"]


class Brought(NamedTuple):
    """A worker's contribution, and the event after it; no event without device arrays."""

    payload: Any
    place: Place
    event: Any


class Made(NamedTuple):
    """The result of the last worker, its place, and the event after it."""

    result: Any
    place: Place
    event: Any


class Purse:
    """Arrays of others in a list or a dict, borrowed when they are taken out."""

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


class _Seen:
    """A rendezvous as one worker sees it."""

    __slots__ = ("contributions", "result")

    def __init__(self, contributions: Any, result: Any):
        self.contributions = contributions
        self.result = result


class Arriving(Waiting):
    """A handle that makes this worker's stream the current one again: others may have run in this thread."""

    __slots__ = ()

    def wait(self) -> Any:
        try:
            return super().wait()
        except BaseException:
            self.comm.place.enter()  # type: ignore[attr-defined]
            raise


class DeviceComm(LocalComm):
    """A virtual worker's `Comm`. place: its device and stream; callers: those of the caller of the map, by device."""

    def __init__(self, run: Run, worker: int, place: Place, callers: Callable[[int], Place]):
        super().__init__(run, worker)
        self.place = place
        self.caller = callers(place.device)

    def given(self, x: Any) -> Any:
        return self.place.borrow(x, self.caller)

    def returned(self, x: Any) -> Any:
        """What the body gives to the caller."""
        return self.caller.borrow(x, self.place)

    def _meet(self, group: Group, call: Call, payload: Any, take: Callable[[Rendezvous], Any], finish=None) -> Handle:
        if group.size == 1:
            return super()._meet(group, call, payload, take, finish)
        place = self.place

        def view(m: list[Brought]) -> Purse:
            return Purse(m, lambda b: self._open(b.payload, b.place))

        def complete(all_brought: list[Brought]) -> Made:
            events = [b.event for b in all_brought if b.event is not None]
            for b in all_brought:
                if b.event is not None and b.place != place:
                    place.stream.wait_event(b.event)
            result = finish(view(all_brought)) if finish is not None else None
            return Made(result, place, place.mark() if events else None)

        def taken(m: Rendezvous) -> Any:
            place.enter()
            combined: Made = m.result
            if combined.event is not None and combined.place != place:
                place.stream.wait_event(combined.event)
            result = combined.result if combined.place == place else place.borrow(combined.result, combined.place)
            return take(_Seen(view(m.contributions), result))  # type: ignore[arg-type]

        own = Brought(payload, place, place.mark() if _has_arrays(payload) else None)
        return Arriving(self, self.execution.post(self, group, call, own, complete), taken)

    def _run(self, plan: Plan, call: Call, x: Any) -> Handle:
        """Each worker makes its new block on its own device."""
        return Comm._run(self, plan, call, x)

    def _run_with_shapes(self, needs: NeedsShapes, call: Call, x: Any) -> Handle:
        """In two rendezvous: what is sent belongs to this worker's stream."""
        return Comm._run_with_shapes(self, needs, call, x)

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[Any], spare: Sequence[bool]) -> Handle:
        """No block is written over: streams may still read it."""

        def finish(all_xs: list[Sequence[Any]]) -> list[Any]:
            return [read_only(kernels.of(one[0]).combine(one)) for one in zip(*all_xs, strict=True)]

        return self._meet(group, call, [read_only(x) for x in xs], lambda m: m.result, finish)

    def _reduce(self, group: Group, call: Call, x: Any, root: int) -> Handle:
        """The root makes the sum on its own device."""

        def take(m: Rendezvous) -> Any:
            return read_only(kernels.of(x).combine(list(m.contributions))) if group.index == root else None

        return self._meet(group, call, read_only(x) if group.index == root else handed(call, x), take)

    def _open(self, x: Any, home: Place) -> Any:
        if isinstance(x, list | dict):
            return Purse(x, lambda y: self._open(y, home))
        return x if home == self.place else self.place.borrow(x, home)


def _has_arrays(payload: Any) -> bool:
    if isinstance(payload, list | tuple):
        return any(map(on_device, payload))
    if isinstance(payload, dict):
        return any(map(on_device, payload.values()))
    return on_device(payload)
