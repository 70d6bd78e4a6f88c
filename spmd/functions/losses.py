"""Losses of arrays that lie anyhow: entry by entry, and their sums and means over all workers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, cast

from spmd.autodiff.signatures import Tree
from spmd.errors import SpecError, describe
from spmd.functions.arguments import as_number, layer
from spmd.functions.global_operands import broadcast_spec, first_global, layout_of_values, run_by_specs
from spmd.functions.layouts import check_spec, floating_operand, layout_of_operand
from spmd.functions.local import local
from spmd.functions.movement import varied
from spmd.functions.reductions import check_reduction, reduced
from spmd.global_ops.call import global_value, names_of
from spmd.grid import Grid
from spmd.layout import Layout, P, Spec
from spmd.mesh import here
from spmd.tracebacks import api_boundary

__all__ = [
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "huber_loss",
    "kl_div",
    "l1_loss",
    "mse_loss",
    "poisson_nll_loss",
    "smooth_l1_loss",
]


@dataclass(frozen=True)
class _Loss:
    """A loss of entries.

    terms: the function of the local family. options: its further arguments; of one that takes_pos_weight, that alone.
    divides_by_weights: the mean divides by the sum of the weights, not by the number of entries.
    """

    where: str
    terms: str
    reduction: str
    options: tuple[Any, ...] = ()
    divides_by_weights: bool = False
    takes_pos_weight: bool = False

    def __call__(self, spec: Spec | None, x: Any, target: Any, weight: Any, pos_weight: Any) -> Any:
        """The loss of blocks that lie by spec; None: of whole arrays."""
        weight, pos_weight = (_fitting(self.where, name, w, x, spec) for name, w in _named(weight, pos_weight))
        extra = (pos_weight,) if self.takes_pos_weight else self.options
        loss = getattr(local(x, "losses"), self.terms)(x, target, *extra)
        loss = loss if weight is None else loss * weight
        weights = weight if self.divides_by_weights else None
        if spec is None:
            count = x.shape[0] if self.reduction == "batchmean" else None
            return reduced(self.where, loss, weights, self.reduction, count=count)
        count = _batch(self.where, x, spec) if self.reduction == "batchmean" else None
        return reduced(self.where, loss, weights, self.reduction, split_axes(spec), count=count)


def _named(weight: Any, pos_weight: Any) -> list[tuple[str, Any]]:
    return [("weight", weight), ("pos_weight", pos_weight)]


def split_axes(spec: Spec) -> tuple[str, ...]:
    """The axes over which the blocks of an array lie."""
    return tuple(spec.axes) if isinstance(spec, Layout) and spec.spec is None else spec_of(spec).axes


def spec_of(spec: Spec) -> P:
    return spec.spec if isinstance(spec, Layout) else spec


def _batch(where: str, x: Any, spec: Spec) -> int:
    """The length of this worker's part of the first dimension; 0 where another worker counts it."""
    worker = here(where)
    if isinstance(spec, Layout) and spec.spec is None:
        place = spec.positions(worker.index)
        return x.shape[0] if place is not None and not any(place[1:]) else 0
    at = worker.mesh.coordinates(worker.index)
    others = itertools.chain.from_iterable(names_of(spec_of(spec), x.ndim)[1:])
    return 0 if any(at[n] for n in others) else x.shape[0]


def _fitting(where: str, argument: str, w: Any, x: Any, spec: Spec | None) -> Any:
    """A weight for the entries of a block, as a value for each worker along the axes that do not split it."""
    if w is None:
        return None
    grid = spec if isinstance(spec, Layout) and spec.spec is None else None
    first = x.ndim - w.ndim
    if grid is not None and grid.positions(here(where).index) is None and first >= 0:
        w = w[tuple(slice(0, n) for n in x.shape[first:])]  # those who hold nothing may have the whole
    split = [()] * x.ndim if spec is None else _split_dims(spec, x.ndim)
    # Where states are not tracked, a length of 1 does not tell a block from what is the same for all blocks.
    tracked = spec is not None and here(where).tracked
    fits = first >= 0 and all(
        n == m or (n == 1 and (tracked or not names))
        for n, m, names in zip(w.shape, x.shape[first:], split[first:], strict=True)
    )
    if not fits:
        raise SpecError.at(
            where,
            argument=argument,
            got=f"{describe(w)} for x of shape {list(x.shape)}",
            need="an array that broadcasts to x, with the lengths of x in the dimensions that are split",
            mend=f"np.broadcast_to({argument}, x.shape)",
        )
    if spec is None:
        return w
    own = {n for names in split[first:] for n in names}
    if grid is not None:
        return w if own else varied(w, tuple(grid.axes))
    return varied(w, [n for n in split_axes(spec) if n not in own])


def _split_dims(spec: Spec, ndim: int) -> Sequence[Sequence[str]]:
    """What splits each dimension: axes, or anything for a grid."""
    if isinstance(spec, Layout) and spec.spec is None:
        return [("blocks",) if len(cut) > 1 else () for cut in spec.cuts]
    return names_of(spec_of(spec), ndim)


def _run(loss: _Loss, x: Any, target: Any, weight: Any, pos_weight: Any, spec: Spec | None) -> Any:
    x, target = floating_operand(loss.where, "x", x), floating_operand(loss.where, "target", target)
    weight, pos_weight = (
        None if w is None else floating_operand(loss.where, name, w) for name, w in _named(weight, pos_weight)
    )
    _check_shapes(loss, x, target)
    operands = [x, target, weight, pos_weight]
    value = first_global(*operands)
    if spec is not None:
        return loss(check_block(loss.where, x, spec), *operands)
    if value is None:
        return loss(None, *operands)
    lies = layout_of_values(value, x.shape)
    specs = [None if a is None else broadcast_spec(lies, a.shape) for a in operands]
    out = lies if loss.reduction == "none" else P()
    return run_by_specs(loss.where, loss, lies, operands, specs, out, value)


def _check_shapes(loss: _Loss, x: Any, target: Any) -> None:
    if tuple(x.shape) != tuple(target.shape):
        got = f"{describe(target)} for x of shape {list(x.shape)}"
        mend = "np.broadcast_to(target, x.shape), or reshape one of them"
        raise SpecError.at(loss.where, argument="target", got=got, need="the shape of x", mend=mend)
    if loss.reduction == "batchmean" and not x.ndim:
        need = "an array with a batch dimension"
        raise SpecError.at(loss.where, argument="x", got=describe(x), need=need, mend='reduction="mean"')


# Specs: in bodies those that are given; of global arrays those by which they lie.


def check_block(where: str, x: Any, spec: Spec | Grid, argument: str = "spec") -> Spec:
    """Raise unless spec may say how the array lies of which x is a block. Gives it, and for a grid the layout.

    Only for a grid something is sent: the shapes of the blocks.
    """
    if isinstance(spec, P) and global_value(x) is None:
        check_spec(where, argument, x, spec, here(where))
        return spec
    layout = layout_of_operand(where, argument, x, cast(Any, spec))
    return layout if isinstance(spec, Grid) else spec


# The losses


def _made(name: str, terms: str, reduction: str, *options: Any, more: tuple[str, ...] = (), **flags: bool) -> _Loss:
    where = f"spmd.functions.{name}"
    check_reduction(where, reduction, ("none", "sum", "mean", *more))
    return _Loss(where, terms, reduction, options, **flags)


@api_boundary
@layer
def l1_loss(x: Tree, target: Any, *, weight: Any = None, reduction: str = "mean", spec: Spec | None = None) -> Tree:
    """|x - target|, entry by entry, or the sum or the mean of it.

    x, target: floating, of one shape; arrays of NumPy, CuPy or PyTorch. weight: of the same shape, a factor for each
    entry, or None. reduction: "none", "sum", or "mean": the sum divided by the number of entries, or by the sum of the
    weights. The mean of nothing is NaN.
    spec: in a body, how the whole x is split, of which x, target and weight are blocks: a spec, or a `Layout` on some
    of the workers. The sum and the mean are over the entries of all workers, and Invariant. None: over those of this
    worker. Outside of bodies global arrays have their layouts.

    Cost: with a spec one all-reduce of a number, or of two for a mean; backward nothing.
    Adjoint of the derivative, for x: g sign(x - target), and - that for target; of a mean divided by the count.
    Raises SpecError for other shapes, dtypes and reductions, StateError where spec names an axis along which all
    workers have the same. Source: as torch.nn.functional.l1_loss.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.array([1.0, 2.0, 5.0, 4.0]), P("x"))
        ...     value, g = spmd.value_and_grad(lambda x: spmd.functions.l1_loss(x, np.full(4, 2.0)))(x)
        >>> value.item(), g
        (1.5, PartitionedArray([-0.25,  0.  ,  0.25,  0.25], dtype=float64, spec=P('x')))
    """
    loss = _made("l1_loss", "absolute", reduction, divides_by_weights=weight is not None)
    return _run(loss, x, target, weight, None, spec)


@api_boundary
@layer
def mse_loss(x: Tree, target: Any, *, weight: Any = None, reduction: str = "mean", spec: Spec | None = None) -> Tree:
    """(x - target)^2: arguments, cost and errors as `l1_loss`. Adjoint of the derivative: 2 g (x - target).

    Source: as torch.nn.functional.mse_loss.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.array([1.0, 2.0, 6.0]), P("x"))
        ...     value, g = spmd.value_and_grad(lambda x: spmd.functions.mse_loss(x, np.array([1.0, 2.0, 3.0])))(x)
        >>> value.item(), g
        (3.0, PartitionedArray([0., 0., 2.], dtype=float64, spec=P('x')))
    """
    loss = _made("mse_loss", "square", reduction, divides_by_weights=weight is not None)
    return _run(loss, x, target, weight, None, spec)


@api_boundary
@layer
def smooth_l1_loss(
    x: Tree, target: Any, *, reduction: str = "mean", beta: float = 1.0, spec: Spec | None = None
) -> Tree:
    """With d = |x - target|: d^2 / (2 beta) where d < beta, d - beta / 2 elsewhere. `huber_loss` divided by beta.

    beta: at least 0; 0 gives `l1_loss`. The rest as `l1_loss`. Source: as torch.nn.functional.smooth_l1_loss;
    Girshick, "Fast R-CNN", 2015.

        >>> def loss(x):
        ...     return spmd.functions.smooth_l1_loss(x, np.zeros(2), reduction="sum", beta=2.0)
        >>> spmd.value_and_grad(loss)(np.array([1.0, 5.0]))
        (np.float64(4.25), array([0.5, 1. ]))
    """
    beta = as_number("spmd.functions.smooth_l1_loss", "beta", beta, 0, inf)
    return _run(_made("smooth_l1_loss", "smooth_absolute", reduction, beta), x, target, None, None, spec)


@api_boundary
@layer
def huber_loss(
    x: Tree, target: Any, *, weight: Any = None, reduction: str = "mean", delta: float = 1.0, spec: Spec | None = None
) -> Tree:
    """With d = |x - target|: d^2 / 2 where d <= delta, delta (d - delta / 2) elsewhere.

    delta: above 0. The rest as `l1_loss`, but the mean divides by the number of entries also with weights, as in torch.
    Source: as torch.nn.functional.huber_loss; Huber, "Robust estimation of a location parameter", 1964.

        >>> def loss(x):
        ...     return spmd.functions.huber_loss(x, np.zeros(3), reduction="sum")
        >>> spmd.value_and_grad(loss)(np.array([0.5, 1.0, 4.0]))
        (np.float64(4.125), array([0.5, 1. , 1. ]))
    """
    where = "spmd.functions.huber_loss"
    delta = as_number(where, "delta", delta, 0, inf)
    if not delta:
        raise SpecError.at(where, argument="delta", got="0", need="a number above 0", mend="delta=1.0")
    return _run(_made("huber_loss", "huber", reduction, delta), x, target, weight, None, spec)


@api_boundary
@layer
def binary_cross_entropy(
    x: Tree, target: Any, *, weight: Any = None, reduction: str = "mean", spec: Spec | None = None
) -> Tree:
    """-(target log(x) + (1 - target) log(1 - x)), for probabilities x. Logarithms below -100 count as -100.

    x, target: from 0 to 1. weight: a factor for each entry, which broadcasts to x; in dimensions that are split it has
    the lengths of the block. The mean divides by the number of entries. The rest as `l1_loss`.
    Adjoint of the derivative: g (x - target) / max(x (1 - x), 1e-12). Source: as
    torch.nn.functional.binary_cross_entropy.

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.array([0.5, 0.5, 0.25]), P("x"))
        ...     spmd.functions.binary_cross_entropy(x, np.array([1.0, 0.0, 1.0]), reduction="sum") / np.log(2.0)
        PartitionedArray(4., dtype=float64, spec=P())
    """
    return _run(_made("binary_cross_entropy", "binary", reduction), x, target, weight, None, spec)


@api_boundary
@layer
def binary_cross_entropy_with_logits(
    x: Tree,
    target: Any,
    *,
    weight: Any = None,
    reduction: str = "mean",
    pos_weight: Any = None,
    spec: Spec | None = None,
) -> Tree:
    """`binary_cross_entropy` of sigmoid(x), without overflow: (1 - target) x + log(1 + exp(-x)).

    pos_weight: a factor of the terms of positive targets, which broadcasts to x as weight does. The rest as
    `binary_cross_entropy`. Adjoint of the derivative: g (sigmoid(x) - target) without pos_weight.
    Source: as torch.nn.functional.binary_cross_entropy_with_logits.

        >>> def loss(x):
        ...     return spmd.functions.binary_cross_entropy_with_logits(x, np.array([1.0, 0.0]), reduction="sum")
        >>> spmd.grad(loss)(np.array([0.0, 0.0]))
        array([-0.5,  0.5])
    """
    loss = _made("binary_cross_entropy_with_logits", "binary_of_logits", reduction, takes_pos_weight=True)
    return _run(loss, x, target, weight, pos_weight, spec)


@api_boundary
@layer
def kl_div(
    x: Tree, target: Any, *, reduction: str = "mean", log_target: bool = False, spec: Spec | None = None
) -> Tree:
    """target (log(target) - x), for logarithms x of probabilities: the divergence of Kullback and Leibler.

    log_target: whether target has logarithms too. reduction: also "batchmean", the sum divided by the length of the
    whole x in its first dimension, which is the divergence per item; "mean" divides by the number of entries.
    The rest as `l1_loss`. Adjoint of the derivative, for x: -g target. Source: as torch.nn.functional.kl_div.

        >>> p = np.array([[0.5, 0.5], [1.0, 0.0]])
        >>> with spmd.Mesh(data=2):
        ...     x = spmd.put(np.log([[0.25, 0.75], [0.5, 0.5]]), P("data"))
        ...     spmd.functions.kl_div(x, p, reduction="batchmean").numpy().round(4)
        np.float64(0.4185)
    """
    loss = _made("kl_div", "kl_div", reduction, bool(log_target), more=("batchmean",))
    return _run(loss, x, target, None, None, spec)


@api_boundary
@layer
def poisson_nll_loss(
    x: Tree,
    target: Any,
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: str = "mean",
    spec: Spec | None = None,
) -> Tree:
    """exp(x) - target x, for the logarithm x of a Poisson distribution's mean; x - target log(x + eps) for the mean.

    log_input: whether x is the logarithm. full: with Stirling's approximation of log(target!) where target > 1.
    The rest as `l1_loss`. Adjoint of the derivative, for x: g (exp(x) - target). Source: as
    torch.nn.functional.poisson_nll_loss.

        >>> def loss(x):
        ...     return spmd.functions.poisson_nll_loss(x, np.array([1.0, 3.0]), reduction="sum")
        >>> spmd.value_and_grad(loss)(np.zeros(2))
        (np.float64(2.0), array([ 0., -2.]))
    """
    eps = as_number("spmd.functions.poisson_nll_loss", "eps", eps, 0, inf)
    loss = _made("poisson_nll_loss", "poisson", reduction, bool(log_input), bool(full), eps)
    return _run(loss, x, target, None, None, spec)
