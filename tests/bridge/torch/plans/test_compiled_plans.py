"""Split modules and global tensors under `torch.compile`: right numbers in broken graphs, or a clear error."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import spmd  # noqa: E402
from bridge.torch.plans.test_parallelize import CASES  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.host("tensors of these tests lie on the host")]


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled is left from other tests; numbers are float64."""
    outer = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_default_dtype(outer)


def compiled(function: Any, fullgraph: bool = False) -> Any:
    return torch.compile(function, fullgraph=fullgraph, backend="aot_eager")


NAMES = ["translator", "gpt", "resnet by rows", "unet", "fno"]


@pytest.mark.parametrize(
    ("name", "check"),
    [pytest.param(n, c, marks=[pytest.mark.full] * (c and n != "gpt")) for n in NAMES for c in (True, False)],
)
def test_a_split_module_that_is_compiled_is_that_of_one_worker(name, check):
    make, plan, args = CASES[name]
    torch.manual_seed(0)
    net = make()
    whole = copy.deepcopy(net)
    expected = whole(*args)
    expected.backward()

    def main():
        split = spt.parallelize(net, plan)
        loss = compiled(split)(*(spt.put(x, P("data")) for x in args))
        loss.backward()
        return loss.item(), {
            n: spt.block(getattr(p.grad, "whole", lambda p=p: p.grad)()) for n, p in split.named_parameters()
        }

    loss, gradients = spt.map(main, (), None, mesh=spmd.Mesh(data=1, model=2), check=check)()
    assert loss == pytest.approx(expected.item(), rel=1e-10)
    for n, p in whole.named_parameters():
        torch.testing.assert_close(gradients[n], p.grad, rtol=1e-9, atol=1e-12)


def product(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ x.mT).relu().sum()


def squares(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().sum()


@pytest.mark.parametrize("check", [True, False])
def test_compiled_functions_of_global_tensors(check):
    x, linear = torch.randn(4, 6), torch.nn.Linear(6, 3)

    def main():
        given, net = spt.put(x, P("x")), spt.parallelize(linear, {"": spt.column("x")})
        calls = (
            (lambda f: f(product)(given)),
            (lambda f: f(lambda x: product(spt.put(x, P("x"))))(x)),
            (lambda f: f(squares)(net, given)),
        )
        return [call(compiled).item() for call in calls]

    found = spt.map(main, (), None, mesh=spmd.Mesh(x=2), check=check)()
    assert found == pytest.approx([product(x).item()] * 2 + [squares(linear, x).item()], rel=1e-12)


@pytest.mark.parametrize("kind", ["module", "put", "method"])
def test_one_graph_is_refused_with_the_reason(kind):
    x = torch.randn(4, 6)

    def main():
        if kind == "module":
            compiled(spt.parallelize(torch.nn.Linear(6, 3), {"": spt.column("x")}), True)(x)
        elif kind == "put":
            compiled(lambda x: product(spt.put(x, P("x"))), True)(x)
        else:
            compiled(product, True)(spt.put(x, P("x")))

    words = {"module": "spt.parallelize: a split module", "put": "spt.put: its result", "method": "GlobalTensor"}[kind]
    with pytest.raises(torch._dynamo.exc.Unsupported, match=words):
        spt.map(main, (), None, mesh=spmd.Mesh(x=2), check=False)()
