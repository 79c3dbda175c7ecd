// Random numbers as a function of (seed, tensor number, element), by the formulas of cpu/kernels/init.rs in double.
// Uniform numbers have the CPU's bits. For normal numbers, CUDA's logarithm, root, cosine and sine may differ from the
// CPU library's in the last bit of a double, which shows in about one rounded float of 10⁸. One Philox block of four
// words gives four numbers, normal ones by the Box-Muller method.

// Midpoints of 2^32 equal steps: never 0, never 1.
__device__ inline double share(u32 word) { return ((double)word + 0.5) / 4294967296.0; }

// into[i] = std · number first + i of tensor `number` under `seed`. A thread computes the four numbers of a Philox
// block; the first and the last block may need fewer.
// Grid: ceil((first mod 4 + elements) / 4 / 256). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
init_normal(float* into, u64 elements, u64 seed, u64 number, u64 first, double std) {
    u64 block = first / 4 + (u64)blockIdx.x * 256 + threadIdx.x;
    if (block * 4 >= first + elements) return;
    u32 words[4] = {(u32)block, (u32)(block >> 32), (u32)number, (u32)(number >> 32)};
    philox(words, (u32)seed, (u32)(seed >> 32));
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        double radius = sqrt(-2.0 * log(share(words[2 * pair])));
        double angle = 6.283185307179586476925 * share(words[2 * pair + 1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u64 element = block * 4 + 2 * pair + i;
            double value = radius * (i == 0 ? cos(angle) : sin(angle));
            if (element >= first && element < first + elements) into[element - first] = (float)(value * std);
        }
    }
}

// into[i] = number first + i of tensor `number` under `seed`, from −bound to bound.
// Grid, block, shared memory: as init_normal.
extern "C" __global__ void __launch_bounds__(256)
init_uniform(float* into, u64 elements, u64 seed, u64 number, u64 first, double bound) {
    u64 block = first / 4 + (u64)blockIdx.x * 256 + threadIdx.x;
    if (block * 4 >= first + elements) return;
    u32 words[4] = {(u32)block, (u32)(block >> 32), (u32)number, (u32)(number >> 32)};
    philox(words, (u32)seed, (u32)(seed >> 32));
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u64 element = block * 4 + i;
        if (element >= first && element < first + elements)
            into[element - first] = (float)((share(words[i]) * 2.0 - 1.0) * bound);
    }
}
