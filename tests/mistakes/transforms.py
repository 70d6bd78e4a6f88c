"""Mistakes in Fourier transforms, and in the Fourier layer."""

from __future__ import annotations

import numpy as np

import spmd
from mistakes import Row
from spmd import P, functions
from spmd.errors import LayoutError, SpecError

X, W = np.ones((3, 4, 6, 7)), np.ones((4, 5, 3, 2), complex)


def placed() -> spmd.PartitionedArray:
    return spmd.put(np.ones((4, 6)), P("x"), spmd.Mesh(x=2))


ROWS = [
    Row("two lengths, one axis", lambda: spmd.fft.fftn(np.ones((3, 4)), (3, 4), (0,)), SpecError,
        "spmd.fft.fftn: argument s", "2 lengths for 1 axes", "a length for each axis", "s=None"),
    Row("a length of zero", lambda: spmd.fft.fft(np.ones(4), 0), SpecError,
        "spmd.fft.fft: argument s", "a length of 0 along dimension 0", "at least 1", "s=None"),
    Row("an axis too many", lambda: spmd.fft.fft(placed(), axis=2), LayoutError,
        "spmd.fft.fft: argument axes", "2 for an array of 2 dimensions", "from -2 to 1", "that the array has"),
    Row("no axes", lambda: spmd.fft.rfftn(placed(), axes=()), SpecError,
        "spmd.fft.rfftn: argument axes", "no axes", "at least one", "axes=(-1,)"),
    Row("no points", lambda: spmd.fft.fft(np.ones((3, 0))), LayoutError,
        "spmd.fft.fft: argument x", "0 entries along dimension 1", "at least one point", "leave this dimension out"),
    Row("one mode, to real", lambda: spmd.fft.irfft(np.ones((3, 1))), LayoutError,
        "spmd.fft.irfft: argument x", "1 entries along dimension 1", "two modes, or s", "leave this dimension out"),
    Row("another norm", lambda: spmd.fft.fft(placed(), norm="orthogonal"), SpecError,
        "spmd.fft.fft: argument norm", "'orthogonal'", "backward, ortho, forward", 'norm="ortho"'),
    Row("padding below one", lambda: spmd.fft.fftn(placed(), padding=0.5), SpecError,
        "spmd.fft.fftn: argument padding", "0.5", "at least 1", "padding=1.5"),
    Row("padding for two axes", lambda: spmd.fft.fft(placed(), padding=(1, 2)), SpecError,
        "spmd.fft.fft: argument padding", "(1, 2)", "one for each of 1 axes", "padding=1.5"),
    Row("points that no modes have", lambda: spmd.fft.fft(np.ones(5), padding=1.5), LayoutError,
        "spmd.fft.fft: argument padding", "5 points along dimension 0, for 4 modes", "6 points", "s= of the number"),
    Row("modes of other points", lambda: spmd.fft.irfft(np.ones(5), 12, padding=1.5), LayoutError,
        "spmd.fft.irfft: argument s", "5 modes along dimension 0", "the 7 modes of 12 points", "s= of the number"),
    Row("a layout of another shape", lambda: spmd.fft.plan((4, 5), spmd.Layout((4, 4), P("x"), {"x": 2})), SpecError,
        "spmd.fft.plan: argument spec", "Layout((4, 4)", "a layout of an array of shape [4, 5]", "shape=layout.shape"),
    Row("a name as a spec", lambda: spmd.fft.plan((4, 4), "x"), SpecError,
        "spmd.fft.plan: argument spec", "'x'", "a spec or a Layout", 'P("x")'),
    Row("no frequencies", lambda: spmd.fft.fftfreq(0), SpecError,
        "spmd.fft.fftfreq: argument n", "0", "at least one point", "the length of the transform"),
    Row("complex input", lambda: functions.spectral_conv(X + 0j, W), SpecError,
        "spmd.functions.spectral_conv: argument x", "complex128[3, 4, 6, 7]", "real numbers of shape", "w of shape"),
    Row("real weights", lambda: functions.spectral_conv(X, W.real), SpecError,
        "spmd.functions.spectral_conv: argument w", "float64[4, 5, 3, 2]", "complex numbers of 4", "real + 1j * imag"),
    Row("other channels", lambda: functions.spectral_conv(X, W[:3]), SpecError,
        "spmd.functions.spectral_conv: argument w", "[3, 5, 3, 2] for x of shape [3, 4, 6, 7]", "(in_", "modes=None"),
    Row("other modes", lambda: functions.spectral_conv(X, W, (3, 3)), SpecError,
        "spmd.functions.spectral_conv: argument modes", "(3, 3) for w of shape", "*modes", "modes=None"),
    Row("modes that no grid has", lambda: functions.spectral_conv(X[..., :2], W.repeat(3, 2)), SpecError,
        "spmd.functions.spectral_conv: argument w", "[9, 2] modes", "from 1 to [6, 2] modes", "a finer grid"),
]  # fmt: skip
