"""Numbers as people read them."""

from __future__ import annotations

__all__ = ["count_text", "size_text"]


def size_text(nbytes: float) -> str:
    """A number of bytes: `640 B`, `1.9 MiB`."""
    value, unit = nbytes, "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value = value / 1024
    if unit == "B":
        return f"{nbytes:.0f} B"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def count_text(n: int, noun: str) -> str:
    """`1 array`, `2 arrays`."""
    return f"{n} {noun}{'s' * (n != 1)}"
