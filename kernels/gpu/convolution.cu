// Convolution over three spatial dimensions; fewer are padded with lengths of one.
//
// A thread computes one entry of the result and adds its terms in one order, so that the same inputs give the same bits.

struct Geometry {
    index_t n[3], m[3], k[3], stride[3], low[3], dilation[3];
};

// Python cannot pass a struct by value, but its entries.
#define GEOMETRY_PARAMETERS                                                                                \
    index_t n0, index_t n1, index_t n2, index_t m0, index_t m1, index_t m2, index_t k0, index_t k1,        \
    index_t k2, index_t s0, index_t s1, index_t s2, index_t l0, index_t l1, index_t l2, index_t d0,        \
    index_t d1, index_t d2
#define GEOMETRY                                                                                           \
    Geometry{{n0, n1, n2}, {m0, m1, m2}, {k0, k1, k2}, {s0, s1, s2}, {l0, l1, l2}, {d0, d1, d2}}

// The entry of x that tap t of output o reads, or -1 for padding.
__device__ inline index_t input(const Geometry& s, int d, index_t o, index_t t) {
    index_t i = o * s.stride[d] - s.low[d] + t * s.dilation[d];
    return i >= 0 && i < s.n[d] ? i : -1;
}

// The output whose tap t reads entry i, or -1.
__device__ inline index_t output(const Geometry& s, int d, index_t i, index_t t) {
    index_t u = i + s.low[d] - t * s.dilation[d];
    if (u < 0 || u % s.stride[d]) return -1;
    u /= s.stride[d];
    return u < s.m[d] ? u : -1;
}

struct Three { index_t at[3]; };
__device__ inline Three split(index_t& i, const index_t* sizes) {
    Three p;
    for (int d = 2; d >= 0; --d) { p.at[d] = i % sizes[d]; i /= sizes[d]; }
    return p;
}

// x (planes, *n) -> cols (planes, *k, *m)
template <class T> __global__ void im2col(T* cols, const T* x, index_t planes, GEOMETRY_PARAMETERS) {
    const Geometry s = GEOMETRY;
    index_t size = s.n[0] * s.n[1] * s.n[2];
    index_t count = planes * s.k[0] * s.k[1] * s.k[2] * s.m[0] * s.m[1] * s.m[2];
    for (index_t e = grid_first(); e < count; e += grid_stride()) {
        index_t rest = e;
        Three o = split(rest, s.m), t = split(rest, s.k);
        index_t a = input(s, 0, o.at[0], t.at[0]), b = input(s, 1, o.at[1], t.at[1]), c = input(s, 2, o.at[2], t.at[2]);
        cols[e] = a < 0 || b < 0 || c < 0 ? zero<T>() : x[rest * size + (a * s.n[1] + b) * s.n[2] + c];
    }
}

// cols (planes, *k, *m) -> x (planes, *n): the inputs of each output, added where they were read.
template <class T> __global__ void col2im(T* x, const T* cols, index_t planes, GEOMETRY_PARAMETERS) {
    const Geometry s = GEOMETRY;
    typedef acc_t<T> A;
    index_t taps = s.k[0] * s.k[1] * s.k[2], outputs = s.m[0] * s.m[1] * s.m[2];
    index_t count = planes * s.n[0] * s.n[1] * s.n[2];
    for (index_t e = grid_first(); e < count; e += grid_stride()) {
        index_t rest = e;
        Three i = split(rest, s.n);
        A sum = zero<A>();
        for (index_t a = 0; a < s.k[0]; ++a) {
            index_t u = output(s, 0, i.at[0], a);
            if (u < 0) continue;
            for (index_t b = 0; b < s.k[1]; ++b) {
                index_t v = output(s, 1, i.at[1], b);
                if (v < 0) continue;
                for (index_t c = 0; c < s.k[2]; ++c) {
                    index_t w = output(s, 2, i.at[2], c);
                    if (w < 0) continue;
                    index_t tap = (a * s.k[1] + b) * s.k[2] + c;
                    sum += widen(cols[(rest * taps + tap) * outputs + (u * s.m[1] + v) * s.m[2] + w]);
                }
            }
        }
        x[e] = narrow<T>(sum);
    }
}

// y (N, groups * filters, *m): for outputs of few terms, for which matrix products would only move data.
template <class T> __global__ void conv(
    T* y, const T* x, const T* w, index_t examples, index_t groups, index_t filters, index_t channels,
    GEOMETRY_PARAMETERS) {
    const Geometry s = GEOMETRY;
    typedef acc_t<T> A;
    index_t size = s.n[0] * s.n[1] * s.n[2];
    index_t count = examples * groups * filters * s.m[0] * s.m[1] * s.m[2];
    for (index_t e = grid_first(); e < count; e += grid_stride()) {
        index_t rest = e;
        Three o = split(rest, s.m);
        index_t filter = rest % (groups * filters), example = rest / (groups * filters);
        const T* weights = w + filter * channels * s.k[0] * s.k[1] * s.k[2];
        const T* source = x + (example * groups + filter / filters) * channels * size;
        A sum = zero<A>();
        for (index_t c = 0; c < channels; ++c, source += size)
            for (index_t i = 0; i < s.k[0]; ++i)
                for (index_t j = 0; j < s.k[1]; ++j)
                    for (index_t l = 0; l < s.k[2]; ++l, ++weights) {
                        index_t p = input(s, 0, o.at[0], i), q = input(s, 1, o.at[1], j), r = input(s, 2, o.at[2], l);
                        if (p >= 0 && q >= 0 && r >= 0)
                            sum += widen(*weights) * widen(source[(p * s.n[1] + q) * s.n[2] + r]);
                    }
        y[e] = narrow<T>(sum);
    }
}

template <class T> __global__ void conv_input_adjoint(
    T* x, const T* g, const T* w, index_t examples, index_t groups, index_t filters, index_t channels,
    GEOMETRY_PARAMETERS) {
    const Geometry s = GEOMETRY;
    typedef acc_t<T> A;
    index_t taps = s.k[0] * s.k[1] * s.k[2], outputs = s.m[0] * s.m[1] * s.m[2];
    index_t count = examples * groups * channels * s.n[0] * s.n[1] * s.n[2];
    for (index_t e = grid_first(); e < count; e += grid_stride()) {
        index_t rest = e;
        Three i = split(rest, s.n);
        index_t channel = rest % (groups * channels), example = rest / (groups * channels);
        index_t group = channel / channels;
        A sum = zero<A>();
        for (index_t f = group * filters; f < (group + 1) * filters; ++f) {
            const T* weights = w + (f * channels + channel % channels) * taps;
            const T* source = g + (example * groups * filters + f) * outputs;
            for (index_t a = 0; a < s.k[0]; ++a)
                for (index_t b = 0; b < s.k[1]; ++b)
                    for (index_t c = 0; c < s.k[2]; ++c, ++weights) {
                        index_t p = output(s, 0, i.at[0], a), q = output(s, 1, i.at[1], b), r = output(s, 2, i.at[2], c);
                        if (p >= 0 && q >= 0 && r >= 0)
                            sum += widen(*weights) * widen(source[(p * s.m[1] + q) * s.m[2] + r]);
                    }
        }
        x[e] = narrow<T>(sum);
    }
}

// A block of threads for each entry of w; its threads share the entries of all examples.
template <class T> __global__ void conv_weight_adjoint(
    T* w, const T* g, const T* x, index_t examples, index_t groups, index_t filters, index_t channels,
    GEOMETRY_PARAMETERS) {
    const Geometry s = GEOMETRY;
    typedef acc_t<T> A;
    index_t size = s.n[0] * s.n[1] * s.n[2], outputs = s.m[0] * s.m[1] * s.m[2];
    index_t count = groups * filters * channels * s.k[0] * s.k[1] * s.k[2];
    for (index_t e = blockIdx.x; e < count; e += gridDim.x) {
        index_t rest = e;
        Three t = split(rest, s.k);
        index_t channel = rest % channels, filter = rest / channels;
        A sum = zero<A>();
        for (index_t q = threadIdx.x; q < examples * outputs; q += blockDim.x) {
            index_t example = q;
            Three o = split(example, s.m);
            index_t a = input(s, 0, o.at[0], t.at[0]), b = input(s, 1, o.at[1], t.at[1]), c = input(s, 2, o.at[2], t.at[2]);
            if (a < 0 || b < 0 || c < 0) continue;
            const T* source = x + ((example * groups + filter / filters) * channels + channel) * size;
            sum += widen(g[(example * groups * filters + filter) * outputs + q % outputs])
                 * widen(source[(a * s.n[1] + b) * s.n[2] + c]);
        }
        sum = block_reduce<add_op>(sum, zero<A>());
        if (threadIdx.x == 0) w[e] = narrow<T>(sum);
    }
}
