"""Modules of torch as they are, split by a plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any

import torch
from torch import nn

from spmd.bridge.torch.global_tensors.tensor import GlobalTensor
from spmd.bridge.torch.layouts import LayoutLike
from spmd.bridge.torch.left_alone import left_alone
from spmd.bridge.torch.plans.styles import Style, keep_ties, laid_out
from spmd.bridge.torch.stale_optimizers import note_copied
from spmd.bridge.torch.tensor_state import is_partitioned, state_of_tensor
from spmd.errors import LayoutError, SpecError, StateError, describe
from spmd.layout import P
from spmd.mesh import Mesh, here
from spmd.tracebacks import api_boundary

__all__ = ["distribute_module", "matches", "parallelize"]


@api_boundary
def parallelize(
    module: nn.Module,
    plan: Mapping[str, Style],
    *,
    in_specs: LayoutLike | Sequence[LayoutLike | None] | None = None,
    out_specs: LayoutLike | None = None,
) -> Any:
    """A copy of a module whose parameters and activations are split by a plan. The module is not rewritten.

        plan = {"*.attn": spt.heads("model"), "*.up": spt.column("model"), "*.down": spt.row("model")}
        net = spt.parallelize(net, plan)
        loss = net(x, labels)  # that of one worker

    module: torch's or yours, the same on all workers. plan: for patterns of names of modules, as of `fnmatch`, a style:
    `column`, `row`, `heads`, `vocab`, `sequence`, `spatial`, `whole`. A pattern without a dot is of the last part of a
    name; of several patterns for one module the first counts. All else stays as it is on every worker.
    in_specs: how the arguments of a call lie, of which each worker then passes its block: a spec for all of them, or
    one for each, None for wholes. None: arguments are wholes, the same on all workers, or global tensors. out_specs:
    the result as this worker's block in that layout. None: a global tensor, or a whole where nothing is split.

    In the module tensors stand for the whole (`spt.GlobalTensor`): shapes, residuals, masks, `view` and losses are as
    on one worker, and so are results and gradients. Parameters lie by the plan: optimisers, `spt.state_dict` and
    `spmd.save` know it. Construct it in a body, on every worker.
    `torch.compile` leaves it as it is, in a graph break; with fullgraph=True it raises.
    Raises LayoutError for patterns that match nothing, for styles that do not fit, and in a call for functions that
    cannot be applied to what is split, naming the module and styles that would do.

        >>> import copy
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))
        >>> def body(x):
        ...     split = spt.parallelize(copy.deepcopy(net), {"0": spt.column("model"), "2": spt.row("model")})
        ...     return split(x)
        >>> x = torch.randn(4, 3)
        >>> with spmd.Mesh(model=2):
        ...     y = spt.map(body, P(), P())(x)
        >>> torch.allclose(y, net(x), atol=1e-6)
        True
    """
    where = "spt.parallelize"
    here(where)
    _check(where, module, plan)
    net = copy.deepcopy(module)
    note_copied(module, where)
    for name, inner in list(net.named_modules()):
        style = next((s for pattern, s in plan.items() if matches(pattern, name)), None)
        if style is not None:
            style(inner, name)
    keep_ties(net)
    _Call(in_specs, out_specs).attach(net)
    return net


def _check(where: str, module: Any, plan: Any) -> None:
    if not isinstance(module, nn.Module):
        raise LayoutError.at(
            where, argument="module", got=describe(module), need="an nn.Module", mend="spt.parallelize(net, plan)"
        )
    if isinstance(module, _Parallelized):
        raise LayoutError.at(
            where,
            argument="module",
            got=f"{type(module).__name__}, which is parallelized already",
            need="a module that is not",
            mend="one plan of all styles: {**first, **second}",
        )
    if not isinstance(plan, Mapping):
        need, mend = "a dictionary of patterns and styles", '{"*.up": spt.column("model")}'
        raise LayoutError.at(where, argument="plan", got=describe(plan), need=need, mend=mend)
    names = [name for name, _ in module.named_modules()]
    taken: dict[str, str] = {}
    for pattern, style in plan.items():
        if not isinstance(style, Style) or not isinstance(pattern, str):
            raise LayoutError.at(
                where,
                argument="plan",
                got=f"{style!r} for {pattern!r}",
                need="a style for a pattern: spt.column, row, heads, vocab, sequence, spatial or whole",
                mend=f"{str(pattern)!r}: {_style_for(style)}",
            )
        found = [name for name in names if matches(pattern, name)]
        if not found:
            raise LayoutError.at(
                where,
                argument="plan",
                got=f"{pattern!r}, which matches no module",
                need=f"a pattern of names such as {', '.join(map(repr, [n for n in names if n][:6]))}",
                mend="leave it out; print(module) shows the names",
            )
        if all(name in taken for name in found):
            raise LayoutError.at(
                where,
                argument="plan",
                got=f"{pattern!r}, whose modules {taken[found[0]]!r} takes before",
                need="patterns of which each counts for some module: of several for one, the first does",
                mend=f"{pattern!r} before {taken[found[0]]!r}",
            )
        taken |= dict.fromkeys((name for name in found if name not in taken), pattern)


def _style_for(given: Any) -> str:
    """The style that was meant by what was given in place of one, on an axis of the mesh."""
    axes = list(here("spt.parallelize").mesh.axes)
    axis = "model" if "model" in axes or not axes else axes[-1]
    if isinstance(given, P):
        return f"spt.spatial({given})"
    name = given if isinstance(given, str) else getattr(given, "__name__", "")
    if name == "spatial":
        return f"spt.spatial(P(None, None, {axis!r}))"
    if name == "whole":
        return "spt.whole()"
    return f"spt.{name if name in ('column', 'row', 'heads', 'vocab', 'sequence') else 'column'}({axis!r})"


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of a plan is for the module of this name."""
    if fnmatchcase(name, pattern) or (pattern.startswith("*.") and fnmatchcase(name, pattern[2:])):
        return True
    return "." not in pattern and fnmatchcase(name.rpartition(".")[2], pattern)


class _Call:
    """What a call of the whole module does before and after: layouts of arguments and results, names in errors."""

    def __init__(self, in_specs: Any, out_specs: Any):
        self.in_specs, self.out_specs = in_specs, out_specs

    def attach(self, net: nn.Module) -> None:
        vars(net)["_spmd_call"] = self
        kind = type(net)
        net.__class__ = type(kind.__name__, (_Parallelized, kind), {"__module__": kind.__module__})

    def arguments(self, args: Any) -> Any:
        specs: Any = self.in_specs
        if specs is None:
            for x in args:
                self._check_whole(x)
            return args
        several = isinstance(specs, list | tuple)
        chosen: list[Any] = (
            list(specs) if several else [specs if isinstance(x, torch.Tensor) and x.ndim else None for x in args]
        )
        if len(chosen) != len(args):
            raise SpecError.at(
                "a parallelized module",
                argument="in_specs",
                got=f"{len(chosen)} for {len(args)} arguments",
                need="a spec for each argument, None for wholes",
                mend="one spec stands for all",
            )
        made: list[Any] = []
        for x, spec in zip(args, chosen, strict=True):
            made.append(x if spec is None or isinstance(x, GlobalTensor) else GlobalTensor.from_block(x, spec))
        return tuple(made)

    def _check_whole(self, x: Any) -> None:
        if isinstance(x, torch.Tensor) and not isinstance(x, GlobalTensor) and state_of_tensor(x).varying:
            raise StateError.at(
                "a parallelized module",
                got=describe(x),
                need="a whole, the same on all workers, or a global tensor",
                mend="spt.parallelize(net, plan, in_specs=P(...)), or spt.GlobalTensor.from_block(x, P(...))",
            )

    def result(self, y: Any) -> Any:
        if self.out_specs is None:
            return y
        if isinstance(y, tuple | list):
            return type(y)(map(self.result, y))
        if isinstance(y, torch.Tensor) and y.ndim:
            spec: Any = self.out_specs
            y = laid_out(y, dict(enumerate(spec.dims)), spec) if isinstance(spec, P) else y
        return y.block() if isinstance(y, GlobalTensor) else y


@left_alone("spt.parallelize: a split module runs outside of graphs; compile it without fullgraph=True")
def _outside_of_graphs(function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """function(*args, **kwargs), which the compiler leaves alone: global tensors are no tensors of its graphs."""
    return function(*args, **kwargs)


class _Parallelized:
    """The class of a module that `parallelize` returns, before its own."""

    _spmd_call: _Call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _outside_of_graphs(self._run, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        args = self._spmd_call.arguments(args)
        for x in kwargs.values():
            self._spmd_call._check_whole(x)
        try:
            y = super().__call__(*args, **kwargs)  # type: ignore[misc]
        except LayoutError as error:
            _name_module(error, self)
            raise
        return self._spmd_call.result(y)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        own = super().state_dict()  # type: ignore[misc]
        for name, value in state_dict.items():
            if is_partitioned(value) and not is_partitioned(own.get(name)):
                raise LayoutError.at(
                    "load_state_dict of a parallelized module",
                    argument=name,
                    got=describe(value),
                    need="the whole, for a parameter that every worker has",
                    mend="spt.state_dict(module), which gives wholes, in place of module.state_dict()",
                )
        return super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]


def _name_module(error: LayoutError, net: Any) -> None:
    """Say in a note in which module a function was refused, and which styles would do."""
    if getattr(error, "__notes__", None):
        return
    names = {id(m): name for name, m in net.named_modules()}
    found, trace = None, error.__traceback__
    while isinstance(trace, TracebackType):
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    if found is not None:
        inner = type(dict(net.named_modules())[found]).__name__
        error.add_note(
            f"in {found!r} ({inner}) of a parallelized module. In the plan, {found!r}: spt.whole() runs it on wholes; "
            "spt.spatial(P(...)) and spt.sequence(...) lay out its inputs otherwise"
        )


@api_boundary
def distribute_module(
    module: nn.Module,
    mesh: Mesh | None = None,
    partition_fn: Callable[[str, nn.Module, Mesh], None] | None = None,
    input_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
    output_fn: Callable[[nn.Module, Any, Mesh], Any] | None = None,
) -> Any:
    """A copy of a module, split by functions, as `torch.distributed.tensor.distribute_module` splits it.

    partition_fn(name, submodule, mesh) is called for every module of it, and replaces parameters by `spt.Parameter`s;
    those that it leaves are whole on every worker. input_fn(module, inputs, mesh) gives the arguments of a call from
    those that it gets, and output_fn(module, outputs, mesh) the result. mesh: that of the body.
    In a body, on every worker. Raises LayoutError for another mesh.

        >>> def split(name, module, mesh):
        ...     if isinstance(module, torch.nn.Linear):
        ...         module.weight = spt.Parameter(module.weight, P("model"))
        ...         module.bias = spt.Parameter(module.bias, P("model"))
        >>> def body(x):
        ...     return spt.distribute_module(torch.nn.Linear(2, 5), None, split)(x).shape
        >>> with spmd.Mesh(model=2):
        ...     spt.map(body, P(), None)(torch.ones(3, 2))
        torch.Size([3, 5])
    """
    where = "spt.distribute_module"
    own = here(where).mesh
    _check(where, module, {})
    if mesh is not None and mesh.axes != own.axes:
        raise LayoutError.at(where, argument="mesh", got=str(mesh), need=f"{own}, that of the body", mend="mesh=None")
    net = copy.deepcopy(module)
    note_copied(module, where)
    if partition_fn is not None:
        for name, inner in list(net.named_modules()):
            partition_fn(name, inner, own)
    if input_fn is not None:
        net.register_forward_pre_hook(lambda m, args: _as_tuple(input_fn(m, args, own)))
    if output_fn is not None:
        net.register_forward_hook(lambda m, _, y: output_fn(m, y, own))
    _Call(None, None).attach(net)
    return net


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)
