// CUDA's model of execution on one core: the threads of a block are fibers that take turns at barriers.
//
// Blocks run one after the other. Between two barriers the fibers run in an order that can be reversed, so a result
// that depends on it shows. A barrier that some living thread never reaches is an error, not a hang.
#include <csetjmp>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#define SPMD_EMULATED 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __restrict__

using std::exp; using std::log; using std::sqrt; using std::fabs; using std::tanh; using std::erf; using std::erfc;
using std::fma;
using std::floor; using std::ceil; using std::pow; using std::log1p; using std::expm1; using std::sin; using std::cos;
using std::fmin; using std::fmax; using std::isnan; using std::isinf; using std::rint; using std::round;

struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct uint3 { unsigned x, y, z; };
static dim3 gridDim, blockDim;
static uint3 blockIdx;

namespace emulated {
constexpr size_t STACK = 64 << 10;
struct Barrier { int arrived = 0, members = 0; unsigned generation = 0; };
struct Fiber {
    ucontext_t context;  // enters it for the first time
    jmp_buf here;        // where it goes on: unlike swapcontext, a jump asks nothing of the kernel
    bool entered = false;
    char* stack = nullptr;
    uint3 index{};
    bool done = false;
    Barrier* waits = nullptr;
    unsigned seen = 0;
    int warp = 0, lane = 0;
};
static std::vector<Fiber> fibers;
static Fiber* current = nullptr;
static ucontext_t first;
static jmp_buf hub;
static Barrier whole;
static std::vector<Barrier> warps;
static std::vector<std::vector<uint64_t>> lanes;  // what the threads of each warp show each other
static std::vector<unsigned char> dynamic_shared;
static const char* failure = nullptr;
static void (*body)(void*) = nullptr;
static void* body_args = nullptr;

inline void open(Barrier& b) { if (b.arrived && b.arrived >= b.members) { b.arrived = 0; ++b.generation; } }
inline void wait(Barrier& b) {
    unsigned seen = b.generation;
    ++b.arrived;
    open(b);
    while (b.generation == seen) {
        current->waits = &b;
        current->seen = seen;
        if (!_setjmp(current->here)) _longjmp(hub, 1);
    }
    current->waits = nullptr;
}
inline void leave() {
    current->done = true;
    --whole.members; open(whole);
    Barrier& w = warps[current->warp];
    --w.members; open(w);
}
inline void entry() { body(body_args); leave(); _longjmp(hub, 1); }
inline void resume(Fiber& f) {
    current = &f;
    if (_setjmp(hub)) return;
    if (f.entered) _longjmp(f.here, 1);
    f.entered = true;
    swapcontext(&first, &f.context);
}

inline void run_block(bool reversed) {
    int n = blockDim.x * blockDim.y * blockDim.z;
    if ((int)fibers.size() < n) fibers.resize(n);
    whole = Barrier{0, n, 0};
    warps.assign((n + 31) / 32, Barrier{});
    lanes.assign((n + 31) / 32, std::vector<uint64_t>(64));
    for (int t = 0; t < n; ++t) {
        Fiber& f = fibers[t];
        if (!f.stack) f.stack = (char*)malloc(STACK);
        f.index = uint3{t % blockDim.x, t / blockDim.x % blockDim.y, t / (blockDim.x * blockDim.y)};
        f.done = false; f.waits = nullptr; f.warp = t / 32; f.lane = t % 32;
        ++warps[f.warp].members;
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = f.stack;
        f.context.uc_stack.ss_size = STACK;
        f.context.uc_link = nullptr;
        f.entered = false;
        makecontext(&f.context, entry, 0);
    }
    for (int left = n; left > 0 && !failure;) {
        bool moved = false;
        for (int k = 0; k < n; ++k) {
            Fiber& f = fibers[reversed ? n - 1 - k : k];
            if (f.done || (f.waits && f.waits->generation == f.seen)) continue;
            moved = true;
            resume(f);
            left -= f.done;
        }
        if (left > 0 && !moved) failure = "threads wait at a barrier that others never reach";
    }
}
template <class T> T exchange(T x, int from) {
    Fiber* me = current;
    static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
    std::vector<uint64_t>& mine = lanes[me->warp];
    memcpy(&mine[me->lane], &x, sizeof(T));
    wait(warps[me->warp]);
    T y = x;
    if (from >= 0 && from < 32) memcpy(&y, &mine[from], sizeof(T));
    wait(warps[me->warp]);
    return y;
}
template <class... A, size_t... I> void call(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*(std::remove_reference_t<A>*)args[I]...);
}
template <class... A> const char* launch(void (*kernel)(A...), const unsigned* dims, size_t shared, void** args, int reversed) {
    gridDim = dim3{dims[0], dims[1], dims[2]};
    blockDim = dim3{dims[3], dims[4], dims[5]};
    if (blockDim.x * blockDim.y * blockDim.z > 1024) return "more than 1024 threads in a block";
    if (gridDim.y > 65535 || gridDim.z > 65535 || blockDim.z > 64) return "a grid or block that CUDA does not take";
    if (shared > 48 << 10) return "more than 48 KiB of dynamic shared memory";
    struct Bound { void (*kernel)(A...); void** args; } bound{kernel, args};
    body = [](void* p) { auto* b = (Bound*)p; call(b->kernel, b->args, std::index_sequence_for<A...>{}); };
    body_args = &bound;
    failure = nullptr;
    dynamic_shared.assign(shared + 64, 0xcd);
    for (unsigned z = 0; z < gridDim.z; ++z) for (unsigned y = 0; y < gridDim.y; ++y)
        for (unsigned x = 0; x < gridDim.x; ++x) {
            blockIdx = uint3{x, y, z};
            run_block(reversed);
            if (failure) return failure;
        }
    return nullptr;
}
}  // namespace emulated

#define threadIdx (emulated::current->index)
inline void __syncthreads() { emulated::wait(emulated::whole); }
inline void __syncwarp(unsigned = 0xffffffffu) { emulated::wait(emulated::warps[emulated::current->warp]); }
template <class T> T __shfl_xor_sync(unsigned, T x, int m) { return emulated::exchange(x, emulated::current->lane ^ m); }
template <class T> T __shfl_down_sync(unsigned, T x, int d) { return emulated::exchange(x, emulated::current->lane + d); }
template <class T> T __shfl_up_sync(unsigned, T x, int d) { return emulated::exchange(x, emulated::current->lane - d); }
template <class T> T __shfl_sync(unsigned, T x, int from) { return emulated::exchange(x, from & 31); }
template <class T> T atomicAdd(T* p, T x) { T old = *p; *p = old + x; return old; }
template <class T> T atomicMax(T* p, T x) { T old = *p; if (x > old) *p = x; return old; }
template <class T> T atomicCAS(T* p, T expected, T x) { T old = *p; if (old == expected) *p = x; return old; }
template <class T> T __ldg(const T* p) { return *p; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float rsqrt(float x) { return 1 / std::sqrt(x); }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }

inline float emulated_half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023, u;
    if (e == 31) u = sign | 0x7f800000u | (m << 13);
    else if (e == 0) { float x = std::ldexp((float)m, -24); return sign ? -x : x; }
    else u = sign | ((e + 112) << 23) | (m << 13);
    float x; memcpy(&x, &u, 4); return x;
}
inline uint16_t emulated_float_to_half(float x) {
    uint32_t u; memcpy(&u, &x, 4);
    uint16_t sign = (u >> 16) & 0x8000;
    float a = std::fabs(x);
    if (std::isnan(x)) return sign | 0x7e00;
    if (a >= 65520.0f) return sign | 0x7c00;
    if (a < 6.103515625e-5f) return sign | (uint16_t)std::nearbyint(std::ldexp(a, 24));
    int e; std::frexp(a, &e);
    float scaled = std::nearbyint(std::ldexp(a, 11 - e));  // 1024..2048
    return sign | (uint16_t)(((e + 14) << 10) + ((int)scaled - 1024));
}
