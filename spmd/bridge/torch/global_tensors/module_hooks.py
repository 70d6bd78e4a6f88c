"""Backward hooks of modules that take or give global tensors: they get gradients as global tensors.

torch's own take the tensors through an autograd function, which would lose the history of blocks. So this module gives
it the blocks: it replaces three methods of torch's `BackwardHook`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.hooks import BackwardHook

from spmd.bridge.torch.global_tensors.gradients import block_of_cotangent
from spmd.bridge.torch.global_tensors.tensor import GlobalTensor

__all__: list[str] = []

_init, _setup_input, _setup_output = (
    BackwardHook.__init__,
    BackwardHook.setup_input_hook,
    BackwardHook.setup_output_hook,
)


def _globals(values: Any, likes: Sequence[Any] | None) -> Any:
    """Blocks as global tensors that lie as these; other values as they are."""
    if likes is None:
        return values
    return tuple(
        GlobalTensor(x, like._layout, like._groups) if like is not None and x is not None else x
        for x, like in zip(values, likes, strict=True)
    )


def _blocks(changed: Any, likes: Sequence[Any] | None) -> Any:
    if changed is None or likes is None:
        return changed
    changed = changed if isinstance(changed, tuple | list) else (changed,)
    if len(changed) != len(likes):
        return changed  # torch raises
    made = (
        x if like is None or x is None else block_of_cotangent(like, x) for x, like in zip(changed, likes, strict=True)
    )
    return tuple(made)


def _run_hook(of: Any, hook: Callable[..., Any], module: Any, inputs: Any, outputs: Any) -> Any:
    return _blocks(hook(module, _globals(inputs, of.likes_in), _globals(outputs, of.likes_out)), of.likes_in)


def _run_pre_hook(of: Any, hook: Callable[..., Any], module: Any, outputs: Any) -> Any:
    return _blocks(hook(module, _globals(outputs, of.likes_out)), of.likes_out)


def _new(self: Any, module: Any, user_hooks: Any, user_pre_hooks: Any) -> None:
    self.likes_in = self.likes_out = None
    hooks, pre_hooks = (
        [partial(run, self, h) for h in given]
        for run, given in ((_run_hook, user_hooks), (_run_pre_hook, user_pre_hooks))
    )
    _init(self, module, hooks, pre_hooks)


def _likes(args: Any) -> list[Any] | None:
    likes = [x if type(x) is GlobalTensor else None for x in args]
    return likes if any(x is not None for x in likes) else None


def _inputs(self: Any, args: Any) -> Any:
    self.likes_in = _likes(args)
    return _through(partial(_setup_input, self), args, self.likes_in)


def _outputs(self: Any, args: Any) -> Any:
    several = isinstance(args, tuple)
    self.likes_out = _likes(args if several else (args,))
    y = _through(partial(_setup_output, self), args if several else (args,), self.likes_out)
    return y if several else y[0]


def _through(setup: Callable[..., Any], args: Any, likes: Any) -> Any:
    if likes is None:
        return setup(args)
    return _globals(setup(tuple(x if like is None else x._block for x, like in zip(args, likes, strict=True))), likes)


BackwardHook.__init__ = _new  # type: ignore[method-assign]
BackwardHook.setup_input_hook = _inputs  # type: ignore[method-assign]
BackwardHook.setup_output_hook = _outputs  # type: ignore[method-assign]
