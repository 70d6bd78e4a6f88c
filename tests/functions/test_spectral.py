"""`functions.spectral_conv` on arrays that lie anyhow, against the layer of the whole by NumPy."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
from launch import PROGRAMS, each_mpi, launch
from mpi_programs import fourier_layers

import spmd
from functions.layer_cases import FRONTENDS, check_layer, check_tensors, random_layout, random_mesh
from spmd import P, functions
from spmd.functions.spectral import _plan
from spmd.layout import Layout

close = partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11)


def lowest(n: int, m: int) -> list[int]:
    """Where the m lowest frequencies of n points stand."""
    return [*range((m + 1) // 2), *range(n - m // 2, n)]


def reference(x, w):
    """The layer with all modes at once, in plain NumPy."""
    dims, modes = tuple(range(2, x.ndim)), w.shape[2:]
    places = [lowest(n, m) for n, m in zip(x.shape[2:-1], modes[:-1], strict=True)]
    where = np.ix_(*places, range(modes[-1]))
    where = (slice(None), slice(None), *where)
    f = np.fft.rfftn(x, axes=dims)
    full = np.fft.rfftn(0 * x[:, :1], axes=dims) + np.zeros((1, w.shape[1], *[1] * len(dims)))
    full = spmd.at(full)[where].set(np.einsum("ni...,io...->no...", f[where], w))
    return np.fft.irfftn(full, x.shape[2:], axes=dims)


def layout_by(mesh: spmd.Mesh, spec: P | Layout, shape: tuple[int, ...]) -> Layout:
    return spec if isinstance(spec, Layout) else mesh.layout(shape, spec)


def check(seed: int, torch: bool) -> None:
    rng = np.random.default_rng(seed)
    mesh = random_mesh(rng)
    space = tuple(int(n) for n in rng.integers(2, 7, rng.integers(1, 4)))
    modes = tuple(int(rng.integers(1, n + 1)) for n in (*space[:-1], space[-1] // 2 + 1))
    batch, inputs, outputs = (int(n) for n in rng.integers((0, 1, 1), (4, 5, 5)))
    x = rng.standard_normal((batch, inputs, *space))
    w = rng.standard_normal((inputs, outputs, *modes)) + 1j * rng.standard_normal((inputs, outputs, *modes))
    g = rng.standard_normal((batch, outputs, *space))
    spec = random_layout(rng, x.shape, mesh)
    w_spec = random_layout(rng, w.shape, mesh) if rng.random() < 0.7 else P()
    out_spec = random_layout(rng, g.shape, mesh) if rng.random() < 0.5 else None
    out = _plan(layout_by(mesh, spec, x.shape), layout_by(mesh, w_spec, w.shape), None, out_spec).out
    value, pull = spmd.vjp(reference, x, w)
    close(functions.spectral_conv(x, w, modes), value)

    def fun(x, w):
        return functions.spectral_conv(x, w, modes, spec=spec, w_spec=w_spec, out_spec=out_spec)

    def in_global(x, w):
        return functions.spectral_conv(x, w, modes, out_spec=out_spec)

    cotangents = pull(g)
    expected = value, cotangents
    check_layer(fun, expected, (x, w), (spec, w_spec), out, mesh, g, compare=close, in_global=in_global)
    if torch:
        by_torch = value, (cotangents[0], np.conj(cotangents[1]))
        check_tensors(fun, by_torch, (x, w), (spec, w_spec), out, mesh, g, close)


@FRONTENDS
@pytest.mark.parametrize("seed", range(30))
def test_any_layouts(seed, torch):
    check(seed, torch)


@pytest.mark.full
@FRONTENDS
@pytest.mark.parametrize("seed", range(1000, 2000))
def test_many_layouts(seed, torch):
    check(seed, torch)


def example(dtype: str = "f8"):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 6, 7)).astype(dtype)
    w = (rng.standard_normal((4, 5, 3, 2)) + 1j * rng.standard_normal((4, 5, 3, 2))).astype(np.result_type(dtype, "c8"))
    return x, w


def test_only_modes_move():
    """Lines are cropped to their 2 modes before they move, forward and back."""
    _, w = example()
    mesh, spec, w_spec = spmd.Mesh(c=2, x=2), P(None, "c", "x"), P("c")
    x = np.ones((3, 4, 32, 32))

    def body(x, w):
        functions.spectral_conv(x, w, spec=spec, w_spec=w_spec, shape=(3, 4, 32, 32))
        return ()

    placed = spmd.put(x, spec, mesh), spmd.put(w, w_spec, mesh)
    with spmd.ledger() as log:
        mesh.map(body, (spec, w_spec), (), check=False)(*placed)
    sent = sum(record.bytes for record in log.workers.values())
    forward, sums, back = 3 * 4 * 32 * 2 // 2, 4 * 3 * 5 * 3, 2 * 3 * 5 * 32 * 2 // 2
    assert 0 < sent <= 16 * (forward + sums + back)


@pytest.mark.parametrize("w_spec", [P(), P("c"), P(None, "c"), P(None, None, "c")])
def test_each_worker_has_a_part_of_the_products(w_spec):
    """No worker multiplies more than its share of modes and channels."""
    mesh = spmd.Mesh(c=2, x=2)
    plan = _plan(mesh.layout((3, 4, 8, 8), P(None, "c", "x")), mesh.layout((4, 6, 4, 4), w_spec), None, None)
    per_worker = [np.prod(plan.modes.block_shape(w)) * plan.weights.block_shape(w)[1] for w in range(mesh.size)]
    assert max(per_worker) <= 3 * 4 * 6 * 16 // 2
    assert sum(per_worker) >= 3 * 4 * 6 * 16


def test_sums_over_channels_are_scattered_where_the_result_is_split_by_them():
    x, w = example()
    mesh = spmd.Mesh(c=2)
    spec, w_spec = P(None, "c"), P("c")

    def layer(x, w, out_spec):
        return functions.spectral_conv(x, w, spec=spec, w_spec=w_spec, out_spec=out_spec)

    operators = {}
    for out_spec in (P(), spec):
        with spmd.ledger() as log:
            y = mesh.map(lambda x, w: layer(x, w, out_spec), (spec, w_spec), out_spec)(x, w)  # noqa: B023
        close(y.numpy(), reference(x, w))
        operators[out_spec] = set(log.first.operators)
    assert any("Scatter" in name for name in operators[spec])
    assert not any("Scatter" in name for name in operators[P()])


@FRONTENDS
def test_single_precision(torch):
    x, w = example("f4")
    mesh, specs = spmd.Mesh(x=2, c=2), (P(None, "c", "x"), P("c"))
    wanted = reference(x.astype(float), w.astype(complex))
    fun = lambda x, w: functions.spectral_conv(x, w, spec=specs[0], w_spec=specs[1])
    if torch:
        import torch as library

        from spmd.bridge import torch as spt

        y = spt.map(fun, in_specs=specs, out_specs=P(None, None, "x"), mesh=mesh)(*map(library.tensor, (x, w))).numpy()
    else:
        y = mesh.map(fun, specs, P(None, None, "x"))(x, w).numpy()
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5 * abs(wanted).max())


def test_second_derivatives_and_jit():
    x, w = example()
    mesh, specs = spmd.Mesh(x=2, c=2), (P(None, "c", "x"), P(None, "c"))
    out = P(None, "c", "x")
    mapped = mesh.map(lambda x, w: functions.spectral_conv(x, w, spec=specs[0], w_spec=specs[1]), specs, out)
    energy = lambda f: lambda x, w: (f(x, w) ** 2).sum()
    placed = spmd.put(x, specs[0], mesh), spmd.put(w, specs[1], mesh)
    for f, have in zip(
        spmd.grad(energy(reference), (0, 1))(x, w), spmd.grad(energy(spmd.jit(mapped)), (0, 1))(*placed), strict=True
    ):
        close(have.numpy(), f)
    _, along = spmd.jvp(spmd.grad(energy(reference)), (x, w), (x, w))
    _, have = spmd.jvp(spmd.grad(energy(mapped)), placed, placed)
    close(have.numpy(), along)


@each_mpi
def test_processes_give_the_bits_of_virtual_workers(python):
    ended = launch(PROGRAMS / "fourier_layers.py", python=python, timeout=120)
    assert ended.returncode == 0, str(ended)
    assert json.loads(ended.stdout) == fourier_layers.results(transport="local", scheduler="threads")
