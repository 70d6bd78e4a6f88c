"""Verify values that must be equal on several workers: what is typed Invariant, and arguments of processes."""
