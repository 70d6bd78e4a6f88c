"""Initial values of layers: those of torch, on any mesh, in any order of the workers."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import spmd  # noqa: E402
from bridge.torch.nn.linear_layers import MESHES, column, general, row  # noqa: E402
from spmd import Grid  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import StallError, StateError  # noqa: E402

pytestmark = pytest.mark.torch


def values(make: Callable[[], nn.Module], mesh: spmd.Mesh, check: bool = True) -> list[torch.Tensor]:
    """The whole parameters of what a body makes; those of all workers are equal."""
    result = {}

    def main():
        result[spmd.mesh.here("a test").index] = [*make().state_dict().values()]

    spt.map(main, (), None, mesh=mesh, check=check)()
    for other in result.values():
        assert all(torch.equal(a, b) for a, b in zip(result[0], other, strict=True))
    return result[0]


@pytest.mark.parametrize("axes", MESHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_parameters_begin_as_those_of_nn_linear_on_any_mesh(axes, dtype):
    if dtype is torch.bfloat16:
        pytest.importorskip("ml_dtypes")
    names = tuple(axes)
    torch.manual_seed(5)
    serial = nn.Sequential(
        nn.Linear(7, 6, dtype=dtype), nn.Linear(6, 5, False, dtype=dtype), nn.Linear(5, 3, dtype=dtype)
    )
    after = torch.rand(3)

    def make():
        n = spmd.axis_size(names)
        return nn.Sequential(
            column(names, 7, 6, dtype=dtype),
            row(names, 6, 5, False, dtype=dtype),
            general(Grid((1,)), Grid((1,)), Grid((1, n)), 5, 3, dtype=dtype),
        )

    torch.manual_seed(5)
    result = values(make, spmd.Mesh(**axes))
    assert all(torch.equal(a, b) for a, b in zip(result, serial.state_dict().values(), strict=True))
    # torch's generator goes on from where the workers left off, as after the serial program.
    assert torch.equal(torch.rand(3), after)


def test_numbers_do_not_depend_on_who_comes_first():
    mesh = spmd.Mesh(x=4)
    results = []
    for late in range(4):

        def make(late=late):
            if spmd.worker_index("x") == late:
                time.sleep(0.05)
            first = row("x", 6, 5)
            if spmd.worker_index("x") != late:
                time.sleep(0.01)
            with spt.drawing():
                plain = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
            return nn.Sequential(first, plain, column("x", 5, 7))

        torch.manual_seed(1)
        results.append(values(make, mesh))
    torch.manual_seed(1)
    serial = nn.Sequential(nn.Linear(6, 5), nn.Embedding(4, 3), nn.Linear(3, 2), nn.Linear(5, 7))
    for result in results:
        assert all(torch.equal(a, b) for a, b in zip(result, serial.state_dict().values(), strict=True))


def test_seeds_and_generators():
    mesh = spmd.Mesh(x=3)
    serial = nn.Linear(4, 5)

    def seeded(generator):
        torch.nn.init.kaiming_uniform_(serial.weight, a=5**0.5, generator=generator)
        return serial.weight.detach().clone()

    expected = seeded(torch.Generator().manual_seed(7))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    by_seed = values(lambda: column("x", 4, 5, False, generator=7), mesh)
    by_generator = values(lambda: column("x", 4, 5, False, generator=torch.Generator().manual_seed(7)), mesh)

    def inside():
        with spt.drawing():
            torch.manual_seed(7)
            return column("x", 4, 5, False)

    def elsewhere():
        torch.manual_seed(7)  # that of all threads: nothing is drawn from it
        spt.psum(1, "x")  # but by the worker that draws at that moment
        return column("x", 4, 5, False)

    def again():
        layer = column("x", 4, 5, False)
        layer.reset_parameters(7)
        return layer

    by_inside = values(inside, mesh)
    for result in (by_seed, by_generator, by_inside, values(again, mesh)):
        assert torch.equal(result[0], expected)
    torch.set_rng_state(state)
    one = values(lambda: column("x", 4, 5, False), mesh)
    torch.set_rng_state(state)
    assert torch.equal(values(elsewhere, mesh)[0], one[0])
    two = values(lambda: column("x", 4, 5, False), mesh)
    assert not torch.equal(one[0], two[0])


def test_a_generator_of_several_workers_is_refused():
    mesh = spmd.Mesh(x=2)
    shared = torch.Generator().manual_seed(0)
    with pytest.raises(StateError, match="draws from too"):
        values(lambda: column("x", 4, 5, generator=shared), mesh)
    with pytest.raises(StateError, match="argument generator"):
        values(lambda: column("x", 4, 5, generator="0"), mesh)
    one = spmd.Mesh(x=1)
    twice = [values(lambda: column("x", 4, 5, generator=shared), one) for _ in range(2)]
    assert not torch.equal(twice[0][0], twice[1][0])


def test_a_collective_where_workers_take_turns_is_an_error(monkeypatch):
    monkeypatch.setenv("SPMD_TIMEOUT", "1")

    def main():
        with spt.drawing():
            spt.psum(spt.varying(torch.ones(2), "x"), "x")

    with pytest.raises(StallError, match=r"spt\.drawing"):
        spt.map(main, (), None, mesh=spmd.Mesh(x=2))()

    def saving():
        layer = column("x", 4, 5)
        with spt.drawing():
            layer.state_dict()

    with pytest.raises(StateError, match="take turns"):
        spt.map(saving, (), None, mesh=spmd.Mesh(x=2))()


def test_outside_of_bodies_drawing_is_torch_s_own():
    torch.manual_seed(3)
    with spt.drawing():
        a = torch.rand(3)
    b = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.cat([a, b]), torch.cat([torch.rand(3), torch.rand(3)]))
    with spt.drawing(3):
        assert torch.equal(torch.rand(3), a)
