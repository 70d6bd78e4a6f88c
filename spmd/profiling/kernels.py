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
from spmd.autodiff import array_methods
from spmd.autodiff.primitive import primitives
from spmd.autodiff.rules import linalg
from spmd.kernels import FAMILIES, cpu
from spmd.profiling.recording import Name
from spmd.transport.call import LEDGERS

__all__ = ["observe_kernels", "release_kernels"]

_KERNELS = {
    kernel
    for family, names in FAMILIES.items()
    if family not in ("activation", "moves", "philox", "updates")
    for kernel in names
}
"""The kernels that are observed: not those of one pass over their entries, nor those that are parts of collectives."""

_lock = threading.Lock()
_open = 0
_plain_of = kernels.of
_plain_functions: list[tuple[Any, str, Callable[..., Any]]] = []


class _ObservedPackage:
    """A package of kernels that gives each kernel observed."""

    def __init__(self, package: ModuleType):
        self.package = package

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self.package, name)
        if name in _KERNELS:
            kernel = _observed(kernel, name)
        setattr(self, name, kernel)
        return kernel


def _observed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function, that tells the observers of its context when it runs."""
    kernel = Name("kernel", name)

    @wraps(function, updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        observers = LEDGERS.get()
        if not observers:
            return function(*args, **kwargs)
        start = perf_counter()
        result = function(*args, **kwargs)
        for observer in observers:
            observer.kernel(kernel, start)
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
        for owner, name in _products():
            function = getattr(owner, name)
            _plain_functions.append((owner, name, function))
            setattr(owner, name, _observed(function, "matmul"))


def _products() -> list[tuple[Any, str]]:
    """What holds the function that multiplies matrices: `@`, np.matmul, and the rules of their derivatives."""
    return [(array_methods.operators["matmul"], "fun"), (primitives[np.matmul], "fun"), (linalg, "product")]


def release_kernels() -> None:
    """See `observe_kernels`."""
    global _open
    with _lock:
        _open -= 1
        if _open:
            return
        kernels.of = _plain_of
        for owner, name, function in _plain_functions:
            setattr(owner, name, function)
        _plain_functions.clear()
