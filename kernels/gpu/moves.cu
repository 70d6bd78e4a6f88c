// Sums of blocks: each thread takes as many entries as make 16 bytes, of every block.

// The sums of COUNT blocks at i, in the order of `spmd.kernels.pairwise`: of the left half and of the right half.
template <class T, int COUNT>
__device__ inline void sum_pack(acc_t<T>* sums, const T* const* blocks, index_t i, int length) {
    constexpr int N = Pack<T>::width;
    if constexpr (COUNT == 1) {
        Piece<T, N> p;
        get(p, blocks[0] + i, length);
        for (int k = 0; k < length; ++k) sums[k] = widen(p.at[k]);
    } else {
        constexpr int half = COUNT < 4 ? 1 : COUNT < 8 ? 2 : 4;
        constexpr int left = COUNT < 3 * half ? COUNT - half : 2 * half;
        acc_t<T> others[N];
        sum_pack<T, left>(sums, blocks, i, length);
        sum_pack<T, COUNT - left>(others, blocks + left, i, length);
        for (int k = 0; k < length; ++k) sums[k] = sums[k] + others[k];
    }
}

template <class T, int COUNT>
__device__ inline void add_blocks(T* out, const T* const* blocks, index_t n, index_t packs) {
    constexpr int N = Pack<T>::width;
    each_pack<T>(n, packs != 0, [=](index_t i, int length) {
        acc_t<T> sums[N];
        Piece<T, N> p;
        sum_pack<T, COUNT>(sums, blocks, i, length);
        for (int k = 0; k < length; ++k) p.at[k] = narrow<T>(sums[k]);
        set(out + i, p, length);
    });
}

template <class T> __global__ void add(T* out, const T* b0, const T* b1, const T* b2, const T* b3, const T* b4,
                                       const T* b5, const T* b6, const T* b7, index_t count, index_t n, index_t packs) {
    const T* blocks[8] = {b0, b1, b2, b3, b4, b5, b6, b7};
    switch (count) {
        case 2: return add_blocks<T, 2>(out, blocks, n, packs);
        case 3: return add_blocks<T, 3>(out, blocks, n, packs);
        case 4: return add_blocks<T, 4>(out, blocks, n, packs);
        case 5: return add_blocks<T, 5>(out, blocks, n, packs);
        case 6: return add_blocks<T, 6>(out, blocks, n, packs);
        case 7: return add_blocks<T, 7>(out, blocks, n, packs);
        case 8: return add_blocks<T, 8>(out, blocks, n, packs);
    }
}
