"""Processes of which nobody can share memory, or one cannot: what all tell each other goes as messages. Or they can,
but one has no arena, or cannot read those of others: then blocks go as messages."""

from __future__ import annotations

import json
import sys
from typing import Any

from verbs import read_where_they_lie, results_again

import spmd
from spmd.transport.processes import mailbox

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
if who == "blind" and last:
    mailbox.shared_memory = lambda: None
if who == "unread" and first:
    mailbox.window = refuse
if who in ("blind", "unread"):
    read_where_they_lie()
found = results_again(mesh)
mails = [channel.mailbox for channel in mesh.transport.channels.values()]
assert who not in ("all", "first", "last") or not any(mails), mails
assert who in ("all", "first", "last") or any(mails), mails
assert who not in ("blind", "unread") or not any(mail and mail.shared_memory for mail in mails)
assert who != "nobody" or any(mail and mail.shared_memory for mail in mails)
if spmd.is_main():
    print(json.dumps(found))
