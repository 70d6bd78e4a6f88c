"""One step of a module, observed: what this worker sends forward and backward, and what it keeps, by module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_iter, tree_map_only

from spmd.bridge.torch.global_tensors.tensor import GlobalTensor
from spmd.bridge.torch.tensor import backward_scope
from spmd.bridge.torch.tensor_state import local_data, no_overrides
from spmd.transport.algorithms.cost import Cost
from spmd.transport.call import LEDGERS, Observer, Origin, begin_observing

__all__ = ["Sending", "StepRecord", "measure_step", "own_bytes"]


class Sending(NamedTuple):
    """What sends: the operator over these axes, in this module, "forward" or "backward"."""

    module: str
    phase: str
    operator: str
    axes: tuple[str, ...]


class StepRecord(Observer):
    """What this worker does in a step. An observer, as `spmd.ledger` is.

    sent: by `Sending`, the calls, messages and bytes. kept: by module, the bytes that its forward keeps for backward.
    module, phase: what runs now.
    """

    def __init__(self) -> None:
        self.sent: dict[Sending, list[int]] = {}
        self.kept: dict[str, int] = {}
        self.module, self.phase = "", "forward"
        self._last = Sending("", "forward", "", ())

    def operator(self, worker: int, origin: Origin) -> None:
        """Count an application of an operator."""
        self._last = Sending(self.module, self.phase, origin.operator, tuple(origin.axes))
        self.sent.setdefault(self._last, [0, 0, 0])[0] += 1

    def verb(self, worker: int, verb: str, cost: Cost, declared: Cost, origin: Origin) -> None:
        """Count what the operator that was applied last sends."""
        counts = self.sent.setdefault(self._last, [0, 0, 0])
        counts[1] += cost.messages
        counts[2] += cost.nbytes


def own_bytes(x: torch.Tensor) -> int:
    """The bytes of this worker's block of a tensor."""
    block = local_data(x)
    return block.numel() * block.element_size()


def measure_step(module: nn.Module, args: Any, kwargs: Any) -> StepRecord:
    """Run a module forward, and backward from a cotangent of ones, and leave everything as it was.

    Parameters, their gradients and buffers stay. The gradients of arguments that require one are computed too.
    """
    record = StepRecord()
    args, kwargs = tree_map_only(torch.Tensor, _as_leaf, (args, kwargs))
    memory = _KeptMemory(record, [*module.parameters(), *module.buffers()])
    with ExitStack() as stack:
        stack.enter_context(_copied_buffers(module))
        stack.enter_context(_observed(record))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(memory.keep, lambda x: x))
        graph = stack.enter_context(_ModulesOfGraph(record, module))
        results = [b for x in tree_iter(module(*args, **kwargs)) if (b := _block(x)) is not None and b.requires_grad]
        graph.name_nodes(results)
        record.kept = memory.by_module()
        record.phase = "backward"
        if results:
            ones = [torch.ones_like(y) for y in results]
            stack.enter_context(_set_aside_gradients(module))
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))  # the observer is of this thread
            stack.enter_context(backward_scope())
            torch.autograd.backward(results, ones)
    return record


@contextmanager
def _observed(record: StepRecord) -> Iterator[None]:
    token = begin_observing(record)
    try:
        yield
    finally:
        LEDGERS.reset(token)


@contextmanager
def _copied_buffers(module: nn.Module) -> Iterator[None]:
    """Inside, the module has copies of its buffers."""
    copies: dict[int, Any] = {}
    own = [(m, name, b) for m in module.modules() for name, b in m._buffers.items() if b is not None]
    try:
        for m, name, b in own:
            m._buffers[name] = copies.setdefault(id(b), b.detach().clone())
        yield
    finally:
        for m, name, b in own:
            m._buffers[name] = b


@contextmanager
def _set_aside_gradients(module: nn.Module) -> Iterator[None]:
    """Inside, parameters have no gradients. Hooks of gradients see those of the step that is measured."""
    own = [(p, p.grad) for p in module.parameters()]
    try:
        for p, _ in own:
            p.grad = None
        yield
    finally:
        for p, g in own:
            p.grad = g


def _as_leaf(x: torch.Tensor) -> torch.Tensor:
    """The tensor without its history, which belongs to the caller."""
    if isinstance(x, GlobalTensor):
        return GlobalTensor(_as_leaf(x._block), x._layout, x._groups)
    leaf = x.detach()
    return leaf.requires_grad_() if x.requires_grad else leaf


def _block(x: Any) -> torch.Tensor | None:
    """The tensor that carries the history of a result or of an argument."""
    if not isinstance(x, torch.Tensor):
        return None
    return x._block if isinstance(x, GlobalTensor) else x


class _ModulesOfGraph:
    """Says to a record which module runs: forward by hooks of modules, backward by hooks of the nodes of the graph.

    A node belongs to the innermost module in whose forward it arises.
    """

    def __init__(self, record: StepRecord, module: nn.Module):
        self.record, self.module = record, module
        self.stack = [""]
        self.nodes: set[Any] = set()
        self.handles: list[Any] = []

    def __enter__(self) -> _ModulesOfGraph:
        for name, inner in self.module.named_modules():
            enter = partial(self._enter, name)
            self.handles.append(inner.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
            self.handles.append(inner.register_forward_hook(self._leave))
        return self

    def __exit__(self, *_: Any) -> None:
        for handle in self.handles:
            handle.remove()

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        if self.record.phase == "forward":  # backward may compute a forward again
            self.name_nodes((args, kwargs))
            self.stack.append(name)
            self.record.module = name

    def _leave(self, _: nn.Module, args: Any, y: Any) -> None:
        if self.record.phase == "forward":
            self.name_nodes(y)
            self.stack.pop()
            self.record.module = self.stack[-1]

    def name_nodes(self, values: Any) -> None:
        """The nodes behind these values that belong to no module yet are of the module that runs."""
        with no_overrides():
            todo = [b.grad_fn for x in tree_iter(values) if (b := _block(x)) is not None]
        while todo:
            node = todo.pop()
            if node is None or node in self.nodes:
                continue
            self.nodes.add(node)
            if node.next_functions:  # others only add to gradients
                self.handles.append(node.register_prehook(partial(self._run_node, self.record.module)))
                todo += [n for n, _ in node.next_functions]

    def _run_node(self, name: str, _: Any) -> None:
        self.record.module = name


class _KeptMemory:
    """Memory that forward keeps for backward, of tensors that are not of these."""

    def __init__(self, record: StepRecord, others: list[torch.Tensor]):
        self.record = record
        self.others = {self._place(local_data(x)) for x in others}
        self.regions: dict[int, tuple[str, int, dict[Any, int]]] = {}
        """By storage: the module that keeps it first, its bytes, and the bytes of each view that is kept."""

    @staticmethod
    def _place(x: torch.Tensor) -> int:
        return x.untyped_storage()._cdata

    def keep(self, x: torch.Tensor) -> torch.Tensor:
        """Count a tensor that a function saves; it is saved without its history, which would be a cycle."""
        if self.record.phase == "forward" and self._place(block := local_data(x)) not in self.others:
            size = block.untyped_storage().nbytes()
            _, _, views = self.regions.setdefault(self._place(block), (self.record.module, size, {}))
            views[block.storage_offset(), block.shape, block.stride()] = block.numel() * block.element_size()
        return x.detach()

    def by_module(self) -> dict[str, int]:
        """The bytes that are kept, by module. What several modules keep counts for the first."""
        kept: dict[str, int] = {}
        for name, size, views in self.regions.values():
            kept[name] = kept.get(name, 0) + min(size, sum(views.values()))
        return kept
