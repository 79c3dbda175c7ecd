// What every kernel file stands on: types, rounding, packs of elements, sums over warps and blocks.
// The source of a compiled unit is: its defines, this file, the family's file. No header is needed.
//
// Legend, as in cpu/kernels: N rows (B sequences of T tokens), D hidden, H heads, K kv heads, E head
// dim, F ffn, V vocabulary, C = (H + 2K)·E columns of queries | keys | values.
// REAL (float or bf16) is the type of activations and of the weights that meet them. Everything else
// that is real is float: master weights, gradients of weights, the optimizer's state, rstd, statistics,
// scalars, scratch. All sums are float or double, and their order depends on shapes alone: no
// floating-point atomics.
//
// Blocks are whole warps. Every thread of a block meets every barrier.

typedef unsigned int u32;
typedef unsigned long long u64;

// bfloat16: the upper half of a float. Ours, so that no header of CUDA is needed to compile.
struct bf16 { unsigned short bits; };
// IEEE half precision; in files only.
struct f16 { unsigned short bits; };

// Places in the scalar and the metrics tensor: plimsoll-program, scalars.rs.
constexpr u32 LEARNING_RATE = 0, BIAS_CORRECTION_1 = 1, BIAS_CORRECTION_2 = 2, CLIP_NORM = 3, CLIP_FACTOR = 4,
              INVERSE_TOKENS = 5, CACHE_LENGTH = 6, LAST_ROW = 7;
constexpr u32 LOSS_SUM = 0, NORM_SQUARED = 1;

constexpr float LOWEST = -3.402823466e+38f;

// The dynamic shared memory of a block.
extern __shared__ __align__(16) float shared[];

__device__ inline float infinity() { return __uint_as_float(0x7f800000); }
__device__ inline float not_a_number() { return __uint_as_float(0x7fc00000); }

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

__device__ inline void narrow(float x, float& to) { to = x; }

// To nearest, ties to even; NaN stays NaN.
__device__ inline void narrow(float x, bf16& to) {
    u32 bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    u32 half = nan ? (bits >> 16) | 0x40u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to.bits = (unsigned short)half;
}

// W elements side by side: one load or store of up to 16 bytes.
template <class T, int W> struct alignas(W * sizeof(T)) Pack { T at[W]; };
typedef Pack<float, 4> Four;

template <int W, class T> __device__ inline void load(const T* from, float (&to)[W]) {
    Pack<T, W> pack = *reinterpret_cast<const Pack<T, W>*>(from);
#pragma unroll
    for (int i = 0; i < W; i++) to[i] = widen(pack.at[i]);
}

template <int W, class T> __device__ inline void store(const float (&from)[W], T* to) {
    Pack<T, W> pack;
#pragma unroll
    for (int i = 0; i < W; i++) narrow(from[i], pack.at[i]);
    *reinterpret_cast<Pack<T, W>*>(to) = pack;
}

// Whether packs of four may be read at `at`.
template <class T> __device__ inline bool fours(const T* at) { return (u64)at % (4 * sizeof(T)) == 0; }

constexpr u32 ALL_LANES = 0xffffffffu;

// The same sum in every lane.
template <class T> __device__ inline T warp_sum(T x) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// The same sum in every thread.
template <class T> __device__ inline T block_sum(T x) {
    __shared__ T sums[32];
    x = warp_sum(x);
    __syncthreads();  // the last sum has been read
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
    __syncthreads();
    T total = 0;
    for (u32 warp = 0; warp < blockDim.x / 32; warp++) total += sums[warp];
    return total;
}
