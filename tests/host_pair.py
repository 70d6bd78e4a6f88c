"""A pair of hosts for tests: two network namespaces of this machine (`two_hosts/README.md`)."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from launch import OPENMPI, ROOT

__all__ = ["needs_hosts", "pair_of_hosts", "run_on_hosts"]

SCRIPTS = Path(__file__).resolve().parent / "two_hosts"


def _why_not() -> str | None:
    if os.name != "posix" or os.geteuid() != 0:
        return "needs root, to make network namespaces"
    missing = [name for name in ("ip", "unshare", "timeout", "bash") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    return None if done.returncode == 0 else f"ip netns: {done.stderr.strip()}"


WHY_NOT = _why_not()
needs_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


@contextmanager
def pair_of_hosts() -> Iterator[str]:
    """The name of a pair of hosts that no other test uses."""
    name = f"spmd{os.getpid()}"
    done = subprocess.run([SCRIPTS / "up"], env=os.environ | {"HOSTS": name}, capture_output=True, text=True)
    try:
        if done.returncode != 0:
            pytest.skip(f"no network namespaces can be made here: {done.stderr.strip()}")
        yield name
    finally:
        subprocess.run([SCRIPTS / "down"], env=os.environ | {"HOSTS": name}, capture_output=True)


def run_on_hosts(hosts: str, launcher: str, *words: str | os.PathLike, limit: int, **env: str):
    """`python words` in two processes on each host, by "mpirun" (of MPICH), "openmpi" or "torchrun"; status 124
    where it was ended after `limit` seconds."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    command = [SCRIPTS / launcher, OPENMPI if launcher == "openmpi" else sys.executable, *words]
    return subprocess.run(
        [os.fspath(c) for c in command],
        env=os.environ | {"PYTHONPATH": path, "HOSTS": hosts, "LIMIT": str(limit), "PORT": str(_free_port())} | env,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        timeout=limit + 50,
    )


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]
