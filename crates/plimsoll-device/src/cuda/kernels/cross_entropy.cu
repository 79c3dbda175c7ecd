// Cross entropy over rows of logits, with its gradient in place.
//
// nll = ln Σ e^(x − max) + max − x[label]; d nll / dx = softmax(x) − onehot(label)
// (as cpu/kernels/loss.rs). Max and sum are found in one pass over the row (Milakov and Gimelshein,
// "Online normalizer calculation for softmax").

// The label of a row that does not count.
constexpr int IGNORED = -100;

// What no logit is below, so far from the lowest float that its distance to any logit is one.
constexpr float UNSEEN = LOWEST / 2;

// The largest logit so far, where it first stood, and Σ e^(x − largest).
struct Peak {
    float largest;
    u32 where;
    float sum;
};

// e^(x − largest).
__device__ inline float below(float x, float largest) { return power_of_two((x - largest) * LOG2_E); }

__device__ inline Peak join(Peak a, Peak b) {
    bool second = b.largest > a.largest || (b.largest == a.largest && b.where < a.where);
    Peak top = second ? b : a;
    Peak low = second ? a : b;
    top.sum += low.sum * below(low.largest, top.largest);
    return top;
}

template <int W> __device__ Peak peak_of(const REAL* logits, u32 vocab) {
    Peak peak = {UNSEEN, 0xffffffffu, 0.0f};
    for (u32 at = threadIdx.x * W; at < vocab; at += blockDim.x * W) {
        float x[W];
        load(logits + at, x);
        float most = x[0];
#pragma unroll
        for (int i = 1; i < W; i++) most = fmaxf(most, x[i]);
        if (most > peak.largest) {
            peak.sum *= below(peak.largest, most);
            peak.largest = most;
#pragma unroll
            for (int i = W - 1; i >= 0; i--)
                if (x[i] == most) peak.where = at + i;
        }
#pragma unroll
        for (int i = 0; i < W; i++) peak.sum += below(x[i], peak.largest);
    }
    return peak;
}

// The same peak in every thread.
__device__ inline Peak block_peak(Peak peak) {
    __shared__ Peak peaks[32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        Peak other;
        other.largest = __shfl_xor_sync(ALL_LANES, peak.largest, step);
        other.where = __shfl_xor_sync(ALL_LANES, peak.where, step);
        other.sum = __shfl_xor_sync(ALL_LANES, peak.sum, step);
        peak = join(peak, other);
    }
    if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = peak;
    __syncthreads();
    peak = peaks[0];
    for (u32 warp = 1; warp < blockDim.x / 32; warp++) peak = join(peak, peaks[warp]);
    return peak;
}

// From the end of the row on, which was read last and may still be in the cache.
template <int W>
__device__ void to_gradient(REAL* logits, u32 vocab, Peak peak, u32 label, float scale) {
    float factor = scale / peak.sum;
    u32 step = blockDim.x * W, first = threadIdx.x * W;
    for (u32 rounds = (vocab + step - 1) / step; rounds > 0; rounds--) {
        u32 at = (rounds - 1) * step + first;
        if (at >= vocab) continue;
        float x[W];
        load(logits + at, x);
#pragma unroll
        for (int i = 0; i < W; i++) x[i] = below(x[i], peak.largest) * factor;
        if (label - at < W) {
#pragma unroll
            for (int i = 0; i < W; i++)
                if (label - at == i) x[i] -= scale;
        }
        store(x, logits + at);
    }
}

// losses[R] = nll of each row, 0 for one that does not count (label −100 or weight 0); with
// `gradient`, logits[R,V] become weight · 1 / labelled tokens · (softmax − onehot), exact zeros where
// the row does not count; correct[R], unless null: whether the label's is the first largest logit.
// A label outside the vocabulary makes the loss NaN.
// Grid: R. Block: 512. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(512)
cross_entropy(REAL* logits, const int* labels, const float* weights, const float* scalars, float* losses, int* correct,
              u32 vocab, u32 gradient) {
    u32 row = blockIdx.x;
    logits += (u64)row * vocab;
    int label = labels[row];
    float weight = weights[row];
    bool wide = vocab % PACK<REAL> == 0 && aligned(logits);
    if (label == IGNORED || weight == 0.0f) {
        if (gradient)
            for (u32 at = threadIdx.x; at < vocab; at += blockDim.x) narrow(0.0f, logits[at]);
        if (threadIdx.x == 0) {
            losses[row] = 0.0f;
            if (correct) correct[row] = 0;
        }
        return;
    }
    bool known = (u32)label < vocab;
    float own = known ? widen(logits[label]) : not_a_number();
    // The barrier in block_peak stands between this look at the label's logit and its change.
    Peak peak = block_peak(wide ? peak_of<PACK<REAL>>(logits, vocab) : peak_of<1>(logits, vocab));
    if (gradient) {
        float scale = weight * scalars[INVERSE_TOKENS];
        if (wide)
            to_gradient<PACK<REAL>>(logits, vocab, peak, label, scale);
        else
            to_gradient<1>(logits, vocab, peak, label, scale);
    }
    if (threadIdx.x == 0) {
        losses[row] = logf(peak.sum) + peak.largest - own;
        if (correct) correct[row] = peak.where == (u32)label;
    }
}

// metrics[LOSS_SUM] += Σ weight · loss over the rows, in double.
// Grid: 1. Block: 256. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
cross_entropy_sum(const float* losses, const float* weights, double* metrics, u32 rows) {
    double sum = 0;
    for (u32 row = threadIdx.x; row < rows; row += 256) sum += (double)losses[row] * (double)weights[row];
    sum = block_sum(sum);
    if (threadIdx.x == 0) metrics[LOSS_SUM] += sum;
}
