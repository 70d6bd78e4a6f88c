"""A report of the transports and devices: `spmd.info()` and `python -m spmd info`."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

from spmd.errors import TransportError
from spmd.mesh import Mesh, current_mesh
from spmd.representations.tables import Table
from spmd.settings import SETTINGS, complaints
from spmd.transport.blas_threads import share_of_cores, usable_cores
from spmd.transport.launcher import launcher_hint, torch_world
from spmd.transport.processes.job import job_world

__all__ = ["blas_libraries", "info", "information"]

_PACKAGES = ("numpy", "optree", "greenlet", "threadpoolctl", "mpi4py", "cupy-cuda13x", "torch", "scipy", "numba")


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def blas_libraries() -> list[dict[str, Any]]:
    """The BLAS libraries that this process has loaded, as threadpoolctl describes them."""
    from threadpoolctl import threadpool_info

    return [library for library in threadpool_info() if library["user_api"] == "blas"]


def _blas() -> str:
    texts = [f"{b['internal_api']} {b['version']} ({b['num_threads']} threads)" for b in blas_libraries()]
    return ", ".join(texts) or "none found"


def _gpus() -> str:
    """The GPUs that CuPy finds; CuPy is not imported if it is not installed."""
    from importlib.util import find_spec

    if find_spec("cupy") is None:
        return 'CuPy is not installed: pip install "spmd[cuda]"'
    from spmd.device import imported

    try:
        count = imported("spmd.info").cuda.runtime.getDeviceCount()
    except TransportError:
        return "none found by CuPy"
    return f'{count} for device="cuda"'


def _mpi_library() -> str:
    """The MPI library of mpi4py; MPI is not started unless a launcher has started it."""
    if _version("mpi4py") is None:
        return 'mpi4py is not installed: pip install "spmd[mpi]"'
    try:
        import mpi4py

        mpi4py.rc.initialize = "mpi4py.MPI" in sys.modules or launcher_hint() is not None
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return f"mpi4py {_version('mpi4py')} finds no MPI library: {error}".splitlines()[0]
    return MPI.Get_library_version().splitlines()[0].split(",")[0].strip("\x00 ")


def _torch() -> str:
    """Whether a launcher of torch.distributed has started this process, and whether torch is installed."""
    if _version("torch") is None:
        return 'torch is not installed: pip install "spmd[torch]"'
    world = torch_world()
    size = 1 if world is None else world.size
    return f"{size} process{'es' * (size > 1)}"


def info() -> str:
    """A report of the transports and devices of this process, and of those that a new mesh would use.

    Inside `with mesh:` it is about that mesh, and shows the schedulers that its maps have chosen.

        >>> print(spmd.info())
        spmd          0.1.0, Python ...
        packages      numpy ...
        ...
        transport     local: virtual workers in this process
        scheduler     ...
    """
    return information().text()


def information() -> Table:
    """What `info` tells, as a table."""
    world = job_world()
    size = 1 if world is None else world.size
    mpi = size if world is not None and world.engine == "mpi" else 1
    mesh = current_mesh()
    hint = launcher_hint()
    rows = [
        ("spmd", f"{_version('spmd') or 'a bare checkout'}, Python {platform.python_version()}"),
        ("packages", ", ".join(f"{p} {_version(p) or '-'}" for p in _PACKAGES)),
        ("MPI library", _mpi_library()),
        ("MPI launcher", f"yes ({hint} is set)" if hint is not None else "no"),
        ("MPI world", f"{mpi} process{'es' * (mpi > 1)}"),
        ("torch world", _torch()),
        ("cores", f"{usable_cores()} usable by this process"),
        ("BLAS", _blas()),
        ("GPU", _gpus()),
        ("variables", ", ".join(f"{v}={os.environ[v]}" for v in SETTINGS if v in os.environ) or "none set"),
    ]
    rows += [("", " ".join(" ".join(str(error).splitlines()[:3]).split())) for error in complaints()]
    if mesh is not None:
        rows += _of_mesh(mesh)
    elif os.environ.get("SPMD_TRANSPORT") or world is None:
        transport = os.environ.get("SPMD_TRANSPORT") or "local"
        rows.append(("transport", f"{transport}: {_meaning.get(transport, 'no such transport')}"))
        if transport == "local":
            rows.append(("scheduler", os.environ.get("SPMD_SCHEDULER") or "auto"))
    else:
        rows.append(("transport", f"{world.engine} for a mesh of {size} workers; others need transport='local'"))
    return Table(rows)


_meaning = {
    "local": "virtual workers in this process",
    "mpi": "one process per worker",
    "torch": "one process per worker, over gloo",
    "nccl": "one GPU per worker",
    "counting": "virtual workers in this process, which only count",
}


def _of_mesh(mesh: Mesh) -> list[tuple[str, str]]:
    rows = [("mesh", repr(mesh)), ("transport", f"{mesh.transport.name}: {_meaning[mesh.transport.name]}")]
    if mesh.transport.name == "local":
        rows.append(("scheduler", mesh.scheduler))
        rows += [("", f"{scheduler} for {name}") for name, scheduler in mesh.chosen.items()]
        rows.append(("BLAS threads", f"{share_of_cores(mesh.size)} per worker"))
    rows.append(("device", mesh.device))
    return rows
