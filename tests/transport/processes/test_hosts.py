"""What processes of different hosts learn of each other: boards that share no memory, in one process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import pytest

from spmd.transport.processes.hosts import ADDRESS, Hosts, _Address, address_of
from spmd.transport.processes.shared_files import SharedFile, created, job_name, opened
from spmd.transport.processes.status_board import LEFT, StatusBoard
from spmd.transport.processes.transport import start

WITHIN = 5.0
"""Seconds within which what is told arrives, on a machine that may be busy."""


def comes(what: Callable[[], object], *boards: StatusBoard) -> bool:
    """Whether something becomes true, while processes ask."""
    until = time.monotonic() + WITHIN
    while time.monotonic() < until:
        if what():
            return True
        for board in boards:
            board.poll()
        time.sleep(0.01)
    return False


def shared(files: dict[str, SharedFile], host: str, nbytes: int) -> SharedFile:
    """The file of the processes of a host, which the first of them makes."""
    if host not in files:
        files[host] = created(job_name(os.getpid()), nbytes)
        return files[host]
    return opened(files[host].path, nbytes)


@pytest.fixture
def boards() -> Iterator[list[StatusBoard]]:
    """Those of ranks 0, 1 and 2; 1 and 2 are on one host."""
    files: dict[str, SharedFile] = {}
    made = [StatusBoard(rank, 3, partial(shared, files, host)) for rank, host in enumerate(["one", "two", "two"])]
    for board in made:
        board.single_host = False
        board.hosts = Hosts(board)
    for board in made:
        for other in made:
            if other is not board:
                board.hosts.add_address(other.rank, address_of(other))
    yield made
    for board in made:
        board.hosts.close()
        board.close()
    for file in files.values():
        file.unlink()


def test_a_board_without_other_hosts_has_an_address_that_nobody_asks():
    board = StatusBoard(0, 2, partial(created, job_name(os.getpid())))
    assert address_of(board) == bytes(ADDRESS)
    assert _Address.of(address_of(board)) is None
    board.close()


def test_the_error_of_a_map_is_known_on_another_host(boards):
    one, two, three = boards
    assert comes(lambda: one.is_known(1) and one.is_known(2), one)
    three.fail(17, 2, "worker 2 (x=2)", "ValueError: no convergence")
    assert comes(lambda: one.failure_of(17, (0, 1, 2)) == (2, "worker 2 (x=2)", "ValueError: no convergence"), one)
    assert one.failure_of(18, (0, 1, 2)) is None
    assert not one.is_local(1)
    assert two.is_local(2)


def test_waits_for_each_other_across_hosts_are_a_circle(boards):
    one, two, _ = boards
    for board, group in (one, 5), (two, 6):
        board.enter(board.rendezvous_count(group, (0, 1)), start("a collective"))
    for board in (one, two):
        board.start_waiting(1)
    assert comes(lambda: one.wait_cycle() == two.wait_cycle() == {0: [1], 1: [0]}, one, two)
    before = time.monotonic()
    assert comes(lambda: one.is_fresh([0, 1], before), one)


def test_who_leaves_tells_it_and_another_of_its_host_answers_for_it(boards):
    one, two, three = boards
    assert comes(lambda: one.is_known(1) and one.is_known(2), one)
    two.finish(LEFT)
    two.hosts.close()
    assert comes(lambda: one.row_of(1)["state"] == LEFT, one)
    three.fail(3, 2, "worker 2", "ValueError: later")
    assert comes(lambda: one.failure_of(3, (1, 2)), one)
    three.finish(LEFT)
    three.hosts.close()
    assert comes(lambda: one.row_of(2)["state"] == LEFT, one)


def test_a_closed_connection_is_a_death_and_silence_is_none(boards):
    one, two, three = boards
    assert comes(lambda: one.is_known(1) and one.is_known(2), one)
    for board in (two, three):
        board.hosts.report = lambda: b""  # They accept, and say nothing.
    assert comes(lambda: one.hosts.silent(1) and one.hosts.silent(2), one)
    assert not one.has_died(1)
    for board in (two, three):
        board.hosts.close()
    assert comes(lambda: one.has_died(1) and one.has_died(2), one)


def test_nobody_else_is_told_anything(boards):
    address = _Address.of(address_of(boards[1]))
    assert address is not None
    for knock in b"x" * 9, b"":
        with socket.create_connection(("127.0.0.1", address.port), timeout=1) as stranger:
            stranger.sendall(knock)
            stranger.settimeout(0.5)
            with suppress(TimeoutError, ConnectionResetError):
                assert stranger.recv(1) == b""
    assert comes(lambda: boards[0].is_known(1), boards[0])


def test_nothing_is_sent_while_nobody_waits(boards):
    one, *_ = boards
    assert comes(lambda: one.is_known(1), one)
    time.sleep(1.5)  # Until it has stopped asking.
    asked = [host.asked_at for host in one.hosts.hosts.values()]
    time.sleep(0.5)
    assert [host.asked_at for host in one.hosts.hosts.values()] == asked
    assert sum(thread.name == "spmd-hosts" for thread in threading.enumerate()) == 3


def test_a_child_of_fork_keeps_no_connection_open(boards):
    one, two, three = boards
    assert comes(lambda: one.is_known(1) and one.is_known(2), one)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)  # It lives on, and holds what it has not closed.
        os._exit(0)
    try:
        for board in (two, three):
            board.hosts.close()
        assert comes(lambda: one.has_died(1) and one.has_died(2), one)
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
