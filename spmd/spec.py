"""Partition specs: the mesh axes that split each dimension of an array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from spmd.errors import SpecError, nearest
from spmd.tracebacks import shorten

__all__ = ["P", "unreduced_error"]


@lru_cache(maxsize=1024)
def _spec(kind: type[P], dims: tuple[Any, ...], unreduced: frozenset[str] = frozenset()) -> P:
    """The spec of these dimensions. Equal specs are one object in most cases."""
    for d, names in enumerate(dims):
        if not (names is None or isinstance(names, str | tuple | list) and all(isinstance(n, str) for n in names)):
            raise SpecError.at(
                "spmd.P",
                argument=f"dimension {d}",
                got=repr(dims[d]),
                need="an axis name, a tuple of axis names, or None",
                mend='write P("x"), P(("x", "y")) or P(None, "x")',
            )
    split = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in dims)
    axes = tuple(n for d in split for n in d)
    repeated = sorted({n for n in axes if axes.count(n) > 1})
    if repeated:
        raise SpecError.at(
            "spmd.P",
            argument=_shown(split),
            got=f"axis {repeated[0]!r} more than once",
            need="each axis at most once: it can split one dimension only",
            mend="split the other dimension over another axis, or leave it whole (None)",
        )
    if not unreduced.isdisjoint(axes):
        raise SpecError.at(
            "spmd.P",
            argument="unreduced",
            got=f"axis {min(unreduced.intersection(axes))!r}, which splits a dimension",
            need="axes that split nothing: the array is the sum of what lies along them",
            mend="name the axis in one place only",
        )
    whole = next((k for k, d in enumerate(reversed(split)) if d), len(split))
    spec = object.__new__(kind)
    trimmed = split[: len(split) - whole]
    parsed = {
        "dims": split,
        "axes": axes,
        "unreduced": unreduced,
        "varying": unreduced.union(axes),
        "trimmed": trimmed,
        "_hash": hash((trimmed, unreduced)),
    }
    for name, value in parsed.items():
        object.__setattr__(spec, name, value)
    return spec


def _shown(split: tuple[tuple[str, ...], ...], unreduced: Iterable[str] = ()) -> str:
    entries = ["None" if not d else repr(d[0]) if len(d) == 1 else repr(d) for d in split]
    if unreduced:
        entries.append(f"unreduced={{{', '.join(map(repr, sorted(unreduced)))}}}")
    return f"P({', '.join(entries)})"


def _axis_names(unreduced: Any) -> frozenset[str]:
    names = (unreduced,) if isinstance(unreduced, str) else unreduced
    names = tuple(names) if isinstance(names, Iterable) else (names,)
    if not all(isinstance(n, str) for n in names):
        raise SpecError.at(
            "spmd.P",
            argument="unreduced",
            got=repr(unreduced),
            need="names of mesh axes",
            mend='P("x", unreduced={"y"})',
        )
    return frozenset(names)


def unreduced_error(where: str, argument: str, got: Any) -> SpecError:
    """The error for a spec, or layout, with unreduced axes where an array lies in blocks."""
    return SpecError.at(
        where,
        argument=argument,
        got=str(got),
        need="a spec without unreduced axes: it says which block of an array each worker holds",
        mend=f"{got.reduced}; global arrays and the specs of maps may be unreduced",
    )


def _unpickled(kind: type[P], dims: tuple[Any, ...], unreduced: frozenset[str]) -> P:
    return kind(*dims, unreduced=unreduced)


class P:
    """A partition spec: the mesh axes that split each dimension.

    `P("x", None)`: axis x splits dimension 0, dimension 1 is whole. `P(("x", "y"))`: axis x splits dimension 0, and
    axis y splits each of its blocks. Dimensions that are not named are whole. Along axes that are not named workers
    hold copies.

    unreduced: axes along which each worker holds a part of a sum. The array is the sum over them of what lies there, as
    the result of a contraction over a split dimension before it is added. Spelt as in JAX; DTensor's `Partial`.

        >>> with spmd.Mesh(x=2, y=2):
        ...     x = spmd.zeros((4, 6), spec=P("x", "y"))
        >>> x.layout.block_shape(0)
        (2, 3)
        >>> spmd.Layout((4, 6), P(None, ("x", "y")), {"x": 2, "y": 2}).block_shape(0)
        (4, 2)
    """

    __slots__ = ("_hash", "axes", "dims", "trimmed", "unreduced", "varying")

    _hash: int
    dims: tuple[tuple[str, ...], ...]
    axes: tuple[str, ...]
    """The axes that split something, in the order of the dimensions."""
    unreduced: frozenset[str]
    varying: frozenset[str]
    """The axes along which workers hold different values: those that split something, and the unreduced ones."""
    trimmed: tuple[tuple[str, ...], ...]
    """The dimensions without trailing whole ones, by which specs are compared."""

    def __new__(cls, *dims: str | Sequence[str] | None, unreduced: str | Iterable[str] = ()) -> P:
        try:
            names = _axis_names(unreduced) if unreduced else frozenset()
            try:
                return _spec(cls, dims, names)
            except TypeError:  # lists
                return _spec.__wrapped__(cls, dims, names)
        except SpecError as error:
            shorten(error)
            raise

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self} does not change: make another spec")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{self} does not change: make another spec")

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (type(self), self.dims, self.unreduced)

    def __len__(self) -> int:
        return len(self.dims)

    def __iter__(self) -> Iterator[tuple[str, ...]]:
        return iter(self.dims)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, P) and self.trimmed == other.trimmed and self.unreduced == other.unreduced

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return _shown(self.dims, self.unreduced)

    @property
    def reduced(self) -> P:
        """The same spec without unreduced axes."""
        return P(*self.dims) if self.unreduced else self

    def check(
        self, axes: Mapping[str, int], where: str, argument: str, ndim: int | None = None, *, unreduced: bool = False
    ) -> None:
        """Raise if the spec names unknown axes, or has more entries than the array has dimensions. unreduced: whether
        the array may be the sum of what lies along some axes."""
        if self.unreduced and not unreduced:
            raise unreduced_error(where, argument, self)
        unknown = [n for n in (*self.axes, *sorted(self.unreduced)) if n not in axes]
        if unknown:
            close = nearest(unknown[0], axes, 1)
            raise SpecError.at(
                where,
                argument=argument,
                got=f"{self}, which names axis {unknown[0]!r}",
                need=f"axes of the mesh: {', '.join(map(repr, axes)) or 'it has none'}",
                mend=f"write {close[0]!r}" if close else "name an axis of the mesh, or make a mesh that has this one",
            )
        if ndim is not None and len(self.dims) > ndim:
            raise SpecError.at(
                where,
                argument=argument,
                got=f"{self} for an array of {ndim} dimension{'s' * (ndim != 1)}",
                need=f"a spec of at most {ndim} entr{'y' if ndim == 1 else 'ies'}"
                if ndim
                else "P(): one number is not split",
                mend="shorten the spec, or give the array the dimensions it names"
                + ("" if ndim else ": np.array([x]), or torch.tensor([x]) (np.asarray makes one array of a list)"),
            )
