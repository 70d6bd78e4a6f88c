"""Backward hooks of modules in bodies: cotangents lie as the global tensors they belong to, or have the state of these.

torch takes the arguments and results of a module through an autograd function, which would lose the history of blocks,
and gives hooks plain tensors. So this module replaces three methods of torch's `BackwardHook`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.hooks import BackwardHook

from spmd.bridge.torch.global_tensors.gradients import block_of_cotangent, global_cotangent
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor
from spmd.bridge.torch.tensor import Tensor, cotangent_with_state
from spmd.bridge.torch.tensor_state import without_state
from spmd.state import State

__all__: list[str] = []

_init, _setup_input, _setup_output = (
    BackwardHook.__init__,
    BackwardHook.setup_input_hook,
    BackwardHook.setup_output_hook,
)

_Owner = GlobalTensor | State | None
"""What a cotangent belongs to: a global tensor, a tensor in this state, or neither."""


def _owner(x: Any) -> _Owner:
    return x if type(x) is GlobalTensor else x.state if type(x) is Tensor else None


def _shown(g: Any, owner: _Owner) -> Any:
    """A cotangent as hooks get it."""
    if g is None or owner is None:
        return g
    return global_cotangent(owner, g) if isinstance(owner, GlobalTensor) else cotangent_with_state(g, owner)


def _taken(g: Any, owner: _Owner) -> Any:
    """A cotangent that a hook gave, as autograd takes it."""
    return without_state(block_of_cotangent(owner, g) if isinstance(owner, GlobalTensor) and g is not None else g)


def _each(convert: Callable[[Any, _Owner], Any], gs: Any, owners: tuple[_Owner, ...] | None) -> Any:
    if gs is None or owners is None:
        return gs
    gs = gs if isinstance(gs, tuple | list) else (gs,)
    return tuple(map(convert, gs, owners)) if len(gs) == len(owners) else gs  # of others torch raises


def _run_hook(of: Any, hook: Callable[..., Any], module: Any, inputs: Any, outputs: Any) -> Any:
    changed = hook(module, _each(_shown, inputs, of.owners_in), _each(_shown, outputs, of.owners_out))
    return _each(_taken, changed, of.owners_in)


def _run_pre_hook(of: Any, hook: Callable[..., Any], module: Any, outputs: Any) -> Any:
    return _each(_taken, hook(module, _each(_shown, outputs, of.owners_out)), of.owners_out)


def _new(self: Any, module: Any, user_hooks: Any, user_pre_hooks: Any) -> None:
    self.owners_in = self.owners_out = None
    hooks, pre_hooks = (
        [partial(run, self, h) for h in given]
        for run, given in ((_run_hook, user_hooks), (_run_pre_hook, user_pre_hooks))
    )
    _init(self, module, hooks, pre_hooks)


def _inputs(self: Any, args: Any) -> Any:
    self.owners_in = tuple(map(_owner, args))
    return _through(partial(_setup_input, self), args)


def _outputs(self: Any, args: Any) -> Any:
    several = isinstance(args, tuple)
    args = args if several else (args,)
    self.owners_out = tuple(map(_owner, args))
    y = _through(partial(_setup_output, self), args)
    return y if several else y[0]


def _through(setup: Callable[..., Any], args: Any) -> Any:
    """The arguments or results of a module after torch took them, or their blocks, through its function."""
    if not any(type(x) is GlobalTensor for x in args):
        return setup(args)
    ys = setup(tuple(x._block if type(x) is GlobalTensor else x for x in args))
    return tuple(
        GlobalTensor(y, x._layout, x._groups) if type(x) is GlobalTensor else y for x, y in zip(args, ys, strict=True)
    )


BackwardHook.__init__ = _new  # type: ignore[method-assign]
BackwardHook.setup_input_hook = _inputs  # type: ignore[method-assign]
BackwardHook.setup_output_hook = _outputs  # type: ignore[method-assign]
