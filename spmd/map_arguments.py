"""The arguments of a map, laid out by in_specs, and the cotangents of its results."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from spmd import device as devices
from spmd.array import PartitionedArray, layout_of, reduced_together, relayout
from spmd.autodiff import tree
from spmd.autodiff.admission import admit
from spmd.autodiff.dtypes import dtype_name
from spmd.autodiff.registry import primitive
from spmd.autodiff.staging.recorder import is_slot, one_line, slot_of
from spmd.autodiff.staging.together import at_worker, is_over
from spmd.autodiff.tracer import USUAL, Array, value_of
from spmd.errors import MeshError, SpecError, nearest
from spmd.global_functions import function_of
from spmd.kernels import on_device
from spmd.layout import Layout, P, Spec
from spmd.mesh import Mesh, Worker
from spmd.operators.memo import bounded
from spmd.operators.varying import Join
from spmd.ownership import DONATED, donated_error
from spmd.placement import cut, put
from spmd.replicas.compare import compared_part, digest, is_skipped, next_turn
from spmd.replicas.records import ReplicaRecord, Replicas
from spmd.spec_trees import Leaf, spread
from spmd.state import state_of

_NUMBERS = (bool, int, float, complex)


def device_suffix(mesh: Mesh) -> str:
    """The device of a mesh as messages add it; empty for the host."""
    return "" if mesh.device == "cpu" else f", {mesh.device}"


def _positional(leaves: Sequence) -> tuple[tuple, dict]:
    """(args, kwargs) where every argument is a leaf and given by position."""
    return tuple(leaves), {}


def _parameter_names(f: Callable) -> tuple[str, ...]:
    """The names of the positional parameters of a function; empty if its signature is unknown."""
    try:
        parameters = inspect.signature(f).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


class ArgumentSpecs:
    """The arguments of a mapped function: matched with in_specs, checked, and laid out.

    where: the map, for messages. f: the body. in_specs: a tuple by position, a dict by name, or one spec for all.
    """

    def __init__(self, where: str, f: Callable, in_specs: Any):
        self.where = where
        self.f = f
        self.in_specs = in_specs
        self._names = _parameter_names(f)
        self._fits: dict[tuple[int, int], tuple[bool, Layout, Spec]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the results that are cached by ids of this process."""
        return {**self.__dict__, "_fits": {}}

    def bind(
        self, mesh: Mesh, args: tuple, kwargs: dict, admit: Callable[[Mesh, Leaf], Leaf] | None = None
    ) -> tuple[list[Leaf], Callable[[Sequence], tuple]]:
        """The arguments as leaves with their specs, and a function from new leaves to (args, kwargs).

        admit: checks an argument in another layout than that of its spec; by default `admit` below.
        """
        leaves: list[Leaf] = []
        for name, spec, value in self._named(args, kwargs):
            leaves += spread(self.where, name, "in_specs", spec, value)
        for k, leaf in enumerate(leaves):
            if leaf.spec is not None and leaf.value is not None and not self.is_laid_out(mesh, leaf.value, leaf.spec):
                leaves[k] = (admit or self.admit)(mesh, leaf)
        if not kwargs and [id(x.value) for x in leaves] == [id(a) for a in args]:
            return leaves, _positional
        _, treedef = tree.flatten((args, kwargs), none_is_leaf=True)
        return leaves, functools.partial(tree.unflatten, treedef)

    def _named(self, args: tuple, kwargs: dict) -> list[tuple[str, Any, Any]]:
        """(name, spec, value) of each argument: positional ones first, then keywords in sorted order."""
        specs = self.in_specs
        names = self._names
        if not kwargs and type(specs) is tuple and len(specs) == len(args) <= len(names):
            return list(zip(names, specs, args, strict=False))
        positional = [names[k] if k < len(names) else f"args[{k}]" for k in range(len(args))]
        keywords = sorted(kwargs)
        if isinstance(specs, dict):
            missing = [n for n in (*positional, *keywords) if n not in specs]
            if missing:
                raise self._missing_spec(missing[0], f"specs for {', '.join(repr(n) for n in specs)}")
            if len(specs) > len(positional) + len(keywords):
                self._check_surplus({*positional, *keywords})
            chosen = [specs[n] for n in (*positional, *keywords)]
        elif isinstance(specs, tuple):
            places = [*range(len(args)), *(names.index(n) if n in names else len(specs) for n in keywords)]
            if len(args) > len(specs):
                raise SpecError.at(
                    self.where,
                    argument="in_specs",
                    got=f"{len(specs)} spec{'s' * (len(specs) != 1)} for {len(args)} arguments",
                    need="one entry per argument",
                    mend="give each argument a spec, None for one that is passed as it is",
                )
            if len(specs) > len(args) + len(kwargs):
                self._check_surplus(set())
            for n, k in zip((*positional, *keywords), places, strict=True):
                if k >= len(specs):
                    raise self._missing_spec(
                        n, f"{len(specs)} spec{'s' * (len(specs) != 1)}, all for positional arguments"
                    )
            chosen = [specs[k] for k in places]
        else:
            chosen = [specs] * (len(args) + len(kwargs))
        values = [*args, *(kwargs[n] for n in keywords)]
        return list(zip((*positional, *keywords), chosen, values, strict=True))

    def _missing_spec(self, name: str, got: str) -> SpecError:
        return SpecError.at(
            self.where,
            argument=f"in_specs, for {name!r}",
            got=got,
            need="a spec for every argument",
            mend=f"in_specs as a dict by name: {{{name!r}: P(), ...}}",
        )

    def _check_surplus(self, named: set[str]) -> None:
        """Raise if in_specs contains specs for arguments that f does not have."""
        specs = self.in_specs
        try:
            parameters = inspect.signature(self.f, follow_wrapped=False).parameters
        except (TypeError, ValueError):
            return
        kinds = {p.kind for p in parameters.values()}
        if isinstance(specs, dict):
            unknown = [n for n in specs if n not in named and n not in parameters]
            if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
                close = nearest(str(unknown[0]), parameters, 1)
                raise SpecError.at(
                    self.where,
                    argument="in_specs",
                    got=f"a spec for {unknown[0]!r}",
                    need=f"names of arguments: {', '.join(repr(n) for n in parameters)}",
                    mend=f"write {close[0]!r}"
                    if close
                    else "a dict is by name; for one argument that is itself a dict write in_specs=({...},)",
                )
        elif inspect.Parameter.VAR_POSITIONAL not in kinds:
            places = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
            if len(specs) > len(places):
                raise SpecError.at(
                    self.where,
                    argument="in_specs",
                    got=f"{len(specs)} specs for {len(places)} argument{'s' * (len(places) != 1)}",
                    need="one entry per argument",
                    mend="leave out the rest; for one argument that is itself a tuple write in_specs=((P(), ...),)",
                )

    def is_laid_out(self, mesh: Mesh, x: Any, spec: Spec) -> bool:
        """Whether an argument is on this mesh in the layout of its spec. Cached by layout and spec."""
        if type(x) is not PartitionedArray or x.mesh is not mesh or x.blocks is DONATED:
            return False
        layout = x.layout
        cached = self._fits.get((id(layout), id(spec)))
        if cached is None:
            fits = (
                layout == spec
                if isinstance(spec, Layout)
                else layout.spec is not None
                and spec.varying <= set(mesh.axes)
                and len(spec.dims) <= len(layout.shape)
                and layout == mesh.layout(layout.shape, spec)
            )
            # The entry holds layout and spec, so their ids stay theirs.
            cached = bounded(self._fits)[id(layout), id(spec)] = fits, layout, spec
        return cached[0]

    def admit(self, mesh: Mesh, leaf: Leaf) -> Leaf:
        """An argument as an array or a number. Raises if it is neither, or does not fit its spec."""
        x: Any = value_of(leaf.value)
        assert leaf.spec is not None
        if isinstance(x, PartitionedArray) and x.blocks is DONATED:
            raise donated_error(self.where, leaf.path)
        x = devices.home(self.where, leaf.path, x, mesh.device)
        if type(x) not in _NUMBERS and not on_device(x) and not is_slot(x):
            need, otherwise = "an array, a number, or a PartitionedArray", "the spec None to pass it as it is"
            x = admit(x, self.where, leaf.path, error=SpecError, need=need, otherwise=otherwise)
        if type(leaf.value) is not Array:
            leaf = leaf._replace(value=x)
        assert leaf.spec is not None
        shape = getattr(x, "shape", ())
        leaf.spec.check(mesh.axes, self.where, leaf.path, len(shape), unreduced=True)
        mesh.layout(shape, leaf.spec, self.where, leaf.path)
        if isinstance(x, PartitionedArray) and x.mesh != mesh:
            raise MeshError.at(
                self.where,
                argument=leaf.path,
                got=f"an array on {x.mesh} ({x.mesh.transport.name}{device_suffix(x.mesh)})",
                need=f"an array on {mesh} ({mesh.transport.name}{device_suffix(mesh)})",
                mend="spmd.put(x.numpy(), spec, mesh), or x.numpy()",
            )
        return leaf

    def lay_out(self, mesh: Mesh, leaf: Leaf) -> MapArgument:
        """An argument laid out by its spec."""
        x, spec = leaf.value, leaf.spec
        if spec is None:
            return MapArgument(x)
        if type(slot_of(x)) in _NUMBERS and isinstance(spec, P) and not spec.unreduced:
            return MapArgument(x, number=True)
        if self.is_laid_out(mesh, x, spec):
            return MapArgument(x, x.blocks, spec)
        if not isinstance(x, PartitionedArray):
            data = x if hasattr(x, "dtype") else one_line(np.asarray, (x,))
            return MapArgument(x, cut(data, mesh.layout(data.shape, spec), mesh), spec)
        return MapArgument(x, relayout(x, mesh.layout(x.shape, spec)).blocks, spec)


class MapArgument:
    """One argument, laid out on the workers.

    value: the argument. blocks: the blocks that bodies get instead of it, by worker, in the state of the spec; None: it
    is passed as it is. kind: the shape, on which the choice of a scheduler may depend.
    """

    __slots__ = ("blocks", "kind", "number", "spec", "state", "value")

    def __init__(
        self,
        value: Any,
        blocks: dict[int, np.ndarray] | None = None,
        spec: Spec | None = None,
        *,
        number: bool = False,
    ):
        self.value = value
        self.number = number
        self.blocks = blocks
        self.spec = spec
        self.state = state_of(spec.varying) if spec is not None else None
        self.kind = None if blocks is None else getattr(value, "shape", ())

    def block(self, worker: Worker):
        """The block of a worker, with its state if states are tracked."""
        if self.blocks is None:
            return at_worker(self.value, worker.index)
        block = worker.comm.given(self.blocks[worker.index])
        return Array(block, self.state) if worker.tracked else block

    def note(self, mesh: Mesh, replicas: Replicas, where: str, path: str, turns: dict[Any, int]) -> None:
        """Note the argument for the comparison of processes, unless it was compared before or has the spec None."""
        x = self.value
        if self.number:
            replicas.add(tuple(mesh.axes), ReplicaRecord(where, path, "", repr(slot_of(x))), "number")
        elif self.blocks is not None and not (isinstance(x, PartitionedArray) and x.compared):
            (block,) = self.blocks.values()
            if isinstance(x, PartitionedArray):
                if x.compared is None and not on_device(block):
                    turn = next_turn(turns, ("rests", path, block.shape))
                    if is_skipped(turn, block.nbytes):
                        return
                replicas.arrays.append(x)
            shape = f"{dtype_name(block.dtype)}{[*np.shape(x)]}, {self.spec}"
            note_argument(mesh, replicas, ReplicaRecord(where, path, "", shape), self.spec, block, turns)


def note_argument(
    mesh: Mesh, replicas: Replicas, record: ReplicaRecord, spec: Spec | None, block: Any, turns: dict[Any, int]
) -> None:
    """Note an argument of one of several processes: its shape and spec for the comparison with all others, its block
    for the comparison with the processes that hold copies of it."""
    replicas.add(tuple(mesh.axes), record, "shape")
    copies = tuple(n for n in mesh.axes if isinstance(spec, P) and n not in spec.varying)
    if copies and not on_device(block):
        turn = next_turn(turns, (record.argument, block.shape))
        part = compared_part(slot_of(block), turn)
        replicas.add(copies, record._replace(turn=turn, number=digest(part), value=part), "argument")


def cotangent_input(mesh: Mesh, out: PartitionedArray, g) -> MapArgument | None:
    """A cotangent, laid out as the result that it belongs to."""
    if g is None:
        return None
    original = g
    if not isinstance(g, PartitionedArray):
        g = put(np.broadcast_to(g if on_device(g) else np.asarray(g), out.shape), cotangent_layout(out.layout), mesh)
    return MapArgument(original, relayout(g, cotangent_layout(out.layout)).blocks, out.spec)


def cotangent_layout(layout: Any) -> Any:
    """The layout (or spec) of the cotangent of an array: that of the array, but known to all along unreduced axes, as
    each part of a sum has the cotangent of the sum."""
    return layout.reduced


def cotangent_for(g, value):
    """A gradient in the form of its argument: laid out like a PartitionedArray, bare for bare data."""
    bare, value = value_of(g), value_of(value)
    if type(bare) is type(value) is PartitionedArray and bare.layout is value.layout and not bare.layout.unreduced:
        return g
    layout, target = layout_of(bare), layout_of(value)
    target = target if target is None else cotangent_layout(target)
    if layout == target:
        return g
    return move_to_layout(g, layout, target, (value if layout is None else bare).mesh, on_device(value))


def _move_back(g, _ans, _x, source: Layout | None, target: Layout | None, mesh: Mesh, on_device: bool = False) -> Any:
    return move_to_layout(g, layout_of(g), source if source is None else cotangent_layout(source), mesh, on_device)


@primitive("relayout", _move_back)
def move_to_layout(x, source: Layout | None, target: Layout | None, mesh: Mesh, on_device: bool = False) -> Any:
    """Move an array from one layout to another; None is bare data. The transpose moves it back.

    on_device: bare results stay on the device; otherwise they are copied to the host.
    """
    if target is None:
        return (x.gathered() if on_device else x.bare()) if isinstance(x, PartitionedArray) else x
    if isinstance(x, PartitionedArray):
        return relayout(x, target)
    return PartitionedArray(cut(x, target, mesh), target, mesh)


def copied_to_all(x, mesh: Mesh) -> Any:
    """A bare array, traced or not, as a global one that every worker holds. One that is traced is copied once: the
    cotangents of all operations that use it meet before their sum."""
    if type(x) is not Array or x.tape is None:
        return _copied_once(x, mesh, {})
    with x.tape.before_steps(x):
        return _copied_once(x, mesh, x.tape.varied_copies)


def _copied_once(x: Any, mesh: Mesh, copies: dict[Any, Any]) -> Any:
    value, key = value_of(x), (getattr(x, "node", None), mesh)
    copy = copies.get(key)
    if copy is None or is_over(value_of(copy)):
        copy = copies[key] = move_to_layout(x, None, mesh.layout(np.shape(value), P()), mesh, on_device(value))
    return copy


def _needs_sum(g: Any, value: Any) -> bool:
    """Whether a gradient is unreduced, and its argument lies as it does, or is bare."""
    if type(g) is not PartitionedArray or not g.layout.unreduced:
        return False
    target = layout_of(value)
    return target is None or cotangent_layout(target) == g.layout.reduced


def _is_global(x: Any) -> bool:
    """Whether an argument is a global array, traces one, or has one among its items."""
    kind = type(x)
    if kind is Array:
        return type(x.value) not in USUAL and type(value_of(x)) is PartitionedArray
    return kind is PartitionedArray or ((kind is tuple or kind is list) and any(map(_is_global, x)))


class MapMixing(Join):
    """How arrays mix: in bodies by their states; outside, gradients get the layouts of their arguments."""

    def summed(self, gs, values):
        places = [k for k, (g, value) in enumerate(zip(gs, values, strict=True)) if _needs_sum(g, value)]
        if len(places) > 1:
            for k, g in zip(places, reduced_together([gs[k] for k in places]), strict=True):
                gs[k] = g
        return gs

    def settle(self, g, value):
        return cotangent_for(g, value)

    def alike(self, args):
        values = [value_of(x) for x in args]
        spread = next((value for value in values if type(value) is PartitionedArray), None)
        bare = [
            type(x) is Array and type(value) is not PartitionedArray and hasattr(value, "ndim")
            for x, value in zip(args, values, strict=True)
        ]
        if spread is None or not any(bare):
            return args
        return [copied_to_all(x, spread.mesh) if is_bare else x for x, is_bare in zip(args, bare, strict=True)]

    def function(self, fun, args, kwargs):
        if any(map(_is_global, args)) or (kwargs and any(map(_is_global, kwargs.values()))):
            return function_of(fun)
        return None

    def whole(self, x):
        value = value_of(x)
        return move_to_layout(x, value.layout, None, value.mesh) if isinstance(value, PartitionedArray) else x
