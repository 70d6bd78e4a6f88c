"""What `spmd.jit` records of a function, and what it runs in its place."""
