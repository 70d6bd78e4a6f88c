// Blocks that are put together: each thread takes as many entries as make 16 bytes, of every block in turn.

template <class T> __global__ void add(T* out, const T* b0, const T* b1, const T* b2, const T* b3, const T* b4,
                                       const T* b5, const T* b6, const T* b7, index_t count, index_t n, index_t packs) {
    typedef acc_t<T> A;
    constexpr int width = Pack<T>::width;
    const T* blocks[8] = {b0, b1, b2, b3, b4, b5, b6, b7};
    index_t whole = packs ? n / width : 0;
    for (index_t i = grid_first(); i < whole; i += grid_stride()) {
        Pack<T> p = ((const Pack<T>*)b0)[i];
        A sums[width];
        for (int k = 0; k < width; ++k) sums[k] = widen(p.at[k]);
        for (index_t b = 1; b < count; ++b) {
            p = ((const Pack<T>*)blocks[b])[i];
            for (int k = 0; k < width; ++k) sums[k] = sums[k] + widen(p.at[k]);
        }
        for (int k = 0; k < width; ++k) p.at[k] = narrow<T>(sums[k]);
        ((Pack<T>*)out)[i] = p;
    }
    for (index_t i = whole * width + grid_first(); i < n; i += grid_stride()) {
        A sum = widen(b0[i]);
        for (index_t b = 1; b < count; ++b) sum = sum + widen(blocks[b][i]);
        out[i] = narrow<T>(sum);
    }
}
