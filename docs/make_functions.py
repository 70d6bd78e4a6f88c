"""Write docs/functions.md, what becomes of each function of NumPy: `python docs/make_functions.py`."""

from __future__ import annotations

import inspect
import types
from collections import Counter
from pathlib import Path

import numpy as np

from spmd.autodiff.primitive import constants, handlers, passives, refusals
from spmd.autodiff.rules.shape import told
from spmd.autodiff.tracer import load_families

PAGE = Path(__file__).with_name("functions.md")
COMMAND = "python docs/make_functions.py"
NAMESPACES = {"np": np, "np.linalg": np.linalg, "np.fft": np.fft}

RULE, COMPOSITION, CONSTANT, REFUSED, PASSIVE = "rule", "composition", "constant", "refused", "no entries"

INTRODUCTION = """\
# What becomes of each function

Each public function of NumPy is one of these where it meets a traced array:

| kind | what happens |
|---|---|
| rule | it is recorded with its own derivative rule |
| composition | it runs as a composition of other functions, which are recorded |
| constant | its derivative is zero wherever there is one: it is computed and not recorded |
| refused | it raises, and says what to write instead |
| no entries | it takes no entries of arrays: it makes arrays of numbers, reads files, tells about dtypes |

Arrays that are not differentiated go through all of them but those that write into an argument.
"""


def functions(module) -> dict[str, object]:
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
        said.append(CONSTANT if f in told else RULE if hasattr(handlers[f], "primitive") else COMPOSITION)
    for known, kind in ((constants, CONSTANT), (refusals, REFUSED), (passives, PASSIVE)):
        if f in known:
            said.append(kind)
    return said


def text() -> str:
    """The page."""
    load_families()
    parts, ruled = [], set()
    for prefix, module in NAMESPACES.items():
        found = functions(module)
        said = {name: ", ".join(kinds(f)) for name, f in found.items()}
        ruled |= {f for name, f in found.items() if said[name] in (RULE, COMPOSITION)}
        counted = Counter(said.values())
        totals = ", ".join(f"{counted[k]} {k}" for k in (RULE, COMPOSITION, CONSTANT, REFUSED, PASSIVE) if counted[k])
        rows = [f"| `{prefix}.{name}` | {said[name]} | {_instead(f)} |" for name, f in found.items()]
        parts.append(
            "\n".join([f"## {prefix}", "", f"{totals}.", "", "| function | kind | instead |", "|---|---|---|", *rows])
        )
    version = ".".join(np.__version__.split(".")[:2])
    made = f"NumPy {version}: {len(ruled)} functions have a derivative. This page is made by `{COMMAND}`."
    return "\n\n".join([INTRODUCTION.rstrip(), made, *parts]) + "\n"


def _instead(f) -> str:
    return f"`{refusals[f]}`".replace("|", "\\|") if f in refusals else ""


if __name__ == "__main__":
    PAGE.write_text(text())
