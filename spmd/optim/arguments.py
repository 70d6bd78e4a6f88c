"""The arguments of an update: gradients, state and parameters, in this order, and their errors."""

from __future__ import annotations

from typing import Any

from spmd.autodiff import tree
from spmd.errors import SpecError, describe

__all__ = ["MISSING", "UPDATE_ORDER", "check_update", "leaves_like"]

MISSING: Any = object()
"""The parameters that an update was not given."""

UPDATE_ORDER = "params, state = optimizer.update(grads, state, params)"


def check_update(where: str, state: Any, params: Any, kind: type | None = None) -> None:
    """Raise unless an update has parameters, and a state of this class; None: of any."""
    if params is MISSING:
        raise SpecError.at(
            f"update of {where}",
            argument="params",
            got="nothing",
            need="the parameters: an update gives new ones, where that of optax gives differences",
            mend=UPDATE_ORDER,
        )
    if _is_state(params):
        raise SpecError.at(
            f"update of {where}",
            argument="params",
            got=f"a state, of class {type(params).__name__}",
            need="the parameters, behind the state",
            mend=f"{UPDATE_ORDER}, in this order",
        )
    if kind is not None and not isinstance(state, kind):
        raise SpecError.at(
            f"update of {where}",
            argument="state",
            got=_shortly(state),
            need=f"the state that init and the last update gave, a {kind.__name__}",
            mend=f"state = optimizer.init(params); {UPDATE_ORDER}, in this order",
        )


def leaves_like(where: str, argument: str, given: Any, structure: Any) -> list[Any]:
    """For each leaf of the parameters, of this structure, its counterpart in gradients or in a state."""
    try:
        return structure.flatten_up_to(given)
    except ValueError:
        wrapped = getattr(given, "params", None)
        if wrapped is not None and tree.structure(wrapped) == structure:
            got, mend = f"{_shortly(given)}, whose .params has the structure of params", f"{argument}.params"
        elif argument == "grads":
            got = _difference(argument, given, structure)
            mend = "spmd.grad(loss)(params, ...) of the same parameters; the order is update(grads, state, params)"
        else:
            got, mend = _difference(argument, given, structure), "state = optimizer.init(params), of these parameters"
    raise SpecError.at(
        f"update of {where}", argument=argument, got=got, need="a tree of the structure of params", mend=mend
    )


def _is_state(x: Any) -> bool:
    """Whether it is the state of an optimiser: their classes are part of `spmd.optim`."""
    return isinstance(x, tuple) and type(x).__module__ == "spmd.optim"


def _shortly(x: Any) -> str:
    return f"a {type(x).__name__}" if isinstance(x, tuple | list | dict) else describe(x)


def _difference(argument: str, given: Any, structure: Any) -> str:
    """The first place where a tree is not like the parameters."""
    paths, found = tree.shown_paths(structure), tree.shown_paths(tree.structure(given))
    missing = next((p for p in paths if not any(q.startswith(p) for q in found)), None)
    extra = next((q for q in found if not any(q.startswith(p) for p in paths)), None)
    if missing:
        return f"{_shortly(given)} without {argument}{missing}, where there is params{missing}"
    if extra:
        return f"{_shortly(given)} with {argument}{extra}, where there is no params{extra}"
    return f"{_shortly(given)}, of other containers than params"
