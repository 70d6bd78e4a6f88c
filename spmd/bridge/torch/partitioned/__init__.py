"""Tensors of which each worker holds a block, and the functions of torch on them."""
