"""Write docs/reference/functions.md, what becomes of each function of NumPy and SciPy.

Run by `python docs/tools/make_functions.py`.
"""

from __future__ import annotations

import importlib.util
import inspect
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from spmd.autodiff.dispatch import load_families
from spmd.autodiff.primitive import Method, constants, handlers, name_of, overrides, passives, refusals
from spmd.autodiff.rules.shape import metadata_functions
from spmd.autodiff.tracer import missing

PAGE = Path(__file__).parents[1] / "reference" / "functions.md"
COMMAND = "python docs/tools/make_functions.py"
NAMESPACES = {"np": np, "np.linalg": np.linalg, "np.fft": np.fft}
METHODS = ("reduce", "accumulate", "reduceat", "outer", "at")

RULE, COMPOSITION, CONSTANT, OVERRIDE = "rule", "composition", "constant", "override"
REFUSED, PASSIVE = "refused", "no entries"
KINDS = (RULE, COMPOSITION, CONSTANT, OVERRIDE, REFUSED, PASSIVE)

INTRODUCTION = """\
# What becomes of each function

Each public function of NumPy, each method of its ufuncs and its arrays, and each function of scipy.special and
scipy.fft is one of these where it meets a traced array:

| kind | what happens |
|---|---|
| rule | it is recorded with its own derivative rule |
| composition | it runs as a composition of other functions, which are recorded |
| constant | its derivative is zero wherever there is one: it is computed and not recorded; its result has the state \
of what it came from |
| override | NumPy does not dispatch on its arguments: it raises; `spmd.numpy` has a function of the same name |
| refused | it raises, and says what to write instead |
| no entries | it takes no entries of arrays: it makes arrays of numbers, reads files, tells about dtypes |

Arrays that are not differentiated go through all of them but overrides and those that write into an argument.

Some functions with a rule dispatch on some arguments only: `np.sum` on the array, not on `initial`. Where the column
*instead* names `spmd.numpy` beside another kind, that override takes traced arrays in every argument, and the options
of the Array API standard; where NumPy's own does not, it raises.
"""


def functions(module) -> dict[str, Any]:
    """The public functions of a module by name: what can be called, and is no class and no module."""
    found = {}
    for name in sorted(dir(module)):
        f = getattr(module, name)
        if name[0] != "_" and callable(f) and not inspect.isclass(f) and not isinstance(f, types.ModuleType):
            found[name] = f
    return found


def kinds(f) -> list[str]:
    """What the registry says of a function; it should say one thing."""
    said = []
    if f in handlers:
        said.append(CONSTANT if f in metadata_functions else RULE if hasattr(handlers[f], "primitive") else COMPOSITION)
    for known, kind in ((constants, CONSTANT), (refusals, REFUSED), (passives, PASSIVE)):
        if f in known:
            said.append(kind)
    name = getattr(f, "__name__", "")
    if not said and name in overrides and getattr(np, name, None) is f:
        said.append(OVERRIDE)
    return said


def has_scipy() -> bool:
    return importlib.util.find_spec("scipy") is not None


def special() -> dict[str, Any]:
    """The functions of scipy.special by name, as NumPy's protocol meets them."""
    from spmd.autodiff.rules.special.frame import special

    return {name: f for name, f in sorted(vars(special).items()) if not inspect.isclass(f)}


def transforms() -> dict[str, Any]:
    """The functions of scipy.fft by name."""
    import scipy.fft

    return {name: getattr(scipy.fft, name) for name in sorted(scipy.fft.__all__)}


def kinds_of_transform(name: str, f) -> list[str]:
    """As `kinds`, for scipy.fft."""
    from spmd.autodiff.rules.fourier_scipy import functions

    return [*kinds(f), *([RULE] if name in functions else [])]


def ufuncs() -> dict[Any, list[str]]:
    """NumPy's ufuncs, and the names of each."""
    found: dict[Any, list[str]] = {}
    for name, f in functions(np).items():
        if isinstance(f, np.ufunc):
            found.setdefault(f, []).append(name)
    return found


NUMBERS = "x[i], an array of one entry; spmd.stop_gradient(x).{name}() for numbers without a gradient"


def attributes() -> dict[str, tuple[str, str]]:
    """The public attributes and methods of NumPy's arrays: their kinds, and what to write instead."""
    found = {}
    for name in sorted(name for name in dir(np.ndarray) if name[0] != "_" and hasattr(np.empty((0, 0)), name)):
        f = getattr(np, name, None)
        if name in missing:
            found[name] = REFUSED, missing[name][1].format(data="spmd.stop_gradient(x)")
        elif name in ("item", "tolist"):
            found[name] = REFUSED, NUMBERS.format(name=name)
        elif name in ("device", "dtype", "itemsize", "nbytes"):
            found[name] = CONSTANT, ""
        else:
            found[name] = (kinds(f)[0] if f is not None else COMPOSITION), ""
    return found


# The page


def text() -> str:
    """The page."""
    return "\n\n".join([*parts_of_numpy(), *parts_of_scipy()]) + "\n"


def parts_of_numpy() -> list[str]:
    load_families()
    tables, ruled = [], set()
    for prefix, module in NAMESPACES.items():
        found = functions(module)
        said = {name: ", ".join(kinds(f)) for name, f in found.items()}
        ruled |= {f for name, f in found.items() if said[name] in (RULE, COMPOSITION)}
        rows = [f"| `{prefix}.{name}` | {said[name]} | {_instead(name, f)} |" for name, f in found.items()]
        tables.append(_table(f"## {prefix}\n\n{_totals(said)}", "function | kind | instead", rows))
    version = ".".join(np.__version__.split(".")[:2])
    made = f"NumPy {version}: {len(ruled)} functions have a derivative. This page is made by `{COMMAND}`."
    return [INTRODUCTION.rstrip(), made, *tables, _objects(), _methods_of_ufuncs(), _attributes()]


def _objects() -> str:
    rows = [
        f"| `np.{name}` | {OVERRIDE} | `spmd.numpy.{name}` |"
        for name in sorted(overrides)
        if inspect.isclass(getattr(np, name)) or not callable(getattr(np, name))
    ]
    return _table("## Objects and classes of np that have an override", "object | kind | instead", rows)


def _methods_of_ufuncs() -> str:
    groups: dict[tuple, list[str]] = {}
    for f, names in ufuncs().items():
        cells = tuple(_method(f, m) for m in METHODS)
        groups.setdefault(cells, []).extend(names)
    rows = [f"| {_listed(names, 'np.')} | {' | '.join(cells)} |" for cells, names in groups.items() if any(cells)]
    head = (
        "## Methods of NumPy's ufuncs\n\n"
        "f is the ufunc itself. The methods of the ufuncs of other libraries have a derivative where it has one. "
        "An empty field: NumPy has no such method."
    )
    return _table(head, " | ".join(("ufunc", *METHODS)), rows)


def _method(f, name: str) -> str:
    method = Method((f, name))
    said = ", ".join(kinds(method))
    return f"{said}: {_code(refusals[method].replace(name_of(f), 'f'))}" if method in refusals else said


def _attributes() -> str:
    found = attributes()
    rows = [f"| `x.{name}` | {kind} | {_code(instead)} |" for name, (kind, instead) in found.items()]
    totals = _totals({name: kind for name, (kind, _) in found.items()})
    return _table(f"## Methods and attributes of arrays\n\n{totals}", "attribute | kind | instead", rows)


def parts_of_scipy() -> list[str]:
    import scipy

    load_families()
    version = f"SciPy {'.'.join(scipy.__version__.split('.')[:2])}"
    return [_special(version), _transforms(version)]


def _special(version: str) -> str:
    found = special()
    said = {name: ", ".join(kinds(f)) for name, f in found.items()}

    def those(wanted: Callable) -> str:
        return _listed([name + _by(found[name]) for name in found if wanted(found[name], said[name])])

    def is_ruled(kind):
        return kind in (RULE, COMPOSITION)

    reached = those(lambda f, kind: is_ruled(kind) and (isinstance(f, np.ufunc) or f is np.sinc))
    by_override = those(lambda f, kind: is_ruled(kind) and not (isinstance(f, np.ufunc) or f is np.sinc))
    groups: dict[str, list[str]] = {}
    for name, f in found.items():
        if said[name] == REFUSED:
            groups.setdefault(refusals[f], []).append(name)
    return "\n\n".join(
        [
            f"## scipy.special\n\n{version}: {_totals(said)}",
            "Numbers in brackets say which arguments have a derivative, where others have none.",
            f"Rules that NumPy's protocol reaches, in scipy.special itself: {reached}.",
            f"Rules of Python functions, for `spmd.scipy.special` and the name: {by_override}. "
            "SciPy's own give the same gradient, or raise.",
            f"Constant: {those(lambda f, kind: kind == CONSTANT)}.",
            f"No entries: {those(lambda f, kind: kind == PASSIVE)}.",
            _table(
                "Refused:",
                "functions | instead",
                [f"| {_listed(names)} | {_code(instead)} |" for instead, names in groups.items()],
            ),
        ]
    )


def _by(f) -> str:
    """The numbers of the arguments that have a derivative, where others have none."""
    rules = getattr(getattr(handlers.get(f), "primitive", None), "rules", ())
    if None not in rules:
        return ""
    return f" ({', '.join(str(i + 1) for i, r in enumerate(rules) if r is not None)})"


def _transforms(version: str) -> str:
    said = {name: ", ".join(kinds_of_transform(name, f)) for name, f in transforms().items()}
    return "\n\n".join(
        [
            f"## scipy.fft\n\n{version}: {_totals(said)}",
            "NumPy's protocols do not reach it: SciPy's own raise, and `spmd.scipy.fft` has the rules, under the names "
            f"{_listed([name for name in said if said[name] == RULE])}.",
            f"Compositions, in scipy.fft itself: {_listed([name for name in said if said[name] == COMPOSITION])}.",
            f"No entries: {_listed([name for name in said if said[name] == PASSIVE])}.",
        ]
    )


def _table(head: str, columns: str, rows: list[str]) -> str:
    return "\n".join([head, "", f"| {columns} |", "|---" * (columns.count("|") + 1) + "|", *rows])


def _totals(said: dict[str, str]) -> str:
    counted = Counter(said.values())
    return ", ".join(f"{counted[k]} {k}" for k in KINDS if counted[k]) + "."


def _listed(names: list[str], prefix: str = "") -> str:
    """Names as code, with what follows them in brackets as text."""
    parts = [name.partition(" ") for name in names]
    return ", ".join(f"`{prefix}{name}`{space}{rest}" for name, space, rest in parts)


def _instead(name: str, f) -> str:
    if f in refusals:
        return _code(refusals[f])
    return f"`spmd.numpy.{name}`" if name in overrides and getattr(np, name) is f else ""


def _code(words: str) -> str:
    return f"`{words}`".replace("|", "\\|") if words else ""


if __name__ == "__main__":
    PAGE.write_text(text())
