// The softmax of rows of logits, one block of columns after another: running statistics per row, the cross entropy, and
// its gradient in place.
//
// nll = ln Σ e^(x − max) + max − x[label]; d nll / dx = softmax(x) − onehot(label)
// (as cpu/kernels/loss.rs). One pass over the columns finds maximum and sum, and continues with the next block of
// columns (Milakov and Gimelshein, "Online normalizer calculation for softmax").

// The label of an ignored row.
constexpr int IGNORED = -100;

// Lower bound of logits, far enough from the lowest float that its distance to any logit is a float.
constexpr float UNSEEN = LOWEST / 2;

// The largest logit so far, its first column, and Σ e^(x − largest).
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

template <int W> __device__ Peak peak_of(const REAL* logits, u32 columns) {
    Peak peak = {UNSEEN, 0xffffffffu, 0.0f};
    for (u32 at = threadIdx.x * W; at < columns; at += blockDim.x * W) {
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

// Block-wide peak, equal in every thread.
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

// Starts at the end of the row, which was read last and may still be cached.
template <int W>
__device__ void to_gradient(REAL* logits, u32 columns, Peak peak, u32 label, float scale, float inverse_cap) {
    float factor = scale / peak.sum;
    u32 step = blockDim.x * W, first = threadIdx.x * W;
    for (u32 rounds = (columns + step - 1) / step; rounds > 0; rounds--) {
        u32 at = (rounds - 1) * step + first;
        if (at >= columns) continue;
        float x[W], slope[W];
        load(logits + at, x);
#pragma unroll
        for (int i = 0; i < W; i++) {
            float ratio = x[i] * inverse_cap;
            slope[i] = fmaxf(1.0f - ratio * ratio, 0.0f);
            x[i] = below(x[i], peak.largest) * factor;
        }
        if (label - at < W) {
#pragma unroll
            for (int i = 0; i < W; i++)
                if (label - at == i) x[i] -= scale;
        }
#pragma unroll
        for (int i = 0; i < W; i++) x[i] *= slope[i];
        store(x, logits + at);
    }
}

__device__ inline bool counts(int label, float weight) { return label != IGNORED && weight != 0.0f; }

// Statistics of a row: the largest logit so far, Σ e^(x − largest), the label's logit (NaN until it is seen), and 1 if
// the first of the largest logits is the label's, else 0.
constexpr u32 STATS = 4;

// Continues stats[R,4] over logits[R,columns], from column `first` of the vocabulary on; `begin` starts anew. Ignored
// rows (label −100 or weight 0) have 0, 1, 0, 0.
// Grid: R. Block: 512. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(512)
softmax_stats(const REAL* logits, const int* labels, const float* weights, float* stats, u32 first, u32 columns,
              u32 begin) {
    u32 row = blockIdx.x;
    logits += (u64)row * columns;
    stats += row * STATS;
    if (!counts(labels[row], weights[row])) {
        if (begin && threadIdx.x < STATS) stats[threadIdx.x] = threadIdx.x == 1 ? 1.0f : 0.0f;
        return;
    }
    bool wide = columns % PACK<REAL> == 0 && aligned(logits);
    Peak peak = block_peak(wide ? peak_of<PACK<REAL>>(logits, columns) : peak_of<1>(logits, columns));
    if (threadIdx.x > 0) return;
    // Beyond all columns if the label is not in this block.
    u32 label = (u32)labels[row] - first;
    bool here = label < columns;
    bool hit = here && peak.where == label;
    float own = begin ? not_a_number() : stats[2];
    if (!begin) {
        // Among equal logits the first counts, and earlier blocks come first.
        Peak before = {stats[0], 0, stats[1]};
        if (!(peak.largest > before.largest)) hit = stats[3] != 0.0f;
        peak = join(before, peak);
    }
    stats[0] = peak.largest;
    stats[1] = peak.sum;
    stats[2] = here ? widen(logits[label]) : own;
    stats[3] = hit ? 1.0f : 0.0f;
}

// metrics[LOSS_SUM] += Σ weight · nll over the rows, in double, from stats of the whole vocabulary; correct[R], unless
// null: whether the label has the first largest logit; log_probabilities[R], unless null: −nll, or 0 in ignored rows. A
// label outside the vocabulary makes the loss NaN.
// Grid: 1. Block: 256. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
cross_entropy(const float* stats, const int* labels, const float* weights, double* metrics, int* correct,
              float* log_probabilities, u32 rows) {
    double sum = 0;
    for (u32 row = threadIdx.x; row < rows; row += 256) {
        const float* of = stats + row * STATS;
        bool counted = counts(labels[row], weights[row]);
        float nll = counted ? logf(of[1]) + of[0] - of[2] : 0.0f;
        if (counted) sum += (double)nll * (double)weights[row];
        if (log_probabilities) log_probabilities[row] = 0.0f - nll;
        if (correct) correct[row] = counted && of[3] != 0.0f;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) metrics[LOSS_SUM] += sum;
}

// Replaces logits[R,columns], from column `first` of the vocabulary on, by weight · 1 / labelled tokens · (softmax −
// onehot); exact zeros in ignored rows. Logits that a cap c limits get the factor 1 − (logit · inverse_cap)² with
// inverse_cap = 1 / c; without a cap, inverse_cap is 0.
// Grid: R. Block: 512. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(512)
softmax_grad(REAL* logits, const int* labels, const float* weights, const float* stats, const float* scalars,
             u32 first, u32 columns, float inverse_cap) {
    u32 row = blockIdx.x;
    logits += (u64)row * columns;
    float weight = weights[row];
    if (!counts(labels[row], weight)) {
        for (u32 at = threadIdx.x; at < columns; at += blockDim.x) narrow(0.0f, logits[at]);
        return;
    }
    Peak peak = {stats[row * STATS], 0, stats[row * STATS + 1]};
    float scale = weight * scalars[INVERSE_TOKENS];
    u32 label = (u32)labels[row] - first;
    if (columns % PACK<REAL> == 0 && aligned(logits))
        to_gradient<PACK<REAL>>(logits, columns, peak, label, scale, inverse_cap);
    else
        to_gradient<1>(logits, columns, peak, label, scale, inverse_cap);
}
