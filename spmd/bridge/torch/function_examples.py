"""The examples of `spt.functions`: the text before them is that of the functions of `spmd.functions`."""

from __future__ import annotations

import inspect
import textwrap

__all__ = ["EXAMPLES", "docstring_with_example"]


def docstring_with_example(name: str, docstring: str | None) -> str:
    """The docstring of a function of `spmd.functions`, with the example for tensors in place of that for arrays."""
    text = inspect.cleandoc(docstring or "")
    before, _, _ = text.partition(">>>")
    return f"{before.rstrip()}\n\n{textwrap.indent(EXAMPLES[name].strip(), '    ')}"


EXAMPLES = {
    "adaptive_max_pool": """
>>> def body(x):
...     return spt.functions.adaptive_max_pool(x, 3, spec=P(None, None, "x"))
>>> with spmd.Mesh(x=2):
...     spt.map(body, P(None, None, "x"), P(None, None, "x"))(torch.arange(7.0).reshape(1, 1, 7))
tensor([[[2., 4., 6.]]])
""",
    "attention": """
>>> def body(q, k, v):
...     return spt.functions.attention(q, k, v, causal=True, axis_name="x", method="ring")
>>> q = torch.tensor([[[0.0], [2.0]]])
>>> with spmd.Mesh(x=2):
...     spt.map(body, P(None, "x"), P(None, "x"))(q, 0 * q, q)
tensor([[[0.],
         [1.]]])
""",
    "attention_with_weights": """
>>> def body(q):
...     return spt.functions.attention_with_weights(q, q, q, causal=True, spec=P(None, "x"))
>>> with spmd.Mesh(x=2):
...     y, w = spt.map(body, P(None, "x"), P(None, "x"))(torch.zeros(1, 2, 4))
>>> w
tensor([[[1.0000, 0.0000],
         [0.5000, 0.5000]]])
""",
    "avg_pool": """
>>> def body(x):
...     return spt.functions.avg_pool(x, 3, stride=1, spec=P(None, None, "x"))
>>> with spmd.Mesh(x=2):
...     spt.map(body, P(None, None, "x"), P(None, None, "x"))(torch.arange(6.0).reshape(1, 1, 6))
tensor([[[1., 2., 3., 4.]]])
""",
    "batch_norm": """
>>> def body(x):
...     return spt.functions.batch_norm(x, running=(torch.zeros(1), torch.ones(1)), spec=P("data"))
>>> with spmd.Mesh(data=2):
...     y, (mean, var) = spt.map(body, P("data"), (P("data"), P()))(torch.tensor([[1.0], [1.0], [3.0], [3.0]]))
>>> mean
tensor([0.2000])
""",
    "binary_cross_entropy": """
>>> def loss(x, target):
...     return spt.functions.binary_cross_entropy(x, target, reduction="sum", spec=P("x"))
>>> with spmd.Mesh(x=2):
...     spt.map(loss, P("x"), P())(torch.tensor([0.5, 0.5, 0.25]), torch.tensor([1.0, 0.0, 1.0])) / np.log(2.0)
tensor(4.)
""",
    "binary_cross_entropy_with_logits": """
>>> def loss(x, target):
...     return spt.functions.binary_cross_entropy_with_logits(x, target, reduction="sum", spec=P("x"))
>>> x = torch.zeros(2, requires_grad=True)
>>> with spmd.Mesh(x=2):
...     spt.map(loss, P("x"), P())(x, torch.tensor([1.0, 0.0])).backward()
>>> x.grad
tensor([-0.5000,  0.5000])
""",
    "conv": """
>>> def body(x, w):
...     return spt.functions.conv(x, w, padding=1, spec=P(None, None, "x"))
>>> with spmd.Mesh(x=2):
...     f = spt.map(body, (P(None, None, "x"), P()), P(None, None, "x"))
...     f(torch.arange(6.0).reshape(1, 1, 6), torch.tensor([[[-1.0, 0.0, 1.0]]]))
tensor([[[ 1.,  2.,  2.,  2.,  2., -4.]]])
""",
    "conv_transpose": """
>>> def body(x, w):
...     return spt.functions.conv_transpose(x, w, stride=2, spec=P(None, None, "x"))
>>> with spmd.Mesh(x=2):
...     f = spt.map(body, (P(None, None, "x"), P()), P(None, None, "x"))
...     f(torch.tensor([[[1.0, 2.0, 3.0]]]), torch.ones(1, 1, 2))
tensor([[[1., 1., 2., 2., 3., 3.]]])
""",
    "cross_entropy": """
>>> def loss(x, target):
...     return spt.functions.cross_entropy(x, target, spec=P("data", "model"))
>>> x = torch.zeros(2, 4, requires_grad=True)
>>> with spmd.Mesh(data=2, model=2):
...     spt.map(loss, (P("data", "model"), P("data")), P())(x, torch.tensor([1, 3])).backward()
>>> x.grad
tensor([[ 0.1250, -0.3750,  0.1250,  0.1250],
        [ 0.1250,  0.1250,  0.1250, -0.3750]])
""",
    "dropout": """
>>> def body(x):
...     return spt.functions.dropout(x, 0.5, spmd.random.key(1), spec=P("x"))
>>> with spmd.Mesh(x=3):
...     spt.map(body, P("x"), P("x"))(torch.ones(8))
tensor([0., 0., 0., 0., 0., 0., 2., 0.])
""",
    "embedding": """
>>> def body(table, ids):
...     return spt.functions.embedding(table, ids, "model")
>>> with spmd.Mesh(model=2):
...     spt.map(body, (P("model"), P()), P())(torch.arange(8.0).reshape(4, 2), torch.tensor([3, 0]))
tensor([[6., 7.],
        [0., 1.]])
""",
    "experts": """
>>> def body(x, gate, w):
...     return spt.functions.experts(x, gate, lambda w, h: h @ w, "x", k=1, params=w)
>>> w = torch.tensor([1.0, 10.0, 100.0]).reshape(3, 1, 1).requires_grad_()  # of three experts
>>> with spmd.Mesh(x=2):
...     y = spt.map(body, P("x"), P("x"))(torch.tensor([[1.0], [2.0], [3.0]]), torch.eye(3)[[2, 0, 1]], w)
>>> y.sum().backward()
>>> w.grad.flatten()
tensor([2., 3., 1.])
""",
    "group_norm": """
>>> def body(x):
...     return spt.functions.group_norm(x, groups=2, eps=0.0, spec=P(None, "x"))
>>> with spmd.Mesh(x=2):
...     spt.map(body, P(None, "x"), P(None, "x"))(torch.tensor([[1.0, 3.0, 0.0, 4.0]]))
tensor([[-1.,  1., -1.,  1.]])
""",
    "gru": """
>>> params = {"weight_ih_l0": torch.zeros(6, 1), "weight_hh_l0": torch.zeros(6, 2)}
>>> def body(x, h):
...     return spt.functions.gru(x, h, params, spec=P(None, "data"))
>>> with spmd.Mesh(data=2):
...     y, h = spt.map(body, P(None, "data"), P(None, "data"))(torch.ones(3, 2, 1), torch.ones(1, 2, 2))
>>> h
tensor([[[0.1250, 0.1250],
         [0.1250, 0.1250]]])
""",
    "huber_loss": """
>>> def loss(x):
...     return spt.functions.huber_loss(x, torch.zeros_like(x), reduction="sum", spec=P("x"))
>>> x = torch.tensor([0.5, 1.0, 4.0], requires_grad=True)
>>> with spmd.Mesh(x=2):
...     spt.map(loss, P("x"), P())(x).backward()
>>> x.grad
tensor([0.5000, 1.0000, 1.0000])
""",
    "instance_norm": """
>>> def body(x):
...     return spt.functions.instance_norm(x, eps=0.0, spec=P(None, None, "x"))
>>> with spmd.Mesh(x=2):
...     spt.map(body, P(None, None, "x"), P(None, None, "x"))(torch.tensor([[[1.0, 3.0], [0.0, 4.0]]]))
tensor([[[-1.,  1.],
         [-1.,  1.]]])
""",
    "kl_div": """
>>> def loss(x, p):
...     return spt.functions.kl_div(x, p, reduction="batchmean", spec=P("data"))
>>> x = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]]))
>>> with spmd.Mesh(data=2):
...     spt.map(loss, P("data"), P())(x, torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
tensor(0.4185)
""",
    "l1_loss": """
>>> def loss(x):
...     return spt.functions.l1_loss(x, torch.full_like(x, 2.0), spec=P("x"))
>>> x = torch.tensor([1.0, 2.0, 5.0, 4.0], requires_grad=True)
>>> with spmd.Mesh(x=2):
...     spt.map(loss, P("x"), P())(x).backward()
>>> x.grad
tensor([-0.2500,  0.0000,  0.2500,  0.2500])
""",
    "layer_norm": """
>>> def body(x):
...     return spt.functions.layer_norm(x, eps=0.0, spec=P(None, "model"))
>>> with spmd.Mesh(model=2), spmd.ledger() as log:
...     y = spt.map(body, P(None, "model"), P(None, "model"))(torch.tensor([[1.0, 3.0], [0.0, 8.0]]))
>>> y, log.messages
(tensor([[-1.,  1.],
        [-1.,  1.]]), 1)
""",
    "linear": """
>>> def body(x, w):
...     return spt.functions.linear(x, w, spec=P(None, "model"), w_spec=P(None, "model"))
>>> with spmd.Mesh(model=2):
...     spt.map(body, P(None, "model"), P())(torch.ones(2, 4), torch.arange(8.0).reshape(2, 4))
tensor([[ 6., 22.],
        [ 6., 22.]])
""",
    "load_balance_loss": """
>>> gate = torch.tensor([[9.0, 0.0], [9.0, 0.0], [9.0, 0.0], [0.0, 9.0]])
>>> with spmd.Mesh(x=2):
...     spt.map(lambda g: spt.functions.load_balance_loss(g, "x", k=1), P("x"), P())(gate)
tensor(1.2499)
""",
    "log_softmax": """
>>> x = torch.zeros(1, 4, requires_grad=True)
>>> with spmd.Mesh(x=2):
...     f = spt.map(lambda x: spt.functions.log_softmax(x, spec=P(None, "x")), P(None, "x"), P(None, "x"))
...     f(x)[0, 2].backward()
>>> x.grad
tensor([[-0.2500, -0.2500,  0.7500, -0.2500]])
""",
    "lstm": """
>>> params = {"weight_ih_l0": torch.zeros(8, 1), "weight_hh_l0": torch.zeros(8, 2)}
>>> def body(x, h, c):
...     return spt.functions.lstm(x, (h, c), params, spec=P(None, "data"))
>>> with spmd.Mesh(data=2):
...     f = spt.map(body, P(None, "data"), P(None, "data"))
...     y, (h, c) = f(torch.ones(3, 2, 1), torch.zeros(1, 2, 2), torch.ones(1, 2, 2))
>>> c
tensor([[[0.1250, 0.1250],
         [0.1250, 0.1250]]])
""",
    "max_pool": """
>>> def body(x):
...     return spt.functions.max_pool(x, 3, stride=2, spec=P(None, None, "x"))
>>> with spmd.Mesh(x=2):
...     spt.map(body, P(None, None, "x"), P(None, None, "x"))(torch.tensor([[[1.0, 5.0, 2.0, 4.0, 3.0]]]))
tensor([[[5., 4.]]])
""",
    "mse_loss": """
>>> def loss(x, target):
...     return spt.functions.mse_loss(x, target, spec=P("x"))
>>> x = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
>>> with spmd.Mesh(x=2):
...     spt.map(loss, P("x"), P())(x, torch.tensor([1.0, 2.0, 3.0])).backward()
>>> x.grad
tensor([0., 0., 2.])
""",
    "nll_loss": """
>>> def loss(x, target):
...     return spt.functions.nll_loss(x, target, spec=P(None, "model"))
>>> with spmd.Mesh(model=2):
...     x = torch.log2(torch.tensor([[0.5, 0.25, 0.25]]))
...     spt.map(loss, (P(None, "model"), P()), P())(x, torch.tensor([1]))
tensor(2.)
""",
    "pad": """
>>> def body(x):
...     return spt.functions.pad(x, (1, 2), "circular", spec=P("x"))
>>> with spmd.Mesh(x=2):
...     spt.map(body, P("x"), P("x"))(torch.arange(1.0, 5.0))
tensor([4., 1., 2., 3., 4., 1., 2.])
""",
    "poisson_nll_loss": """
>>> def loss(x, target):
...     return spt.functions.poisson_nll_loss(x, target, reduction="sum", spec=P("x"))
>>> x = torch.zeros(2, requires_grad=True)
>>> with spmd.Mesh(x=2):
...     spt.map(loss, P("x"), P())(x, torch.tensor([1.0, 3.0])).backward()
>>> x.grad
tensor([ 0., -2.])
""",
    "resample": """
>>> taps = spmd.functions.plan_resize(4, 2, "area")
>>> with spmd.Mesh(x=2):
...     spt.map(lambda x: spt.functions.resample(x, taps), P("x"), P("x"))(torch.arange(8.0).reshape(2, 4))
tensor([[0.5000, 2.5000],
        [4.5000, 6.5000]])
""",
    "resize": """
>>> def body(x):
...     return spt.functions.resize(x, size=6, spec=P(None, None, "x"))
>>> with spmd.Mesh(x=2):
...     spt.map(body, P(None, None, "x"), P(None, None, "x"))(torch.tensor([[[0.0, 2.0, 4.0]]]))
tensor([[[0.0000, 0.5000, 1.5000, 2.5000, 3.5000, 4.0000]]])
""",
    "rms_norm": """
>>> def body(x):
...     return spt.functions.rms_norm(x, eps=0.0, spec=P(None, "model"))
>>> with spmd.Mesh(model=2):
...     spt.map(body, P(None, "model"), P(None, "model"))(torch.tensor([[3.0, 4.0, 0.0, 0.0]]))
tensor([[1.2000, 1.6000, 0.0000, 0.0000]])
""",
    "rnn": """
>>> params = {"weight_ih_l0": torch.eye(1), "weight_hh_l0": torch.eye(1)}
>>> def body(x):
...     return spt.functions.rnn(x, None, params, nonlinearity="relu", spec=P("time"))
>>> with spmd.Mesh(time=2):
...     y, h = spt.map(body, P("time"), (P("time"), P()))(torch.tensor([[[1.0]], [[-2.0]], [[3.0]]]))
>>> y[:, 0, 0]
tensor([1., 0., 3.])
""",
    "rope": """
>>> with spmd.Mesh(x=2):
...     f = spt.map(lambda x: spt.functions.rope(x, spec=P("x")), P("x"), P("x"))
...     f(torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]))
tensor([[ 1.0000,  0.0000],
        [ 0.5403,  0.8415],
        [-0.4161,  0.9093]])
""",
    "router_z_loss": """
>>> gate = torch.log(torch.tensor([[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]])).requires_grad_()
>>> with spmd.Mesh(x=2):
...     spt.map(lambda g: spt.functions.router_z_loss(g, "x"), P("x"), P())(gate).backward()
>>> gate.grad / np.log(2.0)
tensor([[0.3333, 0.3333],
        [0.6667, 0.6667],
        [1.0000, 1.0000]])
""",
    "smooth_l1_loss": """
>>> def loss(x):
...     return spt.functions.smooth_l1_loss(x, torch.zeros_like(x), reduction="sum", beta=2.0, spec=P("x"))
>>> x = torch.tensor([1.0, 5.0], requires_grad=True)
>>> with spmd.Mesh(x=2):
...     spt.map(loss, P("x"), P())(x).backward()
>>> x.grad
tensor([0.5000, 1.0000])
""",
    "softmax": """
>>> with spmd.Mesh(x=2):
...     f = spt.map(lambda x: spt.functions.softmax(x, spec=P(None, "x")), P(None, "x"), P(None, "x"))
...     f(torch.log(torch.tensor([[1.0, 2.0, 5.0]])))
tensor([[0.1250, 0.2500, 0.6250]])
""",
    "softmax_cross_entropy": """
>>> def loss(logits, labels):
...     return spt.functions.softmax_cross_entropy(logits, labels, "model", reduction="sum")
>>> x = torch.zeros(1, 4, requires_grad=True)
>>> with spmd.Mesh(model=2):
...     spt.map(loss, (P(None, "model"), P()), P())(x, torch.tensor([2])).backward()
>>> x.grad
tensor([[ 0.2500,  0.2500, -0.7500,  0.2500]])
""",
    "softmin": """
>>> with spmd.Mesh(x=2):
...     f = spt.map(lambda x: spt.functions.softmin(x, spec=P(None, "x")), P(None, "x"), P(None, "x"))
...     f(-torch.log(torch.tensor([[1.0, 2.0, 5.0]])))
tensor([[0.1250, 0.2500, 0.6250]])
""",
    "spectral_conv": """
>>> def body(x, w):
...     return spt.functions.spectral_conv(x, w, spec=P(None, None, "x"))
>>> x, w = torch.tensor([[[1.0, 0.0, -1.0, 0.0]]]), torch.tensor([[[3.0, 2.0]]], dtype=torch.complex64)
>>> with spmd.Mesh(x=2):
...     y = spt.map(body, (P(None, None, "x"), P()), P(None, None, "x"))(x, w)
>>> torch.allclose(y, 2 * x, atol=1e-6)
True
""",
}
"""By the name of the function; `tests/test_reference.py` runs them."""
