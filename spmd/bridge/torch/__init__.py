"""spmd for PyTorch: the operators of `spmd` as torch functions with the same adjoints.

from spmd.bridge import torch as spt

Every function of bodies works on tensors: `spt.psum` is `spmd.psum`. `spt.map` runs bodies in torch on a mesh.
"""

from __future__ import annotations

from typing import Any

from spmd.errors import message

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        message(
            "from spmd.bridge import torch",
            got=f"no torch ({error})",
            need="PyTorch 2.4 or later",
            mend='pip install "spmd[torch]"; of the CPU alone: pip install torch --index-url '
            "https://download.pytorch.org/whl/cpu",
        )
    ) from error

import spmd
from spmd.bridge.torch.compiled import compilable, operator
from spmd.bridge.torch.function import tie
from spmd.bridge.torch.mapping import map
from spmd.bridge.torch.tensor import Tensor

__all__ = ["Tensor", "map", "operator", "tie"]


def __getattr__(name: str) -> Any:
    """The functions of bodies, which take tensors as they take arrays."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(spmd, name)
    if getattr(found, "__module__", "").startswith("spmd.operators."):
        found = compilable(found)
    globals()[name] = found
    return found
