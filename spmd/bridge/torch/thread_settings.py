"""torch's settings of a thread: gradient mode, autocast, and the number of torch's own threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_KINDS = "cpu", "cuda"


def autocast_state() -> Callable[[], Any]:
    """The autocast of the calling thread, as a context that sets it in any thread."""
    dtypes = {kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in _KINDS}
    cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def local() -> Any:
        with ExitStack() as stack:
            for kind, dtype in dtypes.items():
                enabled = dtype is not None
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
            yield

    return local


def thread_state(*, enabled: bool) -> Callable[[], Any]:
    """The settings of the calling thread, as a context that sets them in the threads of workers."""
    inference, autocast = torch.is_inference_mode_enabled(), autocast_state()

    @contextmanager
    def local() -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(enabled))
            stack.enter_context(autocast())
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
