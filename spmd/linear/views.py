"""An operator, its adjoint, its transpose and its conjugate, as views of one pair of maps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from spmd.linear.operator import LinearOperator
from spmd.linear.space import conj_tree


class Base:
    """A linear map and its transpose. Operators are views of it."""

    name: str
    domain: Any
    range: Any
    parameters: list

    def forward(self, x: Any) -> Any:
        raise NotImplementedError

    def transposed(self, y: Any) -> Any:
        raise NotImplementedError

    def with_parameters(self, f: Callable[[Any], Any]) -> Base:
        return self


class View(LinearOperator):
    """A view of a map: itself (""), its adjoint ("H"), its transpose ("T"), or its conjugate ("conj")."""

    __slots__ = ("base", "mode")

    def __init__(self, base: Base, mode: str = ""):
        self.base, self.mode = base, mode

    def _view(self, table: Mapping[str, str]) -> View:
        mode = table[self.mode]
        if self.dtype.kind != "c":  # a real matrix is its own conjugate
            mode = {"T": "H", "conj": ""}.get(mode, mode)
        return View(self.base, mode)

    @property
    def H(self) -> LinearOperator:
        return self._view({"": "H", "H": "", "T": "conj", "conj": "T"})

    @property
    def T(self) -> LinearOperator:
        return self._view({"": "T", "T": "", "H": "conj", "conj": "H"})

    @property
    def domain(self) -> Any:
        return self.base.domain if self.mode in ("", "conj") else self.base.range

    @property
    def range(self) -> Any:
        return self.base.range if self.mode in ("", "conj") else self.base.domain

    def _apply(self, x):
        f = self.base.forward if self.mode in ("", "conj") else self.base.transposed
        return f(x) if self.mode in ("", "T") else conj_tree(f(conj_tree(x)))

    def _map_parameters(self, f):
        return View(self.base.with_parameters(f), self.mode)

    @property
    def _parameters(self):
        return self.base.parameters

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View) and (self.base, self.mode) == (other.base, other.mode)

    def __hash__(self) -> int:
        return hash((self.base, self.mode))

    def __str__(self) -> str:
        return self.base.name + {"": "", "conj": ".H.T"}.get(self.mode, f".{self.mode}")
