"""Checks of what pipelines of modules are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from spmd.autodiff import tree
from spmd.bridge.torch.pipelines.values import WHERE
from spmd.errors import SpecError, StateError, describe
from spmd.operators.root import Rooted
from spmd.training.pipelines.schedules import Schedule

__all__ = ["check_data", "check_shared", "check_tensors"]


def check_tensors(x: Any, target: Any) -> None:
    """Raise SpecError for a batch of anything else."""
    for argument, value in (("x", x), ("target", target)):
        for leaf in tree.leaves(value):
            if not isinstance(leaf.block if type(leaf) is Rooted else leaf, torch.Tensor):
                raise SpecError.at(
                    WHERE,
                    argument=argument,
                    got=describe(leaf),
                    need="tensors of one length in dimension 0, in tuples, lists and dicts",
                    mend="torch.as_tensor(x); keep what is no data in the stages and the loss",
                )


def check_data(value: Any, argument: str) -> None:
    """Raise StateError for a batch whose gradient is wanted and would be lost."""
    for leaf in tree.leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            also, other = "", ""
            if argument == "x":
                also, other = ", or of_input=True", "loss, gradient = step.backward(x, target, of_input=True); "
            raise StateError.at(
                WHERE,
                argument=argument,
                got=f"{describe(leaf)}, which is differentiated",
                need=f"data{also}: what a stage computes belongs to no graph of the body",
                mend=f"{other}{argument}.detach() if it is data",
            )


def check_shared(stages: Any, schedule: Schedule, tied: Sequence[Sequence[tuple[int, str]]]) -> None:
    """Raise SpecError for a parameter of stages on several workers that is not tied."""
    if isinstance(stages, nn.Module) and not isinstance(stages, nn.ModuleList):
        return
    holders: dict[nn.Parameter, dict[int, list[str]]] = {}
    for stage, module in enumerate(stages):
        if isinstance(module, nn.Module):
            for name, p in module.named_parameters(remove_duplicate=False):
                holders.setdefault(p, {}).setdefault(stage, []).append(name)
    for own in holders.values():
        if len({schedule.worker_of(stage) for stage in own}) == 1:
            continue
        if not any(all({(k, n) for n in names} & {*map(tuple, tie)} for k, names in own.items()) for tie in tied):
            places = [(k, names[0]) for k, names in own.items()]
            raise SpecError.at(
                WHERE,
                argument="tied",
                got=f"stages that share a parameter, {' and '.join(map(str, places))}, on several workers",
                need="parameters of one stage each, or named in `tied`: each worker would train its own",
                mend=f"tied=[{places}], or copy.deepcopy(module) for layers of their own",
            )
