"""Whether this process is one of a job, of MPI or of torch.distributed.

Of MPI launchers' variables are hints; only MPI's own world is believed. Of torch.distributed they are all there is,
until somebody has initialised it.
"""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import stat
import sys
import time
import warnings
from contextlib import suppress
from typing import Any, NamedTuple

from spmd.errors import TransportError, caller, message

__all__ = [
    "TorchWorld",
    "World",
    "abort",
    "end_the_job_on_error",
    "expected_size",
    "in_a_child",
    "job_world",
    "launcher_hint",
    "leftovers",
    "mpi_world",
    "no_job_of_a_child",
    "raw_exit",
    "start_mpi",
    "tell_launcher",
    "torch_world",
]

raw_exit = os._exit

# What a launcher of MPI tells each process that it starts: how many there are, or which one it is. Variables that a
# scheduler sets in plain shells of an allocation too (SLURM_NTASKS, SLURM_PROCID) say nothing.
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_RANKS = ("PMIX_RANK", "PMI_RANK")
_WORLD_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_OF_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_COMM_WORLD_", "MPI_LOCAL")
_OF_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launcher_hint() -> str | None:
    """The variable that suggests that an MPI launcher started this process, if any."""
    for name in _SIZES:
        if os.environ.get(name, "1") not in ("", "1"):
            return name
    return next((name for name in _RANKS if name in os.environ), None)


def mpi_world() -> Any:
    """MPI.COMM_WORLD where it may have several processes, else None. Imports mpi4py only if a launcher is likely.

    With SPMD_TRANSPORT=local every process is by itself: None.
    Raises TransportError where mpiexec started several processes and mpi4py is missing. srun may have started
    several that have nothing to do with each other: there, and where MPI sees one process only, it warns.
    """
    hint = launcher_hint()
    if os.environ.get("SPMD_TRANSPORT") == "local" or (hint is None and "mpi4py.MPI" not in sys.modules):
        return None
    several = hint in _SIZES
    try:
        MPI = start_mpi(hint)
    except ImportError as error:
        if several and hint != "SLURM_STEP_NUM_TASKS":
            raise TransportError(
                message(
                    "spmd.Mesh",
                    got=f"{_said(hint)}, and mpi4py cannot be imported ({error})",
                    need="mpi4py with a working MPI library in this environment",
                    mend='pip install "spmd[mpi]" and use the mpiexec of that environment, or Mesh(..., '
                    'transport="local") or SPMD_TRANSPORT=local to run each process by itself',
                )
            ) from error
        if several:
            _warn_alone(hint, f"mpi4py cannot be imported ({error})")
        return None
    if MPI is None or not MPI.Is_initialized() or MPI.Is_finalized():
        return None
    if MPI.COMM_WORLD.Get_size() > 1:
        end_the_job_on_error()
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
    _refuse_leftovers(hint)
    import mpi4py

    rc = mpi4py.rc
    wishes = rc.initialize, rc.finalize
    rc.initialize = rc.finalize = False
    try:
        from mpi4py import MPI
    finally:
        rc.initialize, rc.finalize = wishes
    if not MPI.Is_initialized() and wishes[0] is not False:
        from spmd.transport.lifetime import initialize
        from spmd.transport.patience import time_limit

        initialize(MPI, rc, time_limit())
        _end_mpi_at_exit(MPI, wishes[1] is not False)
    return MPI


_ends_at_exit = False


def _end_mpi_at_exit(mpi: Any, finalizes: bool) -> None:
    """Wait for the other processes at the end of the program, where this one is of several. finalizes: and end MPI."""
    global _ends_at_exit
    if not _ends_at_exit:
        _ends_at_exit = True
        atexit.register(_end_mpi, mpi, finalizes)


def _end_mpi(mpi: Any, finalizes: bool) -> None:
    if not mpi.Is_initialized() or mpi.Is_finalized():
        return
    from spmd.transport import lifetime, patience

    board = patience._board
    limit = patience.time_limit() if board is not None else 0.0
    lifetime.await_others(board, limit)
    if finalizes:
        lifetime.finalize(mpi, board, limit)


def expected_size() -> int | None:
    """How many processes the job has of which this one seems to be, told without starting anything; None where that
    cannot be told."""
    wanted = os.environ.get("SPMD_TRANSPORT")
    torch = torch_world() if wanted != "mpi" else None
    if torch is not None and torch.size > 1 and (torch.launched or wanted == "torch"):
        return torch.size
    mpi = sys.modules.get("mpi4py.MPI") if wanted in (None, "", "mpi") else None
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        return mpi.COMM_WORLD.Get_size()
    for name in _WORLD_SIZES if wanted in (None, "", "mpi") else ():
        if os.environ.get(name, "1").isdecimal() and int(os.environ.get(name, "1")) > 1:
            return int(os.environ[name])
    return None if torch is None else torch.size


class TorchWorld(NamedTuple):
    """This process's place among those of torch.distributed. launched: by torchrun."""

    rank: int
    size: int
    launched: bool


def torch_world() -> TorchWorld | None:
    """The world of torch.distributed where it is initialised, else what a launcher's variables tell of it; None where
    there is neither, and with SPMD_TRANSPORT=local. Does not import torch."""
    if os.environ.get("SPMD_TRANSPORT") == "local":
        return None
    launched = "TORCHELASTIC_RUN_ID" in os.environ
    dist = sys.modules.get("torch.distributed")
    if getattr(dist, "is_initialized", bool)():
        return TorchWorld(dist.get_rank(), dist.get_world_size(), launched)  # type: ignore[union-attr]
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isdecimal() and size.isdecimal() and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()):
        return None
    return TorchWorld(int(rank), int(size), launched)


class World(NamedTuple):
    """The processes among which this one is: by which engine, its number, how many they are, and MPI's communicator."""

    engine: str
    rank: int
    size: int
    comm: Any = None


def job_world() -> World | None:
    """The job of several processes that this one is of, None where it is by itself.

    torchrun stands nearer to a process than a launcher of MPI: it is what srun starts on each host. Otherwise MPI goes
    before torch.distributed. SPMD_TRANSPORT names one of them.
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


def _said(hint: str | None) -> str:
    return f"{hint}={os.environ[hint or '']}: a launcher started several processes"


def leftovers(engine: str) -> tuple[str, str]:
    """The variables of launchers of an engine that this process has: with their values, and as `unset` takes them."""
    prefixes = sorted(n for n in os.environ if n.startswith(_OF_LAUNCHERS))
    names = [n for n in _OF_TORCH if n in os.environ] if engine == "torch" else prefixes
    return ", ".join(f"{n}={os.environ[n]}" for n in names), " ".join(names)


def _refuse_leftovers(hint: str | None) -> None:
    """Raise where variables say that a launcher of MPI has started this process, and it has no connection to one: an
    MPI library would end the process without a word that helps."""
    if hint is None or (fault := _no_connection()) is None:
        return
    found, names = leftovers("mpi")
    raise TransportError(
        message(
            "spmd.Mesh",
            got=f"{found} in the environment, as of a launcher of MPI, and {fault}",
            need="the connection that a launcher gives to each process that it starts",
            mend=f'start it by mpiexec; or, where these are left over from another job, "unset {names}", or '
            'Mesh(..., transport="local"), or SPMD_TRANSPORT=local',
        )
    )


def _no_connection() -> str | None:
    """Why this process cannot reach the launcher that its variables speak of; None where nothing speaks against it."""
    if "PMI_FD" in os.environ and not _is_socket(os.environ["PMI_FD"]):
        return "PMI_FD is no connection"
    if (
        "PMIX_RANK" in os.environ
        and "PMIX_NAMESPACE" in os.environ
        and not any(name.startswith("PMIX_SERVER_") for name in os.environ)
    ):
        return "no PMIX_SERVER_URI says where it is"
    return None


def _is_socket(file: str) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(int(file)).st_mode)
    except (OSError, ValueError, OverflowError):
        return False


_warned = False


def _warn_alone(hint: str | None, reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{_said(hint)}, but {reason}: each one runs all workers by itself. Use the mpiexec of the environment "
            "that mpi4py is in, or set SPMD_TRANSPORT=local if this is meant; unset the variable if it is left over",
            RuntimeWarning,
            stacklevel=3,
        )


_report: Any = None


def end_the_job_on_error() -> None:
    """From now on an error that nobody catches ends all processes of the job; the others would wait forever."""
    global _report
    if _report is None and not in_a_child():
        _report, sys.excepthook = sys.excepthook, _end_the_job
    if os._exit is raw_exit and not in_a_child():
        os._exit = _exit


def _exit(status: int) -> Any:
    """In place of os._exit, which keeps the end of this process from the others: launchers of MPI then end them without
    a word, MPICH's with status 0 if this is one."""
    mpi = sys.modules.get("mpi4py.MPI")
    if in_a_child() or mpi is None or not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.Get_size() == 1:
        if status and mpi is None and not in_a_child():
            _say_exit(status)
            abort(status)
        raw_exit(status)
    patience = sys.modules.get("spmd.transport.patience")
    board = None if patience is None else patience._board
    if status or board is None:
        _say_exit(status)
        abort(status or 1)
    else:  # Whoever waits for this process finds that it has left. Else the job goes on.
        board.close()
        from spmd.transport.mpi import end

        end()
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
    """This process, as messages name it."""
    names = "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "RANK"
    rank = next((os.environ[name] for name in names if name in os.environ), None)
    return f"process {os.getpid()}" if rank is None else f"rank {rank} of the world (process {os.getpid()})"


def _end_the_job(kind, error, traceback) -> None:
    """Report an error, one of all processes for all, and end them."""
    patience = sys.modules.get("spmd.transport.patience")
    others = patience.failed_too(kind, error) if patience is not None else []
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


_READ = 0.1
"""Seconds that a launcher has to read what was written: what it has not read when the job is aborted it may drop."""


def abort(status: int) -> None:
    """End all processes of this process's job, with this status."""
    if in_a_child():
        return
    for stream in sys.stdout, sys.stderr:
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    time.sleep(_READ)
    mpi = sys.modules.get("mpi4py.MPI")
    started = mpi is not None and mpi.Is_initialized()
    if mpi is not None and started:
        if not mpi.Is_finalized() and mpi.COMM_WORLD.Get_size() > 1:
            mpi.COMM_WORLD.Abort(status)
    elif "PMI_FD" in os.environ:
        tell_launcher(status)
    elif "spmd.transport.torch" in sys.modules:
        raw_exit(status)  # torchrun ends the others as soon as it sees that. The usual end of torch takes its time.


def tell_launcher(status: int) -> None:
    """MPICH's launcher takes no notice of a process that fails before it has started MPI, unless it says so. Launchers
    of other kinds are told nothing: they see the status of the process."""
    if _is_socket(os.environ.get("PMI_FD", "")):
        with suppress(OSError):
            os.write(int(os.environ["PMI_FD"]), f"cmd=abort exitcode={status}\n".encode())


# Children of os.fork

_child = False


def in_a_child() -> bool:
    """Whether this process is a child of os.fork of one of the job. What ends the job, and what says that this process
    has left it, is the parent's."""
    return _child


def _begin_as_a_child() -> None:
    global _child
    if _report is None and launcher_hint() is None and torch_world() is None:
        return  # of a process by itself
    _child = True
    if sys.excepthook is _end_the_job:
        sys.excepthook = _report
    if os._exit is _exit:
        os._exit = raw_exit
    atexit.unregister(_end_mpi)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_as_a_child)


def no_job_of_a_child() -> TransportError:
    return TransportError(
        message(
            "spmd.Mesh",
            got="a child of os.fork, which is no process of the job that its parent is of",
            need="a process that the launcher has started",
            mend='Mesh(..., transport="local") for workers of its own, or let the parent run the map',
        )
    )


if launcher_hint() in _SIZES and os.environ.get("SPMD_TRANSPORT") != "local":
    end_the_job_on_error()
