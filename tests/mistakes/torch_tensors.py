"""Mistakes with tensors of torch that stand for the whole: global tensors, plans, and sharded tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import spmd
from mistakes import Row
from spmd import P
from spmd.bridge import torch as spt
from spmd.errors import LayoutError, MeshError, MissingMethodError, SpecError, StateError

T = torch.arange(12.0).reshape(6, 2)
AXES = {"data": 2, "model": 2}


def body(use: Callable[[Any], Any], *, check: bool = True) -> Callable[[], Any]:
    """A call of a function in a body, with the rows of T as a global tensor."""
    return lambda: spt.map(lambda: use(spt.put(T.clone(), P("data"))), (), None, check=check)()


def used_by_one() -> None:
    """Its gradient would be that of one worker."""
    net = nn.Linear(2, 1)
    at_one = lambda x: spt.replicate(spt.remote(lambda x: net(x).sum(), at=1, axis_name="data")(x).result(), "data", 1)
    spt.map(at_one, P(), P())(T).backward()


def of_block(use: Callable[[Any], Any], *, check: bool = True) -> Callable[[], Any]:
    """A call of a function in a body, with this worker's rows of T."""
    return lambda: spt.map(use, P("data"), None, check=check)(T)


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))


def planned(plan: Any, use: Callable[[Any], Any] = lambda net: None, net: Any = pair, **options: Any) -> Callable:
    """A call of a function in a body with a module that a plan splits."""
    return lambda: spt.map(lambda: use(spt.parallelize(net(), plan, **options)), (), None)()


def sharded(use: Callable[[Any], Any]) -> Callable[[], Any]:
    """A call of a function outside of bodies, with the rows of T as a sharded tensor."""
    return lambda: use(spt.put(T.clone(), P("data")))


def _written_in_a_view(x: Any) -> Any:
    x[1].zero_()
    return x.sum()


def _read_from_a_stale_view(x: Any) -> Any:
    row = x[1]
    x.zero_()
    return row.sum()


def _normed(net: nn.Sequential) -> nn.Sequential:
    parametrizations.weight_norm(net[0])
    return net


def _summed_twice(x: Any) -> Any:
    split = spt.parallelize(pair(), COLUMN, in_specs=P("data"))
    return spt.data_parallel(split, "data")(x)


COLUMN = {"0": spt.column("model")}
PLAN = "spt.parallelize: argument plan"
GLOBAL = "a global tensor float32[6, 2], laid out by P('data', None)"
TRANSPOSED = "a global tensor float32[2, 6], laid out by P(None, 'data')"
WHOLE = "x.whole() the whole on every worker"
SHARDED = "a sharded tensor float32[6, 2], laid out by P('data', None)"
NO_SHARED_MEMORY = "They share no memory: entries of the view moved between workers"

ROWS = [
    Row("a function of a split dimension", body(lambda x: x.cumsum(0)), LayoutError,
        "torch's cumsum", GLOBAL, "dimension 0 whole on each worker", WHOLE),
    Row("a function that global tensors do not take", body(lambda x: x.nonzero()), LayoutError,
        "torch's nonzero", GLOBAL, "a function that works on the blocks", WHOLE),
    Row("a number of a global tensor", body(float), LayoutError,
        "torch's __float__", GLOBAL, "a function that works on the blocks", WHOLE),
    Row("a gradient without a cotangent", body(lambda x: x.requires_grad_().backward()), LayoutError,
        "torch's backward", GLOBAL, "a cotangent of shape [6, 2]", WHOLE),
    Row("a block of dimensions that are joined", body(lambda x: x.T.reshape(-1).block()), LayoutError,
        "x.block()", "joins dimensions of an array of shape [2, 6]", "parts of the joined dimension", "x.whole()"),
    Row("a write to a view that moved", body(_written_in_a_view), LayoutError,
        "torch's sum", NO_SHARED_MEMORY, "writes to tensors of which no such views are used", "x[0].clone()"),
    Row("a view that moved before a write", body(_read_from_a_stale_view, check=False), LayoutError,
        "torch's sum", NO_SHARED_MEMORY, "writes to tensors of which no such views are used", "x[0].clone()"),
    Row("a history that a Function would lose",
        body(lambda x: checkpoint(torch.tanh, x.requires_grad_(), use_reentrant=True).sum().backward()), LayoutError,
        "torch's sum", "the history of blocks does not go through it", "a Function of blocks", "use_reentrant=False"),
    Row("a block beside a global tensor", of_block(lambda x: spt.put(T, P("data")) + x), LayoutError,
        "torch's ", "Varying(data) tensor float32[3, 2]", "a whole, the same on all workers", "from_block(x, spec)"),
    Row("a block that is no part of the layout",
        of_block(lambda x: spt.GlobalTensor.from_block(x, spmd.Mesh(**AXES).layout((8, 2), P("data")))), LayoutError,
        "spt.GlobalTensor.from_block: argument block", "float32[3, 2]", "[4, 2], of [8, 2]", "a spec in place of"),
    Row("a block that is put as a whole", of_block(lambda x: spt.put(x, P("data"))), StateError,
        "spt.put: argument x", "Varying(data) tensor", "a whole, the same on all workers", "from_block(x, spec)"),
    Row("a target that fits the block", body(lambda x: functional.mse_loss(x, T[:3])), SpecError,
        "torch's mse_loss: argument target", "Tensor torch.float32[3, 2] beside a global tensor", "shape [6, 2]",
        "from_block(x, spec)"),
    Row("a write of what fits the block", body(lambda x: x.add_(T[:3])), SpecError,
        "a function of torch: argument an operand", "the whole has shape [6, 2]", "shape [6, 2]",
        "from_block(x, spec)"),
    Row("running statistics of a block", of_block(lambda x: spt.nn.BatchNorm1d(2)(x)), StateError,
        "spt.nn.BatchNorm1d: argument input", "Varying(data) tensor float32[3, 2] in training",
        "statistics of all workers' entries along 'data'", "spt.nn.BatchNorm1d(..., spec=P(...))"),
    Row("a number of each worker", of_block(lambda x: float(spt.block(x).sum())), StateError,
        "spt.map of <lambda>: result", "on worker 0", "an object that is equal on all workers", "torch.tensor([x])"),
    Row("a mesh in a body", body(lambda x: spt.put(T, P("data"), spmd.Mesh(**AXES))), MeshError,
        "spt.put: argument mesh", "a mesh, in a body", "that of the body", "leave it out"),
    Row("gradients of global tensors that are summed twice", of_block(_summed_twice, check=False), LayoutError,
        "torch's linear", "spt.data_parallel sums over 'data'", "one of the two", "without spt.data_parallel"),
    Row("replicas of parameters beside global tensors", of_block(_summed_twice), LayoutError,
        "torch's linear", "spt.data_parallel sums over 'data'", "one of the two", "without spt.data_parallel"),
    Row("a parameter that is written to",
        body(lambda x: spt.Parameter(T, P("model")).detach().clone().add_(x)), LayoutError,
        "torch's add_", "of which each worker has a block", "in place of a parameter", WHOLE),
    Row("a cat of columns on several layouts", body(lambda x: torch.cat([x.T.reshape(-1), T[0]])), LayoutError,
        "torch's cat", "laid out by", "each dimension is split by itself", WHOLE),
    Row("a function that vmap maps",
        planned(COLUMN, lambda net: torch.func.vmap(net)(T)), LayoutError,
        "torch's linear", "of which each worker has a block", "that no torch.func.vmap maps over", WHOLE),
    # Plans
    Row("a plan that is no dictionary", planned([spt.column("model")]), LayoutError,
        PLAN, "list", "a dictionary of patterns and styles", '{"*.up": spt.column("model")}'),
    Row("a pattern that matches nothing", planned({"up": spt.column("model")}), LayoutError,
        PLAN, "'up', which matches no module", "a pattern of names such as '0', '1', '2'", "print(module)"),
    Row("a pattern behind one that takes all", planned({"*": spt.whole(), **COLUMN}), LayoutError,
        PLAN, "'0', whose modules '*' takes before", "the first does", "'0' before '*'"),
    Row("a style that is none", planned({"0": spt.column}), LayoutError,
        PLAN, "<function column", "a style for a pattern", "'0': spt.column('model')"),
    Row("the name of a style", planned({"0": "spatial"}), LayoutError,
        PLAN, "'spatial' for '0'", "a style for a pattern", "'0': spt.spatial(P(None, None, 'model'))"),
    Row("a spec for a style", planned({"0": P(None, "data")}), LayoutError,
        PLAN, "P(None, 'data') for '0'", "a style for a pattern", "'0': spt.spatial(P(None, 'data'))"),
    Row("a style that is not called", planned({"0": spt.row}), LayoutError,
        PLAN, "<function row", "a style for a pattern", "'0': spt.row('model')"),
    Row("a style for another kind of module", planned({"1": spt.column("model")}), LayoutError,
        PLAN, "spt.column('model') for '1', ReLU", "one of nn.Linear", "'1': spt.whole()"),
    Row("a style of no axis", planned({"0": spt.column("modle")}), SpecError,
        "spt.Parameter: argument spec", "names axis 'modle'", "axes of the mesh: 'data', 'model'", "write 'model'"),
    Row("a style of inputs of no axis", planned({"0": spt.sequence("modle")}), MeshError,
        "spt.sequence('modle', 1)", "'modle'", "an axis of Mesh(data=2, model=2)", "'model'"),
    Row("an axis that is no name", lambda: spt.row(0), SpecError,
        "spt.row: argument axis_name", "int 0", "the name of an axis of the mesh", 'spt.row("model")'),
    Row("a spatial style without a spec", lambda: spt.spatial("model"), SpecError,
        "spt.spatial: argument spec", "'model'", "a spec of the inputs", 'spt.spatial(P(None, None, "rows"))'),
    Row("a dimension that no input has", planned({"0": spt.sequence("model", 2)}, lambda net: net(T)), LayoutError,
        "spt.sequence('model', 2)", "'0' with inputs of shapes [6, 2]", "an input of 3 dimensions", "another module"),
    Row("a sum that is scattered over features", planned({"0": spt.row("model", sequence=1)}, lambda net: net(T)),
        LayoutError, "spt.row: argument sequence", "1, for an input of shape [6, 2]", "other than the last",
        "sequence=1 for (sample, position, feature)"),
    Row("parts that do not divide", planned({"0": spt.column("model", parts=3)}), LayoutError,
        "spt.column: argument parts", "3 for '0', which makes 4 features", "a number that divides them", "parts=3"),
    Row("heads of no attention", planned({"0": spt.heads("model")}), LayoutError,
        "spt.heads", "'0', Linear", "the number of heads", "count=8"),
    Row("a weight that is computed", planned(COLUMN, net=lambda: _normed(pair())), LayoutError,
        PLAN, "'weight' of ParametrizedLinear", "a parameter", "spt.whole() for this module"),
    Row("a module that is parallelized twice", planned(COLUMN, lambda net: spt.parallelize(net, {})), LayoutError,
        "spt.parallelize: argument module", "parallelized already", "a module that is not", "{**first, **second}"),
    Row("a plan of no module", planned(COLUMN, net=lambda: T), LayoutError,
        "spt.parallelize: argument module", "Tensor", "an nn.Module", "spt.parallelize(net, plan)"),
    Row("a block for a plan", of_block(lambda x: spt.parallelize(pair(), COLUMN)(x)), StateError,
        "a parallelized module", "Varying(data) tensor float32[3, 2]", "a whole, the same on all", "in_specs=P(...)"),
    Row("more specs than arguments", planned(COLUMN, lambda net: net(T), in_specs=[P("data"), P()]), SpecError,
        "a parallelized module: argument in_specs", "2 for 1 arguments", "a spec for each argument", "for all"),
    Row("blocks loaded where a plan has wholes",
        planned(COLUMN, lambda net: spt.parallelize(pair(), {}).load_state_dict(net.state_dict())), LayoutError,
        "load_state_dict of a parallelized module: argument 0.weight", "each worker has a block", "the whole",
        "spt.state_dict(module)"),
    Row("a module on another mesh",
        planned(COLUMN, lambda net: spt.distribute_module(pair(), spmd.Mesh(x=2))), LayoutError,
        "spt.distribute_module: argument mesh", "Mesh(x=2)", "that of the body", "mesh=None"),
    # Sharded tensors
    Row("memory of a sharded tensor", sharded(lambda x: x.data_ptr()), LayoutError,
        "x.data_ptr", SHARDED, "a tensor in one piece of memory", "x.whole() for the whole"),
    Row("data of a sharded tensor", sharded(lambda x: setattr(x, "data", T)), LayoutError,
        "x.data = y", SHARDED, "another way to write to the blocks", "x.copy_(y)"),
    Row("a function of a sharded dimension", sharded(lambda x: x.cumsum(0)), LayoutError,
        "torch's cumsum", SHARDED, "tensors that lie alike", "spt.map for a function of blocks"),
    Row("random numbers like a sharded tensor", sharded(torch.rand_like), LayoutError,
        "torch's rand_like", SHARDED, "that do not depend on the mesh", "x.copy_(y) in place"),
    Row("sharded tensors on two meshes", sharded(lambda x: x + spt.put(T, P("x"), spmd.Mesh(x=2))), MeshError,
        "torch's add", "on Mesh(x=2)", "tensors on one mesh", "spt.put(x.whole(), spec, mesh)"),
    Row("a sharded tensor put on another mesh", sharded(lambda x: spt.put(x, P("x"), spmd.Mesh(x=2))), MeshError,
        "spt.put: argument mesh", "Mesh(x=2) for a sharded tensor", "the mesh that it is on", "x.whole()"),
    Row("a sharded tensor on another device", sharded(lambda x: x.to("meta")), LayoutError,
        "torch's ", "'meta' for a sharded tensor", "whose device is 'cpu'", "x.whole().to(device)"),
    Row("experts that are no modules", body(lambda x: spt.nn.Experts([torch.tanh], nn.Identity(), "data")), SpecError,
        "spt.nn.Experts: argument experts", "list [", "a list of modules", "make_expert() for"),
    *(
        Row(f"experts {name}", body(lambda x, make=make: spt.nn.Experts(make(), nn.Identity(), "data")),
            LayoutError, "spt.nn.Experts: argument experts", got, need, mend)
        for name, make, got, need, mend in (
            ("of two architectures", lambda: [nn.Linear(2, 2), nn.Linear(2, 2, bias=False)],
                "'bias'", "the same names, shapes and dtypes", "modules of this worker"),
            ("without parameters", lambda: [nn.ReLU(), nn.ReLU()],
                "parameters {}", "the same names, shapes and dtypes", "modules of this worker"),
            ("of two dtypes", lambda: [nn.Linear(2, 2), nn.Linear(2, 2).half()],
                "float16", "the same names, shapes and dtypes", "modules of this worker"),
            ("of which one is frozen", lambda: [nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)],
                "requires_grad=False", "all trained, or all frozen", "modules of this worker"),
            ("that are one module", lambda: [nn.Linear(2, 2)] * 2,
                "share a parameter", "parameters of their own", "copy.deepcopy(expert)"),
        )
    ),
    Row("experts with a tensor as gate", body(lambda x: spt.nn.Experts([nn.Linear(2, 2)], T, "data")), SpecError,
        "spt.nn.Experts: argument gate", "Tensor", "a module that gives scores", "nn.Linear(features, 1"),
    Row("experts with scores of others",
        of_block(lambda x: spt.nn.Experts([nn.Linear(2, 2)], nn.Identity(), "data")(x)), LayoutError,
        "spt.nn.Experts: argument gate", "a module that gives", "scores of 1 experts", "nn.Linear(features, 1"),
    Row("experts outside of bodies", lambda: spt.nn.Experts([nn.Linear(2, 2)], nn.Identity(), "data"), MeshError,
        "spt.nn.Experts", "outside of any body", "a worker", "spt.nn.Experts(...)"),
    *(
        Row(f"a Rooted tensor, {name}", of_block(lambda x, use=use: use(spt.sum_reduce(x.sum(), "data"))), error, head,
            "Rooted(0 along data)", "a value that this worker has", "spmd.replicate(x, 'data', 0)")
        for name, use, error, head in (
            ("backward", lambda r: r.backward(), MissingMethodError, "x.backward"),
            ("in torch.stack", lambda r: torch.stack([r]), StateError, "an operation on arrays"),
            ("in torch.sum", torch.sum, StateError, "an operation on arrays"),
        )
    ),
    Row("at_root with a plain tensor",
        of_block(lambda x: spt.at_root(torch.sum, torch.ones(2), axis_name="data")), StateError,
        "spmd.at_root: argument x", "Tensor", "Rooted(0) along 'data'", "spmd.keep(x, axis_name, root)"),
    Row("a parameter from outside that one worker uses", used_by_one, StateError,
        "argument f", "which some workers use alone", "leaves that all workers use", "backward in the body"),
    Row("experts with buffers", body(lambda x: spt.nn.Experts([nn.BatchNorm1d(2)], nn.Identity(), "data")), LayoutError,
        "spt.nn.Experts: argument experts", "the buffer 'running_mean'", "modules without buffers",
        "modules of this worker"),
]  # fmt: skip
