"""What the solvers find, as digests of bits. The same file runs with any transport."""

from __future__ import annotations

import hashlib
import json

import numpy as np

import spmd
from spmd import P
from spmd.linear import identity, linear_operator
from spmd.solvers import cg, lsqr


def stencil(u):
    left = spmd.shift(u[:, -1:], "x", 1, wrap=False)
    right = spmd.shift(u[:, :1], "x", -1, wrap=False)
    wide = np.concatenate([left, u, right], axis=1)
    return 2.1 * wide[:, 1:-1] - wide[:, :-2] - wide[:, 2:]


def digest(*arrays) -> str:
    return hashlib.sha256(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()[:16]


def results(**options) -> dict[str, list]:
    """Of each solver its iterations, its residual and the bits of its solution, of even and of uneven systems."""
    found = {}
    with spmd.Mesh(x=4, **options):
        for n in (8, 11):
            rng = np.random.default_rng(n)
            b, theta = rng.normal(size=(2, n)), 1 + rng.random((2, n))
            a = linear_operator(stencil, P(None, "x"), P(None, "x"), shape=(2, n))
            solved = cg(a, b, rtol=1e-9)
            assert np.allclose((a @ solved.x).numpy(), b, atol=1e-6)
            found[f"cg {n}"] = [solved.iterations, solved.residual, digest(solved.x.numpy())]
            least = lsqr(a @ a + 0.5 * identity(a.domain), b, damp=0.1)
            found[f"lsqr {n}"] = [least.iterations, least.residual, least.condition, digest(least.x.numpy())]
            uneven = spmd.put(b, P(None, "x"))
            found[f"adjoint {n}"] = [digest((a.H @ (2 * a @ uneven)).numpy()), digest((a.T @ b).numpy())]

            def loss(theta, b, n=n):
                op = linear_operator(
                    lambda theta, u: theta * u + stencil(u),
                    P(None, "x"),
                    P(None, "x"),
                    shape=(2, n),
                    params=theta,
                    param_specs=P(None, "x"),
                )
                return np.sum(cg(op, b, rtol=1e-9).x ** 2)

            found[f"gradient {n}"] = [digest(*spmd.grad(loss, (0, 1))(theta, b))]
    return found


if __name__ == "__main__":
    shown = json.dumps(results())
    if spmd.is_main():
        print(shown, flush=True)
