"""What a body closes over is found wherever it hides; what it makes itself is not taken for that."""

from __future__ import annotations

import copy
import functools
import weakref

import pytest

import spmd
from spmd import P
from spmd.errors import StateError

torch = pytest.importorskip("torch")

from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.captured_tensors import reachable_tensors  # noqa: E402

MODEL = torch.nn.Linear(2, 2)


def by_global(x):
    return MODEL(x)


class Holder:
    def __init__(self):
        self.parts = {"first": [torch.nn.Linear(2, 2)]}

    def __call__(self, x):
        return self.parts["first"][0](x)

    def method(self, x):
        return self(x)


def in_closure():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))
    return (lambda x: net(x)), net[0].weight


HOLDER = Holder()
CLOSED, INNER = in_closure()
REACHED = {
    "global": (by_global, MODEL.weight),
    "through a function": (lambda x: by_global(x), MODEL.bias),
    "closure": (CLOSED, INNER),
    "partial": (functools.partial(CLOSED), INNER),
    "default": (lambda x, net=MODEL: net(x), MODEL.weight),
    "nested code": (lambda x: (lambda y: MODEL(y))(x), MODEL.weight),
    "module itself": (MODEL, MODEL.weight),
    "its forward": (MODEL.forward, MODEL.weight),
    "object": (HOLDER, HOLDER.parts["first"][0].weight),
    "bound method": (HOLDER.method, HOLDER.parts["first"][0].weight),
    "attribute of a module": (lambda x: torch.relu(MODEL(x)), MODEL.weight),
}


@pytest.mark.parametrize("name", REACHED)
def test_what_is_within_reach(name):
    f, tensor = REACHED[name]
    assert id(tensor) in reachable_tensors(f)


def test_what_is_not():
    assert id(MODEL.weight) not in reachable_tensors(CLOSED)
    assert not reachable_tensors(lambda x: torch.relu(x) + spmd.psum(x, "x"))


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("name", REACHED)
def test_its_gradient_arrives(name, n):
    f, tensor = REACHED[name]
    x = torch.randn(5, 2)
    tensor.grad = None
    spt.map(f, P("x"), P("x"), mesh=spmd.Mesh(x=n))(x).square().sum().backward()
    result, tensor.grad = tensor.grad, None
    f(x).square().sum().backward()
    # An entry may be small because its terms cancel: then it has their error.
    assert torch.allclose(result, tensor.grad, atol=1e-6 * float(tensor.grad.abs().max()))


@pytest.mark.parametrize("n", [1, 2])
def test_what_a_body_makes_is_its_own(n):
    """Leaves of a body, different on each worker, are no business of the caller's, who differentiates an argument."""

    def body(x):
        own = torch.full((2,), 1.0 + spt.worker_index("x"), requires_grad=True)
        return spt.psum((x * spt.varying(own, "x")).sum(), "x")

    x = torch.ones(2 * n, 2, requires_grad=True)
    loss = spt.map(body, P("x"), P(), mesh=spmd.Mesh(x=n))(x)
    loss.backward()
    assert x.grad.tolist() == [[1.0 + k // 2] * 2 for k in range(2 * n)]
    again = spt.map(body, P("x"), P(), mesh=spmd.Mesh(x=n))(x.detach())
    assert not again.requires_grad


@pytest.mark.parametrize("layers", [2, 3])
def test_layers_that_each_worker_keeps_for_itself(layers):
    """Forward is right; a backward from outside, which would give no gradient to what one worker has, raises."""
    whole, own = torch.nn.Linear(3, 2), {}

    def body(x):
        me = spmd.worker_index("x")
        own[me] = own.get(me) or copy.deepcopy(whole)
        return own[me](x)

    run = spt.map(body, P("x"), P("x"), mesh=spmd.Mesh(x=layers))
    for n in (3, 7, 1):
        x = torch.randn(n, 3)
        y = run(x)
        torch.testing.assert_close(y, whole(x))
    with pytest.raises(StateError, match="which some workers use alone"):
        y.sum().backward()
    assert all(p.grad is None for layer in own.values() for p in layer.parameters())


def test_weak_proxies_whose_objects_are_gone_are_passed_over():
    class Owner:
        pass

    owner, layer = Owner(), torch.nn.Linear(3, 2)
    held = [weakref.proxy(owner), layer]
    del owner
    assert reachable_tensors(lambda: held) == {id(layer.weight), id(layer.bias)}
