"""A virtual worker's view of its transport."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from spmd import kernels
from spmd.device import copied
from spmd.kernels.parallel import split_work
from spmd.transport.call import LEDGERS, Call, Group, Shape
from spmd.transport.handles import Handle, Ready, sealed
from spmd.transport.local.meeting import Meeting, Participant, Waiting, own_error
from spmd.transport.local.run_plan import Recurring
from spmd.transport.plan import Boxes, Eager, Join, Sends, exchange_cost


class LocalComm(Participant):
    """A virtual worker's view: every verb is a meeting."""

    def repeated(self, call: Call, way: Eager, x: np.ndarray) -> Recurring | None:
        return Recurring(call, way, x) if Recurring.serves(way, x) else None

    def _meet(self, group: Group, call: Call, payload: Any, take: Callable[[Meeting], Any], finish=None) -> Handle:
        if group.size == 1:
            alone = Meeting(group)
            alone.payloads = [payload]
            alone.result = finish(alone.payloads) if finish is not None else None
            return Ready(take(alone))
        return Waiting(self, self.run.post(self, group, call, payload, finish), take)

    def meet(self, group: Group, call: Call, shapes: Iterable[Any]) -> list[Any]:
        """Tell every member the shape of what comes for it (None: nothing), and learn theirs."""
        return self._meet(group, call, list(shapes), lambda m: [p[group.index] for p in m.payloads]).wait()

    def _shapes(self, group: Group, call: Call) -> Handle:
        return self._meet(group, call, call.shape, lambda m: list(m.payloads))

    def _each(
        self, group: Group, call: Call, parts: Mapping[int, np.ndarray], make: Make, sums: bool = False
    ) -> Handle:
        """parts[k] goes to member k; the result is what this worker's `make` makes of what comes for it, in the order
        of the senders. The last to come makes it for all. sums: it is as large as one part, not as all together."""

        def finish(brought: list[tuple[Mapping[int, np.ndarray], Make, bool]]) -> list[Any]:
            fresh, sizes, todo = False, [], []
            for k, (_, make, lent) in enumerate(brought):
                received = {s: b[0][k] for s, b in enumerate(brought) if k in b[0]}
                size = 0
                for x in received.values():
                    size = x.nbytes if sums else size + x.nbytes
                sizes.append(size)
                fresh = fresh or lent
                todo.append((make, received))
            brought.clear()
            nbytes = sum(sizes)
            if nbytes < split_work.LEAST:
                return [_tried(make, received, fresh) for make, received in todo]
            tasks = [partial(_tried, make, received, fresh) for make, received in todo]
            return self.run.make(group, nbytes, lambda: split_work.each(tasks, sizes))

        def take(m: Meeting) -> Any:
            mine = m.result[group.index]
            if type(mine) is Failed:
                raise own_error(mine.error)
            m.result[group.index] = None  # so that this may be the only name of what it takes
            return mine

        return self._meet(group, call, ({k: sealed(x) for k, x in parts.items()}, make, call.lent), take, finish)

    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle:
        def finish(xs: list[np.ndarray]):
            combine = kernels.of(x).combine
            if x.nbytes < split_work.LEAST:
                return sealed(combine(xs, how))
            return self.run.make(group, x.nbytes, lambda: sealed(combine(xs, how)))

        return self._meet(group, call, sealed(x), _result, finish)

    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> Handle:
        """Sums are written over blocks of the first worker or the second one, where these can be spared."""

        def finish(brought: list[tuple[Sequence[np.ndarray], Sequence[bool]]]):
            def total(k: int) -> np.ndarray:
                blocks = [xs[k] for xs, _ in brought]
                into = next((x for x, (_, spare) in zip(blocks[:2], brought, strict=False) if spare[k]), None)
                return sealed(kernels.of(blocks[0]).combine(blocks, into=into))

            totals = self.run.make(group, nbytes, lambda: [total(k) for k in range(count)])
            brought.clear()  # The handle may be asked much later.
            return totals

        count, nbytes = len(xs), sum(x.nbytes for x in xs)
        for x, own in zip(xs, spare, strict=True):
            if not own:
                sealed(x)
        return self._meet(group, call, (xs, spare), _result, finish)

    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        def make(received: Mapping[int, np.ndarray], fresh: bool) -> np.ndarray:
            xs = list(received.values())
            return sealed(kernels.of(xs[0]).combine(xs))

        return self._each(group, call, dict(enumerate(parts)), make, sums=True)

    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        return self._meet(group, call, handed(call, x), lambda m: list(m.payloads))

    def _all_gather_as(self, group: Group, call: Call, x: np.ndarray, join: Join) -> Handle:
        def finish(brought: list[tuple[np.ndarray, bool]]):
            xs, fresh = [x for x, _ in brought], any(lent for _, lent in brought)
            return self.run.make(group, sum(x.nbytes for x in xs), lambda: join(xs, fresh))

        return self._meet(group, call, (sealed(x), call.lent), _result, finish)

    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        handed_out = [sealed(p) if k == group.index else handed(call, p) for k, p in enumerate(parts)]
        return self._meet(group, call, handed_out, lambda m: [p[group.index] for p in m.payloads])

    def _all_to_all_as(self, group: Group, call: Call, parts: Sequence[np.ndarray], join: Join) -> Handle:
        def make(received: Mapping[int, np.ndarray], fresh: bool) -> Any:
            return join(list(received.values()), fresh)

        return self._each(group, call, dict(enumerate(parts)), make)

    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        brought = None if x is None else handed(call, x)
        return self._meet(group, call, brought, lambda m: m.payloads[root])

    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        def finish(xs: list[np.ndarray]) -> np.ndarray:
            return self.run.make(group, x.nbytes, lambda: sealed(kernels.of(x).combine(xs)))

        def take(m: Meeting) -> Any:
            if group.index != root:
                return None
            total, m.result = m.result, None
            return total

        return self._meet(group, call, sealed(x), take, finish)

    def _exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray]) -> Handle:
        return self._meet(group, call, _parts(group, call, sends), lambda m: _taken(group, m.payloads))

    def exchange_learnt(self, group: Group, call: Call, sends: Sends) -> Handle | None:
        counted = bool(LEDGERS.get())
        if counted:
            self._count("shapes", 0, 0)

        def parts_for(shapes: Sequence[Shape]) -> tuple[dict[int, np.ndarray], Any]:
            given = sends(shapes)
            cost = exchange_cost(group, given) if counted and given is not None else None
            return _parts(group, call, given or {}), cost

        def finish(brought: list[tuple[Shape, Callable[[Sequence[Shape]], Any]]]):
            shapes = [shape for shape, _ in brought]
            made = [parts_of(shapes) for _, parts_of in brought]
            brought.clear()  # They know the blocks.
            return shapes, [parts for parts, _ in made], [cost for _, cost in made]

        def take(m: Meeting):
            shapes, parts, costs = m.result
            if costs[group.index] is not None:
                self._count("exchange", *costs[group.index])
            return shapes, _taken(group, parts)

        return self._meet(group, call, (call.shape, parts_for), take, finish)

    def _exchange_boxes(self, group: Group, call: Call, sends: Mapping[int, np.ndarray], boxes: Boxes) -> Handle:
        return self._each(group, call, sends, boxes.filled)


Make = Callable[[Mapping[int, np.ndarray], bool], Any]
"""What makes a worker's result of what comes for it, by sender. True: in memory of its own, never in what came."""


class Failed(NamedTuple):
    """In place of a worker's result the error that is its own."""

    error: Exception


def _tried(make: Make, received: Mapping[int, np.ndarray], fresh: bool) -> Any:
    try:
        return make(received, fresh)
    except Exception as error:
        return Failed(error.with_traceback(None))


def _parts(group: Group, call: Call, sends: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """What a member of the group sends, as others may keep it."""
    return {k: sealed(x) if k == group.index else handed(call, x) for k, x in sends.items()}


def _taken(group: Group, parts: Sequence[dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """What all members send this one: out of what they brought, so that it may be the only name of what it takes."""
    return {k: p.pop(group.index) for k, p in enumerate(parts) if group.index in p}


def handed(call: Call, x: np.ndarray) -> np.ndarray:
    """What this worker brings as others may keep it: a copy of what is only lent."""
    return sealed(copied(x) if call.lent else x)


def _result(m: Meeting):
    return m.result
