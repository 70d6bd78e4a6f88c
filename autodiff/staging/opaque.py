"""Functions that read values, as one line of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.errors import JitError

__all__ = ["Opaque"]


class Opaque:
    """A function that reads values. It raises if its results have other shapes than when it was recorded."""

    def __init__(self, fun: Callable[..., Any]):
        self.fun = fun
        self.__name__ = getattr(fun, "__name__", type(fun).__name__).replace("<lambda>", "rule")
        self.kinds: list[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.fun(*args, **kwargs)
        kinds = _shapes(result, [])
        if self.kinds is None:
            self.kinds = kinds
        elif kinds != self.kinds:
            raise JitError.at(
                f"{self.__name__}, within spmd.jit",
                got=f"a result of {', '.join(kinds)}",
                need=f"one of {', '.join(self.kinds)}, as when the program was recorded",
                mend="a function whose result has one shape whatever the values are; or leave spmd.jit out",
            )
        return result


def _shapes(tree: Any, into: list[str]) -> list[str]:
    if isinstance(tree, tuple | list):
        for t in tree:
            _shapes(t, into)
    elif hasattr(tree, "dtype"):
        into.append(f"{tree.dtype}{[*tree.shape]}")
    return into
