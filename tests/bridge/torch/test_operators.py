"""Every operator as a function of torch: values, adjoints, derivatives of any order, and torch.func, on every mesh.

The classes are found, so a new operator is tested here with no line written for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch_operators import MESHES, Placed, applied, cases, integers, placed  # noqa: E402

import spmd  # noqa: E402
from spmd import P  # noqa: E402
from spmd.bridge import torch as spt  # noqa: E402
from spmd.bridge.torch.interop import array_dtype, borrowed  # noqa: E402
from spmd.mesh import Mesh, here  # noqa: E402
from spmd.state import ROOTED  # noqa: E402
from spmd.testing import Case, operator_cases, operator_classes  # noqa: E402

pytestmark = pytest.mark.host("tensors of these tests lie on the host")

KINDS = [kind for kind in operator_classes() if kind.__module__.startswith("spmd.")]
DTYPES = {
    name: getattr(torch, name)
    for name in "float32 float64 complex64 complex128 float16 bfloat16 int8 uint8 int32 int64 bool".split()
}


def few(kind: type, axes: dict[str, int], count: int) -> list[tuple[str, Case]]:
    """Some of the cases of an operator, from all over its row."""
    row = operator_cases(kind, Mesh(**axes))
    chosen = sorted({k * (len(row) - 1) // max(1, count - 1) for k in range(count)}) if count > 1 else [len(row) // 2]
    return [(f"{kind.__name__}-{k}", row[k]) for k in chosen]


def each(check: Callable[[Case, Mesh, np.random.Generator], None], named: list, axes: dict[str, int], draws: int = 1):
    """Run a check on cases; says which case it was that failed."""
    mesh = Mesh(**axes)
    for seed in range(draws):
        for name, case in named:
            try:
                check(case, mesh, np.random.default_rng(seed))
            except Exception as error:
                error.add_note(f"{name} on {axes}, draw {seed}: {case}")
                raise


def mesh_name(axes: dict[str, int]) -> str:
    return "x".join(map(str, axes.values()))


all_meshes = pytest.mark.parametrize("axes", MESHES, ids=mesh_name)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def everywhere(check: Callable[[Case, Mesh, np.random.Generator], None], count: int):
    """Two tests of a check: a few cases of every operator; in the long run all on every mesh (on two axes a third)."""

    @each_kind
    def some(kind):
        axes = ({"x": 3}, {"x": 2, "y": 2})[KINDS.index(kind) % 2]
        each(check, few(kind, axes, count), axes)

    @pytest.mark.full
    @all_meshes
    @each_kind
    def full(kind, axes):
        row = [(f"{kind.__name__}-{k}", case) for k, case in enumerate(operator_cases(kind, Mesh(**axes)))]
        each(check, row[:: 2 * len(axes) - 1], axes)  # along two axes there are four groups of them

    some.__doc__ = full.__doc__ = check.__doc__
    return some, full


def floats(rng: np.random.Generator, *shape: int, dtype: Any = None) -> Any:
    x = torch.from_numpy(rng.standard_normal(shape))
    return torch.complex(x, torch.from_numpy(rng.standard_normal(shape))).to(dtype) if dtype else x


# Values


def drawn(rng: np.random.Generator, n: int, dtype: Any) -> Any:
    """Small numbers that any dtype holds, and that differ in every entry."""
    if dtype is torch.bool:
        return torch.from_numpy(rng.integers(0, 2, n).astype(bool))
    if dtype.is_floating_point or dtype.is_complex:
        x = rng.standard_normal(n)
        return torch.from_numpy(x + 1j * rng.standard_normal(n) if dtype.is_complex else x).to(dtype)
    return torch.from_numpy(rng.integers(0, 100, n)).to(dtype)


def bits(x: Any) -> bytes:
    return np.ascontiguousarray(borrowed(x)).tobytes()


def equals_numpy(case: Case, mesh: Mesh, rng: np.random.Generator, dtypes: dict[str, Any] = DTYPES) -> None:
    """The result has the bits, the dtype and the shape of the operator's on NumPy's arrays."""
    at = placed(case, mesh)

    def body(x):
        return np.reshape(at.operator(np.reshape(x, at.shapes[here("a test").index])), (-1,))

    ours = applied(case, mesh).function
    theirs = spmd.map(body, at.source, at.target, mesh=mesh)
    for dtype in dtypes.values():
        x = drawn(rng, at.size, dtype)
        got, want = ours(x), theirs(borrowed(x).copy()).numpy()
        assert array_dtype(got.dtype) == want.dtype
        assert tuple(got.shape) == want.shape
        assert bits(got) == want.tobytes(), (got, want)


def equals_numpy_some(case: Case, mesh: Mesh, rng: np.random.Generator) -> None:
    equals_numpy(case, mesh, rng, {"float64": torch.float64})


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_have_the_bits_of_numpys(dtype):
    axes = {"x": 3}
    each(
        lambda *args: equals_numpy(*args, {dtype: DTYPES[dtype]}), cases(axes)[:: 5 if dtype != "float64" else 1], axes
    )


@pytest.mark.full
@all_meshes
@each_kind
def test_results_have_the_bits_of_numpys_everywhere(kind, axes):
    each(equals_numpy, [("", case) for case in operator_cases(kind, Mesh(**axes))], axes, 2)


# The adjoint


def exact(case: Case, mesh: Mesh, rng: np.random.Generator, dtypes: tuple = ()) -> None:
    """<y, A x> = <A.H y, x> without any error, since integers are exact."""
    f, size, _ = applied(case, mesh)
    for dtype in dtypes or (torch.float64, torch.complex128):
        x = integers(rng, size, dtype).requires_grad_()
        z = f(x)
        assert z.dtype == dtype
        y = integers(rng, z.numel(), dtype)
        z.backward(y)
        assert x.grad.dtype == dtype
        assert torch.vdot(y, z.detach()) == torch.vdot(x.grad, x.detach())


@all_meshes
def test_adjoints_are_exact_on_integers(axes):
    each(lambda *args: exact(*args, dtypes=(torch.float64,)), cases(axes)[:: 3 if len(axes) == 1 else 9], axes)


@each_kind
def test_adjoints_are_exact_on_complex_integers(kind):
    each(lambda *args: exact(*args, dtypes=(torch.complex128,)), few(kind, {"x": 3}, 2), {"x": 3})


@pytest.mark.full
@all_meshes
@each_kind
def test_adjoints_are_exact_on_integers_everywhere(kind, axes):
    each(exact, [("", case) for case in operator_cases(kind, Mesh(**axes))], axes, 5)


# gradcheck


def gradients(case: Case, mesh: Mesh, rng: np.random.Generator, dtypes: tuple = (torch.float64,)) -> None:
    """gradcheck, of first and second order, backward and forward."""
    f, size, _ = applied(case, mesh)
    for dtype in dtypes:
        x = (floats(rng, size, dtype=dtype) if dtype.is_complex else floats(rng, size)).requires_grad_()
        assert torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_grad=False, fast_mode=True)
        assert torch.autograd.gradgradcheck(lambda x: f(x) * f(x), x, fast_mode=True)


def gradients_slow(case: Case, mesh: Mesh, rng: np.random.Generator) -> None:
    """gradcheck of every entry, batched too, in both dtypes."""
    f, size, _ = applied(case, mesh)
    for dtype in (torch.float64, torch.complex128):
        x = (floats(rng, size, dtype=dtype) if dtype.is_complex else floats(rng, size)).requires_grad_()
        assert torch.autograd.gradcheck(f, x, check_forward_ad=True, check_batched_grad=False)
        assert torch.autograd.gradgradcheck(lambda x: f(x) * f(x), x, check_fwd_over_rev=True, check_rev_over_rev=True)


test_gradients_agree_with_differences, test_gradients_agree_with_differences_everywhere = (
    everywhere(gradients, 1)[0],
    everywhere(gradients_slow, 1)[1],
)


# torch.func, from outside


def matrix(f: Callable, n: int) -> Any:
    """The matrix of a linear map of vectors of length n, column by column."""
    if n == 0:
        return torch.zeros(f(torch.zeros(0, dtype=torch.float64)).numel(), 0, dtype=torch.float64)
    return torch.stack([f(e) for e in torch.eye(n, dtype=torch.float64)], 1)


def outside(case: Case, mesh: Mesh, rng: np.random.Generator) -> None:
    """grad, vjp, jvp, vmap, jacrev, jacfwd and hessian of a map, against the operator's matrix."""
    f, size, _ = applied(case, mesh)
    a = matrix(f, size)
    x, t, y = integers(rng, size), integers(rng, size), integers(rng, a.shape[0])
    func: Any = torch.func

    value, pull = func.vjp(f, x)
    assert torch.equal(value, a @ x)
    assert torch.equal(pull(y)[0], a.T @ y)
    value, tangent = func.jvp(f, (x,), (t,))
    assert torch.equal(value, a @ x)
    assert torch.equal(tangent, a @ t)
    assert torch.equal(func.grad(lambda x: (f(x) * y).sum())(x), a.T @ y)
    assert torch.equal(func.grad(lambda x: (f(x) ** 2).sum())(x), 2 * a.T @ (a @ x))
    columns = torch.stack([x, t, x + t], 1)
    assert torch.equal(func.vmap(f, in_dims=1, out_dims=1)(columns), a @ columns)
    assert func.vmap(f)(x.new_zeros(0, size)).shape == (0, a.shape[0])
    assert torch.equal(
        func.vmap(func.vmap(f), in_dims=2)(torch.stack([columns.T, -columns.T], 2))[1], -(columns.T @ a.T)
    )
    if size:
        assert torch.equal(func.jacrev(f)(x), a)
        assert torch.equal(func.jacfwd(f)(x), a)


def outside_slow(case: Case, mesh: Mesh, rng: np.random.Generator) -> None:
    """The same, and second derivatives."""
    outside(case, mesh, rng)
    f, size, _ = applied(case, mesh)
    if size:
        a, x = matrix(f, size), integers(rng, size)
        assert torch.equal(torch.func.hessian(lambda x: (f(x) ** 2).sum())(x), 2 * a.T @ a)
        assert torch.equal(torch.func.jacrev(torch.func.jacrev(lambda x: (f(x) ** 2).sum()))(x), 2 * a.T @ a)


test_functional_transforms_outside = everywhere(outside, 1)[0]
test_functional_transforms_outside_everywhere = everywhere(outside_slow, 1)[1]


# torch.func, in bodies


def in_bodies(at: Placed, body: Callable, in_specs: Any, out_specs: Any, *args: Any) -> list[Any]:
    """What a body gives, with states and without."""
    return [spt.map(body, in_specs, out_specs, mesh=at.mesh, check=check)(*args) for check in (True, False)]


def result(at: Placed, y: Any) -> Any:
    """A block as a vector, in its state; that of a Rooted block is of its handle, which there is none of here."""
    return at.flat(y) if at.operator.target == ROOTED else y.reshape(-1)


def inside(case: Case, mesh: Mesh, rng: np.random.Generator) -> None:
    """Backward, vjp and jvp in bodies: the Function's own rules, with the tensors of this worker."""
    at = placed(case, mesh)
    f, size, _ = applied(case, mesh)
    x, t = integers(rng, size).requires_grad_(), integers(rng, size)
    z = f(x)
    y = integers(rng, z.numel())
    z.backward(y)

    def one(x):
        shape = at.shapes[here("a test").index]
        return result(at, at.operator(x.reshape(shape)))

    def backward(x, y):
        x = x.detach().requires_grad_()
        z = one(x)
        z.backward(y)
        (again,) = torch.autograd.grad(one(x), x, y)
        return z, x.grad, again

    def vjp(x, y):
        z, pull = torch.func.vjp(one, x)
        return z, pull(y)[0], pull(2 * y)[0] / 2

    def jvp(x, t):
        z, tangent = torch.func.jvp(one, (x,), (t,))
        return z, tangent

    s, r = at.source, at.results()
    for body in (backward, vjp):
        for got, g, again in in_bodies(at, body, (s, r), (r, s, s), x.detach(), y):
            assert torch.equal(got, z.detach())
            assert torch.equal(g, x.grad)
            assert torch.equal(again, x.grad)
    for got, tangent in in_bodies(at, jvp, (s, s), (r, r), x.detach(), t):
        assert torch.equal(got, z.detach())
        assert torch.equal(tangent, f(t))


def mapped_over(case: Case, mesh: Mesh, rng: np.random.Generator) -> None:
    """vmap of an operator is the loop: along any dimension, nested, of no samples at all, and of its gradients."""
    at = placed(case, mesh)

    def blocks(x):
        return at.block(x), at.operator

    def loop(x):
        b, op = blocks(x)
        return at.flat(torch.stack([op(b * k) for k in (1, 2, 3)]))

    def along(dim):
        def body(x):
            b, op = blocks(x)
            stack = torch.stack([b * k for k in (1, 2, 3)], dim)
            return at.flat(torch.func.vmap(op, in_dims=dim)(stack))

        return body

    def nested(x):
        b, op = blocks(x)
        stack = torch.stack([torch.stack([b, b * 2, b * 3]), torch.stack([b * 4, b * 5, b * 6])], -1)
        found = torch.func.vmap(torch.func.vmap(op), in_dims=-1)(stack)
        assert found.shape[:2] == (2, 3)
        return at.flat(found[0])

    def none(x):
        b, op = blocks(x)
        found = torch.func.vmap(op)(b.new_zeros((0, *b.shape)))
        assert found.shape == (0, *op(b).shape)
        return at.flat(found)

    def pulled(x):
        b, op = blocks(x)
        _, pull = torch.func.vjp(op, b)
        y = op(b)
        (found,) = torch.func.vmap(pull)(torch.stack([y, y * 2, y * 3]))
        (one,) = pull(y)
        for k in (1, 2, 3):
            assert torch.equal(found[k - 1], one * k)
        return at.flat(found[0])

    x = integers(rng, at.size)
    s = at.source
    # Blocks of samples differ in length from blocks of one: how they are cut does not matter here.
    each = P(tuple(mesh.axes))
    want = in_bodies(at, loop, s, each, x)[0]
    for body in (*(along(d) for d in sorted({0, -1, min(1, len(case.shape))})), nested):
        for got in in_bodies(at, body, s, each, x):
            assert torch.equal(got, want)
    for body in (none, pulled):
        in_bodies(at, body, s, each, x)


def second_order(case: Case, mesh: Mesh, rng: np.random.Generator) -> None:
    """jacrev and hessian in bodies, of a loss that is a form in an Invariant vector."""
    at = placed(case, mesh)
    f, size, _ = applied(case, mesh)
    a = matrix(f, size)
    b, c, w = integers(rng, 3 * size).reshape(size, 3), integers(rng, a.shape[0]), integers(rng, 3)
    outer = tuple(n for n in mesh.axes if n in at.target.varying)

    def loss(b, c, w):
        x = b @ spt.pvary(w, at.inner)
        y = result(at, at.operator(x.reshape(at.shapes[here("a test").index])))
        total = (c * y * y).sum()
        return spt.psum(total, outer) if outer else total

    def body(b, c, w):
        def of(w):
            return loss(b, c, w)

        func: Any = torch.func
        return of(w), func.grad(of)(w), func.hessian(of)(w), func.jacrev(func.jacrev(of))(w)

    m = a @ b
    for value, g, h, again in in_bodies(at, body, (at.rows(3), at.results(), P()), P(), b, c, w):
        assert torch.equal(value, (c * (m @ w) ** 2).sum())
        assert torch.equal(g, 2 * m.T @ (c * (m @ w)))
        assert torch.equal(h, 2 * m.T @ (c[:, None] * m))
        assert torch.equal(again, h)


test_transforms_in_bodies, test_transforms_in_bodies_everywhere = everywhere(inside, 2)
test_vmap_is_the_loop, test_vmap_is_the_loop_everywhere = everywhere(mapped_over, 1)
test_second_derivatives_in_bodies, test_second_derivatives_in_bodies_everywhere = everywhere(second_order, 1)


# The memory of arguments and cotangents


def laid_out_anyhow(x: Any) -> dict[str, Any]:
    """A tensor in other memory: with strides, a piece of another, expanded, conjugated and negated lazily."""
    back = tuple(range(x.ndim))[::-1]
    turned = x.permute(back).contiguous().permute(back)
    piece = torch.stack([x, x + 1], -1)[..., 0]
    found = {"turned": turned, "piece": piece, "negated": torch._neg_view(-x)}
    if x.is_complex():
        found["conjugated"] = x.conj().resolve_conj().conj()
    else:
        found["imaginary"] = torch.complex(torch.zeros_like(x), -x).conj().imag
    return found


def strided(case: Case, mesh: Mesh, rng: np.random.Generator) -> None:
    """Arguments and cotangents of any strides, and lazily conjugated or negated, give what contiguous ones give."""
    at = placed(case, mesh)
    shaped = at.results()

    def both(block, g):
        leaf = block.detach().requires_grad_()
        z = at.operator(leaf)
        z.backward(g)
        return z.detach(), leaf.grad

    def same(found, expected):
        return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    def body(x, y):
        block = at.block(x)
        z = at.operator(block)
        g = y.reshape(z.shape)
        for name, b in laid_out_anyhow(block).items():
            assert same(both(b, g), both(b.contiguous().resolve_conj().resolve_neg(), g)), name
        for name, h in laid_out_anyhow(g).items():
            assert same(both(block, h), both(block, h.contiguous().resolve_conj().resolve_neg())), name
        one = torch.ones((), dtype=x.dtype)
        assert same(
            both(one.expand(block.shape), one.expand(z.shape)), both(torch.ones_like(block), torch.ones_like(z))
        )
        return at.flat(z)

    for dtype in (torch.float64, torch.complex128):
        x = integers(rng, at.size, dtype)
        y = integers(rng, applied(case, mesh).function(x).numel(), dtype)
        spt.map(body, (at.source, shaped), at.target, mesh=mesh, check=False)(x, y)


test_any_strides, test_any_strides_everywhere = everywhere(strided, 1)


# Functions that are made of operators, or are not linear

MADE = {
    "pmean": lambda x: spt.pmean(x.sum(0), "x"),
    "mean": lambda x: spt.mean(torch.sin(x), "x"),
    "mean of rows": lambda x: spt.mean(x * x, "x", 0),
    "sum": lambda x: spt.sum(torch.sin(x), "x"),
    "max": lambda x: spt.max(torch.sin(x), "x"),
    "max of rows": lambda x: spt.max(torch.sin(x), "x", 0),
    "min": lambda x: spt.min(x * x, "x", (0, 1)),
    "pmax": lambda x: spt.pmax((x * x).sum(0), "x"),
    "pmin": lambda x: spt.pmin(torch.sin(x).sum(0), "x"),
    "softmax": lambda x: torch.exp(x.sum() - spt.pmax(x.sum(), "x")).reshape(1),
    "halo": lambda x: torch.sin(spt.halo_exchange(x, P("x"), 1, "periodic")).cumsum(0),
    "several": lambda x: spt.psum(torch.sin(spt.all_gather(x, "x", tiled=True)).sum() * x.sum(), "x"),
}


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2))])
@pytest.mark.parametrize("name", MADE)
def test_functions_agree_with_differences(name, n):
    """First and second derivatives, backward and forward, from outside."""
    result = P("x") if name in ("softmax", "halo") else P()
    f = spt.map(MADE[name], P("x"), result, mesh=Mesh(x=n))
    x = floats(np.random.default_rng(n), 5, 2).requires_grad_()
    assert torch.autograd.gradcheck(f, x, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(f, x, fast_mode=True)
    t = torch.ones_like(x)
    torch.testing.assert_close(
        torch.func.jvp(f, (x.detach(),), (t,))[1], torch.autograd.functional.jvp(f, x, t)[1], rtol=1e-10, atol=1e-10
    )


@pytest.mark.parametrize("name", MADE)
def test_functions_of_no_samples_and_of_several(name):
    mesh = Mesh(x=3)
    result = P(None, "x") if name in ("softmax", "halo") else P()
    x = floats(np.random.default_rng(0), 4, 5, 2)
    mapped = spt.map(torch.func.vmap(MADE[name]), P(None, "x"), result, mesh=mesh)
    one = spt.map(MADE[name], P("x"), P("x") if len(result.dims) else P(), mesh=mesh)
    want = torch.stack([one(v) for v in x])
    torch.testing.assert_close(mapped(x), want, rtol=1e-12, atol=1e-12)
    if name != "mean":  # torch's vmap of no samples cannot divide numbers
        assert mapped(x[:0]).shape == (0, *want.shape[1:])


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_forward_mode_of_functions_in_bodies(name, check):
    mesh = Mesh(x=3)
    rng = np.random.default_rng(0)
    x, t = floats(rng, 5, 2), floats(rng, 5, 2)
    result = P("x") if name in ("softmax", "halo") else P()
    want = torch.func.jvp(spt.map(MADE[name], P("x"), result, mesh=mesh), (x,), (t,))
    got = spt.map(
        lambda x, t: torch.func.jvp(MADE[name], (x,), (t,)), (P("x"), P("x")), (result, result), mesh=mesh, check=check
    )(x, t)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["psum", "all_gather", "shift", "psum_scatter"])
def test_zeros_of_autograd_which_have_no_memory_are_sent(name, dtype):
    def body():
        zeros = spt.varying(torch._efficientzerotensor((2, 3), dtype=dtype), "x")
        return getattr(spt, name)(zeros, "x", **({"tiled": True} if name in ("all_gather", "psum_scatter") else {}))

    got = spt.map(body, (), None, mesh=spmd.Mesh(x=2), check=False)()
    assert got.dtype is dtype
    assert not got._is_zerotensor()
    assert not got.abs().sum()
