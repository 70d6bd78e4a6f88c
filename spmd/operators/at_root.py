"""Functions that one worker runs on values that it alone holds.

Only the root runs f. What the others must know for what follows, the structure, shapes, dtypes and states of the
results, the root tells them. On a tape the call is one node on every worker, whose pullback runs at the root alone: so
all workers go back through the same collectives, whatever f did.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.admission import admit, admit_dtype
from spmd.autodiff.tape import refusing
from spmd.autodiff.tracer import Array
from spmd.autodiff.transform_arguments import innermost, lower, on, unstated
from spmd.autodiff.transforms import joint, pullback_of
from spmd.errors import ClosureError, JitError, StateError, class_name, describe, rebuilt_error
from spmd.frontends import frontend
from spmd.kernels import on_device
from spmd.mesh import WORKER, Worker, here
from spmd.operators.blocks import owned_block
from spmd.operators.elsewhere import Elsewhere, Rooted, rooted
from spmd.operators.messages import dtype_from_json, dtype_to_json
from spmd.operators.partial_comm import PartialComm, whole_comm
from spmd.operators.reduce import AxisName, _names
from spmd.operators.root import Keep
from spmd.operators.sums import Vary
from spmd.state import REPLICAS, state_of
from spmd.tracebacks import shorten
from spmd.transport.call import Call, Group
from spmd.transport.handles import read_only

__all__ = [
    "LoneWorker",
    "ResultSpec",
    "RootCall",
    "at_root",
    "decoded",
    "encoded",
    "is_array",
    "refuse_program",
    "result_spec",
    "root_axes",
    "spec_from_json",
]

_WHERE = "spmd.at_root"


def at_root(f: Callable[..., Any], *xs: Any, axis_name: AxisName, root: int = 0) -> Any:
    """f(*xs), run by the worker at place `root` along axis_name only: as Rooted values.

    f: a function of arrays, which may print, read and write files, and branch on values; of collectives it may use
    those along other axes. It returns arrays, numbers or None, in tuples (named ones too), lists and dicts.
    xs: Rooted values, and pytrees of them; f gets the arrays that they stand for. Numbers, strings and the like, equal
    on all workers, pass as they are; an array is made Rooted by `keep` first.

    Returns what f returns, its arrays and numbers as Rooted values, on every worker. Differentiable to any order: the
    root's tape holds what f did, cotangents are Rooted; the rules run at the root, and at order 2 f runs again.
    Cost: one broadcast of what the others must know, about 50 bytes per result; nothing backward.
    An error that f raises is raised on all workers.
    Raises StateError for other arrays among xs and for results that are no arrays; ClosureError where f uses a
    differentiated array that is not among its arguments; JitError within spmd.jit.

        >>> def body(x):
        ...     whole = spmd.gather(x, "x")
        ...     return spmd.replicate(spmd.at_root(np.median, whole, axis_name="x"), "x")
        >>> with spmd.Mesh(x=3):
        ...     spmd.map(body, P("x"), P())(np.array([5.0, 1.0, 4.0, 2.0])).item()
        3.0
    """
    names, frame = _names(axis_name, "at_root"), sys._getframe(1)
    worker = here(_WHERE)
    refuse_program(worker, _WHERE)
    group = worker.group(names)
    Keep(names, root).check_root(group)
    leaves, treedef = tree.flatten(xs)
    places = [k for k, leaf in enumerate(leaves) if is_array(leaf)]
    call = RootCall(group, names, root, frame, tree.leaf_positions(treedef)[-1])

    def of_blocks(*blocks) -> list:
        full = list(leaves)
        for k, block in zip(places, blocks, strict=True):
            full[k] = block
        call.structure, outs = encoded(f(*tree.unflatten(treedef, full)), call.worker)
        return [call.without_axes(out) for out in outs]

    blocks = [rooted(leaves[k], names, root, "at_root").block for k in places]
    outs = call.run(of_blocks, blocks)
    if worker.frontend is not None:
        outs = [worker.frontend.tied(call.without_axes(x), blocks) for x in outs]
    handles = (
        Rooted(x, like.shape, x.dtype if frontend(x) is not None else dtype_from_json(like.dtype), names, root)
        for x, like in zip(outs, call.specs, strict=True)
    )
    return decoded(call.structure, handles)


def refuse_program(worker: Worker, where: str) -> None:
    """Raise where a program records what the worker does."""
    if worker.program is not None:
        raise JitError.at(
            where,
            got="a call within spmd.jit",
            need="a body that runs each time: f may do anything at the root",
            mend="leave spmd.jit out, or split the map: what is done at the root in one without it",
        )


def is_array(leaf) -> bool:
    known = type(leaf) in (Rooted, Array) or isinstance(leaf, np.ndarray) or on_device(leaf)
    return known or hasattr(leaf, "__spmd_describe__") or frontend(leaf) is not None


class ResultSpec(NamedTuple):
    """What all workers know of a Rooted value. dtype: as JSON holds it."""

    shape: tuple[int, ...]
    dtype: Any
    varying: tuple[str, ...]


def spec_from_json(spec: Any) -> ResultSpec:
    """A spec that was JSON."""
    shape, dtype, varying = spec
    return ResultSpec(tuple(shape), dtype, tuple(varying))


class RootCall:
    """One call of a function that the root alone runs, on one worker. function: the one of `spmd` that is called."""

    def __init__(
        self,
        group: Group,
        axes: tuple[str, ...],
        root: int,
        frame: FrameType,
        whole: tree.Leaf | None,
        function: str = "at_root",
    ):
        self.function, self.where = function, f"spmd.{function}"
        self.group = group
        self.axes = axes
        self.root = root
        self.frame = frame
        self.whole = whole
        self.structure: Any = None
        self.specs: list[ResultSpec] = []

    @property
    def worker(self) -> Worker:
        """This worker as it is now: the way back of a map may be another run, with a transport of its own."""
        return here(self.where)

    @property
    def is_root(self) -> bool:
        return self.group.index == self.root

    def run(self, fn: Callable, xs: list, specs: list[ResultSpec] | None = None) -> list:
        """fn(*xs), a list of blocks, at the root; empty blocks elsewhere. Recorded on all tapes of xs.

        specs: of the results, where the others know them already.
        """
        token = REPLICAS.set(False)  # the root makes arrays that the others do not
        try:
            return self._run(fn, xs, specs)
        finally:
            REPLICAS.reset(token)

    def _run(self, fn: Callable, xs: list, specs: list[ResultSpec] | None) -> list:
        tape = innermost(xs)
        if tape is None:
            return self.evaluate(fn, xs, specs)
        lowered = [lower(x, tape) for x in xs]
        active = [k for k, x in enumerate(xs) if on(x, tape)]

        def with_pullback(args: Sequence, once: bool) -> tuple[Any, Callable]:
            def of_active(*values):
                full = list(args)
                for k, value in zip(active, values, strict=True):
                    full[k] = value
                return tuple(fn(*full))

            return pullback_of(of_active, [args[k] for k in active], once=once)  # type: ignore[return-value]

        pulled: Callable
        if innermost(lowered) is None:
            pullbacks: list[Callable] = []

            def keeping(*args):
                outs, pull = with_pullback(args, tape.once)
                pullbacks.append(pull)
                return outs

            outs = self.evaluate(keeping, lowered, specs)
            pulled, given = lambda *gs: pullbacks[0](gs), []
        else:
            # An outer tape watches too: the pullback is a function of the arguments, run again as one of its own.
            outs = self.run(fn, lowered, specs)
            n, given = len(lowered), lowered
            pulled = lambda *args: with_pullback(args[:n], True)[1](args[n:])
        ends = [result_spec(xs[k]) for k in active]
        zeros = [(np.shape(_data(x)), _data(x).dtype) for x in outs]

        def pull(gs: list) -> list:
            full = [np.zeros(*zero) if g is None else g for g, zero in zip(gs, zeros, strict=True)]
            return [unstated(g) for g in self.run(pulled, [*given, *full], ends)]

        return joint(self.where, tape, [xs[k] for k in active], outs, pull)

    def evaluate(self, fn: Callable, xs: list, specs: list[ResultSpec] | None) -> list:
        """`run` below all tapes."""
        if not self.is_root:
            if specs is None:
                specs = self.receive_results()
            return [self.empty_block(like) for like in specs]
        try:
            outs = self._run_alone(fn, xs)
        except Exception as error:
            if specs is None and len(self.worker.mesh.local_workers) < self.worker.mesh.size:
                self.report_error(error)
            raise
        if specs is None:
            self.specs = [result_spec(x) for x in outs]
            self.report({"structure": self.structure, "specs": self.specs})
        return outs

    def _run_alone(self, fn: Callable, xs: list) -> list:
        """fn(*xs), whose collectives the others do not make, and so are not numbered."""
        token = WORKER.set(LoneWorker(self.worker, self.axes, partial(_refused, self.function)))
        try:
            with whole_comm(self.worker.comm).uncounted(), refusing(0, partial(_closure, self.function)):
                return list(fn(*xs))
        finally:
            WORKER.reset(token)

    def report(self, report: dict[str, Any]) -> None:
        """Send a report from the root to all others."""
        self._broadcast(np.frombuffer(json.dumps(report).encode(), np.uint8))

    def report_error(self, error: Exception) -> None:
        """Tell the others of an error that the root is about to raise."""
        shorten(error)  # the others are told what the user would see
        trace = "".join(traceback.format_exception(error))
        self.report({"error": class_name(error), "text": str(error), "trace": trace})

    def receive_results(self) -> list[ResultSpec]:
        """The specs of the results from the root; raises its error, if there was one."""
        report = json.loads(self._broadcast(None).tobytes())
        if "error" in report:
            raise _same_error(report, self.where, self.worker.mesh.describe(self.group.members[self.root]))
        self.structure = report["structure"]
        self.specs = [spec_from_json(spec) for spec in report["specs"]]
        return self.specs

    def _broadcast(self, report: np.ndarray | None) -> np.ndarray:
        shape = (0,) if report is None else report.shape
        detail = f"root={self.root}"
        call = Call(
            self.function,
            self.axes,
            np.dtype(np.uint8),
            shape,
            detail=detail,
            same_shape=None,
            frame=self.frame,
            leaf=self.whole,
        )
        call.host = True
        return self.worker.comm.broadcast(self.group, call, report, self.root).wait()

    def empty_block(self, like: ResultSpec):
        """The block of a result on a worker that is not the root."""
        block = read_only(np.zeros((0,), dtype_from_json(like.dtype)))
        if self.worker.mesh.places is not None:
            block = self.worker.mesh.places.own(block, self.worker.index)
        return self.worker.carrying(block, state_of(like.varying))

    def without_axes(self, x):
        """A result in the state of the root's value: it may have met data that vary along the axes."""
        other = frontend(x)
        if other is not None:
            state = other.state(x)
            return other.carrying(x, state_of(state.varying - set(self.axes)), self.worker.tracked)
        if type(x) is not Array or not x.state.varying & set(self.axes):
            return x
        return Array(x.value, state_of(x.state.varying - set(self.axes)), x.tape, x.node)


def _data(x):
    return x if hasattr(x, "dtype") else np.asarray(x)


def result_spec(x) -> ResultSpec:
    other = frontend(x)
    if other is not None:
        return ResultSpec(tuple(x.shape), other.dtype(x).name, tuple(sorted(other.state(x).varying)))
    varying = sorted(x.state.varying) if type(x) is Array else ()
    return ResultSpec(np.shape(_data(x)), dtype_to_json(_data(x).dtype), tuple(varying))


def root_axes(worker: Worker | None) -> tuple[str, ...]:
    """The axes along which a worker acts alone, in a function that only the root runs."""
    return worker.axes if isinstance(worker, LoneWorker) else ()


class LoneWorker(Worker):
    """A worker while it runs what along some axes nobody else takes part in. refuse: as of `PartialComm`."""

    __slots__ = ("axes",)

    def __init__(self, worker: Worker, axes: tuple[str, ...], refuse: Callable[[str, Call], Exception]):
        super().__init__(worker.mesh, worker.comm, worker.tracked, worker.replicas)
        self.axes = (*axes, *root_axes(worker))
        self.unasked = worker.unasked
        self.frontend = worker.frontend
        self.comm: Any = PartialComm(worker.comm, axes, refuse)
        self.prepared = {}  # The short ways of others count on the transport as it is.


def _refused(function: str, axis: str, call: Call) -> StateError:
    return StateError.at(
        f"spmd.{function}",
        argument="f",
        got=f"{call} {call.source}, within a function that only the root along {axis!r} runs",
        need="no collective along the axes of the root, nor an argument that is differentiated and meets "
        "data that vary along them: its gradient is a sum over workers",
        mend=f"call it before or after {function}; make Varying data Rooted (spmd.gather, spmd.sum_reduce)",
    )


def encoded(out, worker: Worker, where: str = _WHERE, argument: str = "result of f") -> tuple[Any, list]:
    """The structure of a result, 0 for each leaf, and its leaves. where, argument: in errors."""
    leaves: list = []

    def of(x):
        if x is None:
            return None
        if type(x) in (tuple, list):
            return [type(x).__name__, [of(a) for a in x]]
        if _is_named_tuple(type(x)):
            return [f"{type(x).__module__}:{type(x).__qualname__}", [of(a) for a in x]]
        if type(x) in (dict, OrderedDict) and all(type(k) in (str, int, bool) for k in x):
            return ["dict", [[k, of(a)] for k, a in x.items()]]
        leaves.append(_leaf(x, worker, where, argument))
        return 0

    return of(out), leaves


def _leaf(x, worker: Worker, where: str, argument: str):
    if frontend(x) is not None:
        return x
    data = x
    if isinstance(x, Elsewhere):
        raise StateError.at(
            where,
            argument=argument,
            got=describe(x),
            need="arrays of the worker that runs f",
            mend="make it outside of f, and pass it: spmd.remote(f, at=k)(x)",
        )
    if type(x) is not Array and not on_device(x):
        need = "arrays, numbers and None, in tuples, lists and dicts with keys that are strings or integers"
        otherwise = "return the arrays; what else is needed on all workers, let all of them compute"
        data = np.asarray(admit(x, where, argument, need=need, otherwise=otherwise))
    if type(x) is Array:
        admit_dtype(x.dtype, where, lambda: describe(x))
        return x if hasattr(x.value, "dtype") else x.astype(x.dtype)
    data = owned_block(data, Vary(()))
    return worker.carrying(data, worker.state())


def decoded(structure, leaves: Iterator):
    """The structure with the leaves in their places."""
    if structure is None:
        return None
    if structure == 0:
        return next(leaves)
    kind, parts = structure
    if kind == "dict":
        return {k: decoded(part, leaves) for k, part in parts}
    children = [decoded(part, leaves) for part in parts]
    if ":" in kind:
        return _class_of(*kind.split(":"))(*children)
    return {"tuple": tuple, "list": list}[kind](children)


def _is_named_tuple(kind: type) -> bool:
    """Whether other processes find this class of named tuples by its name."""
    if not issubclass(kind, tuple) or not hasattr(kind, "_fields"):
        return False
    return _class_of(kind.__module__, kind.__qualname__) is kind


def _class_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name, None)


def _same_error(report: dict[str, str], where: str, who: str) -> Exception:
    """A copy of the error that the root raised in another process."""
    error = rebuilt_error(report["error"], report["text"])
    error.add_note(f"raised in {where} by {who}:\n{report['trace']}")
    return error


def _closure(function: str) -> Exception:
    return ClosureError.at(
        f"spmd.{function}",
        argument="f",
        got="a function that uses a differentiated array which is not among its arguments",
        need="Rooted values as arguments",
        mend=f"spmd.keep(x, axis_name, root) makes one of an Invariant array; pass it to {function}",
    )
