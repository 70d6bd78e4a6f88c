"""`spmd.scan` and `spmd.fori_loop` in bodies of torch: what a Python loop gives, with torch's autograd."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.errors import LayoutError  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")


def plain(f, init, xs, reverse=False, checkpoint=None):
    carry, rows = init, []
    for x in reversed(xs) if reverse else xs:
        carry, y = f(carry, x)
        rows.append(y)
    return carry, torch.stack(rows[::-1] if reverse else rows)


def step(u, x):
    wide = spt.halo_exchange(u, P("x"), 1, "zero")
    u = torch.tanh(u + 0.2 * (wide[2:] - 2 * u + wide[:-2]) + x)
    return u, spt.psum((u * u).sum(), "x")


@pytest.mark.parametrize("checkpoint", [None, 2])  # which changes nothing: torch's tape keeps its values
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("workers", "points"), [(1, 4), (2, 5), (4, 3)])
def test_a_scan_is_a_loop(workers, points, reverse, checkpoint):
    start = torch.linspace(-1, 1, points, dtype=torch.float64)
    forces = torch.from_numpy(np.cos(np.arange(5.0 * points)).reshape(5, points))

    def found(scan):
        def body(u, xs):
            u, energies = scan(step, u, xs, reverse=reverse, checkpoint=checkpoint)
            return spt.sum(u**2, "x") + energies.sum()

        u, xs = (t.clone().requires_grad_() for t in (start, forces))
        value = spt.map(body, (P("x"), P(None, "x")), P(), mesh=spmd.Mesh(x=workers))(u, xs)
        value.backward()
        return value.detach(), u.grad, xs.grad

    for got, want in zip(found(spmd.scan), found(plain), strict=True):
        assert torch.equal(got, want)


def test_trees_numbers_and_fori_loop():
    def body(w):
        out = spmd.fori_loop(0, 3, lambda i, c: {"u": c["u"] * w + int(i), "n": c["n"] + 1.0}, {"u": w, "n": 0.0})
        _, ys = spmd.scan(lambda c, x: (c, {"x": 2 * x, "c": c}), w, {"a": w}["a"])
        return out["u"] + out["n"] + ys["x"].sum() + ys["c"].sum()

    w = torch.tensor([1.5, -0.5], dtype=torch.float32, requires_grad=True)
    got = spt.map(body, P(), P(), mesh=spmd.Mesh(x=2))(w)
    want = ((w * w + 0) * w + 1) * w + 2 + 3 + 2 * w.sum() + 2 * w.sum()
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(y.sum(), w)[0] for y in (got, want)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("f", "words"),
    [
        (lambda c, _: (c.double(), None), r"(?s)one dtype throughout the loop.*x\.to\(torch\.float32\)"),
        (lambda c, _: (c[:1], None), "one shape throughout the loop"),
        (lambda c, _: (spt.psum(c, "x"), None), "one state throughout the loop"),
    ],
)
def test_a_step_that_changes_the_carry(f, words):
    with pytest.raises(LayoutError, match=words):
        spt.map(lambda x: spmd.scan(f, x, length=2)[0], P("x"), P("x"), mesh=spmd.Mesh(x=2))(torch.ones(6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_numbers_and_tensors_in_place_of_each_other(dtype):
    """A number takes the dtype of the tensor whose place it takes; neither loses digits."""
    two = torch.tensor(2, dtype=dtype)
    assert torch.equal(spmd.scan(lambda c, _: (2, None), two - 1, length=2)[0], two)
    assert torch.equal(spmd.scan(lambda c, _: (c * two, None), 1, length=1)[0], two)
    if not dtype.is_floating_point:
        for init, after in ((two, 0.5), (0.5, two)):
            with pytest.raises(LayoutError, match="one dtype throughout the loop"):
                spmd.scan(lambda c, _, after=after: (after, None), init, length=2)


def test_steps_on_no_slices_see_their_dtype():
    def step(c, x):
        return c, torch.where(x, c, -c)

    carry, ys = spmd.scan(step, torch.ones(2), torch.zeros((0, 2), dtype=torch.bool))
    assert carry.shape == (2,)
    assert ys.shape == (0, 2)
