"""Error classes, and the function that builds error messages.

Every message says where the error arose, in which argument, what came, what was needed, and how to mend it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import CodeType
from typing import Any, Self

__all__ = [
    "CheckpointError",
    "ClosureError",
    "CorruptCheckpointError",
    "DeadlockError",
    "DifferentiationError",
    "DonatedError",
    "DtypeError",
    "JitError",
    "LayoutError",
    "MeshError",
    "MismatchError",
    "MissingMethodError",
    "MutationError",
    "NonFiniteError",
    "ReplicaError",
    "SpecError",
    "StallError",
    "StateError",
    "TracedConversionError",
    "TransportError",
    "all_of",
    "axes_of",
    "caller",
    "class_name",
    "describe",
    "message",
    "nearest",
    "one_or_all",
    "prints",
    "rebuilt_error",
    "source_line",
    "user_stacklevel",
]


class _Located:
    """An error whose text says where it arose, what came, what was needed, and how to mend it."""

    @classmethod
    def at(cls, where: str, *, got: str, need: str, mend: str, argument: str | None = None) -> Self:
        """The error with the text that `message` builds."""
        return cls(message(where, got=got, need=need, mend=mend, argument=argument))  # type: ignore[call-arg]


class MeshError(_Located, ValueError):
    """No mesh, an unknown or repeated axis, or a mesh that does not fit the workers there are.

    >>> spmd.map(lambda x: x, P("x"), P("x"))(np.ones(4))
    Traceback (most recent call last):
        ...
    spmd.errors.MeshError: spmd.map of <lambda>: argument mesh
      got:    no mesh, and no enclosing `with mesh:`
      ...
    """


class SpecError(_Located, ValueError):
    """A partition spec that does not fit its mesh, its array or the tree of its arguments.

    >>> spmd.put(np.ones(4), P("y"), spmd.Mesh(x=2))
    Traceback (most recent call last):
        ...
    spmd.errors.SpecError: spmd.put: argument spec
      got:    P('y'), which names axis 'y'
      ...
    """


class LayoutError(_Located, ValueError):
    """Blocks, shapes or layouts that do not fit together.

    >>> spmd.from_blocks([np.ones((1, 3)), np.ones((1, 4))], P("x"), spmd.Mesh(x=2))
    Traceback (most recent call last):
        ...
    spmd.errors.LayoutError: spmd.from_blocks, laid out by P('x')
      got:    a block of shape [1, 3] on worker 0 (x=0), and one of shape [1, 4] on worker 1 (x=1)
      ...
    """


class StateError(_Located, TypeError):
    """An operation on an array whose state (Invariant, Varying, Rooted) it does not accept.

    >>> with spmd.Mesh(x=2):
    ...     spmd.map(lambda w: spmd.psum(w, "x"), P(), P())(np.ones(2))
    Traceback (most recent call last):
        ...
    spmd.errors.StateError: spmd.psum: argument x
      got:    Invariant array float64[2], which does not vary over axis 'x'
      needed: an array that varies over 'x'
      mend:   leave the call out: along 'x' the value is already the same on all 2 workers; ...
    """


class ClosureError(_Located, TypeError):
    """A body that uses an array from outside its map.

    >>> def loss(w):
    ...     return np.sum(spmd.map(lambda x: w * x, P("x"), P("x"))(np.ones(4)))
    >>> with spmd.Mesh(x=2):
    ...     spmd.grad(loss)(2.0)
    Traceback (most recent call last):
        ...
    spmd.errors.ClosureError: an operation in a body
      got:    traced array float64[] that was traced outside of this map
      ...
    """


class DifferentiationError(_Located, TypeError):
    """A function that has no derivative rule, or an argument that cannot be differentiated.

    >>> spmd.grad(lambda x: x**2)(np.ones(3))
    Traceback (most recent call last):
        ...
    spmd.errors.DifferentiationError: grad of <lambda>: result
      got:    traced array float64[3]
      ...
    """


class DtypeError(_Located, TypeError):
    """A value that an array's dtype cannot hold.

    >>> spmd.grad(lambda x: np.sum(x.at[0].set(1j)))(np.ones(2))
    Traceback (most recent call last):
        ...
    spmd.errors.DtypeError: x.at[i]: argument v
      got:    complex128 for an array of float64
      ...
    """


class JitError(_Located, RuntimeError):
    """A body under spmd.jit depends on values, or on something that changes from call to call.

    reads_value: the code read a value; an operation that reads values may be recorded as a whole.

        >>> f = spmd.jit(spmd.map(lambda x: x if float(spmd.psum(x[0], "x")) > 0 else -x, P("x"), P("x")))
        >>> with spmd.Mesh(x=2):
        ...     f(np.ones(2))
        Traceback (most recent call last):
            ...
        spmd.errors.JitError: float()
          got:    array float64[], within spmd.jit
          ...
          mend:   to print or log it, return it and do so outside; np.where in place of `if`; ...
    """

    reads_value = False


class TracedConversionError(_Located, TypeError):
    """A traced array was converted to bare data, which would cut it off from its gradient.

    >>> spmd.grad(lambda x: np.sum(np.asarray(x)))(np.ones(2))
    Traceback (most recent call last):
        ...
    spmd.errors.TracedConversionError: np.asarray
      got:    traced array float64[2]
      needed: a bare array; converting would cut the result off from its gradient
      mend:   spmd.numpy.asarray(...), or np.stack([a, b]); spmd.stop_gradient(x) if no gradient is wanted
    """


class MissingMethodError(_Located, AttributeError):
    """A method or attribute of NumPy's arrays, or a name of another library's module, that does not exist here.

    The text may be given as a function, which is called when the text is read: `hasattr` never reads it.

        >>> spmd.put(np.ones(4), P("x"), spmd.Mesh(x=2)).tofile("u.bin")
        Traceback (most recent call last):
            ...
        spmd.errors.MissingMethodError: x.tofile
          got:    PartitionedArray float64[4] laid out by P('x')
          ...
    """

    def __str__(self) -> str:
        text = self.args[0] if self.args else ""
        return str(text() if callable(text) else text)


class MutationError(_Located, RuntimeError):
    """A bare array changed between the forward run and the backward sweep, or a write would change a tensor's state.

    >>> x = np.zeros(2)
    >>> with spmd.debug(mutation=True):
    ...     value, pull = spmd.vjp(np.sin, x)
    ...     x += 1.0
    ...     pull(np.ones(2))
    Traceback (most recent call last):
        ...
    spmd.errors.MutationError: np.sin, recorded at ...
      got:    a bare array that was written into after the tape had kept it
      ...
    """


class TransportError(_Located, RuntimeError):
    """A transport is not available, or has another number of workers than the mesh.

    >>> with spmd.Mesh(x=2, transport="torch"):
    ...     spmd.map(lambda: None, (), None)()
    Traceback (most recent call last):
        ...
    spmd.errors.TransportError: spmd.Mesh
      got:    Mesh(x=2) of 2 workers, and a torch.distributed world of 1 process
      ...
    """


class MismatchError(_Located, RuntimeError):
    """Workers met in one collective with different calls.

    >>> def body(x):
    ...     return spmd.psum(x, "x") if spmd.is_main() else spmd.pmax(x, "x")
    >>> with spmd.Mesh(x=2):
    ...     spmd.map(body, P("x"), P())(np.ones(2))
    Traceback (most recent call last):
        ...
    spmd.errors.MismatchError: a collective
      got:    workers that met with different calls
              worker 0 (x=0): psum(float64[1], 'x')
                at ... in body
              worker 1 (x=1): pmax(float64[1], 'x', how='max', dims=())
                at ... in body
      ...
    """


class DeadlockError(MismatchError):
    """Workers wait for others that never come.

    >>> def body(x):
    ...     return spmd.psum(x, "x") if spmd.is_main() else x
    >>> with spmd.Mesh(x=2):
    ...     spmd.map(body, P("x"), P("x"))(np.ones(2))
    Traceback (most recent call last):
        ...
    spmd.errors.DeadlockError: a collective
      got:    workers that wait for others that will never come
              worker 0 (x=0) waits in psum(float64[1], 'x') for worker 1 (x=1)
      ...
    """


class NonFiniteError(_Located, FloatingPointError):
    """A NaN or an infinity inside spmd.debug(nans=True).

    >>> with spmd.Mesh(x=2), spmd.debug(nans=True), np.errstate(divide="ignore"):
    ...     spmd.map(lambda x: np.log(x), P("x"), P("x"))(np.array([1.0, 0.0]))
    Traceback (most recent call last):
        ...
    spmd.errors.NonFiniteError: np.log at ... in <lambda>
      got:    -inf at (0,) of ndarray float64[1], and 1 of 1 entries in all
      ...
    """


class DonatedError(_Located, RuntimeError):
    """A donated array (`donate=True`) that is used again.

    >>> optimizer, params = spmd.optim.sgd(0.5), spmd.put(np.ones(2), P(), spmd.Mesh(x=2))
    >>> new, state = optimizer.update(np.ones(2), optimizer.init(params), params, donate=True)
    >>> params + 1
    Traceback (most recent call last):
        ...
    spmd.errors.DonatedError: np.add
      got:    an array that was given away (donate=True)
      ...
    """


class ReplicaError(_Located, RuntimeError):
    """An Invariant array that differs between workers, or parameters that are not used alike on all workers.

    >>> with spmd.Mesh(x=2), spmd.debug(replicas=True):
    ...     spmd.map(lambda w: w + np.float64(spmd.worker_index("x")), P(), P())(np.ones(2))
    Traceback (most recent call last):
        ...
    spmd.errors.ReplicaError: np.add at ... in <lambda>
      got:    an Invariant array with 1.0 at (0,) on worker 0 (x=0), and on worker 1 (x=1) with 2.0 at (0,); ...
      ...
    """


class CheckpointError(_Located, RuntimeError):
    """A checkpoint that cannot be saved or loaded: a path, a leaf, a name or a shape that does not fit.

    >>> spmd.load("no/such/folder")
    Traceback (most recent call last):
        ...
    spmd.errors.CheckpointError: the checkpoint ...no/such/folder
      got:    no such folder
      ...
    """


class CorruptCheckpointError(CheckpointError):
    """Bytes of a checkpoint are not those that were written.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     spmd.save(folder, {"w": np.ones(8)})
    ...     (file,) = pathlib.Path(folder).glob("*.safetensors")
    ...     length = file.write_bytes(file.read_bytes()[:-1] + b"!")
    ...     spmd.load(folder)
    Traceback (most recent call last):
        ...
    spmd.errors.CorruptCheckpointError: the leaf 'w', the file ...
      got:    bytes 0 to 1048576 with another checksum than they were written with
      ...
    """


class StallError(_Located, RuntimeError):
    """A collective that has made no progress for SPMD_TIMEOUT seconds.

    >>> issubclass(spmd.errors.StallError, spmd.errors.DeadlockError)
    False
    """


def class_name(error: BaseException) -> str:
    """The class of an error, as `rebuilt_error` finds it in another process: `numpy.linalg.LinAlgError`.

    >>> spmd.errors.class_name(np.linalg.LinAlgError()), spmd.errors.class_name(KeyError())
    ('numpy.linalg.LinAlgError', 'KeyError')
    """
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def rebuilt_error(name: str, text: str) -> Exception:
    """The error of another process: an error of this class with this text.

    RuntimeError if the class does not exist here, or does not accept a text.

        >>> spmd.errors.rebuilt_error("spmd.errors.SpecError", "no such axis")
        SpecError('no such axis')
    """
    module, _, last = name.rpartition(".")
    kind = getattr(sys.modules.get(module or "builtins"), last, None)
    error = None
    if isinstance(kind, type) and issubclass(kind, Exception):
        with suppress(Exception):
            error = kind(text)
    return error if isinstance(error, Exception) else RuntimeError(f"{name}: {text}")


def message(where: str, *, got: str, need: str, mend: str, argument: str | None = None) -> str:
    """The text of an error: where it arose, what came, what was needed, how to mend it.

    >>> print(spmd.errors.message("solve", argument="b", got="float64[3]", need="float64[4]", mend="b = A @ x"))
    solve: argument b
      got:    float64[3]
      needed: float64[4]
      mend:   b = A @ x
    """
    noun = "" if argument is None or argument.startswith(("result", "the ")) else "argument "
    head = where if argument is None else f"{where}: {noun}{argument}"
    return f"{head}\n  got:    {got}\n  needed: {need}\n  mend:   {mend}"


def prints(text: str) -> bool:
    """Whether standard output can encode a text.

    >>> spmd.errors.prints("psum")
    True
    """
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def describe(x: object) -> str:
    """A short description of a value: its kind, dtype and shape where it has them.

    >>> spmd.errors.describe(np.ones((2, 3))), spmd.errors.describe("data")
    ('ndarray float64[2, 3]', "str 'data'")
    """
    description = getattr(x, "__spmd_describe__", None)
    if description is not None:
        return description()
    shape, dtype = getattr(x, "shape", None), getattr(x, "dtype", None)
    if shape is not None and dtype is not None and not isinstance(x, type):
        return f"{type(x).__name__} {dtype}{list(shape)}"
    text = repr(x)
    return f"{type(x).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def all_of(names: Iterable[object]) -> str:
    """Names as a sentence lists them: `'x' and 'y'`.

    >>> spmd.errors.all_of(["x", "y"])
    "'x' and 'y'"
    """
    return " and ".join(map(repr, names))


def axes_of(names: Sequence[str]) -> str:
    """Axes as a sentence names them: `axis 'x'`, `axes 'x' and 'y'`.

    >>> spmd.errors.axes_of(["x"]), spmd.errors.axes_of(["x", "y"])
    ("axis 'x'", "axes 'x' and 'y'")
    """
    return f"{'axis' if len(names) == 1 else 'axes'} {all_of(names)}"


def one_or_all(names: Sequence[str]) -> str:
    """Axes as an argument `axis_name` takes them: `'x'`, `('x', 'y')`.

    >>> spmd.errors.one_or_all(["x"]), spmd.errors.one_or_all(["x", "y"])
    ("'x'", "('x', 'y')")
    """
    return repr(names[0] if len(names) == 1 else tuple(names))


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """The known names that are most like `name`, best first.

    >>> spmd.errors.nearest("all_gathr", ["all_gather", "all_to_all", "psum"])
    ['all_gather', 'all_to_all']
    """
    from difflib import get_close_matches

    names = sorted(set(candidates))
    close = get_close_matches(name, names, n=count, cutoff=0.5)
    return close + [k for k in names if name and k not in close and (name in k or k in name)][: count - len(close)]


def caller(frame: Any = None) -> Any:
    """The nearest frame of the user's code, going up from `frame` (default: the caller's); None if there is none.

    >>> spmd.errors.caller().f_code.co_name
    '<module>'
    """
    frame = frame or sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        users = _modules.get(module)
        if users is None:
            users = _modules[module] = _is_users(module)
        if users:
            return frame
        frame = frame.f_back
    return None


def user_stacklevel() -> int:
    """The `stacklevel` of a warning that is to point at the user's code.

    >>> spmd.errors.user_stacklevel()
    1
    """
    frame, count = sys._getframe(1), 1
    user = caller(frame)
    while frame is not None and frame is not user:
        frame, count = frame.f_back, count + 1
    return count


_modules: dict[str, bool] = {}
"""Whether a module belongs to the user, by its name."""


def _is_users(module: str) -> bool:
    """Whether a module belongs to the user: not to this library, to torch, or to what starts a thread or a context."""
    return module.split(".", 1)[0] not in ("spmd", "torch", "threading", "contextlib") or module == "spmd.__main__"


def source_line(code: CodeType | None, instruction: int) -> str:
    """`file.py:12 in f` for an instruction of the user's code.

    >>> spmd.errors.source_line(None, 0)
    'unknown source'
    """
    if code is None:
        return "unknown source"
    line = next(itertools.islice(code.co_positions(), instruction // 2, None))[0]
    return f"{code.co_filename}:{line} in {code.co_name}"
