"""Softmax and kin: the kernels against their references, and the functions over them."""

from __future__ import annotations

import numpy as np
from kernel_cases import Family

from spmd.kernels import reference

family = Family("softmaxes")


def rows(draw):
    """At least one entry per row: of nothing there is no largest."""
    return (*draw.shape(0, 3), draw.choose(1, 2, 5, 33, 257))


family.case("softmax", lambda draw: (draw.array(rows(draw), low=-30, high=30),))
family.case("log_softmax", lambda draw: (draw.array(rows(draw), low=-30, high=30),))


def with_result(f):
    def make(draw):
        x = draw.array(rows(draw))
        return draw.array(x.shape), f(x.astype(np.float64)).astype(x.dtype)

    return make


family.case("softmax_vjp", with_result(reference.softmax), scale=9)
family.case("log_softmax_vjp", with_result(reference.log_softmax), scale=99)

TestKernels = family.tests()
