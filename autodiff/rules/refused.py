"""Functions that have no derivative rule: what to write instead, and those that take no entries of arrays."""

from __future__ import annotations
