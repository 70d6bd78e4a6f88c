"""The examples of the layers, which docstrings end with: most compare a layer on two workers with torch's on one."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping

__all__ = ["EXAMPLES", "add_examples"]

ROWS, BATCH, FEATURES = 'P(None, None, "x")', 'P("x")', 'P(None, "x")'


def add_examples(layers: Mapping[str, type]) -> None:
    """Let the docstring of each of these classes end with its example."""
    for name, layer in layers.items():
        text = inspect.cleandoc(layer.__doc__ or "")
        layer.__doc__ = f"{text}\n\n{textwrap.indent(EXAMPLES[name].strip(), '    ')}\n"


def _beside(
    name: str, arguments: str, shape: str, spec: str = ROWS, result: str | None = None, options: str | None = None
) -> str:
    """A layer with the parameters of torch's. options: of `from_torch`; None: the spec of x."""
    return f"""
>>> whole = torch.nn.{name}({arguments})
>>> def body(x):
...     return spt.nn.{name}.from_torch(whole, {options or f"spec={spec}"})(x)
>>> x = torch.randn({shape})
>>> with spmd.Mesh(x=2):
...     y = spt.map(body, {spec}, {result or spec})(x)
>>> torch.allclose(y, whole(x), atol=1e-5)
True
"""


def _lazy(name: str, arguments: str, shape: str, attribute: str, value: str, spec: str = ROWS) -> str:
    return f"""
>>> def body(x):
...     layer = spt.nn.{name}({arguments}, spec={spec})
...     return layer(x), layer.{attribute}
>>> with spmd.Mesh(x=2):
...     y, found = spt.map(body, {spec}, ({spec}, None))(torch.randn({shape}))
>>> y.shape[0], found
({shape.split(",")[0]}, {value})
"""


def _dropped(name: str, shape: str) -> str:
    return f"""
>>> def body(x):
...     torch.manual_seed(7)
...     return spt.nn.{name}(0.4, spec=P("x"))(x)
>>> y = [spt.map(body, P("x"), P("x"), mesh=spmd.Mesh(x=n))(torch.ones({shape})) for n in (1, 3)]
>>> torch.equal(*y)  # the same entries on one worker and on three
True
"""


def _loss(name: str, x: str = "torch.rand(5, 3)", target: str = "torch.rand(5, 3)", arguments: str = "") -> str:
    return f"""
>>> def body(x, target):
...     return spt.nn.{name}({f"{arguments}, " if arguments else ""}spec=P("x"))(x, target)
>>> x, target = {x}, {target}
>>> with spmd.Mesh(x=2):
...     loss = spt.map(body, P("x"), P())(x, target)
>>> torch.allclose(loss, torch.nn.{name}({arguments})(x, target))
True
"""


def _sizes(d: int) -> str:
    return ", ".join(["7", "6", "5"][:d])


def _of_space() -> dict[str, str]:
    """Layers with one to three dimensions of space, of which the first is split."""
    found = {}
    for d in (1, 2, 3):
        maps = f"2, 3, {_sizes(d)}"
        found |= {
            f"{kind}{d}d": _beside(f"{kind}{d}d", arguments, maps)
            for kind, arguments in {
                "Conv": "3, 4, 3, padding=1",
                "ConvTranspose": "3, 4, 2, stride=2",
                "MaxPool": "2",
                "AvgPool": "2",
                "AdaptiveMaxPool": "3",
                "AdaptiveAvgPool": "3",
                "ZeroPad": "1",
                "ConstantPad": "1, 0.5",
                "ReflectionPad": "1",
                "ReplicationPad": "1",
                "CircularPad": "1",
                "InstanceNorm": "3, affine=True",
            }.items()
        }
        found[f"BatchNorm{d}d"] = _beside(f"BatchNorm{d}d", "3", f"5, 3, {_sizes(d)}", BATCH)
        found[f"LazyConv{d}d"] = _lazy(f"LazyConv{d}d", "4, 3", maps, "in_channels", "3")
        found[f"LazyConvTranspose{d}d"] = _lazy(f"LazyConvTranspose{d}d", "4, 2", maps, "in_channels", "3")
        for kind in ("LazyBatchNorm", "LazyInstanceNorm"):
            text = _lazy(f"{kind}{d}d", "", f"5, 3, {_sizes(d)}", "num_features", "3", BATCH)
            found[f"{kind}{d}d"] = text.replace("(, ", "(")
        found[f"SpectralConv{d}d"] = f"""
>>> def body(x):
...     return spt.nn.SpectralConv{d}d(3, 4, 2, spec={ROWS})(x)
>>> with spmd.Mesh(x=2):
...     y = spt.map(body, {ROWS}, {ROWS})(torch.randn({maps}))
>>> y.shape
torch.Size([2, 4, {_sizes(d)}])
"""
    return found


def _recurrent(name: str) -> str:
    state = "(h, c)" if name == "LSTM" else "h"
    return f"""
>>> whole = torch.nn.{name}(4, 5)
>>> def body(x):
...     y, {state} = spt.nn.{name}.from_torch(whole, w_spec=P("x"))(x)  # some of the hidden features on each worker
...     return y
>>> x = torch.randn(6, 2, 4)
>>> with spmd.Mesh(x=2):
...     y = spt.map(body, P(), P(None, None, "x"))(x)
>>> torch.allclose(y, whole(x)[0], atol=1e-5)
True
"""


def _cell(name: str) -> str:
    first = "[0]" if name == "LSTMCell" else ""
    return f"""
>>> whole = torch.nn.{name}(4, 5)
>>> def body(x):
...     return spt.nn.{name}.from_torch(whole, w_spec=P("x"))(x){first}
>>> x = torch.randn(2, 4)
>>> with spmd.Mesh(x=2):
...     h = spt.map(body, P(), P(None, "x"))(x)
>>> torch.allclose(h, whole(x){first}, atol=1e-5)
True
"""


def _fourier(name: str, function: str, x: str, options: str = "", own: str = "") -> str:
    return f"""
>>> def body(x):
...     return spt.nn.{name}({own}spec=P("x"), out_spec=P("x"))(x)
>>> x = {x}
>>> with spmd.Mesh(x=2):
...     y = spt.map(body, P("x"), P("x"))(x)
>>> torch.allclose(y, torch.fft.{function}(x{options}), atol=1e-5)
True
"""


EXAMPLES = {
    **_of_space(),
    "Linear": _beside("Linear", "6, 4", "5, 6", "P()", FEATURES, 'w_spec=P("x")'),
    "LazyLinear": """
>>> def body(x):
...     layer = spt.nn.LazyLinear(4, w_spec=P("x"))
...     return layer(x), layer.in_features
>>> with spmd.Mesh(x=2):
...     y, found = spt.map(body, P(), (P(None, "x"), None))(torch.randn(5, 6))
>>> y.shape, found
(torch.Size([5, 4]), 6)
""",
    "Embedding": """
>>> whole = torch.nn.Embedding(7, 4)
>>> def body(ids):
...     return spt.nn.Embedding.from_torch(whole, w_spec=P("x"))(ids)  # some of the rows on each worker
>>> ids = torch.tensor([6, 0, 3])
>>> with spmd.Mesh(x=2):
...     y = spt.map(body, P(), P())(ids)
>>> torch.equal(y, whole(ids))
True
""",
    "Experts": """
>>> modules, gate = [torch.nn.Linear(4, 4) for _ in range(3)], torch.nn.Linear(4, 3)
>>> def body(x):
...     layer = spt.nn.Experts(modules, gate, "x")  # two experts, and one
...     return layer(x)
>>> x = torch.randn(5, 4)
>>> y = [spt.map(body, P("x"), P("x"), mesh=spmd.Mesh(x=n))(x) for n in (1, 2)]
>>> torch.allclose(*y, atol=1e-6)
True
""",
    "MultiheadAttention": """
>>> whole = torch.nn.MultiheadAttention(6, 3)
>>> def body(x):
...     return spt.nn.MultiheadAttention.from_torch(whole, heads="x")(x, x, x)[0]  # two heads, and one
>>> x = torch.randn(5, 2, 6)
>>> with spmd.Mesh(x=2):
...     y = spt.map(body, P(), P())(x)
>>> torch.allclose(y, whole(x, x, x)[0], atol=1e-5)
True
""",
    "LayerNorm": _beside("LayerNorm", "6", "4, 6", FEATURES),
    "RMSNorm": _beside("RMSNorm", "6", "4, 6", FEATURES),
    "GroupNorm": _beside("GroupNorm", "2, 4", "2, 4, 7"),
    "SyncBatchNorm": """
>>> def body(x):
...     return spt.nn.SyncBatchNorm(3, spec=P("x"))(x)
>>> x = torch.randn(5, 3, 4)
>>> with spmd.Mesh(x=2):
...     y = spt.map(body, P("x"), P("x"))(x)
>>> torch.allclose(y, torch.nn.BatchNorm1d(3)(x), atol=1e-5)
True
""",
    "Softmax": _beside("Softmax", "1", "3, 5", FEATURES),
    "LogSoftmax": _beside("LogSoftmax", "1", "3, 5", FEATURES),
    "Softmin": _beside("Softmin", "1", "3, 5", FEATURES),
    "Softmax2d": _beside("Softmax2d", "", "2, 3, 5, 4", FEATURES),
    "Upsample": _beside("Upsample", "scale_factor=2", "1, 2, 5"),
    "UpsamplingNearest2d": _beside("UpsamplingNearest2d", "scale_factor=2", "1, 2, 5, 4"),
    "UpsamplingBilinear2d": _beside("UpsamplingBilinear2d", "scale_factor=2", "1, 2, 5, 4"),
    **{name: _recurrent(name) for name in ("RNN", "LSTM", "GRU")},
    **{name: _cell(name) for name in ("RNNCell", "LSTMCell", "GRUCell")},
    "FFT": _fourier("FFT", "fftn", "torch.randn(6, 5, dtype=torch.complex64)"),
    "IFFT": _fourier("IFFT", "ifftn", "torch.randn(6, 5, dtype=torch.complex64)"),
    "RFFT": _fourier("RFFT", "rfftn", "torch.randn(6, 5)"),
    "IRFFT": _fourier("IRFFT", "irfftn", "torch.fft.rfftn(torch.randn(6, 5))", ", (6, 5)", "(6, 5), "),
    "Dropout": _dropped("Dropout", "6, 4"),
    "Dropout1d": _dropped("Dropout1d", "6, 4, 2"),
    "Dropout2d": _dropped("Dropout2d", "6, 4, 2, 2"),
    "Dropout3d": _dropped("Dropout3d", "6, 4, 2, 2, 2"),
    "AlphaDropout": _dropped("AlphaDropout", "6, 4"),
    "FeatureAlphaDropout": _dropped("FeatureAlphaDropout", "6, 4, 2"),
    **{name: _loss(name) for name in ("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "BCELoss", "PoissonNLLLoss")},
    "BCEWithLogitsLoss": _loss("BCEWithLogitsLoss", "torch.randn(5, 3)"),
    "KLDivLoss": _loss("KLDivLoss", "torch.rand(5, 3).log()", arguments='reduction="batchmean"'),
    "NLLLoss": _loss("NLLLoss", "torch.randn(5, 3).log_softmax(1)", "torch.tensor([0, 2, 1, 1, 0])"),
    "CrossEntropyLoss": _loss("CrossEntropyLoss", "torch.randn(5, 3)", "torch.tensor([0, 2, 1, 1, 0])"),
    "AllGather": """
>>> with spmd.Mesh(x=2):
...     spt.map(spt.nn.AllGather("x", to="invariant"), P("x"), P())(torch.arange(3.0))
tensor([0., 1., 2.])
""",
    "AllSumReduce": """
>>> with spmd.Mesh(x=2):
...     spt.map(spt.nn.AllSumReduce("x"), P("x"), P())(torch.arange(4.0))
tensor([2., 4.])
""",
    "ReduceScatter": """
>>> with spmd.Mesh(x=2):
...     spt.map(spt.nn.ReduceScatter("x"), P("x"), P("x"))(torch.arange(6.0))
tensor([3., 5., 7.])
""",
    "HaloExchange": """
>>> with spmd.Mesh(x=2):
...     spt.map(spt.nn.HaloExchange(P("x"), 1, "periodic"), P("x"), P("x"))(torch.arange(4.0))
tensor([3., 0., 1., 2., 1., 2., 3., 0.])
""",
    "Repartition": """
>>> with spmd.Mesh(x=2):
...     columns = spt.map(spt.nn.Repartition(P("x"), P(None, "x")), P("x"), P(None, "x"))
...     columns(torch.arange(6.0).reshape(2, 3))
tensor([[0., 1., 2.],
        [3., 4., 5.]])
""",
    "Broadcast": """
>>> def loss(w, x):
...     return spt.psum((spt.nn.Broadcast(P(), P("x"))(w) * x).sum(), "x")
>>> w = torch.ones(2, requires_grad=True)
>>> with spmd.Mesh(x=2):
...     spt.map(loss, (P(), P("x")), P())(w, torch.arange(8.0).reshape(4, 2)).backward()
>>> w.grad  # the sum over the workers
tensor([12., 16.])
""",
    "SumReduce": """
>>> with spmd.Mesh(x=2):
...     spt.map(spt.nn.SumReduce(P("x"), P()), P("x"), P())(torch.arange(4.0))
tensor([2., 4.])
""",
    "Layer": """
>>> def body():
...     layer = spt.nn.Linear(4, 6, w_spec=P("x"))
...     return isinstance(layer, spt.nn.Layer), str(layer)
>>> with spmd.Mesh(x=2):
...     spt.map(body, (), None)()
(True, "Linear(in_features=4, out_features=6, bias=True, w_spec=P('x'))")
""",
}
