"""Checks before a step of an optimiser, which would train wrongly or nothing, without a sign of it.

An optimiser made before its module was split holds parameters that the split module does not have. So may lists and
closures of the module itself, to which gradients would go. After a backward under `no_sync` gradients are not summed
over workers yet. LBFGS multiplies vectors of all parameters, of which the workers of a pipeline have some each.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spmd.bridge.torch.tensor_state import no_overrides
from spmd.bridge.torch.unsummed import check_summed
from spmd.errors import StateError, describe
from spmd.mesh import WORKER

__all__ = ["note_copied", "note_replaced", "note_staged", "watch_steps"]

_STAGED: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()
"""Pipelines on several workers, with their axes."""


def note_replaced(parameter: Any, where: str) -> None:
    """A parameter has been replaced in its module: no optimiser is to step it any more, and no gradient comes to it."""
    if "_spmd_replaced" in vars(parameter):
        raise StateError.at(
            where,
            argument="module",
            got=f"{describe(parameter)}, which another module had too, before {parameter._spmd_replaced} split that",
            need="all modules that share a parameter in one",
            mend="a module that has both as its parts, and its forward calls them; stages of a pipeline: "
            "copy.deepcopy(stage) of each, and spt.pipeline(..., tied=...)",
        )
    parameter._spmd_replaced = where
    shape = list(parameter.shape)  # the parameter itself would stay as long as its hook

    def refuse(_: Any) -> None:
        raise StateError.at(
            "backward",
            argument="a parameter",
            got=f"a gradient of a tensor of shape {shape} that was a parameter of the module before "
            f"{where} split it: a list, a closure or an attribute that is no parameter still refers to it",
            need="the parameter that the module has now",
            mend="use self.layer.weight in forward, and no reference to it that was made before",
        )

    with no_overrides():
        if parameter.requires_grad and parameter.is_leaf:
            parameter.register_hook(refuse)
    watch_steps()


def note_copied(module: nn.Module, where: str) -> None:
    """A split copy of a module has been made: an optimiser of the original has gradients only if that is trained."""
    for parameter in module.parameters():
        parameter._spmd_copied = where  # type: ignore[attr-defined]
    watch_steps()


def note_staged(pipeline: nn.Module, axes: tuple[str, ...]) -> None:
    """A module has the parameters of some stages: workers along the axes have others of the same model."""
    _STAGED[pipeline] = axes
    watch_steps()


@lru_cache(maxsize=1)
def watch_steps() -> None:
    """Check optimisers before their steps from now on."""
    register_optimizer_step_pre_hook(_check_parameters)


def _check_parameters(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise for a parameter that was replaced, where none has a gradient and one is of a module that was copied, and
    for a gradient that is not summed."""
    copied, idle = None, True
    if isinstance(optimizer, LBFGS) and WORKER.get() is not None:
        _check_not_staged(optimizer)
    for group in optimizer.param_groups:
        for p in group["params"]:
            own = vars(p)
            if own and "_spmd_replaced" in own:
                raise _stale(optimizer, p, own["_spmd_replaced"])
            if own and "_spmd_copied" in own:
                copied = p
            idle = idle and p.grad is None
    if idle and copied is not None:
        raise _stale(optimizer, copied, vars(copied)["_spmd_copied"])
    if all(closure is None for closure in (*args[1:], *kwargs.values())):  # a closure may have the sum
        check_summed((p for group in optimizer.param_groups for p in group["params"]), "optimizer.step")


def _check_not_staged(optimizer: Optimizer) -> None:
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for reference in _STAGED.keyrefs():  # of all workers
        pipeline = reference()
        if pipeline is None or given.isdisjoint(map(id, pipeline.parameters())):
            continue
        axes = _STAGED[pipeline]
        raise StateError.at(
            "optimizer.step",
            argument="params",
            got=f"parameters of this worker's stages of a pipeline along {', '.join(map(repr, axes))}, for "
            f"{type(optimizer).__name__}, which multiplies vectors of all parameters of a model",
            need="an optimiser whose step of a parameter needs that parameter alone",
            mend="torch.optim.AdamW(model.parameters()); or split the parameters by spt.parallelize or "
            "spt.shard_parameters in place of stages, which every optimiser sees as one",
        )


def _stale(optimizer: Optimizer, parameter: Any, where: str) -> StateError:
    return StateError.at(
        "optimizer.step",
        argument="params",
        got=f"{describe(parameter)}, which the module had before {where} split it: no gradient comes to it",
        need="parameters of the module as it is now",
        mend=f"model = {where}(...) first, then {type(optimizer).__name__}(model.parameters())",
    )
