// Shared by all sources. No header is included: NVRTC has none of its own.
//
// T is the type in memory, acc_t<T> the one to compute in: float for the short types.

typedef long long index_t;

struct alignas(2) half_t { unsigned short bits; };
struct alignas(2) bfloat_t { unsigned short bits; };
template <class T> struct alignas(2 * sizeof(T)) complex_t { T re, im; };

#ifdef SPMD_EMULATED
inline float half_to_float(half_t h) { return emulated_half_to_float(h.bits); }
inline half_t float_to_half(float x) { return half_t{emulated_float_to_half(x)}; }
inline unsigned int float_bits(float x) { unsigned int u; memcpy(&u, &x, 4); return u; }
inline float bits_float(unsigned int u) { float x; memcpy(&x, &u, 4); return x; }
#else
__device__ inline float half_to_float(half_t h) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits));
    return x;
}
__device__ inline half_t float_to_half(float x) {
    half_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
    return h;
}
__device__ inline unsigned int float_bits(float x) { return __float_as_uint(x); }
__device__ inline float bits_float(unsigned int u) { return __uint_as_float(u); }
#endif

__device__ inline float bfloat_to_float(bfloat_t b) { return bits_float((unsigned int)b.bits << 16); }
__device__ inline bfloat_t float_to_bfloat(float x) {
    unsigned int u = float_bits(x);
    if (x != x) return bfloat_t{(unsigned short)((u >> 16) | 0x40)};  // a NaN stays one
    return bfloat_t{(unsigned short)((u + 0x7fff + ((u >> 16) & 1)) >> 16)};  // ties to even
}

template <class T> struct accumulator { typedef T type; };
template <> struct accumulator<half_t> { typedef float type; };
template <> struct accumulator<bfloat_t> { typedef float type; };
template <class T> using acc_t = typename accumulator<T>::type;

template <class T> __device__ inline T widen(T x) { return x; }
__device__ inline float widen(half_t x) { return half_to_float(x); }
__device__ inline float widen(bfloat_t x) { return bfloat_to_float(x); }

template <class T> struct narrowing { template <class A> __device__ static T of(A x) { return T(x); } };
template <> struct narrowing<half_t> { __device__ static half_t of(float x) { return float_to_half(x); } };
template <> struct narrowing<bfloat_t> { __device__ static bfloat_t of(float x) { return float_to_bfloat(x); } };
template <class T, class A> __device__ inline T narrow(A x) { return narrowing<T>::of(x); }

// Complex numbers, as far as kernels need them.
template <class T> __device__ inline complex_t<T> operator+(complex_t<T> a, complex_t<T> b) {
    return complex_t<T>{a.re + b.re, a.im + b.im};
}
template <class T> __device__ inline complex_t<T> operator-(complex_t<T> a, complex_t<T> b) {
    return complex_t<T>{a.re - b.re, a.im - b.im};
}
template <class T> __device__ inline complex_t<T> operator*(complex_t<T> a, complex_t<T> b) {
    return complex_t<T>{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <class T> __device__ inline complex_t<T>& operator+=(complex_t<T>& a, complex_t<T> b) { return a = a + b; }

template <class T> struct zeros { __device__ static T value() { return T(0); } };
template <> struct zeros<half_t> { __device__ static half_t value() { return half_t{0}; } };
template <> struct zeros<bfloat_t> { __device__ static bfloat_t value() { return bfloat_t{0}; } };
template <class T> struct zeros<complex_t<T>> { __device__ static complex_t<T> value() { return {T(0), T(0)}; } };
template <class T> __device__ inline T zero() { return zeros<T>::value(); }

// Constants
template <class T> struct limits;
template <> struct limits<float> {
    __device__ static float infinity() { return bits_float(0x7f800000u); }
    __device__ static float nan() { return bits_float(0x7fc00000u); }
};
template <> struct limits<double> {
    __device__ static double infinity() { return (double)bits_float(0x7f800000u); }
    __device__ static double nan() { return (double)bits_float(0x7fc00000u); }
};

// As many items as make 16 bytes, moved in one access.
template <class T> struct alignas(16) Pack {
    static constexpr int width = sizeof(T) < 16 ? 16 / sizeof(T) : 1;
    T at[width];
};
template <class T> __device__ inline bool packable(const void* p, index_t n) {
    return ((unsigned long long)p & 15) == 0 && n % Pack<T>::width == 0;
}

// A thread of a grid handles the items i = first, first + stride, ...
__device__ inline index_t grid_first() { return (index_t)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline index_t grid_stride() { return (index_t)gridDim.x * blockDim.x; }

// An array entry by entry: step(index, count), as many at once as make 16 bytes if `packs`: all arrays are aligned so.
template <class T, class F> __device__ inline void each_pack(index_t n, bool packs, F step) {
    constexpr int width = Pack<T>::width;
    index_t whole = packs ? n / width : 0;
    for (index_t i = grid_first(); i < whole; i += grid_stride()) step(i * width, width);
    for (index_t i = whole * width + grid_first(); i < n; i += grid_stride()) step(i, 1);
}

// A piece of an array, moved by 16 bytes where it is whole.
template <class T, int N> struct alignas(16) Piece { T at[N]; };
template <class T, int N> __device__ inline void get(Piece<T, N>& to, const T* from, int count) {
    if (count == N && sizeof(to) % 16 == 0) {
        for (int k = 0; k < N; k += 16 / (int)sizeof(T)) *(Pack<T>*)(to.at + k) = *(const Pack<T>*)(from + k);
    } else {
        for (int k = 0; k < count; ++k) to.at[k] = from[k];
    }
}
template <class T, int N> __device__ inline void set(T* to, const Piece<T, N>& from, int count) {
    if (count == N && sizeof(from) % 16 == 0) {
        for (int k = 0; k < N; k += 16 / (int)sizeof(T)) *(Pack<T>*)(to + k) = *(const Pack<T>*)(from.at + k);
    } else {
        for (int k = 0; k < count; ++k) to[k] = from.at[k];
    }
}

// Reductions over a block of one dimension: each thread gives a value and gets the result. At most 1024 threads, in whole
// warps.
struct add_op { template <class A> __device__ static A of(A a, A b) { return a + b; } };
struct max_op { template <class A> __device__ static A of(A a, A b) { return a != a || a > b ? a : b; } };

template <class A> __device__ inline A shuffle_xor(A x, int step) { return __shfl_xor_sync(0xffffffffu, x, step); }
template <class A> __device__ inline complex_t<A> shuffle_xor(complex_t<A> x, int step) {
    return complex_t<A>{shuffle_xor(x.re, step), shuffle_xor(x.im, step)};
}

template <class Op, class A> __device__ inline A block_reduce(A x, A neutral) {
    __shared__ A partial[32];
    for (int step = 16; step > 0; step >>= 1) x = Op::of(x, shuffle_xor(x, step));
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = (blockDim.x + 31) >> 5;
    __syncthreads();  // an earlier reduction has been read
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    x = lane < warps ? partial[lane] : neutral;
    for (int step = 16; step > 0; step >>= 1) x = Op::of(x, shuffle_xor(x, step));
    return x;
}

// A row, shared by the threads of a block: f(entry, its index) for each entry that this thread has. map_row writes the
// results to out.
template <class T, class F> __device__ inline void each_of_row(const T* x, index_t n, F f) {
    if (packable<T>(x, n)) {
        for (index_t j = threadIdx.x; j < n / Pack<T>::width; j += blockDim.x) {
            Pack<T> p = ((const Pack<T>*)x)[j];
            for (int k = 0; k < Pack<T>::width; ++k) f(acc_t<T>(widen(p.at[k])), j * Pack<T>::width + k);
        }
    } else {
        for (index_t j = threadIdx.x; j < n; j += blockDim.x) f(acc_t<T>(widen(x[j])), j);
    }
}

template <class T, class F> __device__ inline void map_row(T* out, const T* x, index_t n, F f) {
    if (packable<T>(x, n) && packable<T>(out, n)) {
        for (index_t j = threadIdx.x; j < n / Pack<T>::width; j += blockDim.x) {
            Pack<T> p = ((const Pack<T>*)x)[j], q;
            for (int k = 0; k < Pack<T>::width; ++k)
                q.at[k] = narrow<T>(f(acc_t<T>(widen(p.at[k])), j * Pack<T>::width + k));
            ((Pack<T>*)out)[j] = q;
        }
    } else {
        for (index_t j = threadIdx.x; j < n; j += blockDim.x) out[j] = narrow<T>(f(acc_t<T>(widen(x[j])), j));
    }
}
