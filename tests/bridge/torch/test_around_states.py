"""Code that goes around the states: functions of the user's, native writes, batch norms, compilers, autocast."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.tensor_state import plain, state_of_tensor  # noqa: E402
from spmd.errors import MutationError, StateError  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X = randn(6, 3, seed=1)
W = randn(3, seed=2)


def run(body, x=X, n=2, spec=None):
    """What every worker of n along `x` gets from body(its rows)."""
    result = {}

    def main(x):
        result[spt.worker_index("x")] = body(x)

    spt.map(main, P("x"), None, mesh=spmd.Mesh(x=n))(x)
    return [result[k] for k in sorted(result)]


# torch.autograd.Function


class Cube(torch.autograd.Function):
    """x w^3 for each row, with a backward that may be differentiated."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w**3

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w**3, (g * x * 3 * w**2).sum(0)


class WithSetup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x * w**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w**3, (g * x * 3 * w**2).sum(0)


class NeedsInputGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w, scale, x):
        assert ctx.needs_input_grad[0]
        ctx.save_for_backward(x, w)
        ctx.scale = scale
        return x * w**3 * scale, x.sum() * 0

    @staticmethod
    def backward(ctx, g, _):
        x, w = ctx.saved_tensors
        gw = (g * x * 3 * w**2).sum(0) * ctx.scale if ctx.needs_input_grad[0] else None
        return gw, None, g * w**3 * ctx.scale if ctx.needs_input_grad[2] else None


class BeyondTorch(torch.autograd.Function):
    """Computes by NumPy, which knows of no state."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.from_numpy(plain(x).detach().numpy() * plain(w).detach().numpy() ** 3)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w**3, (g * x * 3 * w**2).sum(0)


@torch.library.custom_op("spmd_tests::cube", mutates_args=())
def cube(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * w**3


cube.register_autograd(
    lambda ctx, g: (g * ctx.saved_tensors[1] ** 3, (g * ctx.saved_tensors[0] * 3 * ctx.saved_tensors[1] ** 2).sum(0)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def hooked(x, w):
    class Layer(nn.Module):
        def forward(self, x, w):
            return Cube.apply(x, w)

    layer = Layer()
    layer.register_full_backward_hook(lambda module, before, after: None)
    layer.register_forward_hook(lambda module, given, out: out * 1)
    return layer(x, w)


FUNCTIONS = {
    "Cube": Cube.apply,
    "setup_context": WithSetup.apply,
    "needs_input_grad": lambda x, w: NeedsInputGrad.apply(w, 1.0, x)[0],
    "beyond torch": BeyondTorch.apply,
    "custom_op": cube,
    "torch.ops": lambda x, w: torch.ops.spmd_tests.cube(x, w),
    "hooks": hooked,
    "checkpoint": lambda x, w: checkpoint(Cube.apply, x, w, use_reentrant=False),
    "reentrant checkpoint": lambda x, w: checkpoint(Cube.apply, x, w, use_reentrant=True),
    "vmap": lambda x, w: torch.func.vmap(lambda v: WithSetup.apply(x, v), 0, 0)(w[None])[0],
}
DIFFERENTIABLE = [k for k in FUNCTIONS if k not in ("beyond torch", "reentrant checkpoint")]


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_functions_are_summed_once(name, closed, n):
    """Of a replicated w and Varying x, in a body, and from outside of it where w is an argument or closed over."""
    f = FUNCTIONS[name]
    w = W.clone().requires_grad_()
    (expected,) = torch.autograd.grad(((X * w**3).sin().sum() + (w**2).sum()), w)

    def inside(x):
        own = nn.Parameter(W.clone())
        y = f(x, own)
        assert state_of_tensor(y).varying == {"x"}
        (spt.psum(y.sin().sum(), "x") + (own**2).sum()).backward()
        return own.grad

    for result in run(inside, n=n):
        torch.testing.assert_close(plain(result), expected, rtol=1e-12, atol=1e-12)
    if name == "reentrant checkpoint":
        return
    if closed:
        body = lambda x: spt.psum(f(x, w).sin().sum(), "x") + (w**2).sum()
        y = spt.map(body, P("x"), P(), mesh=spmd.Mesh(x=n))(X)
    else:
        body = lambda x, w: spt.psum(f(x, w).sin().sum(), "x") + (w**2).sum()
        y = spt.map(body, (P("x"), P()), P(), mesh=spmd.Mesh(x=n))(X, w)
    (result,) = torch.autograd.grad(y, w)
    torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_second_derivatives_of_functions(name):
    if name in ("custom_op", "torch.ops", "vmap"):
        pytest.skip("torch's own double backward of these is not what is tested")
    f = FUNCTIONS[name]
    w = W.clone().requires_grad_()
    (g,) = torch.autograd.grad((X * w**3).sin().sum(), w, create_graph=True)
    (expected,) = torch.autograd.grad((g**2).sum(), w)

    def inside(x):
        own = nn.Parameter(W.clone())
        (g,) = torch.autograd.grad(spt.psum(f(x, own).sin().sum(), "x"), own, create_graph=True)
        (second,) = torch.autograd.grad((g**2).sum(), own)
        return second

    for result in run(inside):
        torch.testing.assert_close(plain(result), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["Cube", "setup_context", "needs_input_grad", "beyond torch", "custom_op"])
def test_results_of_functions_vary_without_gradients_too(name):
    def body(x):
        w = nn.Parameter(W.clone())
        states = [state_of_tensor(FUNCTIONS[name](x, w)).varying]
        with torch.no_grad():
            states.append(state_of_tensor(FUNCTIONS[name](x, w)).varying if name != "needs_input_grad" else {"x"})
        return states, state_of_tensor(Cube.apply(torch.ones(3), w)).varying

    assert run(body) == [([{"x"}] * 2, set())] * 2


def test_training_through_a_function_does_not_part():
    def body(x):
        w = nn.Parameter(W.clone())
        steps = torch.optim.SGD([w], lr=0.01)
        for _ in range(5):
            steps.zero_grad()
            spt.mean(Cube.apply(x, w) ** 2, "x").backward()
            steps.step()
        return w.detach().clone()

    w = nn.Parameter(W.clone())
    steps = torch.optim.SGD([w], lr=0.01)
    for _ in range(5):
        steps.zero_grad()
        ((X * w**3) ** 2).mean().backward()
        steps.step()
    for result in run(body):
        torch.testing.assert_close(result, w.detach(), rtol=1e-12, atol=1e-12)


# Native writes


BATCH_NORMS = {
    "BatchNorm1d": (lambda: nn.BatchNorm1d(3), (2, 3)),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(3), (2, 3, 2, 2)),
    "BatchNorm3d": (lambda: nn.BatchNorm3d(3), (2, 3, 2, 2, 1)),
    "SyncBatchNorm": (lambda: nn.SyncBatchNorm(3), (2, 3, 2)),
    "LazyBatchNorm1d": (lambda: nn.LazyBatchNorm1d(), (2, 3)),
    "LazyBatchNorm2d": (lambda: nn.LazyBatchNorm2d(), (2, 3, 2, 2)),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(3, track_running_stats=True), (2, 3, 2, 2)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(3, track_running_stats=True), (2, 3, 4)),
    "not affine": (lambda: nn.BatchNorm1d(3, affine=False), (2, 3)),
    "no statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (2, 3)),
    "in a network": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()), (2, 3, 2, 2)),
}
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norms_refuse_data_that_vary(name, mode):
    make, shape = BATCH_NORMS[name]

    def body(x):
        net = make()
        with MODES[mode]():
            net(x)

    with pytest.raises(StateError, match=r"spt\.functions\.batch_norm\(.*spec=P\('x'\)"):
        run(body, torch.randn(4, *shape[1:]))


@pytest.mark.parametrize("name", [k for k in BATCH_NORMS if k != "no statistics" and "Lazy" not in k])
def test_batch_norms_in_evaluation_and_on_invariant_data(name):
    make, shape = BATCH_NORMS[name]
    net = make()
    data = torch.randn(4, *shape[1:], generator=torch.Generator().manual_seed(0))
    net(data * 3 + 1)
    expected = net.eval()(data)
    state = net.state_dict()

    def body(x):
        net = make()
        net(data * 3 + 1)  # one value on all workers
        net.load_state_dict(state)
        y = net.eval()(x)
        assert state_of_tensor(y).varying == {"x"}
        return plain(y).detach()

    torch.testing.assert_close(torch.cat(run(body, data)), expected.detach())


def test_channels_of_each_worker_have_statistics_of_their_own():
    """Declared buffers may be written to, and the statistics are right."""
    data = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    whole = nn.BatchNorm1d(4)
    expected = whole(data)

    def body():
        k, bn = spt.worker_index("x"), nn.BatchNorm1d(2)
        bn.running_mean, bn.running_var = (spt.varying(b, "x") for b in (bn.running_mean, bn.running_var))
        y = bn(spt.varying(data[:, 2 * k : 2 * k + 2], "x"))
        result[k] = plain(y).detach(), plain(bn.running_mean), plain(bn.running_var)

    result = {}
    spt.map(body, (), None, mesh=spmd.Mesh(x=2))()
    torch.testing.assert_close(torch.cat([result[k][0] for k in range(2)], 1), expected.detach())
    torch.testing.assert_close(torch.cat([result[k][1] for k in range(2)]), whole.running_mean)
    torch.testing.assert_close(torch.cat([result[k][2] for k in range(2)]), whole.running_var)


def out_of(x, b):
    torch.mean(x, 0, out=b)


def foreach(name, *more):
    return lambda x, b: getattr(torch, name)(
        [torch.zeros(3, dtype=x.dtype), b], [torch.zeros(3, dtype=x.dtype), x.sum(0)], *more
    )


def assign(x, b):
    b[:] = x.sum(0)


def augment(x, b):
    b += x.sum(0)


WRITES = {
    "copy_": lambda x, b: b.copy_(x.sum(0)),
    "lerp_": lambda x, b: b.lerp_(x.sum(0), 0.1),
    "add_": lambda x, b: b.add_(x.sum(0)),
    "mul_": lambda x, b: b.mul_(x.sum(0)),
    "data.copy_": lambda x, b: b.data.copy_(x.sum(0)),
    "detach().copy_": lambda x, b: b.detach().copy_(x.sum(0)),
    "view": lambda x, b: b.view(3, 1).copy_(x.sum(0)[:, None]),
    "index_copy_": lambda x, b: b.index_copy_(0, torch.arange(3), x.sum(0)),
    "masked_fill_": lambda x, b: b.masked_fill_(x.sum(0) > 0, 1.0),
    "where": lambda x, b: torch.where(x.sum(0) > 0, x[0], x[1], out=b),
    "out": out_of,
    "[:] =": assign,
    "+=": augment,
    "_foreach_add_": foreach("_foreach_add_"),
    "_foreach_lerp_": foreach("_foreach_lerp_", 0.1),
    "_foreach_copy_": foreach("_foreach_copy_"),
    "normalize": lambda x, b: F.normalize(x.sum(0), dim=0, out=b),
    "max_norm": lambda x, b: F.embedding(x.abs().long() % 3, b[:, None], max_norm=0.1),
    "aten": lambda x, b: torch.ops.aten.add_(b, x.sum(0)),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", WRITES)
def test_invariant_buffers_are_not_written_to_with_data_that_vary(name, grad):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            WRITES[name](x, self.kept)

    def body(x):
        with torch.set_grad_enabled(grad):
            Keeps()(x)

    with pytest.raises(MutationError, match=r"spt\.varying\(x, 'x'\)"):
        run(body)

    def declared(x):
        kept = Keeps()
        kept.kept = spt.varying(kept.kept, "x")
        if name != "_foreach_copy_":
            kept(x)
        return state_of_tensor(kept.kept).varying

    assert run(declared) == [{"x"}] * 2


@pytest.mark.parametrize("name", ["_foreach_mul_", "_foreach_add_"])
def test_lists_of_tensors_keep_a_state_each(name):
    def body(x):
        one, other, bare = spt.varying(torch.ones(3), "x"), torch.ones(3), torch.zeros(3)
        getattr(torch, name)([one, bare], [x.float()[0], other])
        out = torch._foreach_add([x, other], [x, bare])
        return [state_of_tensor(t).varying for t in (one, bare, *out)]

    assert run(body) == [[{"x"}, set(), {"x"}, set()]] * 2


def test_what_is_written_to_knows_that_it_varies():
    def body(x):
        h = spt.psum(x.sum(0), "x")
        h[0] = x[0, 0]
        return state_of_tensor(h).varying

    assert run(body) == [{"x"}] * 2


# Spectral norm, of a weight that varies and of one that does not


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_spectral_norm(norm):
    def body(x):
        net = norm(nn.Linear(3, 3, dtype=torch.float64))
        spt.mean(net(x) ** 2, "x").backward()
        return [b.clone() for b in net.buffers() if b.is_floating_point()]

    first, second = run(body)
    assert first
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# The compiler


COMPILED = {
    "psum": lambda x, w: spt.psum((x * w).sum(), "x"),
    "mean": lambda x, w: spt.mean(x * w, "x"),
    "shift": lambda x, w: spt.shift(x * w, "x", 1),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_collectives_in_a_body_with_states_are_no_whole_graph(name):
    def body(x):
        w = nn.Parameter(W.clone())
        return torch.compile(COMPILED[name], backend="eager", fullgraph=True)(x, w)

    with pytest.raises(StateError, match=r"torch\.compile[\s\S]*check=False") as caught:
        run(body)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_collectives_in_a_body_with_states_break_the_graph(name):
    def body(x):
        found = []
        for f in (torch.compile(COMPILED[name], backend="eager"), COMPILED[name]):
            w = nn.Parameter(W.clone())
            y = f(x, w)
            spt.mean(y * y, "x").backward()
            found += [spt.block(y.detach()), spt.block(w.grad)]
        y, g, expected, expected_g = found
        assert torch.equal(y, expected)
        assert torch.equal(g, expected_g)
        assert bool(g.any())
        return torch.zeros(())

    run(body)


# Autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bias", "out"), list(itertools.product([True, False], [None, P("x")])))
def test_layers_under_autocast(dtype, bias, out):
    """The dtype is that of torch's own layer, and gradients that of the parameters."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    grid = spt.Grid
    expected = {}
    with torch.autocast("cpu", dtype):
        expected = nn.Linear(6, 4, bias)(x).dtype

    def body():
        layers = [
            (spt.nn.Linear(6, 4, bias, w_spec=P("x"), out_spec=P()), x),
            (spt.nn.Linear(6, 4, bias, w_spec=P(None, "x"), out_spec=out), spt.pslice(x, "x", axis=1, tiled=True)),
            (
                spt.nn.Linear(6, 4, bias, spec=grid((1, 2)), w_spec=grid((2, 1)), out_spec=grid((1, 2))),
                spt.pslice(x, "x", axis=1, tiled=True),
            ),
        ]
        for layer, given in layers:
            with torch.autocast("cpu", dtype):
                y = layer(given)
            assert y.dtype == expected, layer
            y.float().square().sum().backward()
            assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}

    if dtype is torch.bfloat16:
        pytest.importorskip("ml_dtypes")
    spt.map(body, (), None, mesh=spmd.Mesh(x=2))()
