"""Ours, every peer that is installed and the limit of the machine, in one run: `python -m benchmarks --help`."""
