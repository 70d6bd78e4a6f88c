"""Random jobs end in time, with the right status, and leave nothing behind: see `random_jobs`."""

from __future__ import annotations

import pytest
from host_pair import needs_hosts
from launch import mpiexec
from random_jobs import Job, draw, leftovers, run, verdict

LAUNCHERS = [
    "alone",
    pytest.param("mpi", marks=[pytest.mark.mpi, pytest.mark.skipif(mpiexec() is None, reason="no mpiexec here")]),
    pytest.param("torchrun", marks=pytest.mark.torch),
]


def check(seeds, launcher, folder, pair=""):
    wrong = []
    for seed in seeds:
        job = draw(seed, launcher)
        wrong += [text for text in [verdict(job, run(job, folder, pair))] if text]
    left = leftovers()  # by jobs that were killed, of other tests too: the next one removes it
    size = 1 if launcher == "alone" else 4 if pair else 2
    last = Job(-1, launcher, size, ["import", "mesh", "map"], 0, None, 0, False)
    wrong += [text for text in [verdict(last, run(last, folder, pair))] if text]
    assert not wrong, f"{len(wrong)} wrong\n\n" + "\n\n".join(wrong[:3])
    assert not left & leftovers()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_jobs(launcher, tmp_path):
    check(range(3), launcher, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("first", [3, *range(100, 300, 50)])
def test_many_jobs(launcher, first, tmp_path):
    check(range(first, first + 50), launcher, tmp_path)


@pytest.mark.full
@needs_hosts
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("mpi on two hosts", marks=LAUNCHERS[1].marks),
        pytest.param("torchrun on two hosts", marks=LAUNCHERS[2].marks),
    ],
)
def test_jobs_on_two_hosts(hosts, launcher, tmp_path):
    check(range(30), launcher, tmp_path, hosts)
