"""Bridges to other libraries, imported by those who use them: `from spmd.bridge import torch as spt`."""
