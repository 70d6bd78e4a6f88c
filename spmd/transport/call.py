"""Calls: the group, each worker's side of a collective, and the errors where they disagree."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, Token
from copy import copy
from itertools import groupby
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd.errors import DeadlockError, MismatchError, caller, source_line
from spmd.transport.algorithms.cost import Cost

if TYPE_CHECKING:
    from spmd.autodiff.tree import Leaf

__all__ = [
    "GRADIENTS",
    "LEDGERS",
    "ONE_BY_ONE",
    "Call",
    "CallOfMany",
    "Group",
    "Observer",
    "Observers",
    "Origin",
    "Shape",
    "Side",
    "begin_observing",
    "deadlock",
    "mismatch",
    "place_of",
    "raised_by",
]


Shape = tuple[int, ...]


Place = tuple[CodeType | None, int]
"""A line of the user's code: its code object, and the instruction in it."""


def place_of(frame: FrameType | None) -> Place:
    """The nearest line of the user's code, from a frame on upwards."""
    user = caller(frame) if frame is not None else None
    return (None, 0) if user is None else (user.f_code, user.f_lasti)


class Origin(NamedTuple):
    """Where a collective comes from. operator: the name of its class. place: the user's line; of a backward sweep the
    line of the forward call. direction: "forward" or "backward"."""

    operator: str
    axes: tuple[str, ...]
    place: Place
    direction: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells it from others; quicker to hash than a code object."""
        (code, instruction), direction = self.place, self.direction
        return self.operator, self.axes, id(code), instruction, direction

    @property
    def line(self) -> str:
        """`file.py:12 in f`."""
        return source_line(*self.place)


class Observer:
    """Receives what workers do: see `spmd.ledger` and `spmd.profile`.

    replays: whether it takes what is repeated as a whole. Then programs of `spmd.jit` run in place of bodies and
    prepared calls in place of verbs, and of these the observer gets `collective` only.
    """

    replays = False

    def operator(self, worker: int, origin: Origin) -> None:
        """An operator is applied."""

    def verb(self, worker: int, verb: str, cost: Cost, declared: Cost, origin: Origin) -> None:
        """A verb of the transport is used. declared: the cost that the operator's plan says."""

    def collective(self, comm: Any, sent: Any, phases: Sequence[Any]) -> None:
        """A collective of a worker is over: see `SentMessage` and `Phase` in `spmd.transport.observing`."""

    def kernel(self, name: Any, start: float) -> None:
        """A kernel, or a function of NumPy, has run until now. name: an object that stands for it; start: as
        `time.perf_counter` counts."""

    def action(self, worker: Any, kind: str, stage: int, microbatch: int, start: float) -> None:
        """A stage of a pipeline has worked on a microbatch until now. kind: "forward", "backward" or "weight"."""

    def run(self, worker: Any, name: Sequence[str], body: Callable[[Any], Any]) -> Any:
        """Run the body of a map on a worker. name: the body, and the kind of run."""
        return body(worker)


class Observers(tuple[Observer, ...]):
    """Observers. replays: whether all of them take replays."""

    replays: bool

    def __new__(cls, observers: Iterable[Observer] = ()) -> Observers:
        """The observers of a context."""
        self = super().__new__(cls, observers)
        self.replays = all(observer.replays for observer in self)
        return self


LEDGERS: ContextVar[Observers] = ContextVar("spmd_ledgers", default=Observers())  # noqa: B039 (it is immutable)
"""The observers of what runs in this context."""


def begin_observing(observer: Observer) -> Token[Observers]:
    """Let an observer see what runs in this context, until `LEDGERS` is reset."""
    return LEDGERS.set(Observers((*LEDGERS.get(), observer)))


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

    def of_member(self, k: int) -> Group:
        """The same group, as its member k sees it."""
        if k == self.index:
            return self
        other = copy(self)
        other.index = k
        return other


class Pair(Group):
    """Two members of a group, of which the first sends to the second, and does not wait for it.

    stream: tells apart the messages from the one to the other that are taken independently of each other: those of one
    stream are taken in the order in which they are sent.
    scheduled: whether each worker comes to its messages in an order of its own, as a schedule says. Then who sends
    waits until they are taken (`SentMessage.wait_until_taken`), when the schedule says that it can, and no other wait
    includes them.
    """

    __slots__ = ("scheduled", "stream")

    def __init__(self, group: Group, source: int, target: int, stream: str = "", scheduled: bool = False):
        self.scheduled = scheduled
        members = (group.members[source], group.members[target])
        super().__init__(group.axes, group.dims, members, int(group.index == target))
        self.stream = stream
        self.key = f"{members[0]} to {members[1]} {sorted(group.axes)} {stream}"

    @property
    def sends(self) -> bool:
        """Whether this worker is the one that sends."""
        return self.index == 0


class Call:
    """One worker's side of a collective: the operator, its parameters, and what it brings.

    op: the function's name as users write it. detail: the parameters that must agree. leaf: which leaf of which tree
    the block is, if the user gave a tree. shape: of the block. same_shape: all members must bring the same shape
    (False: as many dimensions; None: any). frame: where the user called from; only its code and place in it are kept,
    because a frame would keep the user's arrays alive.
    host: what it moves lies on the host, though blocks may lie on a device.
    borrowed: whether what it brings may be written to when the collective is over: nobody may keep it, or a view of it.
    needs_grad: [whether this worker's block is differentiated], where that is to be agreed upon: when the members have
    met it says whether any member's is.
    digest: of `key`, once a transport has computed it.
    operator: the class of the operator, for observers. backward: whether a backward sweep applies it. recorded_at: then
    the line of the forward call, where that is known; last_recorded: the copy for such a line.

    Workers who call the same from one line may share one object, so whoever is given a call does not write to it.
    """

    __slots__ = (
        *("axes", "backward", "borrowed", "code", "detail", "digest", "dtype", "host", "instruction"),
        *("known_origin", "last_recorded", "last_sent", "leaf", "needs_grad", "op", "operator"),
        *("recorded_at", "same_shape", "shape"),
    )

    def __init__(
        self,
        op: str,
        axes: tuple[str, ...],
        dtype: np.dtype,
        shape: tuple[int, ...],
        *,
        detail: str = "",
        same_shape: bool | None = False,
        frame: FrameType | None = None,
        leaf: Leaf | None = None,
    ):
        self.op = op
        self.axes = axes
        self.detail = detail
        self.dtype = dtype
        self.shape = shape
        self.same_shape = same_shape
        self.leaf = leaf
        self.host = False
        self.borrowed = False
        self.needs_grad: list[bool] | None = None
        self.digest: int | None = None
        self.operator = op
        self.backward = False
        self.recorded_at: Place | None = None
        self.known_origin: Origin | None = None
        self.last_recorded: Call | None = None
        self.last_sent: Any = None
        self.code, self.instruction = place_of(frame)

    def of(self, shape: tuple[int, ...], *, same_shape: bool | None = None) -> Call:
        """The same call, that brings a block of another shape. same_shape: where that is to be different."""
        other = copy(self)
        other.shape, other.digest, other.last_recorded = shape, None, None
        other.same_shape = self.same_shape if same_shape is None else same_shape
        return other

    def recorded(self, place: Place | None) -> Call:
        """The same call, in the backward sweep of a forward call at this line, if there is one."""
        if place is None:
            return self
        last = self.last_recorded
        if last is None or last.recorded_at is not place:
            last = self.last_recorded = copy(self)
            last.recorded_at, last.known_origin, last.last_sent = place, None, None
        return last

    @property
    def origin(self) -> Origin:
        """Where it comes from, for observers."""
        if self.known_origin is None:
            backward = self.backward or self.recorded_at is not None
            place = self.recorded_at or (self.code, self.instruction)
            self.known_origin = Origin(self.operator, self.axes, place, "backward" if backward else "forward")
        return self.known_origin

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal on all members."""
        shape = self.shape if self.same_shape else None if self.same_shape is None else len(self.shape)
        return self.op, self.axes, self.detail, self.dtype, shape, self.leaf and self.leaf.digest

    def __str__(self) -> str:
        axes = repr(self.axes[0] if len(self.axes) == 1 else self.axes)
        more = f", {self.detail}" if self.detail else ""
        return f"{self.op}({self.dtype}{list(self.shape)}, {axes}{more})"

    @property
    def source(self) -> str:
        """`at` and the user's line that called."""
        return f"at {source_line(self.code, self.instruction)}"


class CallOfMany(Call):
    """One worker's side of several calls that run as one, with their blocks packed. shape: of the packed block."""

    __slots__ = ("calls",)

    def __init__(self, op: str, calls: Sequence[Call], shape: Shape, leaf: Leaf | None = None):
        first, runs = calls[0], [(text, len([*alike])) for text, alike in groupby(map(str, calls))]
        detail = ", ".join(f"{n} times {text}" if n > 1 else text for text, n in runs)
        super().__init__(op, first.axes, first.dtype, shape, detail=f"packed: {detail}", same_shape=True, leaf=leaf)
        self.code, self.instruction, self.calls = first.code, first.instruction, calls
        self.operator, self.backward, self.recorded_at = first.operator, first.backward, first.recorded_at

    @property
    def source(self) -> str:
        """`at` and the user's lines that called."""
        return f"at {', '.join(dict.fromkeys(source_line(call.code, call.instruction) for call in self.calls))}"


class Side(NamedTuple):
    """What one worker says of itself where workers met with different calls. All but the worker's name may come from
    another process.

    call, line: the call, and the user's line. number: how many collectives it has made. op: the function's name.
    leaf, tree, paths, digest: the path of the leaf; the tree that it is one of, the paths of all its leaves, and its
    digest: of no tree empty. cut: whether there are more paths. place: a number of the line, if all must be at one.
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
    place: int = 0

    @classmethod
    def of(cls, worker: str, call: Call, number: int, place: int = 0) -> Side:
        """The side of a worker of this process."""
        side = cls(worker, str(call), call.source, number, call.op, place=place)
        leaf = call.leaf
        if leaf is None:
            return side
        tree = leaf.tree
        return side._replace(leaf=leaf.path, tree=tree.text, paths=tree.paths, digest=tree.digest)

    def packed(self, limit: int) -> bytes:
        """This side as JSON of at most `limit` bytes; long trees are cut."""
        side = self._replace(call=self.call[:400], line=self.line[-400:], leaf=self.leaf[:200], tree=self.tree[:400])
        while True:
            text = json.dumps(side[1:]).encode()
            if len(text) <= limit:
                return text
            side = side._replace(paths=[*side.paths[: len(side.paths) // 2]], cut=True)

    @classmethod
    def unpacked(cls, worker: str, text: bytes) -> Side:
        """A worker's side from the JSON of another process."""
        return cls(worker, *json.loads(text))

    def shown(self, order: bool, trees: bool) -> str:
        """The lines on this side. order, trees: whether to show the number of collectives, and the tree."""
        leaf = f", leaf {self.leaf} of" if self.leaf else ", of"
        of = f"{leaf} {_cut(self.tree, 200)}" if self.tree else ", of an array by itself"
        count = f", its collective {self.number}" if order else ""
        return f"          {self.worker}: {self.call}{of if trees else ''}{count}\n            {self.line}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


_ONE_PATH = (
    "let all workers take the same path: no branch on a worker's own data around a collective; "
    "spmd.at_root(f, x, axis_name=..., root=...) runs f on some workers only"
)


_EQUAL_BACKWARDS = (
    "make equally many forwards and backwards of the module on all workers: split a minibatch into equally many parts "
    "there, by x.tensor_split(n), of which some may be empty; "
)
_OF_MODULES = re.compile(r"\b(?:shard_parameters|data_parallel)\(")
"""What stands in the text of a collective of a module of torch."""


def _one_path(*texts: str) -> str:
    """What to do where workers take different paths, of which these texts tell."""
    return f"{_EQUAL_BACKWARDS if any(map(_OF_MODULES.search, texts)) else ''}{_ONE_PATH}"


_ONE_SHAPE = "reduce uneven blocks over their own dimensions first, as spmd.sum and spmd.mean(x, axis_name, axis) do"


_ONE_TREE = (
    "give the function one tree on all workers: the same containers with the same keys; a dict may have its keys in "
    "any order, an OrderedDict may not"
)


_ONE_LINE = (
    "call it on all processes from one line: total = u.sum() before `if spmd.is_main(): print(total)`, with no other "
    "line in `else`"
)


_ONE_USE = "let all workers use the arguments that they differentiate in one order, and give them one tree"


GRADIENTS = "the gradients"
"""How the text begins that says in place of a tree which gradients a sum is of."""


_PATHS_SHOWN = 8
"""Paths of a tree that an error names one by one."""


def mismatch(first: Side, second: Side) -> MismatchError:
    """The error where two workers met with different calls."""
    order, trees = first.number != second.number, (first.digest, first.leaf) != (second.digest, second.leaf)
    trees_differ = first.digest != second.digest
    alike = len({re.sub(r"\[[\d, ]*\]", "", side.call) for side in (first, second)}) == 1
    one_tree = _ONE_USE if first.tree.startswith(GRADIENTS) else _ONE_TREE
    at_lines = first.place != second.place and alike and not order
    one_path = _one_path(first.call, second.call)
    mend = one_path if order or not alike else one_tree if trees_differ else one_path if trees else _ONE_SHAPE
    mend = _ONE_LINE if at_lines else mend
    lines = [side.shown(order, trees) for side in (first, second)]
    if trees_differ and first.tree and second.tree:
        lines.append(f"          {_tree_difference(first, second)}")
    return MismatchError.at(
        "a collective",
        got="workers that met with different calls\n" + "\n".join(lines),
        need=f"the same operator, {'tree, ' * trees}axes, parameters, dtype and shape from all of the group, "
        f"in the same order{'; functions of global arrays are called from one line' * at_lines}",
        mend=mend,
    )


def _tree_difference(first: Side, second: Side) -> str:
    """Where two trees differ."""
    if not (first.cut or second.cut):
        only = [
            f"{', '.join(missing[:_PATHS_SHOWN])}{', ...' * (len(missing) > _PATHS_SHOWN)} on {side.worker} only"
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
    """The error where workers wait for others that will never come; the lines say who, in what, and for whom."""
    return DeadlockError.at(
        "a collective",
        got="workers that wait for others that will never come\n" + "\n".join(f"          {x}" for x in lines),
        need="every worker of a group to start the same collectives in the same order",
        mend=_one_path(*lines),
    )


def raised_by(error: BaseException, who: str) -> None:
    """Note on an error which worker raised it; replaces the note of an earlier map."""
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("raised by worker ")]
    error.__notes__ = [*notes, f"raised by {who}"]
