"""Runs another program of this folder where processes share no memory: all groups meet by messages.

Arguments: hosts, the number of processes on each (0: where they really are); then the program and its arguments.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from spmd.transport.processes import message_groups
from spmd.transport.processes.transport import ProcessTransport

message_groups.MEMBERS_MAX = 0
_, per_host, name, *words = sys.argv

if per_host != "0":
    agree = ProcessTransport._share_of_cores

    def share_of_cores(self: ProcessTransport, call) -> int:
        share = agree(self, call)
        self.groups.hosts = tuple(k // int(per_host) for k in range(self.size))
        return share

    ProcessTransport._share_of_cores = share_of_cores

program = Path(__file__).parent / name
sys.argv = [str(program), *words]
sys.path.insert(0, str(program.parent))
runpy.run_path(str(program), run_name="__main__")
