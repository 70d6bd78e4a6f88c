// Optimiser steps: each thread takes as many parameters as make 16 bytes, and their gradients and state. Compiled
// without fused products and sums: the bits are those of the formulas.

template <class T> __global__ void descend(T* out, const T* p, const T* g, index_t n, index_t packs, double rate) {
    typedef acc_t<T> A;
    constexpr int N = Pack<T>::width;
    A by = A(rate);
    each_pack<T>(n, packs != 0, [=](index_t i, int count) {
        Piece<T, N> pp, gg;
        get(pp, p + i, count);
        get(gg, g + i, count);
        for (int k = 0; k < count; ++k) pp.at[k] = narrow<T>(widen(pp.at[k]) - by * widen(gg.at[k]));
        set(out + i, pp, count);
    });
}

template <class T> __global__ void momentum(T* out, acc_t<T>* sums, const T* p, const T* g, const acc_t<T>* v, index_t n,
                                            index_t packs, double rate, double keep, index_t nesterov) {
    typedef acc_t<T> A;
    constexpr int N = Pack<T>::width;
    A by = A(rate), mu = A(keep);
    each_pack<T>(n, packs != 0, [=](index_t i, int count) {
        Piece<T, N> pp, gg;
        Piece<A, N> vv;
        get(pp, p + i, count);
        get(gg, g + i, count);
        get(vv, v + i, count);
        for (int k = 0; k < count; ++k) {
            A x = widen(gg.at[k]), sum = mu * vv.at[k] + x;
            vv.at[k] = sum;
            pp.at[k] = narrow<T>(widen(pp.at[k]) - by * (nesterov ? mu * sum + x : sum));
        }
        set(out + i, pp, count);
        set(sums + i, vv, count);
    });
}

template <class T> __global__ void adamw(
    T* out, acc_t<T>* mean, acc_t<T>* square, const T* p, const T* g, const acc_t<T>* m, const acc_t<T>* s, index_t n,
    index_t packs, double rate, double b1, double rest1, double unbias1, double b2, double rest2, double unbias2,
    double eps, double decay) {
    typedef acc_t<T> A;
    constexpr int N = Pack<T>::width;
    A by = A(rate), c1 = A(b1), r1 = A(rest1), u1 = A(unbias1), c2 = A(b2), r2 = A(rest2), u2 = A(unbias2);
    A least = A(eps), shrink = A(decay);
    each_pack<T>(n, packs != 0, [=](index_t i, int count) {
        Piece<T, N> pp, gg;
        Piece<A, N> mm, ss;
        get(pp, p + i, count);
        get(gg, g + i, count);
        get(mm, m + i, count);
        get(ss, s + i, count);
        for (int k = 0; k < count; ++k) {
            A x = widen(gg.at[k]), w = widen(pp.at[k]);
            mm.at[k] = c1 * mm.at[k] + r1 * x;
            ss.at[k] = c2 * ss.at[k] + r2 * (x * x);
            A along = (mm.at[k] * u1) / (sqrt(ss.at[k] * u2) + least);
            pp.at[k] = narrow<T>(w - by * (decay != 0 ? along + shrink * w : along));
        }
        set(out + i, pp, count);
        set(mean + i, mm, count);
        set(square + i, ss, count);
    });
}
