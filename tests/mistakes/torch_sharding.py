"""Mistakes with modules of torch whose parameters lie split over workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import spmd
from mistakes import Row
from spmd import P
from spmd.bridge import torch as spt
from spmd.errors import DeadlockError, DifferentiationError, LayoutError, MeshError, StateError

X = torch.arange(12.0).reshape(6, 2)


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 3))


def sharded(use: Callable[[Any], Any] = lambda net: None, make: Callable[[], Any] = pair, **options: Any) -> Callable:
    """A call of a function in a body with a sharded module."""
    return lambda: spt.map(lambda: use(spt.shard_parameters(make(), "data", **options)), (), None)()


def _left_its_body() -> None:
    held = []

    def body(x: Any) -> None:
        held.append(spt.shard_parameters(pair(), "data"))

    spt.map(body, P("data"), None)(X)
    held[0](X)


def _columns() -> Any:
    return spt.parallelize(pair(), {"0": spt.column("data")})


def stepped(split: Callable[[Any], Any]) -> Callable:
    """A step of training whose optimiser was made before the module was split."""

    def body(x: Any) -> None:
        net = pair()
        optimizer = torch.optim.AdamW(net.parameters())
        model = split(net)
        model(x).sum().backward()
        optimizer.step()

    return lambda: spt.map(body, P(), None)(X)


def _unchecked(use: Callable[[Any, Any], Any]) -> Callable:
    """A call of a function with a sharded module and this worker's data, in a body without states."""
    return lambda: spt.map(lambda x: use(spt.shard_parameters(pair(), "data"), x), P("data"), None, check=False)(X)


def _replaced(net: Any, x: Any) -> None:
    net[1].weight = nn.Parameter(torch.ones(3, 4))
    net(x)


def _kept() -> None:
    def make() -> nn.Module:
        net = pair()
        net.weights = [net[0].weight]  # type: ignore[assignment]
        return net

    sharded(lambda net: (X @ net.weights[0].T).sum().backward(), make)()


def _share() -> None:
    first = nn.Linear(2, 4)
    other = nn.Linear(2, 4)
    other.weight = first.weight
    spt.shard_parameters(first, "data")
    spt.shard_parameters(other, "data")


class _Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3, device="meta"))


def _unsummed(use: Callable[[Any, Any], Any], after: Callable[[Any], Any] = lambda net: None) -> Callable:
    """A use of a sharded module and its optimiser after a backward under no_sync."""

    def body(net: Any) -> None:
        with net.no_sync():
            net(X).sum().backward()
        after(net)
        use(net, torch.optim.SGD(net.parameters(), lr=0.1))

    return sharded(body)


def _halve(net: Any) -> None:
    for p in net.parameters():
        p.grad.mul_(0.5)


def _unequal_parts(net: Any) -> None:
    for _ in range(1 + int(spt.worker_index("data"))):
        net(X).sum().backward()


UNSUMMED = "a .grad that holds this worker's own part, of a backward under no_sync"
SHARD = "spt.shard_parameters: argument"


def _own_gradients() -> None:
    net = nn.Linear(2, 2, bias=False)
    net.weight.grad = torch.full((2, 2), 1.0 + spt.worker_index("data"))
    spt.clip_grad_norm_(net, 1.0)


ROWS = [
    Row("units by a pattern that matches nothing", sharded(unit="layers.*"), StateError,
        f"{SHARD} unit", "'layers.*', which no part of Sequential is", "'0', '1'", "print(module)"),
    Row("units of a class that the module lacks", sharded(unit=nn.Conv2d), StateError,
        f"{SHARD} unit", "which no part of Sequential is", "submodules, such as", "unit=None"),
    Row("a module sharded twice", sharded(lambda net: spt.shard_parameters(net, "data")), StateError,
        f"{SHARD} module", "Sequential, which is sharded already", "sharded once", "in the body"),
    Row("a module of data_parallel", sharded(make=lambda: spt.data_parallel(pair(), "data")), StateError,
        f"{SHARD} module", "a module of spt.data_parallel", "the module alone", "model.module"),
    Row("a lazy module", sharded(make=lambda: nn.LazyLinear(3)), StateError,
        f"{SHARD} module", "whose weight has no shape yet", "parameters with a shape", "run a forward"),
    Row("parameters that a plan splits over the axis", sharded(make=_columns), LayoutError,
        f"{SHARD} module", "0.weight, which lies as Layout", "'data' do not split yet", "another axis of the mesh"),
    Row("data_parallel along the axis of experts", sharded(lambda net: spt.data_parallel(_columns(), "data")),
        LayoutError, "spt.data_parallel: argument module", "0.weight, which lies as Layout", "'data' do not split yet",
        "another axis of the mesh"),
    Row("a module on meta that cannot draw its values",
        sharded(make=lambda: nn.Sequential(pair(), _Scale())), StateError,
        f"{SHARD} module", "1.scale on the device meta, of _Scale, which has no reset_parameters",
        "a way to draw the values", "init=function"),
    Row("a step before the sum", _unsummed(lambda net, optimizer: optimizer.step()), StateError,
        "optimizer.step: argument 0.weight", UNSUMMED, "the sum over workers", "outside of no_sync"),
    Row("a norm before the sum", _unsummed(lambda net, optimizer: spt.clip_grad_norm_(net, 1.0)), StateError,
        "spt.grad_norm: argument 0.weight", UNSUMMED, "the sum over workers", "outside of no_sync"),
    Row("a norm of gradients that differ", lambda: spt.map(_own_gradients, (), None, mesh=spmd.Mesh(data=2))(),
        StateError, "spt.grad_norm: argument modules", "2 on one worker along 'data', 4 on another",
        "the same gradients on all workers", "varying='data'"),
    Row("gradients changed before the sum",
        _unsummed(lambda net, optimizer: net(X).sum().backward(), after=_halve), StateError,
        f"{SHARD} 0.weight", "a .grad that was changed after a backward under no_sync", "left unchanged until the sum",
        "after a backward outside of no_sync"),
    Row("backwards of unequally many parts", sharded(_unequal_parts), DeadlockError,
        "a collective", "shard_parameters(", "the same collectives in the same order",
        "make equally many forwards and backwards"),
    Row("a differentiated backward",
        sharded(lambda net: net(X).sum().backward(create_graph=True)), DifferentiationError,
        "a module of spt.shard_parameters", "create_graph=True", "a backward that is not differentiated",
        "spt.data_parallel"),
    Row("a part of a unit that is called alone, without states", _unchecked(lambda net, x: net[0](x)), LayoutError,
        "torch's linear", "outside of the forward of its unit, beside", "the whole parameter", "model(x)"),
    Row("the differentiated whole of a parameter, without states",
        _unchecked(lambda net, x: net[0].weight.whole()), LayoutError,
        "p.whole()", "outside of the forward of its unit, differentiated", "the whole parameter", "check=True"),
    Row("the sum of a parameter beside data, without states",
        _unchecked(lambda net, x: (net(x) * net[0].bias.sum()).sum().backward()), DifferentiationError,
        "backward through spt.shard_parameters: argument torch's sum", "differs between the workers along 'data'",
        "the sum over the workers", "spt.pvary(value, 'data')"),
    Row("a parameter that a list of the module still has", _kept, StateError,
        "backward: argument a parameter", "that was a parameter of the module before spt.shard_parameters split it",
        "that the module has now", "self.layer.weight in forward"),
    Row("a parameter that another sharded module has", lambda: spt.map(_share, (), None)(), StateError,
        f"{SHARD} module", "which another module had too", "all modules that share a parameter", "as its parts"),
    Row("a transformation of torch.func", sharded(lambda net: torch.func.grad(lambda x: net(x).sum())(X)),
        DifferentiationError, "a module of spt.shard_parameters", "within a transformation of torch.func",
        "autograd's own graph", "loss.backward()"),
    Row("a parameter that was replaced, without states", _unchecked(_replaced), StateError,
        "a module of spt.shard_parameters: argument 1.weight", "nobody gathers it", "with new values", "copy_(values)"),
    Row("a forward outside of bodies", _left_its_body, MeshError,
        "a module of spt.shard_parameters", "outside of any body", "spt.map(main", "spt.state_dict(model)"),
    Row("sharded outside of bodies", lambda: spt.shard_parameters(pair(), "data"), MeshError,
        "spt.shard_parameters", "", "a worker to be called on", "spmd.map"),
    Row("an optimiser made before its module was sharded",
        stepped(lambda net: spt.shard_parameters(net, "data")), StateError,
        "optimizer.step: argument params", "which the module had before spt.shard_parameters split it",
        "the module as it is now", "model = spt.shard_parameters(...) first, then AdamW(model.parameters())"),
    Row("an optimiser made before its module was parallelized",
        stepped(lambda net: spt.parallelize(net, {"0": spt.column("data")})), StateError,
        "optimizer.step: argument params", "which the module had before spt.parallelize split it",
        "the module as it is now", "model = spt.parallelize(...) first"),
    Row("an optimiser made before distribute_module",
        stepped(lambda net: spt.distribute_module(net)), StateError,
        "optimizer.step: argument params", "spt.distribute_module", "the module as it is now", "AdamW"),
]  # fmt: skip


def builtin_errors() -> list[tuple[Callable, type[Exception], str]]:
    """Calls that raise errors of Python's kinds, and words of their messages."""
    return [
        (sharded(prefetch=-1), ValueError, "prefetch"),
        (sharded(reduction="avg"), ValueError, "reduction"),
        (sharded(init="verified"), ValueError, 'init="verify"'),
        (sharded(param_dtype=torch.int32), ValueError, "param_dtype"),
        (sharded(unit=3), TypeError, "unit"),
        (sharded(make=lambda: X), TypeError, "an nn.Module"),
    ]
