"""Terms of a loss that are one value on all workers, added to one that differs between them.

The gradient of a Varying scalar is that of the sum over the workers, so such a term counts once for each of them. That
may be meant; mostly a penalty on the parameters was to count once. So it is a warning. So is the mean over workers of
such a gradient, the habit of programs whose gradients are each worker's own.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Any

from spmd.autodiff.tracer import Array
from spmd.errors import caller, message, one_or_all
from spmd.mesh import Worker

__all__ = ["is_share", "remember_sums", "repeated_terms", "warn_of_summed_gradient", "warn_of_term"]

_ADDITIONS = frozenset(("add", "subtract", "negative", "positive"))


def repeated_terms(node: Any, joined: Any) -> Iterable[Any]:
    """The nodes that vary an Invariant term of a scalar: those of `joined` from which only additions lead to it."""
    stack, seen = [node], set()
    while stack:
        node = stack.pop()
        if id(node) in seen or node.prim is None:
            continue
        seen.add(id(node))
        if id(node) in joined:
            yield node
        elif node.prim.name.removeprefix("np.") in _ADDITIONS:
            stack += node.parents


def is_share(name: str, numbers: Iterable[Any], count: int) -> bool:
    """Whether an operation divides by the number of workers: then the copies of a term make one."""
    wanted = count if name.startswith("div") else 1 / count if name.startswith("mul") else None
    return wanted is not None and any(isinstance(n, int | float) and math.isclose(n, wanted) for n in numbers)


def warn_of_term(where: str, axes: tuple[str, ...], count: int, worker: Worker) -> None:
    """Warn of a term that counts once per worker, on one of them; Python shows it once for each line."""
    named = one_or_all(axes)
    text = message(
        where,
        got=f"a scalar that varies over {named}, of which a term is one value on all workers: the gradient is that of "
        f"the sum over the workers, in which the term counts {count} times",
        need="a term that counts once, if it is a penalty on parameters, say",
        mend=f"sum first, and add then: psum(loss, {named}) + term, or mean(loss, {named}) + term; or "
        f"term / axis_size({named}); pvary(term, {named}) says that it is to count for each worker",
    )
    _warn(text, worker)


_SUMS: ContextVar[dict[int, tuple[Callable[[], Any], frozenset[str]]]] = ContextVar("_SUMS", default={})  # noqa: B039
"""By id the latest gradients of a worker that are sums over workers, as references, and the axes of the sum."""


def remember_sums(gradients: Iterable[Any], axes: frozenset[str]) -> None:
    """Remember the gradients of a scalar that varies over these axes which do not vary: they are sums over workers."""
    arrays = [g for g in gradients if type(g) is Array and g.state is not None and not axes <= g.state.varying]
    _SUMS.set({id(g): (weakref.ref(g), axes) for g in arrays})


def warn_of_summed_gradient(where: str, x: Any, axes: Sequence[str], worker: Worker) -> None:
    """Warn of the mean over workers of a gradient that is their sum already: it is the sum itself."""
    gradient, over = _SUMS.get().get(id(x), (None, frozenset()))
    axes = tuple([n for n in axes if n in over])
    count = worker.group(axes).size if axes else 1
    if gradient is None or gradient() is not x or count == 1:
        return
    named = one_or_all(axes)
    text = message(
        where,
        got=f"the gradient of a scalar that varies over {named}, by an array that is one value: it is the sum over the "
        f"{count} workers, alike on each of them, so that its mean over them is the sum too",
        need=f"the gradient of the mean, if that is meant: it is 1/{count} of the sum",
        mend=f"a loss that is a mean over all workers: pmean(loss, {named}), or spmd.mean(errors, {named}); its "
        f"gradient needs no pmean. Or spmd.grad(loss)(pvary(params, {named})): each worker's own gradient, whose mean "
        "pmean takes",
    )
    _warn(text, worker)


def _warn(text: str, worker: Worker) -> None:
    """Warn at the user's line, on one worker."""
    if worker.index:
        return
    frame = caller()
    if frame is None:
        warnings.warn(text, UserWarning, stacklevel=2)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry)
