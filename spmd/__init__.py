"""spmd: functional SPMD arrays. Differentiate through distributed programs in plain NumPy.

import numpy as np, spmd
from spmd import P

with spmd.Mesh(data=2, model=2):
    loss = spmd.map(local_loss, in_specs=(P(), P("data")), out_specs=P())
    value, grads = spmd.value_and_grad(loss)(params, batch)
"""

from typing import TYPE_CHECKING

import spmd.array_api
import spmd.array_functions
import spmd.global_ops.all  # noqa: F401 - and those functions that are run as maps
from spmd.array import PartitionedArray
from spmd.autodiff import (
    Array,
    at,
    float0,
    grad,
    jvp,
    linear_transpose,
    linearize,
    stop_gradient,
    tree,
    value_and_grad,
    vjp,
)
from spmd.axes import axis_index, axis_size, block_indices, block_slices, is_main, worker_index
from spmd.debug import debug
from spmd.grid import Grid
from spmd.info import info
from spmd.layout import Layout, P
from spmd.lazy_imports import lazy_attributes
from spmd.ledger import ledger
from spmd.mapping import map
from spmd.mesh import Mesh, make_mesh
from spmd.operators.reduce import pcast, pmax, pmean, pmin, psum, pvary
from spmd.operators.reductions import max, mean, min, sum
from spmd.operators.repartition import accumulate, repartition
from spmd.operators.root import broadcast, gather, keep, replicate, scatter, sum_reduce
from spmd.operators.varying import block, varying
from spmd.ownership import freeze, thaw
from spmd.placement import from_blocks, from_callback, put
from spmd.progress_bars import progress

if TYPE_CHECKING:
    from spmd import data as data
    from spmd import fft as fft
    from spmd import functions as functions
    from spmd import io as io
    from spmd import linear as linear
    from spmd import numpy as numpy
    from spmd import optim as optim
    from spmd import plot as plot
    from spmd import random as random
    from spmd import scipy as scipy
    from spmd import solvers as solvers
    from spmd import training as training
    from spmd.autodiff import check_grads, check_vjp, checkpoint, custom_jvp, custom_vjp, hessian, hvp, jacfwd, jacrev
    from spmd.creation import arange, eye, full, linspace, ones, zeros
    from spmd.functions import log_softmax, relu, softmax_cross_entropy
    from spmd.global_ops.resharding import reshard
    from spmd.inner_product import inner, norm
    from spmd.io import ShapeDtypeStruct, load, save
    from spmd.jitted_functions import jit
    from spmd.linear import linear_operator
    from spmd.loops import cond, fori_loop, scan, while_loop
    from spmd.operators.all_to_all import all_to_all, pswapaxes, ragged_all_to_all
    from spmd.operators.at_root import at_root
    from spmd.operators.gather import all_gather, pslice, psum_scatter
    from spmd.operators.halo import halo_accumulate, halo_exchange
    from spmd.operators.move import move
    from spmd.operators.permute import ppermute, pshuffle, sendrecv, shift
    from spmd.operators.remote import Future, remote
    from spmd.operators.stencil import stencil
    from spmd.profiling import profile
    from spmd.testing import check_adjoint
    from spmd.window import plan_needs, plan_transposed, plan_window
    from spmd.window_nd import plan_windows

__all__ = [
    "Array",
    "Future",
    "Grid",
    "Layout",
    "Mesh",
    "P",
    "PartitionedArray",
    "ShapeDtypeStruct",
    "accumulate",
    "all_gather",
    "all_to_all",
    "arange",
    "at",
    "at_root",
    "axis_index",
    "axis_size",
    "block",
    "block_indices",
    "block_slices",
    "broadcast",
    "check_adjoint",
    "check_grads",
    "check_vjp",
    "checkpoint",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "debug",
    "eye",
    "float0",
    "fori_loop",
    "freeze",
    "from_blocks",
    "from_callback",
    "full",
    "gather",
    "grad",
    "halo_accumulate",
    "halo_exchange",
    "hessian",
    "hvp",
    "info",
    "inner",
    "is_main",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "keep",
    "ledger",
    "linear_operator",
    "linear_transpose",
    "linearize",
    "linspace",
    "load",
    "log_softmax",
    "make_mesh",
    "map",
    "max",
    "mean",
    "min",
    "move",
    "norm",
    "ones",
    "optim",
    "pcast",
    "plan_needs",
    "plan_transposed",
    "plan_window",
    "plan_windows",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "profile",
    "progress",
    "pshuffle",
    "pslice",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "put",
    "pvary",
    "ragged_all_to_all",
    "relu",
    "remote",
    "repartition",
    "replicate",
    "reshard",
    "save",
    "scan",
    "scatter",
    "sendrecv",
    "shift",
    "softmax_cross_entropy",
    "stencil",
    "stop_gradient",
    "sum",
    "sum_reduce",
    "thaw",
    "tree",
    "value_and_grad",
    "varying",
    "vjp",
    "while_loop",
    "worker_index",
    "zeros",
]

__version__ = "0.1.0"


if not TYPE_CHECKING:  # Type checkers use the imports above, and report misspelt names.
    # Modules with dataclasses are slow to import: import them on first use.
    __getattr__, __dir__ = lazy_attributes(
        __name__,
        {
            "spmd.autodiff": (
                *("check_grads", "check_vjp", "checkpoint", "custom_jvp", "custom_vjp"),
                *("hessian", "hvp", "jacfwd", "jacrev"),
            ),
            "spmd.creation": ("arange", "eye", "full", "linspace", "ones", "zeros"),
            "spmd.functions": ("log_softmax", "relu", "softmax_cross_entropy"),
            "spmd.global_ops.resharding": ("reshard",),
            "spmd.linear": ("linear_operator",),
            "spmd.loops": ("cond", "fori_loop", "scan", "while_loop"),
            "spmd.operators.at_root": ("at_root",),
            "spmd.operators.all_to_all": ("all_to_all", "pswapaxes", "ragged_all_to_all"),
            "spmd.operators.gather": ("all_gather", "pslice", "psum_scatter"),
            "spmd.operators.halo": ("halo_accumulate", "halo_exchange"),
            "spmd.operators.move": ("move",),
            "spmd.operators.permute": ("ppermute", "pshuffle", "sendrecv", "shift"),
            "spmd.operators.remote": ("Future", "remote"),
            "spmd.operators.stencil": ("stencil",),
            "spmd.inner_product": ("inner", "norm"),
            "spmd.io": ("ShapeDtypeStruct", "load", "save"),
            "spmd.jitted_functions": ("jit",),
            "spmd.profiling": ("profile",),
            "spmd.testing": ("check_adjoint",),
            "spmd.window": ("plan_needs", "plan_transposed", "plan_window"),
            "spmd.window_nd": ("plan_windows",),
        },
        parts=(
            *("data", "fft", "functions", "io", "linear", "numpy", "optim", "plot", "random", "scipy", "solvers"),
            "training",
        ),
    )
