"""Rules of sequences: convolution, interpolation, polynomials, finite differences."""

from __future__ import annotations
