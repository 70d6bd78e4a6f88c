"""The public names, and the page of the reference that each of them is on."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import sys
from typing import Any, NamedTuple

__all__ = ["PAGES", "SPMD_GROUPS", "Page", "docstring_of", "names_of"]


class Page(NamedTuple):
    """A page of the reference. module: whose names it shows. alias: the name of that module in programs."""

    file: str
    title: str
    module: str
    alias: str
    introduction: str
    torch: bool = False


SPMD_GROUPS = {
    "Meshes, specs and layouts": "Mesh make_mesh P Layout Grid",
    "Maps and bodies": """map axis_index axis_size worker_index is_main block block_indices block_slices varying freeze
        thaw""",
    "Global arrays": """PartitionedArray put from_blocks from_callback reshard zeros ones full eye arange linspace inner
        norm""",
    "Sums and other reductions": "psum pmean pmax pmin sum mean max min pvary pcast",
    "Gathering, scattering and permuting": """all_gather pslice psum_scatter all_to_all pswapaxes ragged_all_to_all
        ppermute pshuffle sendrecv shift""",
    "Roots": "broadcast sum_reduce gather scatter replicate keep move at_root remote Future",
    "Halos and layouts": """halo_exchange halo_accumulate stencil repartition accumulate plan_window plan_windows
        plan_needs plan_transposed""",
    "Derivatives": """Array grad value_and_grad vjp jvp jacrev jacfwd hessian hvp linearize linear_transpose
        linear_operator checkpoint custom_vjp custom_jvp stop_gradient at float0 tree""",
    "Programs and loops": "jit scan fori_loop cond while_loop",
    "Functions for models": "relu log_softmax softmax_cross_entropy optim",
    "Saving": "save load ShapeDtypeStruct",
    "Checking and seeing": "check_adjoint check_grads check_vjp debug ledger profile info progress",
}
"""The names of `spmd` itself, each in one group."""

PAGES = (
    Page("functions", "spmd.functions", "spmd.functions", "spmd.functions", "Layers and functions of models."),
    Page("fft", "spmd.fft", "spmd.fft", "spmd.fft", "Fourier transforms of arrays that are split in any way."),
    Page("linear", "spmd.linear", "spmd.linear", "spmd.linear", "Linear operators, as matrices are used."),
    Page("solvers", "spmd.solvers", "spmd.solvers", "spmd.solvers", "Solvers of linear systems."),
    Page("optim", "spmd.optim", "spmd.optim", "spmd.optim", "Optimisers, as pure functions."),
    Page("training", "spmd.training", "spmd.training", "spmd.training", "Training with sharded parameters and states."),
    Page("data", "spmd.data", "spmd.data", "spmd.data", "Minibatches: which samples a worker takes, read ahead."),
    Page("random", "spmd.random", "spmd.random", "spmd.random", "Random numbers that are the same on every mesh."),
    Page("io", "spmd.io", "spmd.io", "spmd.io", "Checkpoints and fields in files."),
    Page("plot", "spmd.plot", "spmd.plot", "spmd.plot", "Pictures by Matplotlib: `pip install spmd[plot]`."),
    Page("testing", "spmd.testing", "spmd.testing", "spmd.testing", "Tests of operators and of their adjoints."),
    Page("errors", "spmd.errors", "spmd.errors", "spmd.errors", "What is raised, and when."),
    Page("torch", "spmd.bridge.torch", "spmd.bridge.torch", "spt", "The bridge to PyTorch.", torch=True),
    Page(
        "torch_functions",
        "spmd.bridge.torch.functions",
        "spmd.bridge.torch.functions",
        "spt.functions",
        "The functions of `spmd.functions` for tensors.",
        torch=True,
    ),
    Page(
        "torch_nn",
        "spmd.bridge.torch.nn",
        "spmd.bridge.torch.nn",
        "spt.nn",
        "Modules whose arrays are split.",
        torch=True,
    ),
)


def names_of(module: str) -> dict[str, Any]:
    """The public names of a module and what they stand for; modules, which have pages of their own, are left out."""
    found = importlib.import_module(module)
    names = {name: getattr(found, name) for name in found.__all__}
    return {name: value for name, value in names.items() if type(value).__name__ != "module"}


def docstring_of(name: str, thing: Any) -> str:
    """The docstring of a public name: that of a function or class, or the string below the assignment of a value."""
    if callable(thing) or isinstance(thing, property):
        return inspect.cleandoc(thing.__doc__ or "")
    for module in [m for key, m in sys.modules.items() if key.startswith("spmd.") and vars(m).get(name) is thing]:
        body = ast.parse(inspect.getsource(module)).body
        for statement, below in itertools.pairwise(body):
            if not isinstance(statement, ast.Assign) or not isinstance(below, ast.Expr):
                continue
            if [ast.unparse(target) for target in statement.targets] == [name] and isinstance(
                below.value, ast.Constant
            ):
                return inspect.cleandoc(str(below.value.value))
    return ""
