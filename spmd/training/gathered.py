"""`gathered`: parameters that lie split over an axis, gathered where a layer needs them, and again on the way back."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dis import opmap
from operator import index
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.dropping import drops
from spmd.autodiff.signatures import Tree
from spmd.autodiff.tape import ACTIVE
from spmd.autodiff.tracer import Array
from spmd.autodiff.transforms import joint
from spmd.errors import LayoutError, SpecError, StateError, all_of, axes_of, describe
from spmd.frontends import frontend
from spmd.layout import Layout, P
from spmd.mesh import Worker, here
from spmd.operators.apply import launch, operate
from spmd.operators.base import named
from spmd.operators.gather import AllGather
from spmd.operators.reduce import AxisName
from spmd.operators.varying import outside
from spmd.spec_trees import spread
from spmd.tracebacks import api_boundary
from spmd.training.units import WHERE, Part, Reductions, Unit, drain, drop, drop_earlier
from spmd.transport.call import LEDGERS, Observers, Shape

__all__ = ["gathered"]

_NAME = f"spmd.{WHERE}"
_FOR = opmap["FOR_ITER"]


@api_boundary
def gathered(units: Sequence[Tree], specs: Any, axis_name: AxisName, *, prefetch: int = 1) -> Iterator[Tree]:
    """The whole parameters of one unit after the other, for parameters that lie split over an axis (ZeRO-3, FSDP).

    units: a list of trees of this worker's blocks, one tree for each layer, in the order of their use; a unit may come
    twice. specs: one spec for all, or a tree of specs, as for `spmd.map`. Of a block whose spec names the axis the
    whole is gathered along it; along other axes it stays split. Others come as they are. prefetch: how many units are
    fetched while one is in use.

    Where a loop leaves a unit, the tape drops its whole arrays and all views of them, and gathers them again in the
    backward sweep. So prefetch + 1 units are whole at a time, in both directions. An array that the program keeps in a
    variable of its own stays; so does the loop's variable after the loop. The last unit stays until the sweep has
    passed it. `zip` and `enumerate` around the iterator hold one unit more. Bodies that `spmd.jit` records, nested
    differentiation and bodies without states (check=False) gather as well, and keep what they gather.
    A block that is used without `gathered` is an array of this worker's, as any other: NumPy raises an error of shapes,
    or, where shapes fit, as in sums and norms of a parameter, computes with the block.

    Forward (V -> V): y = [x_0; x_1; ...] of each block. Adjoint: the sum of the whole's cotangents over the workers, of
    which each gets its part; sums of one unit go together, in the background. Cost: in each direction an all-gather of
    each large array and one of all small ones of a dtype; back also a reduce-scatter of each. So a gradient sends half
    as much again as in data parallelism, and parameters and gradients take 1/n of the memory. Once in a loop the
    workers exchange the shapes of the blocks. Raises SpecError for specs that do not fit, StateError for a block that
    does not vary over the axis.

    Source: Rajbhandari et al. (2020), "ZeRO: memory optimizations toward training trillion parameter models"; Zhao et
    al. (2023), "PyTorch FSDP: experiences on scaling fully sharded data parallel".

        >>> def loss(layers, x):
        ...     for w in spmd.training.gathered(layers, P("data"), "data"):
        ...         x = np.tanh(x @ w)
        ...     return spmd.mean(x, "data")
        >>> with spmd.Mesh(data=2), spmd.ledger() as log:
        ...     f = spmd.map(loss, in_specs=(P("data"), P("data")), out_specs=P())
        ...     layers = [spmd.put(np.eye(3), P("data")) for _ in range(4)]
        ...     gradient = spmd.grad(f)(layers, spmd.put(np.ones((2, 3)), P("data")))
        >>> gradient[0].spec, log.operators["AllGather"], log.operators["ReduceScatter"]
        (P('data', None), 6, 4)
    """
    worker = here(_NAME)
    names = worker.mesh.names(axis_name, _NAME)
    ahead = _count(prefetch)
    planned = _planned(worker, units, specs, names)
    group = worker.group(names)
    if group.size == 1 or not planned:
        return iter([unit.tree for unit in planned])
    return _Loop(worker, names, ahead).run(planned)


def _count(prefetch: Any) -> int:
    """The number of units to fetch ahead."""
    try:
        ahead = index(prefetch)
    except TypeError:
        ahead = -1
    if ahead < 0 or isinstance(prefetch, bool):
        raise SpecError.at(
            _NAME,
            argument="prefetch",
            got=describe(prefetch),
            need="the number of units to fetch ahead, an int of at least 0",
            mend="prefetch=1; prefetch=0 for the least memory",
        )
    return ahead


class _Planned(NamedTuple):
    """A unit. tree: of its blocks. leaves, structure: of the tree. dims: of each leaf the dimension along which it is
    gathered; None where it is not. paths: of the leaves."""

    tree: Any
    leaves: list[Any]
    structure: Any
    dims: list[int | None]
    paths: list[str]


def _planned(worker: Worker, units: Any, specs: Any, names: tuple[str, ...]) -> list[_Planned]:
    """The units, checked."""
    if type(units) not in (list, tuple) or hasattr(units, "_fields"):
        raise SpecError.at(
            _NAME,
            argument="units",
            got=describe(units) if hasattr(units, "shape") else f"a {type(units).__name__}",
            need="a list of trees of blocks, one tree for each unit, in the order of their use",
            mend="[unit] of one; [params[name] for name in order] of a dict",
        )
    placed = iter(spread(_NAME, "units", "specs", list(specs) if type(specs) is tuple else specs, [*units]))
    planned, split = [], False
    for unit in units:
        leaves, structure = tree.flatten(unit, none_is_leaf=True)
        found = [next(placed) for _ in leaves]
        dims = [_dimension(worker, x, path, spec, names) for path, spec, x in found]
        split = split or any(dim is not None for dim in dims)
        planned.append(_Planned(unit, leaves, structure, dims, [path for path, _, _ in found]))
    if planned and not split:
        raise SpecError.at(
            _NAME,
            argument="specs",
            got=f"specs of which none names {axes_of(names)}",
            need=f"the specs by which the blocks lie, with {all_of(names)} in a dimension",
            mend=f"spmd.training.shard_specs(params, {names[0] if len(names) == 1 else names!r}) makes them; all "
            "copies are whole already where nothing is split",
        )
    return planned


def _dimension(worker: Worker, x: Any, path: str, spec: Any, names: tuple[str, ...]) -> int | None:
    """The dimension along which a leaf is gathered; None where it is not."""
    if spec is None or x is None:
        return None
    if isinstance(spec, Layout) and spec.spec is not None:
        spec = spec.spec
    if not isinstance(spec, P):
        raise SpecError.at(
            _NAME,
            argument=f"specs, for {path!r}",
            got=describe(spec),
            need="a spec, or a layout by one",
            mend='P("data"), as in the in_specs of the map',
        )
    spec.check(worker.mesh.axes, _NAME, path, getattr(x, "ndim", 0))
    dim = next((d for d, split in enumerate(spec.dims) if not set(names).isdisjoint(split)), None)
    if dim is None:
        return None
    if spec.dims[dim][-len(names) :] != names:
        raise SpecError.at(
            _NAME,
            argument=f"specs, for {path!r}",
            got=f"{spec}, in which {all_of(names)} {'is' if len(names) == 1 else 'are'} not what splits last",
            need=f"a dimension that is split over {all_of(names)} alone, or by other axes first: then what is gathered "
            "along the axis is one block",
            mend=f"P({(*(n for n in spec.dims[dim] if n not in names), *names)!r}), and the parameters laid out so",
        )
    _check_block(worker, x, path, names)
    return dim


def _check_block(worker: Worker, x: Any, path: str, names: tuple[str, ...]) -> None:
    """Raise where a leaf is no block of this worker's."""
    if frontend(x) is not None:
        raise StateError.at(
            _NAME,
            argument=path,
            got=describe(x),
            need="a block that is an array of NumPy or CuPy",
            mend="spt.shard_parameters(module, axis_name) for modules of torch",
        )
    if type(x) is Array and x.state is None:
        raise outside(_NAME, x, path)
    if not worker.tracked or type(x) is Array and x.state.varying.issuperset(names):
        return
    missing = [n for n in names if type(x) is not Array or n not in x.state.varying]
    raise StateError.at(
        _NAME,
        argument=path,
        got=f"{describe(x)}, which does not vary over {axes_of(missing)}",
        need="this worker's block of the parameter",
        mend=f"pass the parameters to the map by the same specs, which split them over {all_of(names)}; of a whole "
        "array spmd.pslice(x, axis_name, axis=d, tiled=True) is the block",
    )


class _Loop:
    """One run over units."""

    def __init__(self, worker: Worker, names: tuple[str, ...], ahead: int):
        self.worker, self.names, self.ahead = worker, names, ahead
        self.reductions = Reductions(ahead)

    def run(self, planned: Sequence[_Planned]) -> Iterator[Any]:
        """The trees of whole arrays, one after the other."""
        plain = [self._is_plain(plan) for plan in planned]
        shapes = self._shapes([plan for plan, is_plain in zip(planned, plain, strict=True) if is_plain])
        units = [self._unit(plan, shapes) if is_plain else None for plan, is_plain in zip(planned, plain, strict=True)]
        drop_earlier(ACTIVE.get())
        return self._trees(planned, units)

    def _trees(self, planned: Sequence[_Planned], units: Sequence[Unit | None]) -> Iterator[Any]:
        try:
            for k, (plan, unit) in enumerate(zip(planned, units, strict=True)):
                frame = sys._getframe(1)
                self._fetch(units, k, frame)
                lent = _Lent(plan, self._composed(plan, frame) if unit is None else self._traced(plan, unit))
                marks = [(tape, len(tape.nodes)) for tape in ACTIVE.get() if drops(tape)]
                del frame
                last = True
                try:
                    yield lent.give()
                    last = k + 1 == len(units)
                    if unit is not None and not last:  # else the variable of the loop stays as it is
                        lent.take_back(sys._getframe(1))
                finally:
                    if unit is not None:
                        drop(unit, marks, last)
                    del lent
        finally:
            drain([unit for unit in units if unit is not None])

    def _fetch(self, units: Sequence[Unit | None], k: int, frame: FrameType) -> None:
        """Gather unit k, and start with the next ones."""
        for ahead, unit in enumerate(units[k : k + 1 + self.ahead]):
            if unit is not None:
                unit.start(self.worker, frame)
                if not ahead:
                    unit.wait()

    def _shapes(self, planned: Sequence[_Planned]) -> Iterator[tuple[Shape, ...]]:
        """For each leaf that is gathered the shapes of all members' blocks. Ledgers do not count how they are known."""
        blocks = [
            (x, d, p) for u in planned for x, d, p in zip(u.leaves, u.dims, u.paths, strict=True) if d is not None
        ]
        if not blocks:
            return iter(())
        own = np.array([n for x, _, _ in blocks for n in x.shape], np.int64)
        token = LEDGERS.set(Observers())
        try:
            ask = named(WHERE, AllGather, self.names, 0, False)
            rows, _ = launch(ask, own, self.worker, sys._getframe())()
        finally:
            LEDGERS.reset(token)
        at = 0
        found = []
        for x, dim, path in blocks:
            shapes = tuple(tuple(row) for row in rows[:, at : at + x.ndim].tolist())
            at += x.ndim
            if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) > 1:
                raise LayoutError.at(
                    _NAME,
                    argument=path,
                    got=f"blocks of shapes {', '.join(map(str, map(list, shapes)))}",
                    need=f"blocks that differ in dimension {dim} only, along which they are joined",
                    mend="name the axis in the dimension that it splits",
                )
            found.append(shapes)
        return iter(found)

    def _is_plain(self, plan: _Planned) -> bool:
        """Whether the blocks of a unit are gathered together. Else collectives go one by one: what records them, or
        differentiates them again, knows those."""
        if not self.worker.tracked or self.worker.program is not None:
            return False
        blocks = [x for x, dim in zip(plan.leaves, plan.dims, strict=True) if dim is not None]
        return all(type(x.value) is np.ndarray for x in blocks) and len({x.tape for x in blocks} - {None}) <= 1

    def _unit(self, plan: _Planned, shapes: Iterator[tuple[Shape, ...]]) -> Unit:
        """The blocks of a unit that are gathered together."""
        blocks = [(x, dim) for x, dim in zip(plan.leaves, plan.dims, strict=True) if dim is not None]
        member = self.worker.group(self.names).index
        parts = [Part(x.value, dim, next(shapes), member, not x.state.varying <= {*self.names}) for x, dim in blocks]
        return Unit(self.names, parts, self.ahead)

    def _composed(self, plan: _Planned, frame: FrameType) -> Any:
        """The whole arrays of a unit, each by a collective of its own."""
        wholes = [
            x if dim is None else operate(named(WHERE, AllGather, self.names, dim, True), x, frame)
            for x, dim in zip(plan.leaves, plan.dims, strict=True)
        ]
        return tree.unflatten(plan.structure, wholes)

    def _traced(self, plan: _Planned, unit: Unit) -> Any:
        """The whole arrays of a unit, on the tape of their blocks."""
        wholes, numbers = list(plan.leaves), [k for k, dim in enumerate(plan.dims) if dim is not None]
        for k, whole in zip(numbers, unit.wait(), strict=True):
            wholes[k] = Array(whole, wholes[k].state)
        traced = [(n, k) for n, k in enumerate(numbers) if plan.leaves[k].tape is not None]
        if traced:
            count, reductions, positions = len(numbers), self.reductions, [n for n, _ in traced]

            def pull(gs: list[Any]) -> list[Any]:
                full: list[Any] = [None] * count
                for n, g in zip(positions, gs, strict=True):
                    full[n] = g
                pulled = unit_again.pulled(full, reductions)
                return [pulled[n] for n in positions]

            unit_again = unit.again()
            parents = [plan.leaves[k] for _, k in traced]
            outs = joint(_NAME, parents[0].tape, parents, [wholes[k] for _, k in traced], pull)
            for (_, k), out in zip(traced, outs, strict=True):
                wholes[k] = out
        return tree.unflatten(plan.structure, wholes)


class _Left:
    """The value of an array of a unit that a loop has left; every use raises."""

    def __getattr__(self, name: str) -> Any:
        raise StateError.at(
            "an array",
            got="a whole parameter of a unit, used after the loop over `spmd.training.gathered` had left the unit",
            need="arrays of the unit that the loop is at, or arrays that were in a variable when the loop went on",
            mend="use it before, or gather the unit again",
        )


_LEFT: Any = _Left()


class _Lent:
    """A tree of whole arrays that a loop has been given. Its arrays are given up before the next ones are fetched, if
    nothing but the variable of the loop refers to them.

    objects: the containers and the gathered arrays; depths: how deep they lie in the tree.
    """

    def __init__(self, plan: _Planned, whole: Any):
        self.whole = whole
        self.objects: list[Any] = []
        self.depths: list[int] = []
        leaves, _ = tree.flatten(whole, none_is_leaf=True)
        self.gathered = {id(x) for x, dim in zip(leaves, plan.dims, strict=True) if dim is not None}

    def give(self) -> Any:
        """The tree, to which the caller then has the only reference beside those here."""
        whole, self.whole = self.whole, None
        self._collect(whole, 0)
        return whole

    def _collect(self, x: Any, depth: int) -> None:
        inside = None if x is None or type(x) is Array else tree.one_level(x)
        if id(x) in self.gathered or inside is not None and inside[1]:
            self.objects.append(x)
            self.depths.append(depth)
        if inside is not None:
            for child in inside[1]:
                self._collect(child, depth + 1)

    def take_back(self, frame: FrameType) -> None:
        """Give up the arrays, where the loop's variable is the only one, and about to change."""
        if frame.f_code.co_code[frame.f_lasti] != _FOR:
            return
        unpacked = _referrers(self.objects, 0) == 0
        for k, depth in enumerate(self.depths):
            if _referrers(self.objects, k) > 1 + (unpacked and depth == 1):
                return
        for x in self.objects:
            if type(x) is Array:
                x.value = _LEFT


def _referrers(objects: list[Any], k: int) -> int:
    """How many references there are to an object, beside that of the list."""
    return sys.getrefcount(objects[k]) - _ALONE


_ALONE = sys.getrefcount([object()][0]) + 1
