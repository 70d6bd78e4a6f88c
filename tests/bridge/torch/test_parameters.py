"""Parameters of which each worker holds a block: what torch makes of them is what it makes of the whole, or raises."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError, MutationError, StateError  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")

F64 = torch.float64
REFUSALS = (LayoutError, StateError, MutationError)
MESH = spmd.Mesh(x=2, y=2)
SPLITS = {
    "rows": P("x"),
    "columns": P(None, "y"),
    "both": P("x", "y"),
    "rows over two axes": P(("x", "y")),
    "replicated": P(),
    "grid": spt.Grid((2, 1), workers=(3, 0)),
    "grid of four": spt.Grid((2, 2), workers=(2, 0, 1, 3)),
}
SHAPES = [(5, 3), (2, 7), (1, 4), (3, 2, 2, 2), (0, 3)]


def whole_of(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.tensor(np.random.default_rng((seed, *shape)).normal(size=shape))


def inplace(f: Callable) -> Callable:
    """What f leaves of a copy."""

    def g(p: torch.Tensor) -> Any:
        q = p.detach().clone()
        f(q)
        return q

    return g


def without_grad(f: Callable) -> Callable:
    def g(p: torch.Tensor) -> Any:
        with torch.no_grad():
            return f(p)

    return g


def initialised(f: Callable) -> Callable:
    def g(p: torch.Tensor) -> Any:
        q = p.detach().clone()
        f(q, generator=torch.Generator().manual_seed(3))
        return q

    return g


def drawn(f: Callable) -> Callable:
    def g(p: torch.Tensor) -> Any:
        with spt.drawing(3):
            return f(p)

    return g


# What has to be right, not refused, for any layout by a spec.
NEEDED: dict[str, Callable[[Any], Any]] = {
    "square": torch.square,
    "sum": lambda p: p.sum(),
    "mean": lambda p: p.mean(),
    "norm": lambda p: p.norm(),
    "norm 1": lambda p: p.norm(1),
    "norm 3": lambda p: torch.linalg.vector_norm(p, 3),
    "norm inf": lambda p: torch.linalg.vector_norm(p, float("inf")) if p.numel() else p.sum(),
    "norm -inf": lambda p: torch.linalg.vector_norm(p, -float("inf")) if p.numel() else p.sum(),
    "norm 0": lambda p: torch.linalg.vector_norm(p, 0),
    "norm dim": lambda p: torch.linalg.vector_norm(p.flatten(1), 2, 1),
    "norm dim 0": lambda p: torch.linalg.vector_norm(p, 2, 0, keepdim=True),
    "frobenius": lambda p: torch.linalg.matrix_norm(p.flatten(1)),
    "sum 0": lambda p: p.sum(0),
    "sum 1": lambda p: p.sum(1),
    "sum -1 keep": lambda p: p.sum(-1, keepdim=True),
    "mean 0": lambda p: p.mean(0),
    "mean 1 keep": lambda p: p.mean(1, keepdim=True),
    "row minus mean": lambda p: p - p.mean(0, keepdim=True),
    "column over norm": lambda p: p / (1 + p.square().sum(1, keepdim=True)),
    "max": lambda p: p.max() if p.numel() else p.sum(),
    "min": lambda p: p.min() if p.numel() else p.sum(),
    "amax 0": lambda p: p.amax(0) if p.numel() else p.sum(),
    "amin 1": lambda p: p.amin(1),
    "amax all": lambda p: p.amax() if p.numel() else p.sum(),
    "prod": lambda p: p.detach().prod(),
    "prod 0": lambda p: p.detach().prod(0),
    "any": lambda p: (p > 2).any(),
    "all": lambda p: (p > -2).all(),
    "all 0": lambda p: (p > 0).all(0),
    "count": lambda p: torch.count_nonzero(p > 0),
    "var": lambda p: p.var(),
    "std": lambda p: p.std(),
    "var 0": lambda p: p.var(0, correction=0),
    "isfinite": lambda p: torch.isfinite(p).all(),
    "equal": lambda p: torch.tensor(torch.equal(p, p.clone())),
    "allclose": lambda p: torch.tensor(torch.allclose(p, p + 1e-12)),
    "add number": lambda p: 2 + p * 3 - 1 / (p + 9),
    "add whole": lambda p: p + whole_of(tuple(p.shape), 1),
    "whole times it": lambda p: whole_of(tuple(p.shape), 1) * p,
    "add row": lambda p: p + whole_of(tuple(p.shape[1:]), 2),
    "add zero-dim": lambda p: p * torch.tensor(0.5, dtype=F64),
    "where": lambda p: torch.where(p > 0, p, 0.1 * p),
    "clamp": lambda p: p.clamp(-0.5, 0.5),
    "lerp": lambda p: p.lerp(p * 2, 0.3),
    "addcmul": lambda p: torch.addcmul(p, p, p, value=0.1),
    "lerp_": inplace(lambda p: p.lerp_(whole_of(tuple(p.shape), 1), 0.25)),
    "add_ whole": inplace(lambda p: p.add_(whole_of(tuple(p.shape), 1), alpha=-0.5)),
    "copy_ whole": inplace(lambda p: p.copy_(whole_of(tuple(p.shape), 1))),
    "zero_": inplace(lambda p: p.zero_()),
    "fill_": inplace(lambda p: p.fill_(2.5)),
    "masked_fill_": inplace(lambda p: p.masked_fill_(p > 0, 1.0)),
    "index_put_": inplace(lambda p: p.__setitem__(p > 0, 0.5)),
    "data": inplace(lambda p: p.data.mul_(3)),
    "view -1 sum": lambda p: p.view(-1).square().sum(),
    "flatten": lambda p: p.flatten(1) * 2,
    "reshape back": lambda p: (p.reshape(-1) * 2).view(p.shape),
    "vector": lambda p: nn.utils.parameters_to_vector([p, p * 2]),
    "float": lambda p: p.float().square().sum(),
    "half sum": lambda p: p.to(torch.float16).sum(),
    "zeros_like": torch.zeros_like,
    "dot": lambda p: (p * p).sum(),
    "foreach": lambda p: torch._foreach_mul([p, p + 1], 2.0)[1],
    "foreach norm": lambda p: torch.stack(torch._foreach_norm([p, p * 2])),
    "foreach norm inf": lambda p: torch.stack(torch._foreach_norm([p, p], float("inf"))) if p.numel() else p.sum(),
    "foreach_": inplace(lambda p: torch._foreach_addcdiv_([p], [p.clone()], [p.square() + 1], -0.1)),
    "foreach lerp_": inplace(lambda p: torch._foreach_lerp_([p], [whole_of(tuple(p.shape), 1)], 0.25)),
    "normal_": initialised(nn.init.normal_),
    "xavier": initialised(nn.init.xavier_uniform_),
    "kaiming": initialised(nn.init.kaiming_normal_),
    "trunc": initialised(nn.init.trunc_normal_),
    "total norm": lambda p: nn.utils.get_total_norm([p, p * 2]),
}
# What may be refused.
OTHERS: dict[str, Callable[[Any], Any]] = {
    "gradient of prod": lambda p: p.prod(),
    "gradient of prod 0": lambda p: p.prod(0),
    "item": lambda p: torch.tensor(p.sum().item()),
    "own item": lambda p: torch.tensor(p.item()),
    "gram": without_grad(lambda p: p.flatten(1) @ p.flatten(1).T),
    "gram with gradient": lambda p: p.flatten(1).T @ p.flatten(1),
    "mm whole": without_grad(lambda p: p.flatten(1) @ torch.ones(p.flatten(1).shape[1], 2, dtype=F64)),
    "linear": lambda p: nn.functional.linear(torch.ones(2, p.shape[-1], dtype=F64), p),
    "einsum": lambda p: torch.einsum("i...,i...->", p, p),
    "svdvals": without_grad(lambda p: torch.linalg.svdvals(p.flatten(1))),
    "matrix norm 2": without_grad(lambda p: torch.linalg.matrix_norm(p.flatten(1), 2)),
    "nuclear": without_grad(lambda p: torch.linalg.matrix_norm(p.flatten(1), "nuc")),
    "qr": without_grad(lambda p: torch.linalg.qr(p.flatten(1))[1].abs()),
    "orthogonal": initialised(nn.init.orthogonal_),
    "eye": inplace(nn.init.eye_),
    "dirac": inplace(nn.init.dirac_),
    "sparse": initialised(lambda p, generator: nn.init.sparse_(p, 0.2, generator=generator)),
    "transpose": lambda p: p.transpose(0, 1) * 2,
    "permute sum": lambda p: p.movedim(0, -1).sum(0),
    "T plus": lambda p: p.transpose(0, 1) + whole_of(tuple(p.transpose(0, 1).shape), 3),
    "unsqueeze": lambda p: p.unsqueeze(0).sum(1),
    "unsqueeze expand": lambda p: p.unsqueeze(0).expand(3, *p.shape) * 2,
    "squeeze": lambda p: p.unsqueeze(1).squeeze(1),
    "first row": lambda p: p[0],
    "first column": lambda p: p[:, 0],
    "slice rows": lambda p: p[1:],
    "slice columns": lambda p: p[:, :2] * 2,
    "write a row": inplace(lambda p: p[0].zero_()),
    "write a column": inplace(lambda p: p[:, 0].fill_(3)),
    "setitem": inplace(lambda p: p.__setitem__(0, 1.0)),
    "setitem whole": inplace(lambda p: p.__setitem__(slice(None), whole_of(tuple(p.shape), 1))),
    "mask": lambda p: p[p > 0],
    "index": lambda p: p[torch.tensor([0, 1])],
    "gather": lambda p: torch.gather(p, 0, torch.zeros_like(p, dtype=torch.int64)),
    # Of an empty table, those who look up raise, and the others wait: an error of the map, which this test would catch.
    "embedding": lambda p: nn.functional.embedding(torch.tensor([0, 0]), p) if len(p) else p.sum(),
    "softmax 0": lambda p: p.softmax(0),
    "softmax 1": lambda p: p.softmax(1),
    "cumsum": lambda p: p.cumsum(0),
    "cumsum 1": lambda p: p.cumsum(1),
    "cumsum flat": lambda p: p.view(-1).cumsum(0),
    "argmax": lambda p: p.argmax(),
    "argmax 1": lambda p: p.argmax(1),
    "max 0": lambda p: p.max(0),
    "max 1": lambda p: p.max(1),
    "median": lambda p: p.median(),
    "sort": lambda p: p.sort()[0],
    "topk": lambda p: p.topk(1, 0)[0],
    "unique": lambda p: p.unique(),
    "histc": lambda p: torch.histc(p),
    "logsumexp": lambda p: p.logsumexp(0),
    "renorm": lambda p: p.renorm(2, 0, 1.0),
    "cat": lambda p: torch.cat([p, p]),
    "stack": lambda p: torch.stack([p, p]),
    "flip": lambda p: p.flip(0),
    "flip 1": lambda p: p.flip(1),
    "roll": lambda p: p.roll(1, 0),
    "repeat": lambda p: p.repeat(2, *[1] * (p.ndim - 1)),
    "unbind": lambda p: p.unbind(0)[0],
    "unbind 1": lambda p: p.unbind(1)[1],
    "iterate": lambda p: [q * 2 for q in p],
    "chunk": lambda p: p.chunk(2)[0],
    "chunk 1": lambda p: p.chunk(2, 1)[0],
    "split out": lambda p: p.split(1, 1)[0].sum(),
    "cov": lambda p: torch.cov(p.flatten(1)),
    "cdist": lambda p: torch.cdist(p.flatten(1), p.flatten(1)),
    "pad": lambda p: nn.functional.pad(p, (1, 1)),
    "layer norm": lambda p: nn.functional.layer_norm(p, p.shape[-1:]),
    "layer norm all": lambda p: nn.functional.layer_norm(p, p.shape),
    "normalize": lambda p: nn.functional.normalize(p, dim=0),
    "normalize 1": lambda p: nn.functional.normalize(p, dim=1),
    "mse": lambda p: nn.functional.mse_loss(p, whole_of(tuple(p.shape), 1)),
    "l1": lambda p: nn.functional.l1_loss(p, whole_of(tuple(p.shape), 1)),
    "smooth": lambda p: nn.functional.smooth_l1_loss(p, torch.zeros_like(p)),
    "cosine": lambda p: nn.functional.cosine_similarity(p, p * 2, dim=0),
    "triu": lambda p: p.triu(),
    "trace": lambda p: p.trace(),
    "diagonal": lambda p: p.diagonal(),
    "tolist": lambda p: torch.tensor(p.tolist()),
    "numpy": lambda p: torch.tensor(p.detach().numpy()),
    "asarray": lambda p: torch.tensor(np.asarray(p.detach())),
    "as_tensor": lambda p: torch.as_tensor(p) * 1,
    "tensor": lambda p: torch.tensor([p.sum(), p.max()]),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "out copy_": lambda p: torch.zeros(p.shape, dtype=F64).copy_(p.detach()),
    "plain add_": lambda p: torch.zeros(p.shape, dtype=F64).add_(p.detach()),
    "plain +=": lambda p: torch.zeros(p.shape, dtype=F64).__iadd__(p.detach()),
    "plain setitem": lambda p: torch.zeros(p.shape, dtype=F64).__setitem__(slice(None), p.detach()),
    "plain foreach": lambda p: torch._foreach_add_([torch.zeros(p.shape, dtype=F64)], [p.detach()]),
    "out=": lambda p: torch.mul(p.detach(), 2, out=torch.zeros(p.shape, dtype=F64)),
    "data setter": lambda p: setattr(torch.zeros(p.shape, dtype=F64), "data", p.detach()),
    "dropout": drawn(lambda p: nn.functional.dropout(p, 0.5)),
    "bernoulli": drawn(lambda p: torch.bernoulli(p.detach().sigmoid())),
    "rand_like": drawn(torch.rand_like),
    "multinomial": lambda p: torch.multinomial(p.detach().abs() + 1, 1),
    "as_strided": lambda p: p.as_strided((2,), (1,)),
    "data_ptr": lambda p: torch.tensor(float(p.data_ptr() == 0)),
    "complex": lambda p: torch.view_as_real(torch.complex(p, p)).sum(),
    "product of complex": lambda p: (torch.complex(p, 2 * p) * torch.complex(3 * p, p).conj()).sum().imag,
    "abs of complex": lambda p: torch.complex(p, 2 * p).abs().sum(),
    "norm of complex": lambda p: torch.complex(p, 2 * p).norm(),
    "view dtype": lambda p: p.detach().view(torch.int64).sum(),
    "nonzero": lambda p: p.nonzero(),
    "quantile": lambda p: p.quantile(0.5),
    "logdet": lambda p: torch.logdet(p.flatten(1) @ p.flatten(1).T + torch.eye(p.shape[0])),
    "kron": lambda p: torch.kron(p, p),
    # torch's own dies of an empty one.
    "weight norm": lambda p: (
        torch._weight_norm(p, torch.ones(p.shape[0], *[1] * (p.ndim - 1), dtype=F64), 0) if p.numel() else p.sum()
    ),
    "except dim": lambda p: torch.norm_except_dim(p, 2, 0),
    "to sparse": lambda p: p.detach().to_sparse().to_dense(),
    "len": lambda p: torch.tensor(len(p)),
    "conv": lambda p: nn.functional.conv2d(torch.ones(1, p.shape[1], 4, 4, dtype=F64), p),
}
OPERATIONS = {**NEEDED, **OTHERS}


def parts(result: Any) -> list[Any]:
    """The tensors of a result as wholes."""
    if isinstance(result, torch.Tensor):
        return [result.whole() if isinstance(result, spt.PartitionedTensor) else result]
    return [t for r in result for t in parts(r)] if isinstance(result, tuple | list) else []


def outcome(f: Callable, p: torch.Tensor, differentiate: bool) -> Any:
    """The tensors that f gives, with the gradient of the sum of their squares; or the error that it raises."""
    try:
        found = parts(f(p))
        if differentiate and any(r.requires_grad for r in found):
            loss = sum(r.double().square().sum() for r in found if r.requires_grad)
            if isinstance(loss, torch.Tensor):
                found += parts(torch.autograd.grad(loss, p))
    except Exception as error:
        return error
    return [r.detach().whole() if isinstance(r, spt.GlobalTensor) else r.detach() for r in found]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("split", SPLITS)
def test_every_operation_is_that_of_the_whole_or_raises(split, shape):
    spec = SPLITS[split]
    whole = whole_of(shape)
    expected = {k: outcome(f, whole.clone().requires_grad_(), True) for k, f in OPERATIONS.items()}
    found: dict[int, dict[str, Any]] = {}

    def main():
        results = found[spmd.mesh.here("a test").index] = {}
        for name, f in OPERATIONS.items():
            p = spt.Parameter(whole, spec)
            results[name] = outcome(f, p, True)

    spt.map(main, (), None, mesh=MESH)()
    wrong = []
    for worker, results in found.items():
        for name, got in results.items():
            want = expected[name]
            if isinstance(want, Exception):
                fits = isinstance(got, Exception)
            elif isinstance(got, Exception):
                explained = isinstance(got, REFUSALS) and "block()" in str(got) or name in TORCHS
                fits = explained and (name not in NEEDED or isinstance(spec, spt.Grid))
            else:
                fits = len(got) == len(want) and all(same(a, b, name) for a, b in zip(got, want, strict=True))
            if not fits:
                wrong.append(f"worker {worker}, {name}: {str(got)[:300]}, where the whole gives {str(want)[:300]}")
    assert not wrong, "\n".join(wrong)


TORCHS = {"to sparse", "as_strided"}
"""What torch itself refuses."""


def same(a: torch.Tensor, b: torch.Tensor, name: str) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    rough = "float" in name or "half" in name
    return torch.allclose(a, b, rtol=1e-3 if rough else 1e-10, atol=1e-3 if rough else 1e-10, equal_nan=True)


# What modules, transformations and files do with them


LINEAR = nn.Linear(3, 5, dtype=F64)
X = whole_of((4, 3), 9)
ENCODER = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dtype=F64).eval()


def column() -> spt.nn.Linear:
    return spt.nn.Linear.from_torch(LINEAR, w_spec=P("x"), out_spec=P())


def on_workers(f: Callable[[], Any], check: bool = True) -> list[Any]:
    """What f gives on each of two workers."""
    found: dict[int, Any] = {}

    def main() -> None:
        result = f()
        found[spmd.worker_index("x")] = spt.block(result) if isinstance(result, torch.Tensor) else result

    spt.map(main, (), None, mesh=spmd.Mesh(x=2), check=check)()
    return [found[0], found[1]]


def zero(x: torch.Tensor) -> None:
    torch.testing.assert_close(spt.block(x), torch.zeros_like(spt.block(x)), rtol=0, atol=1e-12)


def penalty_gradient() -> None:
    m = column()
    given = {k: v.detach() for k, v in m.named_parameters()}

    def loss(ps: dict) -> torch.Tensor:
        return torch.func.functional_call(m, ps, (X,)).square().sum() + sum(p.square().sum() for p in ps.values())

    grads = torch.func.grad(loss)(given)
    serial = nn.Linear(3, 5, dtype=F64)
    serial.load_state_dict(LINEAR.state_dict())
    (serial(X).square().sum() + sum(p.square().sum() for p in serial.parameters())).backward()
    for name, g in grads.items():
        zero(g.whole() - getattr(serial, name).grad)


def converted() -> None:
    m = column()
    m(X).square().sum().backward()
    m.float()
    assert isinstance(m.weight, spt.Parameter)
    assert m.weight.dtype is m.weight.grad.dtype is m.weight.block().dtype is torch.float32
    m.double()
    assert (m.weight.whole() - LINEAR.weight).abs().max() < 1e-6


def copied() -> None:
    m = column()
    m(X).square().sum().backward()
    other = copy.deepcopy(m)
    zero(other.weight.grad.whole() - m.weight.grad.whole())
    with torch.no_grad():
        other.weight.zero_()
        zero(m(X) - LINEAR(X))
        zero(other(X) - LINEAR.bias)


def pickled() -> None:
    p = column().weight
    zero(pickle.loads(pickle.dumps(p)).whole() - LINEAR.weight)
    buffer = io.BytesIO()
    torch.save({"p": p.detach()}, buffer)
    buffer.seek(0)
    zero(torch.load(buffer, weights_only=False)["p"].whole() - LINEAR.weight)


def sharded_state() -> None:
    m, other = column(), column()
    state = spt.state_dict(m, whole=False)
    assert {k: type(v) for k, v in state.items()} == dict.fromkeys(("weight", "bias"), spt.PartitionedTensor)
    with torch.no_grad():
        other.weight.zero_()
    with spmd.ledger() as log:
        other.load_state_dict(state)
    assert not log.operators
    zero(other(X) - LINEAR(X))


def optimiser_state() -> None:
    m = column()
    optimizer = torch.optim.Adam(m.parameters())
    m(X).square().sum().backward()
    optimizer.step()
    again = torch.optim.Adam(m.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert isinstance(again.state[m.weight]["exp_avg"], spt.PartitionedTensor)
    again.step()


def encoder() -> None:
    ours = copy.deepcopy(ENCODER)
    ours.linear1 = spt.nn.Linear.from_torch(ENCODER.linear1, w_spec=P("x"))
    ours.linear2 = spt.nn.Linear.from_torch(ENCODER.linear2, w_spec=P(None, "x"))
    z = whole_of((2, 3, 4))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            zero(ours(z) - ENCODER(z))


def tied() -> None:
    m = column()
    spt.tie(torch.zeros((), requires_grad=True), *m.parameters()).backward()
    assert isinstance(m.weight.grad, spt.PartitionedTensor)
    zero(m.weight.grad.whole())


def second_order() -> None:
    p = spt.Parameter(LINEAR.weight, P("x"))
    (g,) = torch.autograd.grad(p.sum() ** 2, p, create_graph=True)
    (h,) = torch.autograd.grad(g.square().sum(), p)
    zero(h.whole() - 120 * LINEAR.weight.sum())


def assigned() -> None:
    m = column()
    m.weight.data = torch.zeros(5, 3, dtype=F64)
    zero(m(X) - LINEAR.bias)
    m.weight.grad = torch.ones(5, 3, dtype=F64)
    m.bias.requires_grad_(False)
    torch.optim.SGD([m.weight], lr=1.0).step()
    zero(m.weight.whole() + 1)


def blocks() -> None:
    k = spmd.worker_index("x")
    own = torch.full((1 + k, 2), float(k))
    p = spt.Parameter.from_block(own, P("x"))
    assert p.shape == (3, 2)
    assert p.block().data_ptr() == own.data_ptr()
    assert p.whole().tolist() == [[0, 0], [1, 1], [1, 1]]
    assert p.sum().item() == 4
    assert spt.Parameter.from_block(own, p.block_layout).shape == (3, 2)


RIGHT = {
    "torch.func.grad": penalty_gradient,
    "to another dtype": converted,
    "deepcopy": copied,
    "pickle": pickled,
    "blocks in the state": sharded_state,
    "state of an optimiser": optimiser_state,
    "encoder": encoder,
    "tie": tied,
    "second order": second_order,
    "assigned": assigned,
    "from blocks": blocks,
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", RIGHT)
def test_what_modules_and_transformations_do(name, check):
    on_workers(RIGHT[name], check)


def varied() -> torch.Tensor:
    return spt.varying(torch.ones(5, 3, dtype=F64), "x")


WRONG: dict[str, Callable[[], Any]] = {
    "varying times it": lambda: varied() * column().weight,
    "it times varying": lambda: column().weight * varied(),
    "linear": lambda: nn.functional.linear(X, column().weight),
    "linear of varying": lambda: nn.functional.linear(spt.varying(X, "x"), column().weight),
    "varying += it": lambda: varied().add_(column().weight.detach()),
    "torch.func on varying": lambda: torch.func.grad(lambda p: ((p * 2) * varied()).sum())(column().weight.detach()),
    "psum": lambda: spt.psum(column().weight, "x"),
    "pvary": lambda: spt.pvary(column().weight, "x"),
    "varying": lambda: spt.varying(column().weight, "x"),
    "spt.block": lambda: spt.block(column().weight),
    "spt.mean": lambda: spt.mean(column().weight, "x"),
    "inner": lambda: spmd.inner(column().weight, column().weight),
    "all_gather": lambda: spt.all_gather(column().weight, "x"),
    "whole in functional_call": lambda: torch.func.functional_call(column(), dict(LINEAR.named_parameters()), (X,)),
    "replaced by a whole": lambda: (m := column(), setattr(m, "weight", nn.Parameter(LINEAR.weight)), m(X)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(column())(X),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(column())(X),
    "whole that varies": lambda: spt.Parameter(varied(), P("x")),
    "scaler of torch": lambda: scaled_step(torch.amp.GradScaler("cpu")),
}


def scaled_step(scaler: Any) -> None:
    m = column()
    scaler.scale(m(X).square().sum()).backward()
    scaler.step(torch.optim.SGD(m.parameters(), lr=0.1))


@pytest.mark.parametrize("name", WRONG)
def test_what_would_take_a_block_for_the_whole_raises(name):
    with pytest.raises(REFUSALS) as caught:
        on_workers(WRONG[name])
    words = {"scaler of torch": "spt.GradScaler", "whole that varies": "from_block"}
    assert words.get(name, "block") in str(caught.value)


@pytest.mark.parametrize("spec", [P(), P("x"), None], ids=str)
def test_a_parameter_does_not_leave_a_body(spec):
    with pytest.raises(LayoutError, match=r"p\.whole\(\) with P\(\)"):
        spt.map(lambda: spt.Parameter(LINEAR.weight, P("x")), (), spec, mesh=spmd.Mesh(x=2))()


def test_initialisers_draw_the_whole_from_the_generator_of_the_worker():
    def main() -> None:
        p = spt.Parameter(torch.zeros(5, 3), P("x"))
        for init in (nn.init.xavier_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_):
            init(p)
        found.append(p.whole().detach())

    found: list[torch.Tensor] = []
    torch.manual_seed(4)
    serial = nn.init.orthogonal_(nn.init.kaiming_normal_(nn.init.xavier_uniform_(torch.zeros(5, 3))))
    torch.manual_seed(4)
    spt.map(main, (), None, mesh=spmd.Mesh(x=2), check=False)()
    for whole in found:
        torch.testing.assert_close(whole, serial)


@pytest.mark.parametrize("check", [True, False])
def test_a_split_convolution_has_the_state_and_the_norm_of_the_whole(check):
    conv = nn.Conv2d(4, 6, 3, padding=1, dtype=F64)
    images = whole_of((2, 4, 5, 5))
    conv(images).square().sum().backward()
    expected = nn.utils.get_total_norm([p.grad for p in conv.parameters()])
    conv_state = {k: v.clone() for k, v in conv.state_dict().items()}
    layout = spmd.Mesh(x=2).layout(tuple(images.shape), P(None, "x"))

    def main() -> None:
        layer = spt.nn.Conv2d.from_torch(conv, spec=P(None, "x"))
        block = images[layout.slices(spmd.worker_index("x"))].clone()
        layer(spt.varying(block, "x") if check else block).square().sum().backward()
        for norm in (spt.grad_norm(layer), nn.utils.clip_grad_norm_(layer.parameters(), 1e9)):
            torch.testing.assert_close(spt.block(norm), expected, rtol=1e-12, atol=0)
        state = layer.state_dict()
        assert all(torch.equal(state[k], v) for k, v in conv_state.items())
        layer.load_state_dict({k: v + 1 for k, v in conv_state.items()})
        assert all(torch.equal(v, conv_state[k] + 1) for k, v in layer.state_dict().items())

    spt.map(main, (), None, mesh=spmd.Mesh(x=2), check=check)()


def test_a_worker_does_not_take_another_s_block():
    kept: dict[int, Any] = {}

    def main(turn: int) -> None:
        k = spmd.worker_index("x")
        if turn == 0:
            kept[k] = column().weight
        else:
            kept[1 - k].block()

    mapped = spt.map(main, None, None, mesh=spmd.Mesh(x=2))
    mapped(0)
    with pytest.raises(LayoutError, match="the worker that it was made on"):
        mapped(1)


IN_PLACE = {
    "add": lambda p, q: p.add_(q, alpha=-0.1),
    "subtract": lambda p, q: p.sub_(q),
    "multiply": lambda p, q: p.mul_(q),
    "by a number": lambda p, q: p.mul_(0.5),
    "divide": lambda p, q: p.div_(q.abs() + 1),
    "addcmul": lambda p, q: p.addcmul_(q, q, value=0.3),
    "addcdiv": lambda p, q: p.addcdiv_(q, q.abs() + 1, value=-0.3),
    "interpolate": lambda p, q: p.lerp_(q, 0.25),
    "copy": lambda p, q: p.copy_(q),
    "zero": lambda p, q: p.zero_(),
    "square root": lambda p, q: p.abs_().sqrt_(),
    "clamp": lambda p, q: p.clamp_(-0.5, 0.5),
    "a whole": lambda p, q: p.add_(q.whole() if isinstance(q, spt.PartitionedTensor) else q),
    "a scalar tensor": lambda p, q: p.add_(torch.tensor(2.0, dtype=F64)),
    "of itself": lambda p, q: p.add_(p),
    "a smaller one": lambda p, q: p.add_(q[:, :1] if not isinstance(q, spt.PartitionedTensor) else q.whole()[:, :1]),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize(
    "specs", [(P("x"), P("x")), (P("x", "y"), P("x", "y")), (P(), P()), (P("x"), P("y")), (P(), P("x"))]
)
def test_functions_of_elements_write_in_place(name, specs):
    """By the short way of optimizers where tensors lie alike, else as ever: the whole's result, or an error."""
    a, b = whole_of((5, 3)), whole_of((5, 3), 1)
    f = IN_PLACE[name]
    expected = a.clone()
    f(expected, b)

    def main():
        p, q = spt.Parameter(a, specs[0]), spt.Parameter(b, specs[1])
        before = p._version
        with torch.no_grad():
            try:
                result = f(p, q)
            except LayoutError:
                return None
        assert result is p
        assert p._version > before
        return p.whole().detach()

    found = spt.map(main, (), None, mesh=MESH)()
    if found is None:
        assert specs[0] != specs[1]
    else:
        assert torch.equal(found, expected)


def test_what_backward_needs_is_not_written_to_unnoticed():
    def main():
        p = spt.Parameter(whole_of((4, 3)), P("x"))
        y = (p * p).sum()
        with torch.no_grad():
            p.add_(p.detach())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    spt.map(main, (), None, mesh=MESH)()


def test_a_normed_weight_is_that_of_the_whole():
    weight_norm = nn.utils.parametrizations.weight_norm
    names = [f"parametrizations.weight.original{k}" for k in (0, 1)]

    def gradients(module):
        y = module(X)
        y.square().sum().backward()
        parameters = dict(module.named_parameters())
        return y, *(parameters[name].grad for name in names)

    def body():
        y, *grads = gradients(weight_norm(column()))
        return spt.block(y.detach()), *(spt.block(g.whole()) for g in grads)

    expected = gradients(weight_norm(copy.deepcopy(LINEAR)))
    for found in on_workers(body):
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b.detach())
