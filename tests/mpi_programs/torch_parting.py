"""Graphs of workers that part ways: `torch_parting.py [CASE ...] [check]` prints what became of backward.

Cases that meet print gradients; those that cannot print the error. Without a name every case is run.
"""

import contextlib
import sys

import torch

import spmd
from spmd import P
from spmd.bridge import torch as spt
from spmd.errors import MismatchError

N = 2
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def me() -> int:
    return spt.worker_index("x")


def leaf(x, follow=True):
    return x.detach().clone().requires_grad_(follow)


# Those that meet: requires_grad is agreed upon, and tie joins what parted


@case
def met_requires_grad_differs(x):
    """Only worker 0's block is differentiated, but both send cotangents."""
    x = leaf(x, me() == 0)
    y = spt.all_gather(x, "x", tiled=True)
    assert y.requires_grad
    (y * y).sum().backward()
    return x.grad if me() == 0 else torch.zeros_like(x)


@case
def met_requires_grad_differs_midway(x):
    x = leaf(x)
    z = spt.shift(x * x if me() == 1 else (x * x).detach(), "x", 1)
    spt.shift(z * 3, "x", 1).sum().backward()
    return x.grad if x.grad is not None else torch.zeros_like(x)


@case
def met_requires_grad_of_one_chain(x):
    x = leaf(x, me() == 1)
    y = spt.halo_exchange(spt.shift(x, "x", 1), P("x"), 1, "periodic")
    spt.psum((y * y).sum(), "x").backward()
    return x.grad if x.grad is not None else torch.zeros_like(x)


@case
def met_tied_loss_on_one(x):
    x = leaf(x)
    y = spt.all_gather(x, "x", tiled=True)
    loss = (y * y).sum() if me() == 0 else torch.zeros((), dtype=x.dtype)
    spt.tie(loss, y).backward()
    return x.grad


@case
def met_tied_output_unused(x):
    x = leaf(x)
    y, z = spt.all_gather(x, "x", tiled=True), spt.shift(x, "x", 1)
    loss = (y * y).sum() + (z.sum() if me() == 0 else 0)
    spt.tie(loss, z).backward()
    return x.grad


@case
def met_tied_grad_of_unused(x):
    x = leaf(x)
    y = spt.shift(x, "x", 1)
    loss = y.sum() if me() == 0 else (x * 0).sum()
    (g,) = torch.autograd.grad(spt.tie(loss, y), x, allow_unused=True)
    return g


@case
def met_tied_infinities(x):
    """The cotangent of an output that is tied is zero, not zero times infinity."""
    x = leaf(x)
    y = spt.shift(x, "x", 1) + torch.inf
    spt.tie(x.sum(), y).backward()
    return x.grad


@case
def met_sums_in_another_order(x):
    x = leaf(x)
    y, z = spt.all_gather(x, "x", tiled=True), spt.shift(x, "x", 1)
    a, b = (y * y).sum(), (z * 3).sum()
    (a + b if me() == 0 else b + a).backward()
    return x.grad


@case
def met_grad_with_allow_unused(x):
    """Both ask for an input that nothing needs: None, and nobody waits."""
    x, u = leaf(x), leaf(x)
    loss = spt.psum((spt.shift(x, "x", 1) ** 2).sum(), "x")
    g, h = torch.autograd.grad(loss, (x, u), allow_unused=True)
    assert h is None
    return g


# Those that cannot


@case
def parted_loss_on_one(x):
    x = leaf(x)
    y = spt.all_gather(x, "x", tiled=True)
    if me() == 0:
        (y * y).sum().backward()
    return x.detach()


@case
def parted_output_unused(x):
    x = leaf(x)
    y, z = spt.all_gather(x, "x", tiled=True), spt.shift(x, "x", 1)
    ((y * y).sum() + (z.sum() if me() == 0 else 0)).backward()
    return x.grad


@case
def parted_output_unused_before_a_sum(x):
    """One meets the other's next collective instead."""
    x = leaf(x)
    y = spt.shift(x, "x", 1)
    (x.sum() + (y.sum() if me() == 1 else 0)).backward()
    return spt.all_gather(x.detach(), "x", tiled=True)


@case
def parted_grad_of_unused(x):
    x = leaf(x)
    y = spt.shift(x, "x", 1)
    loss = y.sum() if me() == 0 else (x * 2).sum()
    (g,) = torch.autograd.grad(loss, x, allow_unused=True)
    return g


@case
def parted_no_grad_on_one(x):
    x = leaf(x)
    with torch.no_grad() if me() == 1 else contextlib.nullcontext():
        y = spt.shift(x, "x", 1)
    if y.requires_grad:
        y.sum().backward()
    return x.detach()


@case
def parted_backward_twice(x):
    x = leaf(x)
    y = spt.shift(x, "x", 1).sum()
    y.backward(retain_graph=True)
    if me() == 0:
        y.backward()
    return x.detach()


@case
def parted_order(x):
    x = leaf(x)
    if me() == 0:
        y, z = spt.shift(x, "x", 1), spt.all_gather(x, "x", tiled=True)
    else:
        z, y = spt.all_gather(x, "x", tiled=True), spt.shift(x, "x", 1)
    (y.sum() + z.sum()).backward()
    return x.grad


def run(name: str, check: bool, mesh: spmd.Mesh) -> str:
    x = torch.arange(1.0, 7.0, dtype=torch.float64)

    def body(x):
        return spt.varying(spt.block(CASES[name](x)), "x")

    try:
        return f"{name}: {spt.map(body, P('x'), P('x'), mesh=mesh, check=check)(x).tolist()}"
    except MismatchError as error:
        text = " ".join(str(error).split())
        named = [f"worker {k}" for k in range(N) if f"worker {k}" in text]
        return f"{name}: {type(error).__name__} of {' and '.join(named)}"


if __name__ == "__main__":
    mesh = spmd.Mesh(x=N)
    check = "check" in sys.argv[1:]
    for name in [name for name in CASES if name in sys.argv[1:]] or CASES:
        said = run(name, check, mesh)
        if mesh.transport.name == "local" or spmd.is_main():
            print(said, flush=True)
