"""scipy.special for traced arrays too: the same names and options, the same results.

    from spmd.scipy import special
    spmd.grad(lambda x: special.logsumexp(x))(x)

The ufuncs are SciPy's own: NumPy's protocol lets them meet traced arrays anyway. The Python functions take bare,
stated and traced arrays; bare ones go straight to SciPy, CuPy's to cupyx.scipy.special. What has no derivative
refuses traced arrays, and says what to use instead.
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
