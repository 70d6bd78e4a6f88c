"""What others call values, keywords and names: each is an error that names ours, and what it names is there."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re

import numpy as np
import pytest

import spmd
import spmd.functions as F
from spmd import P, spellings
from spmd.errors import MissingMethodError

TORCH = importlib.util.find_spec("torch") is not None
NAMES = [(m, n) for m, names in spellings.INSTEAD.items() for n in names if TORCH or m != "spmd.bridge.torch"]


def resolved(text: str) -> list[str]:
    """The names in a mend that are not there."""
    missing = []
    for path in re.findall(r"\b(?:spmd|spt|np)(?:\.[A-Za-z_]\w*)+", text):
        first, *rest = path.split(".")
        value = {"spmd": spmd, "np": np}.get(first) or importlib.import_module("spmd.bridge.torch")
        for name in rest:
            value = getattr(value, name, None)
        if value is None:
            missing.append(path)
    return missing


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_name_of_another_library_names_ours(module, name):
    where = importlib.import_module(module)
    assert not hasattr(where, name)
    with pytest.raises(AttributeError) as caught:
        getattr(where, name)
    assert isinstance(caught.value, MissingMethodError)
    text = str(caught.value)
    assert text.startswith(f"{module}.{name}\n")
    assert spellings.INSTEAD[module][name] in text
    if TORCH or "spt" not in text:
        assert not resolved(text.splitlines()[-1])


@pytest.mark.parametrize(
    ("module", "name", "mend"),
    [
        ("spmd", "vmap", "spmd.map splits"),
        ("spmd", "tril", "np.tril"),
        ("spmd.functions", "einsum", "np.einsum"),
        ("spmd.random", "gamma", "default_rng(seed, axis_name).gamma"),
        ("spmd.random", "poisson", "default_rng(seed, axis_name).poisson"),
        pytest.param("spmd.bridge.torch", "vmap", "torch.func.vmap", marks=pytest.mark.torch),
        pytest.param("spmd.bridge.torch", "all_reduce", "spt.psum", marks=pytest.mark.torch),
        pytest.param("spmd.bridge.torch", "relu", "torch.nn.functional.relu", marks=pytest.mark.torch),
    ],
)
def test_whole_families_of_names_name_ours(module, name, mend):
    with pytest.raises(AttributeError, match=re.escape(mend)):
        getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", ["spmd", "spmd.functions", "spmd.random", "spmd.optim", "spmd.solvers"])
def test_a_name_of_nobody_is_a_plain_error(module):
    where = importlib.import_module(module)
    for name in ("nonsense", "_private", "__path_of__"):
        assert not hasattr(where, name)
        with pytest.raises(AttributeError, match=f"module '{module}' has no attribute '{name}'"):
            getattr(where, name)


KEYWORDS = {
    "lsqr(iter_lim)": (lambda: spmd.solvers.lsqr(None, None, iter_lim=3), "spmd.solvers.lsqr", "maxiter="),
    "cg(tol)": (lambda: spmd.solvers.cg(None, None, tol=3), "spmd.solvers.cg", "rtol="),
    "cg(max_iter)": (lambda: spmd.solvers.cg(None, None, max_iter=3), "spmd.solvers.cg", "maxiter="),
    "adam(lr)": (lambda: spmd.optim.adam(lr=1e-3), "spmd.optim.adam", "learning_rate="),
    "adam(beta1)": (lambda: spmd.optim.adam(beta1=0.9), "spmd.optim.adam", "b1="),
    "normal(size)": (lambda: spmd.random.normal(None, size=3), "spmd.random.normal", "shape="),
    "map(in_axes)": (lambda: spmd.map(abs, in_axes=0), "spmd.map", "in_specs="),
    "map(check_rep)": (lambda: spmd.map(abs, P(), P(), check_rep=False), "spmd.map", "check="),
    "grad(argnum)": (lambda: spmd.grad(abs, argnum=0), "spmd.grad", "argnums="),
    "jit(static_argnums)": (lambda: spmd.jit(None, static_argnums=0), "spmd.jit", "leave it out"),
    "max_pool(kernel_size)": (lambda: F.max_pool(None, kernel_size=2), "spmd.functions.max_pool", "window="),
    "layer_norm(dim)": (lambda: F.layer_norm(None, dim=0), "spmd.functions.layer_norm", "ndim="),
    "softmax(dim)": (lambda: F.softmax(None, dim=0), "spmd.functions.softmax", "axis="),
    "a misspelt one": (lambda: F.softmax(None, axs=0), "spmd.functions.softmax", "axis="),
}


@pytest.mark.parametrize("case", KEYWORDS)
def test_a_keyword_of_another_library_names_ours(case):
    call, where, mend = KEYWORDS[case]
    with pytest.raises(TypeError) as caught:
        call()
    first, *_, last = str(caught.value).splitlines()
    assert first.startswith(f"{where}: argument ")
    assert mend in last


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
def test_a_keyword_of_a_collective_names_ours(scheduler):
    mesh = spmd.Mesh(x=2, scheduler=scheduler)
    body = mesh.map(lambda x: spmd.psum(x, "x", axis_index_groups=[[0], [1]]), P("x"), P())
    with pytest.raises(TypeError, match="two axes of the mesh"):
        body(np.random.default_rng(0).standard_normal(4))

    def psum(x):
        return x

    with pytest.raises(TypeError, match=r"psum\(\) got an unexpected keyword argument"):  # the user's own function
        mesh.map(lambda x: psum(x, axis_index_groups=1), P("x"), P("x"))(np.ones(4))


def test_an_error_of_the_users_own_function_is_left_as_it_is():
    def f(x, *, other=0):
        return x

    with pytest.raises(TypeError, match=r"f\(\) got an unexpected keyword argument 'tol'"):
        spmd.grad(lambda x: f(x, tol=1))(1.0)


def test_every_value_of_an_option_has_its_spellings():
    for ours, others in spellings.VALUES.items():
        for other in others.split():
            assert spellings.closest(other, ["something else", ours]) == ours
            assert spellings.closest(other.upper(), [ours, "something else"]) == ours


def told(call) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    return str(caught.value).splitlines()[-1]


BOUNDARIES = {"wrap": "periodic", "circular": "periodic", "constant": "zero", "zeros": "zero", "nearest": "edge"}
BOUNDARIES |= {"replicate": "edge", "mirror": "reflect", "reflection": "reflect", "symmetric": "edge", "valid": "none"}


@pytest.mark.parametrize("scheduler", ["lockstep", "threads"])
@pytest.mark.parametrize("given", BOUNDARIES)
def test_a_boundary_of_another_library_names_ours(given, scheduler):
    x = np.random.default_rng(0).standard_normal((4, 3))
    mesh = spmd.Mesh(x=2, scheduler=scheduler)
    ours = BOUNDARIES[given]

    def of(f):
        return told(lambda: mesh.map(f, P("x"), P("x"))(x))

    assert f'"{ours}"' in of(lambda b: spmd.halo_exchange(b, P("x"), 1, given))
    assert f'"{ours}"' in of(lambda b: spmd.halo_exchange(b, P("x"), 1, ("none", given)))
    assert f'"{ours}"' in of(lambda b: spmd.stencil(b, P("x"), [(0, 0)], [1.0], boundary=given))
    mesh.map(lambda b: spmd.halo_exchange(b, P("x"), 1, ours), P("x"), P("x"))(x)  # which works


CHOICES = {
    "device": (lambda: spmd.Mesh(x=2, device="gpu"), 'device="cuda"'),
    "scheduler": (lambda: spmd.Mesh(x=2, scheduler="sync"), 'scheduler="lockstep"'),
    "scheduler, threads": (lambda: spmd.Mesh(x=2, scheduler="threading"), 'scheduler="threads"'),
    "transport": (lambda: spmd.Mesh(x=2, transport="gloo"), 'transport="torch"'),
    "transport, mpi": (lambda: spmd.Mesh(x=2, transport="mpi4py"), 'transport="mpi"'),
    "kind": (lambda: F.bias_act(np.ones(3), 1.0, "swish"), 'kind="silu"'),
    "method": (lambda: F.resize(np.ones((1, 1, 3)), (1, 1, 4), "bilinear"), "'linear'"),
    "approximate": (lambda: F.gelu(np.ones(3), "approximate"), 'approximate="tanh"'),
    "reduction": (lambda: F.softmax_cross_entropy(np.ones((2, 3)), [0, 1], reduction="batchmean"), '"mean"'),
    "copies": (lambda: spmd.Layout((3,), P(), {"x": 2}, copies="replicated"), 'copies="invariant"'),
}


@pytest.mark.parametrize("case", CHOICES)
def test_a_value_of_another_library_names_ours(case):
    call, mend = CHOICES[case]
    assert mend in told(call)


def test_public_functions_are_boundaries():
    """Those of the modules whose names users write, but for collectives, which say so by the map around them."""
    for module in ("spmd.random", "spmd.optim", "spmd.solvers", "spmd.functions"):
        where = importlib.import_module(module)
        for name in where.__all__:
            f = getattr(where, name)
            if inspect.isfunction(f) and f.__name__ == name:
                assert hasattr(f, "__wrapped__"), f"{module}.{name} is no api_boundary"
