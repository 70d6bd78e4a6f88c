"""What all tests share: draws that are the same on every machine, and the two schedulers of virtual workers."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "spmd",
    derandomize=True,
    database=None,
    deadline=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("spmd")


# Of the session, so that tests that draw their cases may use it as well.
@pytest.fixture(params=["lockstep", "threads"], scope="session")
def scheduler(request) -> str:
    """The test runs once with each scheduler."""
    return request.param
