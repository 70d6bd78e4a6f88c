"""Processes of which nobody can share memory, or one cannot: what all tell each other goes as messages."""

from __future__ import annotations

import json
import sys
from typing import Any

from verbs import results_again

import spmd
from spmd.transport import mailbox

who = sys.argv[1]
mesh = spmd.Mesh(x=4)
first, last = (mesh.local_workers[0] == k for k in (0, mesh.size - 1))


def refuse(*args: Any) -> Any:
    raise OSError("no memory is shared here")


if who == "all":
    mailbox.possible = lambda: False
if who == "first" and first:
    mailbox.create = refuse
if who == "last" and last:
    mailbox.Mailbox = refuse
found = results_again(mesh)
mails = [channel.mail for channel in mesh.transport.channels.values()]
assert who == "nobody" or not any(mails), mails
assert who != "nobody" or any(mails), mails
if spmd.is_main():
    print(json.dumps(found))
