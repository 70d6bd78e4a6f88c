"""`spt.nn`: the layers of `torch.nn` on arrays that are split, by the same names and arguments, with specs.

net = torch.nn.Sequential(
    spt.nn.Linear(16, 64, w_spec=P("model")), torch.nn.GELU(), spt.nn.Linear(64, 16, w_spec=P(None, "model"))
)

Modules without parameters that work on each entry alone, such as `torch.nn.GELU`, and containers are torch's own.
"""

from spmd.bridge.torch.nn.dropouts import (
    AlphaDropout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    FeatureAlphaDropout,
)
from spmd.bridge.torch.nn.embeddings import Embedding
from spmd.bridge.torch.nn.layer import Layer
from spmd.bridge.torch.nn.linear import LazyLinear, Linear
from spmd.bridge.torch.nn.losses import (
    BCELoss,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    PoissonNLLLoss,
    SmoothL1Loss,
)
from spmd.bridge.torch.nn.movements import (
    AllGather,
    AllSumReduce,
    Broadcast,
    HaloExchange,
    ReduceScatter,
    Repartition,
    SumReduce,
)

__all__ = [
    "AllGather",
    "AllSumReduce",
    "AlphaDropout",
    "BCELoss",
    "BCEWithLogitsLoss",
    "Broadcast",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "Embedding",
    "FeatureAlphaDropout",
    "HaloExchange",
    "HuberLoss",
    "KLDivLoss",
    "L1Loss",
    "Layer",
    "LazyLinear",
    "Linear",
    "MSELoss",
    "NLLLoss",
    "PoissonNLLLoss",
    "ReduceScatter",
    "Repartition",
    "SmoothL1Loss",
    "SumReduce",
]
