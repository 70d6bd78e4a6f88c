"""spmd.map: a function on blocks becomes a function on global arrays, differentiable from outside.

A call takes four steps. `ArgumentSpecs` lays the arguments out by in_specs, `MappedBody` runs the body on the blocks of
every worker, `ResultSpecs` checks its results against out_specs, and `joined_leaves` joins their blocks to
`PartitionedArray`s. `spmd.map_interpreters` chooses what runs: the body, or its derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, overload

from spmd.array import PartitionedArray
from spmd.autodiff import tracer
from spmd.autodiff.signatures import Parameters, Result
from spmd.autodiff.static_array import AnyArray
from spmd.errors import SpecError, describe
from spmd.map_arguments import MapMixing
from spmd.map_interpreters import apply, value_and_grad
from spmd.mapped_body import MappedBody
from spmd.mesh import Mesh, use_map
from spmd.spec_trees import REQUIRED
from spmd.tracebacks import api_boundary

__all__ = ["Mapped", "map"]


@overload
def map(
    f: None = None, in_specs: Any = ..., out_specs: Any = ..., *, mesh: Mesh | None = ..., check: bool = ...
) -> MapDecorator: ...


@overload
def map(
    f: Callable[Parameters, AnyArray],
    in_specs: Any = ...,
    out_specs: Any = ...,
    *,
    mesh: Mesh | None = ...,
    check: bool = ...,
) -> Mapped[Parameters, PartitionedArray]: ...


@overload
def map(
    f: Callable[Parameters, Result],
    in_specs: Any = ...,
    out_specs: Any = ...,
    *,
    mesh: Mesh | None = ...,
    check: bool = ...,
) -> Mapped[Parameters, Result]: ...


@api_boundary
def map(
    f: Callable[..., Any] | None = None,
    in_specs: Any = REQUIRED,
    out_specs: Any = REQUIRED,
    *,
    mesh: Mesh | None = None,
    check: bool = True,
) -> Any:
    """A function on global arrays that runs `f` on the block of every worker.

    f: the body: plain NumPy on this worker's blocks, and collectives (`spmd.psum(x, "data")`). A pure function of its
    arguments.
    in_specs: for each argument how it is laid out on the mesh: `P("x", None)` splits dimension 0 over axis x,
    `P()` gives every worker a copy, None passes the argument as it is; a `Layout` gives the blocks it says, uneven
    ones or those of a grid on some of the workers. A tuple, one entry per positional argument, or a dict by name, or
    one spec for all; each entry may stand for a whole pytree (a prefix).
    out_specs: the same for the result. Along axes that a spec does not name the result must be Invariant. A Rooted
    result leaves by a layout that gives all of it to its root.
    mesh: by default that of the enclosing `with mesh:`, looked up at the call.
    check: bodies see arrays that carry their state, and what is promised Invariant is verified. With check=False and
    nothing differentiated a body sees bare read-only arrays, and a result promised Invariant is worker 0's. On a GPU
    they are CuPy's, which take no constants of the host: `np.asarray(c, like=x)` moves one beside x.

    The mapped function takes NumPy arrays, Python numbers and `PartitionedArray`s, and gives `PartitionedArray`s. It
    can be differentiated from outside; a gradient has the layout of its argument. Without f it is a decorator:
    `@spmd.map(in_specs=..., out_specs=...)`. As `jax.shard_map`.

    Raises SpecError, LayoutError or StateError that name the argument or result by its path; MeshError without mesh.

        >>> with spmd.Mesh(x=2):
        ...     total = spmd.map(lambda w, x: spmd.psum(w * np.sum(x), "x"), in_specs=(P(), P("x")), out_specs=P())
        ...     total(2.0, np.arange(5.0))
        ...     spmd.grad(total, argnums=1)(2.0, np.arange(5.0))
        PartitionedArray(20., dtype=float64, spec=P())
        array([2., 2., 2., 2., 2.])
    """
    for name, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        if specs is REQUIRED:
            raise SpecError.at(
                "spmd.map",
                argument=name,
                got="nothing",
                need="a spec, or a pytree of specs",
                mend=f'{name}=P() for replicated, P("x") for split over axis x',
            )
    if f is not None and not callable(f):
        raise SpecError.at(
            "spmd.map",
            argument="f",
            got=describe(f),
            need="a function",
            mend="spmd.map(f, in_specs, out_specs); as a decorator @spmd.map(in_specs=..., out_specs=...)",
        )
    if f is None:
        return lambda body: Mapped(body, in_specs, out_specs, mesh, check)
    return Mapped(f, in_specs, out_specs, mesh, check)


use_map(map)


class MapDecorator(Protocol):
    """What `spmd.map` gives without a body: it takes the body. Where the body gives an array, the map gives a global
    array; other types of results stay as they are written."""

    @overload
    def __call__(self, f: Callable[Parameters, AnyArray], /) -> Mapped[Parameters, PartitionedArray]: ...

    @overload
    def __call__(self, f: Callable[Parameters, Result], /) -> Mapped[Parameters, Result]: ...


class Mapped(MappedBody, Generic[Parameters, Result]):
    """A function on global arrays; see `spmd.map`. It has the parameters of its body."""

    @api_boundary
    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return apply(self, args, kwargs, self.run)

    def __value_and_grad__(
        self, check: Callable[[Any], None], argnums: Sequence[int], args: tuple, kwargs: dict
    ) -> tuple[Any, list] | None:
        """What `spmd.value_and_grad` of this map calls first; see `map_interpreters.value_and_grad`."""
        return value_and_grad(self, check, argnums, args, kwargs, self.run)


tracer.use_mixing(MapMixing())
