"""Backward hooks of modules in bodies. The cotangent of a global tensor is a global tensor that lies alike; that of
another tensor has its state.

torch takes the arguments and results of a module through an autograd function, which would lose the history of blocks,
and gives hooks plain tensors. So this module replaces three methods of torch's `BackwardHook`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.hooks import BackwardHook

from spmd.bridge.torch.global_tensors.gradients import CotangentSpace
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor
from spmd.bridge.torch.tensor import Tensor, cotangent_with_state
from spmd.bridge.torch.tensor_state import without_state
from spmd.bridge.torch.worker_context import for_this_worker
from spmd.state import State

__all__: list[str] = []

_init, _setup_input, _setup_output = (
    BackwardHook.__init__,
    BackwardHook.setup_input_hook,
    BackwardHook.setup_output_hook,
)

_Space = CotangentSpace | State | None
"""Of a cotangent: that of a global tensor, the state of another tensor, or neither."""


def _space(x: Any) -> _Space:
    return CotangentSpace.of(x) if type(x) is GlobalTensor else x.state if type(x) is Tensor else None


def _shown(g: Any, space: _Space) -> Any:
    """A cotangent as hooks get it."""
    if g is None or space is None:
        return g
    return space.cotangent(g) if isinstance(space, CotangentSpace) else cotangent_with_state(g, space)


def _taken(g: Any, space: _Space) -> Any:
    """A cotangent that a hook gave, as autograd takes it."""
    return without_state(space.block(g) if isinstance(space, CotangentSpace) and g is not None else g)


def _each(convert: Callable[[Any, _Space], Any], gs: Any, spaces: tuple[_Space, ...] | None) -> Any:
    if gs is None or spaces is None:
        return gs
    gs = gs if isinstance(gs, tuple | list) else (gs,)
    return tuple(map(convert, gs, spaces)) if len(gs) == len(spaces) else gs  # of others torch raises


def _run_hook(of: Any, hook: Callable[..., Any], module: Any, inputs: Any, outputs: Any) -> Any:
    changed = hook(module, _each(_shown, inputs, of.spaces_in), _each(_shown, outputs, of.spaces_out))
    return _each(_taken, changed, of.spaces_in)


def _run_pre_hook(of: Any, hook: Callable[..., Any], module: Any, outputs: Any) -> Any:
    return _each(_taken, hook(module, _each(_shown, outputs, of.spaces_out)), of.spaces_out)


def _new(self: Any, module: Any, user_hooks: Any, user_pre_hooks: Any) -> None:
    self.spaces_in = self.spaces_out = None
    hooks, pre_hooks = (
        [partial(run, self, for_this_worker(h)) for h in given]
        for run, given in ((_run_hook, user_hooks), (_run_pre_hook, user_pre_hooks))
    )
    _init(self, module, hooks, pre_hooks)


def _inputs(self: Any, args: Any) -> Any:
    self.spaces_in = tuple(map(_space, args))
    return _through(partial(_setup_input, self), args)


def _outputs(self: Any, args: Any) -> Any:
    several = isinstance(args, tuple)
    args = args if several else (args,)
    self.spaces_out = tuple(map(_space, args))
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
