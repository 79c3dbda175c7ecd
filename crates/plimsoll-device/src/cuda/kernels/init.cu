// Normal numbers that are a function of (seed, tensor number, element): the same ones as
// cpu/kernels/init.rs, by the same formulas in double. The bits that go in are equal; logarithm, root,
// cosine and sine of CUDA and of the CPU's library may differ in the last bit of a double, which shows
// in the rounded float about once in 10⁸ elements.
//
// Philox-4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
// (SC 2011). One block of four words gives four numbers, by the method of Box and Muller.

__device__ inline void philox(u32 (&counter)[4], u32 key0, u32 key1) {
    for (int round = 0; round < 10; round++) {
        if (round > 0) {
            key0 += 0x9E3779B9u;
            key1 += 0xBB67AE85u;
        }
        u64 a = (u64)counter[0] * 0xD2511F53u, b = (u64)counter[2] * 0xCD9E8D57u;
        counter[0] = (u32)(b >> 32) ^ counter[1] ^ key0;
        counter[1] = (u32)b;
        counter[2] = (u32)(a >> 32) ^ counter[3] ^ key1;
        counter[3] = (u32)a;
    }
}

// In the middle of 2^32 equal steps: never 0, never 1.
__device__ inline double uniform(u32 word) { return ((double)word + 0.5) / 4294967296.0; }

// into[i] = std · number first + i of tensor `number` under `seed`. A thread makes the four numbers
// of a Philox block, of which the first and the last block may need fewer.
// Grid: ceil((first mod 4 + elements) / 4 / 256). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
init_normal(float* into, u64 elements, u64 seed, u64 number, u64 first, double std) {
    u64 block = first / 4 + (u64)blockIdx.x * 256 + threadIdx.x;
    if (block * 4 >= first + elements) return;
    u32 words[4] = {(u32)block, (u32)(block >> 32), (u32)number, (u32)(number >> 32)};
    philox(words, (u32)seed, (u32)(seed >> 32));
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        double radius = sqrt(-2.0 * log(uniform(words[2 * pair])));
        double angle = 6.283185307179586476925 * uniform(words[2 * pair + 1]);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            u64 element = block * 4 + 2 * pair + i;
            double value = radius * (i == 0 ? cos(angle) : sin(angle));
            if (element >= first && element < first + elements) into[element - first] = (float)(value * std);
        }
    }
}
