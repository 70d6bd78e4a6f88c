"""Rules of matrix decompositions, inverses, determinants and solutions of linear systems."""

from __future__ import annotations
