"""Transports: who the workers of a mesh are, and the only code that moves bytes between them."""
