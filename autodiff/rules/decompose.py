"""Rules of matrix decompositions, inverses, determinants and solutions of linear systems.

NumPy reads one triangle of a Hermitian matrix (cholesky, eigh, eigvalsh, svd and pinv with hermitian=True), and so the
cotangent lies in that triangle; its Hermitian part is that of JAX, which symmetrises the argument instead.

Eigenvectors and singular vectors of complex matrices have a phase that the decomposition does not determine. The
derivative keeps it: v_i^H dv_i is real (for svd, the phases of v are kept), as in JAX. Where eigenvalues or singular
values are equal, the vectors may also rotate within the space that they span. The derivative takes that rotation as
zero. That is finite, and right for functions that treat equal values alike and use only the space of their vectors.
For other functions, such as V f(w) V^H with an f that differs within equal values, a RuntimeWarning says so.
"""

from __future__ import annotations

import functools
import math
import operator
import warnings
from typing import Any

import numpy as np

from spmd.autodiff import devices
from spmd.autodiff.apply import compute
from spmd.autodiff.primitive import composite, constant
from spmd.autodiff.registry import primitive, rule
from spmd.autodiff.rules.elementwise import nonzero
from spmd.autodiff.rules.reduce import array, conj, largest, square
from spmd.autodiff.staging.recorder import checked
from spmd.autodiff.tracer import bare
from spmd.errors import DifferentiationError


def _t(x):
    """The transpose."""
    return np.swapaxes(x, -1, -2)


def _h(x):
    """The conjugate transpose."""
    return conj(np.swapaxes(x, -1, -2))


def _half_diagonal_tril(x):
    """The lower triangle with half of the diagonal, which represents a Hermitian x."""
    return (np.tril(x) + np.tril(x, -1)) / 2


def _to_triangle(g, upper):
    """The cotangent of the triangle that NumPy reads, from that of the Hermitian matrix."""
    g = g + _h(g)
    return _t(_half_diagonal_tril(_t(g))) if upper else _half_diagonal_tril(g)


def _hermitian(a):
    """The Hermitian matrix that is stored in the lower triangle of a; the diagonal is real."""
    half = _half_diagonal_tril(a)
    return half + _h(half)


def _eps(x) -> float:
    return float(np.finfo(x.dtype).eps)


def _reciprocal(d, scale):
    """1 / d, and zero where d is zero within the rounding of numbers of size `scale`."""
    zero = np.abs(bare(d)) <= d.shape[-1] * _eps(d) * scale
    return ~zero / (d + zero)


def _gaps(w, scale):
    """1 / (w_j - w_i), and zero where they are equal within rounding."""
    return _reciprocal(w[..., None, :] - w[..., :, None], scale)


def _largest(w):
    """The largest magnitude of bare numbers, with two more dimensions."""
    return largest(np.abs(w), -1)[..., None, None]


def _warn_degenerate(name: str, gaps, gw, *rotations) -> None:
    """Warn if a function treats equal values differently, or depends on the rotation of their vectors.

    gw, rotations: the cotangents of the values and of the rotations.
    """
    checked(_check_degenerate, bare(gaps), name, bare(gw), *map(bare, rotations))


def _check_degenerate(gaps, name: str, gw, *rotations) -> None:
    ties = np.triu(gaps == 0, 1)
    if not ties.any():
        return
    differences = gw[..., None, :] - gw[..., :, None]
    for size, scale in ((differences, gw), *((t, t) for t in rotations)):
        size, scale = np.abs(size), np.abs(scale)
        if np.max(ties * (size + _t(size))) > math.sqrt(_eps(scale)) * np.max(scale):
            warnings.warn(
                f"where values are equal, the derivative of {name} takes the turn of their vectors as zero: that is "
                "right for functions that treat these values alike and use the space of their vectors, not for others",
                RuntimeWarning,
                stacklevel=4,
            )
            return


def _require_square(a) -> None:
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise np.linalg.LinAlgError(f"a square matrix is needed, not an array of shape {a.shape}")


# Inverses and linear systems. The derivative of inv(a) is -inv(a) da inv(a).

rule(np.linalg.inv, lambda g, ans, _a: -_t(ans) @ g @ _t(ans))


def _solve_left(g, ans, a, _b):
    return -np.linalg.solve(_t(a), g) @ _t(ans)


@primitive("np.linalg.solve", _solve_left, lambda g, _ans, a, _b: np.linalg.solve(_t(a), g))
def _solve(a, b):
    return np.linalg.solve(a, b)


@composite(np.linalg.solve)
def solve(a, b):
    a, b = array(a), array(b)
    return _solve(a, b[:, None])[..., 0] if b.ndim == 1 else _solve(a, b)


@composite(np.linalg.tensorsolve)
def tensorsolve(a, b, axes=None):
    a, b = array(a), array(b)
    if axes is not None:
        axes = [k % a.ndim for k in axes]
        a = np.transpose(a, [k for k in range(a.ndim) if k not in axes] + axes)
    shape = a.shape[-(a.ndim - b.ndim) :]
    n = math.prod(shape)
    if a.size != n**2:
        raise np.linalg.LinAlgError(f"np.linalg.tensorsolve needs as many equations as unknowns, {n}")
    return np.reshape(np.linalg.solve(np.reshape(a, (n, n)), np.ravel(b)), shape)


@composite(np.linalg.tensorinv)
def tensorinv(a, ind=2):
    if ind <= 0:
        raise ValueError(f"np.linalg.tensorinv needs an ind of 1 or more, and got {ind}")
    rows, columns = a.shape[:ind], a.shape[ind:]
    square = np.reshape(a, (math.prod(columns), math.prod(rows)))
    return np.reshape(np.linalg.inv(square), columns + rows)


@composite(np.linalg.matrix_power, by_numpy=True)
def matrix_power(a, n):
    _require_square(a)
    n = operator.index(n)
    if n == 0:
        return np.zeros_like(a) + np.diag(np.ones_like(a, shape=a.shape[-1]))
    power, result = a if n > 0 else np.linalg.inv(a), None
    n = abs(n)
    while True:
        if n % 2:
            result = power if result is None else result @ power
        n //= 2
        if not n:
            return result
        power = power @ power


@composite(np.linalg.multi_dot)
def multi_dot(arrays, *, out=None):
    arrays = [array(a) for a in arrays]
    if len(arrays) < 2:
        raise ValueError(f"np.linalg.multi_dot needs two arrays or more, and got {len(arrays)}")
    if len(arrays) == 2:
        return np.dot(*arrays)
    row, column = arrays[0].ndim == 1, arrays[-1].ndim == 1
    if row:
        arrays[0] = arrays[0][None]
    if column:
        arrays[-1] = arrays[-1][:, None]
    for a in arrays:
        if a.ndim != 2:
            raise np.linalg.LinAlgError(f"matrices are needed, not an array of shape {a.shape}")
    sizes = [a.shape[0] for a in arrays] + [arrays[-1].shape[1]]

    @functools.cache
    def cheapest(i, j):
        """The fewest multiplications for the product of matrices i to j, and where to split it."""
        if i == j:
            return 0, i
        return min(
            (cheapest(i, k)[0] + cheapest(k + 1, j)[0] + sizes[i] * sizes[k + 1] * sizes[j + 1], k) for k in range(i, j)
        )

    def product(i, j):
        if i == j:
            return arrays[i]
        k = cheapest(i, j)[1]
        return np.dot(product(i, k), product(k + 1, j))

    result = product(0, len(arrays) - 1)
    if row:
        result = result[0]
    return result[..., 0] if column else result


# Determinants. The derivative of det(a) is the matrix of its cofactors, det(a) inv(a).T where a is regular. It exists
# at every matrix, and so do its own derivatives.


def _cofactors(a, det):
    """The cofactors of a, right for singular matrices too.

    inv(a) is good for one derivative more as long as its condition is below 1 / sqrt(eps). Other matrices are sorted
    by how many of their singular values are small.
    """
    values = bare(a)
    try:
        inverse = np.linalg.inv(a)
        condition = np.linalg.norm(values, axis=(-2, -1)) * np.linalg.norm(bare(inverse), axis=(-2, -1))
        regular = (condition < 1 / math.sqrt(_eps(values))) | np.isnan(np.sum(values, (-2, -1)))
        if regular.all():
            return det[..., None, None] * _t(inverse)
    except np.linalg.LinAlgError:
        pass
    n = a.shape[-1]
    flat = np.reshape(a, (math.prod(a.shape[:-2]), n, n))
    u, s, vh = np.linalg.svd(bare(flat))
    small = np.sum(s <= math.sqrt(_eps(s)) * s[:, :1], axis=-1).tolist()
    parts, order = [], []
    for m in sorted(set(small)):
        members = [i for i, k in enumerate(small) if k == m]
        order += members
        scale = nonzero(s[members, :1, None])
        parts.append(_bordered_cofactors(flat[members], u[members, :, n - m :], vh[members, n - m :], scale))
    return np.reshape(np.concatenate(parts)[np.argsort(order).tolist()], a.shape)


def _bordered_cofactors(a, right, below, scale):
    """The cofactors of a, whose singular vectors of small singular values are given as columns and as rows.

    With these as a border, times the largest singular value, b = [[a, right], [below, 0]] is regular. Where z = inv(b),
    det(a) = det(b) det(z22), and det(z22) is a polynomial in the small z22. The scale is taken out of both factors,
    because its powers overflow.
    """
    n, m = below.shape[-1], below.shape[-2]
    if m == 0:
        return np.linalg.det(a)[..., None, None] * _t(np.linalg.inv(a))
    corner = np.zeros_like(below, shape=(*below.shape[:-2], m, m))
    b = np.concatenate(
        [np.concatenate([a, right * scale], -1), np.concatenate([below * scale, corner], -1)],
        -2,
    )
    z = np.linalg.inv(b)
    sign, log = np.linalg.slogdet(b)
    adjugate, det = _adjugate(z[..., n:, n:] * scale**2)
    inside = det * z[..., :n, :n] - (z[..., :n, n:] * scale) @ adjugate @ (z[..., n:, :n] * scale)
    return (sign * np.exp(log - 2 * m * np.log(scale[:, 0, 0])))[:, None, None] * _t(inside)


def _adjugate(z):
    """The adjugate and the determinant of z without a division by z, after Faddeev and LeVerrier."""
    one = np.diag(np.ones_like(z, shape=z.shape[-1]))
    adjugate, det, product = one, 1, 0
    for k in range(1, z.shape[-1] + 1):
        adjugate = det * one - product
        product = z @ adjugate
        det = np.trace(product, 0, -2, -1)[..., None, None] / k
    return adjugate, det


rule(np.linalg.det, lambda g, ans, a: g[..., None, None] * _cofactors(a, ans))


def _slogdet(g, ans, a):
    """The logarithm of the absolute value turns by the real part of trace(inv(a) da), the sign by the imaginary one."""
    (sign, _), (g_sign, g_log) = ans, g
    if np.iscomplexobj(sign):
        g_log = g_log + 1j * np.imag(g_sign * sign)
    return g_log[..., None, None] * _t(np.linalg.inv(a))


rule(np.linalg.slogdet, _slogdet)


# Triangular factors


def _cholesky(g, ans, _a, *, upper=False):
    """With a = l l^H, dl is l times the lower half of inv(l) da inv(l)^H."""
    g, l = (_h(g), _h(ans)) if upper else (g, ans)
    inverse = np.linalg.inv(l)
    return _to_triangle(_t(inverse) @ _half_diagonal_tril(_t(l) @ g) @ conj(inverse), upper)


rule(np.linalg.cholesky, _cholesky)


def _check_basis(rotation, name: str, g) -> None:
    rotation, scale = np.abs(rotation - _h(rotation)), np.abs(g)
    if largest(rotation) > math.sqrt(_eps(scale)) * largest(scale):
        raise DifferentiationError.at(
            name,
            got="a function that depends on which basis of the orthogonal complement was found",
            need="one that does not, because the derivative of that basis does not exist",
            mend='leave these columns out (full_matrices=False, mode="reduced"), or use them in the form q2 @ q2^H',
        )


def _complement(name, g, q, rest):
    """The cotangent of q from that of `rest`, columns that complete q to a unitary matrix.

    `rest` may be any basis of its space, so a function of it must not depend on the basis.
    """
    checked(_check_basis, bare(_t(rest) @ g), name, bare(g))
    return -conj(rest) @ _h(g) @ conj(q)


def _qr_rule(g, ans, _a, mode):
    """With x = q^H da inv(r), dq is q (l - l^H) plus what leaves the space of q, where l is the lower half of x."""
    (gq, gr), (q, r) = g, ans
    n = _a.shape[-1]
    k = min(_a.shape[-2:])
    if q.shape[-1] > k:
        gq = gq[..., :k] + _complement("np.linalg.qr", gq[..., k:], q[..., :k], q[..., k:])
        gr, q, r = gr[..., :k, :], q[..., :k], r[..., :k, :]
    right = gr[..., k:]
    if n > k:
        gq = gq + conj(q @ r[..., k:]) @ _h(right)
        gr, r = gr[..., :k], r[..., :k]
    rotation = _t(q) @ gq - gr @ _t(r)
    left = _t(np.linalg.solve(r, _t(gq + conj(q) @ (_half_diagonal_tril(rotation - _h(rotation)) - rotation))))
    return np.concatenate([left, conj(q) @ right], -1) if n > k else left


@primitive("np.linalg.qr", _qr_rule)
def _qr(a, mode):
    return np.linalg.qr(a, mode)


@composite(np.linalg.qr)
def qr(a, mode="reduced"):
    if mode == "r":
        return _qr(a, "reduced")[1]
    if mode not in ("reduced", "complete"):
        raise DifferentiationError.at(
            "np.linalg.qr",
            argument="mode",
            got=repr(mode),
            need="'reduced', 'complete' or 'r', where differentiated",
            mend="q, r = np.linalg.qr(a)",
        )
    return _qr(a, mode)


# Eigenvalues: v^H a v = diag(w)


def _eigh(g, ans, _a, UPLO="L"):
    """dw is the diagonal of x = v^H da v, and dv is v times x_ij / (w_j - w_i)."""
    (gw, gv), (w, v) = g, ans
    gaps = _gaps(w, _largest(bare(w)))
    rotation = _t(v) @ gv
    _warn_degenerate("np.linalg.eigh", gaps, gw, rotation)
    inside = gaps * (rotation - _h(rotation)) / 2
    return _to_triangle((conj(v) * gw[..., None, :] + conj(v) @ inside) @ _t(v), UPLO.upper() == "U")


def _eigvalsh(g, _ans, a, UPLO: Any = "L"):
    v = np.linalg.eigh(a, UPLO)[1]
    return _to_triangle((conj(v) * g[..., None, :]) @ _t(v), UPLO.upper() == "U")


rule(np.linalg.eigh, _eigh)
rule(np.linalg.eigvalsh, _eigvalsh)


def _eig(g, ans, _a):
    """dw is the diagonal of x = inv(v) da v, and dv is v times x_ij / (w_j - w_i), at unit length.

    LAPACK makes the largest entry of each vector real, so the phase of that entry is kept.
    """
    (gw, gv), (w, v) = g, ans
    length = np.sum(gv * v, -2, keepdims=True)
    gv = gv - conj(v) * np.real(length)
    if np.iscomplexobj(v) and v.size:
        size = np.abs(bare(v))
        size = size + size * (np.imag(bare(v)) == 0)
        row = np.cumsum(np.ones_like(size, dtype=int), -2) - 1
        largest = row == np.argmax(size, -2)[..., None, :]
        gv = gv - 1j * np.imag(length) * largest / np.where(largest, v, 1)
    gaps = _gaps(w, _largest(bare(w)))
    rotation = _t(v) @ gv
    _warn_degenerate("np.linalg.eig", gaps, gw, rotation)
    return np.linalg.solve(_t(v), gw[..., :, None] * _t(v) + (gaps * rotation) @ _t(v))


rule(np.linalg.eig, _eig)


@composite(np.linalg.eigvals)
def eigvals(a):
    """LAPACK may order eigenvalues differently without vectors, so both come from one call."""
    return np.linalg.eig(a)[0]


# Singular values: a = u diag(s) vh


def _svd_rule(g, ans, _a, full_matrices, check_vectors):
    """With x = u^H da v, ds is its diagonal, and du and dv are u and v times

        ((x + x^H)_ij / (s_j - s_i) ± (x - x^H)_ij / (s_j + s_i)) / 2

    plus what leaves the spaces of u and v. Where s_j + s_i is zero, that part is taken as zero too.
    """
    (gu, gs, gvh), (u, s, vh) = g, ans
    k = s.shape[-1]
    if u.shape[-1] > k:
        gu = gu[..., :k] + _complement("np.linalg.svd", gu[..., k:], u[..., :k], u[..., k:])
        u = u[..., :k]
    if vh.shape[-2] > k:
        g, v = _t(gvh), _t(vh)
        gvh = _t(g[..., :k] + _complement("np.linalg.svd", g[..., k:], v[..., :k], v[..., k:]))
        vh = vh[..., :k, :]
    scale = _largest(bare(s))
    gaps, sums = _gaps(s, scale), _reciprocal(s[..., None, :] + s[..., :, None], scale)
    inverse = _reciprocal(s, scale[..., 0])
    rotation_u, rotation_v = _t(u) @ gu, -gvh @ _t(vh)
    _warn_degenerate("np.linalg.svd", gaps, gs, *((rotation_u, rotation_v) if check_vectors else ()))
    skew_u, skew_v = (rotation_u - _h(rotation_u)) / 2, (rotation_v - _h(rotation_v)) / 2
    if np.iscomplexobj(u):
        gs = gs + np.diagonal(skew_u + skew_v, 0, -2, -1) * inverse / 2
    inside = gaps * (skew_u + skew_v) + sums * (skew_u - skew_v)
    left = conj(u) * gs[..., None, :] + conj(u) @ inside
    if _a.shape[-2] > k:
        left = left + (gu - conj(u) @ rotation_u) * inverse[..., None, :]
    result = left @ conj(vh)
    if _a.shape[-1] > k:
        result = result + (conj(u) * inverse[..., None, :]) @ (gvh + rotation_v @ conj(vh))
    return result


@primitive("np.linalg.svd", _svd_rule)
def _svd(a, full_matrices, check_vectors):
    """check_vectors=False: the function depends on the space of the vectors of equal values only."""
    return np.linalg.svd(a, full_matrices)


def _singular_values(g, _ans, a):
    u, _, vh = np.linalg.svd(a, full_matrices=False)
    return (conj(u) * g[..., None, :]) @ conj(vh)


@primitive("np.linalg.svd", _singular_values)
def _svdvals(a):
    return np.linalg.svd(a, compute_uv=False)


_SVDResult: Any = type(np.linalg.svd(np.zeros((0, 0))))


@composite(np.linalg.svd)
def svd(a, full_matrices=True, compute_uv=True, hermitian=False):
    if not hermitian:
        return _svd(a, full_matrices, True) if compute_uv else _svdvals(a)
    if not compute_uv:
        return np.flip(np.sort(np.abs(np.linalg.eigvalsh(a))), -1)
    w, u = np.linalg.eigh(a)
    order = np.flip(np.argsort(np.abs(bare(w))), -1)
    w, u = np.take_along_axis(w, order, -1), np.take_along_axis(u, order[..., None, :], -1)
    sign = np.copysign(np.ones_like(bare(w)), bare(w))
    return _SVDResult(u, w * sign, _h(u * sign[..., None, :]))


@composite(np.linalg.svdvals)
def svdvals(x, /):
    return _svdvals(x)


def _polar(a):
    """u vh, without the vectors of singular values that are zero. It does not depend on the choice of vectors."""
    u, s, vh = _svd(a, False, False)
    values = bare(s)
    return (u * (values > max(a.shape[-2:]) * _eps(values) * _largest(values)[..., 0])[..., None, :]) @ vh


@primitive("np.linalg.norm", lambda g, _ans, a: g[..., None, None] * conj(_polar(a)))
def nuclear_norm(a):
    """The sum of the singular values. Where one is zero, its derivative is taken as zero."""
    return np.linalg.norm(a, "nuc", (-2, -1))


@composite(np.linalg.cond, by_numpy=True)
def cond(x, p: Any = None):
    if x.ndim < 2 or x.size == 0:
        raise np.linalg.LinAlgError(f"cond is not defined for an array of shape {x.shape}")
    if p not in (None, 2, -2):
        return np.linalg.norm(x, p, (-2, -1)) * np.linalg.norm(np.linalg.inv(x), p, (-2, -1))
    s = _svdvals(x)
    large, small = s[..., 0], s[..., -1]
    with np.errstate(divide="ignore"):
        return (small + (large == 0)) / large if p == -2 else nonzero(large) / small


constant(np.linalg.matrix_rank)


# Pseudo-inverses, of constant rank


def _pinv_rule(g, ans, a, _rcond):
    """dx = -x da x + x x^H da^H (1 - a x) + (1 - x a) da^H x^H x, where x is the pseudo-inverse."""
    x, y = conj(ans), _h(g)
    return (y - conj(a) @ x @ y) @ x @ _t(ans) + _t(ans) @ x @ (y - y @ x @ conj(a)) - _t(ans) @ g @ _t(ans)


@primitive("np.linalg.pinv", _pinv_rule)
def _pinv(a, rcond):
    return np.linalg.pinv(a, rcond)


def _without_small(a, rcond):
    """The matrix without the singular values that rcond drops, unless these are only rounding."""
    s = np.linalg.svd(bare(a), compute_uv=False)
    top = s[..., :1]
    small = s <= (devices.beside(array(rcond), s)[..., None] if np.ndim(rcond) else rcond) * top
    if not (small & (s > 4 * max(a.shape[-2:]) * _eps(s) * top)).any():
        return a
    u = _svd(a, False, False)[0]
    return (u * ~small[..., None, :]) @ (_h(u) @ a)


_MISSING: Any = object()


@composite(np.linalg.pinv, by_numpy=True)
def pinv(a, rcond: Any = None, hermitian=False, *, rtol: Any = _MISSING):
    if rcond is not None and rtol is not _MISSING:
        raise ValueError("np.linalg.pinv takes rtol or rcond, and got both")
    if hermitian:
        _require_square(a)
        a = _hermitian(a)
    if rcond is None:
        rcond = 1e-15 if rtol is _MISSING else rtol
    if rcond is None:
        rcond = max(a.shape[-2:]) * _eps(a)
    return _pinv(_without_small(a, bare(rcond)), bare(rcond))


def _lstsq_left(g, ans, a, b, rcond):
    """As for pinv: dx = -p da x + p p^H da^H (b - a x) + (1 - p a) da^H p^H x, where p is the pseudo-inverse."""
    p = np.linalg.pinv(a, rcond)
    solved, y = _t(p) @ g, _h(g)
    outside = conj(b - a @ ans) @ (_h(solved) @ _t(p))
    return outside + _t(p) @ (conj(ans) @ (y - y @ conj(p) @ conj(a))) - solved @ _t(ans)


@primitive("np.linalg.lstsq", _lstsq_left, lambda g, _ans, a, _b, rcond: _t(np.linalg.pinv(a, rcond)) @ g)
def _lstsq(a, b, rcond):
    return np.linalg.lstsq(a, b, rcond)[0]


@composite(np.linalg.lstsq, by_numpy=True)
def lstsq(a, b, rcond=None):
    a, b = array(a), array(b)
    rank = compute(lambda a, b: np.linalg.lstsq(a, b, rcond)[2], (a, b), {})
    m, n = a.shape
    eps = float(np.finfo(float).eps)  # LAPACK's part of NumPy computes in double precision
    cutoff = eps * max(m, n) if rcond is None else eps if rcond < 0 else rcond
    columns = b[:, None] if b.ndim == 1 else b
    x = _lstsq(_without_small(a, cutoff), columns, cutoff)
    if bare(rank) == n < m:
        residuals = np.sum(square(columns - a @ x), 0)
    else:
        residuals = np.zeros_like(np.real(x), shape=0)
    return x[:, 0] if b.ndim == 1 else x, residuals, rank, _svdvals(a.astype(np.result_type(a.dtype, b.dtype)))
