// Stencils over three dimensions. table: the shift of each tap against the entry of the same index.

__device__ inline index_t place(const index_t* at, index_t i, index_t j, index_t k, index_t n0, index_t n1, index_t n2) {
    index_t a = i + at[0], b = j + at[1], c = k + at[2];
    return a >= 0 && a < n0 && b >= 0 && b < n1 && c >= 0 && c < n2 ? (a * n1 + b) * n2 + c : -1;
}

template <class T, class W> __global__ void stencil(
    T* out, const T* x, const index_t* table, const W* weights, index_t taps, index_t examples,
    index_t n0, index_t n1, index_t n2, index_t m0, index_t m1, index_t m2) {
    for (index_t e = grid_first(); e < examples * m0 * m1 * m2; e += grid_stride()) {
        index_t k = e % m2, j = e / m2 % m1, i = e / (m2 * m1) % m0;
        const T* from = x + e / (m2 * m1 * m0) * n0 * n1 * n2;
        W sum = zero<W>();
        for (index_t t = 0; t < taps; ++t) {
            index_t p = place(table + 3 * t, i, j, k, n0, n1, n2);
            if (p >= 0) sum += weights[t] * widen(from[p]);
        }
        out[e] = narrow<T>(sum);
    }
}

// Row y of the grid is a tap, and column x a share of the entries; the caller adds the shares.
template <class T, class W> __global__ void stencil_weights(
    W* shares, const T* g, const T* x, const index_t* table, index_t examples,
    index_t n0, index_t n1, index_t n2, index_t m0, index_t m1, index_t m2) {
    const index_t* at = table + 3 * (index_t)blockIdx.y;
    W sum = zero<W>();
    for (index_t e = grid_first(); e < examples * m0 * m1 * m2; e += grid_stride()) {
        index_t k = e % m2, j = e / m2 % m1, i = e / (m2 * m1) % m0;
        index_t p = place(at, i, j, k, n0, n1, n2);
        if (p >= 0) sum += widen(g[e]) * widen(x[e / (m2 * m1 * m0) * n0 * n1 * n2 + p]);
    }
    sum = block_reduce<add_op>(sum, zero<W>());
    if (threadIdx.x == 0) shares[(index_t)blockIdx.y * gridDim.x + blockIdx.x] = sum;
}
