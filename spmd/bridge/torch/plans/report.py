"""What a plan does to a module: how its parameters lie, what a step sends, and the memory of each worker."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from spmd.bridge.torch.plans.measured_step import Sending, StepRecord, measure_step, own_bytes
from spmd.bridge.torch.tensor_state import is_partitioned
from spmd.errors import LayoutError, describe
from spmd.layout import P
from spmd.mesh import Worker, here
from spmd.representations.tables import Part, Printed, Report, Table
from spmd.tracebacks import api_boundary
from spmd.transport.call import Call

__all__ = ["ParameterRow", "PlanReport", "Range", "SentRow", "plan_report"]

_WIDTH = 100


class Range(NamedTuple):
    """The least and the most over the workers."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least:,}" if self.least == self.most else f"{self.least:,} to {self.most:,}"


@dataclass(frozen=True)
class ParameterRow:
    """A parameter, or a module with a style and no parameter of its own, whose `parameter` is empty.

    module, kind, style: the name of the module, its class, and its style in the plan. shape: of the whole. lies: the
    spec; "whole" on every worker; "as name" for a parameter that is listed at another module. nbytes: of a worker.
    """

    module: str
    kind: str
    style: str
    parameter: str
    shape: tuple[int, ...]
    lies: str
    nbytes: Range


@dataclass(frozen=True)
class SentRow:
    """What an operator sends over these axes, in one step, in a module: "forward" or "backward".

    calls: how often it is applied. messages, nbytes: sent by a worker, as `spmd.ledger` counts.
    """

    module: str
    phase: str
    operator: str
    axes: tuple[str, ...]
    calls: int
    messages: Range
    nbytes: Range


@dataclass(frozen=True)
class PlanReport(Printed):
    """What `plan_report` returns; its text is a table.

    module: the class. axes: of the mesh. parameters, sent: rows. kept: by module, the bytes that forward keeps for
    backward. memory: by kind, the bytes of a worker: "parameters", "gradients", "states of Adam", "buffers",
    "kept for backward".

        >>> def body(x):
        ...     net = spt.parallelize(torch.nn.Sequential(torch.nn.Linear(2, 6)), {"0": spt.whole()})
        ...     return isinstance(spt.plan_report(net, x), spt.PlanReport)
        >>> with spmd.Mesh(model=2):
        ...     spt.map(body, P(), None)(torch.ones(3, 2))
        True
    """

    module: str
    axes: dict[str, int]
    parameters: tuple[ParameterRow, ...]
    sent: tuple[SentRow, ...]
    kept: dict[str, Range]
    memory: dict[str, Range]
    sent_by_axes: dict[tuple[str, ...], Range]
    """By axes, the bytes that a worker sends in a step."""

    def to_dict(self) -> dict[str, Any]:
        """The report as numbers, texts, lists and dictionaries, for JSON. The keys of axes are joined by commas."""
        made = asdict(self) | {"sent_by_axes": {", ".join(k): v for k, v in self.sent_by_axes.items()}}
        return json.loads(json.dumps(made))

    def _report(self) -> Report:
        mesh = ", ".join(f"{k}={n}" for k, n in self.axes.items())
        heading = f"{self.module} on Mesh({mesh}): bytes are those of one worker, from the least to the most"
        parts: list[Part | str] = [self._parameter_table(), self._sent_table()]
        parts.append(_table(("memory of a worker", "bytes"), [(k, str(v)) for k, v in self.memory.items()], {1}))
        if self.kept:
            kept = [(self._shown(k), str(v)) for k, v in self.kept.items()]
            parts.append(_table(("kept for backward by", "bytes"), kept, {1}))
        return Report(heading, parts)

    def _shown(self, module: str) -> str:
        return module or f"({self.module})"

    def _parameter_table(self) -> Table:
        rows: list[tuple[str, ...]] = []
        last = None
        for r in self.parameters:
            if r.module != last:
                rows.append((f"{self._shown(r.module)}: {r.kind}{r.style and ', '}{r.style}",))
            if r.parameter:
                shape = " x ".join(map(str, r.shape)) or "number"
                rows.append((f"    {r.parameter}", shape, r.lies, str(r.nbytes)))
            last = r.module
        return _table(("parameter", "shape", "lies", "bytes"), rows, {3})

    def _sent_table(self) -> Table | str:
        if not self.sent:
            return "a step sends nothing"
        rows, last = [], None
        for r in self.sent:
            head = (r.phase, self._shown(r.module))
            named = tuple(a if a != b else "" for a, b in zip(head, last or ("", ""), strict=True))
            named = head if named[0] else named
            rows.append((*named, r.operator, ", ".join(r.axes), str(r.calls), str(r.messages), str(r.nbytes)))
            last = head
        for axes, nbytes in self.sent_by_axes.items():
            rows.append(("in all", "", "", ", ".join(axes), "", "", str(nbytes)))
        return _table(("a step sends", "module", "operator", "axes", "calls", "messages", "bytes"), rows, {4, 5, 6})


@api_boundary
def plan_report(module: nn.Module, *example: Any, **options: Any) -> PlanReport:
    """What lies where in a module, what one step of it sends, and the memory of each worker.

        def main():
            split = spt.parallelize(net, plan)
            return str(spt.plan_report(split, x, labels))

        print(spt.map(main, (), None)())

    module: one that `spt.parallelize` returns, or any other, of `spt.nn` or of `spt.data_parallel`. example, options:
    the arguments of a call. In a body; collective. It runs the module forward, and backward from a cotangent of ones,
    in the mode in which it is. Parameters, gradients, buffers and random generators stay as they were; hooks of yours
    run. What is sent is counted as by `spmd.ledger`, and is assigned to the innermost module that runs, backward as
    forward. The memory kept for backward is that of tensors that functions of torch save, inputs too, parameters not.
    Cost: that of the step, and the report of each worker, sent to all. Raises LayoutError for what is no module.

        >>> def body(x):
        ...     net = torch.nn.Sequential(torch.nn.Linear(2, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
        ...     net = spt.parallelize(net, {"0": spt.column("model"), "2": spt.row("model")})
        ...     return str(spt.plan_report(net, x)).splitlines()
        >>> with spmd.Mesh(model=2):
        ...     for line in spt.map(body, P(), None)(torch.ones(3, 2))[11:15]:
        ...         print(line)
        a step sends  module  operator  axes   calls  messages  bytes
        -------------------------------------------------------------
        forward       2       Sum       model      1         1     24
        in all                          model                      24
    """
    where = "spt.plan_report"
    worker = here(where)
    if not isinstance(module, nn.Module):
        raise LayoutError.at(
            where,
            argument="module",
            got=describe(module),
            need="an nn.Module and arguments of a call",
            mend="spt.plan_report(spt.parallelize(net, plan), x)",
        )
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(list(devices)):
        own = _own_parameters(module)
        sizes = _of_all_workers(where, worker, [r.nbytes.most for r in own])  # all have saved their generators
        record = measure_step(module, example, options)
    records = _of_all_workers(where, worker, _plain(module, record))  # all have restored them
    of_workers = map(_range, zip(*sizes, strict=True))
    rows = tuple(replace(r, nbytes=nbytes) for r, nbytes in zip(own, of_workers, strict=True))
    kept: dict[str, Range] = {}
    for name in _union(records, "kept"):
        kept[name] = _range(r["kept"].get(name, 0) for r in records)
    return PlanReport(
        module=type(module).__name__,
        axes=dict(worker.mesh.axes),
        parameters=rows,
        sent=_sent_rows(records),
        kept=kept,
        memory=_memory(records),
        sent_by_axes=_sent_by_axes(records),
    )


def _of_all_workers(where: str, worker: Worker, value: Any) -> list[Any]:
    """A value of JSON of every worker, in order."""
    axes = tuple(worker.mesh.axes)
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    call = Call(where, axes, text.dtype, text.shape, same_shape=None, frame=sys._getframe())
    return [json.loads(bytes(t)) for t in worker.comm.all_gather(worker.group(axes), call, text).wait()]


def _own_parameters(module: nn.Module) -> list[ParameterRow]:
    """The rows of a module, with the bytes of this worker."""
    rows: list[ParameterRow] = []
    names: dict[int, str] = {}
    for name, inner in module.named_modules():
        head = (name, _class_name(inner), str(vars(inner).get("_spmd_style", "")).removeprefix("spt."))
        own = [(n, p) for n, p in inner._parameters.items() if p is not None]
        if not own and head[2]:
            rows.append(ParameterRow(*head, "", (), "", Range(0, 0)))
        for n, p in own:
            full = f"{name}.{n}" if name else n
            first = names.setdefault(id(p), full)
            size = own_bytes(p) if first == full else 0
            lies = _lies(p) if first == full else f"as {first}"
            rows.append(ParameterRow(*head, n, tuple(p.shape), lies, Range(size, size)))
    return rows


def _class_name(module: nn.Module) -> str:
    return type(module).__name__.removeprefix("_")


def _lies(p: torch.Tensor) -> str:
    if not is_partitioned(p):
        return "whole"
    layout: Any = p.block_layout  # type: ignore[attr-defined]
    if layout.spec is None:
        return "grid " + " x ".join(str(len(c)) for c in layout.cuts)
    lies = str(P(*layout.spec.trimmed))
    return lies if layout.shape == tuple(p.shape) else f"{lies} of {' x '.join(map(str, layout.shape))}"


def _plain(module: nn.Module, record: StepRecord) -> dict[str, Any]:
    """What this worker tells the others."""
    parameters = list(module.parameters())
    trained = sum(own_bytes(p) for p in parameters if p.requires_grad)
    return {
        "sent": [[*sending, *counts] for sending, counts in record.sent.items()],
        "kept": record.kept,
        "memory": {
            "parameters": sum(map(own_bytes, parameters)),
            "gradients": trained,
            "states of Adam": 2 * trained,
            "buffers": sum(own_bytes(b) for b in module.buffers()),
            "kept for backward": sum(record.kept.values()),
        },
    }


def _range(values: Iterable[int]) -> Range:
    values = list(values)
    return Range(min(values), max(values))


def _union(records: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """The keys in the records of all workers, in the order of the first that has them."""
    return list(dict.fromkeys(k for r in records for k in r[key]))


def _memory(records: Sequence[dict[str, Any]]) -> dict[str, Range]:
    return {kind: _range(r["memory"][kind] for r in records) for kind in records[0]["memory"]}


def _sent_rows(records: Sequence[dict[str, Any]]) -> tuple[SentRow, ...]:
    """What sends messages on some worker."""
    counts: dict[Sending, list[list[int]]] = {}
    for w, record in enumerate(records):
        for module, phase, operator, axes, *own in record["sent"]:
            key = Sending(module, phase, operator, tuple(axes))
            counts.setdefault(key, [[0, 0, 0] for _ in records])[w] = own
    rows = []
    for key, own in counts.items():
        calls, messages, nbytes = (_range(c) for c in zip(*own, strict=True))
        if messages.most:
            rows.append(SentRow(*key, calls.most, messages, nbytes))
    return tuple(rows)


def _sent_by_axes(records: Sequence[dict[str, Any]]) -> dict[tuple[str, ...], Range]:
    totals: dict[tuple[str, ...], list[int]] = {}
    for w, record in enumerate(records):
        for *_, axes, _, _, nbytes in record["sent"]:
            totals.setdefault(tuple(axes), [0] * len(records))[w] += nbytes
    return {axes: _range(own) for axes, own in totals.items() if any(own)}


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], right: set[int]) -> Table:
    return Table(rows, header, sorted(right), width=_WIDTH, ruled=True)
