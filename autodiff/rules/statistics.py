"""Rules of order statistics, of sums that skip NaN, of covariances, and of the methods of ufuncs."""

from __future__ import annotations
