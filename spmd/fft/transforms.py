"""Fourier transforms by NumPy's names, of blocks in bodies and of global arrays outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spmd.fft.planning import run
from spmd.layout import Spec
from spmd.tracebacks import api_boundary

__all__ = [
    "fft",
    "fft2",
    "fftn",
    "hfft",
    "ifft",
    "ifft2",
    "ifftn",
    "ihfft",
    "irfft",
    "irfft2",
    "irfftn",
    "rfft",
    "rfft2",
    "rfftn",
]


@api_boundary
def fft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    *,
    padding: float | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """`fftn` along one dimension, of length n.

    Arguments, layouts and costs as for `fftn`. Adjoint: `fft`.
    """
    return run("fft", "fft", a, None if n is None else (n,), (axis,), norm, padding, (spec, out_spec, shape))


@api_boundary
def ifft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    *,
    padding: float | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """`ifftn` along one dimension, of length n.

    Arguments, layouts and costs as for `fftn`. Adjoint: `ifft`.
    """
    return run("ifft", "ifft", a, None if n is None else (n,), (axis,), norm, padding, (spec, out_spec, shape))


@api_boundary
def rfft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    *,
    padding: float | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """`rfftn` along one dimension, of length n.

    Arguments, layouts and costs as for `rfftn`.
    Adjoint: `hfft`, of which the modes that stand for two are halved before.
    """
    return run("rfft", "rfft", a, None if n is None else (n,), (axis,), norm, padding, (spec, out_spec, shape))


@api_boundary
def irfft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    *,
    padding: float | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """`irfftn` along one dimension, of n points.

    Arguments, layouts and costs as for `irfftn`.
    Adjoint: `ihfft`, of which the modes that stand for two are doubled after.
    """
    return run("irfft", "irfft", a, None if n is None else (n,), (axis,), norm, padding, (spec, out_spec, shape))


@api_boundary
def hfft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    *,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """The real spectrum, of length n, of an array with hermitian symmetry, of which a is the first half.

    Arguments, layouts and costs as for `fftn`. As `np.fft.hfft`.
    Adjoint: `rfft`, of which the entries that stand for two are doubled after.
    """
    return run("hfft", "hfft", a, None if n is None else (n,), (axis,), norm, None, (spec, out_spec, shape))


@api_boundary
def ihfft(
    a: Any,
    n: int | None = None,
    axis: int = -1,
    norm: str | None = None,
    *,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """The first half of the inverse transform of a real spectrum, which has hermitian symmetry.

    Arguments, layouts and costs as for `fftn`. As `np.fft.ihfft`.
    Adjoint: `irfft`, of which the entries that stand for two are halved before.
    """
    return run("ihfft", "ihfft", a, None if n is None else (n,), (axis,), norm, None, (spec, out_spec, shape))


@api_boundary
def fftn(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    padding: float | Sequence[float] | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """The discrete Fourier transform over several dimensions: y[k] = sum over j of a[j] exp(-2πi Σ j k / n).

    a: an array of NumPy, CuPy or PyTorch; in a body with specs this worker's block; outside a global array too.
    s: the lengths of the transform along axes: entries at the end are cropped, or zeros added. axes: None: all
    dimensions, or the last len(s). norm: "backward" (None), "ortho" or "forward". As `np.fft.fftn`.
    spec: in a body, how the whole array is split: a spec, or a `Layout` on some of the workers; None: the whole.
    out_spec: how the result is to lie; None: as it comes, which `spmd.fft.plan` shows in `plan.out`.
    shape: of the whole array, if spec splits it evenly; without it the workers exchange the lengths of their blocks.
    padding: a number p of at least 1, or one for each axis: a has floor(p n) points along an axis, of which the modes
    of n points are kept. s then is n; the values of these modes are those of the function sampled at n points. So
    `fftn(ifftn(f, padding=1.5) * ifftn(g, padding=1.5), padding=1.5)` has no aliasing errors. The mode of highest
    frequency of an even n stands for both signs.

    Cost: local transforms, and the fewest repartitions: see `spmd.fft.plan`. Lines are whole on a worker; an array of a
    single dimension is gathered. The worker's cores share its lines (SciPy). float32 stays float32.
    Linear. Adjoint: the transform itself, transposed: that over the same dimensions, by repartitions back.
    Raises SpecError and LayoutError for lengths, axes and layouts that do not fit. Source: Cooley, Tukey, 1965; slabs
    and pencils as in Dalcin, Mortensen, Keyes, "Fast parallel multidimensional FFT using advanced MPI", 2019.
    """
    return run("fftn", "fft", a, s, axes, norm, padding, (spec, out_spec, shape))


@api_boundary
def ifftn(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    padding: float | Sequence[float] | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """The inverse of `fftn`: y[j] = 1/n sum over k of a[k] exp(2πi Σ j k / n).

    Arguments, layouts and costs as for `fftn`.
    padding: a has the modes of n points along an axis, and the result floor(p n) points of the same function.
    Adjoint: `ifftn`.
    """
    return run("ifftn", "ifft", a, s, axes, norm, padding, (spec, out_spec, shape))


@api_boundary
def rfftn(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    padding: float | Sequence[float] | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """`fftn` of real numbers, of which the last of axes keeps the modes from zero to n // 2.

    Arguments, layouts and costs as for `fftn`.
    Adjoint: `irfftn` without its factor, of which the modes that stand for two are halved before.
    """
    return run("rfftn", "rfft", a, s, axes, norm, padding, (spec, out_spec, shape))


@api_boundary
def irfftn(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = None,
    norm: str | None = None,
    *,
    padding: float | Sequence[float] | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """The inverse of `rfftn`, to real numbers.

    Arguments, layouts and costs as for `fftn`.
    s: the numbers of points; None: 2 (m - 1) along the last of axes, for m modes.
    Adjoint: `rfftn` times that factor, of which the modes that stand for two are doubled after.
    """
    return run("irfftn", "irfft", a, s, axes, norm, padding, (spec, out_spec, shape))


@api_boundary
def fft2(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: str | None = None,
    *,
    padding: float | Sequence[float] | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """`fftn` over two dimensions, by default the last."""
    return run("fft2", "fft", a, s, axes, norm, padding, (spec, out_spec, shape))


@api_boundary
def ifft2(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: str | None = None,
    *,
    padding: float | Sequence[float] | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """`ifftn` over two dimensions, by default the last."""
    return run("ifft2", "ifft", a, s, axes, norm, padding, (spec, out_spec, shape))


@api_boundary
def rfft2(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: str | None = None,
    *,
    padding: float | Sequence[float] | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """`rfftn` over two dimensions, by default the last."""
    return run("rfft2", "rfft", a, s, axes, norm, padding, (spec, out_spec, shape))


@api_boundary
def irfft2(
    a: Any,
    s: Sequence[int] | None = None,
    axes: Sequence[int] | None = (-2, -1),
    norm: str | None = None,
    *,
    padding: float | Sequence[float] | None = None,
    spec: Spec | None = None,
    out_spec: Spec | None = None,
    shape: Sequence[int] | None = None,
) -> Any:
    """`irfftn` over two dimensions, by default the last."""
    return run("irfft2", "irfft", a, s, axes, norm, padding, (spec, out_spec, shape))
