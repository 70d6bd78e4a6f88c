"""Random numbers in bodies: the same on all workers for Invariant tensors, others at each place for Varying ones."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from launch import ROOT, TORCHRUN, launch, mpiexec, run_python  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.tensor_state import plain, state_of_tensor  # noqa: E402
from spmd.errors import LayoutError, SpecError, StallError, StateError  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")


def on_workers(main, mesh):
    """Run main on every worker; what each returned, in their order."""
    result = {}

    def body():
        place = tuple(spt.worker_index(name) for name in mesh.axes)
        time.sleep(0.002 * (hash(place) % 3))  # who comes first is not to matter
        result[place] = main()

    spt.map(body, (), None, mesh=mesh)()
    return result


def bare(x):
    return [bare(y) for y in x] if isinstance(x, tuple | list) else plain(x).detach().clone()


def lstm(x):
    net = nn.LSTM(8, 8, num_layers=2, dropout=0.5)
    return net(x)[0]


DRAWS = {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "nn.Dropout": lambda x: nn.Dropout()(x),
    "F.dropout2d": lambda x: F.dropout2d(x[None, :, :, None]),
    "F.alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "F.feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.5, True),
    "in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "F.rrelu": lambda x: F.rrelu(-x, training=True),
    "nn.RReLU": lambda x: nn.RReLU()(-x),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "bernoulli": lambda x: torch.bernoulli(x * 0 + 0.5),
    "Tensor.bernoulli": lambda x: (x * 0 + 0.5).bernoulli(),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.5),
    "multinomial": lambda x: torch.multinomial(x.abs() + 1, 8, replacement=True),
    "poisson": lambda x: torch.poisson(x.abs() * 50),
    "normal": lambda x: torch.normal(x, 1.0),
    "normal_": lambda x: x.clone().normal_(),
    "uniform_": lambda x: x.clone().uniform_(),
    "exponential_": lambda x: x.clone().exponential_(),
    "random_": lambda x: x.clone().random_(),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "nn.MultiheadAttention": lambda x: nn.MultiheadAttention(8, 2, dropout=0.5)(x[None], x[None], x[None])[0],
    "nn.LSTM": lstm,
    "nn.TransformerEncoderLayer": lambda x: nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5)(x),
    "distributions": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).sample(),
    "aten": lambda x: torch.ops.aten.bernoulli(x * 0 + 0.5),
    "vmap": lambda x: torch.func.vmap(lambda r: F.dropout(r), randomness="different")(x),
    "under no_grad": torch.no_grad()(lambda x: F.dropout(x)),
    "checkpoint": lambda x: checkpoint(F.dropout, x, use_reentrant=False),
}
FACTORIES = {
    "rand": lambda: torch.rand(5, 3),
    "randn": lambda: torch.randn(5, 3),
    "randint": lambda: torch.randint(1000, (9,)),
    "randperm": lambda: torch.randperm(50),
    "normal": lambda: torch.normal(0.0, 1.0, (7,)),
    "empty": lambda: torch.empty(9).normal_(),
    "nn.Linear": lambda: nn.Linear(4, 3).weight,
    "init": lambda: nn.init.xavier_uniform_(torch.empty(4, 4)),
    "init.kaiming": lambda: nn.init.kaiming_normal_(torch.empty(4, 4)),
    "parameter": lambda: F.dropout(nn.Parameter(torch.ones(40)), 0.5),
}
X = torch.arange(1.0, 129.0).reshape(16, 8) / 100


@pytest.mark.parametrize("name", DRAWS)
def test_draws_follow_the_state(name):
    """On a tensor that is Invariant all workers draw the same; on one that varies, others along its axes alone."""

    def main():
        same, along = DRAWS[name](X + 0), DRAWS[name](spt.varying(X, "a"))
        return bare(same), bare(along), bare(DRAWS[name](spt.varying(X, ("a", "b")))), state_of_tensor(along).varying

    mesh = spmd.Mesh(a=2, b=2)
    torch.manual_seed(3)
    result = on_workers(main, mesh)
    first = result[0, 0]
    assert first[3] == {"a"}
    for (a, _), (same, along, _, _) in result.items():
        assert torch.equal(same, first[0])
        assert torch.equal(along, result[a, 0][1])
    for one, other in itertools.combinations(result, 2):
        assert not torch.equal(result[one][2], result[other][2])
        if one[0] != other[0]:
            assert not torch.equal(result[one][1], result[other][1])
    torch.manual_seed(3)
    again = on_workers(main, mesh)
    assert all(torch.equal(again[k][i], result[k][i]) for k in result for i in range(3))


@pytest.mark.parametrize("name", FACTORIES)
def test_what_is_made_in_a_body_is_that_of_a_serial_program(name):
    def twice():
        return [bare(FACTORIES[name]()) for _ in range(2)]

    torch.manual_seed(4)
    expected, after = twice(), torch.rand(3)
    torch.manual_seed(4)
    for result in on_workers(twice, spmd.Mesh(x=3)).values():
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert torch.equal(torch.rand(3), after)  # torch's generator goes on from there


def test_a_seed_in_a_body():
    def main():
        torch.manual_seed(9)
        return torch.rand(4), F.dropout(spt.varying(X, "x"))

    torch.manual_seed(9)
    expected = torch.rand(4)
    result = on_workers(lambda: bare(main()), spmd.Mesh(x=3))
    assert all(torch.equal(a, expected) for a, _ in result.values())
    again = on_workers(lambda: bare(main()), spmd.Mesh(x=3))
    assert all(torch.equal(result[k][1], again[k][1]) for k in result)


def test_what_does_not_draw_leaves_the_generators_as_they_are():
    def main(idle):
        x, net = spt.varying(X, "x"), nn.LSTM(8, 8)
        if idle:
            F.dropout(x, training=False)
            F.dropout(x, 0.0)
            nn.Dropout().eval()(x)
            F.rrelu(x)
            net(x)
            F.scaled_dot_product_attention(x[None], x[None], x[None])
            torch.rand(3, generator=torch.Generator().manual_seed(0))
            torch.bernoulli(x[:0])
        return bare(F.dropout(x)), bare(torch.rand(3))

    def seeded(idle):
        torch.manual_seed(6)
        return on_workers(lambda: main(idle), spmd.Mesh(x=2))

    a, b = seeded(False), seeded(True)
    assert all(torch.equal(p, q) for k in a for p, q in zip(a[k], b[k], strict=True))


@pytest.mark.parametrize(("reentrant", "outside"), [(True, False), (False, False), (False, True)])
def test_checkpoints_draw_the_same_again(reentrant, outside):
    """A recomputation has the masks of the first run, in a backward in the body or from outside of it."""
    x = X.double().requires_grad_(outside)

    def block(h, w):
        return F.dropout(torch.tanh(F.dropout(h, 0.5) * F.dropout(w, 0.5)), 0.5)

    def run(apply):
        def body(x):
            w = nn.Parameter(torch.ones(8, dtype=torch.float64))
            torch.rand(1)
            h = apply(x, w)
            torch.rand(2)
            y = spt.psum((h * h).sum(), "x")
            if outside:
                return y
            y.backward()
            return w.grad

        torch.manual_seed(1)
        y = spt.map(body, P("x"), P(), mesh=spmd.Mesh(x=2))(x)
        return torch.autograd.grad(y, x)[0] if outside else y

    again, expected = run(lambda x, w: checkpoint(block, x, w, use_reentrant=reentrant)), run(block)
    assert expected.abs().sum() > 0
    torch.testing.assert_close(again, expected, rtol=1e-12, atol=1e-12)


def test_replicated_biases_do_not_drift():
    """A replicated layer with dropout before and after it has one value on all workers after some steps."""

    def main():
        net = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 2), nn.Dropout(0.2))
        steps = torch.optim.SGD(net.parameters(), lr=0.1)
        for k in range(5):
            steps.zero_grad()
            h = net(torch.ones(3, 4))
            spt.mean((h - spt.varying(torch.full((3, 2), float(spt.worker_index("x") + k)), "x")) ** 2, "x").backward()
            steps.step()
        return [bare(p) for p in net.parameters()]

    result = on_workers(main, spmd.Mesh(x=3))
    for other in result.values():
        assert all(torch.equal(a, b) for a, b in zip(other, result[0,], strict=True))


# spt.dropout


@pytest.mark.parametrize("shape", [(7, 5), (1, 3), (12, 4)])
@pytest.mark.parametrize(
    ("axes", "spec"),
    [({"a": 1}, P("a")), ({"a": 3}, P("a")), ({"a": 4}, P(None, "a")), ({"a": 2, "b": 2}, P("a", "b"))],
)
@pytest.mark.parametrize("keyed", [True, False])
@pytest.mark.parametrize("check", [True, False])
def test_dropout_by_place(shape, axes, spec, keyed, check):
    """The mask is the one that one worker draws, on any mesh, and the gradient has it too."""
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    key = spmd.random.key(5) if keyed else None
    torch.manual_seed(2)
    expected = spt.dropout(x, 0.4, key)
    again = spt.dropout(x, 0.4, key)
    torch.manual_seed(2)
    two = spt.map(
        lambda x: (spt.dropout(x, 0.4, key, spec), spt.dropout(x, 0.4, key, spec)),
        spec,
        (spec, spec),
        mesh=spmd.Mesh(**axes),
        check=check,
    )(x)
    assert torch.equal(two[0], expected)
    assert torch.equal(two[1], again)
    assert keyed or math.prod(shape) < 10 or not torch.equal(expected, again)
    torch.testing.assert_close(torch.autograd.grad(two[0].sum(), x), torch.autograd.grad(expected.sum(), x))
    kept = expected != 0
    torch.testing.assert_close(expected[kept], x[kept] / 0.6)


def test_dropout_drops_as_many_as_it_says():
    torch.manual_seed(0)
    dropped = (spt.dropout(torch.ones(100_000), 0.3) == 0).double().mean()
    assert abs(dropped - 0.3) < 5 * (0.3 * 0.7 / 1e5) ** 0.5
    x = torch.ones(3)
    assert spt.dropout(x, 0.5, training=False) is x
    assert spt.dropout(x, 0.0) is x


def test_what_dropout_refuses():
    mesh = spmd.Mesh(a=2, b=2)

    def run(f):
        spt.map(lambda x: f(x), P("a"), P("a"), mesh=mesh)(torch.ones(4, 4))

    with pytest.raises(SpecError, match=r"spt\.dropout[\s\S]*spec"):
        run(lambda x: spt.dropout(x, 0.5))
    with pytest.raises(StateError, match="varies over 'a' too"):
        run(lambda x: spt.dropout(x, 0.5, spec=P(None, "b")))
    with pytest.raises(SpecError, match="argument p"):
        spt.dropout(torch.ones(2), 1.5)
    with pytest.raises(LayoutError):
        run(lambda x: spt.dropout(x[: 1 + spt.worker_index("b")], 0.5, spec=P("a", "b")))


# Collectives inside of spt.drawing


INSIDE = {
    "psum": lambda x: spt.psum(x, "x"),
    "shift": lambda x: spt.shift(x, "x", 1),
    "numbers": lambda x: spt.psum(1, "x"),
    "all_gather": lambda x: spt.all_gather(x, "x"),
    "mean": lambda x: spt.mean(x, "x"),
    "array": lambda x: spmd.psum(spmd.varying(np.ones(2), "x"), "x"),
}


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", INSIDE)
def test_a_collective_while_drawing_raises_at_once(name, check):
    def main():
        x = spt.varying(torch.ones(2), "x")
        INSIDE[name](x)
        with spt.drawing():
            nn.Linear(2, 2)
            INSIDE[name](x)

    started = time.monotonic()
    with pytest.raises(StallError, match=r"spt\.drawing[\s\S]*before or after"):
        spt.map(main, (), None, mesh=spmd.Mesh(x=2), check=check)()
    assert time.monotonic() - started < 10

    def after():
        with spt.drawing():
            nn.Linear(2, 2)
        return int(spt.psum(spt.varying(torch.ones(()), "x"), "x"))

    assert spt.map(after, (), None, mesh=spmd.Mesh(x=2))() == 2


# Processes

PROGRAM = ROOT / "tests" / "torch_programs" / "torch_draws.py"


def test_the_same_numbers_in_processes():
    serial = run_python(PROGRAM, "2")
    assert serial.returncode == 0, str(serial)
    ended = launch(PROGRAM, "2", n=2, python=TORCHRUN, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert sorted(ended.stdout.splitlines()) == sorted(serial.stdout.splitlines())
    assert len(set(serial.stdout.splitlines())) == 3  # a line of what is Invariant, and one for each worker


@pytest.mark.mpi
@pytest.mark.skipif(mpiexec() is None, reason="no mpiexec beside this Python")
def test_the_same_numbers_under_mpiexec():
    serial, ended = run_python(PROGRAM, "2"), launch(PROGRAM, "2", n=2, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert sorted(ended.stdout.splitlines()) == sorted(serial.stdout.splitlines())
