// Rows: a block for each. Channels: a block for `lanes` of them, 32 where the entries of a channel are not neighbours
// (inner = 1), so that neighbouring threads read neighbours; blockIdx.y is the part of the entries that it reads.

template <class A> __device__ inline A over_lanes(A x, int lanes) {  // the sum over the threads of a lane, to all
    if (lanes == 1) return block_reduce<add_op>(x, A(0));
    __shared__ A all[1024];
    __syncthreads();
    all[threadIdx.x] = x;
    __syncthreads();
    A sum = A(0);
    for (int t = threadIdx.x % lanes; t < (int)blockDim.x; t += lanes) sum += all[t];
    return sum;
}

// f(offset) for the entries of a channel that this thread has.
template <class F> __device__ inline void each_entry(index_t c, index_t outer, index_t channels, index_t inner,
                                                     index_t lanes, F f) {
    index_t places = outer * inner, part = (places + gridDim.y - 1) / gridDim.y;
    index_t stop = (blockIdx.y + 1) * part < places ? (blockIdx.y + 1) * part : places;
    for (index_t e = blockIdx.y * part + threadIdx.x / lanes; e < stop; e += blockDim.x / lanes)
        f((e / inner * channels + c) * inner + e % inner);
}

template <class T>
__global__ void moments(acc_t<T>* out, const T* x, index_t outer, index_t channels, index_t inner, index_t lanes) {
    typedef acc_t<T> A;
    index_t size = gridDim.y * channels;
    for (index_t first = blockIdx.x * lanes; first < channels; first += gridDim.x * lanes) {
        index_t c = first + threadIdx.x % lanes, count = 0;
        A sum = A(0), square = A(0), base = c < channels ? A(widen(x[c * inner])) : A(0);  // nearer to the mean than 0
        if (c < channels)
            each_entry(c, outer, channels, inner, lanes, [&](index_t i) { sum += A(widen(x[i])) - base; ++count; });
        A n = over_lanes(A(count), (int)lanes);
        A mean = base + over_lanes(sum, (int)lanes) / (n > A(0) ? n : A(1));
        if (c < channels)
            each_entry(c, outer, channels, inner, lanes, [&](index_t i) {
                A d = A(widen(x[i])) - mean;
                square += d * d;
            });
        square = over_lanes(square, (int)lanes);
        if (threadIdx.x < lanes && c < channels) {
            out[blockIdx.y * channels + c] = n;
            out[size + blockIdx.y * channels + c] = mean;
            out[2 * size + blockIdx.y * channels + c] = square;
        }
    }
}

template <class T>
__global__ void channel_sums(acc_t<T>* out, const T* g, const T* x, const acc_t<T>* mean, index_t outer,
                             index_t channels, index_t inner, index_t lanes) {
    typedef acc_t<T> A;
    for (index_t start = blockIdx.x * lanes; start < channels; start += gridDim.x * lanes) {
        index_t c = start + threadIdx.x % lanes;
        A first = A(0), second = A(0);
        if (c < channels) {
            A m = mean[c];
            each_entry(c, outer, channels, inner, lanes, [&](index_t i) {
                A h = widen(g[i]);
                first += h;
                second += h * (A(widen(x[i])) - m);
            });
        }
        first = over_lanes(first, (int)lanes);
        second = over_lanes(second, (int)lanes);
        if (threadIdx.x < lanes && c < channels) {
            out[blockIdx.y * channels + c] = first;
            out[(gridDim.y + blockIdx.y) * channels + c] = second;
        }
    }
}

template <class T>
__global__ void channel_affine(T* out, const T* x, const acc_t<T>* mean, const acc_t<T>* scale, const acc_t<T>* shift,
                               index_t size, index_t channels, index_t inner) {
    typedef acc_t<T> A;
    const index_t width = Pack<T>::width;
    if (packable<T>(x, size) && packable<T>(out, size)) {
        for (index_t i = grid_first(); i < size / width; i += grid_stride()) {
            Pack<T> p = ((const Pack<T>*)x)[i], q;
            for (int k = 0; k < width; ++k) {
                index_t c = (i * width + k) / inner % channels;
                q.at[k] = narrow<T>((A(widen(p.at[k])) - mean[c]) * scale[c] + shift[c]);
            }
            ((Pack<T>*)out)[i] = q;
        }
    } else {
        for (index_t i = grid_first(); i < size; i += grid_stride()) {
            index_t c = i / inner % channels;
            out[i] = narrow<T>((A(widen(x[i])) - mean[c]) * scale[c] + shift[c]);
        }
    }
}

template <class T>
__global__ void normalize(T* out, acc_t<T>* mean, acc_t<T>* rstd, const T* x, const acc_t<T>* weight,
                          const acc_t<T>* bias, double eps, index_t centred, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        const T* y = x + i * n;
        A m = A(0), square = A(0);
        if (centred) {
            each_of_row(y, n, [&](A v, index_t) { m += v; });
            m = block_reduce<add_op>(m, A(0)) / A(n);
        }
        each_of_row(y, n, [&](A v, index_t) { square += (v - m) * (v - m); });
        A r = A(1) / sqrt(block_reduce<add_op>(square, A(0)) / A(n) + A(eps));
        if (threadIdx.x == 0) {
            mean[i] = m;
            rstd[i] = r;
        }
        map_row(out + i * n, y, n, [=](A v, index_t j) {
            A z = (v - m) * r;
            if (weight) z *= weight[j];
            return bias ? z + bias[j] : z;
        });
    }
}

template <class T>
__global__ void normalize_vjp(T* out, const T* g, const T* x, const acc_t<T>* weight, const acc_t<T>* mean,
                              const acc_t<T>* rstd, index_t centred, index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t i = blockIdx.x; i < rows; i += gridDim.x) {
        const T *h = g + i * n, *y = x + i * n;
        A m = mean[i], r = rstd[i], first = A(0), second = A(0);
        each_of_row(h, n, [&](A u, index_t j) {
            if (weight) u *= weight[j];
            first += u;
            second += u * ((A(widen(y[j])) - m) * r);
        });
        first = block_reduce<add_op>(first, A(0)) / A(n);
        second = block_reduce<add_op>(second, A(0)) / A(n);
        if (!centred) first = A(0);
        map_row(out + i * n, h, n, [=](A u, index_t j) {
            if (weight) u *= weight[j];
            return r * (u - first - (A(widen(y[j])) - m) * r * second);
        });
    }
}

template <class T>
__global__ void weights_vjp(acc_t<T>* out, const T* g, const T* x, const acc_t<T>* mean, const acc_t<T>* rstd,
                            index_t rows, index_t n) {
    typedef acc_t<T> A;
    for (index_t start = blockIdx.x * 32; start < n; start += gridDim.x * 32) {
        index_t c = start + threadIdx.x % 32;
        A first = A(0), second = A(0);
        if (c < n)
            each_entry(c, rows, n, 1, 32, [&](index_t i) {
                A h = widen(g[i]);
                first += h * ((A(widen(x[i])) - mean[i / n]) * rstd[i / n]);
                second += h;
            });
        first = over_lanes(first, 32);
        second = over_lanes(second, 32);
        if (threadIdx.x < 32 && c < n) {
            out[blockIdx.y * n + c] = first;
            out[(gridDim.y + blockIdx.y) * n + c] = second;
        }
    }
}
