"""Random bodies with sums, recorded: digests of values and gradients. With any transport.

Arguments: the number of workers, and the seeds; or "parted": processes that replay different programs.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from random_sums import bits, job, loss

import spmd
from spmd import P
from spmd.errors import MismatchError


def lines(n: int, *seeds: int) -> list[str]:
    """For each job a digest; it ends in "differs" where the program and the body give other bits."""
    axes = {"x": 2, "y": n // 2} if n % 2 == 0 else {"x": n}
    found = []
    for seed in seeds:
        alike = bool(seed % 2)
        mapped, arguments, _ = job(seed, axes, alike)
        once, digest, same = spmd.jit(mapped), hashlib.sha256(), True
        pairs = [(mapped, once)]
        if alike:
            pairs.append(tuple(spmd.value_and_grad(loss(f), (1, 2, 3)) for f in (mapped, once)))
        for plain, recorded in pairs:
            for a in arguments:
                wanted, given = bits(plain(*a)), bits(recorded(*a))
                same = same and wanted == given
                digest.update(repr(given).encode())
        packed = once.text().count("packed_psum(")
        found.append(f"{seed}: {digest.hexdigest()[:12]}, {packed} packed{'' if same else ' differs'}")
    return found


def parted() -> str:
    """The error of processes that run different programs, both of which are recorded."""
    with spmd.Mesh(x=2) as mesh:

        @spmd.jit
        @spmd.map(in_specs=(P("x"), None), out_specs=P())
        def f(x, n):
            first = spmd.psum({"a": x[0], "b": x[1:]}, "x")
            return first["a"] + spmd.psum(x[:n], "x").sum()

        x, k = np.arange(8.0), mesh.local_workers[0]
        assert [float(f(x, n)) for n in (2, 3, 2, 3)] == [14, 22, 14, 22]
        try:
            return str(f(x, 2 + k))
        except MismatchError as error:
            return str(error)


if __name__ == "__main__":
    said = [parted()] if sys.argv[1:] == ["parted"] else lines(*map(int, sys.argv[1:]))
    if spmd.is_main():
        print("\n".join(said))
