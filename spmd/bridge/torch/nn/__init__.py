"""`spt.nn`: the layers of `torch.nn` on arrays that are split, by the same names and arguments, with specs.

net = torch.nn.Sequential(
    spt.nn.Linear(16, 64, w_spec=P("model")), torch.nn.GELU(), spt.nn.Linear(64, 16, w_spec=P(None, "model"))
)

Modules without parameters that work on each entry alone, such as `torch.nn.GELU`, and containers are torch's own.
"""

from typing import TYPE_CHECKING

from spmd.bridge.torch.nn.attention import (
    MultiheadAttention,
)
from spmd.bridge.torch.nn.convolution import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from spmd.bridge.torch.nn.dropouts import (
    AlphaDropout,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    FeatureAlphaDropout,
)
from spmd.bridge.torch.nn.embeddings import (
    Embedding,
)
from spmd.bridge.torch.nn.examples import add_examples
from spmd.bridge.torch.nn.experts import (
    Experts,
)
from spmd.bridge.torch.nn.fourier import (
    FFT,
    IFFT,
    IRFFT,
    RFFT,
    SpectralConv1d,
    SpectralConv2d,
    SpectralConv3d,
)
from spmd.bridge.torch.nn.layer import (
    Layer,
)
from spmd.bridge.torch.nn.lazy_convolution import (
    LazyConv1d,
    LazyConv2d,
    LazyConv3d,
    LazyConvTranspose1d,
    LazyConvTranspose2d,
    LazyConvTranspose3d,
)
from spmd.bridge.torch.nn.linear import (
    LazyLinear,
    Linear,
)
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
    LazyInstanceNorm1d,
    LazyInstanceNorm2d,
    LazyInstanceNorm3d,
    RMSNorm,
    SyncBatchNorm,
)
from spmd.bridge.torch.nn.padding import (
    CircularPad1d,
    CircularPad2d,
    CircularPad3d,
    ConstantPad1d,
    ConstantPad2d,
    ConstantPad3d,
    ReflectionPad1d,
    ReflectionPad2d,
    ReflectionPad3d,
    ReplicationPad1d,
    ReplicationPad2d,
    ReplicationPad3d,
    ZeroPad1d,
    ZeroPad2d,
    ZeroPad3d,
)
from spmd.bridge.torch.nn.pooling import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AdaptiveAvgPool3d,
    AdaptiveMaxPool1d,
    AdaptiveMaxPool2d,
    AdaptiveMaxPool3d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
)
from spmd.bridge.torch.nn.recurrent import (
    GRU,
    LSTM,
    RNN,
    GRUCell,
    LSTMCell,
    RNNCell,
)
from spmd.bridge.torch.nn.resampling import (
    Upsample,
    UpsamplingBilinear2d,
    UpsamplingNearest2d,
)
from spmd.bridge.torch.nn.softmaxes import (
    LogSoftmax,
    Softmax,
    Softmax2d,
    Softmin,
)
from spmd.lazy_imports import lazy_attributes

__all__ = [
    "FFT",
    "GRU",
    "IFFT",
    "IRFFT",
    "LSTM",
    "RFFT",
    "RNN",
    "AdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "AdaptiveMaxPool1d",
    "AdaptiveMaxPool2d",
    "AdaptiveMaxPool3d",
    "AllGather",
    "AllSumReduce",
    "AlphaDropout",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "BCELoss",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "Broadcast",
    "CircularPad1d",
    "CircularPad2d",
    "CircularPad3d",
    "ConstantPad1d",
    "ConstantPad2d",
    "ConstantPad3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CrossEntropyLoss",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "Embedding",
    "Experts",
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
    "LazyConv1d",
    "LazyConv2d",
    "LazyConv3d",
    "LazyConvTranspose1d",
    "LazyConvTranspose2d",
    "LazyConvTranspose3d",
    "LazyInstanceNorm1d",
    "LazyInstanceNorm2d",
    "LazyInstanceNorm3d",
    "LazyLinear",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "MultiheadAttention",
    "NLLLoss",
    "PoissonNLLLoss",
    "RMSNorm",
    "RNNCell",
    "ReduceScatter",
    "ReflectionPad1d",
    "ReflectionPad2d",
    "ReflectionPad3d",
    "Repartition",
    "ReplicationPad1d",
    "ReplicationPad2d",
    "ReplicationPad3d",
    "SmoothL1Loss",
    "Softmax",
    "Softmax2d",
    "Softmin",
    "SpectralConv1d",
    "SpectralConv2d",
    "SpectralConv3d",
    "SumReduce",
    "SyncBatchNorm",
    "Upsample",
    "UpsamplingBilinear2d",
    "UpsamplingNearest2d",
    "ZeroPad1d",
    "ZeroPad2d",
    "ZeroPad3d",
]

add_examples({name: globals()[name] for name in __all__})

if not TYPE_CHECKING:  # Type checkers report misspelt names themselves.
    __getattr__, __dir__ = lazy_attributes(__name__, {})
