"""How each function of torch that global tensors take is called, for random tests.

A row: names of functions; how one is called; the operands. An operand is the letters of its dimensions, of random
lengths, with a sign in front for its entries: "+" between 0.1 and 0.9, "i" whole numbers, "b" booleans, "c" complex
numbers; otherwise normal. Digits are lengths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


class Call(NamedTuple):
    """A call: of a function f with operands."""

    call: Callable[..., Any]
    operands: tuple[str, ...]


_one = lambda f, x: f(x)
_two = lambda f, x, y: f(x, y)
_on_copy = lambda f, x, *y: f(x.clone(), *y)

_SIGNED = """
    abs absolute angle arctan asin asinh atan ceil celu clone conj conj_physical contiguous cos cosh deg2rad detach elu
    erf erfc exp exp2 expm1 fix float floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan
    isneginf isposinf leaky_relu log_sigmoid mish nan_to_num neg negative ones_like positive rad2deg real
    relu relu6 resolve_conj round selu sgn sigmoid sign silu sin sinc sinh softplus softshrink softsign square tan tanh
    tanhshrink trunc zeros_like bool cpu double long int half bfloat16 cfloat cdouble logical_not special_erf
    special_erfc special_exp2 special_expm1 special_i0 special_round special_sinc
"""
_POSITIVE = """
    acos acosh arccos arcsin asin atanh erfinv lgamma log log10 log1p log2 logit reciprocal rsqrt sqrt
    special_erfinv special_log1p special_logit
"""
_PAIRS = """
    add sub subtract mul multiply eq ne not_equal ge gt le lt greater greater_equal less less_equal fmax fmin maximum
    minimum copysign hypot logaddexp logaddexp2 nextafter isclose rsub
    arctan2 atan2 __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__
    logical_and logical_or logical_xor
"""
_POSITIVE_PAIRS = """
    div divide true_divide fmod remainder pow float_power xlogy special_xlogy polar __truediv__
    __div__ __rdiv__ __mod__ __rmod__ __rpow__
"""
_BITS = "bitwise_and bitwise_or bitwise_xor __and__ __rand__ __or__ __ror__ __xor__ __rxor__"
_WRITTEN = "abs_ exp_ relu_ leaky_relu_ elu_ selu_ celu_ hardtanh_ sigmoid_ tanh_ neg_ hardswish_ hardsigmoid_ zero_"
_OF_ITSELF = """
    .shape .ndim .dtype .device .layout .is_sparse .is_cpu .is_cuda .is_meta .is_quantized .is_nested .is_mps .is_xla
    .is_mkldnn .itemsize .nbytes size dim numel nelement element_size is_floating_point is_complex ndimension is_signed
    .requires_grad .is_leaf
"""


def _known(f: Any, x: Any) -> Any:
    return str(f(x))


def _watched(f: Any, x: Any) -> Any:
    y = 2 * x
    f(y) if f.__name__ == "retain_grad" else f(y, lambda g: 2 * g)
    return y


def _masked(f: Any, x: Any, m: Any) -> Any:
    return f(x.clone() if f.__name__.endswith("_") else x, m, -2.5)


def _pool(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    return lambda f, x: f(x, *args, **kwargs)


ROWS: list[tuple[str, Callable[..., Any], str]] = [
    *[(_SIGNED, _one, s) for s in ("ab", "a", "abc")],
    *[(_POSITIVE, _one, s) for s in ("+ab", "+abc")],
    ("acosh", lambda f, x: f(x + 1), "+ab"),
    ("imag resolve_conj angle", _one, "cab"),
    *[(_PAIRS, _two, s) for s in ("ab ab", "ab b", "abc a11", "ab 1b", "a1 1b", "abc bc")],
    ("add sub mul eq lt __add__ __rsub__ __mul__ rsub", lambda f, x: f(x, 2.5), "ab"),
    ("add sub", lambda f, x, y: f(x, y, alpha=3), "ab b"),
    ("add mul sub maximum", lambda f, x, y: f(x, y, out=torch.zeros_like(x)), "ab ab"),
    ("exp sin tanh", lambda f, x: f(x.detach(), out=torch.empty_like(x.detach())), "ab"),
    *[(_POSITIVE_PAIRS, _two, s) for s in ("+ab +ab", "+ab +b", "+abc +b1")],
    ("div", lambda f, x, y: f(x, y, rounding_mode="floor"), "ab +b"),
    ("pow", lambda f, x: f(x, 2), "ab"),
    ("heaviside floor_divide __floordiv__ __rfloordiv__", lambda f, x, y: f(x.detach(), y.detach()), "ab +b"),
    (_BITS, _two, "iab ib"),
    (_BITS, _two, "bab bab"),
    ("bitwise_not __invert__", _one, "bab"),
    ("logical_not __invert__ bitwise_not", _one, "iab"),
    (_WRITTEN, _on_copy, "ab"),
    ("sqrt_", _on_copy, "+ab"),
    ("add_ sub_ mul_ __iadd__ __isub__ __imul__ copy_", _on_copy, "ab ab"),
    ("add_ sub_ mul_ __iadd__ __isub__ __imul__ copy_", _on_copy, "ab b"),
    ("div_ pow_ __idiv__", _on_copy, "+ab +b"),
    ("fill_", lambda f, x: f(x.clone(), 2.5), "ab"),
    ("threshold threshold_ _threshold", lambda f, x: f(x.clone(), 0.1, 2.0), "ab"),
    ("clamp_min clamp_max clamp_min_ clamp_max_", lambda f, x: f(x.clone(), 0.2), "ab"),
    ("clamp clip clamp_", lambda f, x: f(x.clone(), -0.5, 0.5), "ab"),
    ("clamp clip", lambda f, x, y: f(x, min=y), "ab b"),
    ("addcmul addcdiv addcmul_ addcdiv_", lambda f, x, y, z: f(x.clone(), y, z, value=0.5), "ab ab +b"),
    ("lerp lerp_", lambda f, x, y: f(x.clone(), y, 0.25), "ab b"),
    ("lerp", lambda f, x, y, w: f(x, y, w), "ab b a1"),
    ("masked_fill masked_fill_", _masked, "ab bab"),
    ("masked_fill masked_fill_", _masked, "abc bbc"),
    ("where", lambda f, x, m, y: torch.where(m, x, y), "ab bb a1"),
    ("where", lambda f, x, m: torch.where(m, x, 2.0), "ab ba1"),
    ("complex", lambda f, x, y: torch.complex(x, y), "ab b"),
    ("to", lambda f, x: f(x, torch.float32), "ab"),
    ("type", lambda f, x: f(x, torch.float32), "ab"),
    ("type_as", _two, "ab ia"),
    ("full_like", lambda f, x: f(x, 2.5), "ab"),
    ("empty_like", lambda f, x: f(x).zero_(), "ab"),
    ("cuda", lambda f, x: x if not torch.cuda.is_available() else f(x).cpu(), "ab"),
    ("requires_grad_", lambda f, x: f(x.detach()).requires_grad, "ab"),
    (_OF_ITSELF, _known, "ab"),
    ("__len__", _known, "ab"),
    ("is_contiguous", lambda f, x: f(x.clone()), "ab"),
    ("backward", lambda f, x: f(x.square(), torch.ones_like(x)), "ab"),
    ("grad", lambda f, x: f(x.square(), [x], torch.ones_like(x), create_graph=True), "ab"),
    ("._version .output_nr .grad_fn", lambda f, x: f(x) is None, "ab"),
    ("retain_grad register_hook", _watched, "ab"),
    (".data", _one, "ab"),
    (".grad", lambda f, x: f(x.detach()), "ab"),
    ("view_as_real", _one, "cab"),
    ("view_as_complex", _one, "ab2"),
    ("new_zeros new_ones", lambda f, x: f(x, 3, x.shape[1]), "ab"),
    ("new_empty", lambda f, x: f(x, x.shape).zero_(), "ab"),
    ("new_full", lambda f, x: f(x, x.shape, 2.5), "ab"),
    ("new_tensor", lambda f, x: f(x, [1.0, 2.0]), "ab"),
    # views
    ("permute", lambda f, x: f(x, (2, 0, -2)), "abc"),
    ("transpose swapaxes swapdims", lambda f, x: f(x, 0, -1), "abc"),
    ("t .T .H", _one, "ab"),
    ("t", _one, "a"),
    (".mT .mH adjoint", _one, "abc"),
    ("movedim moveaxis", lambda f, x: f(x, (0, 1), (-1, 0)), "abc"),
    ("movedim moveaxis", lambda f, x: f(x, 0, 2), "abc"),
    ("unsqueeze", lambda f, x: f(x, 1), "ab"),
    ("unsqueeze", lambda f, x: f(x, -1), "ab"),
    ("squeeze", _one, "a1b"),
    ("squeeze", lambda f, x: f(x, 1), "a1b"),
    ("squeeze", lambda f, x: f(x, (0, 1)), "a1b"),
    ("expand", lambda f, x: f(x, (3, -1, 4)), "a1"),
    ("broadcast_to", lambda f, x: f(x, (2, *x.shape)), "ab"),
    ("expand_as", lambda f, x, y: f(x, y), "b cab"),
    ("expand_as", lambda f, x, y: f(x, y), "a1 ab"),
    ("reshape view", lambda f, x: f(x, (x.shape[0] * x.shape[1], x.shape[2])), "abc"),
    ("reshape", lambda f, x: f(x, (x.shape[0], x.shape[1] * x.shape[2])), "abc"),
    ("reshape", lambda f, x: f(x, (-1,)), "abc"),
    ("reshape", lambda f, x: f(x, (2, x.shape[0] // 2, -1, 3)), "46"),
    ("reshape", lambda f, x: f(x, (-1, 3)), "a6"),
    ("reshape", lambda f, x: f(x, (x.shape[0], 2, 3)), "a6"),
    ("reshape", lambda f, x: f(x, (1, *x.shape, 1)), "ab"),
    ("flatten", lambda f, x: f(x, 1), "abc"),
    ("flatten", lambda f, x: f(x, 0, 1), "abc"),
    ("flatten ravel", _one, "abc"),
    ("unflatten", lambda f, x: f(x, -1, (3, -1)), "a6"),
    ("view_as reshape_as", lambda f, x, y: f(x, y), "a6 a23"),
    ("split", lambda f, x: f(x, 2, 1), "ab"),
    ("split split_with_sizes", lambda f, x: f(x, [1, x.shape[1] - 1], 1), "ab"),
    ("unsafe_split", lambda f, x: f(x, 2, -1), "ab"),
    ("chunk unsafe_chunk", lambda f, x: f(x, 3, -1), "ab"),
    ("chunk unsafe_chunk", lambda f, x: f(x, 2), "ab"),
    ("tensor_split", lambda f, x: f(x, 3, 1), "ab"),
    ("tensor_split", lambda f, x: f(x, (1, 2), 0), "ab"),
    ("hsplit", lambda f, x: f(x, 1), "ab"),
    ("vsplit", lambda f, x: f(x, 1), "ab"),
    ("hsplit", lambda f, x: f(x, (1, 2)), "ab"),
    ("unbind", lambda f, x: f(x, -1), "ab"),
    ("unbind", _one, "ab"),
    ("select", lambda f, x: f(x, 1, -1), "ab"),
    ("select", lambda f, x: f(x, 0, 0), "ab"),
    ("narrow", lambda f, x: f(x, 1, 1, x.shape[1] - 1), "ab"),
    ("narrow", lambda f, x: f(x, 0, -1, 1), "ab"),
    ("__getitem__", lambda f, x: f(x, (slice(None), -1)), "ab"),
    ("__getitem__", lambda f, x: f(x, (slice(None), slice(None, None, 2))), "ab"),
    ("__getitem__", lambda f, x: f(x, (..., None)), "ab"),
    ("__getitem__", lambda f, x: f(x, (0, None, ..., slice(1, -1))), "abc"),
    ("__getitem__", lambda f, x: f(x, slice(-3, 100)), "ab"),
    ("__getitem__", lambda f, x: f(x, (slice(2, 1), slice(0, 3, 2))), "ab"),
    ("cat concat concatenate", lambda f, x, y: f([x, y], 1), "ab ac"),
    ("cat", lambda f, x, y: f((x, y), dim=-2), "ab cb"),
    ("cat", lambda f, x, y: f([x, y, x], dim=0), "ab cb"),
    ("stack", lambda f, x, y: f([x, y], 1), "ab ab"),
    ("stack", lambda f, x, y: f([x, y], dim=-1), "ab ab"),
    # reductions
    *[
        ("sum nansum mean amax amin all any count_nonzero", call, s)
        for call in (_one, lambda f, x: f(x, -1), lambda f, x: f(x, dim=0))
        for s in ("ab", "abc")
    ],
    ("sum nansum mean amax amin", lambda f, x: f(x, (0, -1), keepdim=True), "abc"),
    ("all any", lambda f, x: f(x, -1, True), "bab"),
    ("count_nonzero", lambda f, x: f(x, (0, 1)), "iab"),
    ("sum mean nansum", lambda f, x: f(x, 1, dtype=torch.float32), "ab"),
    ("sum mean", lambda f, x: f(x, 1, dtype=torch.float64), "iab"),
    ("sum", _one, "bab"),
    ("max min", _one, "ab"),
    ("max min", lambda f, x, y: f(x, y), "ab b"),
    ("max min", lambda f, x: f(x, 1), "ab"),
    ("max min", lambda f, x: f(x, dim=0, keepdim=True), "ab"),
    ("allclose equal", _two, "ab ab"),
    ("allclose equal", lambda f, x: f(x, x + 0.0), "ab"),
    *[
        ("var std var_mean std_mean", call, "abc")
        for call in (
            _one,
            lambda f, x: f(x, -1),
            lambda f, x: f(x, (0, 1), keepdim=True),
            lambda f, x: f(x, 0, correction=0),
            lambda f, x: f(x, 1, False),
        )
    ],
    ("norm linalg_norm linalg_vector_norm", _one, "ab"),
    ("norm linalg_vector_norm", lambda f, x: f(x, 1, -1), "ab"),
    ("norm linalg_vector_norm", lambda f, x: f(x, math.inf, 0), "ab"),
    ("norm linalg_vector_norm", lambda f, x: f(x, dim=(0, 2), keepdim=True), "abc"),
    ("norm linalg_vector_norm", lambda f, x: f(x, 0), "ab"),
    ("linalg_norm", lambda f, x: f(x, 1), "ab"),
    ("linalg_norm", lambda f, x: f(x, ord=2), "ab"),
    ("linalg_norm", lambda f, x: f(x, math.inf, (0, 1)), "ab"),
    *[
        ("cumsum cumprod cummax cummin logcumsumexp argmax argmin prod softmin softmax log_softmax", call, s)
        for call in (lambda f, x: f(x, 0), lambda f, x: f(x, dim=-1))
        for s in ("ab", "abc")
    ],
    ("softmax log_softmax softmin", lambda f, x: f(x, 1, dtype=torch.float64), "iab"),
    ("special_softmax special_log_softmax", lambda f, x: f(x, 1), "ab"),
    ("argmax argmin prod", _one, "ab"),
    ("argmax argmin prod", lambda f, x: f(x, 1, True), "ab"),
    ("sort argsort", lambda f, x: f(x, 1), "ab"),
    ("sort argsort", lambda f, x: f(x, dim=0, descending=True), "ab"),
    ("sort argsort", _one, "ab"),
    ("topk", lambda f, x: f(x, 1), "ab"),
    ("topk kthvalue", lambda f, x: f(x, 1, 0), "ab"),
    ("kthvalue", lambda f, x: f(x, 1), "ab"),
    ("median mode", lambda f, x: f(x, 1), "ab"),
    ("median", _one, "ab"),
    ("mode", _one, "ab"),
    ("flip", lambda f, x: f(x, (0,)), "ab"),
    ("flip", lambda f, x: f(x, dims=(-1, 0)), "ab"),
    ("diff", _one, "ab"),
    ("diff", lambda f, x: f(x, 1, 0), "ab"),
    ("diff", lambda f, x: f(x, dim=0, prepend=x[:1]), "ab"),
    ("roll", lambda f, x: f(x, 1, 1), "ab"),
    ("roll", lambda f, x: f(x, (1, -2), (0, 1)), "ab"),
    ("roll", lambda f, x: f(x, 2), "ab"),
    ("glu", lambda f, x: f(x), "a4"),
    ("glu", lambda f, x: f(x, 0), "4a"),
    ("normalize", lambda f, x: f(x), "ab"),
    ("normalize", lambda f, x: f(x, dim=0), "ab"),
    ("normalize", lambda f, x: f(x, 2.0, -1), "abc"),
    ("logsumexp special_logsumexp", lambda f, x: f(x, (0, -1), True), "abc"),
    ("logsumexp special_logsumexp", lambda f, x: f(x, 1), "ab"),
    # products
    ("matmul linalg_matmul __matmul__", _two, "ab bc"),
    ("matmul linalg_matmul __matmul__", _two, "dab bc"),
    ("matmul", _two, "dab dbc"),
    ("matmul __matmul__", _two, "edab 1dbc"),
    ("matmul", _two, "ab b"),
    ("matmul", _two, "b bc"),
    ("__rmatmul__", lambda f, x, y: f(y, x), "ab bc"),
    ("mm", _two, "ab bc"),
    ("bmm", _two, "dab dbc"),
    ("mv", _two, "ab b"),
    ("dot inner", _two, "b b"),
    ("inner", _two, "ab cb"),
    ("outer ger", _two, "a b"),
    ("addmm", lambda f, c, a, b: f(c, a, b, beta=0.5, alpha=2), "c ab bc"),
    ("addmv", lambda f, c, a, b: f(c, a, b), "a ab b"),
    ("baddbmm", lambda f, c, a, b: f(c, a, b, alpha=2), "dac dab dbc"),
    ("einsum", lambda f, x, y: f("ab,cb->ac", x, y), "ab cb"),
    ("einsum", lambda f, x, y: f("ab,bc", [x, y]), "ab bc"),
    ("einsum", lambda f, x, y: f("...ab,...cb->...ac", x, y), "dab dcb"),
    ("einsum", lambda f, x: f("aab->b", x), "33b"),
    ("einsum", lambda f, x: f("ab->", x), "ab"),
    ("einsum", lambda f, x, y: f("ab,ab->a", x, y), "ab 1b"),
    ("linear", lambda f, x, w, b: f(x, w, b), "ab cb c"),
    ("linear", lambda f, x, w, b: f(x, w, bias=b), "dab cb c"),
    ("linear", lambda f, x, w: f(x, w), "b cb"),
    ("linear", lambda f, x, w, b: f(x.flatten(1), w, b), "a23 c6 c"),
    # layers
    ("conv1d", lambda f, x, w, b: f(x, w, b, padding=1), "abn cb3 c"),
    ("conv1d", lambda f, x, w: f(x, w), "bn cb1"),
    ("conv2d", lambda f, x, w, b: f(x, w, b, 2, 1), "ab78 cb33 c"),
    ("conv2d", lambda f, x, w: f(x, w, padding="same"), "ab56 cb33"),
    ("conv2d", lambda f, x, w, b: f(x, w, b, groups=2), "a456 4233 4"),
    ("conv3d", lambda f, x, w, b: f(x, w, b, padding=(1, 0, 1)), "2b345 cb212 c"),
    ("conv_transpose1d", lambda f, x, w, b: f(x, w, b, 2), "abn bc3 c"),
    ("conv_transpose2d", lambda f, x, w, b: f(x, w, b, 2, 1, 1), "ab56 bc33 c"),
    ("conv_transpose3d", lambda f, x, w: f(x, w), "2b345 bc212"),
    ("max_pool1d max_pool1d_with_indices avg_pool1d", _pool(2), "ab7"),
    ("max_pool2d max_pool2d_with_indices avg_pool2d", _pool(2, 1), "ab67"),
    ("max_pool2d avg_pool2d", _pool((3, 2), ceil_mode=True), "b67"),
    ("max_pool2d avg_pool2d", _pool(3, 2, 1), "ab78"),
    ("max_pool3d max_pool3d_with_indices avg_pool3d", _pool(2), "2b456"),
    ("adaptive_avg_pool1d", _pool(2), "ab6"),
    ("adaptive_avg_pool2d", _pool(1), "ab67"),
    ("adaptive_avg_pool2d", _pool((3, None)), "ab67"),
    ("adaptive_avg_pool3d", _pool((2, 1, 3)), "2b456"),
    ("pad", lambda f, x: f(x, (1, 2)), "ab"),
    ("pad", lambda f, x: f(x, (1, 2, 0, 1), value=2.5), "ab"),
    ("pad", lambda f, x: f(x, (1, 1), mode="reflect"), "ab4"),
    ("pad", lambda f, x: f(x, (1, 2, 2, 1), "circular"), "ab45"),
    ("pad", lambda f, x: f(x, (1, 2, 2, 1), "replicate"), "ab45"),
    ("interpolate upsample", lambda f, x: f(x, scale_factor=2), "ab45"),
    ("interpolate upsample", lambda f, x: f(x, 7, mode="linear"), "ab5"),
    ("interpolate", lambda f, x: f(x, size=(7, 3), mode="bilinear", align_corners=True), "ab45"),
    ("interpolate", lambda f, x: f(x, size=(7, 6), mode="bicubic"), "ab45"),
    ("interpolate", lambda f, x: f(x, size=3, mode="area"), "ab6"),
    ("scaled_dot_product_attention", lambda f, q, k, v: f(q, k, v), "nhad nhbd nhbe"),
    ("scaled_dot_product_attention", lambda f, q, k, v: f(q, k, v, is_causal=True), "nhad nhad nhad"),
    ("scaled_dot_product_attention", lambda f, q, k, v, m: f(q, k, v, m), "nhad nhbd nhbe 11ab"),
    ("scaled_dot_product_attention", lambda f, q, k, v, m: f(q, k, v, attn_mask=m), "nhad nhbd nhbe ab"),
    ("dropout dropout_", lambda f, x: f(x.clone(), 0.5, False), "ab"),
    ("dropout1d dropout2d alpha_dropout", lambda f, x: f(x, 0.5, False), "abn"),
    ("dropout3d", lambda f, x: f(x, 0.5, False), "abn23"),
    ("feature_alpha_dropout feature_dropout", lambda f, x: f(x, 0.5, False), "abcn"),
    ("embedding", lambda f, i, w: F.embedding(i % w.shape[0], w), "ian nb"),
    ("embedding", lambda f, i, w: F.embedding(i % w.shape[0], w, 0), "ia nb"),
    ("batch_norm", lambda f, x, w, b: _normed(f, x, w, b, True, 0.1, 1e-5), "abn b b"),
    ("batch_norm", lambda f, x, m, v: F.batch_norm(x, m.detach(), v.detach()), "ab b +b"),
    ("layer_norm", lambda f, x, w, b: f(x, (x.shape[-1],), w, b), "anb b b"),
    ("layer_norm", lambda f, x: f(x, x.shape[-2:]), "anb"),
    ("rms_norm", lambda f, x, w: f(x, (x.shape[-1],), w), "anb b"),
    ("group_norm", lambda f, x, w, b: f(x, 2, w, b), "a4n 4 4"),
    ("instance_norm", lambda f, x, w, b: _normed(f, x, w, b, True, 0.1, 1e-5), "abn4 b b"),
    ("_weight_norm", lambda f, v, g: f(v, g, 0), "+abc +a11"),
    ("_weight_norm", lambda f, v, g: f(v, g, 1), "+ab +1b"),
    # losses
    ("mse_loss l1_loss smooth_l1_loss huber_loss", _two, "ab ab"),
    ("mse_loss l1_loss smooth_l1_loss huber_loss", lambda f, x, y: f(x, y, reduction="none"), "ab ab"),
    ("mse_loss l1_loss", lambda f, x, y: f(x, y, reduction="sum"), "abc abc"),
    ("kl_div", lambda f, x, y: f(x, y, reduction="batchmean"), "ab +ab"),
    ("kl_div", lambda f, x, y: f(x, y, reduction="sum"), "ab +ab"),
    ("binary_cross_entropy", lambda f, x, y: f(x, y), "+ab +ab"),
    ("binary_cross_entropy_with_logits", lambda f, x, y, w: f(x, y, w.detach()), "ab +ab b"),
    ("poisson_nll_loss", lambda f, x, y: f(x, y), "ab +ab"),
    ("nll_loss", lambda f, x, y: f(x.log_softmax(1), y % x.shape[1]), "ab ia"),
    ("cross_entropy", lambda f, x, y: f(x, y % x.shape[1]), "ab ia"),
    ("cross_entropy", lambda f, x, y: f(x, y % x.shape[1], label_smoothing=0.1), "abn ian"),
    ("cross_entropy", lambda f, x, y, w: f(x, y % x.shape[1], w.detach(), reduction="sum"), "ab ia +b"),
    ("cross_entropy", lambda f, x, y: f(x, y.softmax(1)), "ab ab"),
    ("cross_entropy", lambda f, x, y: f(x, y % x.shape[0]), "b i"),
    (
        "multi_head_attention_forward",
        lambda f, q, k, v, w, b, o, c: f(q, k, v, 2, 2, w, b, None, None, False, 0.0, o, c)[0],
        "na2 ma2 ma2 62 6 22 2",
    ),
    # Fourier transforms
    ("fft_fft fft_ifft", lambda f, x: f(x, dim=0), "cab"),
    ("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft", lambda f, x: f(x), "ab"),
    ("fft_rfft fft_fft", lambda f, x: f(x, 4, 0), "ab"),
    ("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn", _one, "abn"),
    ("fft_rfftn fft_fftn", lambda f, x: f(x, dim=(0, -1)), "abn"),
]


def _normed(f: Any, x: Any, w: Any, b: Any, *rest: Any) -> Any:
    """Functions of `torch` take the parameters before the running statistics."""
    return (
        f(x, None, None, w, b, *rest) if f.__module__ == "torch.nn.functional" else f(x, w, b, None, None, *rest, False)
    )


def called(f: Any) -> str:
    """The name of a function in the table. Attributes have a point in front."""
    return f".{f.__self__.__name__}" if f.__name__ == "__get__" else f.__name__


def calls() -> dict[str, list[Call]]:
    table: dict[str, list[Call]] = {}
    for names, call, operands in ROWS:
        for name in names.split():
            table.setdefault(name, []).append(Call(call, tuple(operands.split())))
    return table


CALLS = calls()
