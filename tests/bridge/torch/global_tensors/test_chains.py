"""Random chains of functions on global tensors: values, gradients, second gradients, and views that are written to."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError  # noqa: E402
from tests.bridge.torch.global_tensors.chains import faults  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]
CHECK = pytest.mark.parametrize("check", [True, False])


def found(seeds: range, check: bool, twice: bool = False) -> list[str]:
    return [fault for seed in seeds for fault in faults(seed, check, twice)]


@CHECK
def test_chains(check):
    assert found(range(40), check) == []


@CHECK
def test_second_gradients(check):
    assert found(range(10), check, twice=True) == []


@pytest.mark.full
@CHECK
@pytest.mark.parametrize("start", range(1000, 5000, 500))
def test_many_chains(start, check):
    assert found(range(start, start + 500), check) == []


@pytest.mark.full
@pytest.mark.parametrize("start", range(1000, 3000, 500))
def test_many_second_gradients(start):
    assert found(range(start, start + 500), False, twice=True) == []


# Views that are written to

X = torch.arange(1.0, 11.0, dtype=torch.float64).reshape(5, 2)
VIEWS = {
    "a row": lambda x: x[1],
    "rows": lambda x: x[1:3],
    "columns": lambda x: x[:, 1:],
    "all in one dimension": lambda x: x.view(-1),
    "another shape": lambda x: x.view(5, 1, 2),
    "transposed": lambda x: x.T,
    "unbound": lambda x: x.unbind()[3],
    "part of a row": lambda x: x[1][1:],
    "detached": lambda x: x.detach(),
}


@CHECK
@pytest.mark.parametrize("name", VIEWS)
def test_a_write_to_a_view_is_seen_or_refused(name, check):
    """In the tensor, in the view, and in other views."""

    def uses(x, write):
        y, z = VIEWS[name](x), x[1:2]
        (y if write == "view" else x).mul_(2)
        return [lambda: x + 0, lambda: y + 0, lambda: z + 0]

    def main(write):
        for use, own in zip(uses(spt.put(X, P("a")), write), uses(X.clone(), write), strict=True):
            try:
                seen = use()
            except LayoutError:
                continue
            assert torch.equal(seen.whole() if isinstance(seen, spt.GlobalTensor) else seen, own())

    for write in ("view", "tensor"):
        spt.map(lambda write=write: main(write), (), None, mesh=spmd.Mesh(a=3), check=check)()


@CHECK
def test_copies_are_written_to_where_nothing_else_is_used(check):
    def main():
        x = spt.put(X.clone().requires_grad_(), P("a"))
        row = F.relu((x * 1)[1], inplace=True)
        assert isinstance(row, torch.Tensor)
        assert f"{row[0]:.1f}" == "3.0"
        assert row.tolist() == [3.0, 4.0]
        with torch.no_grad():
            for each in x.unbind():
                each.clone().zero_()
        return x.sum() + row.sum()

    assert spt.map(main, (), None, mesh=spmd.Mesh(a=3), check=check)().item() == X.sum() + 7


def test_the_gradient_of_a_norm_at_zero_is_zero():
    zeros = torch.zeros(5, 2, dtype=torch.float64)

    def main():
        grads = []
        for f in (torch.norm, torch.linalg.vector_norm, torch.std):
            x = zeros.clone().requires_grad_()
            f(spt.put(x, P("a"))).backward()
            grads.append(x.grad)
        return grads

    assert all(torch.equal(g, zeros) for g in spt.map(main, (), None, mesh=spmd.Mesh(a=2))())
