"""Products, decompositions and concatenations of partitioned tensors: on the whole, on every worker."""

from __future__ import annotations

from typing import Any

import torch

from spmd.bridge.torch.partitioned.arguments import (
    first_partitioned,
    refuse,
    refuse_compiled,
    writes_first,
)
from spmd.bridge.torch.partitioned.registry import handles
from spmd.bridge.torch.partitioned.tensor import PartitionedTensor, gathered


@handles(
    "mm addmm bmm baddbmm mv addmv dot vdot addr ger outer linalg_qr _linalg_svd linalg_svdvals _linalg_eigh",
    "_linalg_det _linalg_slogdet linalg_inv_ex linalg_cholesky_ex linalg_lu_factor_ex _linalg_solve_ex",
    "linalg_matrix_exp linalg_lstsq linalg_pinv.atol_rtol_tensor linalg_householder_product trace tril triu",
)
def _contraction(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Functions that contract dimensions. Raises under autograd with plain tensors: forward needs the block."""
    plain = [a for a in args if isinstance(a, torch.Tensor) and not isinstance(a, PartitionedTensor)]
    if torch.is_grad_enabled() and plain:
        refuse(func, args, kwargs)
    return _on_wholes(func, args, kwargs)


@handles("cat stack hstack vstack")
def _on_wholes(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if writes_first(func) or kwargs.get("out") is not None:
        refuse(func, args, kwargs)
    refuse_compiled(first_partitioned(args)._block)
    wholes: dict[int, torch.Tensor] = {}

    def whole(x: Any) -> Any:
        if isinstance(x, PartitionedTensor):
            if id(x) not in wholes:
                wholes[id(x)] = gathered(x)
            return wholes[id(x)]
        return type(x)(map(whole, x)) if isinstance(x, list | tuple) else x

    return func(*map(whole, args), **{k: whole(v) for k, v in kwargs.items()})
