"""The report of a dot test: its figures, and the entries in which F* is not F^H."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from spmd.representations.numbers import count_text
from spmd.representations.tables import Displayed, Report, Table

__all__ = ["AdjointError", "AdjointReport", "Entry", "Fault", "Place", "as_number", "number_text", "table"]

Shape = tuple[int, ...]


class Fault(NamedTuple):
    """A fault. kind: a word for it, which shrinking preserves.

    >>> def twice(y):
    ...     return (2 * y,)
    >>> with spmd.Mesh(x=2):
    ...     report = spmd.check_adjoint(lambda x: x, (2,), in_specs=P("x"), adjoint=twice, raises=False)
    >>> report.faults[0].kind
    'value'
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


class Place(NamedTuple):
    """One number of an argument or of a result.

    part: the position of the argument or result. worker: the first one that holds the number. local: the index in its
    block. whole: the index in the global array, if its layout is known. unit: "re" or "im" if the map is linear over
    the reals only.

        >>> def twice(y):
        ...     return (2 * y,)
        >>> with spmd.Mesh(x=2):
        ...     report = spmd.check_adjoint(lambda x: x, (4,), in_specs=P("x"), adjoint=twice, raises=False)
        >>> place = report.entries[-1].x
        >>> place.worker, place.local, place.whole
        ('worker 1 (x=1)', (1,), (3,))
    """

    name: str
    part: int
    worker: str
    local: Shape
    whole: Shape | None = None
    unit: str = ""

    def __str__(self) -> str:
        def subscript(index: Shape) -> str:
            return f"[{', '.join(map(str, index))}]" if index else ""

        name = f"{self.name}{self.part or ''}{subscript(self.local if self.whole is None else self.whole)}"
        local = f", {subscript(self.local)} of its block" if self.whole is not None and self.whole != self.local else ""
        return f"{self.unit} {name} ({self.worker}{local})".lstrip()


class Entry(NamedTuple):
    """An entry in which the matrix of F* is not F^H. y: its column, of a result. x: its row, of an argument.

    >>> def twice(y):
    ...     return (2 * y,)
    >>> with spmd.Mesh(x=2):
    ...     report = spmd.check_adjoint(lambda x: x, (2,), in_specs=P("x"), adjoint=twice, raises=False)
    >>> print(report.entries[0])
    from y[0] (worker 0 (x=0)) to x[0] (worker 0 (x=0)): 2, needed 1
    """

    x: Place
    y: Place
    needed: complex
    given: complex

    def __str__(self) -> str:
        return f"from {self.y} to {self.x}: {number_text(self.given)}, needed {number_text(self.needed)}"


class AdjointError(AssertionError):
    """Two maps are not adjoint to each other. report: the `AdjointReport`.

    >>> def body(x):
    ...     return spmd.shift(x, "x")
    >>> with spmd.Mesh(x=3):
    ...     spmd.check_adjoint(body, (3,), in_specs=P("x"), adjoint=lambda y: (body(y),))
    Traceback (most recent call last):
        ...
    spmd.adjoints.report.AdjointError: body of (3,) on Mesh(x=3): NOT adjoint (float, 3 trials)
      ...
      looks like: F* does what F does: it goes the same way once more, and not back
      reproduce: ...
    """

    def __init__(self, report: AdjointReport):
        super().__init__(str(report))
        self.report = report


@dataclass(eq=False)
class AdjointReport(Displayed):
    """The result of a dot test.

    passed: the verdict, the same on all workers. name, shapes, mesh: of the tested map. mode: "exact" (integers,
    equality) or "float". forward: <F x, y>, backward: <x, F* y>, of the trial with the largest error. error: |forward -
    backward| relative to |F x| |y| + |x| |F* y|; bound: the largest error that rounding explains. faults: what is
    wrong. messages, bytes: what all workers send for one F; declared: the cost that an operator declares.

    After a failure: smallest: the report of the smallest case found that fails in the same way; this report if there is
    none. differing: in how many of `entries_of` entries the matrix of F* is not F^H; entries: the first of them.
    bisected: the matrix is too large: entries are some that bisection has found, and differing is unknown, 0. hint: the
    kind of fault that they suggest. reproduce: a line of Python that fails in this way.

        >>> with spmd.Mesh(x=3):
        ...     report = spmd.check_adjoint(lambda x: spmd.shift(x, "x"), (6,), in_specs=P("x"))
        >>> report.passed, report.mode, report.messages, report.bytes
        (True, 'float', 3, 48)
    """

    name: str
    shapes: tuple[Shape, ...]
    mesh: str
    mode: str
    trials: int
    forward: complex = np.nan
    backward: complex = np.nan
    error: float = 0.0
    bound: float = 0.0
    faults: list[Fault] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0
    declared: tuple[int, int] | None = None
    smallest: AdjointReport | None = None
    entries: list[Entry] = field(default_factory=list)
    differing: int = 0
    entries_of: int = 0
    bisected: bool = False
    hint: str = ""
    reproduce: str = ""

    @property
    def passed(self) -> bool:
        return not self.faults

    def __bool__(self) -> bool:
        return self.passed

    @property
    def kind(self) -> str:
        """The most important fault, as one word; empty if there is none."""
        return min((f.kind for f in self.faults), key=lambda k: _KINDS.index(k.split()[0]), default="")

    @property
    def of(self) -> str:
        return f"{self.name} of {' and '.join(map(str, self.shapes))} on {self.mesh}"

    def __str__(self) -> str:
        lines = [self._heading]
        for name, text in self._facts():
            if name.startswith("<"):
                lines.append(f"  {name:9} = {text}")
            elif name in ("error", "fault"):
                lines.append(f"  error {text}" if name == "error" else f"  {text}")
            else:
                lines.append(f"  {name}: {text}".replace("\n", "\n    ").replace(": \n", ":\n"))
        return "\n".join(lines)

    def _report(self) -> Report:
        cost = f"{count_text(self.messages, 'message')}, {self.bytes} bytes"
        if self.declared is not None and self.declared != (self.messages, self.bytes):
            cost += f"; declared: {count_text(self.declared[0], 'message')}, {self.declared[1]} bytes"
        rows = [(name, text.strip("\n")) for name, text in self._facts()]
        return Report(self._heading, [Table([*rows, ("one F sends", cost)])])

    @property
    def _heading(self) -> str:
        verdict = "adjoint" if self.passed else "NOT adjoint"
        return f"{self.of}: {verdict} ({self.mode}, {count_text(self.trials, 'trial')})"

    def _facts(self) -> list[tuple[str, str]]:
        """What was found, each with its name."""
        facts = []
        if not np.isnan(self.backward):
            facts += [("<F x, y>", number_text(self.forward)), ("<x, F* y>", number_text(self.backward))]
            facts += [("error", f"{self.error:.2e}, bound {self.bound:.2e}")] * (self.mode == "float")
        facts += [("fault", str(fault)) for fault in self.faults]
        if not self.passed:
            smallest = self if self.smallest is None else self.smallest  # a report of failure is false
            if smallest is not self:
                facts.append(("smallest case that fails", smallest.of))
            facts += smallest._wrong_entries()
            if self.hint:
                facts.append(("looks like", self.hint))
            facts.append(("reproduce", smallest.reproduce))
        return facts

    def _wrong_entries(self) -> list[tuple[str, str]]:
        """Where F* is not F^H, a line for each entry."""
        if not self.bisected and not self.entries:
            return []
        lines = "".join(f"\n{entry}" for entry in self.entries)
        if not self.bisected:
            ellipsis = "\n..." * (self.differing > len(self.entries))
            return [(f"F* is not F^H in {self.differing} of {self.entries_of} entries", lines + ellipsis)]
        if not lines:
            text = f"bisection of {self.entries_of} entries ended without one"
            return [("where F* is not F^H was not found", text)]
        name = f"F* is not F^H in these of {self.entries_of} entries, found by bisection; there may be more"
        return [(name, lines)]

    def to_dict(self) -> dict[str, Any]:
        """The figures, as JSON takes them: complex numbers are pairs, and NaN is None."""

        def jsonable(value):
            if isinstance(value, complex) and value.imag:
                return [value.real, value.imag]
            if isinstance(value, float | complex):
                return None if np.isnan(value) else float(value.real)
            if isinstance(value, AdjointReport):
                return value.to_dict() if value is not self else None
            if isinstance(value, tuple | list):
                if hasattr(value, "_asdict"):
                    return {k: jsonable(v) for k, v in value._asdict().items()}  # type: ignore[union-attr]
                return [jsonable(v) for v in value]
            return value

        figures = {f.name: jsonable(getattr(self, f.name)) for f in fields(self)}
        return {"passed": self.passed, "kind": self.kind, **figures}


_KINDS: list[str] = [
    *("modified", "linear", "raises", "count", "shape", "dtype", "state", "promise", "copies", "value", "twice")
]
"""The kinds of faults. Each hides those after it: a map that is not linear has no adjoint to compare."""


def number_text(z: complex) -> str:
    if isinstance(z, float | int) or z.imag == 0:
        return f"{z.real:.17g}"
    return f"{z.real:.17g}{z.imag:+.17g}j"


def table(reports: Iterable[AdjointReport]) -> str:
    """Reports as a table, a row each.

    >>> with spmd.Mesh(x=3):
    ...     report = spmd.check_adjoint(lambda x: spmd.shift(x, "x"), (6,), in_specs=P("x"))
    >>> from spmd import testing
    >>> print(testing.table([report]))
    map            mesh       trials    error    bound  messages  bytes  verdict
    <lambda> (6,)  Mesh(x=3)       3  ...              3     48  adjoint
    """
    rows = [("map", "mesh", "trials", "error", "bound", "messages", "bytes", "verdict")]
    for r in reports:
        exact = r.mode == "exact"
        figures = (
            str(r.trials),
            f"{r.error:.1e}",
            "exact" if exact else f"{r.bound:.1e}",
            f"{r.messages}",
            f"{r.bytes}",
        )
        rows.append((f"{r.name} {' '.join(map(str, r.shapes))}", r.mesh, *figures, "adjoint" if r else r.kind))
    return Table(rows[1:], rows[0], right=range(2, 7)).text()


def as_number(z) -> complex:
    return complex(z) if z.imag else float(z.real)
