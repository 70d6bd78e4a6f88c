"""Random numbers: global arrays that are the same on every mesh, and generators for bodies.

    keys = spmd.random.split(spmd.random.key(0), 3)
    w = spmd.random.normal(keys[0], (1000, 300), np.float32, spec=P(None, "model"))

As in `jax.random`, a key determines the numbers, and each use takes a new key. Entry i of an array depends only on the
key and on the position i in the whole array. So every worker can make its own block, and the whole array is the same to
the last bit for every mesh, layout, scheduler, transport and device.

shape, spec, mesh: the shape is that of the whole array. Without a spec the whole array is made. With a spec or a
`Layout` a body gets its worker's block, Varying over the axes that split it and Invariant along the others. Outside of
bodies the result is a `PartitionedArray` on the mesh, of which each process makes its own blocks. `like=x`, in place of
spec and mesh, lays it out as a global array x (see `spmd.zeros`); without a shape it is that of x. In bodies
`like(x, spec)` is the layout of the global array that a block belongs to. Keys that differ between workers give
different numbers.

The generator is Philox4x32-10 (`spmd.kernels.reference.philox`).
"""

from typing import TYPE_CHECKING

from spmd.lazy_imports import lazy_attributes
from spmd.random.distributions import bernoulli, bits, exponential, gumbel, normal, randint, truncated_normal, uniform
from spmd.random.generator import default_rng
from spmd.random.keys import fold_in, key, split
from spmd.random.layouts import like
from spmd.random.sampling import categorical, choice, permutation

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

if not TYPE_CHECKING:  # Type checkers report misspelt names themselves.
    __getattr__, __dir__ = lazy_attributes(__name__, {})
