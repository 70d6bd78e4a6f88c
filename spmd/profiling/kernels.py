"""Kernels and products of matrices, observed: while a profile is open, what finds them gives observed ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from time import perf_counter
from types import ModuleType
from typing import Any

import numpy as np

from spmd import kernels
from spmd.autodiff import primitive
from spmd.kernels import FAMILIES, cpu
from spmd.transport.call import LEDGERS

__all__ = ["observe_kernels", "release_kernels"]

_PRIMITIVES = """np.matmul np.dot np.vdot np.inner np.tensordot np.einsum np.convolve np.correlate np.linalg.solve
    np.linalg.inv np.linalg.cholesky np.linalg.qr np.linalg.svd np.linalg.eigh np.fft.fft np.fft.ifft np.fft.rfft
    np.fft.irfft np.fft.fftn np.fft.ifftn np.fft.rfftn np.fft.irfftn""".split()
"""The functions of NumPy that are observed: those with more arithmetic than entries."""

_lock = threading.Lock()
_open = 0
_plain_of = kernels.of
_plain_functions: dict[Any, Callable[..., Any]] = {}


class _ObservedPackage:
    """A package of kernels that gives each kernel observed."""

    def __init__(self, package: ModuleType):
        self.package = package

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.package, name)
        if callable(kernel) and name not in FAMILIES["moves"]:  # those are parts of collectives
            kernel = _observed(kernel, name)
        setattr(self, name, kernel)
        return kernel


def _observed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, that tells the observers of its context when it runs."""

    @wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        observers = LEDGERS.get()
        if not observers:
            return function(*args, **kwargs)
        start = perf_counter()
        result = function(*args, **kwargs)
        for observer in observers:
            observer.kernel(name, start)
        return result

    return run


def observe_kernels() -> None:
    """Let observers know of kernels, until `release_kernels` is called as often."""
    global _open
    with _lock:
        _open += 1
        if _open > 1:
            return
        observed_cpu = _ObservedPackage(cpu)
        packages = {cpu.__name__: observed_cpu}

        def of(x: object) -> Any:
            if type(x) is np.ndarray:
                return observed_cpu
            package = _plain_of(x)
            if package is not cpu and not kernels.on_device(x):
                return package  # of arrays that record a program
            observed = packages.get(package.__name__)
            return observed or packages.setdefault(package.__name__, _ObservedPackage(package))

        kernels.of = of
        for prim in set(primitive.primitives.values()):
            if prim.name in _PRIMITIVES:
                _plain_functions[prim] = prim.fun
                prim.fun = _observed(prim.fun, prim.name)


def release_kernels() -> None:
    """See `observe_kernels`."""
    global _open
    with _lock:
        _open -= 1
        if _open:
            return
        kernels.of = _plain_of
        for prim, function in _plain_functions.items():
            prim.fun = function
        _plain_functions.clear()
