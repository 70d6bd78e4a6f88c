"""scipy.special that also takes traced arrays: the same names, options and results.

    from spmd.scipy import special
    spmd.grad(lambda x: special.logsumexp(x))(x)

The ufuncs are SciPy's own, which NumPy's protocol applies to traced arrays. The Python functions take bare, stated and
traced arrays; bare ones go to SciPy, CuPy's to cupyx.scipy.special. Functions without a derivative refuse traced arrays
and say what to use instead.
"""

from __future__ import annotations

from typing import Any

from spmd.autodiff.rules.special import functions


def __getattr__(name: str) -> Any:
    if name in functions:
        return functions[name]
    raise AttributeError(f"module 'spmd.scipy.special' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(functions)
