"""What torch keeps for each thread: gradient mode, autocast, and the number of its own threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def thread_state(*, enabled: bool) -> Callable[[], Any]:
    """What torch keeps for each thread, as it is in the caller's, to be set in the workers'."""
    inference = torch.is_inference_mode_enabled()
    autocast = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def local() -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(enabled))
            for kind, dtype in autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            yield

    return local


@contextmanager
def torch_threads(n: int) -> Any:
    """torch's own threads within a worker: as many as BLAS has, but no more than torch was told to use.

    torch keeps their number for each thread that calls it.
    """
    before = torch.get_num_threads()
    n = min(n, before)
    if n != before:
        torch.set_num_threads(n)
    try:
        yield
    finally:
        if n != before:
            torch.set_num_threads(before)
