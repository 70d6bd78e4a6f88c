"""Other optimisers for some parameters, by patterns of their paths; parameters that do not change."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from spmd.autodiff import tree
from spmd.errors import SpecError, describe
from spmd.layout import Spec
from spmd.optim.arguments import MISSING, UPDATE_ORDER, check_update, leaves_like
from spmd.optim.optimizers import Optimizer
from spmd.spec_trees import spread
from spmd.tracebacks import api_boundary

__all__ = ["frozen", "groups"]

_WHERE = "spmd.optim.groups"
_REST = "*"
"""The pattern of all parameters, which may be left over."""


@api_boundary
def groups(optimizers: Mapping[str, Optimizer]) -> Optimizer:
    """An optimiser that steps each parameter with the first optimiser whose pattern fits the path of the parameter.

    optimizers: by pattern, in order. A path joins keys, fields and indices by dots, `layers.0.bias`; in a pattern *
    stands for any characters, dots too, ? for one, [ab] for one of these. The state is a tuple of the optimisers'
    states, in their order.

    specs: (param_specs, params) -> specs of the state; params are needed if param_specs is a tree that does not reach
    down to each parameter. Cost: none but that of the optimisers. Raises SpecError for a parameter that no pattern
    fits, and in init for a pattern that no parameter goes by; "*" may be left over. Source: the
    parameter groups of `torch.optim`.

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
        _check_patterns(optimizers, tree.structure(params))
        parts = _parts(optimizers, params)
        return tuple(optimizer.init(parts[pattern]) for pattern, optimizer in optimizers.items())

    def update(grads, state, params=MISSING, *, donate=False):
        check_update(_WHERE, state, params)
        _check_state(optimizers, state)
        leaves, structure = tree.flatten(params)
        parts = _parts(optimizers, params)
        gradients = _parts(optimizers, tree.unflatten(structure, leaves_like(_WHERE, "grads", grads, structure)))
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


def _check_patterns(optimizers: Mapping[str, Optimizer], structure: Any) -> None:
    """Raise if a pattern counts for no parameter: it is misspelt, or stands behind a wider one."""
    taken = dict(zip(tree.dotted_paths(structure), _patterns(optimizers, structure), strict=True))
    for pattern in optimizers:
        if pattern == _REST or pattern in taken.values():
            continue
        before = next((p for path, p in taken.items() if fnmatchcase(path, pattern)), None)
        if before is None:
            raise SpecError.at(
                _WHERE,
                argument="optimizers",
                got=f"{pattern!r}, which fits no parameter",
                need=f"a pattern of paths such as {', '.join(map(repr, [*taken][:6])) or 'those of some parameters'}",
                mend=f"leave it out, or write it as these paths are; {_REST!r} fits all",
            )
        raise SpecError.at(
            _WHERE,
            argument="optimizers",
            got=f"{pattern!r}, whose parameters {before!r} takes before",
            need="patterns of which each counts for some parameter: of several for one, the first does",
            mend=f"{pattern!r} before {before!r}",
        )


def _check_state(optimizers: Mapping[str, Optimizer], state: Any) -> None:
    if not isinstance(state, tuple) or len(state) != len(optimizers):
        raise SpecError.at(
            f"update of {_WHERE}",
            argument="state",
            got=f"a tuple of {len(state)}" if isinstance(state, tuple) else f"a {type(state).__name__}",
            need=f"the state that init and the last update gave, a tuple of {len(optimizers)}, one for each pattern",
            mend=f"state = optimizer.init(params); {UPDATE_ORDER}, in this order",
        )


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
        check_update("spmd.optim.frozen", state, params, tuple)
        return params, state

    return Optimizer(lambda params: (), api_boundary(update), lambda param_specs, params=None: ())
