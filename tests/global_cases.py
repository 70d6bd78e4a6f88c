"""Functions of whole arrays, to be compared with NumPy's: by name, with the arrays that they are given."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import spmd
from spmd import P


class quietly(warnings.catch_warnings):
    """Without the warnings of functions of no entries."""

    def __enter__(self):
        self.state = np.errstate(all="ignore")
        self.state.__enter__()
        super().__enter__()
        warnings.simplefilter("ignore")

    def __exit__(self, *error):
        super().__exit__(*error)
        self.state.__exit__(*error)


def outcome(f: Callable, *args: Any) -> tuple[Any, Exception | None]:
    with quietly():
        try:
            return f(*args), None
        except Exception as error:
            return None, error


def bare(x: Any) -> np.ndarray:
    return x.numpy() if isinstance(x, spmd.PartitionedArray) else np.asarray(x)


SHAPES = [(7,), (6, 5), (1, 4), (0, 3), (4, 3, 5)]

REDUCTIONS = {
    **{
        f"{name} {axis}": (lambda x, name=name, axis=axis: getattr(np, name)(x, axis=axis))
        for name in "sum mean max min prod any all var std argmax argmin count_nonzero ptp median".split()
        for axis in (None, 0, -1)
    },
    "mean keepdims": lambda x: np.mean(x, axis=0, keepdims=True),
    "max keepdims": lambda x: np.max(x, axis=-1, keepdims=True),
    "var ddof": lambda x: np.var(x, axis=0, ddof=1),
    "sum where": lambda x: np.mean(x, where=x > -10),
    "max initial": lambda x: np.max(x, axis=0, initial=0.3),
    "sum dims": lambda x: np.mean(x, axis=tuple(range(x.ndim))),
    "method sum": lambda x: x.sum(),
    "method mean": lambda x: x.mean(axis=0),
    "norm": lambda x: np.linalg.norm(x),
    "norm 1": lambda x: np.linalg.norm(x, 1, axis=0),
    "norm inf": lambda x: np.linalg.norm(x, np.inf, axis=-1),
    "quantile": lambda x: np.quantile(x, 0.3, axis=0),
    "quantiles": lambda x: np.quantile(x, [0.2, 0.5], axis=-1),
    "nanmean": lambda x: np.nanmean(x, axis=0),
    "add.reduce": lambda x: np.add.reduce(x, axis=0),
    "cumsum": lambda x: np.cumsum(x, axis=0),
    "cumsum all": lambda x: np.cumsum(x),
}
ALONG = {
    "sort": lambda x: np.sort(x, axis=0),
    "sort last": lambda x: np.sort(x),
    "argsort": lambda x: np.argsort(x, axis=0),
    "diff": lambda x: np.diff(x, axis=0),
    "flip": lambda x: np.flip(x, 0),
    "flip all": lambda x: np.flip(x),
    "roll": lambda x: np.roll(x, 2, 0),
    "roll back": lambda x: np.roll(x, -3, -1),
    "roll all": lambda x: np.roll(x, 1),
    "fft": lambda x: np.fft.fft(x, axis=-1) if x.shape[-1] else x,
    "repeat": lambda x: np.repeat(x, 2, axis=0),
    "take": lambda x: np.take(x, [0, -1], axis=0) if x.shape[0] else x,
}
SHAPING = {
    "T": lambda x: x.T,
    "transpose": lambda x: np.transpose(x, tuple(np.roll(range(x.ndim), 1))),
    "moveaxis": lambda x: np.moveaxis(x, 0, -1),
    "swapaxes": lambda x: x.swapaxes(0, -1),
    "expand": lambda x: np.expand_dims(x, 1),
    "squeeze": lambda x: np.squeeze(x),
    "new": lambda x: x[None, ..., None],
    "reshape": lambda x: x.reshape(-1, 1),
    "ravel": lambda x: np.ravel(x),
    "reshape pairs": lambda x: x.reshape((x.shape[-1], -1)) if x.size else x,
    "concatenate": lambda x: np.concatenate([x, 2 * x, x], axis=0),
    "concatenate last": lambda x: np.concatenate([x, x], axis=-1),
    "stack": lambda x: np.stack([x, x + 1], axis=1),
    "vstack": lambda x: np.vstack([x, x]),
    "hstack": lambda x: np.hstack([x, x]),
    "split": lambda x: np.array_split(x, 3)[1],
    "tile": lambda x: np.tile(x, 2),
    "pad": lambda x: np.pad(x, 1),
    "broadcast": lambda x: np.broadcast_to(x, (2, *x.shape)),
    "tril": lambda x: np.tril(x) if x.ndim > 1 else x,
}
INDEXING = {
    "first": lambda x: x[0] if x.shape[0] else x,
    "last": lambda x: x[-1] if x.shape[0] else x,
    "entry": lambda x: x[(-1,) * x.ndim] if x.size else x,
    "column": lambda x: x[..., 0],
    "slice": lambda x: x[1:4],
    "step": lambda x: x[::2],
    "step from": lambda x: x[1::3, ...],
    "back": lambda x: x[::-1],
    "beyond": lambda x: x[5:2],
    "integers": lambda x: x[np.array([0, 0, -1])] if x.shape[0] else x,
    "list": lambda x: x[[0]] if x.shape[0] else x,
    "mask rows": lambda x: x[np.arange(x.shape[0]) % 2 == 0],
    "mask": lambda x: x[x > 0.4],
    "two lists": lambda x: x[[0, 0], [1, 2]] if x.ndim > 1 and x.shape[0] else x,
    "slices": lambda x: x[1:, :-1] if x.ndim > 1 else x[1:],
}
ELEMENTWISE = {
    "where": lambda x: np.where(x > 0.5, x, 0),
    "clip": lambda x: x.clip(0.2, 0.8),
    "isnan any": lambda x: np.isnan(x).any(),
    "isclose": lambda x: np.isclose(x, x + 1e-12),
    "allclose": lambda x: np.allclose(x, x + 1e-12),
    "round": lambda x: np.round(x, 1),
    "nan_to_num": lambda x: np.nan_to_num(x),
    "real": lambda x: x.real,
    "astype": lambda x: x.astype(np.float32),
    "mixed": lambda x: x - x.mean(axis=0),
    "rows": lambda x: x * np.arange(x.shape[-1]),
    "transposed": lambda x: x + x.T.T,
    "outer layouts": lambda x: x + np.flip(np.flip(x, 0), 0),
}
PRODUCTS = {
    "x @ x.T": lambda x: x @ x.T,
    "x.T @ x": lambda x: x.T @ x,
    "dot": lambda x: np.dot(x, x.T),
    "vdot": lambda x: np.vdot(x, x),
    "outer": lambda x: np.outer(x, x),
    "matrix vector": lambda x: x @ np.arange(1.0, x.shape[-1] + 1),
    "vector matrix": lambda x: np.arange(1.0, x.shape[0] + 1) @ x if x.ndim < 3 else x,
    "tensordot": lambda x: np.tensordot(x, x, axes=([0], [0])),
    "einsum trace": lambda x: np.einsum("...i->i...", x),
    "einsum two": lambda x: np.einsum("i...,i...->...", x, x),
}
UPDATES = {
    "set row": lambda x: spmd.at(x)[0].set(1.0) if x.shape[0] else x,
    "add to column": lambda x: spmd.at(x)[..., -1].add(2.0),
    "set slice": lambda x: spmd.at(x)[1::2].set(np.arange(float(x.shape[-1])) if x.ndim > 1 else 3.0),
    "multiply part": lambda x: spmd.at(x)[1:, ..., 1:].multiply(3.0) if x.ndim > 1 else x,
    "set entry": lambda x: spmd.at(x)[(0,) * x.ndim].set(9.0) if x.size else x,
    "set mask": lambda x: spmd.at(x)[x > 0.5].set(0.0),
    "add at integers": lambda x: spmd.at(x)[np.array([0, 0, -1])].add(1.0) if x.shape[0] else x,
    "copy row": lambda x: spmd.at(x)[0].set(x[-1]) if x.shape[0] else x,
    "back": lambda x: spmd.at(x)[::-1].add(np.arange(float(x.shape[-1])) if x.ndim > 1 else 1.0),
}
EVERY = {
    **REDUCTIONS,
    **ALONG,
    **SHAPING,
    **INDEXING,
    **ELEMENTWISE,
    **PRODUCTS,
    **{f"at: {name}": f for name, f in UPDATES.items()},
}
SPECS = [P(), P("x"), P(None, "x"), P("y", "x"), P(("x", "y")), P(None, None, "y")]
MESHES = [{"x": 1, "y": 1}, {"x": 2, "y": 1}, {"x": 3, "y": 1}, {"x": 2, "y": 2}]


class Stored:
    """An array as h5py and zarr have it: read by tuples of slices, each of which is noted; converted by np.asarray."""

    def __init__(self, data: np.ndarray):
        self.data = data
        self.shape, self.dtype, self.ndim = data.shape, data.dtype, data.ndim
        self.reads: list[tuple[slice, ...]] = []

    def __getitem__(self, index: Any) -> np.ndarray:
        assert isinstance(index, tuple)
        assert all(type(s) is slice and s.step is None and s.stop > s.start for s in index)
        self.reads.append(index)
        return self.data[index].copy()

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("the whole was read")
