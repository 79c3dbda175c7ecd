// Common part of every kernel file: types, rounding, packs of elements, sums over warps and blocks. The source of a
// compiled unit is: its defines, this file, sources shared by some families, the family's file. No header is needed.
//
// Legend, as in cpu/kernels: N rows (B sequences of T tokens), D hidden, H heads, K kv heads, E head
// dim, F ffn, V vocabulary, C = (H + 2K)·E columns of queries | keys | values.
// REAL (float or bf16) is the type of activations and of the weights multiplied with them. All other real numbers are
// float: master weights, gradients of weights, optimizer state, rstd, statistics, scalars, scratch. All sums are float
// or double, and their order depends on shapes alone: no floating-point atomics.
//
// Blocks are whole warps. Every thread of a block reaches every barrier.

typedef unsigned int u32;
typedef unsigned long long u64;

// bfloat16: the upper half of a float. Defined here, so that compiling needs no CUDA header.
struct bf16 { unsigned short bits; };
// IEEE half precision; used in files only.
struct f16 { unsigned short bits; };

// Indices into the scalar and metrics tensors: plimsoll-program, scalars.rs.
constexpr u32 LEARNING_RATE = 0, BIAS_CORRECTION_1 = 1, BIAS_CORRECTION_2 = 2, CLIP_NORM = 3, CLIP_FACTOR = 4,
              INVERSE_TOKENS = 5, LAST_ROW = 7, STEP = 8;
constexpr u32 LOSS_SUM = 0, NORM_SQUARED = 1;

constexpr float LOWEST = -3.402823466e+38f;

// The dynamic shared memory of a block.
extern __shared__ __align__(16) float shared[];

__device__ inline float infinity() { return __uint_as_float(0x7f800000); }
__device__ inline float not_a_number() { return __uint_as_float(0x7fc00000); }

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

__device__ inline void narrow(float x, float& to) { to = x; }

// PTX instructions (sm_80 and later) without a C equivalent; tests/cuda_shim emulates them on the CPU.
#ifndef PLIMSOLL_SHIM

// Both rounded to nearest even, `low` in the lower half.
__device__ inline u32 narrow_both(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// 2^x, within 2 units in the last place; 0 instead of subnormal numbers.
__device__ inline float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

// 1 / x, within a unit in the last place; 0 where that would be subnormal.
__device__ inline float reciprocal(float x) {
    float one;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(one) : "f"(x));
    return one;
}

#endif

constexpr float LOG2_E = 1.4426950408889634f;

// Rounds to nearest, ties to even; NaN stays NaN.
__device__ inline void narrow(float x, bf16& to) { to.bits = (unsigned short)narrow_both(x, 0.0f); }

// W consecutive elements: loads and stores of at most 16 bytes.
template <class T, int W> struct alignas(W * sizeof(T) < 16 ? W * sizeof(T) : 16) Pack { T at[W]; };
typedef Pack<float, 4> Four;
// Elements that 16 bytes hold.
template <class T> constexpr int PACK = 16 / sizeof(T);

template <int W, class T> __device__ inline void load(const T* from, float (&to)[W]) {
    Pack<T, W> pack = *reinterpret_cast<const Pack<T, W>*>(from);
#pragma unroll
    for (int i = 0; i < W; i++) to[i] = widen(pack.at[i]);
}

template <int W> __device__ inline void store(const float (&from)[W], float* to) {
    Pack<float, W> pack;
#pragma unroll
    for (int i = 0; i < W; i++) pack.at[i] = from[i];
    *reinterpret_cast<Pack<float, W>*>(to) = pack;
}

template <int W> __device__ inline void store(const float (&from)[W], bf16* to) {
    if constexpr (W == 1) {
        narrow(from[0], *to);
    } else {
        Pack<u32, W / 2> pack;
#pragma unroll
        for (int i = 0; i < W / 2; i++) pack.at[i] = narrow_both(from[2 * i], from[2 * i + 1]);
        *reinterpret_cast<Pack<u32, W / 2>*>(to) = pack;
    }
}

// Whether packs may be read at `at`.
template <class T> __device__ inline bool aligned(const T* at) { return (u64)at % 16 == 0; }

constexpr u32 ALL_LANES = 0xffffffffu;

// Warp-wide sum, equal in every lane.
template <class T> __device__ inline T warp_sum(T x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// Block-wide sum, equal in every thread.
template <class T> __device__ inline T block_sum(T x) {
    __shared__ T sums[32];
    x = warp_sum(x);
    __syncthreads();  // the previous sum has been read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    T total = 0;
    for (u32 warp = 0; warp < blockDim.x / 32; warp++) total += sums[warp];
    return total;
}

// Warp-wide maximum, equal in every lane; ignores NaN.
__device__ inline float warp_largest(float x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Block-wide maximum of non-negative numbers, equal in every thread.
__device__ inline float block_largest(float x) {
    __shared__ float most[32];
    x = warp_largest(x);
    __syncthreads();  // the previous values have been read
    if (threadIdx.x % 32 == 0) most[threadIdx.x / 32] = x;
    __syncthreads();
    float largest = 0;
    for (u32 warp = 0; warp < blockDim.x / 32; warp++) largest = fmaxf(largest, most[warp]);
    return largest;
}
