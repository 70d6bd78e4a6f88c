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

        >>> with spmd.Mesh(x=2), spmd.ledger() as log:
        ...     y = spmd.fft.fft(spmd.ones((2, 4), spec=P("x")))
        >>> np.abs(y), log.messages
        (PartitionedArray([[4., 0., 0., 0.],
                          [4., 0., 0., 0.]], dtype=float64, spec=P('x', None)), 0)
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

        >>> with spmd.Mesh(x=2):
        ...     y = spmd.fft.ifft(spmd.fft.fft(spmd.put(np.eye(2, 4), P("x"))))
        >>> np.abs(y).round(6)
        PartitionedArray([[1., 0., 0., 0.],
                          [0., 1., 0., 0.]], dtype=float64, spec=P('x', None))
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

        >>> with spmd.Mesh(x=2):
        ...     y = spmd.fft.rfft(spmd.ones((2, 4), spec=P("x")))
        >>> np.abs(y)
        PartitionedArray([[4., 0., 0.],
                          [4., 0., 0.]], dtype=float64, spec=P('x', None))
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

        >>> with spmd.Mesh(x=2):
        ...     x = spmd.put(np.arange(10.0).reshape(2, 5), P("x"))
        ...     spmd.fft.irfft(spmd.fft.rfft(x), 5).round(6) + 0.0
        PartitionedArray([[0., 1., 2., 3., 4.],
                          [5., 6., 7., 8., 9.]], dtype=float64, spec=P('x', None))
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

        >>> spmd.fft.hfft(np.array([1.0, 0.0, 0.0]))
        array([1., 1., 1., 1.])
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

        >>> np.abs(spmd.fft.ihfft(np.array([1.0, 0.0, 0.0, 0.0])))
        array([0.25, 0.25, 0.25])
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

        >>> x = np.cos(np.pi * np.arange(4) / 2) * np.ones((4, 1))
        >>> with spmd.Mesh(x=2):
        ...     y = spmd.fft.fftn(spmd.put(x, P("x")))
        >>> np.abs(y).round(6)
        PartitionedArray([[0., 8., 0., 8.],
                          [0., 0., 0., 0.],
                          [0., 0., 0., 0.],
                          [0., 0., 0., 0.]], dtype=float64, spec=P(None, 'x'))
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

        >>> with spmd.Mesh(x=2):
        ...     modes = spmd.zeros(4, complex, spec=P("x")).at[0].set(4.0)
        ...     y = spmd.fft.ifftn(modes)
        >>> np.abs(y)
        PartitionedArray([1., 1., 1., 1.], dtype=float64, spec=P(None))
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

        >>> with spmd.Mesh(x=2, y=2):
        ...     y = spmd.fft.rfftn(spmd.ones((4, 4, 4), spec=P("x", "y")))
        >>> y.shape, y.spec
        ((4, 4, 3), P(None, ('x', 'y'), None))
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

        >>> with spmd.Mesh(x=2):
        ...     f = spmd.put(np.sin(np.pi * np.arange(4) / 2), P("x"))
        ...     derivative = spmd.fft.irfftn(1j * np.array([0, 1, 0]) * spmd.fft.rfftn(f))
        >>> derivative.numpy().round(6) + 0.0
        array([ 1.,  0., -1.,  0.])
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
    """`fftn` over two dimensions, by default the last. Arguments, adjoint, layouts and costs as for that.

    >>> with spmd.Mesh(x=2), spmd.ledger() as log:
    ...     y = spmd.fft.fft2(spmd.ones((4, 4), spec=P("x")))
    >>> y.spec, log.messages
    (P(None, 'x'), 1)
    """
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
    """`ifftn` over two dimensions, by default the last. Arguments, adjoint, layouts and costs as for that.

    >>> with spmd.Mesh(x=2):
    ...     x = spmd.put(np.eye(4), P("x"))
    ...     y = spmd.fft.ifft2(spmd.fft.fft2(x))
    >>> y.spec, np.allclose(y.numpy(), np.eye(4))
    (P('x', None), True)
    """
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
    """`rfftn` over two dimensions, by default the last. Arguments, adjoint, layouts and costs as for that.

    >>> with spmd.Mesh(x=2):
    ...     y = spmd.fft.rfft2(spmd.ones((4, 4), spec=P("x")))
    >>> y.shape, y.spec
    ((4, 3), P(None, 'x'))
    """
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
    """`irfftn` over two dimensions, by default the last. Arguments, adjoint, layouts and costs as for that.

    >>> with spmd.Mesh(x=2):
    ...     y = spmd.fft.irfft2(spmd.fft.rfft2(spmd.put(np.eye(4), P("x"))))
    >>> y.spec, y.dtype, np.allclose(y.numpy(), np.eye(4))
    (P('x', None), dtype('float64'), True)
    """
    return run("irfft2", "irfft", a, s, axes, norm, padding, (spec, out_spec, shape))
