"""The rules of scipy.special, and its functions in spmd.scipy.special."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
from rules import Table, complex_, distinct, full, of, one, pair, positive, signed

from spmd.autodiff import grad, value_and_grad, vjp
from spmd.autodiff.check import check_grads
from spmd.autodiff.primitive import composites, constants, handlers, passives, refusals
from spmd.errors import DifferentiationError, TracedConversionError
from spmd.scipy import special

TABLE = Table()


def between(low, high):
    return lambda rng, shape: rng.uniform(low, high, shape)


def disc(rng, shape):
    """Complex, of size about one, in the right half of the plane."""
    return rng.uniform(0.4, 1.6, shape) * np.exp(1j * rng.uniform(0.2, 1.2, shape) * rng.choice([-1, 1], shape))


def far(rng, shape):
    return 10 * disc(rng, shape)


probability = between(0.1, 0.9)
wide = between(-3, 3)
SHAPES = {1: one, 2: pair, 3: of("3 . 23", "2 2 2", ". 0 1"), 4: of("3 . 3 1", ". . . .")}


def cases(names, *rows):
    """Rows of functions, each a tuple of arguments: domains of those that are differentiated, values of the others."""
    for name in names.split():
        for k, args in enumerate(rows):
            args = args if isinstance(args, tuple) else (args,)
            domains = tuple(a for a in args if callable(a))

            def f(*xs, fun=getattr(special, name), args=args):
                xs = iter(xs)
                return fun(*[next(xs) if callable(a) else a for a in args])

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
cases("wofz", disc, lambda rng, shape: 1j * far(rng, shape))
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
        TABLE.row(
            f"logsumexp-sign-{k}-{sign}",
            lambda a, b, o=options, w=sign * np.array([1, -0.2, 1]): special.logsumexp(
                a, b=b * w, return_sign=True, **o
            )[0],
            (between(-0.5, 0.5), between(1, 2)),
            of("23 23", "23 3"),
        )
TABLE.row(
    "logsumexp-complex-sign",
    lambda a, b: special.logsumexp(a, 0, b=b, return_sign=True),
    (disc, positive),
    of("23 23", "32 2"),
)


class TestRows(TABLE.tests()):
    @pytest.mark.gpu
    def test_on_a_gpu(self, row):
        try:
            super().test_on_a_gpu(row)
        except AttributeError as missing:
            if "cupyx" not in str(missing):
                raise
            pytest.skip(str(missing))


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


@pytest.mark.parametrize(
    "name",
    "expit log_expit logit exp10 exp2 expm1 log1p cbrt cosm1 sindg exprel entr erf erfc erfi erfcx dawsn erfinv ndtr "
    "log_ndtr ndtri gamma gammaln loggamma digamma rgamma j0 j1 i0 i1 spence wrightomega expi exp1 softplus lambertw".split(),
)
def test_third_order(name):
    x = np.linspace(0.2, 0.8, 5)
    check_grads(getattr(special, name), (x,), 3)


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
