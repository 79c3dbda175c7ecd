// Casts between float types, rounded once to nearest even (as cpu/kernels/cast.rs), and fills. Elements are aligned to
// their size. Grids as in elementwise.cu.

__device__ inline double exact(double x) { return x; }
__device__ inline double exact(float x) { return x; }
__device__ inline double exact(bf16 x) { return widen(x); }

__device__ inline double exact(f16 x) {
    u32 sign = (u32)(x.bits & 0x8000u) << 16, rest = x.bits & 0x7fffu;
    // Shifted into a float, exponents are 112 too low. A multiplication corrects them, also for subnormals. Infinity
    // and NaN have the highest exponent in both types.
    float value = rest >= 0x7c00u ? __uint_as_float(0x7f800000u | (rest & 0x3ffu) << 13)
                                  : __uint_as_float(rest << 13) * 5.192296858534828e+33f;
    return __uint_as_float(__float_as_uint(value) | sign);
}

// x in 32 bits, rounded to odd: an inexact result is the neighbour with last bit 1. Rounding it again to half as many
// bits gives the same as rounding x once (Boldo and Melquiond, "When double rounding is odd").
__device__ inline float to_odd(double x) {
    float nearest = (float)x;
    if ((double)nearest == x || x != x) return nearest;
    u32 toward_zero = __float_as_uint(nearest) - (fabs((double)nearest) > fabs(x));
    return __uint_as_float(toward_zero | 1u);
}

__device__ inline void round_to(double x, double& to) { to = x; }
__device__ inline void round_to(double x, float& to) { to = (float)x; }
__device__ inline void round_to(double x, bf16& to) { narrow(to_odd(x), to); }

__device__ inline void round_to(double x, f16& to) {
    u32 bits = __float_as_uint(to_odd(x));
    u32 sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    u32 half;
    if (rest > 0x7f800000u) {
        half = 0x7e00u;  // NaN
    } else if (rest >= 0x477ff000u) {
        half = 0x7c00u;  // rounds to infinity: half way from 65504 to 65536, or more
    } else if (rest < 0x38800000u) {
        // Below the smallest normal number: added to 0.5, the last bit of the sum is worth 2^-24, as in a subnormal,
        // and the addition rounds.
        half = __float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3f000000u;
    } else {
        half = (rest - 0x38000000u + 0xfffu + (rest >> 13 & 1u)) >> 13;
    }
    to.bits = (unsigned short)(sign | half);
}

// Types of at most 32 bits are cast without double, which is slow on most GPUs.
__device__ inline void convert(float from, bf16& to) { narrow(from, to); }
__device__ inline void convert(bf16 from, float& to) { to = widen(from); }
template <class From, class To> __device__ inline void convert(From from, To& to) { round_to(exact(from), to); }

// Packs of four if both sides are aligned, then single elements.
template <class From, class To> __device__ inline void cast_all(const From* from, To* to, u64 elements) {
    u64 first = (u64)blockIdx.x * 256 + threadIdx.x, step = (u64)gridDim.x * 256;
    u64 packs = aligned(from) && aligned(to) ? elements / 4 : 0;
    for (u64 at = first; at < packs; at += step) {
        Pack<From, 4> pack = reinterpret_cast<const Pack<From, 4>*>(from)[at];
        Pack<To, 4> done;
#pragma unroll
        for (int i = 0; i < 4; i++) convert(pack.at[i], done.at[i]);
        reinterpret_cast<Pack<To, 4>*>(to)[at] = done;
    }
    for (u64 at = packs * 4 + first; at < elements; at += step) convert(from[at], to[at]);
}

// to = from, in another type.
// Grid: over elements. Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256) cast_f32_bf16(const float* from, bf16* to, u64 elements) { cast_all(from, to, elements); }
extern "C" __global__ void __launch_bounds__(256) cast_bf16_f32(const bf16* from, float* to, u64 elements) { cast_all(from, to, elements); }
extern "C" __global__ void __launch_bounds__(256) cast_f32_f16(const float* from, f16* to, u64 elements) { cast_all(from, to, elements); }
extern "C" __global__ void __launch_bounds__(256) cast_f16_f32(const f16* from, float* to, u64 elements) { cast_all(from, to, elements); }
extern "C" __global__ void __launch_bounds__(256) cast_f32_f64(const float* from, double* to, u64 elements) { cast_all(from, to, elements); }
extern "C" __global__ void __launch_bounds__(256) cast_f64_f32(const double* from, float* to, u64 elements) { cast_all(from, to, elements); }
extern "C" __global__ void __launch_bounds__(256) cast_bf16_f16(const bf16* from, f16* to, u64 elements) { cast_all(from, to, elements); }
extern "C" __global__ void __launch_bounds__(256) cast_f16_bf16(const f16* from, bf16* to, u64 elements) { cast_all(from, to, elements); }
extern "C" __global__ void __launch_bounds__(256) cast_bf16_f64(const bf16* from, double* to, u64 elements) { cast_all(from, to, elements); }
extern "C" __global__ void __launch_bounds__(256) cast_f64_bf16(const double* from, bf16* to, u64 elements) { cast_all(from, to, elements); }

// Packs of 16 bytes if aligned, then single elements.
template <class T> __device__ inline void fill_all(T* into, T value, u64 elements) {
    u64 first = (u64)blockIdx.x * 256 + threadIdx.x, step = (u64)gridDim.x * 256;
    u64 packs = aligned(into) ? elements / PACK<T> : 0;
    Pack<T, PACK<T>> pack;
#pragma unroll
    for (int i = 0; i < PACK<T>; i++) pack.at[i] = value;
    for (u64 at = first; at < packs; at += step) reinterpret_cast<Pack<T, PACK<T>>*>(into)[at] = pack;
    for (u64 at = packs * PACK<T> + first; at < elements; at += step) into[at] = value;
}

// All elements = value.
// Grid: over elements. Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256) fill_f32(float* into, double value, u64 elements) { fill_all(into, (float)value, elements); }
extern "C" __global__ void __launch_bounds__(256) fill_f64(double* into, double value, u64 elements) { fill_all(into, value, elements); }
extern "C" __global__ void __launch_bounds__(256) fill_u8(unsigned char* into, double value, u64 elements) { fill_all(into, (unsigned char)value, elements); }
extern "C" __global__ void __launch_bounds__(256) fill_bf16(bf16* into, double value, u64 elements) {
    bf16 rounded;
    round_to(value, rounded);
    fill_all(into, rounded, elements);
}
