"""Fourier transforms of arrays that lie anyhow: plans of local transforms and repartitions, and what runs them."""
