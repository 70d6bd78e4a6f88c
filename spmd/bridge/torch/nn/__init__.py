"""`spt.nn`: the layers of `torch.nn` on arrays that are split, by the same names and arguments, with specs.

net = torch.nn.Sequential(
    spt.nn.Linear(16, 64, w_spec=P("model")), torch.nn.GELU(), spt.nn.Linear(64, 16, w_spec=P(None, "model"))
)

Modules without parameters that work on each entry alone, such as `torch.nn.GELU`, and containers are torch's own.
"""

from spmd.bridge.torch.nn.attention import MultiheadAttention
from spmd.bridge.torch.nn.fourier import FFT, IFFT, IRFFT, RFFT, SpectralConv1d, SpectralConv2d, SpectralConv3d
from spmd.bridge.torch.nn.layer import Layer
from spmd.bridge.torch.nn.linear import Linear
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
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "GRUCell",
    "GroupNorm",
    "InstanceNorm1d",
    "InstanceNorm2d",
    "InstanceNorm3d",
    "LSTMCell",
    "Layer",
    "LayerNorm",
    "LazyBatchNorm1d",
    "LazyBatchNorm2d",
    "LazyBatchNorm3d",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RNNCell",
    "SpectralConv1d",
    "SpectralConv2d",
    "SpectralConv3d",
    "SyncBatchNorm",
]
