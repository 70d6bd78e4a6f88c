"""The job of this process: how it joins, and how the end of one process ends the others."""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from spmd.errors import TransportError, caller
from spmd.transport.launcher import (
    SIZES,
    describe_hint,
    launcher_hint,
    raw_exit,
    refuse_leftovers,
    tell_launcher,
    torch_world,
)

__all__ = [
    "World",
    "abort",
    "end_the_job_on_error",
    "in_a_child",
    "job_world",
    "mpi_world",
    "no_job_of_a_child",
    "on_leaving",
    "start_mpi",
]


def mpi_world() -> Any:
    """MPI.COMM_WORLD where it may have several processes, else None. Imports mpi4py only if a launcher is likely.

    With SPMD_TRANSPORT=local every process is by itself: None.
    Raises TransportError where mpiexec started several processes and mpi4py is missing. srun may have started
    several that have nothing to do with each other: there, and where MPI sees one process only, it warns.
    """
    hint = launcher_hint()
    if os.environ.get("SPMD_TRANSPORT") == "local" or (hint is None and "mpi4py.MPI" not in sys.modules):
        return None
    several = hint in SIZES
    try:
        MPI = start_mpi(hint)
    except ImportError as error:
        if several and hint != "SLURM_STEP_NUM_TASKS":
            raise TransportError.at(
                "spmd.Mesh",
                got=f"{describe_hint(hint)}, and mpi4py cannot be imported ({error})",
                need="mpi4py with a working MPI library in this environment",
                mend='pip install "spmd[mpi]" and use the mpiexec of that environment, or Mesh(..., '
                'transport="local") or SPMD_TRANSPORT=local to run each process by itself',
            ) from error
        if several:
            _warn_alone(hint, f"mpi4py cannot be imported ({error})")
        return None
    if MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    if MPI.COMM_WORLD.Get_size() > 1:
        end_the_job_on_error()
        _delay_aborts_of_open_mpi(MPI)
    elif several:
        _warn_alone(hint, f"MPI sees one ({MPI.Get_library_version().splitlines()[0].split(',')[0]})")
    return MPI.COMM_WORLD


def start_mpi(hint: str | None = None) -> Any:
    """mpi4py.MPI. Where nobody has started MPI yet it is started here, and ended with the program; None in a child of
    os.fork, which has no part in the job. hint: the variable of a launcher."""
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is None and in_a_child():
        return None
    if loaded is not None:
        _end_mpi_at_exit(loaded, False)
        return loaded
    refuse_leftovers(hint)
    import mpi4py

    rc = mpi4py.rc
    options = rc.initialize, rc.finalize
    rc.initialize = rc.finalize = False
    try:
        from mpi4py import MPI
    finally:
        rc.initialize, rc.finalize = options
    if not MPI.Is_initialized() and options[0] is not False:
        from spmd.transport.processes.lifetime import initialize
        from spmd.transport.processes.watchdog import time_limit

        initialize(MPI, rc, time_limit())
        _end_mpi_at_exit(MPI, options[1] is not False)
    return MPI


_ends_at_exit = False


def _end_mpi_at_exit(mpi: Any, finalizes: bool) -> None:
    """At the end of the program, wait for the other processes of the job, and end MPI if `finalizes`."""
    global _ends_at_exit
    if not _ends_at_exit:
        _ends_at_exit = True
        atexit.register(_end_mpi, mpi, finalizes)


def _end_mpi(mpi: Any, finalizes: bool) -> None:
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return
    from spmd.transport.processes import lifetime, watchdog

    status_board = watchdog._status_board
    limit = watchdog.time_limit() if status_board is not None else 0.0
    lifetime.await_others(status_board, limit)
    if finalizes:
        lifetime.finalize(mpi, status_board, limit)


class World(NamedTuple):
    """The processes of a job: the engine, this one's number, how many they are, and MPI's communicator."""

    engine: str
    rank: int
    size: int
    comm: Any = None


def job_world() -> World | None:
    """The job of this process; None where it is by itself.

    torchrun goes before a launcher of MPI, because srun may start torchrun on each host. Otherwise MPI goes before
    torch.distributed. SPMD_TRANSPORT names one of them.
    """
    wanted = os.environ.get("SPMD_TRANSPORT")
    torch = torch_world() if wanted != "mpi" else None
    if torch is not None and torch.size > 1 and (torch.launched or wanted == "torch"):
        return World("torch", torch.rank, torch.size)
    mpi = mpi_world() if wanted != "torch" else None
    if mpi is not None and mpi.Get_size() > 1:
        return World("mpi", mpi.Get_rank(), mpi.Get_size(), mpi)
    if torch is not None and torch.size > 1:
        return World("torch", torch.rank, torch.size)
    return None


_leaving: list[Callable[[], None]] = []


def on_leaving(leave: Callable[[], None]) -> None:
    """Call `leave` where this process leaves the job: at the end of the program, or by os._exit(0). Not in a child of
    os.fork."""
    _leaving.append(leave)
    atexit.register(leave)


_warned = False


def _warn_alone(hint: str | None, reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{describe_hint(hint)}, but {reason}: each one runs all workers by itself. Use the mpiexec of the "
            "environment that mpi4py is in, or set SPMD_TRANSPORT=local if this is meant; unset the variable if it is "
            "left over",
            RuntimeWarning,
            stacklevel=3,
        )


_report: Any = None


def end_the_job_on_error() -> None:
    """From now on an uncaught error ends all processes of the job, which would wait forever."""
    global _report
    if _report is None and not in_a_child():
        _report, sys.excepthook = sys.excepthook, _end_the_job
    if os._exit is raw_exit and not in_a_child():
        os._exit = _exit


def _exit(status: int) -> Any:
    """In place of os._exit, which hides the end of this process: launchers of MPI then end the others silently, MPICH's
    even with status 0."""
    mpi = sys.modules.get("mpi4py.MPI")
    if in_a_child() or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.Get_size() == 1:
        if status and mpi is None and not in_a_child():
            _say_exit(status)
            abort(status)
        raw_exit(status)
    watchdog = sys.modules.get("spmd.transport.processes.watchdog")
    status_board = None if watchdog is None else watchdog._status_board
    if status or status_board is None:
        _say_exit(status)
        abort(status or 1)
    else:  # Whoever waits for this process finds that it has left. Else the job goes on.
        status_board.close()
        for leave in _leaving:
            leave()
        _end_mpi(mpi, True)
        # hydra takes an _exit just after MPI_Finalize for a failure, and kills the others. Other threads do not run
        # meanwhile: PyDLL keeps the interpreter's lock.
        ctypes.PyDLL(None).exit(status)
    raw_exit(status)


def _say_exit(status: int) -> None:
    frame = caller()
    where = "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"
    text = f"spmd: {_me()} has called os._exit({status}){where}: the job ends\n"
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _me() -> str:
    """The name of this process in messages."""
    names = "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK"
    rank = next((os.environ[name] for name in names if name in os.environ), None)
    return f"process {os.getpid()}" if rank is None else f"rank {rank} of the world (process {os.getpid()})"


def _end_the_job(kind, error, traceback) -> None:
    """Report an error, one process for all, and end them."""
    watchdog = sys.modules.get("spmd.transport.processes.watchdog")
    others = watchdog.failed_too(kind, error) if watchdog is not None else []
    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        _report(kind, error, traceback)
    finally:
        text, sys.stderr = sys.stderr.getvalue(), stderr
        # In one piece, and with time for the launcher to pass it on: what is under way when the job ends gets lost.
        try:
            print(text + "".join(f"{line}\n" for line in others), end="", file=sys.stderr, flush=True)
        finally:  # also where stderr cannot be written to
            time.sleep(0.1)
            abort(1)


_FLUSH_SECONDS = 0.1
"""Seconds for the launcher to read the output: it may drop the rest when the job is aborted."""


def abort(status: int) -> None:
    """End all processes of this process's job, with this status."""
    if in_a_child():
        return
    for stream in sys.stdout, sys.stderr:
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    time.sleep(_FLUSH_SECONDS)
    mpi = sys.modules.get("mpi4py.MPI")
    started = mpi is not None and mpi.Is_initialized()
    if mpi is not None and started:
        if not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
            _abort_by_pmix(mpi, status)
            mpi.COMM_WORLD.Abort(status)
    elif "PMI_FD" in os.environ:
        tell_launcher(status)
    elif "spmd.transport.processes.gloo" in sys.modules:
        raw_exit(status)  # torchrun ends the others as soon as it sees that. The usual end of torch takes its time.


_END_SECONDS = 10
"""Seconds in which the launcher ends the processes of a job that was aborted."""
_OPEN_MPI_DELAY = 3
"""Seconds in which Open MPI's launcher kills the processes of all hosts: about 1 s, and more on a busy machine."""


def _speaks_pmix(mpi: Any) -> bool:
    """Whether MPI and the launcher of this job use PMIx, as those of Open MPI 5 do."""
    library = _library_of(mpi)
    return library is not None and hasattr(library, "PMIx_Abort") and bool(library.PMIx_Initialized())


def _library_of(mpi: Any) -> ctypes.CDLL | None:
    """The shared library that mpi4py.MPI is, where the names of MPI are found; None if it is none."""
    try:
        return ctypes.CDLL(mpi.__file__)
    except OSError:
        return None


def _delay_aborts_of_open_mpi(mpi: Any) -> None:
    """Let Open MPI wait some seconds before it aborts this process, unless the user has set how many.

    Its launcher ends the processes of one host after those of another, so some find their connections closed and abort
    as well. If a process ends by itself just when its daemon (prted) is about to kill it, the daemon may never record
    the end, and mpirun waits forever. While it waits, the daemon kills it.
    """
    library = _library_of(mpi)
    if library is None:
        return
    with suppress(ValueError):  # MPI libraries other than Open MPI have no such variable
        delay = ctypes.c_int.in_dll(library, "opal_abort_delay")
        if delay.value == 0 and _speaks_pmix(mpi):
            delay.value = _OPEN_MPI_DELAY


def _abort_by_pmix(mpi: Any, status: int) -> None:
    """Where the launcher uses PMIx, tell it to end the job, and wait until it kills this process.

    MPI_Abort ends this process at once, in the way that daemons of Open MPI may miss.
    """
    if not _speaks_pmix(mpi):
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # No handler of the program runs now,
    library = ctypes.PyDLL(mpi.__file__)  # and no other thread of Python: PyDLL keeps the interpreter's lock.
    if library.PMIx_Abort(ctypes.c_int(status), None, None, ctypes.c_size_t(0)) == 0:
        ctypes.PyDLL(None).sleep(_END_SECONDS)


_child = False


def in_a_child() -> bool:
    """Whether this process is a child of os.fork of one of the job: it can neither end nor leave the job."""
    return _child


def _begin_as_a_child() -> None:
    global _child
    for leave in _leaving:
        atexit.unregister(leave)
    _leaving.clear()
    if _report is None and launcher_hint() is None and torch_world() is None:
        return  # of a process by itself
    _child = True
    if sys.excepthook is _end_the_job:
        sys.excepthook = _report
    if os._exit is _exit:
        os._exit = raw_exit
    atexit.unregister(_end_mpi)


def no_job_of_a_child() -> TransportError:
    return TransportError.at(
        "spmd.Mesh",
        got="a child of os.fork, which is no process of the job that its parent is of",
        need="a process that the launcher has started",
        mend='Mesh(..., transport="local") for workers of its own, or let the parent run the map',
    )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_as_a_child)


if launcher_hint() in SIZES and os.environ.get("SPMD_TRANSPORT") != "local":
    end_the_job_on_error()
