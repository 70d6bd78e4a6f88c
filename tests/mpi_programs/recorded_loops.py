"""Recorded loops and branches at random: digests of values and gradients. With any transport.

Arguments: the number of workers, and the seeds."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loops.random_recorded import bits, job

import spmd
from spmd.kernels import jit


def lines(n: int, *seeds: int) -> list[str]:
    """For each job a digest; it ends in "differs" where programs and Python give other bits."""
    axes = {"x": 2, "y": n // 2} if n % 2 == 0 else {"x": n}
    found = []
    for seed in seeds:
        f, arguments, differentiated, _ = job(seed, "auto", whole=False, axes=axes)
        once, digest, same = spmd.jit(spmd.value_and_grad(f, differentiated)), hashlib.sha256(), True
        for a in arguments:
            wanted, given = bits(spmd.value_and_grad(f, differentiated)(*a)), bits(once(*a))
            same = same and wanted == given
            digest.update(repr(given).encode())
        found.append(f"{seed}: {digest.hexdigest()[:12]}{'' if same else ' differs'}")
    return found


if __name__ == "__main__":
    with jit.off():  # not in every environment is there numba
        said = lines(*map(int, sys.argv[1:]))
    if spmd.is_main():
        print("\n".join(said))
