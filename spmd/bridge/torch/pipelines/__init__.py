"""Pipelines of modules: `spt.pipeline`, and `spt.split_stages`."""
