"""Linear operators on global arrays, with the algebra of `spmd.operators.algebra`.

    A = spmd.linear_operator(blur, P("x"), P("x"), shape=(1000,))
    y = A @ x;  z = A.H @ y;  B = 2 * A.H @ A + identity(A.domain)

The adjoint is that in the inner product <x, y> = sum(conj(x) * y) over the entries of the global arrays
(`spmd.inner`). An operator maps one array, or a pytree of arrays, to another: `A.domain` and `A.range` are the same
trees with a `Space` for each array. `A(x)` is differentiable, and nothing is gathered.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.autodiff import tree
from spmd.autodiff.admission import admit
from spmd.autodiff.custom import custom_vjp
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transforms import vjp
from spmd.errors import LayoutError, MeshError, SpecError, describe, message
from spmd.kernels import on_device
from spmd.layout import Layout, P, Spec
from spmd.map_arguments import brought
from spmd.mapping import Mapped
from spmd.mapping import map as spmd_map
from spmd.mesh import Mesh
from spmd.operators.algebra import Terms, added, formula
from spmd.operators.base import Linear, Term, collected
from spmd.placement import mesh_for
from spmd.spec_trees import spread
from spmd.tracebacks import api_boundary
from spmd.transport.handles import sealed

__all__ = [
    "BlockDiagonal",
    "HStack",
    "LinearOperator",
    "Space",
    "VStack",
    "from_scipy",
    "identity",
    "linear_operator",
    "zero",
]

_DENSE = 4096
"""The most columns or rows of a dense matrix that is made without being told to."""


class Space:
    """The arrays that an operator takes or gives: their shape, dtype, layout and mesh."""

    __slots__ = ("dtype", "layout", "mesh")

    def __init__(self, dtype: Any, layout: Layout, mesh: Mesh):
        self.dtype = np.dtype(dtype)
        self.layout = layout
        self.mesh = mesh

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def spec(self) -> Spec:
        """Which mesh axes split which dimension; on a grid the layout."""
        return self.layout if self.layout.spec is None else self.layout.spec

    def _key(self):
        return self.dtype, self.layout, self.mesh

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.dtype, self.layout))

    def __repr__(self) -> str:
        uneven = "" if self.layout.balanced else f" in blocks of {self.layout.cuts}"
        return f"{self.dtype}{list(self.shape)} {self.spec}{uneven}"

    def of(self, dtype: Any) -> Space:
        """This space with a dtype that holds `dtype` too."""
        return Space(np.result_type(self.dtype, dtype), self.layout, self.mesh)

    def zeros(self) -> PartitionedArray:
        """The zero of this space; no process makes the whole."""
        return self.made(lambda shape, _place: np.zeros(shape, self.dtype))

    def made(self, f: Callable[[tuple[int, ...], tuple[int, ...]], np.ndarray]) -> PartitionedArray:
        """An array of f(shape, place) for each block, at a place of the whole."""

        def block(w: int) -> Any:
            at = tuple(s.start for s in self.layout.slices(w))
            one = np.asarray(f(self.layout.block_shape(w), at), self.dtype, order="C")
            return sealed(one if self.mesh.places is None else self.mesh.places.own(one, w))

        return PartitionedArray(self.mesh.shared(self.layout, block), self.layout, self.mesh)

    def laid(self, x: Any) -> Any:
        """An array of this shape as this space has it: laid out, and of its dtype. Differentiable."""
        value = value_of(x)
        have = value.layout if isinstance(value, PartitionedArray) else None
        if value.dtype != self.dtype:
            x = x.astype(self.dtype)
        return x if have == self.layout else brought(x, have, self.layout, self.mesh)


def _space_of(x: PartitionedArray) -> Space:
    return Space(x.dtype, x.layout, x.mesh)


def _size(space: Any) -> int:
    return sum(s.size for s in tree.leaves(space))


def _dtype(space: Any) -> np.dtype:
    return np.result_type(*(s.dtype for s in tree.leaves(space)))


def _kind(x: Any) -> str:
    return getattr(getattr(value_of(x), "dtype", None), "kind", "")


def _conj(x: Any) -> Any:
    return tree.map(lambda a: np.conj(a) if a.dtype.kind == "c" else a, x)


_KNOWN = (PartitionedArray, bool, int, float, complex)


def _admitted(where: str, argument: str, x: Any, space: Any) -> Any:
    """x as an element of a space, or an error that says why it is none."""
    spaces, need = tree.flatten(space)
    leaves, have = tree.flatten(x)
    leaves = [
        a if type(value_of(a)) in _KNOWN or on_device(a) else admit(a, where, argument, error=LayoutError)
        for a in leaves
    ]
    fits = have == need and all(hasattr(value_of(a), "shape") for a in leaves)
    if not fits:
        raise LayoutError(
            message(where, argument=argument, got=_shown(x), need=_shown(space), mend="pass one array for each of them")
        )
    for a, s in zip(leaves, spaces, strict=True):
        v = value_of(a)
        if np.shape(v) != s.shape:
            raise LayoutError(
                message(
                    where,
                    argument=argument,
                    got=describe(a),
                    need=f"shape {list(s.shape)}: {s}",
                    mend="np.reshape(x, shape) before, or make the operator for this shape",
                )
            )
        if isinstance(v, PartitionedArray) and v.mesh != s.mesh:
            raise MeshError(
                message(
                    where,
                    argument=argument,
                    got=f"an array on {v.mesh}",
                    need=f"an array on {s.mesh}",
                    mend="spmd.put(x.numpy(), spec, mesh)",
                )
            )
        if v.dtype.kind not in "biufc":
            raise LayoutError(
                message(where, argument=argument, got=describe(a), need="numbers", mend=f"x.astype({s.dtype.name!r})")
            )
    return tree.unflatten(need, [s.laid(a) for a, s in zip(leaves, spaces, strict=True)])


def _shown(x: Any) -> str:
    """A tree of arrays or spaces as messages show it."""
    leaves, treedef = tree.flatten(x)
    texts = [repr(a) if isinstance(a, Space) else describe(a) for a in leaves]
    return texts[0] if len(texts) == 1 and leaves[0] is x else f"{treedef!s} of {', '.join(texts)}"


def _fit(sign: str, have: Any, need: Any, what: str) -> None:
    """Raise where one operator does not go on from where another ends; cuts may differ."""

    def keys(space):
        return [(s.shape, s.spec, s.mesh) for s in tree.leaves(space)]

    same = tree.structure(have) == tree.structure(need)
    if same and keys(have) == keys(need):
        return
    shapes = same and [k[0] for k in keys(have)] == [k[0] for k in keys(need)]
    raise (SpecError if shapes else LayoutError)(
        message(
            f"A {sign} B",
            got=f"{what} {_shown(have)}" + (f" on {tree.leaves(have)[0].mesh}" * shapes),
            need=_shown(need) + (f" on {tree.leaves(need)[0].mesh}" * shapes),
            mend="make both with one spec and one mesh" if shapes else "compose operators whose shapes fit",
        )
    )


class LinearOperator(Linear):
    """A linear map from global arrays to global arrays; `spmd.linear_operator` makes one.

    domain, range: the `Space` of what it takes and gives, or trees of them. shape: (entries of the range, entries of
    the domain). dtype: that of its matrix.
    """

    __slots__ = ()

    @property
    def domain(self) -> Any:
        raise NotImplementedError

    @property
    def range(self) -> Any:
        raise NotImplementedError

    def _apply(self, x: Any) -> Any:
        """The map of an element of the domain."""
        raise NotImplementedError

    def _with(self, f: Callable[[Any], Any]) -> LinearOperator:
        """The same operator with f applied to each array among its parameters."""
        raise NotImplementedError

    @property
    def _parameters(self) -> list:
        """The arrays among the parameters."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, int]:
        return _size(self.range), _size(self.domain)

    @property
    def dtype(self) -> np.dtype:
        return np.result_type(_dtype(self.domain), _dtype(self.range))

    @property
    def mesh(self) -> Mesh:
        return tree.leaves(self.domain)[0].mesh

    @property
    def _ends(self):
        return self.domain, self.range

    def _ends_with(self, other: Linear):
        return tuple(tree.map(lambda s, t: s.of(t.dtype), a, b) for a, b in zip(self._ends, other._ends, strict=True))

    def _make(self, terms: Iterable[Term], ends) -> LinearOperator:
        return _made(terms, *ends)

    def _meet(self, other: Linear, sign: str) -> None:
        if not isinstance(other, LinearOperator):
            raise LayoutError(
                message(
                    f"A {sign} B",
                    argument="B",
                    got=f"{other!r}, an operator of bodies",
                    need="an operator on global arrays",
                    mend="spmd.linear_operator(B, in_specs, out_specs, shape=...) makes B one",
                )
            )
        if sign == "@":
            _fit(sign, other.range, self.domain, "B that gives")
        else:
            _fit(sign, other.domain, self.domain, "B that takes")
            _fit(sign, other.range, self.range, "B that gives")

    @api_boundary
    def __call__(self, x: Any) -> Any:
        """The operator applied to an array, partitioned or bare, or to a tree of them.

        One on real arrays maps complex ones by their real and imaginary parts.
        """
        where = str(self)
        if _dtype(self.domain).kind != "c" and any(_kind(a) == "c" for a in tree.leaves(x)):
            parts = (tree.map(part, x) for part in (np.real, np.imag))
            real, imag = (self._apply(_admitted(where, "x", p, self.domain)) for p in parts)
            return tree.map(lambda a, b: a + 1j * b, real, imag)
        return self._apply(_admitted(where, "x", x, self.domain))

    def __str__(self) -> str:
        return formula(self.terms, str)

    def __repr__(self) -> str:
        return f"<LinearOperator {self}: {_shown(self.domain)} -> {_shown(self.range)}>"

    @api_boundary
    def dense(self, *, force: bool = False) -> np.ndarray:
        """The matrix, of shape (m, n), on every process: one application for each column. For small sizes.

        Rows and columns are the entries of the arrays in C order, trees of arrays one after the other. force: also
        for more than 4096 rows or columns. Collective under MPI.
        """
        m, n = self.shape
        if max(m, n) > _DENSE and not force:
            raise LayoutError(
                message(
                    f"({self}).dense",
                    got=f"an operator of {m} x {n}",
                    need=f"at most {_DENSE} rows and columns",
                    mend="dense(force=True), if the matrix is wanted",
                )
            )
        matrix = np.zeros((m, n), self.dtype)
        for k in range(n):
            unit = np.zeros(n, _dtype(self.domain))
            unit[k] = 1
            matrix[:, k] = flat(self(unflat(unit, self.domain)))
        return matrix

    @api_boundary
    def scipy(self) -> Any:
        """The operator as a `scipy.sparse.linalg.LinearOperator` on flat NumPy vectors, for SciPy's solvers.

        Every application gathers its result; under MPI all processes run the same solver together.
        """
        linalg = importlib.import_module("scipy.sparse.linalg")
        adjoint = self.H

        def applied(op: LinearOperator):
            def apply(v: np.ndarray) -> np.ndarray:
                v = np.ravel(v)
                if v.dtype.kind == "c" and _dtype(op.domain).kind != "c":
                    return apply(np.real(v)) + 1j * apply(np.imag(v))
                return flat(op(unflat(v.astype(_dtype(op.domain), copy=False), op.domain)))

            return apply

        return linalg.LinearOperator(self.shape, applied(self), applied(adjoint), dtype=self.dtype)


def flat(x: Any) -> np.ndarray:
    """The entries of an array, or of a tree of them, as one NumPy vector on every process. It gathers."""
    arrays = [a.numpy() if isinstance(a, PartitionedArray) else np.asarray(a) for a in tree.leaves(x)]
    return np.concatenate([np.ravel(a) for a in arrays])


def unflat(v: np.ndarray, space: Any) -> Any:
    """The element of a space with these entries."""
    spaces, treedef = tree.flatten(space)
    cuts = np.cumsum([s.size for s in spaces])[:-1]
    parts = np.split(v, cuts)
    return tree.unflatten(
        treedef, [s.laid(np.reshape(p, s.shape).astype(s.dtype)) for p, s in zip(parts, spaces, strict=True)]
    )


# Sums, products and multiples


class _Expression(LinearOperator, Terms):
    """A sum of multiples of products; no term at all is zero, a term without factors the identity."""

    __slots__ = ("_domain", "_range")

    def __init__(self, terms: tuple[Term, ...], domain: Any, range: Any):
        self._terms, self._domain, self._range = terms, domain, range

    __repr__ = LinearOperator.__repr__

    @property
    def domain(self) -> Any:
        return self._domain

    @property
    def range(self) -> Any:
        return self._range

    def _apply(self, x: Any) -> Any:
        if not self._terms:
            return tree.map(lambda s: s.zeros(), self._range)
        total: Any = None
        for c, factors in self._terms:
            y = x
            for factor in reversed(factors):
                y = factor(y)
            y = tree.map(lambda a, s, c=c: s.laid(a if c == 1 else c * a), y, self._range)
            total = y if total is None else tree.map(added, total, y)
        return total

    def _with(self, f):
        terms = tuple((c, tuple(factor._with(f) for factor in factors)) for c, factors in self._terms)  # type: ignore[attr-defined]
        return _Expression(terms, self._domain, self._range)

    @property
    def _parameters(self):
        return [p for _, factors in self._terms for factor in factors for p in factor._parameters]  # type: ignore[attr-defined]


def _made(terms: Iterable[Term], domain: Any, range: Any) -> LinearOperator:
    """The operator on global arrays with this normal form."""
    kept = tuple((c, factors) for c, factors in collected(terms) if c != 0)
    match kept:
        case ((1, (LinearOperator() as one,)),):
            return one
    factors = [f for _, fs in kept for f in fs]
    starts = [_dtype(fs[-1].domain if fs else domain).kind for _, fs in kept]  # type: ignore[attr-defined]
    is_complex = any(isinstance(c, complex) for c, _ in kept)
    kinds = {_dtype(space).kind for f in factors for space in f._ends}
    if not any(_dtype(f.domain).kind != _dtype(f.range).kind for f in factors):  # type: ignore[attr-defined]
        # One kind for all: else the adjoint of a composition of real and complex maps would not be that of its parts.
        if is_complex or "c" in kinds:
            domain, range = (tree.map(lambda s: s.of(np.complex64), space) for space in (domain, range))
    elif is_complex or set(starts) != {_dtype(domain).kind}:
        raise LayoutError(
            message(
                "the algebra of operators",
                got=formula(kept, str),
                need="real multiples and sums of one kind where a factor maps between real and complex arrays: it is "
                "linear over the real numbers only",
                mend="make its body one on complex arrays, with dtype=complex",
            )
        )
    return _Expression(kept, domain, range)


@api_boundary
def identity(domain: Any) -> LinearOperator:
    """The identity of a space: `identity(A.domain)`."""
    return _made([(1, ())], domain, domain)


@api_boundary
def zero(domain: Any, range: Any) -> LinearOperator:
    """The operator from one space to another that gives zeros: `zero(A.domain, A.range) + A == A`."""
    return _made([], domain, range)


# Maps of bodies


class _Base:
    """What an operator is made of: a map forward, and its transpose. Operators are views of it."""

    name: str
    domain: Any
    range: Any
    parameters: list

    def forward(self, x: Any) -> Any:
        raise NotImplementedError

    def transposed(self, y: Any) -> Any:
        raise NotImplementedError

    def replaced(self, f: Callable[[Any], Any]) -> _Base:
        return self


class _View(LinearOperator):
    """A map as it is (""), its adjoint ("H"), its transpose ("T"), or its conjugate ("conj")."""

    __slots__ = ("base", "mode")

    def __init__(self, base: _Base, mode: str = ""):
        self.base, self.mode = base, mode

    def _turned(self, table: Mapping[str, str]) -> _View:
        mode = table[self.mode]
        if self.dtype.kind != "c":  # a real matrix is its own conjugate
            mode = {"T": "H", "conj": ""}.get(mode, mode)
        return _View(self.base, mode)

    @property
    def H(self) -> LinearOperator:
        return self._turned({"": "H", "H": "", "T": "conj", "conj": "T"})

    @property
    def T(self) -> LinearOperator:
        return self._turned({"": "T", "T": "", "H": "conj", "conj": "H"})

    @property
    def domain(self) -> Any:
        return self.base.domain if self.mode in ("", "conj") else self.base.range

    @property
    def range(self) -> Any:
        return self.base.range if self.mode in ("", "conj") else self.base.domain

    def _apply(self, x):
        f = self.base.forward if self.mode in ("", "conj") else self.base.transposed
        return f(x) if self.mode in ("", "T") else _conj(f(_conj(x)))

    def _with(self, f):
        return _View(self.base.replaced(f), self.mode)

    @property
    def _parameters(self):
        return self.base.parameters

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _View) and (self.base, self.mode) == (other.base, other.mode)

    def __hash__(self) -> int:
        return hash((self.base, self.mode))

    def __str__(self) -> str:
        return self.base.name + {"": "", "conj": ".H.T"}.get(self.mode, f".{self.mode}")


class _Map(_Base):
    """A map of a body: forward `spmd.map` of it, back its tape, or the map that `back` makes of a body that is given,
    for cotangents that lie as the results do."""

    def __init__(
        self, f: Callable, domain: Any, mapped: Mapped, back: Callable[[Any], Mapped] | None, params: Any, key: Any
    ):
        self.name = getattr(f, "__name__", None) or _short_name(f)
        self.domain, self.mapped, self.back, self.params = domain, mapped, back, params
        self.parameters = [] if params is None else tree.leaves(params)
        self.key = (f, key)
        self._range: Any = None
        self._pull: Callable | None = None
        self._mapped_back: Mapped | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Map) and (
            self is other
            or (
                (self.key, self.domain) == (other.key, other.domain)
                and len(self.parameters) == len(other.parameters)
                and all(a is b for a, b in zip(self.parameters, other.parameters, strict=True))
            )
        )

    def __hash__(self) -> int:
        return hash((self.name, self.key[0]))

    @property
    def range(self) -> Any:
        if self._range is None:
            bare = None if self.params is None else tree.map(value_of, self.params)
            self._range = tree.map(_space_of, self.mapped(bare, self._zeros()))
        return self._range

    def _zeros(self):
        return tree.map(lambda s: s.zeros(), self.domain)

    def forward(self, x):
        if self.back is None:
            return self.mapped(self.params, x)
        return self._ruled(self.mapped, lambda op, g: op.T(g))(self.params, x)

    def _ruled(self, f: Callable, turned: Callable) -> Callable:
        """f of (params, x), with the transpose that was given as its rule for x."""
        ruled = custom_vjp(lambda params, x: f(params, x))

        def bwd(kept, g):
            params, x = kept
            if params is None:
                return None, turned(_View(self), g)
            grads = vjp(lambda p: f(p, x), params)[1](g)[0]
            return grads, turned(_View(self.replaced(None, params)), g)

        ruled.defvjp(lambda params, x: (ruled(params, x), (params, x)), bwd)
        return ruled

    def transposed(self, y):
        if self.back is not None:
            return self._ruled(self._back, lambda op, g: op(g))(self.params, y)
        if self._pull is None:
            # Of a linear map the pullback is the same everywhere, so it is made once.
            out, self._pull, *_ = vjp(lambda x: self.mapped(self.params, x), self._zeros())
            if self._range is None:
                self._range = tree.map(lambda o: _space_of(value_of(o)), out)
        assert self._pull is not None
        return self._pull(y)[0]

    def _back(self, params, y):
        assert self.back is not None
        if self._mapped_back is None:
            self._mapped_back = self.back(tree.map(lambda s: s.layout, self.range))
        found = self._mapped_back(params, _conj(y))
        return _conj(_admitted(f"the adjoint of {self.name}", "result", found, self.domain))

    def replaced(self, f, params=None):
        if self.params is None:
            return self
        new = tree.map(f, self.params) if params is None else params
        if all(a is b for a, b in zip(tree.leaves(new), self.parameters, strict=True)):
            return self
        made = _Map(self.key[0], self.domain, self.mapped, self.back, new, self.key[1])
        made._range = self._range
        return made


def _short_name(f: Callable) -> str:
    return formula(((1, (f,)),)) if isinstance(f, Linear) else type(f).__name__


@api_boundary
def linear_operator(
    f: Callable,
    in_specs: Any,
    out_specs: Any,
    *,
    shape: Any = None,
    dtype: Any = np.float64,
    like: Any = None,
    params: Any = None,
    param_specs: Any = P(),  # noqa: B008 - a spec is immutable
    adjoint: Callable | None = None,
    mesh: Mesh | None = None,
) -> LinearOperator:
    """An operator on global arrays from the body of a linear map.

    f: the body, as for `spmd.map`: linear, from the block of one array (or a tree of blocks) to another; or an
    operator of bodies, such as Sum(("x",)). in_specs, out_specs: how argument and result are laid out. A tuple of
    in_specs is one for each argument of f: the operator then takes a tuple of arrays.
    shape, dtype: those of the argument; tuples of them where in_specs is a tuple. like: instead, a tree of anything
    with a shape and a dtype.
    params: a pytree of arrays that f needs, laid out by param_specs: then the body is f(params, x), and `A(x)` is
    differentiable with respect to them too. A body that closes over such arrays is an error, as for `spmd.map`.
    adjoint: a body for the adjoint, y -> x (with params: params, y -> x); by default it is the tape's.
    mesh: by default that of the enclosing `with mesh:`.

    The result's shapes are found by one run on zeros, when they are first needed. The adjoint is relative to
    sum(conj(x) * y); where f takes real arrays and gives complex ones, to the real part of that. That f is linear is
    not checked: `spmd.check_adjoint(A)` does so.
    Raises SpecError or LayoutError where the specs or shapes do not fit, MeshError without a mesh.
    """
    where = "spmd.linear_operator"
    mesh = mesh_for(mesh, where)
    several = isinstance(in_specs, tuple)
    domain = _domain(where, in_specs, shape, dtype, like, mesh)
    given = params is not None

    def body(params, x):
        xs = x if several else (x,)
        return f(params, *xs) if given else f(*xs)

    def back(params, y):
        assert adjoint is not None
        ys = y if isinstance(y, tuple) else (y,)
        return adjoint(params, *ys) if given else adjoint(*ys)

    name = getattr(f, "__name__", None) or _short_name(f)
    body.__name__, back.__name__ = name, f"the adjoint of {name}"
    param_specs = param_specs if given else None
    mapped: Any = spmd_map(body, (param_specs, in_specs), out_specs, mesh=mesh)
    mapped_back: Any = None
    if adjoint is not None:
        mapped_back = lambda layouts: spmd_map(back, (param_specs, layouts), in_specs, mesh=mesh)
    specs = tuple(tree.leaves((in_specs, out_specs, param_specs)))
    return _View(_Map(f, domain, mapped, mapped_back, params, (specs, mesh, adjoint)))


def _domain(where: str, in_specs: Any, shape: Any, dtype: Any, like: Any, mesh: Mesh) -> Any:
    """The space of the argument, or a tree of spaces."""
    if like is None:
        shape = in_specs.shape if shape is None and isinstance(in_specs, Layout) else shape
        if shape is None or not (isinstance(in_specs, Spec | tuple)):
            raise LayoutError(
                message(
                    where,
                    argument="shape",
                    got=f"{shape} for in_specs {in_specs}",
                    need="the shape of the argument, or a tuple of shapes for a tuple of specs",
                    mend="shape=x.shape, dtype=x.dtype; or like=x for a tree of arrays",
                )
            )
        several = isinstance(in_specs, tuple)
        shapes = tuple(shape) if several else (shape,)
        dtypes = tuple(dtype) if isinstance(dtype, tuple | list) else (dtype,) * len(shapes)
        if several and not len(shapes) == len(in_specs) == len(dtypes):
            raise LayoutError(
                message(
                    where,
                    argument="shape",
                    got=f"{len(shapes)} shapes and {len(dtypes)} dtypes for {len(in_specs)} specs",
                    need="one for each argument",
                    mend="shape=((4,), (3, 2)) for in_specs=(P(), P('x'))",
                )
            )
        made = tuple(_Like(s, t) for s, t in zip(shapes, dtypes, strict=True))
        like = made if several else made[0]
    leaves = spread(where, "x", "in_specs", in_specs, like)
    spaces = []
    for leaf in leaves:
        if not isinstance(leaf.spec, Spec) or np.dtype(leaf.value.dtype).kind not in "fc":
            raise SpecError(
                message(
                    where,
                    argument=leaf.path,
                    got=f"dtype {np.dtype(leaf.value.dtype)} with the spec {leaf.spec}",
                    need="a floating or complex array, with a spec",
                    mend="x.astype(float); what is not mapped is for params",
                )
            )
        leaf.spec.check(mesh.axes, where, leaf.path, len(leaf.value.shape))
        spaces.append(Space(leaf.value.dtype, mesh.layout(tuple(leaf.value.shape), leaf.spec, where, leaf.path), mesh))
    return tree.unflatten(tree.structure(like, none_is_leaf=True), spaces)


class _Like:
    """A shape and a dtype."""

    def __init__(self, shape: Sequence[int] | int, dtype: Any):
        self.shape = (int(shape),) if isinstance(shape, int | np.integer) else tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)


# SciPy


class _SciPy(_Base):
    """A matrix, or an operator of SciPy, which every process applies to the whole vector."""

    def __init__(self, op: Any, domain: Space, range: Space):
        linalg = importlib.import_module("scipy.sparse.linalg")
        self.op, self.linear = op, linalg.aslinearoperator(op)
        self.domain, self.range = domain, range
        self.name, self.parameters = type(op).__name__, []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SciPy) and (
            self.op is other.op and (self.domain, self.range) == (other.domain, other.range)
        )

    def __hash__(self) -> int:
        return hash(id(self.op))

    def forward(self, x):
        return self._ruled(lambda v: self.linear.matvec(v), self.range, lambda g: self.transposed(g))(x)

    def transposed(self, y):
        return self._ruled(lambda v: np.conj(self.linear.rmatvec(np.conj(v))), self.domain, lambda g: self.forward(g))(
            y
        )

    def _ruled(self, f, out: Space, back):
        ruled = custom_vjp(lambda x: unflat(np.asarray(f(flat(x))), out))
        ruled.defvjp(lambda x: (ruled(x), None), lambda _, g: (back(g),))
        return ruled


@api_boundary
def from_scipy(op: Any, in_spec: Spec, out_spec: Spec | None = None, *, shape=None, out_shape=None, mesh=None):
    """A matrix or `scipy.sparse.linalg.LinearOperator` as an operator on global arrays.

    op: of shape (m, n), with an adjoint (rmatvec) if A.H is wanted. in_spec, out_spec: how argument and result are
    laid out; out_spec is in_spec by default. shape, out_shape: those of the arrays, by default (n,), and (m,) or, of a
    square one, shape.
    Every process assembles the argument and applies `op` to the whole of it: for small parts, and for comparison.
    """
    where = "spmd.linear.from_scipy"
    mesh = mesh_for(mesh, where)
    m, n = op.shape
    dtype = np.result_type(op.dtype, np.float32)
    out_shape = shape if out_shape is None and m == n else out_shape
    out_spec = in_spec if out_spec is None else out_spec
    spaces = []
    for argument, given, spec, size in (("shape", shape, in_spec, n), ("out_shape", out_shape, out_spec, m)):
        full = (size,) if given is None else tuple(given)
        if math.prod(full) != size:
            raise LayoutError(
                message(
                    where,
                    argument=argument,
                    got=str(full),
                    need=f"a shape of {size} entries, for an operator of {m} x {n}",
                    mend=f"({size},), or leave it out",
                )
            )
        spec.check(mesh.axes, where, argument, len(full))
        spaces.append(Space(dtype, mesh.layout(full, spec, where, argument), mesh))
    return _View(_SciPy(op, *spaces))


# Blocks of operators


class _Blocks(LinearOperator):
    """Operators beside or below each other, on tuples of arrays."""

    __slots__ = ("operators",)
    operators: tuple[LinearOperator, ...]

    def __init__(self, *operators: LinearOperator):
        if not operators or not all(isinstance(op, LinearOperator) for op in operators):
            raise LayoutError(
                message(
                    f"spmd.linear.{type(self).__name__}",
                    argument="operators",
                    got=", ".join(describe(op) for op in operators) or "none",
                    need="operators on global arrays, at least one",
                    mend="spmd.linear_operator(f, in_specs, out_specs, shape=...) makes one",
                )
            )
        self.operators = operators
        self._check()

    def _check(self) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Blocks) and (type(self), self.operators) == (type(other), other.operators)

    def __hash__(self) -> int:
        return hash((type(self), self.operators))

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self.operators))})"

    def _with(self, f):
        return type(self)(*(op._with(f) for op in self.operators))

    @property
    def _parameters(self):
        return [p for op in self.operators for p in op._parameters]


class VStack(_Blocks):
    """Operators below each other: x -> (A x, B x, ...). Its adjoint is `HStack` of the adjoints."""

    __slots__ = ()

    def _check(self) -> None:
        for op in self.operators[1:]:
            _fit("below", op.domain, self.operators[0].domain, "B that takes")

    @property
    def domain(self):
        return self.operators[0].domain

    @property
    def range(self):
        return tuple(op.range for op in self.operators)

    def _apply(self, x):
        return tuple(op(x) for op in self.operators)

    @property
    def H(self):
        return HStack(*(op.H for op in self.operators))

    @property
    def T(self):
        return HStack(*(op.T for op in self.operators))


class HStack(_Blocks):
    """Operators beside each other: (x, y, ...) -> A x + B y + .... Its adjoint is `VStack` of the adjoints."""

    __slots__ = ()

    def _check(self) -> None:
        for op in self.operators[1:]:
            _fit("beside", op.range, self.operators[0].range, "B that gives")

    @property
    def domain(self):
        return tuple(op.domain for op in self.operators)

    @property
    def range(self):
        first = self.operators[0].range
        dtype = np.result_type(*(_dtype(op.range) for op in self.operators))
        return tree.map(lambda s: s.of(dtype), first)

    def _apply(self, x):
        range, total = self.range, None
        for op, part in zip(self.operators, x, strict=True):
            y = tree.map(lambda a, s: s.laid(a), op(part), range)
            total = y if total is None else tree.map(added, total, y)
        return total

    @property
    def H(self):
        return VStack(*(op.H for op in self.operators))

    @property
    def T(self):
        return VStack(*(op.T for op in self.operators))


class BlockDiagonal(_Blocks):
    """Operators side by side: (x, y, ...) -> (A x, B y, ...)."""

    __slots__ = ()

    @property
    def domain(self):
        return tuple(op.domain for op in self.operators)

    @property
    def range(self):
        return tuple(op.range for op in self.operators)

    def _apply(self, x):
        return tuple(op(part) for op, part in zip(self.operators, x, strict=True))

    @property
    def H(self):
        return BlockDiagonal(*(op.H for op in self.operators))

    @property
    def T(self):
        return BlockDiagonal(*(op.T for op in self.operators))
