"""Pooled memory, and large copies that pass the cache by."""
