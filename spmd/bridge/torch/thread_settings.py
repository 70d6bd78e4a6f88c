"""torch's settings of a thread: gradient mode, autocast, and the number of torch's own threads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_KINDS = "cpu", "cuda"


def autocast_state(*, enabled: bool = True) -> Callable[[], Any]:
    """The autocast of the calling thread, as a context that sets it in any thread; without `enabled` no autocast."""
    dtypes = {
        kind: torch.get_autocast_dtype(kind) if enabled and torch.is_autocast_enabled(kind) else None for kind in _KINDS
    }
    cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def local() -> Any:
        with ExitStack() as stack:
            for kind, dtype in dtypes.items():
                if dtype is not None or torch.is_autocast_enabled(kind):
                    now = torch.autocast(kind, dtype=dtype, enabled=dtype is not None, cache_enabled=cache)
                    stack.enter_context(now)
            yield

    return local


without_autocast = autocast_state(enabled=False)


def thread_state(*, enabled: bool, autocast: bool = True) -> Callable[[], Any]:
    """The settings of the calling thread, as a context that sets them in the threads of workers.

    enabled: whether autograd records. autocast: whether autocast is as here; else there is none.
    """
    inference, casting = torch.is_inference_mode_enabled(), autocast_state(enabled=autocast)

    @contextmanager
    def local() -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode() if inference else torch.set_grad_enabled(enabled))
            stack.enter_context(casting())
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
