"""The rules of scipy.special, and its functions in spmd.scipy.special."""

from __future__ import annotations

import importlib
import os
import re

import numpy as np
import pytest
import scipy.special
from rules import Table, complex_, distinct, full, of, one, pair, positive, signed

from spmd.autodiff import grad, vjp
from spmd.autodiff.check import check_grads
from spmd.autodiff.primitive import constants, handlers, passives, refusals
from spmd.errors import DifferentiationError, StateError, TracedConversionError
from spmd.scipy import special

TABLE = Table()


def between(low, high):
    return lambda rng, shape: rng.uniform(low, high, shape)


def disc(rng, shape):
    """Complex, of size about one, in the right half of the plane."""
    return rng.uniform(0.4, 1.6, shape) * np.exp(1j * rng.uniform(0.2, 1.2, shape) * rng.choice([-1, 1], shape))


def far(rng, shape):
    return 10 * disc(rng, shape)


def ring(rng, shape):
    """Far out above the real line. Nearer, the terms of w' = 2i/√π - 2 z w cancel in two of their digits."""
    return rng.uniform(8.5, 12, shape) * np.exp(1j * rng.uniform(0.1, 3, shape))


probability = between(0.1, 0.9)
wide = between(-3, 3)
SHAPES = {1: one, 2: pair, 3: of("3 . 23", "2 2 2", ". 0 1"), 4: of("3 . 3 1", ". . . .")}


def cases(names, *calls):
    """Rows of functions. A call has domains for arguments that are differentiated, and values for the others.

    The calls with the same domains are one row, with several results.
    """
    calls = [args if isinstance(args, tuple) else (args,) for args in calls]
    groups = {}
    for args in calls:
        groups.setdefault(tuple(a for a in args if callable(a)), []).append(args)
    for name in names.split():
        for k, (domains, group) in enumerate(groups.items()):

            def f(*xs, name=name, group=group):
                results = []
                for args in group:
                    rest = iter(xs)
                    results.append(getattr(special, name)(*[next(rest) if callable(a) else a for a in args]))
                return results if len(results) > 1 else results[0]

            TABLE.row(f"{name}-{k}", f, domains, SHAPES[len(domains)])


# elementary functions
cases("expit log_expit exp10 exp2 cosm1 softplus sinc", wide)
cases("exprel", wide, between(-0.01, 0.01), between(5, 9), between(-60, -20))
cases("logit", probability)
cases("expm1 log1p", positive, disc)
cases("cbrt", signed)
cases("sindg cosdg", between(-300, 300))
cases("tandg cotdg", between(10, 80))
cases("radian", (wide, wide, wide))
cases("powm1", (positive, signed))
cases("boxcox boxcox1p", (positive, signed), (positive, between(-0.01, 0.01)), (positive, 0.0), (positive, 2))
cases("inv_boxcox inv_boxcox1p", (between(0.2, 1), between(-0.6, 1.5)), (signed, between(-0.01, 0.01)), (wide, 0.0))

# entropies and losses
cases("entr", positive)
cases("rel_entr kl_div", (positive, positive))
cases("xlogy xlog1py", (positive, positive), (complex_, disc), (0.0, positive), (signed, 0.5))
cases("huber", (1.1, distinct), (between(2.1, 2.2), between(-2, 2)), (between(0.1, 0.2), signed))
cases("pseudo_huber", (positive, signed))

# error functions
cases("erf erfc erfi", between(-2, 2), disc)
cases("ndtr", wide, disc)
cases("erfcx", between(-1, 3), between(8.5, 12), disc, far)
cases("dawsn", wide, between(9, 12), disc)
cases("wofz", disc, ring)
cases("log_ndtr", wide, between(-40, -20), disc)
cases("erfinv", between(-0.9, 0.9))
cases("erfcinv", between(0.2, 1.8))
cases("ndtri", probability)
cases("ndtri_exp", between(-5, -0.2), between(-60, -20))
cases("fresnel", between(-2, 2), disc)
cases("modfresnelp modfresnelm", positive)  # what scipy gives for negative numbers is wrong
cases("owens_t", (signed, signed))
cases("voigt_profile", (signed, positive, positive), (signed, between(0.01, 0.02), positive), (signed, positive, 0.0))

# exponential integrals
cases("expi", signed, disc)
cases("exp1", positive, disc)
cases("expn", *((n, positive) for n in (0, 1, 2, 5)))
cases("shichi sici", positive, signed, disc)
cases("spence", positive, between(0.99, 1.01), disc)
cases("wrightomega", wide, disc)
cases("lambertw", positive, between(-0.2, 0.2), disc, (disc, 2), (between(-0.3, -0.1), -1))

# gamma functions
halves = between(-2.9, -2.1)
cases("gamma", positive, halves, disc)
cases("gammaln", positive, halves)
cases("loggamma digamma psi", positive, disc, lambda rng, shape: -3 * disc(rng, shape))
cases("rgamma", between(-3, 3), disc)
cases("polygamma", (1, positive), (3, positive), (0, positive))
cases("zeta", (2.5, positive), (3, positive))
cases("multigammaln", (between(2, 4), 3))
cases("beta betaln", (positive, positive))
cases("binom", (between(2.1, 4), between(0.2, 1.8)), (between(0.1, 1), between(2.1, 5)), (positive, between(-2, -1.1)))
cases("poch", (positive, positive), (halves, 3.3), (halves, 2), (between(-2.9, -2.6), between(0.1, 0.3)))
cases("comb perm", (between(3.2, 5), between(0.3, 3)), (between(3.2, 5), 2))
cases("factorial", positive)
TABLE.row("factorial2", lambda x: special.factorial2(x, extend="complex"), positive, one)
TABLE.row("factorialk", lambda x: special.factorialk(x, 3, extend="complex"), positive, one)

# distributions
cases("gammainc gammaincc", (1.7, positive), (0.6, positive))
cases("gammaincinv gammainccinv", (1.7, probability))
cases("betainc betaincc", (1.7, 2.5, probability), (0.6, 0.7, probability))
cases("betaincinv betainccinv", (1.7, 2.5, probability))
cases("chdtr chdtrc", (3, positive))
cases("chdtri", (3, probability))
cases("gdtr gdtrc", (positive, 1.7, positive))
cases("gdtrix", (positive, 1.7, probability))
cases("gdtria", (probability, 1.7, positive))
cases("pdtr pdtrc", (2, positive))
cases("pdtri", (2, probability))
cases("bdtr bdtrc nbdtr nbdtrc", (2, 5, probability))
cases("bdtri nbdtri", (2, 5, probability))
cases("fdtr fdtrc", (3.0, 4.0, positive))
cases("fdtri", (3.0, 4.0, probability))
cases("stdtr", (3.0, signed), (np.inf, signed))
cases("stdtrit", (3.0, probability))
cases("chndtr", (positive, 3.5, positive), (positive, 1.5, positive))
cases("chndtrix", (probability, 3.5, positive))
cases("tklmbda", *((between(-0.8, 0.8), l) for l in (0.4, -0.5, 0.0)))
cases("nrdtrimn", (between(0.6, 0.9), positive, signed))
cases("nrdtrisd", (signed, between(0.6, 0.9), signed))

# Bessel functions
cases("jv yv iv kv jve yve ive kve hankel1 hankel2 hankel1e hankel2e", (1.5, positive), (2, positive), (0.3, disc))
cases("yn kn", (2, positive), (0, positive))
cases("j0 j1 i0 i1 i0e i1e", signed)
cases("y0 y1 k0 k1 k0e k1e", positive)
cases("jvp yvp ivp kvp h1vp h2vp", (1.5, positive, 2), (2, positive))
cases(
    "spherical_jn spherical_yn spherical_in spherical_kn", (2, positive), (0, positive), (1, disc), (2, positive, True)
)
cases("besselpoly", (positive, 1.5, 2.0))
cases("itj0y0 iti0k0 itstruve0 itmodstruve0", positive)
cases("struve modstruve", (1.5, positive), (0, positive))
cases("airy", wide, disc)
cases("airye", positive, disc, lambda rng, shape: -disc(rng, shape))
cases("pbdv pbvv pbwa", (1.5, positive))
cases("ber bei berp beip", signed)
cases("ker kei kerp keip kelvin", positive)

# hypergeometric functions
cases("hyp0f1", (1.5, signed), (1.5, disc))
cases("hyp1f1", (0.7, 1.5, signed), (0.7, 1.5, disc))
cases("hyp2f1", (0.7, 1.2, 1.5, between(-0.8, 0.8)), (0.7, 1.2, 1.5, lambda rng, shape: disc(rng, shape) / 3))
cases("hyperu", (0.7, 1.5, positive))
cases("wright_bessel log_wright_bessel", (0.7, 1.5, positive))

# polynomials
degrees = (0, 1, 3, 2.5)
cases(
    "eval_legendre eval_chebyt eval_chebyu eval_chebyc eval_chebys eval_laguerre "
    "eval_sh_legendre eval_sh_chebyt eval_sh_chebyu",
    *((n, probability) for n in degrees),
    (3, disc),
)
cases("eval_hermite eval_hermitenorm", (0, wide), (1, wide), (4, wide))
cases("eval_gegenbauer eval_genlaguerre", *((n, 1.2, probability) for n in degrees), (3, 0.5, disc))
cases("eval_jacobi", *((n, 0.3, 0.7, probability) for n in degrees), (3, 0.3, 0.7, disc))
cases("eval_sh_jacobi", *((n, 2.5, 1.2, probability) for n in degrees))
cases("assoc_laguerre", (probability, 3), (probability, 3, 1.5))
cases("lpmv", *((m, v, between(-0.8, 0.8)) for m, v in ((0, 0), (0, 3), (1, 2), (2, 2), (-1, 2), (1, 2.5))))
cases("legendre_p", (3, between(-0.8, 0.8)))
cases("sph_harm_y", (3, 2, between(0.3, 3), wide), (2, -2, between(0.3, 3), wide), (0, 0, positive, wide))
cases("diric", (wide, 4), (wide, np.array([3])))

# elliptic integrals
below_one = between(-1.5, 0.8)
cases("ellipk ellipe", below_one)
cases("ellipkm1", positive)
cases("ellipkinc ellipeinc", (wide, below_one), (between(3, 8), below_one))
cases("ellipj", (wide, probability))
cases("agm", (positive, positive))
cases("elliprc", (positive, positive), (positive, between(-2, -1)), (disc, disc))
cases("elliprf elliprd elliprg", (positive, positive, positive), (disc, disc, disc))
cases("elliprj", (positive, positive, positive, positive))

# sums of exponentials
TABLE.row("logsumexp-complex", special.logsumexp, disc, full)
for k, options in enumerate([{}, {"axis": 0}, {"axis": (0, -1)}, {"axis": -1, "keepdims": True}, {"keepdims": True}]):
    for name in ("logsumexp", "softmax", "log_softmax"):
        o = options if name == "logsumexp" else {"axis": options.get("axis")}
        f = getattr(special, name)
        TABLE.row(f"{name}-axis-{k}", lambda x, f=f, o=o: f(x, **o), wide, of("23", "312", "11"))
    TABLE.row(
        f"logsumexp-b-{k}",
        lambda a, b, o=options: special.logsumexp(a, b=b, **o),
        (wide, positive),
        of("23 23", "23 3", "13 21"),
    )
    for sign in (1, -1):
        w = sign * np.array([1, -0.2, 1])
        TABLE.row(
            f"logsumexp-sign-{k}-{sign}",
            lambda a, b, o=options, w=w: special.logsumexp(a, b=b * w, return_sign=True, **o)[0],
            (between(-0.5, 0.5), between(1, 2)),
            of("23 23", "23 3"),
        )
TABLE.row(
    "logsumexp-complex-sign",
    lambda a, b: special.logsumexp(a, 0, b=b, return_sign=True),
    (disc, positive),
    of("23 23", "32 2"),
)


def cupy_lacks(error: str) -> bool:
    """Whether an error says that CuPy has not a function, or not for these dtypes, and this is so."""
    there = importlib.import_module("cupyx.scipy.special")
    found = re.search(r"<ufunc '(\w+)'|has no attribute '(\w+)'", error)
    return not hasattr(there, found[1] or found[2]) if found else "Wrong type" in error


class TestRows(TABLE.tests()):
    @pytest.mark.gpu
    def test_on_a_gpu(self, row):
        try:
            super().test_on_a_gpu(row)
        except StateError as error:
            told = str(error)
            if not cupy_lacks(told) or "which CuPy's function does not take" not in told:
                raise
            pytest.skip("CuPy has not this function, or not one that its derivative needs")


@pytest.mark.parametrize("kind", "ce se modce1 modce2 modse1 modse2".split())
def test_mathieu(kind):
    """Single precision gives NaN in scipy."""
    f = getattr(special, f"mathieu_{kind[:-1]}m{kind[-1]}" if kind[-1] in "12" else f"mathieu_{kind}m")
    check_grads(lambda x: f(2, 0.7, x), (np.array([0.3, 0.9, 1.4]) * (1 if "mod" in kind else 57),))


def test_itairy():
    """scipy's values are right to 1e-8 only, too coarse for finite differences."""
    x = np.array([0.5, 1.2])
    a, _, b, _ = special.airy(x)
    c, _, d, _ = special.airy(-x)
    for k, expected in enumerate((a, b, c, d)):
        np.testing.assert_allclose(grad(lambda x, k=k: np.sum(special.itairy(x)[k]))(x), expected)


ELEMENTARY = """
    expit log_expit logit exp10 exp2 expm1 log1p cbrt cosm1 sindg exprel entr softplus lambertw wrightomega
    erf erfc erfi erfcx dawsn erfinv ndtr log_ndtr ndtri expi exp1 spence
    gamma gammaln loggamma digamma rgamma j0 j1 i0 i1
"""


@pytest.mark.parametrize("name", ELEMENTARY.split())
def test_third_order(name):
    x = np.linspace(0.2, 0.8, 5)
    check_grads(getattr(special, name), (x,), 3)


def test_third_order_of_two():
    x = np.linspace(0.2, 0.8, 5)
    for f in (special.xlogy, special.xlog1py, special.boxcox, special.beta):
        check_grads(f, (x, x[::-1].copy()), 3)


# Points at which a formula would divide by zero

INF, NAN, PI = np.inf, np.nan, np.pi

POINTS = [
    # name, arguments, the position of the differentiated one, the first derivatives there
    ("j0", (0.0,), 0, (0, -1 / 2, 0)),
    ("j1", (0.0,), 0, (1 / 2, 0, -3 / 8)),
    ("i0", (0.0,), 0, (0, 1 / 2, 0)),
    ("i1", (0.0,), 0, (1 / 2, 0, 3 / 8)),
    ("i1e", (0.0,), 0, (1 / 2,)),
    ("jv", (1, 0.0), 1, (1 / 2, 0, -3 / 8)),
    ("jv", (2, 0.0), 1, (0, 1 / 4)),
    ("iv", (1, 0.0), 1, (1 / 2, 0)),
    ("spherical_jn", (1, 0.0), 1, (1 / 3, 0)),
    ("spherical_jn", (0, 0.0), 1, (0, -1 / 3)),
    ("struve", (0, 0.0), 1, (2 / PI, 0)),
    ("berp", (0.0,), 0, (0, 0)),
    ("beip", (0.0,), 0, (1 / 2, 0)),
    ("ellipk", (0.0,), 0, (PI / 8, 9 * PI / 64)),
    ("ellipkm1", (1.0,), 0, (-PI / 8, 9 * PI / 64)),
    ("ellipe", (0.0,), 0, (-PI / 8, -3 * PI / 64)),
    ("ellipkinc", (0.5, 0.0), 1, ((0.5 - np.sin(1) / 2) / 4,)),
    ("ellipeinc", (0.5, 0.0), 1, ((0.5 - np.sin(1) / 2) / -4,)),
    ("ellipkinc", (0.0, 0.5), 1, (0, 0)),
    ("ellipj", (0.5, 0.0), 1, ((np.sin(0.5) * np.cos(0.5) - 0.5) * np.cos(0.5) / 4,)),
    ("ellipj", (0.5, 1.0), 0, (1 / np.cosh(0.5) ** 2,)),
    ("elliprf", (1.0, 1.0, 1.0), 0, (-1 / 6, 3 / 20)),
    ("elliprc", (1.0, 1.0), 0, (-1 / 6,)),
    ("elliprc", (1.0, 1.0), 1, (-1 / 3,)),
    ("agm", (2.0, 2.0), 0, (1 / 2, -1 / 16)),
    ("spence", (1.0,), 0, (-1, 1 / 2, -2 / 3)),
    ("exprel", (0.0,), 0, (1 / 2, 1 / 3, 1 / 4)),
    ("sici", (0.0,), 0, (1, 0, -1 / 3)),
    ("shichi", (0.0,), 0, (1, 0, 1 / 3)),
    ("itj0y0", (-0.5,), 0, (scipy.special.j0(0.5),)),
    ("expn", (3, 0.0), 1, (-1,)),
    ("lambertw", (0.0,), 0, (1, -2, 9)),
    ("boxcox", (2.0, 0.0), 1, (np.log(2) ** 2 / 2, np.log(2) ** 3 / 3)),
    ("boxcox1p", (1.0, 0.0), 1, (np.log(2) ** 2 / 2, np.log(2) ** 3 / 3)),
    ("boxcox", (0.0, 2.0), 0, (0, 1)),
    ("boxcox", (0.0, 2.0), 1, (1 / 4, -1 / 4)),
    ("boxcox1p", (-1.0, 2.0), 1, (1 / 4, -1 / 4)),
    ("inv_boxcox", (0.5, 0.0), 0, (np.exp(0.5), np.exp(0.5))),
    ("inv_boxcox", (0.5, 0.0), 1, (-np.exp(0.5) / 8,)),
    ("inv_boxcox", (-2.0, 0.5), 0, (0, 1 / 2)),
    ("inv_boxcox1p", (-2.0, 0.5), 1, (0,)),
    ("powm1", (2.0, 0.0), 0, (0,)),
    ("powm1", (0.0, 2.0), 0, (0, 2)),
    ("xlogy", (0.0, 2.0), 0, (np.log(2),)),
    ("xlogy", (0.0, 2.0), 1, (0, 0)),
    ("xlogy", (0.0, 0.0), 1, (0,)),
    ("xlog1py", (0.0, -1.0), 1, (0,)),
    ("entr", (1.0,), 0, (-1, -1)),
    ("kl_div", (0.0, 2.0), 1, (1, 0)),
    ("rel_entr", (0.0, 2.0), 1, (0, 0)),
    ("huber", (1.0, 0.0), 1, (0, 1)),
    ("pseudo_huber", (1.0, 0.0), 1, (0, 1)),
    ("pseudo_huber", (0.0, 2.0), 0, (2, -2)),
    ("pseudo_huber", (0.0, 0.0), 0, (0,)),
    ("rgamma", (0.0,), 0, (1, 2 * np.euler_gamma)),
    ("rgamma", (-2.0,), 0, (2,)),
    ("binom", (1.0, 3), 0, (-1 / 6, 0)),
    ("binom", (2.0, 0), 0, (0, 0)),
    ("binom", (3.0, 1.0), 1, (3 / 2,)),
    ("binom", (3.0, -1.0), 1, (1 / 4,)),
    ("poch", (-2.0, 3), 0, (2, -6)),
    ("poch", (0.0, 2), 0, (1, 2)),
    ("poch", (-3.0, 2), 0, (-5, 2)),
    ("beta", (0.5, -1.5), 0, (-scipy.special.gamma(0.5) * scipy.special.gamma(-1.5),)),
    ("comb", (1.0, 0), 0, (0,)),
    ("gammainc", (1, 0.0), 1, (1, -1)),
    ("gammainc", (2, 0.0), 1, (0, 1)),
    ("betainc", (1, 1, 0.0), 2, (1, 0)),
    ("betainc", (2, 1, 0.0), 2, (0, 2)),
    ("betainc", (1, 2, 1.0), 2, (0, -2)),
    ("bdtr", (2, 2, 0.3), 2, (0, 0)),
    ("tklmbda", (3.0, 1.0), 0, (0, 0)),
    ("voigt_profile", (1.0, 0.0, 1.0), 0, (-1 / 2 / PI,)),
    ("voigt_profile", (1.0, 0.0, 1.0), 1, (0, 1 / 2 / PI)),
    ("owens_t", (0.0, 1.0), 1, (1 / 4 / PI,)),
    ("lpmv", (0, 2, 1.0), 2, (3, 3)),
    ("lpmv", (0, 3, -1.0), 2, (6, -15)),
    ("lpmv", (2, 2, 1.0), 2, (-6, -6)),
    ("lpmv", (-2, 2, 1.0), 2, (-1 / 4, -1 / 4)),
    ("lpmv", (4, 5, -1.0), 2, (0,)),
    ("eval_legendre", (3, 1.0), 1, (6, 15)),
    ("eval_chebyt", (3, 1.0), 1, (9, 24)),
    ("sph_harm_y", (1, 1, 0.0, 0.0), 2, (-np.sqrt(3 / 8 / PI),)),
    ("sph_harm_y", (2, 0, 0.0, 0.0), 2, (0, -3 * np.sqrt(5 / 4 / PI))),
    ("diric", (0.0, 3), 0, (0, -2 / 3)),
    ("diric", (2 * PI, 2), 0, (0, 1 / 4)),
    ("sinc", (0.0,), 0, (0, -PI * PI / 3)),
    # and points at which it would cancel or overflow
    ("erfcx", (1e10,), 0, (-1 / np.sqrt(PI) * 1e-20,)),
    ("dawsn", (-1e6,), 0, (-1e-12 / 2,)),
    ("wofz", (1e6j,), 0, (1j / np.sqrt(PI) * 1e-12,)),
    ("log_ndtr", (-1e8,), 0, (1e8, -1)),
    ("ndtri_exp", (-1e10,), 0, (1 / np.sqrt(2e10),)),
    ("xlogy", (0.0, 1e-300), 0, (np.log(1e-300),)),
    ("exprel", (-1e8,), 0, (1e-16,)),
    ("boxcox", (2.0, 1e-12), 1, (np.log(2) ** 2 / 2,)),
    ("ellipk", (1e-9,), 0, (PI / 8, 9 * PI / 64)),
    ("ellipkm1", (1e-30,), 0, (-0.5e30, 0.5e60)),
    ("spence", (1 + 1e-9,), 0, (-1, 1 / 2)),
    ("stdtr", (INF, 0.0), 1, (1 / np.sqrt(2 * PI), 0)),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("name", "args", "k", "expected"), POINTS, ids=[f"{n}{a}-{k}" for n, a, k, _ in POINTS])
def test_points(name, args, k, expected):
    def f(x):
        value = getattr(special, name)(*args[:k], x, *args[k + 1 :])
        value = value[0] if isinstance(value, tuple) else value
        return value if np.iscomplexobj(args[k]) else np.real(value)

    for order, e in enumerate(expected):
        f = grad(f, holomorphic=True) if np.iscomplexobj(args[k]) else grad(f)
        np.testing.assert_allclose(
            f(np.asarray(args[k])),
            e,
            rtol=1e-7,
            atol=1e-25 if 0 < abs(e) < 1e-9 else 1e-12,
            err_msg=f"order {order + 1}",
        )


# The namespace

FUNCTIONS = {name: getattr(scipy.special, name) for name in sorted(set(scipy.special.__all__))}


def kinds(f) -> list[str]:
    """What the registry says of a function."""
    under = getattr(f, "__wrapped__", f)  # with SCIPY_ARRAY_API=1 some are wrapped
    f = under if isinstance(under, np.ufunc) or under is np.sinc else f
    known = {"rule": handlers, "constant": constants, "refused": refusals, "no entries": passives}
    return [kind for kind, those in known.items() if f in those]


def test_each_function_is_of_one_kind():
    assert {name: kinds(f) for name, f in FUNCTIONS.items() if len(kinds(f)) != 1} == {}
    assert len([f for f in FUNCTIONS.values() if kinds(f) == ["rule"]]) > 200


def test_each_function_is_there():
    assert dir(special) == sorted(FUNCTIONS)
    for name, f in FUNCTIONS.items():
        here = getattr(special, name)
        assert here.__name__ == f.__name__
        assert here is f or not isinstance(f, np.ufunc | type)
    with pytest.raises(AttributeError, match=r"spmd\.scipy\.special(.|\n)*nothing"):
        special.nothing  # noqa: B018


def test_each_rule_has_a_row():
    others = ["itairy", "jn"] + [name for name in FUNCTIONS if name.startswith("mathieu")]
    ruled = {name for name, f in FUNCTIONS.items() if kinds(f) == ["rule"]}
    assert ruled - {name.split("-")[0] for name in TABLE.rows} - set(others) == set()


def test_constants():
    x = np.array([0.6, -1.4])
    assert grad(lambda x: np.sum(x * special.round(x) + x * special.gammasgn(x)))(x).tolist() == [2, 0]


@pytest.mark.parametrize("name", [name for name, f in FUNCTIONS.items() if kinds(f) == ["refused"]])
def test_refused(name):
    """Traced arrays are refused, and the mend names functions that exist."""
    f = getattr(special, name)
    count = f.nin if isinstance(f, np.ufunc) else 1
    with pytest.raises(DifferentiationError) as error:
        grad(lambda x: f(*(x,) * count))(0.5)
    text = str(error.value)
    assert f.__name__ in text.splitlines()[0]
    mend = text.split("mend:")[1]
    named = set(mend.replace("(", " ").replace(",", " ").replace(".", " ").replace(";", " ").split()) & set(FUNCTIONS)
    assert named
    assert all(kinds(FUNCTIONS[n]) == ["rule"] for n in named)


REFUSED = {
    "ellip_harm": (5, 8, 1, 1, 2.5),
    "lmbda": (1, 2.5),
    "riccati_jn": (2, 1.5),
    "pbdv_seq": (2.0, 1.5),
    "roots_jacobi": (3, 0.5, 1.5),
    "mathieu_even_coef": (2, 0.5),
    "assoc_legendre_p": (3, 1, 0.5),
    "sph_harm_y_all": (2, 1, 0.5, 0.5),
    "kolmogorov": (0.5,),
    "pro_cv": (1, 2, 0.5),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_functions_take_bare_arrays(name):
    got, expected = getattr(special, name)(*REFUSED[name]), getattr(scipy.special, name)(*REFUSED[name])
    for a, b in (
        zip(np.atleast_1d(*got), np.atleast_1d(*expected), strict=True) if type(got) is tuple else [(got, expected)]
    ):
        np.testing.assert_array_equal(a, b)


# scipy's own Python functions give the right gradient, or refuse traced arrays; they cut nothing off

DISPATCH = "softplus sinc zeta lambertw jvp assoc_laguerre".split()
PLAIN = {
    "softplus": lambda f, x: f(x),
    "sinc": lambda f, x: f(x),
    "zeta": lambda f, x: f(2, x),
    "lambertw": lambda f, x: np.real(f(x)),
    "jvp": lambda f, x: f(1, x),
    "assoc_laguerre": lambda f, x: f(x, 3),
    "logsumexp": lambda f, x: f(x),
    "softmax": lambda f, x: f(x)[0],
    "log_softmax": lambda f, x: f(x)[0],
    "multigammaln": lambda f, x: f(x + 2, 2),
    "polygamma": lambda f, x: f(1, x),
    "comb": lambda f, x: f(5, x),
    "factorial": lambda f, x: f(x),
    "spherical_jn": lambda f, x: f(1, x),
    "diric": lambda f, x: f(x, 3),
    "sph_harm_y": lambda f, x: np.real(f(2, 1, x, x)),
    "legendre_p": lambda f, x: f(2, x),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_functions_of_scipy(name):
    x = np.array([0.3, 0.5])

    def gradient(module):
        return grad(lambda x: np.sum(PLAIN[name](getattr(module, name), x)))(x)

    expected = gradient(special)
    assert np.all(expected != 0)
    try:
        np.testing.assert_allclose(gradient(scipy.special), expected)
    except (TracedConversionError, StateError):
        # SCIPY_ARRAY_API=1 puts other functions in their place.
        assert name not in DISPATCH or os.environ.get("SCIPY_ARRAY_API")


def same(f, g, x):
    """f gives what g gives: the values and dtypes, bare and traced."""
    args, eps = (x,), np.finfo(x.dtype).eps
    with np.errstate(all="ignore"):
        expected = g(*args)
        for got in (f(*args), vjp(f, *args)[0]):
            got, plain = (r if isinstance(r, tuple) else (r,) for r in (got, expected))
            assert len(got) == len(plain)
            for a, b in zip(got, plain, strict=True):
                assert (np.shape(a), np.result_type(a)) == (np.shape(b), np.result_type(b))
                np.testing.assert_allclose(a, b, rtol=50 * eps, atol=50 * eps)


rng = np.random.default_rng(0)
M = rng.normal(size=(3, 4))
EDGES = [
    np.array(v) for v in ([-INF, 0.0], [-INF, -INF], [INF, 0], [INF, INF], [INF, -INF], [NAN, 0], [1000.0, 1000], [])
]


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16"])
@pytest.mark.parametrize("axis", [None, 0, -1, (0, 1), (1,)])
def test_sums_of_exponentials_as_in_scipy(axis, dtype):
    a = M.astype(dtype)
    b = rng.normal(size=(3, 4)).astype(a.real.dtype)
    for keepdims in (False, True):
        for weights in (None, b, abs(b), abs(b[0]), 0 * b, 2.0):
            for sign in (False, True):
                options = {"axis": axis, "b": weights, "keepdims": keepdims, "return_sign": sign}
                same(
                    lambda x, o=options: special.logsumexp(x, **o),
                    lambda x, o=options: scipy.special.logsumexp(x, **o),
                    a,
                )
    if dtype != "c16":
        for name in ("softmax", "log_softmax"):
            f, g = getattr(special, name), getattr(scipy.special, name)
            same(lambda x, f=f: f(x, axis), lambda x, g=g: g(x, axis=axis), a)


@pytest.mark.parametrize("x", EDGES, ids=str)
def test_edges_of_sums_of_exponentials(x):
    same(special.logsumexp, scipy.special.logsumexp, x)
    same(lambda x: special.logsumexp(x, return_sign=True), lambda x: scipy.special.logsumexp(x, return_sign=True), x)
    if x.size:
        same(special.softmax, scipy.special.softmax, x)
        same(special.log_softmax, scipy.special.log_softmax, x)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_gradients_at_edges_of_sums_of_exponentials():
    def g(x, **options):
        return grad(lambda x: special.logsumexp(x, **options))(np.array(x)).tolist()

    assert g([-INF, 0]) == [0, 1]
    assert g([-INF, -INF]) == [0, 0]
    assert g([INF, 0]) == [1, 0]
    assert g([INF, INF, -INF]) == [0.5, 0.5, 0]
    assert g([1e4, 1e4]) == [0.5, 0.5]
    assert g([1e4, 0.0], b=[0, 1]) == [0, 1]
    assert g([0.0, 0.0], b=[0, 0]) == [0, 0]
    assert grad(lambda b: special.logsumexp(np.zeros(2), b=b))(np.zeros(2)).tolist() == [INF, INF]
    assert g([]) == []
    assert g([0.0, INF, NAN], b=[1, 0, 0]) == [1, 0, 0]
    assert np.isnan(g([NAN, 0])).all()
    assert grad(lambda b: special.logsumexp([-INF, 0], b=b))(np.ones(2)).tolist() == [0, 1]
    assert grad(lambda x: special.softmax(x)[1])(np.array([-INF, 0, 0])).tolist() == [0, 0.25, -0.25]
    assert grad(lambda x: special.log_softmax(x)[1])(np.array([-INF, 0])).tolist() == [0, 0]
    check_grads(lambda x: special.logsumexp(np.stack([x, x - INF, x])), (np.ones(2),))


FLOATS = np.array([0.0, 0.5, 1, 2, 3.5, 5])
TWINS = {
    "polygamma": [lambda f, x: f(2, x + 1), lambda f, x: f([[0], [1]], x + 1)],
    "zeta": [lambda f, x: f(2.5, x + 1), lambda f, x: f(q=x + 1, x=2)],
    "lambertw": [lambda f, x: f(x), lambda f, x: f(x, -1), lambda f, x: f(x - 2.0, k=2), lambda f, x: f(x + 1j)],
    "comb": [
        lambda f, x: f(5, x),
        lambda f, x: f(x, 2),
        lambda f, x: f(x, [[1], [3]]),
        lambda f, x: f(x - 1, 2, repetition=True),
        lambda f, x: f(x, 0, repetition=True),
    ],
    "perm": [lambda f, x: f(5, x), lambda f, x: f(x - 1, 2)],
    "factorial": [lambda f, x: f(x - 1), lambda f, x: f(x + 0.5, extend="complex"), lambda f, x: f(x[3] + 0)],
    "factorial2": [lambda f, x: f(x, extend="complex")],
    "factorialk": [lambda f, x: f(x, 3, extend="complex")],
    "multigammaln": [lambda f, x: f(x + 2, 3)],
    "diric": [lambda f, x: f(x * 2 * PI, 3), lambda f, x: f(x, [[1], [4], [-1]]), lambda f, x: f(x * PI, 4)],
    "jvp": [lambda f, x: f(1.5, x + 1, 2), lambda f, x: f(2, x, 0)],
    "spherical_jn": [lambda f, x: f(2, x), lambda f, x: f([[0], [1]], x, True), lambda f, x: f(1, x, derivative=True)],
    "spherical_kn": [lambda f, x: f(2, x + 1)],
    "softplus": [lambda f, x: f(x - 2), lambda f, x: f(1000 * x)],
    "sinc": [lambda f, x: f(x)],
    "assoc_laguerre": [lambda f, x: f(x, 3, 0.5)],
    "legendre_p": [lambda f, x: f(3, x / 5)],
    "sph_harm_y": [lambda f, x: f(3, 1, x, 2 * x), lambda f, x: f([[2], [3]], -2, x, 0.5)],
}


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("name", TWINS)
def test_twins_as_in_scipy(name, dtype):
    f, g = getattr(special, name), getattr(scipy.special, name)
    for call in TWINS[name]:
        same(lambda x, c=call: c(f, x), lambda x, c=call: c(g, x), FLOATS.astype(dtype))


def test_integers_and_lists():
    assert special.comb(5, 2, exact=True) == 10
    assert special.logsumexp([0, 0]) == np.log(2)
    assert special.factorial([3, 4]).tolist() == [6, 24]
    assert grad(lambda x: special.logsumexp([0, 0], b=x))(np.array([1.0, 3])).tolist() == [0.25, 0.25]
    assert grad(lambda x: special.logsumexp(x, b=[1, 3]))(np.zeros(2)).tolist() == [0.25, 0.75]


def test_options_that_have_no_derivative():
    x = np.array([2.5, 3])
    for f, word in (
        (lambda x: special.comb(x, 2, exact=True), "exact=False"),
        (lambda x: special.perm(x, 2, exact=True), "exact=False"),
        (lambda x: special.factorial(x, exact=True), "exact=False"),
        (lambda x: special.factorial2(x), "extend='complex'"),
        (lambda x: special.factorialk(x, 3), "extend='complex'"),
        (lambda x: special.legendre_p(2, x, diff_n=1), "spmd.grad"),
        (lambda x: special.sph_harm_y(2, 1, x, x, diff_n=1), "spmd.grad"),
        (lambda x: special.gammainc(x, 2.0), "stop_gradient"),
        (lambda x: special.zeta(x, 2.0), "stop_gradient"),
        (lambda x: special.zeta(x), "stop_gradient"),
        (lambda x: special.jv(x, 2.0), "stop_gradient"),
        (lambda x: special.polygamma(x, 2.0), "stop_gradient"),
        (lambda x: special.erf(x, where=x > 2), "np.where"),
    ):
        with pytest.raises(DifferentiationError, match=word.replace("(", r"\(")):
            grad(lambda x, f=f: np.sum(np.real(f(x))))(x)
    with pytest.raises(ValueError, match="not met"):
        grad(lambda x: special.multigammaln(x, 9))(2.0)
    with pytest.raises(ValueError, match="extend"):
        grad(lambda x: special.factorial(x, extend="other"))(2.0)


def test_in_bodies():
    """Arrays that have a state and are not differentiated go to scipy; differentiated ones keep their state."""
    import spmd
    from spmd import P

    x = np.linspace(0.5, 2, 6)

    def body(x):
        y = (
            special.logsumexp(x)
            + special.comb(5, x).sum()
            + special.lmbda(2.0, 1.5)[0][0]
            + special.kolmogorov(x).sum()
        )
        return spmd.psum(y, "x")

    with spmd.Mesh(x=2, device="cpu"):  # CuPy has not all of them
        total = spmd.map(body, in_specs=P("x"), out_specs=P())(x)
    with spmd.Mesh(x=2):
        g = grad(
            lambda x: spmd.map(
                lambda x: spmd.psum(special.logsumexp(x) * special.j1(x).sum(), "x"), in_specs=P("x"), out_specs=P()
            )(x)
        )(x)
    plain = sum(
        scipy.special.logsumexp(h)
        + scipy.special.comb(5, h).sum()
        + scipy.special.lmbda(2.0, 1.5)[0][0]
        + scipy.special.kolmogorov(h).sum()
        for h in (x[:3], x[3:])
    )
    np.testing.assert_allclose(float(total), plain)
    expected = grad(lambda x: sum(special.logsumexp(h) * np.sum(special.j1(h)) for h in (x[:3], x[3:])))(x)
    np.testing.assert_allclose(np.asarray(g), expected)
