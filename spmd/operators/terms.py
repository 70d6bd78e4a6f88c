"""Terms of a loss that are one value on all workers, added to one that differs between them.

The gradient of a Varying scalar is that of the sum over the workers, so such a term counts once for each of them. That
may be meant; mostly a penalty on the parameters was to count once. So it is a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from typing import Any

from spmd.errors import caller, message
from spmd.mesh import Worker

__all__ = ["is_share", "repeated_terms", "warn_of_term"]

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
    if worker.index:
        return
    named = repr(axes[0]) if len(axes) == 1 else repr(axes)
    text = message(
        where,
        got=f"a scalar that varies over {named}, of which a term is one value on all workers: the gradient is that of "
        f"the sum over the workers, in which the term counts {count} times",
        need="a term that counts once, if it is a penalty on parameters, say",
        mend=f"sum first, and add then: psum(loss, {named}) + term, or mean(loss, {named}) + term; or "
        f"term / axis_size({named}); pvary(term, {named}) says that it is to count for each worker",
    )
    frame = caller()
    if frame is None:
        warnings.warn(text, UserWarning, stacklevel=2)
        return
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, registry=registry)
