"""Verify values that must be equal on several workers: Invariant values, and arguments of processes."""
