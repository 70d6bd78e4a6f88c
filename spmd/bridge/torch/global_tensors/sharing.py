"""Views of global tensors that are copies: what is written to one is missing in the other.

torch's views share memory. A view of a global tensor shares the memory of its blocks, unless entries moved between
workers. Then what the view has is a copy, and a use of one after a write to the other raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from spmd.bridge.torch.call_arguments import map_tensors, tensors_in
from spmd.bridge.torch.tensor_state import TensorWithState, no_overrides, plain, state_of_tensor
from spmd.errors import LayoutError

__all__ = ["CopiedView", "Memory", "check_current", "note_views", "note_write", "writes"]

_VIEWS = """
    permute transpose swapaxes swapdims t adjoint movedim moveaxis T mT H mH unsqueeze squeeze expand expand_as
    broadcast_to view view_as unflatten split chunk tensor_split unbind select narrow split_with_sizes hsplit vsplit
    unsafe_chunk unsafe_split __getitem__ detach data real imag conj view_as_real view_as_complex
"""
_VIEWS_OR_COPIES = "reshape flatten ravel reshape_as contiguous resolve_conj"
"""Whose results are views where strides of the whole allow it. Blocks have other strides: neither is relied on."""
_SAME_OR_COPIES = "to double float half bfloat16 type type_as cpu cuda"
"""Whose results are the tensor itself where nothing changes."""


class Memory:
    """The memory that some global tensors share. source: that of which it is a copy, although torch would share it."""

    __slots__ = ("seen", "source", "written", "written_in_copy")

    def __init__(self, source: Memory | None = None):
        self.source = source
        self.written = 0
        self.seen = 0 if source is None else source.written
        self.written_in_copy: Memory | None = None

    def chain(self) -> Iterator[Memory]:
        memory: Memory | None = self
        while memory is not None:
            yield memory
            memory = memory.source

    def is_current(self) -> bool:
        """Whether it has what torch's shared memory would have."""
        own = list(self.chain())
        for memory in own:
            if memory.source is not None and memory.source.written != memory.seen:
                return False
            if memory.written_in_copy is not None and all(memory.written_in_copy is not m for m in own):
                return False
        return True

    def note_write(self) -> None:
        own = list(self.chain())
        for memory in own[1:]:
            memory.written_in_copy = self
        self.written += 1


class CopiedView(TensorWithState):
    """A whole that is a copy, where torch would have a view of a global tensor. Functions act on the inner tensor."""

    _inner: torch.Tensor
    _memory: Memory

    @staticmethod
    def of(inner: torch.Tensor, memory: Memory) -> CopiedView:
        with no_overrides():
            x = inner.as_subclass(CopiedView)
        x._inner, x._memory, x._state = inner, memory, state_of_tensor(inner)
        return x

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return repr(self._inner)

    def __format__(self, spec: str) -> str:
        return format(self._inner, spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._inner.__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        views = [x for x in tensors_in(args, kwargs) if type(x) is CopiedView]
        name = _name(func)
        for x in views:
            check_current(name, x)
        target = args[0] if args and writes(name, kwargs) else kwargs.get("out")
        y = func(*map(_inner, args), **{k: _inner(v) for k, v in kwargs.items()})
        if type(target) is CopiedView:
            target._memory.note_write()
            return target
        elif target is not None:
            return y
        storages = {x._inner.untyped_storage()._cdata: x._memory for x in views}
        return map_tensors(lambda r: CopiedView.of(r, m) if (m := storages.get(_storage(r))) else r, y)


def _inner(a: Any) -> Any:
    return map_tensors(lambda x: x._inner if type(x) is CopiedView else x, a)


def _storage(x: Any) -> int | None:
    with no_overrides():
        x = getattr(x, "_block", x)
        return plain(x).untyped_storage()._cdata if x.layout is torch.strided else None


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    return name if name != "__get__" else getattr(func.__self__, "__name__", "")


def writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function writes to its first argument."""
    if kwargs.get("inplace"):
        return True
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__int__", "__index__"))
    return name.endswith("_") and name not in ("requires_grad_", "share_memory_")


def check_current(name: str, x: Any) -> None:
    """Raise if x is a copy of what was written to since, or was copied to what was written to since."""
    memory = x._memory
    if memory is None or memory.is_current():
        return
    raise LayoutError.at(
        f"torch's {name}",
        got="a global tensor and a view of it, of which one was written to. They share no memory: entries of the view "
        "moved between workers",
        need="writes to tensors of which no such views are used",
        mend="y = x[0].clone() before the write; or x = torch.cat([...]), torch.where(...) in place of the write",
    )


_KINDS = {name: k for k, names in enumerate((_VIEWS, _VIEWS_OR_COPIES, _SAME_OR_COPIES)) for name in names.split()}


def note_write(x: Any) -> None:
    """Note a write to a global tensor."""
    if x._memory is None:
        x._memory = Memory()
    x._memory.note_write()


def note_views(name: str, x: Any, y: Any) -> Any:
    """The results of a function of a global tensor, as views of it or copies of what they would share with it."""
    kind = _KINDS.get(name)
    if kind is None or y is x:
        return y
    if x._memory is None:
        x._memory = Memory()
    own = _storage(x)

    def noted(r: Any) -> Any:
        shared = _storage(r) == own
        if kind == 2 and not shared:
            return r
        memory = x._memory if shared and kind != 1 else Memory(x._memory)
        if hasattr(type(r), "__spmd_global__"):
            r._memory = memory
            return r
        return CopiedView.of(r, memory)

    return map_tensors(noted, y)
