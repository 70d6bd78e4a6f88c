"""Pipelines of modules on `data` x `stage`, where workers along `data` have different numbers of samples, or none."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import StateError  # noqa: E402

pytestmark = pytest.mark.host("a body makes its tensors on the host")

GENERATOR = torch.Generator().manual_seed(0)
SHAPES = [(12, 2, 3), (13, 2, 3), (7, 2, 3), (3, 2, 3), (29, 4, 8), (5, 4, 2), (1, 2, 2)]


def drawn(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def stages():
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    for p in net.parameters():
        p.data.copy_(torch.linspace(-1, 1, p.numel(), dtype=p.dtype).reshape(p.shape))
    return [net[:2], net[2]]


def gradients(x, y, data, microbatches, schedule, check, loss, **options):
    """The losses and the gradients of both stages, as each worker has them."""

    def body(x, y):
        own = [None, None]
        place = int(spt.worker_index("stage"))
        own[place] = spt.data_parallel(stages()[place], "data", varying="stage")
        step = spt.pipeline(own, "stage", microbatches=microbatches, schedule=schedule, loss=loss, **options)
        value = step.backward(x, y)
        return torch.cat([spt.block(value).reshape(1), *(spt.block(p.grad).flatten() for p in step.parameters())])[None]

    def padded(x, y):
        found = body(x, y)
        return torch.cat([found, found.new_zeros(1, 21 - found.shape[1])], 1)

    mesh = spmd.Mesh(data=data, stage=2)
    return spt.map(padded, (P("data"), P("data")), P(("data", "stage")), mesh=mesh, check=check)(x, y)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize(("n", "data", "microbatches"), SHAPES)
def test_gradients_are_those_of_the_whole_minibatch(n, data, microbatches, schedule, check):
    x, y = drawn(n, 3), drawn(n, 2)
    whole = stages()
    loss = ((whole[1](whole[0](x)) - y) ** 2).mean()
    loss.backward()
    found = gradients(
        *(x, y, data, microbatches, schedule, check),
        lambda y, target: spt.mean((y - target) ** 2, "data"),
        **({} if check else {"loss_axis_name": "data"}),
    )
    for worker, row in enumerate(found):
        expected = torch.cat([p.grad.flatten() for p in whole[worker % 2].parameters()])
        torch.testing.assert_close(row[0], loss.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(row[1 : 1 + len(expected)], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(("n", "data", "microbatches"), SHAPES[:5])
def test_means_of_own_samples_are_those_of_own_minibatches(n, data, microbatches, check):
    x, y = drawn(n, 3), drawn(n, 2)
    parts = list(zip(x.tensor_split(data), y.tensor_split(data), strict=True))
    whole = stages()
    for a, b in parts:
        if len(a):
            ((whole[1](whole[0](a)) - b) ** 2).mean().backward()
    expected = [torch.cat([p.grad.flatten() for p in stage.parameters()]) for stage in whole]
    found = gradients(
        *(x, y, data, microbatches, "1f1b", check),
        lambda y, target: ((y - target) ** 2).mean(),
        **({} if check else {"loss_axis_name": ()}),
    )
    for worker, row in enumerate(found):
        want = expected[worker % 2]
        torch.testing.assert_close(row[1 : 1 + len(want)], want, rtol=0, atol=1e-12)


def test_a_body_without_states_says_what_the_mean_is_of():
    x = drawn(4, 3)
    with pytest.raises(StateError) as caught:
        gradients(x, x[:, :2], 2, 2, "1f1b", False, lambda y, target: spt.mean(y, "data"))
    for text in ("spt.pipeline: argument loss_axis_name", "without states", "loss_axis_name='data', or ()"):
        assert text in str(caught.value)
