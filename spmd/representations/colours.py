"""Colours of workers."""

from __future__ import annotations

__all__ = ["COLOURS", "colour_of", "ink"]

COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""Of worker w: entry w mod 7. Colours that are told apart with all common kinds of colour blindness: Okabe and Ito,
Color Universal Design (2008), https://jfly.uni-koeln.de/color; without black."""


def colour_of(k: int) -> str:
    """The colour of worker k."""
    return COLOURS[k % len(COLOURS)]


def ink(fill: str) -> str:
    """Black or white, whichever is easier to read on a colour: by their contrast in WCAG 2."""
    parts = [int(fill[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "#000000" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#FFFFFF"
