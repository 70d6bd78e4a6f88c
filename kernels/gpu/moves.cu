// Sums of blocks: each thread takes as many entries as make 16 bytes, of every block in turn.

template <class T> __global__ void add(T* out, const T* b0, const T* b1, const T* b2, const T* b3, const T* b4,
                                       const T* b5, const T* b6, const T* b7, index_t count, index_t n, index_t packs) {
    constexpr int N = Pack<T>::width;
    const T* blocks[8] = {b0, b1, b2, b3, b4, b5, b6, b7};
    each_pack<T>(n, packs != 0, [=](index_t i, int length) {
        Piece<T, N> p;
        acc_t<T> sums[N];
        get(p, b0 + i, length);
        for (int k = 0; k < length; ++k) sums[k] = widen(p.at[k]);
        for (index_t b = 1; b < count; ++b) {
            get(p, blocks[b] + i, length);
            for (int k = 0; k < length; ++k) sums[k] = sums[k] + widen(p.at[k]);
        }
        for (int k = 0; k < length; ++k) p.at[k] = narrow<T>(sums[k]);
        set(out + i, p, length);
    });
}
