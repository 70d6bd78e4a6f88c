// Philox4x32-10, and numbers from its words. A thread makes the four words of one counter, and from them the entries of
// its row. Each operation is rounded by itself (the source is compiled without fused products and sums), in the order of
// kernels/cpu, so that the bits are the same.

struct Words { unsigned int at[4]; };

__device__ inline Words philox(unsigned long long block, unsigned int domain, unsigned int k0, unsigned int k1) {
    unsigned int x0 = (unsigned int)block, x1 = (unsigned int)(block >> 32), x2 = 0, x3 = domain;
    for (int r = 0; r < 10; ++r) {
        unsigned long long p = 0xD2511F53ull * x0, q = 0xCD9E8D57ull * x2;
        x0 = (unsigned int)(q >> 32) ^ x1 ^ k0;
        x1 = (unsigned int)q;
        x2 = (unsigned int)(p >> 32) ^ x3 ^ k1;
        x3 = (unsigned int)p;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return Words{{x0, x1, x2, x3}};
}

template <class A> struct word_of { typedef unsigned int type; };
template <> struct word_of<double> { typedef unsigned long long type; };
template <> struct word_of<unsigned long long> { typedef unsigned long long type; };

__device__ inline void join(const Words& w, unsigned int* out) { for (int k = 0; k < 4; ++k) out[k] = w.at[k]; }
__device__ inline void join(const Words& w, unsigned long long* out) {
    for (int k = 0; k < 2; ++k) out[k] = w.at[2 * k] | (unsigned long long)w.at[2 * k + 1] << 32;
}

template <class T, int N> struct alignas(N * sizeof(T)) Together { T at[N]; };

// `rows` rows of n entries each; row r begins at entry starts[r] of the whole.
template <class T, class F>
__device__ inline void fill(T* out, const unsigned int* key, unsigned int domain, const unsigned long long* starts,
                            index_t rows, index_t n, F make) {
    typedef typename word_of<acc_t<T>>::type W;
    constexpr int N = 16 / sizeof(W);
    unsigned int k0 = key[0], k1 = key[1];
    index_t blocks = (n + 2 * N - 2) / N;  // that a row can touch
    for (index_t i = grid_first(); i < rows * blocks; i += grid_stride()) {
        index_t r = i / blocks;
        unsigned long long start = starts[r], block = start / N + i % blocks;
        index_t at = (index_t)(block * N - start);  // of the counter's first entry in the row
        if (at >= n) continue;
        W bits[N];
        join(philox(block, domain, k0, k1), bits);
        Together<T, N> made;
        for (int k = 0; k < N; ++k) made.at[k] = make(bits[k]);
        T* to = out + r * n + at;
        if (at >= 0 && at + N <= n && ((unsigned long long)to % sizeof(made)) == 0) {
            *(Together<T, N>*)to = made;
        } else {
            for (int k = 0; k < N; ++k)
                if (at + k >= 0 && at + k < n) to[k] = made.at[k];
        }
    }
}

template <class W> __global__ void random_bits(W* out, const unsigned int* key, const unsigned long long* starts,
                                               index_t rows, index_t n, index_t domain) {
    fill(out, key, (unsigned int)domain, starts, rows, n, [](W w) { return w; });
}

template <class T> struct digits { static constexpr int count = 24; };
template <> struct digits<double> { static constexpr int count = 53; };
template <> struct digits<half_t> { static constexpr int count = 11; };
template <> struct digits<bfloat_t> { static constexpr int count = 8; };

template <class A, class W> __device__ inline A scaled(W w, int shift, A unit, A low, A span, A last) {
    A x = low + (unit * A(w >> shift)) * span;
    return x < last ? x : last;
}

template <class T> __global__ void random_uniform(T* out, const unsigned int* key, const unsigned long long* starts,
                                                  index_t rows, index_t n, double low, double span, double last) {
    typedef acc_t<T> A;
    typedef typename word_of<A>::type W;
    constexpr int shift = 8 * (int)sizeof(W) - digits<T>::count;
    A unit = A(1) / A(1ll << digits<T>::count), a = A(low), b = A(span), c = A(last);
    fill(out, key, 0, starts, rows, n, [=](W w) { return narrow<T>(scaled<A>(w, shift, unit, a, b, c)); });
}

// -log(x), with rest = 1 - x.
__device__ inline int to_bits(float x) { return (int)float_bits(x); }
__device__ inline float of_bits(int b) { return bits_float((unsigned int)b); }
#ifdef SPMD_EMULATED
inline long long to_bits(double x) { long long b; memcpy(&b, &x, 8); return b; }
inline double of_bits(long long b) { double x; memcpy(&x, &b, 8); return x; }
#else
__device__ inline long long to_bits(double x) { return __double_as_longlong(x); }
__device__ inline double of_bits(long long b) { return __longlong_as_double(b); }
#endif

__device__ inline float minus_log(float x, float rest) {
    int b = to_bits(x), k = (b - 0x3F3504F3) >> 23;
    float m = of_bits(b - (int)((unsigned int)k << 23)), f = k == 0 ? -rest : m - 1.0f, s = f / (2.0f + f);
    float z = s * s, w = z * z;
    float r = z * (0.66666662693f + w * 0.28498786688f) + w * (0.40000972152f + w * 0.24279078841f);
    float h = 0.5f * f * f, e = (float)k;
    return -(e * 6.9313812256e-01f - ((h - (s * (h + r) + e * 9.0580006145e-06f)) - f));
}

__device__ inline double minus_log(double x, double rest) {
    long long b = to_bits(x), k = (b - 0x3FE6A09E00000000ll) >> 52;
    double m = of_bits(b - (long long)((unsigned long long)k << 52)), f = k == 0 ? -rest : m - 1.0, s = f / (2.0 + f);
    double z = s * s, w = z * z;
    double odd = w * (2.857142874366239149e-01 + w * (1.818357216161805012e-01 + w * 1.479819860511658591e-01));
    double even = w * (3.999999999940941908e-01 + w * (2.222219843214978396e-01 + w * 1.531383769920937332e-01));
    double r = z * (6.666666666666735130e-01 + odd) + even;
    double h = 0.5 * f * f, e = (double)k;
    return -(e * 6.93147180369123816490e-01 - ((h - (s * (h + r) + e * 1.90821492927058770002e-10)) - f));
}

// Quantiles of the normal distribution; x = 1 - tail.
template <class A, int N> __device__ inline A polynomial(const A (&c)[N], A t) {
    A p = c[0];
    for (int k = 1; k < N; ++k) p = p * t + c[k];
    return p;
}

__device__ inline float quantile(float x, float tail) {
    const float central[] = {
        -8.931926e-09f, 2.3335968e-08f, 4.6813136e-07f, -3.4639852e-06f, -4.97242e-06f, 2.1834939e-04f,
        -1.2527264e-03f, -4.177393e-03f, 2.4664028e-01f, 1.5014094e+00f};
    const float far[] = {
        -2.0514492e-05f, 2.6395226e-05f, 8.966577e-05f, -2.6844404e-04f, 4.2075204e-04f, -6.528988e-04f,
        1.0977448e-03f, -2.070203e-03f, 3.2761886e-03f, 1.0073693e+00f, 3.3354857e+00f};
    float w = minus_log(tail * (2.0f - tail), x * x);
    return (x * (w < 5.0f ? polynomial(central, w - 2.5f) : polynomial(far, sqrtf(w) - 3.5f))) * 1.41421356f;
}

__device__ inline double quantile(double x, double tail) {
    const double central[] = {
        -2.362369698566107e-22, -1.6787330615256773e-19, 1.1027771591500033e-18, 1.1125794759379464e-17,
        -1.290702354613073e-16, 2.166994626283574e-17, 6.581955305929239e-15, -4.0554139746886e-14,
        -8.106594456438496e-14, 2.6335724924608484e-12, -1.2977505202014966e-11, -5.4154417754696635e-11,
        1.0512202440121784e-09, -4.112633104297614e-09, -2.907038666019143e-08, 4.2347877672780653e-07,
        -1.3654691796592068e-06, -1.3882523361276876e-05, 0.0001867342080212427, -0.0007407025341669402,
        -0.006033670871427011, 0.2401581824255897, 1.6536545626831027};
    const double far[] = {
        -5.5491571865817295e-09, 9.031733776293067e-08, -2.555532227554427e-07, 1.9310292683999456e-08,
        1.4820950332955519e-06, -4.014938762864796e-06, 2.9351472438578695e-06, 1.247587101780709e-05,
        -4.732209008525346e-05, 6.828468160803809e-05, 2.403185759422663e-05, -0.0003550374916382641,
        0.0009532892986547544, -0.0016882755585818404, 0.002491442100505963, -0.0037512085074678137,
        0.00537091455349845, 1.0052589676941581, 3.0838856104922208};
    const double end[] = {
        -1.4918084681361763e-12, 1.3759020978704506e-12, 3.885378801796441e-11, -1.7798960125114405e-10,
        4.077174653982199e-10, -7.679112633480804e-10, 1.557192006811228e-09, -3.25795273485046e-09,
        7.899353980967362e-09, -2.8126871216245407e-08, 1.3086977141696914e-07, -6.473557668158898e-07,
        3.1188154215539935e-06, -1.4023131897055382e-05, 5.514872379485559e-05, -0.00015004600199947955,
        -0.000274322687431142, 1.0101951772794822, 5.102469766505419};
    double w = minus_log(tail * (2.0 - tail), x * x), p, s;
    if (w < 6.25) {
        p = polynomial(central, w - 3.125);
    } else {
        s = sqrt(w);
        p = s < 4.0 ? polynomial(far, s - 3.25) : polynomial(end, s - 5.25);
    }
    return (x * p) * 1.4142135623730951;
}

// x and 1 - x from all bits but the first, both to full precision.
__device__ inline void halves(unsigned int w, float& x, float& tail) {
    unsigned int j = w & 0x7FFFFFFFu;
    x = (float)(2 * j + 1) * 2.3283064365386963e-10f;
    tail = (float)(2 * (0x7FFFFFFFu - j) + 1) * 2.3283064365386963e-10f;
}
__device__ inline void halves(unsigned long long w, double& x, double& tail) {
    unsigned long long j = w & 0x7FFFFFFFFFFFFFFFull;
    x = (double)(2 * j + 1) * 5.421010862427522e-20;
    tail = (double)(2 * (0x7FFFFFFFFFFFFFFFull - j) + 1) * 5.421010862427522e-20;
}

template <class T> __global__ void random_normal(T* out, const unsigned int* key, const unsigned long long* starts,
                                                 index_t rows, index_t n) {
    typedef acc_t<T> A;
    typedef typename word_of<A>::type W;
    fill(out, key, 0, starts, rows, n, [](W w) {
        A x, tail;
        halves(w, x, tail);
        A z = quantile(x, tail);
        return narrow<T>(w >> (8 * sizeof(W) - 1) ? -z : z);
    });
}

template <class T> __global__ void random_truncated(
    T* out, const unsigned int* key, const unsigned long long* starts, index_t rows, index_t n, double low, double span,
    double last, double from, double to, index_t side) {
    typedef acc_t<T> A;
    typedef typename word_of<A>::type W;
    constexpr int shift = 8 * (int)sizeof(W) - digits<A>::count;
    A unit = A(1) / A(1ll << digits<A>::count), a = A(low), b = A(span), c = A(last);
    A first = A(from), end = A(to), least = sizeof(A) == 8 ? A(5.421010862427522e-20) : A(2.3283064365386963e-10);
    fill(out, key, 0, starts, rows, n, [=](W w) {
        A x = scaled<A>(w, shift, unit, a, b, c), z;
        if (side != 0) {
            A tail = x > least ? x : least;
            z = quantile(A(1) - tail, tail) * A(side);
        } else {
            A size = x < A(0) ? -x : x, tail = A(1) - size;
            z = quantile(size, tail > least ? tail : least);
            z = x < A(0) ? -z : z;
        }
        return narrow<T>(z < first ? first : z > end ? end : z);
    });
}

template <class A, class W> __device__ inline A exponential(W w) {
    A x, rest;
    halves(w, x, rest);
    return minus_log(rest, x);
}

template <class T> __global__ void random_exponential(T* out, const unsigned int* key,
                                                      const unsigned long long* starts, index_t rows, index_t n) {
    typedef acc_t<T> A;
    typedef typename word_of<A>::type W;
    fill(out, key, 0, starts, rows, n, [](W w) { return narrow<T>(exponential<A>(w)); });
}

template <class T> __global__ void random_gumbel(T* out, const unsigned int* key, const unsigned long long* starts,
                                                 index_t rows, index_t n) {
    typedef acc_t<T> A;
    typedef typename word_of<A>::type W;
    fill(out, key, 0, starts, rows, n, [](W w) {
        A e = exponential<A>(w);
        return narrow<T>(minus_log(e, A(1) - e));
    });
}
