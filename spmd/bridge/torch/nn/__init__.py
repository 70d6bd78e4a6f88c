"""`spt.nn`: the layers of `torch.nn` on arrays that are split, by the same names and arguments, with specs.

net = torch.nn.Sequential(
    spt.nn.Linear(16, 64, w_spec=P("model")), torch.nn.GELU(), spt.nn.Linear(64, 16, w_spec=P(None, "model"))
)

Modules without parameters that work on each entry alone, such as `torch.nn.GELU`, and containers are torch's own.
"""

from spmd.bridge.torch.nn.attention import MultiheadAttention
from spmd.bridge.torch.nn.dropouts import (
    AlphaDropout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    FeatureAlphaDropout,
)
from spmd.bridge.torch.nn.embeddings import Embedding
from spmd.bridge.torch.nn.fourier import FFT, IFFT, IRFFT, RFFT, SpectralConv1d, SpectralConv2d, SpectralConv3d
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
from spmd.bridge.torch.nn.norms import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    LazyBatchNorm1d,
    LazyBatchNorm2d,
    LazyBatchNorm3d,
    RMSNorm,
    SyncBatchNorm,
)
from spmd.bridge.torch.nn.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell

__all__ = [
    "FFT",
    "GRU",
    "IFFT",
    "IRFFT",
    "LSTM",
    "RFFT",
    "RNN",
    "AllGather",
    "AllSumReduce",
    "AlphaDropout",
    "BCELoss",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Broadcast",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "Embedding",
    "FeatureAlphaDropout",
    "GRUCell",
    "GroupNorm",
    "HaloExchange",
    "HuberLoss",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "KLDivLoss",
    "L1Loss",
    "LSTMCell",
    "Layer",
    "LayerNorm",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "LazyLinear",
    "Linear",
    "MSELoss",
    "MultiheadAttention",
    "NLLLoss",
    "PoissonNLLLoss",
    "RMSNorm",
    "RNNCell",
    "ReduceScatter",
    "Repartition",
    "SmoothL1Loss",
    "SpectralConv1d",
    "SpectralConv2d",
    "SpectralConv3d",
    "SumReduce",
    "SyncBatchNorm",
]
