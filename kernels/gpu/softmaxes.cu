// A block per row. Each thread reads its entries in a first pass for the maximum and the sum together (a running sum is
// rescaled when the maximum grows: Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018).

template <class A> struct Normalizer { A top, sum; };

template <class A> __device__ inline void take(Normalizer<A>& s, A x) {
    if (x > s.top) {
        s.sum = s.sum * exp(s.top - x) + A(1);
        s.top = x;
    } else {
        s.sum += x == s.top ? A(1) : exp(x - s.top);  // -inf - -inf is NaN
    }
}

template <class T> __device__ inline Normalizer<acc_t<T>> normalizer(const T* x, index_t n) {
    typedef acc_t<T> A;
    Normalizer<A> s{-limits<A>::infinity(), A(0)};
    each_of_row(x, n, [&](A v, index_t) { take(s, v); });
    A top = block_reduce<max_op>(s.top, -limits<A>::infinity());
    A part = s.top == top ? s.sum : s.sum * exp(s.top - top);
    A sum = block_reduce<add_op>(s.sum == A(0) ? A(0) : part, A(0));
    return Normalizer<A>{top, sum};
}

template <class T> __global__ void softmax(T* out, const T* x, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        Normalizer<A> s = normalizer(x + i * n, n);
        map_row(out + i * n, x + i * n, n, [=](A v, index_t) { return exp(v - s.top) / s.sum; });
    }
}

template <class T> __global__ void log_softmax(T* out, const T* x, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        Normalizer<A> s = normalizer(x + i * n, n);
        A log_sum = log(s.sum);
        map_row(out + i * n, x + i * n, n, [=](A v, index_t) { return v - s.top - log_sum; });
    }
}

template <class T> __global__ void softmax_vjp(T* out, const T* g, const T* y, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        const T *gi = g + i * n, *yi = y + i * n;
        A inner = A(0);
        for (index_t j = threadIdx.x; j < n; j += blockDim.x) inner += widen(gi[j]) * widen(yi[j]);
        inner = block_reduce<add_op>(inner, A(0));
        for (index_t j = threadIdx.x; j < n; j += blockDim.x)
            out[i * n + j] = narrow<T>(widen(yi[j]) * (widen(gi[j]) - inner));
    }
}

template <class T> __global__ void log_softmax_vjp(T* out, const T* g, const T* y, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        const T *gi = g + i * n, *yi = y + i * n;
        A sum = A(0);
        for (index_t j = threadIdx.x; j < n; j += blockDim.x) sum += widen(gi[j]);
        sum = block_reduce<add_op>(sum, A(0));
        for (index_t j = threadIdx.x; j < n; j += blockDim.x)
            out[i * n + j] = narrow<T>(widen(gi[j]) - exp(A(widen(yi[j]))) * sum);
    }
}

template <class T> __global__ void logsumexp(T* out, const T* x, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        Normalizer<A> s = normalizer(x + i * n, n);
        A y = s.top + log(s.sum);
        if (s.top == limits<A>::infinity() || s.top == -limits<A>::infinity()) y = s.sum == s.sum ? s.top : s.sum;
        if (threadIdx.x == 0) out[i] = narrow<T>(y);
    }
}

template <class T> __global__ void scaled_exp(T* out, const T* g, const T* x, const T* y, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        A scale = widen(g[i]), shift = widen(y[i]);
        if (shift == -limits<A>::infinity()) shift = A(0);
        map_row(out + i * n, x + i * n, n, [=](A v, index_t) { return scale * exp(v - shift); });
    }
}

template <class T>
__global__ void exp_sums(T* out, const T* x, const T* top, const long long* labels, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        const T* xi = x + i * n;
        A shift = widen(top[i]), sum = A(0), plain = A(0);
        if (shift == -limits<A>::infinity()) shift = A(0);
        each_of_row(xi, n, [&](A v, index_t) { sum += exp(v - shift); plain += v; });
        sum = block_reduce<add_op>(sum, A(0));
        plain = block_reduce<add_op>(plain, A(0));
        if (threadIdx.x == 0) {
            bool inside = labels[i] >= 0 && labels[i] < n;
            out[i] = narrow<T>(sum);
            out[rows + i] = inside ? xi[labels[i]] : narrow<T>(A(0));
            out[2 * rows + i] = narrow<T>(plain);
        }
    }
}

// d is null where only the loss is wanted. A label out of range gives NaN: the host does not check labels.
template <class T>
__global__ void cross_entropy(T* loss, T* d, const T* x, const long long* labels, double smoothing, index_t ignore,
                              index_t rows, index_t n) {
    typedef acc_t<T> A;
    const A smooth = A(smoothing), share = smooth / A(n);
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        const T* xi = x + i * n;
        index_t label = labels[i];
        if (label == ignore) {
            if (threadIdx.x == 0) loss[i] = narrow<T>(A(0));
            if (d) map_row(d + i * n, xi, n, [](A, index_t) { return A(0); });
            continue;
        }
        bool inside = label >= 0 && label < n;
        Normalizer<A> s = normalizer(xi, n);
        A value = log(s.sum) - (A(1) - smooth) * (inside ? widen(xi[label]) - s.top : limits<A>::nan());
        if (smoothing != 0) {
            A rest = A(0);
            each_of_row(xi, n, [&](A v, index_t) { rest += v - s.top; });
            value -= share * block_reduce<add_op>(rest, A(0));
        }
        if (threadIdx.x == 0) loss[i] = narrow<T>(value);
        if (d)
            map_row(d + i * n, xi, n, [=](A v, index_t j) {
                return exp(v - s.top) / s.sum - share - (j == label ? A(1) - smooth : A(0));
            });
    }
}

template <class T>
__global__ void soft_cross_entropy(T* loss, T* d, const T* x, const T* t, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        const T *xi = x + i * n, *ti = t + i * n;
        Normalizer<A> s = normalizer(xi, n);
        A weight = A(0), value = A(0);
        each_of_row(xi, n, [&](A v, index_t j) {
            A w = widen(ti[j]);
            weight += w;
            if (w != A(0)) value += w * (v - s.top);
        });
        weight = block_reduce<add_op>(weight, A(0));
        value = block_reduce<add_op>(value, A(0));
        if (threadIdx.x == 0) loss[i] = narrow<T>(weight * log(s.sum) - value);
        if (d) {
            A part = weight / s.sum;
            map_row(d + i * n, xi, n, [=](A v, index_t j) { return exp(v - s.top) * part - widen(ti[j]); });
        }
    }
}
