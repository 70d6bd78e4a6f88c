"""Where the time goes: `with spmd.profile("trace.json") as profile:`."""

from spmd.profiling.profile import Profile, profile

__all__ = ["Profile", "profile"]
