"""spmd for PyTorch: the operators of `spmd` as torch functions with the same adjoints.

from spmd.bridge import torch as spt

Every function of bodies works on tensors: `spt.psum` is `spmd.psum`. `spt.map` runs bodies in torch on a mesh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spmd.errors import message

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        message(
            "from spmd.bridge import torch",
            got=f"no torch ({error})",
            need="PyTorch 2.4 or later",
            mend='pip install "spmd[torch]"; of the CPU alone: pip install torch --index-url '
            "https://download.pytorch.org/whl/cpu",
        )
    ) from error

if TYPE_CHECKING:  # Before what has the name of one of spmd's and takes its place.
    from spmd import *  # noqa: F403

import spmd
from spmd.bridge.torch import functions, in_place_checks, loader_states, nn, transforms, user_functions  # noqa: F401
from spmd.bridge.torch.collate import Collate
from spmd.bridge.torch.compiled import compilable, operator
from spmd.bridge.torch.data_parallel import DataParallel, data_parallel
from spmd.bridge.torch.dropout import dropout
from spmd.bridge.torch.global_tensors import GlobalTensor
from spmd.bridge.torch.mapping import map
from spmd.bridge.torch.partitioned.parameter import Parameter
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor
from spmd.bridge.torch.pipelines.pipeline import Pipeline, pipeline
from spmd.bridge.torch.pipelines.splitting import split_stages
from spmd.bridge.torch.plans import (
    PlanReport,
    Style,
    column,
    distribute_module,
    heads,
    parallelize,
    plan_report,
    row,
    sequence,
    spatial,
    vocab,
    whole,
)
from spmd.bridge.torch.rng import drawing
from spmd.bridge.torch.sampler import Batches, DistributedSampler
from spmd.bridge.torch.scaler import GradScaler
from spmd.bridge.torch.shard_optimizer import shard_optimizer
from spmd.bridge.torch.sharded import ShardedModule, clip_grad_norm_, grad_norm, state_dict
from spmd.bridge.torch.sharded_tensors import ShardedTensor, put
from spmd.bridge.torch.sharding import shard_parameters
from spmd.bridge.torch.tensor import Tensor
from spmd.bridge.torch.tie import tie
from spmd.lazy_imports import missing_name_error
from spmd.tracebacks import api_boundary

__all__ = [
    "Batches",
    "Collate",
    "DataParallel",
    "DistributedSampler",
    "GlobalTensor",
    "GradScaler",
    "Parameter",
    "PartitionedTensor",
    "Pipeline",
    "PlanReport",
    "ShardedModule",
    "ShardedTensor",
    "Style",
    "Tensor",
    "clip_grad_norm_",
    "column",
    "data_parallel",
    "distribute_module",
    "drawing",
    "dropout",
    "functions",
    "grad_norm",
    "heads",
    "map",
    "nn",
    "operator",
    "parallelize",
    "pipeline",
    "plan_report",
    "put",
    "row",
    "sequence",
    "shard_optimizer",
    "shard_parameters",
    "spatial",
    "split_stages",
    "state_dict",
    "tie",
    "vocab",
    "whole",
]
if TYPE_CHECKING:
    __all__ += spmd.__all__


def _shared() -> list[str]:
    """What is spmd's and serves here too: all but its own differentiation and its functions of NumPy's arrays."""
    own = ("spmd.autodiff", "spmd.functions", "spmd.optim")
    return [n for n in spmd.__all__ if not getattr(getattr(spmd, n), "__module__", "").startswith(own)]


@api_boundary
def __getattr__(name: str) -> Any:
    """The functions of bodies, which take tensors as they take arrays."""
    if name not in spmd.__all__ or name not in _shared():
        raise missing_name_error(__name__, name)
    value = getattr(spmd, name)
    if getattr(value, "__module__", "").startswith("spmd.operators.") and not isinstance(value, type):
        value = compilable(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_shared()})
