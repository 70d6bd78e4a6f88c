"""Tests of operators, the library's and your own.

The dot test (`check_adjoint`), the test cases of every operator, and strategies for hypothesis: `meshes`, `specs`,
`shapes`, `layouts`, `halos`, `arrays`. `spmd.pytest_plugin` runs tests on meshes.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import pkgutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from spmd import operators
from spmd.adjoints import AdjointError, AdjointReport, Entry, Fault, Place, check_adjoint, table
from spmd.errors import LayoutError
from spmd.layout import Layout, P
from spmd.lazy_imports import lazy_attributes
from spmd.mesh import Mesh
from spmd.operators.all_to_all import AllToAll, Piece, RaggedAllToAll
from spmd.operators.base import Operator
from spmd.operators.gather import AllGather, Collect, ReduceScatter, Slice
from spmd.operators.halo import HaloAccumulate, HaloExchange
from spmd.operators.halo_geometry import BOUNDARIES, halo_pieces
from spmd.operators.move import Move
from spmd.operators.permute import Permute
from spmd.operators.repartition import Accumulate, Repartition
from spmd.operators.root import Broadcast, Enroot, Gather, Keep, Replicate, Scatter, SumReduce, Unroot
from spmd.operators.stencil import Stencil
from spmd.operators.sums import Sum, Vary
from spmd.state import INVARIANT, ROOTED, VARYING

if TYPE_CHECKING:
    from spmd.strategies import Halo as Halo
    from spmd.strategies import arrays as arrays
    from spmd.strategies import halos as halos
    from spmd.strategies import layouts as layouts
    from spmd.strategies import meshes as meshes
    from spmd.strategies import shapes as shapes
    from spmd.strategies import specs as specs

__all__ = [
    "AdjointError",
    "AdjointReport",
    "Case",
    "Entry",
    "Fault",
    "Place",
    "check_adjoint",
    "operator_cases",
    "operator_classes",
    "states",
    "table",
]


if not TYPE_CHECKING:  # The strategies need hypothesis.
    _STRATEGIES = ("Halo", "arrays", "halos", "layouts", "meshes", "shapes", "specs")
    __getattr__, __dir__ = lazy_attributes(__name__, {"spmd.strategies": _STRATEGIES})

Shape = tuple[int, ...]


# All operators, with cases


class Case(NamedTuple):
    """An operator and a shape to test it on.

    spec: splits the shape; without it every worker has a block of the shape. Also a function from the operator's axes
    and their sizes to a layout. cuts: for each dimension the sizes of its blocks; None: balanced.

        >>> from spmd import operators, testing
        >>> case = testing.Case(operators.Sum(("x",)), (3, 2))
        >>> with spmd.Mesh(x=2):
        ...     spmd.check_adjoint(case.operator, case.shape, in_specs=case.spec).passed
        True
    """

    operator: Operator
    shape: Shape
    spec: Any = None
    cuts: tuple[Shape | None, ...] | None = None


def _uneven(n: int) -> Shape:
    """Sizes of n uneven blocks of 2 n + 1 items: the last is the largest, and of three one is empty."""
    return (*(0 if k == 1 else 1 for k in range(n - 1)), n + 2 + (n > 2)) if n > 1 else (3,)


def _pieces(n: int, stop: int) -> tuple[Piece, ...]:
    """Pieces of 0, 1 or 2 rows from every worker to every other, among 2 n rows, up to row `stop` of the result."""
    return tuple(Piece(s, t, 2 * t, stop - 2 * s - 2, (s + 2 * t) % 3) for s in range(n) for t in range(n))


def _haloed(a: tuple[str, ...], sizes: Shape, widths: Shape, boundary: str) -> Case:
    """Blocks of these sizes, extended by a halo of (low, high), which is added back."""
    low, high = widths
    lengths = halo_pieces(sizes, ((low, high),) * len(sizes), boundary).lengths
    back = HaloAccumulate(a, P(a), (widths,), boundary, (sizes,))
    return Case(back, (sum(lengths), 2), P(a), (lengths, None))


_CROSS = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))


def _corners(d: int) -> tuple[Shape, ...]:
    """Neighbours across the corners of a block of d dimensions."""
    return (1,) * d, (-1,) * d


def _on_one_worker(shape: Shape, root: int, axes: dict[str, int]) -> Layout:
    """The whole array on one worker."""
    return Layout.grid(shape, (1,) * len(shape), axes, [root])


_CASES: dict[type[Operator], Callable[[tuple[str, ...], int], list[Case]]] = {
    Vary: lambda a, n: [Case(Vary(a), s) for s in ((3, 2), (0, 2), ())],
    Sum: lambda a, n: [Case(Sum(a), s) for s in ((3, 2), (0, 2), ())],
    AllGather: lambda a, n: [
        *(Case(AllGather(a, axis), (2, 3)) for axis in (0, 1, 2)),
        *(Case(AllGather(a, 0, True), (m, 2), P(a)) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(AllGather(a, 1, True), (2, n + 1), P(None, a)),
        Case(AllGather(a, 0, True), (2 * n + 1, 2), P(a), (_uneven(n), None)),
    ],
    ReduceScatter: lambda a, n: [
        *(Case(ReduceScatter(a, axis), (n,) * 2) for axis in (0, 1)),
        *(Case(ReduceScatter(a, 0, True), (m, 2)) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(ReduceScatter(a, 1, True, _uneven(n)), (2, 2 * n + 1)),
    ],
    Collect: lambda a, n: [
        *(Case(Collect(a, axis), (2, 3)) for axis in (0, 1, 2)),
        *(Case(Collect(a, 0, True), (m, 2), P(a)) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(Collect(a, 0, True), (2 * n + 1, 2), P(a), (_uneven(n), None)),
    ],
    Slice: lambda a, n: [
        *(Case(Slice(a, axis), (n,) * 2) for axis in (0, 1)),
        *(Case(Slice(a, 0, True), (m, 2)) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(Slice(a, 1, True, _uneven(n)), (2, 2 * n + 1)),
    ],
    Stencil: lambda a, n: [
        *(Case(Stencil(a, P(a), _CROSS, (-4, 1, 2, 3, 1), b), (4 * n + 1, 3), P(a)) for b in ("zero", "periodic")),
        Case(Stencil(a, P(None, a), ((1, 2), (-2, 0)), (1, -3), ("periodic", "zero")), (3, 9 * n + 2), P(None, a)),
        *(
            Case(Stencil(a, P(*a), _corners(len(a)), (2, -3), b), (2 * n,) * len(a), P(*a))
            for b in ("zero", "periodic")
        ),
        Case(Stencil(a, P(a), ((1,), (-1,)), (1, -1)), (2 * n + 1,), P(a), (_uneven(n),)),
        Case(Stencil(a, P(a), ((3,), (-2,)), (1, -1)), (n - 1,), P(a)),
        Case(Stencil(a, P(a), _CROSS, (1, 2, 3, 4, 5), "periodic"), (0, 3), P(a)),
    ],
    HaloExchange: lambda a, n: [
        *(Case(HaloExchange(a, P(a), 1, boundary), (2 * n + 1, 2), P(a)) for boundary in BOUNDARIES),
        Case(HaloExchange(a, P(a), ((2, 1), (0, 3)), ("periodic", "reflect")), (2 * n + 1, 2), P(a)),
        Case(HaloExchange(a, P(a), ((1, -1),)), (2 * n + 1, 0), P(a)),
        Case(HaloExchange(a, P(*a), 1, "periodic"), (2 * n,) * len(a), P(*a)),
        *(
            Case(
                HaloExchange(a, P(None, a), (0, (5, 3)), boundary, (None, _uneven(n))),
                (2, 2 * n + 1),
                P(None, a),
                (None, _uneven(n)),
            )
            for boundary in BOUNDARIES
        ),
    ],
    HaloAccumulate: lambda a, n: [
        *(_haloed(a, _uneven(n), (low, high), b) for b in BOUNDARIES for low, high in ((1, 1), (0, 4))),
        Case(HaloAccumulate(a, P(a), 1, "periodic"), (4 * n + 1, 2), P(a)),
        Case(HaloAccumulate(a, P(a), 1, "zero"), (4 * n + 1, 0), P(a)),
    ],
    Permute: lambda a, n: [
        Case(Permute(a, tuple((k, (k + 1) % n) for k in range(n))), (2 * n + 1, 2), P(a)),
        Case(Permute(a, tuple((k, k + 1) for k in range(n - 1))), (2 * n + 1, 2), P(a)),
        Case(Permute(a, ((n - 1, 0),)), (1, 3), P(a)),
        Case(Permute(a, tuple((k, (k + 1) % n) for k in range(n))), (2, 2 * n + 1), P(None, a), (None, _uneven(n))),
        Case(Permute(a, ()), (3,)),
    ],
    AllToAll: lambda a, n: [
        *(Case(AllToAll(a, i, j), (n, n)) for i, j in itertools.product((0, 1), repeat=2)),
        *(Case(AllToAll(a, i, j, True), (n + 1, 2 * n)) for i, j in itertools.product((0, 1), repeat=2)),
        Case(AllToAll(a, 1, 0, True), (2 * n + 1, n + 2), P(a)),
        Case(AllToAll(a, 1, 0, True), (1, n + 2), P(a)),
        Case(AllToAll(a, 1, 0, True, _uneven(n)), (2 * n + 1, 2 * n + 1), P(a), (_uneven(n), None)),
    ],
    Broadcast: lambda a, n: [Case(Broadcast(a, r), s) for r in (0, n - 1) for s in ((3, 2), (0, 2), ())],
    SumReduce: lambda a, n: [Case(SumReduce(a, r), s) for r in (0, n - 1) for s in ((3, 2), (0, 2), ())],
    Replicate: lambda a, n: [Case(Replicate(a, r), s) for r in (0, n - 1) for s in ((3, 2), (0, 2), ())],
    Keep: lambda a, n: [Case(Keep(a, r), s) for r in (0, n - 1) for s in ((3, 2), (0, 2), ())],
    Move: lambda a, n: [
        Case(Move(a, s, t), shape)
        for s, t in ((0, n - 1), (n - 1, 0), (n // 2, n // 2))
        for shape in ((3, 2), (0, 2), ())
    ],
    Unroot: lambda a, n: [Case(Unroot(a, r, len(s)), s) for r in (0, n - 1) for s in ((3, 2), (0, 2), ())],
    Enroot: lambda a, n: [
        Case(Enroot(a, r, len(s)), s, functools.partial(_on_one_worker, s, r))
        for r in (0, n - 1)
        for s in ((3, 2), (0, 2), ())
    ],
    Scatter: lambda a, n: [
        *(Case(Scatter(a, r), (m, 2)) for r in (0, n - 1) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(Scatter(a, n - 1, 1, _uneven(n)), (2, 2 * n + 1)),
    ],
    Gather: lambda a, n: [
        *(Case(Gather(a, r), (m, 2), P(a)) for r in (0, n - 1) for m in (2 * n, 2 * n + 1, 1, 0)),
        Case(Gather(a, n - 1, 1), (2, 2 * n + 1), P(None, a), (None, _uneven(n))),
    ],
    RaggedAllToAll: lambda a, n: [
        *(Case(RaggedAllToAll(a, _pieces(n, stop), (2 * n, stop)), (2 * n, 2)) for stop in (2 * n, 2 * n + 3)),
        Case(RaggedAllToAll(a, _pieces(n, 2 * n)[:1], (2 * n, 2 * n)), (2 * n,)),
        Case(RaggedAllToAll(a, (), (0, 3)), (0, 2)),
    ],
}
"""For each operator its cases along the axes `a` of n workers: even, uneven, short, empty blocks."""


def _layout_pairs(axes: dict[str, int]) -> list[tuple[Layout, Layout]]:
    """Pairs of layouts over axes: disjoint, overlapping, equal, with copies. Copies of the first do not vary."""
    a, n = tuple(axes), math.prod(axes.values())
    half = max(1, n // 2)
    whole = Layout((5, 3), P(), axes)
    rows, columns = Layout((5, 3), P(a), axes), Layout((5, 3), P(None, a), axes)
    last = Layout.grid((5, 3), (1, 1), axes, [n - 1])
    lopsided = Layout((2 * n + 1, 3), P(a), axes, [_uneven(n), None])
    backwards = Layout.grid((2 * n + 1, 3), (n, 1), axes, range(n)[::-1])
    some = Layout.grid((5, 3), (half, 1), axes, range(half))
    others = Layout.grid((5, 3), (1, n - half), axes, range(half, n)) if n > half else last
    each = Layout.grid((5, 3), (half, 1, n // half), axes, range(half * (n // half)))
    pairs = [(rows, columns), (rows, rows), (whole, rows), (rows, whole), (rows, last), (last, columns)]
    pairs += [(lopsided, backwards), (backwards, lopsided), (some, others), (some, each), (rows, each)]
    pairs += [(rows, Layout((5, 3), P(), axes, copies="varying"))]
    pairs += [(Layout((0, 3), P(a), axes), Layout((0, 3), P(), axes))]
    return [*pairs, (Layout.grid((), (), axes, [0]), Layout.grid((), (n,), axes))]


_LAYOUT_CASES: dict[type[Operator], Callable[[tuple[str, ...], Layout, Layout], Case]] = {
    Repartition: lambda a, src, dst: Case(Repartition(a, src, dst), src.shape, src),
    Accumulate: lambda a, src, dst: Case(Accumulate(a, dst, src), dst.shape, dst),
}
"""For each operator between layouts, its case on a pair of layouts."""


_MODULES = ("sums", "repartition", "root", "move", "all_to_all", "gather", "permute", "halo", "stencil")
"""The modules of operators, in the order of display."""


def operator_classes() -> list[type[Operator]]:
    """Every operator of the library, file by file in the order of declaration; then those declared elsewhere.

    >>> from spmd import testing
    >>> [kind.__name__ for kind in testing.operator_classes()][:4]
    ['Vary', 'Sum', 'Repartition', 'Accumulate']
    """
    for module in pkgutil.iter_modules(operators.__path__, f"{operators.__name__}."):
        importlib.import_module(module.name)

    def subclasses(kind: type[Operator]) -> Iterator[type[Operator]]:
        for sub in kind.__subclasses__():
            yield sub
            yield from subclasses(sub)

    order = {f"{operators.__name__}.{name}": k for k, name in enumerate(_MODULES)}
    kinds = [kind for kind in subclasses(Operator) if not kind.__name__.startswith("_") and hasattr(kind, "function")]
    return sorted(kinds, key=lambda kind: order.get(kind.__module__, len(order)))


def operator_cases(kind: type[Operator], mesh: Mesh) -> list[Case]:
    """The cases of an operator on a mesh: along every axis, and along all axes together in both orders.

    >>> from spmd import operators, testing
    >>> with spmd.Mesh(x=2) as mesh:
    ...     cases = testing.operator_cases(operators.Permute, mesh)
    ...     all(spmd.check_adjoint(c.operator, c.shape, in_specs=c.spec).passed for c in cases)
    True
    """
    names = tuple(mesh.axes)
    axis_groups = [(n,) for n in names] + ([names, names[::-1]] if len(names) > 1 else [])
    if kind in _LAYOUT_CASES:
        pairs = [(axes, pair) for axes in axis_groups for pair in _layout_pairs({n: mesh.axes[n] for n in axes})]
        return [_LAYOUT_CASES[kind](axes, *pair) for axes, pair in pairs]
    if kind not in _CASES:
        raise LayoutError.at(
            "spmd.testing.operator_cases",
            argument="kind",
            got=kind.__name__,
            need="an operator with a row of cases",
            mend=f"add a row to spmd/testing.py: {kind.__name__}: lambda a, n: [Case({kind.__name__}(a), (3, 2))],",
        )
    cases = [case for axes in axis_groups for case in _CASES[kind](axes, int(np.prod([mesh.axes[n] for n in axes])))]
    return [_with_layout(case, mesh) for case in cases]


def _with_layout(case: Case, mesh: Mesh) -> Case:
    if callable(case.spec):
        return case._replace(spec=case.spec({n: mesh.axes[n] for n in case.operator.axes}))
    if case.cuts is None:
        return case
    assert isinstance(case.spec, P)
    return case._replace(spec=Layout(case.shape, case.spec, mesh.axes, case.cuts))


def states(kind: type[Operator]) -> str:
    """The states an operator maps, as tables show them.

    >>> from spmd import testing
    >>> [(kind.__name__, testing.states(kind)) for kind in testing.operator_classes()[:2]]
    [('Vary', 'I → V'), ('Sum', 'V → I')]
    """
    symbol = {INVARIANT: "I", VARYING: "V", ROOTED: "Rooted"}
    return f"{symbol[kind.source]} → {symbol[kind.target]}"
