"""A typed program of a user. `tests/test_editors.py` checks it by pyright in strict mode, and runs it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, assert_type

import numpy as np

import spmd
import spmd.numpy as snp
from spmd import P

Array = np.ndarray[Any, np.dtype[Any]]
Parameters = dict[str, Array]


# Bodies: plain NumPy with collectives


def predict(w: Array, x: Array) -> Array:
    return spmd.functions.relu(x @ w)


def local_loss(w: Array, x: Array, y: Array, scale: float = 1.0) -> Array:
    error = predict(w, x) - y
    total = spmd.psum(np.sum(error**2), "data")
    return scale * total


def local_sums(x: Array) -> tuple[Array, Array]:
    return assert_type(spmd.psum(x, "data"), Array), spmd.pmax(x, "data")


@spmd.map(in_specs=P("data"), out_specs=P("data"))
def doubled(x: Array) -> Array:
    return 2.0 * x


loss = spmd.map(local_loss, in_specs=(P(), P("data"), P("data"), None), out_specs=P())


def maps_and_gradients(w: Array, x: Array, y: Array) -> None:
    value = loss(w, x, y)
    assert_type(value, spmd.PartitionedArray)
    assert_type(value.numpy(), np.ndarray)
    assert_type(doubled(x), spmd.PartitionedArray)
    assert_type(loss(w, x, y, scale=2.0), spmd.PartitionedArray)

    gradient = spmd.grad(loss)(w, x, y)
    assert_type(gradient, Array)
    both = spmd.grad(loss, argnums=(0, 1))(w, x, y)
    assert_type(both, tuple[Array, Array])
    total, slope = spmd.value_and_grad(loss)(w, x, y)
    assert_type(total, spmd.PartitionedArray)
    assert_type(slope, Array)

    compiled = spmd.jit(loss)
    assert_type(compiled(w, x, y), spmd.PartitionedArray)
    step = spmd.jit(spmd.value_and_grad(loss))
    assert_type(step(w, x, y), tuple[spmd.PartitionedArray, Array])

    sums = spmd.map(local_sums, in_specs=P("data"), out_specs=(P(), P()))
    assert_type(sums(x), tuple[Array, Array])


def square(x: Array) -> Array:
    return x**2


def size(x: Array) -> Array:
    return np.sum(x**2)


@spmd.custom_vjp
def halved(x: Array, y: Array) -> Array:
    return 0.5 * x * y


def halved_forward(x: Array, y: Array) -> tuple[Array, tuple[Array, Array]]:
    return 0.5 * x * y, (x, y)


def halved_backward(residuals: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    x, y = residuals
    return 0.5 * g * y, 0.5 * g * x


halved.defvjp(halved_forward, halved_backward)


def transformations(x: Array) -> None:
    value, pull = spmd.vjp(square, x)
    assert_type(value, Array)
    assert_type(pull(value), tuple[Array])
    pushed, tangent = spmd.jvp(square, (x,), (x,))
    assert_type(pushed, Array)
    assert_type(tangent, Array)
    curvature = spmd.hessian(size)(x)
    assert_type(curvature, Array)
    again = spmd.checkpoint(square)(x)
    assert_type(again, Array)
    assert_type(halved(x, x), Array)
    assert_type(spmd.stop_gradient(x), Array)
    push = spmd.linearize(square, x)[1]
    assert_type(push(x), Array)


# Global arrays


def global_arrays(x: Array) -> None:
    u = spmd.put(x, P("data"))
    assert_type(u, spmd.PartitionedArray)
    assert_type(u + 1.0, spmd.PartitionedArray)
    assert_type(2.0 * u - u.mean(), spmd.PartitionedArray)
    assert_type(u.T @ u, spmd.PartitionedArray)
    assert_type(u[0], spmd.PartitionedArray)
    assert_type(u.shape, tuple[int, ...])
    print(u.layout, u.mesh, u.dtype, float(u.sum()))
    assert_type(spmd.zeros((4, 3), spec=P("data")), spmd.PartitionedArray)
    assert_type(spmd.inner(u, u), Any)
    print(np.exp(u), snp.sin(x), doubled(u).numpy())


def functions(x: Array) -> None:
    def body(x: Array) -> Array:
        h = spmd.functions.softmax(spmd.functions.gelu(x))
        h = spmd.functions.layer_norm(h)
        gathered = spmd.all_gather(h, "data", tiled=True)
        moved = spmd.ppermute(h, "data", [(0, 1), (1, 0)])
        wide = spmd.halo_exchange(h, P("data"), (1, 0))
        assert_type(h, Array)
        assert_type(gathered, Array)
        assert_type(wide, Array)
        return h + moved + spmd.pmean(gathered[: h.shape[0]], "data")

    assert_type(spmd.map(body, in_specs=P("data"), out_specs=P("data"))(x), spmd.PartitionedArray)


def random_numbers() -> spmd.PartitionedArray:
    key = spmd.random.key(0)
    first, second = spmd.random.split(key)
    assert_type(spmd.random.normal(first, (4, 3)), Array)
    noise = spmd.random.normal(first, (4, 3), spec=P("data"))
    assert_type(noise, spmd.PartitionedArray)
    return noise + spmd.random.uniform(second, (4, 3), spec=P("data"))


def training(x: Array, y: Array) -> Array:
    optimizer = spmd.optim.adam(1e-2)
    assert_type(optimizer, spmd.optim.Optimizer)
    w: Array = np.ones((3, 2))
    state = optimizer.init(w)
    step = spmd.value_and_grad(loss)
    for _ in range(3):
        value, gradient = step(w, x, y)
        w, state = optimizer.update(gradient, state, w)
        print(float(value))
    return w


def saving(w: Array, folder: Path) -> None:
    parameters: Parameters = {"w": w}
    spmd.io.save(folder / "parameters", parameters)
    loaded: Parameters = spmd.io.load(folder / "parameters", specs=P())
    print(loaded["w"].shape, spmd.io.inspect(folder / "parameters"))


def linear_operators(x: Array) -> None:
    A = spmd.linear_operator(lambda a: 3.0 * a, P("data"), P("data"), shape=(4, 3))
    assert_type(A, spmd.linear.LinearOperator)
    assert_type(2 * A + A.H @ A, spmd.linear.LinearOperator)
    assert_type(spmd.linear.VStack(A, A).H, spmd.linear.LinearOperator)
    print(A @ spmd.put(x, P("data")), A.domain, A.shape, A.dtype)
    report = spmd.check_adjoint(A)
    print(report.trials, report.entries)


# Loops, branches, and changed copies


def add(total: Array, x: Array) -> tuple[Array, Array]:
    return total + x, total


def loops(x: Array) -> None:
    total, partial = spmd.scan(add, np.zeros(3), x)
    assert_type(total, Array)
    assert_type(partial, Array)
    assert_type(spmd.scan(add, np.zeros(3), x, reverse=True, checkpoint="sqrt"), tuple[Array, Array])
    doubled_often = spmd.while_loop(lambda u: u < 100.0, lambda u: 2.0 * u, 1.0)
    print(float(doubled_often))
    assert_type(spmd.fori_loop(0, 3, lambda i, u: u + i, 0.0), Array)
    print(spmd.cond(total.sum() > 0, square, lambda u: u, x).shape)
    (product,) = spmd.hvp(size, (x,), (x,))
    assert_type(product, Array)
    assert_type(spmd.at(x)[0].set(1.0), Array)
    assert_type(spmd.put(x, P("data")).at[0].add(1.0), spmd.PartitionedArray)


def seen(w: Array, x: Array, y: Array, folder: Path) -> None:
    with spmd.ledger() as log:
        loss(w, x, y)
    print(log, log.bytes, [row.operator for row in log.rows()])
    with spmd.profile(folder / "trace.json") as profile:
        loss(w, x, y)
    print(profile.seconds, [row.name for row in profile.rows()])


def main(folder: Path) -> None:
    x, y = np.arange(12.0).reshape(4, 3), np.ones((4, 2))
    with spmd.Mesh(data=2) as mesh:
        print(mesh)
        maps_and_gradients(np.ones((3, 2)), x, y)
        transformations(np.arange(3.0))
        global_arrays(x)
        functions(x)
        print(random_numbers())
        saving(training(x, y), folder)
        linear_operators(x)
        loops(x)
        seen(np.ones((3, 2)), x, y, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
