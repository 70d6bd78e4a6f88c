"""Other optimisers for some parameters, by patterns of their paths; parameters that do not change."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from spmd.autodiff import tree
from spmd.errors import SpecError, describe
from spmd.layout import Spec
from spmd.optim.optimizers import MISSING, Optimizer, check_given
from spmd.spec_trees import spread
from spmd.tracebacks import api_boundary

__all__ = ["frozen", "groups"]

_WHERE = "spmd.optim.groups"


@api_boundary
def groups(optimizers: Mapping[str, Optimizer]) -> Optimizer:
    """An optimiser that steps each parameter with the first optimiser whose pattern fits the path of the parameter.

    optimizers: by pattern, in order. A path joins keys, fields and indices by dots, `layers.0.bias`; in a pattern *
    stands for any characters, dots too, ? for one, [ab] for one of these. The state is a tuple of the optimisers'
    states, in their order.

    specs: (param_specs, params) -> specs of the state; params are needed if param_specs is a tree that does not reach
    down to each parameter. Cost: none but that of the optimisers. Raises SpecError for a parameter that no pattern
    fits. Source: the parameter groups of `torch.optim`.

        >>> optimizer = spmd.optim.groups({"*bias": spmd.optim.frozen(), "*": spmd.optim.sgd(0.5)})
        >>> params = {"bias": np.array([1.0]), "weight": np.array([1.0])}
        >>> optimizer.update(params, optimizer.init(params), params)[0]
        {'bias': array([1.]), 'weight': array([0.5])}
    """
    if not isinstance(optimizers, Mapping) or not all(
        isinstance(k, str) and isinstance(x, Optimizer) for k, x in optimizers.items()
    ):
        raise SpecError.at(
            _WHERE,
            argument="optimizers",
            got=describe(optimizers),
            need="a dictionary of optimisers by pattern",
            mend='groups({"*.bias": spmd.optim.sgd(1e-3), "*": spmd.optim.adam(1e-3)})',
        )
    optimizers = dict(optimizers)

    def init(params):
        parts = _parts(optimizers, params)
        return tuple(optimizer.init(parts[pattern]) for pattern, optimizer in optimizers.items())

    def update(grads, state, params=MISSING, *, donate=False):
        check_given(params)
        leaves, structure = tree.flatten(params)
        parts = _parts(optimizers, params)
        gradients = _parts(optimizers, tree.unflatten(structure, structure.flatten_up_to(grads)))
        new, states = list(leaves), []
        for (pattern, optimizer), own in zip(optimizers.items(), state, strict=True):
            stepped, own = optimizer.update(gradients[pattern], own, parts[pattern], donate=donate)
            states.append(own)
            chosen = [k for k, name in enumerate(_patterns(optimizers, structure)) if name == pattern]
            for k, p in zip(chosen, tree.leaves(stepped), strict=True):
                new[k] = p
        return tree.unflatten(structure, new), tuple(states)

    def specs(param_specs, params=None):
        return _specs(optimizers, param_specs, params)

    return Optimizer(api_boundary(init), api_boundary(update), api_boundary(specs))


def _specs(optimizers: Mapping[str, Optimizer], param_specs: Any, params: Any) -> tuple[Any, ...]:
    """The specs of the states."""
    if params is None:
        if param_specs is None or isinstance(param_specs, Spec):
            return tuple(optimizer.specs(param_specs) for optimizer in optimizers.values())
        parts = _parts(optimizers, param_specs)
        return tuple(optimizer.specs(parts[pattern]) for pattern, optimizer in optimizers.items())
    leaves = spread(_WHERE, "params", "param_specs", param_specs, params)
    each = tree.unflatten(tree.structure(params), [x.spec for x in leaves if x.value is not None])
    parts, arrays = _parts(optimizers, each), _parts(optimizers, params)
    return tuple(optimizer.specs(parts[pattern], arrays[pattern]) for pattern, optimizer in optimizers.items())


def _patterns(optimizers: Mapping[str, Optimizer], structure: Any) -> list[str]:
    """For each leaf of a structure the pattern that it goes by."""
    found = []
    for path in tree.dotted_paths(structure):
        pattern = next((p for p in optimizers if fnmatchcase(path, p)), None)
        if pattern is None:
            raise SpecError.at(
                _WHERE,
                argument="params",
                got=f"{path!r}, which fits none of {', '.join(map(repr, optimizers)) or 'no patterns'}",
                need="a pattern for each parameter",
                mend='one more at the end, "*": spmd.optim.adam(1e-3), or spmd.optim.frozen()',
            )
        found.append(pattern)
    return found


def _parts(optimizers: Mapping[str, Optimizer], params: Any) -> dict[str, Any]:
    """By pattern the tree of its leaves, None in place of the others."""
    leaves, structure = tree.flatten(params)
    patterns = _patterns(optimizers, structure)
    return {
        name: tree.unflatten(structure, [x if p == name else None for x, p in zip(leaves, patterns, strict=True)])
        for name in optimizers
    }


@api_boundary
def frozen() -> Optimizer:
    """An optimiser that leaves parameters as they are, for `groups`. Its state is empty. Cost: none.

    Gradients are not looked at: a group that is frozen outside of `shard` communicates nothing.

        >>> spmd.optim.frozen().update(np.ones(2), (), np.zeros(2))
        (array([0., 0.]), ())
    """

    def update(grads, state, params=MISSING, *, donate=False):
        check_given(params)
        return params, state

    return Optimizer(lambda params: (), api_boundary(update), lambda param_specs, params=None: ())
