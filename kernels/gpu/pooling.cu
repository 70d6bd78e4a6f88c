// Threads along the last dimension, rows over the blocks. One thread computes an output, or an entry of a cotangent, and
// reads in a fixed order. Neighbouring threads read neighbours, which share the cache.
//
// A dimension: n inputs, m outputs; kernel k, stride s, dilation r, padding l before; taps in from:to count.
#define AXIS(a) index_t n##a, index_t m##a, index_t k##a, index_t s##a, index_t r##a, index_t l##a, \
    index_t from##a, index_t to##a
#define AXES AXIS(d), AXIS(h), AXIS(w)

// The rows of a grid (planes, lengths d, h), and the entries along each.
#define FOR_ROWS(planes, nd, nh) \
    for (index_t row = (index_t)blockIdx.x * blockDim.y + threadIdx.y; row < (planes) * (nd) * (nh); \
         row += (index_t)gridDim.x * blockDim.y)
#define FOR_ALONG(i, n) \
    for (index_t i = (index_t)blockIdx.y * blockDim.x + threadIdx.x; i < (n); i += (index_t)gridDim.y * blockDim.x)

__device__ inline index_t floor_div(index_t a, index_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }
__device__ inline index_t least(index_t a, index_t b) { return a < b ? a : b; }
__device__ inline index_t most(index_t a, index_t b) { return a > b ? a : b; }

// The taps of an output at `start` that lie in from:to.
struct Range { index_t first, end; };
__device__ inline Range taps_in(index_t start, index_t k, index_t r, index_t from, index_t to) {
    return Range{most(0, -floor_div(start - from, r)), least(k, -floor_div(start - to, r))};
}
// The outputs that may read input i.
__device__ inline Range outputs_of(index_t i, index_t m, index_t k, index_t s, index_t r, index_t l) {
    return Range{most(0, -floor_div((k - 1) * r - i - l, s)), least(m, floor_div(i + l, s) + 1)};
}

template <class T, class I> __global__ void max_pool(T* top, I* index, const T* x, index_t planes, AXES) {
    typedef acc_t<T> A;
    FOR_ROWS(planes, md, mh) {
        index_t p = row / (md * mh), od = row / mh % md, oh = row % mh;
        index_t d0 = od * sd - ld, h0 = oh * sh - lh;
        Range jds = taps_in(d0, kd, rd, 0, nd), jhs = taps_in(h0, kh, rh, 0, nh);
        FOR_ALONG(ow, mw) {
            index_t w0 = ow * sw - lw;
            Range jws = taps_in(w0, kw, rw, 0, nw);
            A best = -limits<A>::infinity();
            index_t best_index = -1;
            for (index_t jd = jds.first; jd < jds.end; ++jd)
                for (index_t jh = jhs.first; jh < jhs.end; ++jh) {
                    index_t base = ((d0 + jd * rd) * nh + h0 + jh * rh) * nw + w0;
                    const T* from = x + p * nd * nh * nw + base;
                    for (index_t jw = jws.first; jw < jws.end; ++jw) {
                        A v = widen(from[jw * rw]);
                        if ((!(v <= best) && best == best) || best_index < 0) {
                            best = v;
                            best_index = base + jw * rw;
                        }
                    }
                }
            top[row * mw + ow] = narrow<T>(best);
            index[row * mw + ow] = I(best_index);
        }
    }
}

template <class T, class I>
__global__ void max_pool_gather(T* out, const T* x, const I* index, index_t planes, index_t m, index_t n) {
    FOR_ROWS(planes, 1, 1) {
        FOR_ALONG(j, m) {
            index_t i = index[row * m + j];
            out[row * m + j] = i >= 0 ? x[row * n + i] : narrow<T>(acc_t<T>(0));
        }
    }
}

template <class T, class I> __global__ void max_pool_vjp(T* out, const T* g, const I* index, index_t planes, AXES) {
    typedef acc_t<T> A;
    FOR_ROWS(planes, nd, nh) {
        index_t p = row / (nd * nh), d = row / nh % nd, h = row % nh;
        Range ods = outputs_of(d, md, kd, sd, rd, ld), ohs = outputs_of(h, mh, kh, sh, rh, lh);
        FOR_ALONG(w, nw) {
            Range ows = outputs_of(w, mw, kw, sw, rw, lw);
            index_t own = (d * nh + h) * nw + w;
            A sum = A(0);
            for (index_t od = ods.first; od < ods.end; ++od)
                for (index_t oh = ohs.first; oh < ohs.end; ++oh) {
                    index_t from = ((p * md + od) * mh + oh) * mw;
                    for (index_t ow = ows.first; ow < ows.end; ++ow)
                        if (index[from + ow] == own) sum += widen(g[from + ow]);
                }
            out[row * nw + w] = narrow<T>(sum);
        }
    }
}

template <class A> struct real_of { typedef A type; };
template <class R> struct real_of<complex_t<R>> { typedef R type; };
template <class A> __device__ inline A scaled(A x, A by) { return x * by; }
template <class R> __device__ inline complex_t<R> scaled(complex_t<R> x, R by) { return {x.re * by, x.im * by}; }

// The number of taps that count, at least 1.
#define COUNT(a, o) counted(o * s##a - l##a, k##a, r##a, from##a, to##a)
__device__ inline index_t counted(index_t start, index_t k, index_t r, index_t from, index_t to) {
    Range taps = taps_in(start, k, r, from, to);
    return most(1, taps.end - taps.first);
}

template <class T> __global__ void avg_pool(T* out, const T* x, index_t planes, AXES) {
    typedef acc_t<T> A;
    typedef typename real_of<A>::type R;
    FOR_ROWS(planes, md, mh) {
        index_t p = row / (md * mh), od = row / mh % md, oh = row % mh;
        index_t d0 = od * sd - ld, h0 = oh * sh - lh;
        Range jds = taps_in(d0, kd, rd, 0, nd), jhs = taps_in(h0, kh, rh, 0, nh);
        R share = R(1) / R(COUNT(d, od) * COUNT(h, oh));
        FOR_ALONG(ow, mw) {
            index_t w0 = ow * sw - lw;
            Range jws = taps_in(w0, kw, rw, 0, nw);
            A sum = zero<A>();
            for (index_t jd = jds.first; jd < jds.end; ++jd)
                for (index_t jh = jhs.first; jh < jhs.end; ++jh) {
                    const T* from = x + ((p * nd + d0 + jd * rd) * nh + h0 + jh * rh) * nw + w0;
                    for (index_t jw = jws.first; jw < jws.end; ++jw) sum += widen(from[jw * rw]);
                }
            out[row * mw + ow] = narrow<T>(scaled(sum, share / R(COUNT(w, ow))));
        }
    }
}

template <class T> __global__ void avg_pool_vjp(T* out, const T* g, index_t planes, AXES) {
    typedef acc_t<T> A;
    typedef typename real_of<A>::type R;
    FOR_ROWS(planes, nd, nh) {
        index_t p = row / (nd * nh), d = row / nh % nd, h = row % nh;
        Range ods = outputs_of(d, md, kd, sd, rd, ld), ohs = outputs_of(h, mh, kh, sh, rh, lh);
        FOR_ALONG(w, nw) {
            Range ows = outputs_of(w, mw, kw, sw, rw, lw);
            A sum = zero<A>();
            for (index_t od = ods.first; od < ods.end; ++od) {
                if ((d + ld - od * sd) % rd) continue;  // i lies between dilated taps
                for (index_t oh = ohs.first; oh < ohs.end; ++oh) {
                    if ((h + lh - oh * sh) % rh) continue;
                    const T* from = g + ((p * md + od) * mh + oh) * mw;
                    R count = R(COUNT(d, od) * COUNT(h, oh));
                    for (index_t ow = ows.first; ow < ows.end; ++ow)
                        if ((w + lw - ow * sw) % rw == 0)
                            sum += scaled(A(widen(from[ow])), R(1) / (count * R(COUNT(w, ow))));
                }
            }
            out[row * nw + w] = narrow<T>(sum);
        }
    }
}
