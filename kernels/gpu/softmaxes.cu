// A block per row. Each thread reads its entries in a first pass for the maximum and the sum together (a running sum is
// rescaled when the maximum grows: Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018).

template <class A> struct Normalizer { A top, sum; };

template <class A> __device__ inline void take(Normalizer<A>& s, A x) {
    if (x > s.top) {
        s.sum = s.sum * exp(s.top - x) + A(1);
        s.top = x;
    } else {
        s.sum += x == s.top ? A(1) : exp(x - s.top);  // -inf - -inf is no number
    }
}

template <class T> __device__ inline Normalizer<acc_t<T>> normalizer(const T* x, index_t n) {
    typedef acc_t<T> A;
    Normalizer<A> s{-limits<A>::infinity(), A(0)};
    if (packable<T>(x, n)) {
        for (index_t j = threadIdx.x; j < n / Pack<T>::width; j += blockDim.x) {
            Pack<T> p = ((const Pack<T>*)x)[j];
            for (int k = 0; k < Pack<T>::width; ++k) take(s, widen(p.at[k]));
        }
    } else {
        for (index_t j = threadIdx.x; j < n; j += blockDim.x) take(s, widen(x[j]));
    }
    A top = block_reduce<max_op>(s.top, -limits<A>::infinity());
    A part = s.top == top ? s.sum : s.sum * exp(s.top - top);
    A sum = block_reduce<add_op>(s.sum == A(0) ? A(0) : part, A(0));
    return Normalizer<A>{top, sum};
}

template <class T, class F> __device__ inline void map_row(T* out, const T* x, index_t n, F f) {
    if (packable<T>(x, n) && packable<T>(out, n)) {
        for (index_t j = threadIdx.x; j < n / Pack<T>::width; j += blockDim.x) {
            Pack<T> p = ((const Pack<T>*)x)[j], q;
            for (int k = 0; k < Pack<T>::width; ++k) q.at[k] = narrow<T>(f(widen(p.at[k])));
            ((Pack<T>*)out)[j] = q;
        }
    } else {
        for (index_t j = threadIdx.x; j < n; j += blockDim.x) out[j] = narrow<T>(f(widen(x[j])));
    }
}

template <class T> __global__ void softmax(T* out, const T* x, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        Normalizer<A> s = normalizer(x + i * n, n);
        map_row(out + i * n, x + i * n, n, [=](A v) { return exp(v - s.top) / s.sum; });
    }
}

template <class T> __global__ void log_softmax(T* out, const T* x, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        Normalizer<A> s = normalizer(x + i * n, n);
        A log_sum = log(s.sum);
        map_row(out + i * n, x + i * n, n, [=](A v) { return v - s.top - log_sum; });
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
