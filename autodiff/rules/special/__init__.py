"""Rules of scipy.special, loaded when one of its functions first meets an Array.

Its ufuncs reach a rule by NumPy's protocol. Its Python functions do not: they have a rule, a composition or a
refusal here all the same, and `functions` holds what takes traced arrays under their names; `spmd.scipy.special`
gives it out.

Where a formula divides by zero at a point where the derivative exists, another one that is exact around the point
serves there, so that higher derivatives hold as well.
"""

from __future__ import annotations

from typing import Any

import scipy.special

from spmd.autodiff.primitive import composites, constant, constants, handlers, passive, passives, refusals, refused
from spmd.autodiff.rules.special import bessel, distributions, elementary, elliptic, gamma, integrals, polynomials, sums
from spmd.autodiff.rules.special.frame import functions, special
from spmd.errors import nearest

__all__ = [
    "bessel",
    "distributions",
    "elementary",
    "elliptic",
    "functions",
    "gamma",
    "integrals",
    "polynomials",
    "special",
    "sums",
]

# Constants, and what has no derivative here


def _named(names: str) -> list[Any]:
    return [getattr(special, name) for name in names.split() if hasattr(special, name)]


constant(*_named("gammasgn round stirling2"))
passive(
    getattr(scipy.special, "test", None),
    *_named(
        "geterr seterr errstate SpecialFunctionWarning SpecialFunctionError bernoulli euler "
        "legendre chebyt chebyu chebyc chebys laguerre hermite hermitenorm sh_legendre sh_chebyt sh_chebyu "
        "roots_legendre roots_chebyt roots_chebyu roots_chebyc roots_chebys roots_laguerre roots_hermite "
        "roots_hermitenorm roots_sh_legendre roots_sh_chebyt roots_sh_chebyu "
        "p_roots t_roots u_roots c_roots s_roots l_roots h_roots he_roots ps_roots ts_roots us_roots"
    ),
    *[f for name, f in tuple(vars(special).items()) if name.endswith("_zeros")],
)

_refused = {
    "an inverse by another argument: gammaincinv, betaincinv, chdtri, fdtri, stdtrit, pdtri, bdtri, gdtria": """
        bdtrik bdtrin btdtria btdtrib chdtriv chndtridf chndtrinc fdtridfd gdtrib nbdtrik nbdtrin pdtrik stdtridf
    """,
    "chndtr, fdtr or stdtr": "ncfdtr ncfdtri ncfdtridfd ncfdtridfn ncfdtrinc nctdtr nctdtridf nctdtrinc nctdtrit",
    "ndtr(x), or the sum of (-1)**(k - 1) * 2 * np.exp(-2 * k**2 * x**2)": "kolmogi kolmogorov smirnov smirnovi",
    "itj0y0, iti0k0 or itstruve0": "it2i0k0 it2j0y0 it2struve0",
    "mathieu_cem(m, q, x) or mathieu_sem, by x": "mathieu_a mathieu_b mathieu_even_coef mathieu_odd_coef",
    "lpmv, spherical_jn or spherical_yn; spmd.scipy.special.sph_harm_y": """
        obl_ang1 obl_ang1_cv obl_cv obl_cv_seq obl_rad1 obl_rad1_cv obl_rad2 obl_rad2_cv
        pro_ang1 pro_ang1_cv pro_cv pro_cv_seq pro_rad1 pro_rad1_cv pro_rad2 pro_rad2_cv
    """,
    "zeta(s, q), by q": "zetac",
    "elliprf, elliprd, elliprg or elliprj": "ellip_harm ellip_harm_2 ellip_normal",
    "eval_legendre(n, x), lpmv(m, n, x), or spmd.scipy.special.sph_harm_y(n, m, theta, phi)": """
        assoc_legendre_p assoc_legendre_p_all legendre_p_all sph_legendre_p sph_legendre_p_all sph_harm_y_all
        lqmn lqn lpmn clpmn lpn sph_harm
    """,
    "jv(v, x) * gamma(v + 1) * (2 / x)**v": "lmbda",
    "x * spmd.scipy.special.spherical_jn(n, x)": "riccati_jn",
    "x * spmd.scipy.special.spherical_yn(n, x)": "riccati_yn",
    "pbdv(v, x) or pbvv(v, x), order by order": "pbdn_seq pbdv_seq pbvv_seq",
    "eval_jacobi(n, alpha, beta, x), eval_genlaguerre or eval_gegenbauer, by x": """
        jacobi genlaguerre gegenbauer sh_jacobi roots_jacobi roots_genlaguerre roots_gegenbauer roots_sh_jacobi
        j_roots la_roots cg_roots js_roots
    """,
}
for _instead, _names in _refused.items():
    refused(*_named(_names), instead=_instead)

# What later versions of SciPy add.
_ruled = [name for name, f in tuple(vars(special).items()) if f in handlers]
for _name, _f in tuple(vars(special).items()):
    if not any(_f in known for known in (handlers, constants, composites, passives, refusals)):
        refused(_f, instead=", ".join(nearest(_name, _ruled)) or "another function, of those with a derivative")
