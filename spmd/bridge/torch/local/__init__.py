"""The arithmetic of layers on one block, for tensors: see `spmd.functions.local`."""
