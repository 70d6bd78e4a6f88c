"""The states of the stages of a pipeline, as parts of the state of the whole model."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from spmd.bridge.torch.pipelines.ties import Tie
from spmd.bridge.torch.pipelines.values import WHERE, message_of, structured, value_of_message, value_of_output
from spmd.bridge.torch.sharded import Place, blocks_of
from spmd.errors import StateError
from spmd.mesh import Worker
from spmd.operators.partial_comm import whole_comm
from spmd.training.pipelines.schedules import Schedule
from spmd.transport.call import Call

__all__ = ["StageNames", "gathered_states"]


class _Entry(NamedTuple):
    """An entry of the state of a stage. parameter: the first name in the stage of the parameter that it is, or None.
    ties: the numbers of the ties to which it belongs."""

    name: str
    parameter: str | None
    ties: list[int]


class StageNames:
    """How the states of all stages are called in the state of the whole model: the same on all workers.

    An entry has its name in the stage: of layers that `spt.split_stages` has cut that is the one in the model. If two
    stages have entries of one name, all are called `stages.k.name`.
    places: by name, of all stages in order. Tied parameters are called by the first of them in an optimiser.

    Cost: an all-gather of the names.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        ties: Sequence[Tie],
        schedule: Schedule,
        axes: tuple[str, ...],
        worker: Worker,
    ):
        own = {k: _entries(module, ties) for k, module in modules.items()}
        entries = {k: [_Entry(*e) for e in each] for k, each in sorted(_all_entries(own, axes, worker))}
        names = [e.name for each in entries.values() for e in each]
        self.is_one = len(set(names)) == len(names)
        mesh, place = worker.mesh, worker.group(axes).index
        here = tuple(w for w in range(mesh.size) if mesh.group(w, axes).index == place)
        self.places: dict[str, Place] = {}
        first: dict[int, str] = {}
        for k, each in entries.items():
            for e in each:
                parameter = None if e.parameter is None else self.full(k, e.parameter)
                for tie in e.ties:
                    parameter = first.setdefault(tie, parameter or "")
                workers = here if schedule.worker_of(k) == place else ()
                self.places[self.full(k, e.name)] = Place(workers, parameter)
        self._names = {k: {e.name for e in each} for k, each in entries.items()}

    def full(self, stage: int, name: str) -> str:
        """The name in the model of what has a name in a stage."""
        return name if self.is_one else f"stages.{stage}.{name}"

    def renamed(self, stage: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a stage, by names in the model."""
        changed = sorted(self._names[stage] ^ state.keys())
        if changed:
            raise StateError.at(
                WHERE,
                argument="stages",
                got=f"stage {stage}, which {'has' if changed[0] in state else 'lacks'} {changed[0]!r} by now",
                need="the parameters and buffers with which the pipeline was made",
                mend="change the layers before spt.pipeline",
            )
        return {self.full(stage, name): x for name, x in state.items()}

    def of_stage(self, stage: int) -> dict[str, str]:
        """The names in a stage, by those in the model."""
        return {self.full(stage, name): name for name in self._names[stage]}


def _entries(module: nn.Module, ties: Sequence[Tie]) -> list[_Entry]:
    tied: dict[int, list[int]] = {}
    for number, tie in enumerate(ties):
        for _, p in tie.own:
            tied.setdefault(id(p), []).append(number)
    parameters = {id(p) for p in module.parameters()}
    first: dict[int, str] = {}
    return [
        _Entry(name, first.setdefault(id(x), name) if id(x) in parameters else None, tied.get(id(x), []))
        for name, x in blocks_of(module, keep_vars=True).items()
    ]


def _all_entries(own: Mapping[int, list[_Entry]], axes: tuple[str, ...], worker: Worker) -> list[Any]:
    text = np.frombuffer(json.dumps([*own.items()]).encode(), np.uint8)
    texts = worker.comm.all_gather(worker.group(axes), _call("the names of stages", axes, text.shape), text).wait()
    return [each for text in texts for each in json.loads(bytes(text))]


def _call(detail: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> Call:
    frame = sys._getframe(2)
    call = Call("pipeline", axes, np.dtype(np.uint8), shape, detail=detail, same_shape=None, frame=frame)
    call.host = True
    return call


def gathered_states(
    own: Mapping[int, Mapping[str, Any]],
    schedule: Schedule,
    axes: tuple[str, ...],
    worker: Worker,
    device: torch.device,
) -> dict[int, dict[str, Any]]:
    """The states of all stages. own: those of this worker's stages, of whole tensors.

    Cost: one broadcast for each stage.
    """
    group = worker.group(axes)
    found = {}
    with whole_comm(worker.comm).uncounted():
        for stage in range(schedule.stages):
            sent = message_of(value_of_output(dict(own[stage]))[0]) if stage in own else None
            call = _call(f"the state of stage {stage}", axes, (0,) if sent is None else sent.shape)
            block = worker.comm.broadcast(group, call, sent, schedule.worker_of(stage)).wait()
            value = value_of_message(block.copy(), device)
            found[stage] = structured(value.structure, value.tensors)
    return found
