"""Record a function of global arrays: one program for each worker, at the same time.

A block of a global array is a `Slot` of the program of its worker. Bare data, which all workers have, is a `Slot` of
the `Together`: what is called on it becomes a line of every program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from spmd.autodiff.staging.function_tables import refuse
from spmd.autodiff.staging.program import mapped
from spmd.autodiff.staging.recorder import NO_KWARGS, Program, is_slot, slots
from spmd.errors import JitError, describe

__all__ = ["RECORDING", "Together", "at_worker", "check_values", "is_over", "recorded_by"]

RECORDING: ContextVar[Together | None] = ContextVar("spmd_recording", default=None)
"""The programs that record a function of global arrays; None where none is recorded."""


class _OfWorker(Program):
    """The program of one worker. Bare data among the arguments of its lines is this worker's copy."""

    def __init__(self, together: Together, worker: int):
        super().__init__()
        self.together = together
        self.worker = worker

    def call(self, fun: Any, args: Any, kwargs: Any = NO_KWARGS, **options: Any) -> Any:
        args, kwargs = mapped(tuple(args), self._own), mapped(kwargs, self._own) if kwargs else kwargs
        return super().call(fun, args, kwargs, **options)

    def _own(self, x: Any) -> Any:
        own = at_worker(x, self.worker) if is_slot(x) and x.program is self.together else x
        if is_slot(own) and own.program is not self:
            raise _foreign(own)
        return own


class Together(Program):
    """The programs of the workers of this process, as one: a line of it is a line of each.

    mesh: whose workers. programs: by worker. copies: of each value the stand-ins in these programs, by its number.
    """

    def __init__(self, mesh: Any, workers: Iterable[int]):
        super().__init__()
        self.mesh = mesh
        self.programs = {w: _OfWorker(self, w) for w in workers}
        self.copies: list[Mapping[int, Any]] = []

    def of_worker(self, mesh: Any, worker: int) -> Program:
        """The program of a worker of a mesh, which must be that of the recording."""
        if mesh != self.mesh:
            raise JitError.at(
                "a function, within spmd.jit",
                got=f"arrays on {self.mesh} and on {mesh}",
                need="arrays on one mesh",
                mend="a function with spmd.jit for each mesh",
            )
        return self.programs[worker]

    def input(self, value: Any) -> Any:
        """The stand-in for bare data."""
        return self.joined({w: program.input(value) for w, program in self.programs.items()})

    def joined(self, copies: Mapping[int, Any]) -> Any:
        """Bare data of which each worker has a copy. copies: nested tuples of stand-ins, by worker."""
        first = next(iter(copies.values()))
        if isinstance(first, tuple | list):
            parts = [self.joined({w: c[k] for w, c in copies.items()}) for k in range(len(first))]
            return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
        if not is_slot(first):
            return first
        self.copies.append(copies)
        return type(first)(self, len(self.copies) - 1, first.value)

    def call(self, fun: Any, args: Any, kwargs: Any = NO_KWARGS, **options: Any) -> Any:
        """A line of every program; of one worker's where data of that is among the arguments."""
        if options.get("writes"):
            raise args[0]._refuse("x[i] = v, or a method that works in place", "a new array: np.where(mask, v, x)")
        for x in slots((args, kwargs)):
            if x.program in self.programs.values():
                return x.program.call(fun, args, kwargs, **options)
            if x.program is not self:
                raise _foreign(x)
        return self.joined({w: program.call(fun, args, kwargs, **options) for w, program in self.programs.items()})

    def check(self) -> None:
        super().check()
        for program in self.programs.values():
            program.check()


def _foreign(x: Any) -> JitError:
    """The error for a stand-in of another worker, or of another recording."""
    return JitError.at(
        "a function, within spmd.jit",
        got=f"{describe(x)} of another call of a jitted function",
        need="arrays that come from the arguments of this call",
        mend="return arrays in place of keeping them in variables outside",
    )


def at_worker(x: Any, worker: int) -> Any:
    """Bare data as a worker has it: its copy of what stands for the copies of all; anything else unchanged."""
    return x.program.copies[x.index][worker] if is_slot(x) and type(x.program) is Together else x


def check_values(x: Any, where: str, mend: str) -> None:
    """Raise where values of a global array are asked for while it is recorded what is done with it."""
    for block in filter(is_slot, x.__spmd_parts__()):
        block.program.failed = error = refuse(where, x, mend)
        raise error


@contextmanager
def recorded_by(programs: Together) -> Iterator[None]:
    """Record what is done with global arrays in these programs."""
    token = RECORDING.set(programs)
    try:
        yield
    finally:
        RECORDING.reset(token)


def is_over(x: Any) -> bool:
    """Whether a global array is one of a step of a loop that has been recorded: outside of it there are no values."""
    parts = filter(is_slot, x.__spmd_parts__())
    return any(part.program.steps is not None and part.program.steps.is_over(part) for part in parts)
