"""Optimisers as pure functions on pytrees: `params, state = optimizer.update(grads, state, params)`.

Every formula is entrywise, so it works on blocks as on whole arrays. If gradients have the layout of their parameters,
an update communicates nothing: in a body, on `PartitionedArray`s, and on bare arrays. If nothing is differentiated, one
kernel passes over each array once, with the results of the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from spmd import kernels
from spmd.array import PartitionedArray, device_of_worker
from spmd.autodiff import tree
from spmd.autodiff.admission import admit
from spmd.autodiff.registry import primitive
from spmd.autodiff.tape import ACTIVE
from spmd.autodiff.tracer import Array, value_of
from spmd.errors import SpecError, describe, message
from spmd.kernels import on_device
from spmd.layout import P, Spec
from spmd.optim.arguments import MISSING, check_update, leaves_like
from spmd.optim.numbers import (
    Rate,
    cast_like,
    checked_option,
    checked_rate,
    count_of,
    is_short,
    name_of_dtype,
    next_count,
    rate_at,
    widened,
)
from spmd.ownership import DONATED, donated_error, reclaimed
from spmd.placement import put
from spmd.tracebacks import api_boundary
from spmd.transport.handles import read_only

__all__ = [
    "AdamState",
    "Optimizer",
    "SGDState",
    "adam",
    "adamw",
    "check_optimizer",
    "checked_array",
    "first_number",
    "give_up",
    "moment_specs",
    "sgd",
]


class Optimizer(NamedTuple):
    """A pair of pure functions. params: any pytree of real floating-point arrays.

    init: params -> state. update: (grads, state, params, *, donate=False) -> (new params, new state). The arguments are
    in the order of optax, whose `update` returns differences instead. New parameters keep dtype and layout. Updates are
    differentiable, so one can differentiate through training (through Adam if no gradient entry was zero all the time).
    The state counts updates in an array of one integer, so `spmd.jit` records an update once. A learning rate that is a
    function, as `cosine` and `linear` make, gets the number of updates before this one: 0 at the first.

    specs: (param_specs, params=None) -> specs of the state, for in_specs and out_specs; only `shard` and `groups` look
    at params. What a state holds for each parameter lies as the parameter does, the count is P(). param_specs: a spec
    for all, or a tree of P, `Layout`, None (passed as it is) or global arrays, whose layouts count. Raises SpecError
    for anything else, with the path of the leaf.

    donate: give up the state and params that are `PartitionedArray`s, as jax.jit(donate_argnums=...) does. On the host
    the results reuse their memory if nothing else refers to it, and a step needs no memory besides its gradients. Using
    donated arrays is a DonatedError. The results are the same. Bare arrays, arrays in a body, and arrays under
    differentiation are not donated.

    Raises ValueError if trees or shapes differ, for other dtypes, and for options out of range, SpecError without
    params; nothing is donated then.

        >>> optimizer, specs = spmd.optim.adam(0.5), {"w": P(None, "model"), "b": P()}
        >>> state_specs = optimizer.specs(specs)
        >>> step = spmd.map(optimizer.update, in_specs=(specs, state_specs, specs), out_specs=(specs, state_specs))
        >>> params = {"w": np.ones((1, 2)), "b": np.zeros(1)}
        >>> with spmd.Mesh(model=2):
        ...     params, state = step(params, optimizer.init(params), params)
        >>> params["w"]
        PartitionedArray([[0.5, 0.5]], dtype=float64, spec=P(None, 'model'))
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]
    specs: Callable[..., Any]


class SGDState(NamedTuple):
    """The state of `sgd`.

    steps: the number of updates, an array of one integer. velocity: the running sum of gradients, like the parameters
    (float32 for float16 and bfloat16); None without momentum.

        >>> spmd.optim.sgd(0.1, momentum=0.9).init({"w": np.ones(2)})
        SGDState(steps=array(0), velocity={'w': array([0., 0.])})
    """

    steps: Any
    velocity: Any


class AdamState(NamedTuple):
    """The state of `adam` and `adamw`.

    steps: the number of updates, an array of one integer. mean, square: running averages of the gradient and its
    square, like the parameters (float32 for float16 and bfloat16).

        >>> with spmd.Mesh(model=2):
        ...     spmd.optim.adam().init(spmd.ones(3, spec=P("model"))).mean
        PartitionedArray([0., 0., 0.], dtype=float64, spec=P('model'))
    """

    steps: Any
    mean: Any
    square: Any


SGDState.__module__ = AdamState.__module__ = "spmd.optim"  # where checkpoints and pickles look them up


@api_boundary
def sgd(learning_rate: Rate, momentum: float = 0.0, *, nesterov: bool = False) -> Optimizer:
    """Gradient descent with momentum:  v <- momentum v + g,  p <- p - learning_rate v.

    learning_rate: a number, or a function of the number of updates. nesterov: step along momentum v + g instead of v.
    The rate is not part of v, as in PyTorch and optax. Source: Sutskever, Martens, Dahl, Hinton, "On the importance of
    initialization and momentum in deep learning", ICML 2013.

        >>> optimizer = spmd.optim.sgd(0.5, momentum=0.5)
        >>> params, grad = np.array([1.0]), np.array([1.0])
        >>> params, state = optimizer.update(grad, optimizer.init(params), params)
        >>> params, state = optimizer.update(grad, state, params)
        >>> params, state.velocity
        (array([-0.25]), array([1.5]))
    """
    learning_rate = checked_rate("spmd.optim.sgd", learning_rate)
    momentum = checked_option("spmd.optim.sgd", "momentum", momentum, 0.9)

    def init(params):
        return SGDState(first_number(params, 0), tree.map(_zeros, params) if momentum else None)

    def formula(rate, p, g, v=None):
        direction = g = widened(g)
        if v is not None:
            v = cast_like(momentum * v + g, v)
            direction = momentum * v + g if nesterov else v
        return cast_like(widened(p) - rate * direction, p), v

    def update(grads, state, params=MISSING, *, donate=False):
        check_update("spmd.optim.sgd", state, params, SGDState)
        rate = rate_at(learning_rate, count_of(state.steps))
        moments = {"state.velocity": state.velocity} if momentum else {}
        numbers = _kernel_options(rate, momentum, nesterov)
        step = _Step("spmd.optim.sgd", _sgd, numbers, partial(formula, rate))
        params, velocity = step.on_each(2, donate, params, grads, moments)
        return params, SGDState(next_count(state.steps), velocity if momentum else state.velocity)

    def specs(param_specs, params=None):
        moments = moment_specs("spmd.optim.sgd", param_specs)
        return SGDState(P(), moments if momentum else None)

    return Optimizer(api_boundary(init), api_boundary(update), api_boundary(specs))


@api_boundary
def adam(learning_rate: Rate = 1e-3, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Optimizer:
    """Adam: steps of the mean gradient over the root of its mean square, both with bias correction.

        m <- b1 m + (1 - b1) g,    s <- b2 s + (1 - b2) g²,
        p <- p - learning_rate (m / (1 - b1^t)) / (sqrt(s / (1 - b2^t)) + eps),    t = 1, 2, ...

    learning_rate: a number, or a function of the number of updates. Source: Kingma, Ba, "Adam: A method for stochastic
    optimization", ICLR 2015, algorithm 1.

        >>> optimizer = spmd.optim.adam(0.5)
        >>> params = np.array([1.0, 2.0])
        >>> params, state = optimizer.update(np.array([4.0, 0.0]), optimizer.init(params), params)
        >>> params.round(6), state.steps
        (array([0.5, 2. ]), array(1))
    """
    return _adam("spmd.optim.adam", learning_rate, b1, b2, eps, 0.0)


@api_boundary
def adamw(
    learning_rate: Rate = 1e-3, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 1e-2
) -> Optimizer:
    """Adam with decoupled weight decay: a step also subtracts learning_rate weight_decay p from p.

    Source: Loshchilov, Hutter, "Decoupled weight decay regularization", ICLR 2019; the decay is multiplied by the rate,
    as in PyTorch and optax.

        >>> optimizer = spmd.optim.adamw(0.5, weight_decay=0.1)
        >>> params = np.array([1.0, 2.0])
        >>> optimizer.update(np.array([4.0, 0.0]), optimizer.init(params), params)[0].round(6)
        array([0.45, 1.9 ])
    """
    return _adam("spmd.optim.adamw", learning_rate, b1, b2, eps, weight_decay)


def _adam(where: str, learning_rate: Rate, b1: Any, b2: Any, eps: Any, weight_decay: Any) -> Optimizer:
    learning_rate = checked_rate(where, learning_rate)
    b1, b2 = checked_option(where, "b1", b1, 0.9, below=1), checked_option(where, "b2", b2, 0.999, below=1)
    eps = checked_option(where, "eps", eps, 1e-8)
    weight_decay = checked_option(where, "weight_decay", weight_decay, 1e-2)

    def init(params):
        return AdamState(first_number(params, 0), tree.map(_zeros, params), tree.map(_zeros, params))

    def formula(rate, t, p, g, m, s):
        g, wide = widened(g), widened(p)
        m = cast_like(b1 * m + (1 - b1) * g, m)
        s = cast_like(b2 * s + (1 - b2) * (g * g), s)
        direction = (m * (1 / (1 - b1**t))) / (np.sqrt(s * (1 / (1 - b2**t))) + eps)
        return cast_like(wide - rate * (direction + weight_decay * wide if weight_decay else direction), p), m, s

    def update(grads, state, params=MISSING, *, donate=False):
        check_update(where, state, params, AdamState)
        steps = count_of(state.steps)
        rate, t = rate_at(learning_rate, steps), steps + 1
        numbers = _kernel_options(rate, b1, b2, eps, weight_decay, t)
        step = _Step(where, _adamw, numbers, partial(formula, rate, t))
        given = {"state.mean": state.mean, "state.square": state.square}
        params, *moments = step.on_each(3, donate, params, grads, given)
        return params, AdamState(next_count(state.steps), *moments)

    def specs(param_specs, params=None):
        moments = moment_specs(where, param_specs)
        return AdamState(P(), moments, moments)

    return Optimizer(api_boundary(init), api_boundary(update), api_boundary(specs))


def check_optimizer(where: str, optimizer: Any, mend: str) -> None:
    """Raise unless what a wrapper is given is an optimiser."""
    if not all(callable(getattr(optimizer, name, None)) for name in Optimizer._fields):
        raise SpecError.at(
            where,
            argument="optimizer",
            got=describe(optimizer),
            need="an optimiser: functions init, update and specs",
            mend=mend,
        )


def moment_specs(where: str, param_specs: Any) -> Any:
    """The specs of what a state holds for each parameter."""
    paths, leaves, structure = tree.flatten_with_path(param_specs, none_is_leaf=True)
    return tree.unflatten(
        structure, [_spec_like(where, f"param_specs{p}", x) for p, x in zip(paths, leaves, strict=True)]
    )


def _spec_like(where: str, path: str, x: Any) -> Spec | None:
    if x is None or isinstance(x, Spec):
        return x
    value = value_of(x)
    if type(value) is PartitionedArray:
        layout = value.layout
        named = layout.spec is not None and layout.balanced and layout.copies == "invariant"
        return layout.spec if named else layout
    raise SpecError.at(
        f"{where}(...).specs",
        argument=path,
        got=describe(x),
        need="a spec, a Layout, None, or a global array, whose layout counts",
        mend='P() for copies on all workers, P(None, "model") for blocks',
    )


def give_up(arrays: Iterable[Any], results: Any = ()) -> None:
    """Mark global arrays as given away, but those that a tree of results has: frozen parameters are passed on."""
    kept = {id(x) for x in tree.leaves(results)}
    for a in arrays:
        if type(a) is PartitionedArray and id(a) not in kept:
            a.blocks = DONATED


def checked_array(argument: str, a: Any, p: Any = None) -> None:
    """Raise unless a is an array of real floating-point numbers with the shape of the parameter p."""
    if hasattr(type(a), "__array__") and not on_device(a):
        admit(a, "spmd.optim", argument, error=ValueError)
    dtype = getattr(a, "dtype", None)
    if dtype is None or name_of_dtype(dtype) not in _FLOATING or (p is not None and a.shape != p.shape):
        raise ValueError(
            message(
                "spmd.optim",
                argument=argument,
                got=describe(a) + ("" if p is None else f" for the parameter {describe(p)}"),
                need="an array of real floating-point numbers" + ("" if p is None else ", of the parameter's shape"),
                mend="np.asarray(x, float)" if p is None else "the gradient of a real loss by these parameters",
            )
        )


def first_number(params: Any, number: Any) -> Any:
    """A number of a first state: where parameters are global arrays, it is one too, so that all calls get one kind."""
    meshes = (p.mesh for p in map(value_of, tree.leaves(params)) if type(p) is PartitionedArray)
    mesh = next(meshes, None)
    # A count on a GPU would be waited for in every update.
    value = np.asarray(number)
    return value if mesh is None or mesh.places is not None else put(value, P(), mesh)


def _zeros(p):
    """The initial state of a parameter; in float32 for short dtypes, whose squares would underflow."""
    checked_array("params", p)
    return np.zeros_like(p, dtype=np.float32) if is_short(p) else np.zeros_like(p)


# Steps in one pass over memory


@primitive("sgd")
def _sgd(p, g, v=None, *, options, over=False):
    new, v = kernels.of(p).sgd(p, g, v, *options, over)
    return (new,) if v is None else (new, v)


@primitive("adamw")
def _adamw(p, g, m, s, *, options, over=False):
    return kernels.of(p).adamw(p, g, m, s, *options, over)


_FLOATING = ("float32", "float64", "float16", "bfloat16")


def _kernel_options(*options: Any) -> tuple[Any, ...] | None:
    """The options of a kernel; None if some are arrays, for which only the formulas work."""
    return options if all(isinstance(n, int | float | np.floating) for n in options) else None


class _Step(NamedTuple):
    """An update: a kernel with these numbers, and the formula where the kernel does not apply."""

    where: str
    kernel: Any
    numbers: tuple[Any, ...] | None
    formula: Callable[..., tuple]

    def on_each(self, count: int, donate: bool, params: Any, grads: Any, moments: dict[str, Any]) -> list[Any]:
        """Apply the step to every parameter: `count` trees of results. moments: trees of the state, by their names."""
        leaves, structure = tree.flatten(params)
        given = {"grads": grads, **moments}
        columns = [leaves_like(self.where, argument, t, structure) for argument, t in given.items()]
        rows = list(zip(leaves, *columns, strict=True))
        uses_kernel = [self._kernel_applies(arrays) for arrays in rows]
        # All checks come before the first array is overwritten.
        results: list[Any] = [
            None if fits else self._by_formula(arrays) for fits, arrays in zip(uses_kernel, rows, strict=True)
        ]
        donate = donate and not ACTIVE.get()
        reusable = _reusable_ids(rows) if donate else frozenset()
        for k, arrays in enumerate(rows):
            if uses_kernel[k]:
                results[k] = self._by_kernel(arrays, reusable)
        if donate:
            give_up([a for p, _, *state in rows for a in (p, *state)])
        return [tree.unflatten(structure, [result[k] for result in results]) for k in range(count)]

    def _by_formula(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        p, g, *_ = arrays
        checked_array("params", p)
        checked_array("grads", g, p)
        return self.formula(*arrays)

    def _kernel_applies(self, arrays: tuple[Any, ...]) -> bool:
        """Whether the kernel applies: arrays of one type and layout, in its dtypes, and not differentiated."""
        p = arrays[0]
        cls = type(p)
        if self.numbers is None or not (cls in _ARRAY_TYPES or kernels.on_device(p)) or not p.shape:
            return False
        expected_dtype = dtype = p.dtype
        if name_of_dtype(dtype) not in _FLOATING:
            return False
        for k, a in enumerate(arrays):
            if k == 2 and is_short(p):
                expected_dtype = _FLOAT32
            if type(a) is not cls or (a.dtype is not expected_dtype and a.dtype != expected_dtype):
                return False
        if cls is PartitionedArray:
            layout, mesh = p.layout, p.mesh
            for argument, a in zip(_ARGUMENTS, arrays, strict=False):
                if a.blocks is DONATED:
                    raise donated_error("spmd.optim", argument)
                if (a.layout is not layout and a.layout != layout) or (a.mesh is not mesh and a.mesh != mesh):
                    return False
            return True
        if cls is Array and any(a.tape is not None or a.state is not p.state for a in arrays):
            return False
        return all(a.shape == p.shape for a in arrays)

    def _by_kernel(self, arrays: tuple[Any, ...], reusable: Set[int]) -> tuple[Any, ...]:
        """The step by its kernel: the new parameter, and its state or None. reusable: ids of arrays to overwrite."""
        cls = type(arrays[0])
        if cls is PartitionedArray:
            overwrite = all(k == _GRADIENT or id(a) in reusable for k, a in enumerate(arrays))
            results = self._blockwise(arrays, overwrite)
        else:
            kernel = self.kernel if cls is Array else self.kernel.primitive.fun
            results = kernel(*arrays, options=self.numbers)
        return results if len(results) > 1 else (*results, None)

    def _blockwise(self, arrays: tuple[Any, ...], overwrite: bool) -> tuple[Any, ...]:
        """The step on each block of this process, once for all copies of it."""
        p = arrays[0]
        layout, mesh, fun, numbers = p.layout, p.mesh, self.kernel.primitive.fun, self.numbers
        tables = [a.blocks for a in arrays]
        if overwrite:  # blocks that may be overwritten are referenced by these lists only
            tables = [table if k == _GRADIENT else dict(table) for k, table in enumerate(tables)]
            for k, a in enumerate(arrays):
                if k != _GRADIENT:
                    a.blocks = DONATED
        results: list[dict[int, Any]] = [dict.fromkeys(mesh.local_workers) for _ in range(len(arrays) - 1)]
        for workers in mesh.sharers(layout):
            all_reclaimed = False
            if overwrite:
                blocks = [
                    table[workers[0]] if k == _GRADIENT else _pop_block(table, workers)
                    for k, table in enumerate(tables)
                ]
                all_reclaimed = all(k == _GRADIENT or reclaimed(blocks, k) for k in range(len(blocks)))
            else:
                blocks = [table[workers[0]] for table in tables]
            with device_of_worker(mesh, workers[0]):
                new_arrays = fun(*blocks, options=numbers, over=all_reclaimed)
            for new, table_of_results in zip(new_arrays, results, strict=True):
                read_only(new)
                for w in workers:
                    table_of_results[w] = new
        return tuple([PartitionedArray(blocks, layout, mesh) for blocks in results])


def _pop_block(table: dict[int, Any], workers: Sequence[int]) -> Any:
    block = None
    for w in workers:
        block = table.pop(w)
    return block


_ARGUMENTS = ("params", "grads", "state", "state")
_GRADIENT = 1
"""The index of the gradient among the arrays of a step. It is never overwritten."""
_ARRAY_TYPES = frozenset((PartitionedArray, Array, np.ndarray))
_FLOAT32 = np.dtype(np.float32)


def _reusable_ids(rows: Sequence[tuple[Any, ...]]) -> Set[int]:
    """The ids of the parameters and states to overwrite: global arrays that occur once."""
    counts: dict[int, int] = {}
    for arrays in rows:
        for a in arrays:
            counts[id(a)] = counts.get(id(a), 0) + 1
    return {id(a) for p, _, *state in rows for a in (p, *state) if type(a) is PartitionedArray and counts[id(a)] == 1}
