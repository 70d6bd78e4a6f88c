"""Rules of scipy.special, loaded when one of its functions first meets an Array."""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from spmd.autodiff.primitive import primitive, rule


@primitive("zeta", None, lambda g, _ans, s, q: -g * s * _zeta(s + 1, q))  # type: ignore
def _zeta(s, q):
    return special.zeta(s, q)


_BELL = 2 / math.sqrt(math.pi)

rule(special.expit, lambda g, ans, _x: g * (ans * (1 - ans)))
rule(special.log_expit, lambda g, _ans, x: g * special.expit(-x))
rule(special.logit, lambda g, _ans, x: g / (x * (1 - x)))
rule(special.erf, lambda g, _ans, x: g * (_BELL * np.exp(-x * x)))
rule(special.erfc, lambda g, _ans, x: g * (-_BELL * np.exp(-x * x)))
rule(special.erfcx, lambda g, ans, x: g * (2 * x * ans - _BELL))
rule(special.erfinv, lambda g, ans, _x: g * (np.exp(ans * ans) / _BELL))
rule(special.ndtr, lambda g, _ans, x: g * np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))
rule(special.log_ndtr, lambda g, ans, x: g * np.exp(-0.5 * x * x - ans) / math.sqrt(2 * math.pi))
rule(special.ndtri, lambda g, ans, _x: g * np.exp(0.5 * ans * ans) * math.sqrt(2 * math.pi))
rule(special.gamma, lambda g, ans, x: g * ans * special.digamma(x))
rule(special.gammaln, lambda g, _ans, x: g * special.digamma(x))
rule(special.loggamma, lambda g, _ans, x: g * special.digamma(x))
rule(special.digamma, lambda g, _ans, x: g * _zeta(2, x))
rule(special.entr, lambda g, _ans, x: -g * (np.log(x) + 1))
rule(special.xlogy, lambda g, _ans, _x, y: g * np.log(y), lambda g, _ans, x, y: g * x / (y + (x == 0)))
rule(special.xlog1py, lambda g, _ans, _x, y: g * np.log1p(y), lambda g, _ans, x, y: g * x / (1 + y + (x == 0)))
rule(special.exp10, lambda g, ans, _x: g * ans * math.log(10))
rule(special.exp2, lambda g, ans, _x: g * ans * math.log(2))
rule(special.expm1, lambda g, ans, _x: g * (ans + 1))
rule(special.log1p, lambda g, _ans, x: g / (1 + x))
rule(special.cbrt, lambda g, ans, _x: g / (3 * ans * ans))
rule(special.j0, lambda g, _ans, x: -g * special.j1(x))
rule(special.j1, lambda g, ans, x: g * (special.j0(x) - ans / x))
rule(special.i0, lambda g, _ans, x: g * special.i1(x))
rule(special.i1, lambda g, ans, x: g * (special.i0(x) - ans / x))
