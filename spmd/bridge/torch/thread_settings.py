"""torch's settings of a thread: gradient mode, autocast, and the number of torch's own threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


def thread_state(*, enabled: bool) -> Callable[[], Any]:
    """The settings of the calling thread, as a context that sets them in the threads of workers."""
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
    """Let torch use n threads of its own in this worker, but no more than before.

    torch keeps this number for each thread that calls it.
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
