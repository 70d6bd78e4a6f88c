"""Modules whose parameters lie split over the workers that share the data."""

from spmd.bridge.torch.sharding.shard_parameters import shard_parameters

__all__ = ["shard_parameters"]
