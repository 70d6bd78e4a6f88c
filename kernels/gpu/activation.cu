// The forms of activations and their derivatives, as in kernels/reference/activation.py.

enum { RAMP, GATE, DECAY, SOFTPLUS, TANH, MISH, NORMAL };

template <class A> struct Numbers { A p0, p1, p2, p3, p4; };

template <class A> __device__ inline A logistic(A u) {
    A e = exp(u > A(0) ? -u : u);
    return (u > A(0) ? A(1) : e) / (A(1) + e);
}

// Beyond it the logistic function is 0 or 1, and the square of a number may be infinite.
template <class A> __device__ inline A near(A z) { return z > A(1e4) ? A(1e4) : z < A(-1e4) ? A(-1e4) : z; }

template <class A> __device__ inline A value_of(A z, index_t which, const Numbers<A>& p) {
    const A zero = A(0), one = A(1), two = A(2);
    switch (which) {
        case RAMP: {
            A v = p.p0 * z + p.p1;
            v = v < zero ? zero : v;
            v = v > p.p2 ? p.p2 : v;
            return (p.p4 != zero ? z * v : v) + (p.p3 != zero && z < zero ? p.p3 * z : zero);
        }
        case GATE: {
            A c = near(z), s = logistic((p.p0 + p.p1 * (c * c)) * c);
            return p.p4 != zero ? z * s : s;
        }
        case DECAY: return p.p0 * (z > zero ? z : p.p1 * expm1(z * p.p2));
        case SOFTPLUS: {
            A v = z * p.p0;
            return p.p0 * (log1p(exp(v > zero ? -v : v)) + (v < zero ? zero : v));
        }
        case TANH: return tanh(z);
        case MISH: {
            A e = exp(z > zero ? -z : z), up = z > zero ? one + two * e : e * (e + two);
            return z * (up / (up + (z > zero ? two * e * e : two)));
        }
        default: return z * A(0.5) * erfc(z * A(-0.70710678118654752));
    }
}

template <class A> __device__ inline A slope_of(A z, index_t which, const Numbers<A>& p) {
    const A zero = A(0), one = A(1), two = A(2);
    switch (which) {
        case RAMP: {
            A v = p.p0 * z + p.p1;
            A slope = v > zero && (v < p.p2 || isinf(p.p2)) ? (p.p4 != zero ? p.p0 * z : p.p0) : zero;
            A clipped = v < zero ? zero : v > p.p2 ? p.p2 : v;
            return (p.p4 != zero ? slope + clipped : slope) + (z <= zero ? p.p3 : zero);
        }
        case GATE: {
            A c = near(z), u = (p.p0 + p.p1 * (c * c)) * c, s = logistic(u);
            A d = s * logistic(-u) * (p.p0 + A(3) * p.p1 * (c * c));
            return p.p4 != zero ? c * d + s : d;
        }
        case DECAY: return p.p0 * (z > zero ? one : p.p1 * p.p2 * exp(z * p.p2));
        case SOFTPLUS: return logistic(z * p.p0);
        case TANH: {
            A e = exp(-two * (z > zero ? z : -z));
            return two * two * e / ((one + e) * (one + e));
        }
        case MISH: {
            A e = exp(z > zero ? -z : z), up = z > zero ? one + two * e : e * (e + two);
            A down = z > zero ? two * e * e : two, t = up / (up + down), rest = down / (up + down);
            return t + z * (rest * (one + t)) * ((z > zero ? one : e) / (one + e));
        }
        default: {
            A density = exp(A(-0.5) * z * z) * A(0.3989422804014327);
            return A(0.5) * erfc(z * A(-0.70710678118654752)) + z * density;
        }
    }
}

// out = f(entry, its index) for all entries.
template <class T, class F> __device__ inline void each(T* out, const T* x, index_t size, F f) {
    const index_t width = Pack<T>::width;
    if (packable<T>(x, 0) && packable<T>(out, 0)) {
        for (index_t i = grid_first(); i < size / width; i += grid_stride()) {
            Pack<T> v = ((const Pack<T>*)x)[i], q;
            for (int k = 0; k < width; ++k) q.at[k] = narrow<T>(f(acc_t<T>(widen(v.at[k])), i * width + k));
            ((Pack<T>*)out)[i] = q;
        }
        index_t rest = size - size % width + grid_first();
        if (rest < size) out[rest] = narrow<T>(f(acc_t<T>(widen(x[rest])), rest));
    } else {
        for (index_t i = grid_first(); i < size; i += grid_stride())
            out[i] = narrow<T>(f(acc_t<T>(widen(x[i])), i));
    }
}

// bias: n numbers that repeat along the entries, or null.
template <class T>
__global__ void activate(T* out, const T* x, const T* bias, index_t size, index_t n, index_t which, double p0, double p1,
                         double p2, double p3, double p4) {
    typedef acc_t<T> A;
    const Numbers<A> p{A(p0), A(p1), A(p2), A(p3), A(p4)};
    each(out, x, size, [=](A z, index_t i) { return value_of(bias ? z + A(widen(bias[i % n])) : z, which, p); });
}

template <class T>
__global__ void activate_vjp(T* out, const T* x, const T* g, const T* bias, index_t size, index_t n, index_t which,
                             double p0, double p1, double p2, double p3, double p4) {
    typedef acc_t<T> A;
    const Numbers<A> p{A(p0), A(p1), A(p2), A(p3), A(p4)};
    each(out, x, size, [=](A z, index_t i) {
        return A(widen(g[i])) * slope_of(bias ? z + A(widen(bias[i % n])) : z, which, p);
    });
}
