"""How a map is run: for its values, with a pullback on a tape, or for its value and gradients in one run.

`apply` runs a map for its values; where arguments are traced it records one node on the tape for the whole map. Every
worker keeps a tape of its own between the forward and the backward run. `value_and_grad` needs no outer tape: every
worker goes forward and back in one run. `spmd.jit` passes functions of its own for `run` and `forward`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray, as_block, layout_of
from spmd.autodiff import transform_arguments, transforms, tree
from spmd.autodiff.dtypes import kind_of_dtype
from spmd.autodiff.sanitizers import FINITE
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import MeshError
from spmd.layout import P, Spec
from spmd.map_arguments import cotangent_for, cotangent_input, cotangent_layout
from spmd.map_results import BodyResults, MapResult, joined_leaves, one_structure
from spmd.mapped_body import MappedBody
from spmd.mesh import WORKER, Mesh, Worker
from spmd.operators.reduce import psum
from spmd.operators.varying import vary
from spmd.placement import mesh_for
from spmd.spec_trees import Leaf
from spmd.state import state_of

__all__ = ["MapVjp", "Run", "apply", "called_in_body", "gradients", "value_and_grad"]

Run = Callable[[Mesh, tuple, list[Leaf], Callable[[Worker, list], BodyResults], bool], MapResult]
"""`MappedBody.run`, or a function in its place that records the run."""


def called_in_body(where: str) -> MeshError:
    return MeshError.at(
        where,
        got="a map that is called inside a body",
        need="maps that are called from outside",
        mend="call the function itself: in a body it already has its blocks; in the handler of a signal "
        "that interrupts a body, contextvars.Context().run(f, x)",
    )


def apply(
    mapped: MappedBody, args: tuple, kwargs: dict, run: Run, forward: Callable[[MapVjp, bool], tuple] | None = None
) -> Any:
    """Call a map. run: runs it for its values. forward: runs it with a pullback; by default `MapVjp.forward`."""
    if WORKER.get() is not None:
        raise called_in_body(mapped.where)
    mesh = mesh_for(mapped.mesh, mapped.where)
    leaves, rebuild = mapped.arguments.bind(mesh, args, kwargs)
    tape = transform_arguments.innermost([leaf.value for leaf in leaves if leaf.spec is not None])
    if tape is None:

        def body(worker: Worker, blocks: list):
            args, kwargs = rebuild(blocks)
            return mapped.results.check(worker, mapped.f(*args, **kwargs))

        result = run(mesh, ("run",), leaves, body, mapped.check)
        return tree.unflatten(result.treedef, result.joined)
    of = [k for k, x in enumerate(leaves) if x.spec is not None and type(x.value) is Array and x.value.tape is tape]
    lowered = [x._replace(value=transform_arguments.lower(x.value, tape)) for x in leaves]
    vjp = MapVjp(mapped, mesh, lowered, rebuild, of)
    if transform_arguments.innermost([x.value for x in lowered]) is None:
        out_tree, outs, pull = (forward or MapVjp.forward)(vjp, tape.once)
    else:
        # An outer tape traces the arguments too: apply the map below this tape, and pull back by a map that can be
        # differentiated again.
        args, kwargs = rebuild([x.value for x in lowered])
        outs, out_tree = tree.flatten(apply(mapped, args, kwargs, run, forward), none_is_leaf=True)
        pull = functools.partial(vjp.derivative, outs)
    parents = [leaves[k].value for k in of]
    return tree.unflatten(out_tree, transforms.joint(mapped.where, tape, parents, outs, pull))


class MapVjp:
    """A map that is differentiated from outside.

    leaves, rebuild: the arguments, as `ArgumentSpecs.bind` returns them. of: the differentiated ones, by position.
    """

    def __init__(self, mapped: MappedBody, mesh: Mesh, leaves: list[Leaf], rebuild: Callable, of: list[int]):
        self.mapped = mapped
        self.mesh = mesh
        self.leaves = leaves
        self.rebuild = rebuild
        self.of = of

    def forward(self, once: bool) -> tuple[Any, list, Callable[[list], list]]:
        """Run forward, every worker on its own tape: the structure of the results, they, and their pullback.

        once: the pullback is called once, and frees the tapes during its run.
        """
        mapped, mesh = self.mapped, self.mesh
        inputs = [mapped.arguments.lay_out(mesh, leaf) for leaf in self.leaves]

        def body(worker: Worker):
            return self.on_worker(worker, [x.block(worker) for x in inputs], once)

        kind = (*(x.kind for x in inputs), *self.of)
        outcome = mapped.execute(mesh, ("forward", *kind), body, tracked=True)
        pulls = {w: result.pull for w, result in outcome.results.items()}
        mapped.note_inputs(mesh, outcome, [x.path for x in self.leaves], inputs)
        out_tree = one_structure(mapped.where, mesh, outcome)
        outs = joined_leaves(mapped.where, mesh, outcome, mapped.check, mapped.turns)

        def pull(gs):
            if any(type(value) is Array for value in gs):
                return self.derivative(outs, gs)
            cotangents = [cotangent_input(mesh, o, g) for o, g in zip(outs, gs, strict=True)]

            def backward(worker: Worker):
                blocks = [None if c is None else c.block(worker) for c in cotangents]
                return gradients(worker, [self.leaves[k] for k in self.of], pulls[worker.index](blocks))

            outcome = mapped.execute(mesh, ("backward", *kind), backward, tracked=True)
            noted = [(f"the cotangent of result {k}", c) for k, c in enumerate(cotangents) if c is not None]
            mapped.note_inputs(mesh, outcome, [path for path, _ in noted], [c for _, c in noted])
            return self.as_arguments(joined_leaves(mapped.where, mesh, outcome, mapped.check, mapped.turns))

        return out_tree, outs, pull

    def as_arguments(self, gs: Sequence[Any]) -> list:
        """Gradients in the layouts of their arguments."""
        return [cotangent_for(g, self.leaves[k].value) for g, k in zip(gs, self.of, strict=True)]

    def on_worker(self, worker: Worker, blocks: list, once: bool) -> BodyResults:
        """Run the body of one worker on a tape: its results, and their pullback to the differentiated blocks."""
        results = self.mapped.results

        def part(*xs):
            full = list(blocks)
            for k, x in zip(self.of, xs, strict=True):
                full[k] = x
            args, kwargs = self.rebuild(full)
            leaves, treedef = results.leaves(self.mapped.f(*args, **kwargs))
            stated = [
                results.as_object(leaf)
                if leaf.spec is None
                else results.in_promised_state(worker, leaf, leaf.value)
                if type(leaf.value) is Array
                else leaf.value
                for leaf in leaves
            ]
            return [x for x in stated if _is_differentiable(x)], (treedef, leaves, stated)

        moving = [blocks[k] for k in self.of]
        values, pullback, (treedef, leaves, stated) = transforms.pullback_of(part, moving, has_aux=True, once=once)
        traced = iter(values)
        final = [next(traced) if _is_differentiable(x) else x for x in stated]
        outs = [
            results.block(worker, leaf._replace(value=x)) if leaf.spec is not None else x
            for leaf, x in zip(leaves, final, strict=True)
        ]
        places = [k for k, x in enumerate(stated) if _is_differentiable(x)]

        def pull(gs: list):
            states = [state_of(leaves[k].spec.varying) for k in places]
            given = [
                Array(np.zeros_like(outs[k]), state) if gs[k] is None else gs[k]
                for k, state in zip(places, states, strict=True)
            ]
            # Every worker's part of a sum has the cotangent of the sum.
            return pullback([vary(g, state) for g, state in zip(given, states, strict=True)])

        return BodyResults(treedef, [x.path for x in leaves], [x.spec for x in leaves], outs, pull)

    def derivative(self, outs: list, gs: list) -> list:
        """The pullback as a map of the arguments and the cotangents, which can be differentiated again."""
        leaves, mapped = self.leaves, self.mapped
        places = [k for k, g in enumerate(gs) if g is not None]

        def body(arguments: list, cotangents: dict):
            worker = WORKER.get()
            assert worker is not None
            pull = self.on_worker(worker, list(arguments), False).pull
            assert pull is not None
            gs = pull([cotangents.get(k) for k in range(len(outs))])
            return tuple(_of_first(worker, g, leaves[k].spec) for g, k in zip(gs, self.of, strict=True))

        # Cotangents have the blocks of their results.
        cotangent_specs = {k: cotangent_layout(layout_of(outs[k])) for k in places}
        in_specs = ([x.spec for x in leaves], cotangent_specs)
        out_specs = tuple(cotangent_layout(leaves[k].spec) for k in self.of)
        pullback = MappedBody(body, in_specs, out_specs, self.mesh, mapped.check)
        return self.as_arguments(
            apply(pullback, ([x.value for x in leaves], {k: gs[k] for k in places}), {}, pullback.run)
        )


def value_and_grad(
    mapped: MappedBody,
    check: Callable[[Any], None],
    argnums: Sequence[int],
    args: tuple,
    kwargs: dict,
    run: Run,
) -> tuple[Any, list] | None:
    """The value, and the gradients of the arguments at `argnums`, in one run, forward and backward.

    check: raises if a result has no gradient. None where two runs are needed: an argument is on no mesh or traced from
    outside, the result is a tree, or non-finite values are searched for.
    """
    if type(mapped.out_specs) is not P or mapped.out_specs.unreduced or WORKER.get() is not None or FINITE.get():
        return None
    flat, structures = zip(*[tree.flatten(x, none_is_leaf=True) for x in args], strict=True)
    selected = [x for n in argnums for x in flat[n]]
    if not selected or not all(type(x) is PartitionedArray and kind_of_dtype(x.dtype) in ("f", "c") for x in selected):
        return None
    mesh = mesh_for(mapped.mesh, mapped.where)
    leaves, rebuild = mapped.arguments.bind(mesh, args, kwargs)
    ends = [0, *itertools.accumulate(len(xs) for xs in flat)]
    of = [k for n in argnums for k in range(ends[n], ends[n + 1])]
    if any(type(x.value) is Array for x in leaves) or any(leaves[k].spec is None for k in of):
        return None
    vjp = MapVjp(mapped, mesh, leaves, rebuild, of)

    def body(worker: Worker, blocks: list):
        forward = vjp.on_worker(worker, blocks, True)
        check(tree.unflatten(forward.treedef, forward.blocks))
        assert forward.pull is not None
        one = Array(transform_arguments.one_like(forward.blocks[0]), state_of(()))
        back = gradients(worker, [leaves[k] for k in of], forward.pull([one]))
        return BodyResults(
            forward.treedef, forward.paths + back.paths, forward.specs + back.specs, forward.blocks + back.blocks
        )

    value, *grads = run(mesh, ("gradient", *of), leaves, body, True).joined
    grads = iter([cotangent_for(g, leaves[k].value) for g, k in zip(grads, of, strict=True)])
    return value, [tree.unflatten(structures[n], itertools.islice(grads, len(flat[n]))) for n in argnums]


def gradients(worker: Worker, of: list[Leaf], gs: Sequence[Any]) -> BodyResults:
    """The gradients of arguments on one worker, in the form of a body's results."""
    blocks = [as_block(value_of(g)) for g in gs]
    if worker.mesh.places is not None:
        blocks = [worker.mesh.places.moved(b, worker.index) for b in blocks]
    specs = [cotangent_layout(x.spec) for x in of]
    return BodyResults(None, [f"the gradient of {x.path}" for x in of], specs, blocks)


def _of_first(worker: Worker, g: Any, spec: Spec | None) -> Any:
    """The gradient of an argument that is unreduced along some axes, of which each worker has a copy, as one value: the
    copy of the first worker along them."""
    names = tuple(n for n in worker.mesh.axes if spec is not None and n in spec.unreduced)
    return psum(g * int(worker.group(names).index == 0), names) if names else g


def _is_differentiable(x: Any) -> bool:
    return type(x) is Array and kind_of_dtype(x.dtype) in ("f", "c")
