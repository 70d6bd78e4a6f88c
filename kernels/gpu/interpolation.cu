// Along an axis: a thread computes a pack of neighbours of an output row, or one entry where the axis is the last one.
// At points: a thread for each point and channel. The adjoint sorts the terms by their index, so that one thread sums the
// terms of an entry, in the order of the points.

#define FOR_ROWS(rows) \
    for (index_t row = (index_t)blockIdx.x * blockDim.y + threadIdx.y; row < (rows); \
         row += (index_t)gridDim.x * blockDim.y)
#define FOR_ALONG(i, n) \
    for (index_t i = (index_t)blockIdx.y * blockDim.x + threadIdx.x; i < (n); i += (index_t)gridDim.y * blockDim.x)

// x: (outer, n, inner), out: (outer, m, inner), index and weight: (m, taps).
template <class T>
__global__ void resample(T* out, const T* x, const int* index, const acc_t<T>* weight, index_t outer, index_t n,
                         index_t m, index_t inner, index_t taps) {
    typedef acc_t<T> A;
    constexpr int width = Pack<T>::width;
    bool packs = packable<T>(x, inner) && packable<T>(out, inner);
    index_t each = packs ? inner / width : inner;
    FOR_ROWS(outer) {
        FOR_ALONG(i, m * each) {
            index_t o = each == 1 ? i : i / each, c = i - o * each;
            const int* at = index + o * taps;
            const A* w = weight + o * taps;
            if (packs) {
                A sum[width];
                for (int e = 0; e < width; ++e) sum[e] = A(0);
                for (index_t k = 0; k < taps; ++k) {
                    Pack<T> p = ((const Pack<T>*)(x + (row * n + at[k]) * inner))[c];
                    for (int e = 0; e < width; ++e) sum[e] += w[k] * widen(p.at[e]);
                }
                Pack<T> q;
                for (int e = 0; e < width; ++e) q.at[e] = narrow<T>(sum[e]);
                ((Pack<T>*)(out + (row * m + o) * inner))[c] = q;
            } else {
                A sum = A(0);
                for (index_t k = 0; k < taps; ++k) sum += w[k] * widen(x[(row * n + at[k]) * inner + c]);
                out[(row * m + o) * inner + c] = narrow<T>(sum);
            }
        }
    }
}

#define FAR 4611686018427387904.0

// As `spmd.kernels.taps.continued`, with -1 where there is no entry.
__device__ inline index_t continued(index_t i, index_t n, index_t boundary) {
    if (i >= 0 && i < n) return i;
    if (boundary == 0) return -1;
    if (boundary == 1) return i < 0 ? 0 : n - 1;
    index_t period = boundary == 2 ? n : 2 * (n - 1);
    if (period == 0) return 0;
    i %= period;
    if (i < 0) i += period;
    return boundary == 2 || i < n ? i : period - i;
}

struct Taps {
    index_t place[3][4];
    double weight[3][4];
    int count[3];
};

// The taps of a point. table: polynomials, (dims, taps, 4).
template <class P>
__device__ inline void taps_of_point(Taps& reads, const P* point, const double* table, index_t dims, index_t taps,
                                 double shift, index_t boundary, index_t nd, index_t nh, index_t nw) {
    index_t n[3] = {nd, nh, nw};
    for (int row = 0; row < 3; ++row) {
        index_t a = row - (3 - dims);
        reads.count[row] = a < 0 ? 1 : taps;
        if (a < 0) {
            reads.place[row][0] = 0;
            reads.weight[row][0] = 1;
            continue;
        }
        double q = (double)point[a] + shift, low = floor(q), t = q - low;
        index_t base = 0;
        if (fabs(low) <= FAR) base = (index_t)low;
        else if (fabs(low) < limits<double>::infinity()) base = low > 0 ? (index_t)FAR : -(index_t)FAR;
        for (index_t k = 0; k < taps; ++k) {
            const double* c = table + (a * taps + k) * 4;
            reads.place[row][k] = continued(base + k - (taps - 1) / 2, n[row], boundary);
            reads.weight[row][k] = ((c[3] * t + c[2]) * t + c[1]) * t + c[0];
        }
    }
}

template <class T, class P>
__global__ void sample(T* out, const T* x, const P* points, const double* table, index_t channels, index_t m,
                       index_t dims, index_t taps, double shift, index_t boundary, index_t nd, index_t nh,
                       index_t nw) {
    typedef acc_t<T> A;
    FOR_ALONG(j, m) {
        Taps reads;
        taps_of_point(reads, points + j * dims, table, dims, taps, shift, boundary, nd, nh, nw);
        FOR_ROWS(channels) {
            A sum = A(0);
            for (int d = 0; d < reads.count[0]; ++d) {
                if (reads.place[0][d] < 0) continue;
                for (int h = 0; h < reads.count[1]; ++h) {
                    if (reads.place[1][h] < 0) continue;
                    double share = reads.weight[0][d] * reads.weight[1][h];
                    const T* from = x + ((row * nd + reads.place[0][d]) * nh + reads.place[1][h]) * nw;
                    for (int w = 0; w < reads.count[2]; ++w)
                        if (reads.place[2][w] >= 0)
                            sum += A(share * reads.weight[2][w]) * widen(from[reads.place[2][w]]);
                }
            }
            out[row * m + j] = narrow<T>(sum);
        }
    }
}

// The index and the weight of each tap of each point, in the order (point, tap). Outside: the index `size`.
template <class P>
__global__ void inject_taps(long long* place, double* weight, const P* points, const double* table, index_t m,
                            index_t dims, index_t taps, double shift, index_t boundary, index_t nd, index_t nh,
                            index_t nw) {
    FOR_ALONG(j, m) {
        Taps reads;
        taps_of_point(reads, points + j * dims, table, dims, taps, shift, boundary, nd, nh, nw);
        index_t to = j * reads.count[0] * reads.count[1] * reads.count[2];
        for (int d = 0; d < reads.count[0]; ++d)
            for (int h = 0; h < reads.count[1]; ++h)
                for (int w = 0; w < reads.count[2]; ++w, ++to) {
                    index_t pd = reads.place[0][d], ph = reads.place[1][h], pw = reads.place[2][w];
                    bool inside = pd >= 0 && ph >= 0 && pw >= 0;
                    place[to] = inside ? (pd * nh + ph) * nw + pw : nd * nh * nw;
                    weight[to] = reads.weight[0][d] * reads.weight[1][h] * reads.weight[2][w];
                }
    }
}

// order: the taps sorted by index, stably. out: zeros.
template <class T>
__global__ void inject(T* out, const T* g, const long long* place, const double* weight, const long long* order,
                       index_t channels, index_t m, index_t taps, index_t size) {
    typedef acc_t<T> A;
    FOR_ALONG(i, m * taps) {
        index_t to = place[order[i]];
        if (to == size || (i > 0 && place[order[i - 1]] == to)) continue;  // outside, or not the first of its run
        FOR_ROWS(channels) {
            A sum = A(0);
            for (index_t k = i; k < m * taps && place[order[k]] == to; ++k)
                sum += A(weight[order[k]]) * widen(g[row * m + order[k] / taps]);
            out[row * size + to] = narrow<T>(sum);
        }
    }
}
