"""Imported before a mesh is made, it lets processes see as little of each other as on hosts of their own."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from spmd.transport.processes import shared_files

os.environ |= {"MPI_LOCALNRANKS": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
shared_files._BOOT = Path("/nowhere")
platform.node = lambda: f"host {os.getpid()}"
