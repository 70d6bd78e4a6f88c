"""What autograd saves in the forward of a unit: whole parameters are not kept, but gathered again in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

from spmd.bridge.torch.functorch import is_wrapped
from spmd.bridge.torch.tensor_state import is_partitioned, no_overrides

__all__ = ["WholeParameters", "without_wholes"]

_outer_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


class WholeParameters(Protocol):
    """The wholes that exist now."""

    def find(self, storage: int, dtype: torch.dtype) -> tuple[Any, int] | None:
        """The unit and the number of the parameter whose whole, of this dtype, lies in a storage."""
        ...

    def version(self, unit: Any, number: int) -> int:
        """The number of writes to a parameter."""
        ...

    def fetch(self, unit: Any, number: int) -> torch.Tensor:
        """The whole of a parameter, gathered again if needed."""
        ...


class _View(NamedTuple):
    """A view of the whole of a parameter, and the version of the parameter when it was saved."""

    unit: Any
    number: int
    version: int
    size: Any
    stride: Any
    offset: Any


class _Packed(NamedTuple):
    """What hooks around the unit made of a tensor, such as those of `torch.utils.checkpoint`."""

    value: Any
    unpack: Callable[[Any], Any]


class _Kept(NamedTuple):
    """A tensor, and its version when it was saved."""

    tensor: torch.Tensor
    version: int


@contextmanager
def without_wholes(wholes: WholeParameters) -> Iterator[None]:
    """Save what backward needs, but no whole parameters."""
    outer = _outer_hooks(False)

    def pack(x: torch.Tensor) -> Any:
        with no_overrides():
            found = None
            if x.layout is torch.strided and not (is_partitioned(x) or is_wrapped(x) or x.is_conj() or x.is_neg()):
                found = wholes.find(x.untyped_storage()._cdata, x.dtype)
            if found is not None:
                return _View(*found, wholes.version(*found), x.size(), x.stride(), x.storage_offset())
            if outer is not None:
                return _Packed(outer[0](x), outer[1])
            # An output of the node itself would hold the node: the detached tensor shares memory and version.
            return _Kept(x if is_partitioned(x) or is_wrapped(x) else x.detach(), x._version)

    with saved_tensors_hooks(pack, _unpack_with(wholes)):
        yield


def _unpack_with(wholes: WholeParameters) -> Callable[[Any], torch.Tensor]:
    def unpack(saved: Any) -> torch.Tensor:
        if type(saved) is _View:
            with no_overrides():
                _check_version(saved.size, wholes.version(saved.unit, saved.number), saved.version)
                return wholes.fetch(saved.unit, saved.number).as_strided(saved.size, saved.stride, saved.offset)
        if type(saved) is _Packed:
            return saved.unpack(saved.value)
        _check_version(saved.tensor.shape, saved.tensor._version, saved.version)
        return saved.tensor

    return unpack


def _check_version(shape: Sequence[int], version: int, expected: int) -> None:
    """Raise torch's error where a tensor was written to since it was saved."""
    if version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{list(shape)} tensor is at version {version}; expected version {expected} instead."
        )
