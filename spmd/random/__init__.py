"""Random numbers: global arrays that are the same on every mesh, and streams for bodies.

    key = spmd.random.key(0)
    keys = spmd.random.split(key, 3)
    w = spmd.random.normal(keys[0], (1000, 300), np.float32, spec=P(None, "model"))

As in `jax.random`, a key says what is drawn, and each use takes a key of its own. Entry i of an array depends on the
key and on its place i in the whole array, and on nothing else. So with a spec every worker makes its own block, and the
whole is the same on every mesh, by every layout, scheduler and transport, and on every device, to the last bit.

shape, spec, mesh: the shape is that of the whole array. Without a spec it is made whole. With one (or a `Layout`), a
body gets its worker's block, Varying over the axes that split it and Invariant along the others; outside of bodies
they give a `PartitionedArray` on the mesh, of which each process makes its own blocks. `like(x, spec)` gives the layout
of which a block of a body is part. A key that differs between workers gives numbers that differ between them.

The numbers are those of Philox4x32-10 (`spmd.kernels.reference.philox`).
"""

from typing import TYPE_CHECKING, Any

from spmd.lazy_imports import absent
from spmd.random.distributions import bernoulli, bits, exponential, gumbel, normal, randint, truncated_normal, uniform
from spmd.random.generator import default_rng
from spmd.random.keys import fold_in, key, split
from spmd.random.layouts import like
from spmd.random.sampling import categorical, choice, permutation
from spmd.tracebacks import api_boundary

__all__ = [
    "bernoulli",
    "bits",
    "categorical",
    "choice",
    "default_rng",
    "exponential",
    "fold_in",
    "gumbel",
    "key",
    "like",
    "normal",
    "permutation",
    "randint",
    "split",
    "truncated_normal",
    "uniform",
]

if not TYPE_CHECKING:  # Type checkers know what is here, and so what is misspelt.

    @api_boundary
    def __getattr__(name: str) -> Any:
        raise absent(__name__, name)
