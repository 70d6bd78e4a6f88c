"""What a transport is: few verbs on contiguous buffers, spoken by every worker of a group alike.

A worker holds a `Comm`. Each verb starts a collective and returns a `Handle`; `wait()` gives the result. All members
of a group start the same verbs in the same order; the `Call` that travels with each lets them verify it, and shapes
travel along, so that nobody needs to know the others' blocks beforehand.

Sums are taken in the order of the group's members, whatever the timing: the same inputs give the same bits.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from copy import copy
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from spmd import kernels
from spmd.device import contiguous, copied, zeros
from spmd.errors import DeadlockError, MismatchError, caller, message, source_line
from spmd.layout import Box, block_sizes
from spmd.settings import setting

if TYPE_CHECKING:
    from spmd.autodiff.tree import Leaf

__all__ = [
    "GRADIENTS",
    "LEDGERS",
    "ONE_BY_ONE",
    "Boxes",
    "Call",
    "Comm",
    "Eager",
    "Group",
    "Handle",
    "Make",
    "Observer",
    "Outcome",
    "Ready",
    "Shape",
    "Side",
    "Steps",
    "Transport",
    "all_reduce_cost",
    "checks_are_on",
    "deadlock",
    "gather_cost",
    "mismatch",
    "raised_by",
    "root_cost",
    "scatter_cost",
    "sealed",
]


Shape = tuple[int, ...]


def checks_are_on() -> bool:
    """Whether collectives between processes begin with a check, waits are watched, and what counts as one value is
    compared: not with SPMD_CHECK=0."""
    return setting("SPMD_CHECK")


class Observer(Protocol):
    """Who is told what workers do: see `spmd.ledger`."""

    def operator(self, worker: int, name: str, axes: tuple[str, ...]) -> None: ...

    def verb(self, worker: int, verb: str, messages: int, nbytes: int) -> None: ...


LEDGERS: ContextVar[tuple[Observer, ...]] = ContextVar("spmd_ledgers", default=())

ONE_BY_ONE = "one by one"
"""The scheduler "lockstep", where none of the virtual workers is expected to wait for others."""


class Group:
    """The workers that meet in a collective: those that differ only along `axes`, in the order of `axes`.

    dims: the sizes of the axes. members: their numbers, major axis first. index: this worker's place among them.
    key: what identifies the group among all groups, whichever way its axes were ordered. ordered: the members by
    number; rows: the place of each member among these.
    """

    __slots__ = ("axes", "dims", "index", "key", "members", "ordered", "rows", "size")

    def __init__(self, axes: tuple[str, ...], dims: tuple[int, ...], members: tuple[int, ...], index: int):
        self.axes = axes
        self.dims = dims
        self.members = members
        self.index = index
        self.size = len(members)
        self.ordered = tuple(sorted(members))
        self.rows = tuple(map({m: k for k, m in enumerate(self.ordered)}.__getitem__, members))
        self.key = f"{self.ordered[0]} {sorted(axes)}"


class Call:
    """One worker's side of a collective: the operator, its parameters, and what it brings.

    op: the function's name as users write it. detail: the parameters that must agree. leaf: which leaf of which tree
    the block is, if the user gave a tree. shape: of the block. alike: all members must bring the same shape (False: as
    many dimensions; None: any). frame: where the user called from; only its code and place in it are kept, because a
    frame would keep the user's arrays alive.
    host: what it moves lies on the host, though blocks may lie on a device.
    lent: whether what it brings may be written to when the collective is over: nobody may keep it, or a view of it.
    asks: [whether this worker's block is differentiated], where that is to be agreed upon: when the members have met it
    says whether any member's is.
    number: what a transport tells it by, once that is known.

    Workers who call the same from one line may share one object, so whoever is given a call does not write to it.
    """

    __slots__ = (
        *("alike", "asks", "axes", "code", "detail", "dtype", "host", "instruction", "leaf", "lent", "number", "op"),
        "shape",
    )

    def __init__(
        self,
        op: str,
        axes: tuple[str, ...],
        dtype: np.dtype,
        shape: tuple[int, ...],
        *,
        detail: str = "",
        alike: bool | None = False,
        frame: FrameType | None = None,
        leaf: Leaf | None = None,
    ):
        self.op = op
        self.axes = axes
        self.detail = detail
        self.dtype = dtype
        self.shape = shape
        self.alike = alike
        self.leaf = leaf
        self.host = False
        self.lent = False
        self.asks: list[bool] | None = None
        self.number: int | None = None
        user = caller(frame) if frame is not None else None
        self.code = user.f_code if user is not None else None
        self.instruction = user.f_lasti if user is not None else 0

    def of(self, shape: tuple[int, ...], *, alike: bool | None = None) -> Call:
        """The same call, that brings a block of another shape. alike: where that is to be different."""
        other = copy(self)
        other.shape, other.number = shape, None
        other.alike = self.alike if alike is None else alike
        return other

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal on all members."""
        shape = self.shape if self.alike else None if self.alike is None else len(self.shape)
        return self.op, self.axes, self.detail, self.dtype, shape, self.leaf and self.leaf.digest

    def __str__(self) -> str:
        axes = repr(self.axes[0] if len(self.axes) == 1 else self.axes)
        more = f", {self.detail}" if self.detail else ""
        return f"{self.op}({self.dtype}{list(self.shape)}, {axes}{more})"

    @property
    def source(self) -> str:
        """`at` and the user's line that called."""
        return f"at {source_line(self.code, self.instruction)}"


class Side(NamedTuple):
    """What one worker says of itself where workers met with different calls. All but the worker's name may come from
    another process.

    call, line: the call, and the user's line. number: how many collectives it has made. op: the function's name.
    leaf, tree, paths, digest: the path of the leaf; the tree that it is one of, the paths of all its leaves, and its
    digest: of no tree empty. cut: whether there are more paths.
    """

    worker: str
    call: str
    line: str
    number: int
    op: str = ""
    leaf: str = ""
    tree: str = ""
    paths: Sequence[str] = ()
    digest: int = 0
    cut: bool = False

    @classmethod
    def of(cls, worker: str, call: Call, number: int) -> Side:
        """The side of a worker of this process."""
        side = cls(worker, str(call), call.source, number, call.op)
        leaf = call.leaf
        if leaf is None:
            return side
        tree = leaf.tree
        return side._replace(leaf=leaf.path, tree=tree.text, paths=tree.paths, digest=tree.digest)

    def packed(self, room: int) -> bytes:
        """What there is to tell another process, in at most so many bytes; of long trees the beginning."""
        side = self._replace(call=self.call[:400], line=self.line[-400:], leaf=self.leaf[:200], tree=self.tree[:400])
        while True:
            text = json.dumps(side[1:]).encode()
            if len(text) <= room:
                return text
            side = side._replace(paths=[*side.paths[: len(side.paths) // 2]], cut=True)

    @classmethod
    def unpacked(cls, worker: str, text: bytes) -> Side:
        """What another process has told of a worker."""
        return cls(worker, *json.loads(text))

    def shown(self, order: bool, trees: bool) -> str:
        """The lines on this side. order, trees: whether to say how many collectives it has made, and of which tree."""
        leaf = f", leaf {self.leaf} of" if self.leaf else ", of"
        of = f"{leaf} {_cut(self.tree, 200)}" if self.tree else ", of an array by itself"
        count = f", its collective {self.number}" if order else ""
        return f"          {self.worker}: {self.call}{of if trees else ''}{count}\n            {self.line}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


_ONE_PATH = (
    "let all workers take the same path: no branch on a worker's own data around a collective; "
    "spmd.at_root(f, x, axis_name=..., root=...) runs f on some workers only"
)
_ONE_SHAPE = "reduce uneven blocks over their own dimensions first, as spmd.sum and spmd.mean(x, axis_name, axis) do"
_ONE_TREE = (
    "give the function one tree on all workers: the same containers with the same keys; a dict may have its keys in "
    "any order, an OrderedDict may not"
)
_ONE_USE = "let all workers use the arguments that they differentiate in one order, and give them one tree"
GRADIENTS = "the gradients"
"""How the text begins that says in place of a tree which gradients a sum is of."""
_NAMED_PATHS = 8
"""Paths of a tree that an error names one by one."""


def mismatch(first: Side, second: Side) -> MismatchError:
    """Two workers met with different calls."""
    order, trees = first.number != second.number, (first.digest, first.leaf) != (second.digest, second.leaf)
    parted = first.digest != second.digest
    # As they are but for their shapes
    alike = len({re.sub(r"\[[\d, ]*\]", "", side.call) for side in (first, second)}) == 1
    one_tree = _ONE_USE if first.tree.startswith(GRADIENTS) else _ONE_TREE
    mend = _ONE_PATH if order or not alike else one_tree if parted else _ONE_PATH if trees else _ONE_SHAPE
    lines = [side.shown(order, trees) for side in (first, second)]
    if parted and first.tree and second.tree:
        lines.append(f"          {_parting(first, second)}")
    return MismatchError(
        message(
            "a collective",
            got="workers that met with different calls\n" + "\n".join(lines),
            need=f"the same operator, {'tree, ' * trees}axes, parameters, dtype and shape from all of the group, "
            "in the same order",
            mend=mend,
        )
    )


def _parting(first: Side, second: Side) -> str:
    """Where two trees differ."""
    if not (first.cut or second.cut):
        only = [
            f"{', '.join(missing[:_NAMED_PATHS])}{', ...' * (len(missing) > _NAMED_PATHS)} on {side.worker} only"
            for side, other in ((first, second), (second, first))
            if (missing := [path for path in side.paths if path not in set(other.paths)])
        ]
        if only:
            return f"paths that differ: {'; '.join(only)}"
    for k, (one, other) in enumerate(zip(first.paths, second.paths, strict=False)):
        if one != other:
            return f"paths that differ: leaf {k} is {one} on {first.worker}, {other} on {second.worker}"
    return "paths that differ: further on" if first.cut or second.cut else "the paths are equal, the containers differ"


def deadlock(lines: Sequence[str]) -> DeadlockError:
    """Workers wait in vain; the lines say who, in what, and for whom."""
    return DeadlockError(
        message(
            "a collective",
            got="workers that wait for others that will never come\n" + "\n".join(f"          {x}" for x in lines),
            need="every worker of a group to start the same collectives in the same order",
            mend=_ONE_PATH,
        )
    )


def raised_by(error: BaseException, who: str) -> None:
    """Note on an error which worker raised it, in place of the note of an earlier map that raised the same object."""
    kept = [note for note in getattr(error, "__notes__", ()) if not note.startswith("raised by worker ")]
    error.__notes__ = [*kept, f"raised by {who}"]


class Handle(Protocol):
    """A collective that is under way."""

    def wait(self) -> Any:
        """Its result, as soon as there is one."""
        ...


def sealed(x: Any) -> Any:
    """An array as one that nobody writes to, in place."""
    if type(x) is np.ndarray:
        x.setflags(False)  # pyright: ignore[reportCallIssue]  (by its name it takes twice as long)
    return x


class Ready:
    """A collective that was done at once."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value

    def wait(self) -> Any:
        return self.value


class Then:
    """A collective, and what is made of its result, once."""

    __slots__ = ("handle", "make", "value")

    def __init__(self, handle: Handle, make: Callable[[Any], Any]):
        self.handle: Handle | None = handle
        self.make = make
        self.value: Any = None

    def wait(self) -> Any:
        if self.handle is not None:
            self.value, self.handle = self.make(self.handle.wait()), None
        return self.value


class Steps:
    """A collective of several steps: a generator that starts each and is given what comes of it."""

    __slots__ = ("handle", "steps", "value")

    def __init__(self, steps: Generator[Handle, Any, Any]):
        self.steps = steps
        self.handle: Handle | None = None
        self.value: Any = None
        self._go_on(None)

    def _go_on(self, arrived: Any) -> None:
        try:
            self.handle = self.steps.send(arrived)
        except StopIteration as end:
            self.handle, self.value = None, end.value

    def wait(self) -> Any:
        while self.handle is not None:
            self._go_on(self.handle.wait())
        return self.value


class Outcome:
    """How a run of all workers ended: their results, how long it took, and how often they waited.

    shared: the seconds of it in which several cores worked for one worker, or one worker for all. replicas: what the
    workers supposed to be one value.
    """

    __slots__ = ("replicas", "results", "seconds", "shared", "switches")

    def __init__(self, results: dict[int, Any], seconds: float, switches: int, shared: float = 0.0):
        self.results = results
        self.seconds = seconds
        self.switches = switches
        self.shared = shared
        self.replicas: Any = None


class Boxes(NamedTuple):
    """How an array is put together of what several members send: of[k] is the box that member k gives. Elsewhere stand
    zeros. Where boxes overlap, `adds` says whether they are added up; else the last one counts. like: beside what."""

    shape: Shape
    of: Mapping[int, Box]
    like: Any
    adds: bool = False

    def filled(self, received: Mapping[int, np.ndarray], fresh: bool = False) -> np.ndarray:
        """The array of what each member has sent. fresh: never one of these arrays itself."""
        parts = [received[k] for k in self.of]
        if not parts:
            return sealed(zeros(self.shape, self.like))
        if len(parts) == 1 and parts[0].shape == self.shape:
            return sealed(copied(parts[0]) if fresh else contiguous(parts[0]))
        engine = kernels.of(self.like)
        return sealed((engine.add_boxes if self.adds else engine.unpack)(self.shape, tuple(self.of.values()), parts))


class Join(Protocol):
    """Puts the blocks of all members together. fresh: never in place, where they lie side by side."""

    def __call__(self, blocks: Sequence[Any], fresh: bool = False, /) -> Any: ...


Make = Callable[[np.ndarray, list[Any]], np.ndarray]
"""What makes a new block of the own one and of what comes from each member."""


class Eager(NamedTuple):
    """What there is to a collective of a block of some shape, for lines that call the same again: between processes it
    may go along with what workers tell each other before. MPI calls such messages eager.

    group: who meets. parts: for each member the index of what goes to it, this worker among them: `...` for the whole
    block, None for nothing. maker: given the shapes of what comes from each member (None: nothing), gives what makes
    the new block, of the own one and of what came, which is to be read by then, and not kept; and the operator bound to
    these shapes. It may raise.
    same: all members make the same of the same blocks. taken: where the new block is that of a member as it is, who
    that is, if anyone sends one. supposed: (d, lengths): the members' blocks have these lengths in dimension d, or it
    goes another way. slight: the new block is made around the own one, if that lies as it does now, so that little is
    written however large it is. apart: by `launch` each member makes its own result, at the same time where they have
    cores; else the last to come makes those of all.
    """

    group: Group
    parts: Sequence[Any]
    maker: Callable[[tuple[Any, ...]], tuple[Make, Any]]
    same: bool = False
    taken: tuple[int, ...] | None = None
    supposed: tuple[int, tuple[int, ...]] | None = None
    slight: bool = False
    apart: bool = False

    @property
    def light(self) -> bool:
        """Whether little is written, however large the blocks are."""
        return self.slight or self.taken is not None


Sends = Callable[[Sequence[Shape]], Mapping[int, np.ndarray] | None]
"""What goes to whom, where all members' blocks have these shapes."""

Way = Callable[[Any, np.ndarray], tuple[Any, Any]]
"""How a collective goes: of the Comm and a block it makes the new block and the operator bound to the shapes it met."""


class Comm(ABC):
    """One worker's view of a transport. Whole blocks are C-contiguous, parts of them may be views of any strides;
    received ones are read-only, and where workers share memory they are the very views that were sent, if not lent.

    The public verbs count what they cost, in messages and bytes that this worker sends; engines implement the
    protected ones. The cost is logical (that of the usual algorithm), the same in every transport.
    """

    worker: int
    number: int = 0
    """The collectives so far. All workers make the same ones in one order, so members of a group meet with one number:
    who takes two groups in another order than its partners does not, though every meeting by itself looks right."""

    def repeated(self, call: Call, way: Eager, x: np.ndarray) -> Callable[[Any, np.ndarray, Way], Any] | None:
        """A shorter way for a collective, for each further time that the same line calls it with such a block x, if
        there is one. It is given the way by the verbs too, for where others bring other blocks."""
        return None

    def given(self, x: Any) -> Any:
        """An array of whoever called the map, for this worker to read."""
        return x

    def _count(self, verb: str, messages: int, nbytes: int) -> None:
        for ledger in LEDGERS.get():
            ledger.verb(self.worker, verb, messages, nbytes)

    def all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str = "sum") -> Handle:
        """The entrywise sum (max, min) of all members' blocks of one shape, on every member.

        Cost: 2 (n - 1) messages; every chunk but the own one goes out, the reduced own chunk goes to all others.
        """
        if LEDGERS.get():
            self._count("all_reduce", *all_reduce_cost(group, x))
        return self._all_reduce(group, call, x, how)

    def all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool] = ()) -> Handle:
        """The sums of several blocks of one dtype in one collective; the result is a list.

        spare: for each block whether nobody else has it, so that its sum may be written over it.
        """
        if LEDGERS.get():
            self._count("all_reduce", *all_reduce_cost(group, *xs))
        return self._all_reduce_many(group, call, xs, spare or [False] * len(xs))

    def reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        """parts[k] goes to member k, which gets the sum of what all sent it. Cost: n - 1 messages."""
        if LEDGERS.get():
            self._count("reduce_scatter", *scatter_cost(group, parts))
        return self._reduce_scatter(group, call, parts)

    def all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle:
        """All members' blocks, as a list; shapes may differ. Cost: n - 1 messages of the own block."""
        if LEDGERS.get():
            self._count("all_gather", *gather_cost(group, x))
        return self._all_gather(group, call, x)

    def all_gather_as(self, group: Group, call: Call, x: np.ndarray, join: Join) -> Handle:
        """What `join` makes of all members' blocks: the same on all of them, who may share it."""
        if LEDGERS.get():
            self._count("all_gather", *gather_cost(group, x))
        return self._all_gather_as(group, call, x, join)

    def all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle:
        """parts[k] goes to member k; the result lists what each member sent here. Cost: n - 1 messages."""
        if LEDGERS.get():
            self._count("all_to_all", *scatter_cost(group, parts))
        return self._all_to_all(group, call, parts)

    def all_to_all_as(self, group: Group, call: Call, parts: Sequence[np.ndarray], join: Join) -> Handle:
        """As `all_to_all`, and what `join` makes of what comes."""
        if LEDGERS.get():
            self._count("all_to_all", *scatter_cost(group, parts))
        return self._all_to_all_as(group, call, parts, join)

    def broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle:
        """The root's block, on every member (others pass None). Cost: n - 1 messages, sent by the root."""
        if LEDGERS.get():
            self._count("broadcast", *root_cost(group, root, x.nbytes if x is not None else 0, down=True))
        return self._broadcast(group, call, x, root)

    def reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle:
        """The sum of all blocks at the root; None elsewhere. Cost: one message from each other member."""
        if LEDGERS.get():
            self._count("reduce", *root_cost(group, root, x.nbytes, down=False))
        return self._reduce(group, call, x, root)

    def exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray]) -> Handle:
        """sends[k] goes to member k; the result maps senders to what they sent. Cost: a message per send to another."""
        if LEDGERS.get():
            self._count("exchange", *exchange_cost(group, sends))
        return self._exchange(group, call, sends)

    def exchange_boxes(self, group: Group, call: Call, sends: Mapping[int, np.ndarray], boxes: Boxes) -> Handle:
        """As `exchange`, and what comes put together."""
        if LEDGERS.get():
            self._count("exchange", *exchange_cost(group, sends))
        return self._exchange_boxes(group, call, sends, boxes)

    def shapes(self, group: Group, call: Call) -> Handle:
        """The shapes of all members' blocks, as a list. They travel with the calls: no message, no bytes."""
        self._count("shapes", 0, 0)
        return self._shapes(group, call)

    def exchange_learnt(self, group: Group, call: Call, sends: Sends) -> Handle | None:
        """The shapes of all members' blocks, and what an `exchange` gives of what `sends` makes of these shapes (None,
        on all members alike, where nothing is sent), in one meeting. None where that takes two: then `shapes`, and an
        `exchange`, which goes on while the caller does something else."""
        return None

    @abstractmethod
    def _shapes(self, group: Group, call: Call) -> Handle: ...

    @abstractmethod
    def _all_reduce(self, group: Group, call: Call, x: np.ndarray, how: str) -> Handle: ...

    @abstractmethod
    def _all_reduce_many(self, group: Group, call: Call, xs: Sequence[np.ndarray], spare: Sequence[bool]) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle: ...

    @abstractmethod
    def _all_gather(self, group: Group, call: Call, x: np.ndarray) -> Handle: ...

    def _all_gather_as(self, group: Group, call: Call, x: np.ndarray, join: Join) -> Handle:
        return Then(self._all_gather(group, call, x), join)

    @abstractmethod
    def _all_to_all(self, group: Group, call: Call, parts: Sequence[np.ndarray]) -> Handle: ...

    def _all_to_all_as(self, group: Group, call: Call, parts: Sequence[np.ndarray], join: Join) -> Handle:
        return Then(self._all_to_all(group, call, parts), join)

    @abstractmethod
    def _broadcast(self, group: Group, call: Call, x: np.ndarray | None, root: int) -> Handle: ...

    @abstractmethod
    def _reduce(self, group: Group, call: Call, x: np.ndarray, root: int) -> Handle: ...

    @abstractmethod
    def _exchange(self, group: Group, call: Call, sends: Mapping[int, np.ndarray]) -> Handle: ...

    def _exchange_boxes(self, group: Group, call: Call, sends: Mapping[int, np.ndarray], boxes: Boxes) -> Handle:
        return Then(self._exchange(group, call, sends), boxes.filled)


def all_reduce_cost(group: Group, *xs: np.ndarray) -> tuple[int, int]:
    """Messages and bytes this member sends in an all-reduce: a reduce-scatter, then an all-gather, of chunks."""
    n, nbytes = group.size, sum(x.nbytes for x in xs)
    own = block_sizes(sum(x.size for x in xs), n)[group.index] * (xs[0].itemsize if xs else 0)
    return 2 * (n - 1), nbytes - own + own * (n - 1) if n > 1 else 0


def gather_cost(group: Group, x: np.ndarray) -> tuple[int, int]:
    """Messages and bytes this member sends in an all-gather: its block to each of the others."""
    return group.size - 1, (group.size - 1) * x.nbytes


def scatter_cost(group: Group, parts: Sequence[np.ndarray]) -> tuple[int, int]:
    """Messages and bytes this member sends in a reduce-scatter or an all-to-all: its parts for the others."""
    return group.size - 1, sum(p.nbytes for k, p in enumerate(parts) if k != group.index)


def exchange_cost(group: Group, sends: Mapping[int, np.ndarray]) -> tuple[int, int]:
    """Messages and bytes this member sends in an exchange: one to each of the others that it has something for."""
    others = [x for k, x in sends.items() if k != group.index]
    return len(others), sum(x.nbytes for x in others)


def root_cost(group: Group, root: int, nbytes: int, *, down: bool) -> tuple[int, int]:
    """Messages and bytes this member sends in a broadcast (down: the root to all others) or a reduce (up)."""
    n = (group.size - 1 if down else 0) if group.index == root else (0 if down else 1)
    return n, n * nbytes


class Transport(ABC):
    """The workers of one mesh."""

    name: str
    size: int
    local: Sequence[int]
    """The numbers of the workers that this process holds."""

    @abstractmethod
    def run(self, body: Callable[[Comm], Any], scheduler: str, describe: Callable[[int], str]) -> Outcome:
        """Run body on every worker held here, with its Comm; their results by worker.

        scheduler: of virtual workers, "lockstep", "threads" or ONE_BY_ONE. describe: names a worker in error messages.
        Raises the first error of any worker.
        """

    @abstractmethod
    def threads(self) -> int:
        """The threads that libraries use within each worker: the same for all, so that all get the same bits. The first
        call is collective; a run makes it."""

    @abstractmethod
    def share(self, local: dict[int, Any]) -> dict[int, Any]:
        """Small JSON values, one per worker held here, made known to all processes."""
