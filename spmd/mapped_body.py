"""A body with its specs, run on every worker of a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from spmd.autodiff.staging.together import RECORDING
from spmd.autodiff.tape import suspended
from spmd.errors import SpecError, describe
from spmd.layout import Spec
from spmd.map_arguments import ArgumentSpecs, MapArgument
from spmd.map_results import BodyResults, MapResult, ResultSpecs, joined_leaves, one_structure
from spmd.mesh import Mesh, Worker
from spmd.replicas.closures import closed_arrays, note_closure
from spmd.replicas.compare import next_turn
from spmd.scheduler_choice import SchedulerTrial
from spmd.spec_trees import Leaf, spec_leaves
from spmd.transport.call import ONE_BY_ONE
from spmd.transport.handles import Outcome

__all__ = ["MappedBody"]


class MappedBody:
    """A body with its specs: checks arguments and results, and runs the body on every worker.

    where: its name in messages. is_function: whether it is a function of global arrays, which all processes call at one
    line. arguments, results: the checks by in_specs and out_specs. turns: how often each kind of
    run, and each comparison of replicated values, was made. trials: the choice of a scheduler, by mesh and kind of run.
    """

    def __init__(
        self, f: Callable, in_specs: Any, out_specs: Any, mesh: Mesh | None, check: bool, where: str | None = None
    ):
        wrapper: Any = self
        functools.update_wrapper(wrapper, f, updated=())  # without f's attributes: they would count as this object's
        self.f = f
        self.in_specs = tuple(in_specs) if isinstance(in_specs, list) else in_specs
        self.out_specs = out_specs
        self.mesh = mesh
        self.check = check
        self.is_function = where is not None
        self.where = where or f"spmd.map of {getattr(f, '__name__', None) or type(f).__name__}"
        self.arguments = ArgumentSpecs(self.where, f, self.in_specs)
        self.results = ResultSpecs(self.where, out_specs)
        self.trials: dict[Any, SchedulerTrial] = {}
        self.turns: dict[Any, int] = {}
        for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
            for path, spec in spec_leaves(specs):
                if spec is not None and not isinstance(spec, Spec):
                    raise SpecError.at(
                        self.where,
                        argument=name + path,
                        got=describe(spec),
                        need="P(...), a Layout, None, or a pytree of them",
                        mend='P("x") splits dimension 0 over axis x; P() replicates',
                    )

    def __repr__(self) -> str:
        return f"{self.where} ({self.in_specs} -> {self.out_specs})"

    def run(
        self, mesh: Mesh, kind: tuple, leaves: list[Leaf], body: Callable[[Worker, list], BodyResults], tracked: bool
    ) -> MapResult:
        """Run body(worker, blocks of the leaves) on every worker, and join the results. kind: of run, a key."""
        if not tracked and RECORDING.get() is not None:
            raise self.unchecked_error("spmd.jit of a function that calls a map", "map")
        inputs = [self.arguments.lay_out(mesh, leaf) for leaf in leaves]

        def on_worker(worker: Worker):
            return body(worker, [x.block(worker) for x in inputs])

        outcome = self.execute(mesh, (*kind, *(x.kind for x in inputs)), on_worker, tracked=tracked)
        self.note_inputs(mesh, outcome, [x.path for x in leaves], inputs)
        treedef = one_structure(self.where, mesh, outcome)
        joined = joined_leaves(self.where, mesh, outcome, self.check, self.turns)
        return MapResult(treedef, joined, outcome.replicas.any_noted)

    def unchecked_error(self, where: str, argument: str) -> SpecError:
        """The error for this map, with check=False, within spmd.jit."""
        return SpecError.at(
            where,
            argument=argument,
            got=f"{self.where} with check=False, whose body has bare arrays",
            need="arrays that can be followed",
            mend="leave check=False out: what it saves is not done again",
        )

    def execute(self, mesh: Mesh, key: Any, body: Callable[[Worker], Any], *, tracked: bool) -> Outcome:
        """Run body(worker) on every worker, with the scheduler that suits this map for runs with this key."""
        number, name = next_turn(self.turns, key), (self.where, key[0])
        if mesh.scheduler == "threads" or mesh.transport.name != "local" or RECORDING.get() is not None:
            with suspended():
                return mesh.run(body, tracked=tracked, number=number, one_line=self.is_function, name=name)
        trial = self.trials.get((mesh, key))
        if trial is None:
            trial = self.trials[mesh, key] = SchedulerTrial()
        scheduler = trial.next if mesh.scheduler == "auto" else "lockstep"
        in_turns = scheduler == "lockstep"
        with suspended():
            how = ONE_BY_ONE if in_turns and trial.quiet else scheduler
            outcome = mesh.run(body, tracked=tracked, scheduler=how, number=number, name=name)
        if in_turns:
            trial.quiet = outcome.switches == 0
        if mesh.scheduler == "auto" and (chosen := trial.learn(scheduler, outcome, mesh)):
            mesh.chosen[f"{key[0]} of {self.where}"] = chosen
        return outcome

    def note_inputs(
        self,
        mesh: Mesh,
        outcome: Outcome,
        paths: Sequence[str],
        inputs: Sequence[MapArgument],
        closed: list[tuple[str, Any]] | None = None,
    ) -> None:
        """Note the bare arguments of this process, and the arrays that the body closes over, for the comparison with
        other processes at the end of the map. closed: these arrays, if they are known."""
        if not (outcome.replicas.distributed and self.check and mesh.checks):
            return
        for path, x in zip(paths, inputs, strict=True):
            x.note(mesh, outcome.replicas, self.where, path, self.turns)
        arrays = closed_arrays(self.f) if closed is None else closed
        note_closure(tuple(mesh.axes), outcome.replicas, self.where, arrays, self.turns)
