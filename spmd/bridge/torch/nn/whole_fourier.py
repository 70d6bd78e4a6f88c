"""Fourier layers for tensors on one worker, as `nn.Module`s: what `to_torch` of those of `spt.nn` gives."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import nn

from spmd.errors import SpecError, describe

__all__ = ["FFT", "IFFT", "IRFFT", "RFFT", "SpectralConv1d", "SpectralConv2d", "SpectralConv3d"]


class _Transform(nn.Module):
    """A Fourier transform of several dimensions, by `torch.fft`."""

    _function = "fftn"

    def __init__(self, s: Sequence[int] | None = None, dim: Sequence[int] | None = None, norm: str | None = None):
        super().__init__()
        self.s = None if s is None else tuple(map(index, s))
        self.dim = None if dim is None else tuple(map(index, (dim,) if isinstance(dim, int) else dim))
        self.norm = norm

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return getattr(torch.fft, self._function)(input, self.s, self.dim, self.norm)

    def extra_repr(self) -> str:
        return ", ".join(f"{n}={getattr(self, n)!r}" for n in ("s", "dim", "norm") if getattr(self, n) is not None)


class FFT(_Transform):
    """`torch.fft.fftn`."""


class IFFT(_Transform):
    """`torch.fft.ifftn`."""

    _function = "ifftn"


class RFFT(_Transform):
    """`torch.fft.rfftn`."""

    _function = "rfftn"


class IRFFT(_Transform):
    """`torch.fft.irfftn`."""

    _function = "irfftn"


class _SpectralConv(nn.Module):
    """A convolution by Fourier transforms: the lowest modes times weights, (in_channels, out_channels, *modes)."""

    _space = 1

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        modes: int | Sequence[int],
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.modes = (modes,) * self._space if isinstance(modes, int) else tuple(map(index, modes))
        if len(self.modes) != self._space or min(in_channels, out_channels, *self.modes) < 1:
            raise SpecError.at(
                f"spt.nn.{type(self).__name__}",
                argument="modes",
                got=f"{describe(modes)} for {in_channels} and {out_channels} channels",
                need=f"{self._space} positive integers, or one; and channels",
                mend=f"modes={(12,) * self._space}",
            )
        dtype = (torch.get_default_dtype() if dtype is None else dtype).to_complex()
        self.weight = nn.Parameter(torch.empty((in_channels, out_channels, *self.modes), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw real and imaginary parts of the weights from the normal distribution of deviation 1 / in_channels."""
        with torch.no_grad():
            torch.view_as_real(self.weight).normal_(0, 1 / self.in_channels)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        space = tuple(input.shape[2:])
        f = torch.fft.rfftn(input, dim=tuple(range(2, input.ndim)))
        at = self._kept(space, input.device)
        places = "xyz"[: self._space]
        low = torch.einsum(f"nc{places},co{places}->no{places}", f[(..., *at)], self.weight)
        y = low.new_zeros((f.shape[0], self.out_channels, *f.shape[2:]))
        y[(..., *at)] = low
        return torch.fft.irfftn(y, s=space, dim=tuple(range(2, input.ndim)))

    def _kept(self, space: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
        """The indices of the lowest modes in each dimension of space, as they broadcast."""
        indices = []
        for d, (n, m) in enumerate(zip(space, self.modes, strict=True)):
            last = d == self._space - 1
            if m > (n // 2 + 1 if last else n):
                raise SpecError.at(
                    f"spt.nn.{type(self).__name__}",
                    argument="input",
                    got=f"{n} points for {m} modes",
                    need="as many points as modes, in the last dimension twice as many",
                    mend="fewer modes, or a finer grid",
                )
            kept = [*range(m)] if last else [*range((m + 1) // 2), *range(n - m // 2, n)]
            shape = [-1 if k == d else 1 for k in range(self._space)]
            indices.append(torch.tensor(kept, device=device).reshape(shape))
        return indices

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.out_channels}, modes={self.modes}"


class SpectralConv1d(_SpectralConv):
    """Of x of shape (N, in_channels, length)."""


class SpectralConv2d(_SpectralConv):
    """Of x of shape (N, in_channels, height, width)."""

    _space = 2


class SpectralConv3d(_SpectralConv):
    """Of x of shape (N, in_channels, depth, height, width)."""

    _space = 3
