// Dropout as in plimsoll-program, op.rs. The dropped elements are a function of their position in the run (with the
// bits of cpu/kernels/dropout.rs). A thread computes the four words of a Philox block, which decide about four elements
// of a sample.

template <int W>
__device__ inline void leave_out(const u32 (&words)[4], u64 threshold, float factor, const REAL* x, REAL* out,
                                 u32 count, bool accumulate) {
    for (u32 at = 0; at < count; at += W) {
        float v[W], sum[W];
        load(x + at, v);
        if (accumulate) load(out + at, sum);
#pragma unroll
        for (int i = 0; i < W; i++) {
            // A selection, not a product: a dropped element may be infinite.
            float kept = words[at + i] >= threshold ? __fmul_rn(v[i], factor) : 0.0f;
            v[i] = accumulate ? sum[i] + kept : kept;
        }
        store(v, out + at);
    }
}

// out[N,D] = (or +=) x with dropped elements, the others multiplied by `factor`. `site` is layer · 256 + site, `each`
// the elements of a sample (T·D), `elements` those of all samples.
// Grid: (ceil(each / 1024), samples, at most 65,535). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
dropout(const REAL* x, REAL* out, const float* scalars, u64 seed, u32 first_sample, u32 site, u64 threshold,
        float factor, u64 each, u64 elements, u32 accumulate) {
    u32 block = blockIdx.x * 256 + threadIdx.x, step = (u32)scalars[STEP];
    bool packs = each % 4 == 0 && ((u64)x | (u64)out) % (4 * sizeof(REAL)) == 0;
    for (u32 sample = blockIdx.y; sample * each < elements; sample += gridDim.y) {
        u64 first = sample * each + (u64)block * 4, end = min(elements, (sample + 1) * each);
        if (first >= end) continue;
        u32 words[4] = {block, site, first_sample + sample, step};
        philox(words, (u32)seed, (u32)(seed >> 32) ^ 0x44524F50u);
        if (packs && end - first >= 4)
            leave_out<4>(words, threshold, factor, x + first, out + first, 4, accumulate);
        else
            leave_out<1>(words, threshold, factor, x + first, out + first, (u32)min((u64)4, end - first), accumulate);
    }
}
