"""Loops and branches: `scan`, `fori_loop`, `while_loop`, `cond`, as in `jax.lax`.

Without `spmd.jit` they are Python's own loops and branches. Under `spmd.jit` a step is recorded once, forward and back.
"""

from spmd.loops.branches import cond, while_loop
from spmd.loops.scans import fori_loop, scan

__all__ = ["cond", "fori_loop", "scan", "while_loop"]
