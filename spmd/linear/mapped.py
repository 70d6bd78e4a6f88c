"""Linear operators from the bodies of maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, Unpack, overload

import numpy as np

from spmd.autodiff import tree
from spmd.autodiff.custom import custom_vjp
from spmd.autodiff.tracer import value_of
from spmd.autodiff.transforms import vjp
from spmd.layout import P
from spmd.linear.operator import LinearOperator
from spmd.linear.space import admit_element, conj_tree, make_domain, space_of
from spmd.linear.views import Base, View
from spmd.mapping import Mapped
from spmd.mapping import map as spmd_map
from spmd.mesh import Mesh
from spmd.operators.algebra import formula
from spmd.operators.base import Linear
from spmd.placement import mesh_for
from spmd.tracebacks import api_boundary

__all__ = ["linear_operator"]


class Options(TypedDict, total=False):
    """What `linear_operator` takes beside bodies, specs and parameters."""

    shape: Any
    dtype: Any
    like: Any
    mesh: Mesh | None


class _Map(Base):
    """The map of a body. Its transpose is the pullback of a tape, or the map `back` of the user's adjoint."""

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
            self._range = tree.map(space_of, self.mapped(bare, self._zeros()))
        return self._range

    def _zeros(self):
        return tree.map(lambda s: s.zeros(), self.domain)

    def forward(self, x):
        if self.back is None:
            return self.mapped(self.params, x)
        return self._with_vjp(self.mapped, lambda op, g: op.T(g))(self.params, x)

    def _with_vjp(self, f: Callable, apply_transpose: Callable) -> Callable:
        """f(params, x), whose derivative rule for x applies the user's adjoint."""
        with_rule = custom_vjp(lambda params, x: f(params, x))

        def bwd(residuals, g):
            params, x = residuals
            if params is None:
                return None, apply_transpose(View(self), g)
            grads = vjp(lambda p: f(p, x), params)[1](g)[0]
            return grads, apply_transpose(View(self.with_parameters(None, params)), g)

        with_rule.defvjp(lambda params, x: (with_rule(params, x), (params, x)), bwd)
        return with_rule

    def transposed(self, y):
        if self.back is not None:
            return self._with_vjp(self._back, lambda op, g: op(g))(self.params, y)
        if self._pull is None:
            # The pullback of a linear map does not depend on the point, so it is made once.
            result, self._pull, *_ = vjp(lambda x: self.mapped(self.params, x), self._zeros())
            if self._range is None:
                self._range = tree.map(lambda o: space_of(value_of(o)), result)
        assert self._pull is not None
        return self._pull(y)[0]

    def _back(self, params, y):
        assert self.back is not None
        if self._mapped_back is None:
            self._mapped_back = self.back(tree.map(lambda s: s.layout, self.range))
        x = self._mapped_back(params, conj_tree(y))
        return conj_tree(admit_element(f"the adjoint of {self.name}", "result", x, self.domain))

    def with_parameters(self, f, params=None):
        if self.params is None:
            return self
        new = tree.map(f, self.params) if params is None else params
        if all(a is b for a, b in zip(tree.leaves(new), self.parameters, strict=True)):
            return self
        new_map = _Map(self.key[0], self.domain, self.mapped, self.back, new, self.key[1])
        new_map._range = self._range
        return new_map


def _short_name(f: Callable) -> str:
    return formula(((1, (f,)),)) if isinstance(f, Linear) else type(f).__name__


@overload
def linear_operator(
    f: Callable[[Any], Any],
    in_specs: Any,
    out_specs: Any,
    *,
    params: None = ...,
    adjoint: Callable[[Any], Any] | None = ...,
    **options: Unpack[Options],
) -> LinearOperator: ...


@overload
def linear_operator(
    f: Callable[[Any, Any], Any],
    in_specs: Any,
    out_specs: Any,
    *,
    params: Any,
    param_specs: Any = ...,
    adjoint: Callable[[Any, Any], Any] | None = ...,
    **options: Unpack[Options],
) -> LinearOperator: ...


@overload
def linear_operator(
    f: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    *,
    params: Any = ...,
    param_specs: Any = ...,
    adjoint: Callable[..., Any] | None = ...,
    **options: Unpack[Options],
) -> LinearOperator: ...


@api_boundary
def linear_operator(
    f: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    *,
    shape: Any = None,
    dtype: Any = np.float64,
    like: Any = None,
    params: Any = None,
    param_specs: Any = P(),  # noqa: B008 - a spec is immutable
    adjoint: Callable[..., Any] | None = None,
    mesh: Mesh | None = None,
) -> LinearOperator:
    """An operator on global arrays from the body of a linear map.

    f: the body, as for `spmd.map`: linear, from the block of one array (or a tree of blocks) to another; or an operator
    of bodies, such as Sum(("x",)). in_specs, out_specs: the layouts of argument and result. A tuple of in_specs has one
    entry for each argument of f; the operator then takes a tuple of arrays.
    shape, dtype: of the argument; tuples of them if in_specs is a tuple. like: instead, a tree of anything with a shape
    and a dtype.
    params: a pytree of arrays that f needs, laid out by param_specs. The body is then f(params, x), and `A(x)` is
    differentiable with respect to params too. A body that closes over such arrays is an error, as for `spmd.map`.
    adjoint: a body for the adjoint, y -> x (with params: params, y -> x); by default that of the tape.
    mesh: by default that of the enclosing `with mesh:`.

    A run on zeros finds the shapes of the result when they are first needed. The adjoint belongs to the inner product
    sum(conj(x) * y); if f takes real arrays and gives complex ones, to its real part. `spmd.check_adjoint(A)` checks
    that f is linear. Raises SpecError or LayoutError if specs or shapes do not fit, MeshError without a mesh.

        >>> with spmd.Mesh(x=2):
        ...     A = spmd.linear_operator(lambda x: 3 * spmd.shift(x, "x", wrap=False), P("x"), P("x"), shape=4)
        ...     A(np.arange(4.0))
        ...     A.H(np.arange(4.0))
        PartitionedArray([0., 0., 0., 3.], dtype=float64, spec=P('x'))
        PartitionedArray([6., 9., 0., 0.], dtype=float64, spec=P('x'))
    """
    where = "spmd.linear_operator"
    mesh = mesh_for(mesh, where)
    several = isinstance(in_specs, tuple)
    domain = make_domain(where, in_specs, shape, dtype, like, mesh)
    has_params = params is not None

    def body(params, x):
        xs = x if several else (x,)
        return f(params, *xs) if has_params else f(*xs)

    def back(params, y):
        assert adjoint is not None
        ys = y if isinstance(y, tuple) else (y,)
        return adjoint(params, *ys) if has_params else adjoint(*ys)

    name = getattr(f, "__name__", None) or _short_name(f)
    body.__name__, back.__name__ = name, f"the adjoint of {name}"
    param_specs = param_specs if has_params else None
    mapped: Any = spmd_map(body, (param_specs, in_specs), out_specs, mesh=mesh)
    mapped_back: Any = None
    if adjoint is not None:
        mapped_back = lambda layouts: spmd_map(back, (param_specs, layouts), in_specs, mesh=mesh)
    specs = tuple(tree.leaves((in_specs, out_specs, param_specs)))
    return View(_Map(f, domain, mapped, mapped_back, params, (specs, mesh, adjoint)))
