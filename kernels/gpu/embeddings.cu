// Rows of a table by index. Columns move in pieces of 16 bytes where they can.

template <class T> __device__ inline void load(T* to, const T* from, int count, bool packs) {
    if (packs) {
        *(Pack<T>*)to = *(const Pack<T>*)from;
    } else {
        for (int k = 0; k < count; ++k) to[k] = from[k];
    }
}

template <class T> struct nan_of {
    __device__ static T value() { return narrow<T>(limits<float>::infinity() - limits<float>::infinity()); }
};
template <class T> struct nan_of<complex_t<T>> {
    __device__ static complex_t<T> value() { return {nan_of<T>::value(), nan_of<T>::value()}; }
};

// -1 gives zeros, an id out of range NaN: a check on the host would wait for the device.
template <class T> __global__ void take_rows(T* out, const T* table, const long long* ids, index_t n, index_t rows,
                                             index_t d) {
    constexpr int width = Pack<T>::width;
    bool packs = packable<T>(out, d) && packable<T>(table, d);
    index_t tiles = (d + width - 1) / width;
    for (index_t i = grid_first(); i < n * tiles; i += grid_stride()) {
        index_t id = ids[i / tiles], c = i % tiles * width;
        int count = d - c < width ? (int)(d - c) : width;
        Pack<T> p;
        if (id >= 0 && id < rows) {
            load(p.at, table + id * d + c, count, packs);
        } else {
            T x = id == -1 ? narrow<T>(zero<acc_t<T>>()) : nan_of<T>::value();
            for (int k = 0; k < width; ++k) p.at[k] = x;
        }
        load(out + i / tiles * d + c, p.at, count, packs);
    }
}

// A block of 8 warps for a row and 32 pieces of its columns. ids are sorted, and `order` has their indices before that.
// Each warp takes every eighth entry of the row, and the sums of the warps are added in order.
template <class T> __global__ void add_rows(T* out, const long long* ids, const long long* order, const T* g, index_t n,
                                            index_t rows, index_t d) {
    typedef acc_t<T> A;
    constexpr int width = Pack<T>::width;
    __shared__ A partial[8 * 32 * width];
    bool packs = packable<T>(out, d) && packable<T>(g, d);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    index_t tiles = (d + 32 * width - 1) / (32 * width);
    for (index_t b = blockIdx.x; b < rows * tiles; b += gridDim.x) {
        index_t row = b / tiles, c = (b % tiles * 32 + lane) * width, ends[2];
        int count = d - c < width ? (int)(d - c) : width;
        for (int k = 0; k < 2; ++k) {  // the first entry of this row, and of the next
            index_t low = 0, high = n;
            while (low < high) {
                index_t middle = (low + high) / 2;
                if (ids[middle] < row + k) low = middle + 1; else high = middle;
            }
            ends[k] = low;
        }
        A sum[width];
        for (int k = 0; k < width; ++k) sum[k] = zero<A>();
        if (count > 0) {
            for (index_t i = ends[0] + warp; i < ends[1]; i += 8) {
                Pack<T> p;
                load(p.at, g + order[i] * d + c, count, packs);
                for (int k = 0; k < count; ++k) sum[k] = sum[k] + A(widen(p.at[k]));
            }
        }
        for (int k = 0; k < width; ++k) partial[(k * 8 + warp) * 32 + lane] = sum[k];
        __syncthreads();
        if (warp == 0 && count > 0) {
            Pack<T> p;
            for (int k = 0; k < count; ++k) {
                for (int w = 1; w < 8; ++w) sum[k] = sum[k] + partial[(k * 8 + w) * 32 + lane];
                p.at[k] = narrow<T>(sum[k]);
            }
            load(out + row * d + c, p.at, count, packs);
        }
        __syncthreads();
    }
}
