// Rows of the embedding table, and their gradient.

template <int W> __device__ void copy_row(const REAL* from, REAL* to, u32 hidden, float scale) {
    for (u32 at = threadIdx.x * W; at < hidden; at += 256 * W) {
        float v[W];
        load(from + at, v);
#pragma unroll
        for (int i = 0; i < W; i++) v[i] *= scale;
        store(v, to + at);
    }
}

// out[N,D] = scale · the rows of table[V,D] selected by tokens[N]; NaN for a token outside the table.
// Grid: N. Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
embed(const int* tokens, const REAL* table, REAL* out, u32 hidden, u32 vocab, float scale) {
    u32 token = tokens[blockIdx.x];
    const REAL* from = table + (u64)token * hidden;
    out += (u64)blockIdx.x * hidden;
    if (token >= vocab)
        for (u32 at = threadIdx.x; at < hidden; at += 256) narrow(not_a_number(), out[at]);
    else if (hidden % PACK<REAL> == 0 && aligned(from) && aligned(out))
        copy_row<PACK<REAL>>(from, out, hidden, scale);
    else
        copy_row<1>(from, out, hidden, scale);
}

// ---- gradient: rows are sorted by token, and summed in portions ----
//
// The time is proportional to the number of rows, even if one token dominates; no atomics, and every sum has one order.

// Radix sort by digits of 4 bits, lowest first; each thread counts its own run of rows.
constexpr u32 SORTERS = 1024, DIGIT_BITS = 4, DIGITS = 1 << DIGIT_BITS;
// Counts that a warp sums.
constexpr u32 SHARE = SORTERS * DIGITS / 32;

// sorted[0 .. N]: the tokens in ascending order; sorted[N .. 2N]: their rows, ascending among equal tokens. A token
// outside the vocabulary becomes V. The other 2N are scratch. `passes` cover the bits of V. One block suffices: this is
// a small part of a step for any N.
// Grid: 1. Block: 1024. Shared memory: 16 · 1024 floats.
extern "C" __global__ void __launch_bounds__(1024)
embed_order(const int* tokens, u32* sorted, u32 rows, u32 vocab, u32 passes) {
    __shared__ u32 totals[32], bases[32];
    u32* counts = reinterpret_cast<u32*>(shared);  // by digit, then by thread
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 each = (rows + SORTERS - 1) / SORTERS;
    u32 first = min(rows, threadIdx.x * each), end = min(rows, first + each);
    for (u32 pass = 0; pass < passes; pass++) {
        // The last pass leaves its result in the first half.
        bool to_first = (passes - pass) % 2 == 1;
        u32* to = sorted + (to_first ? 0 : 2 * (u64)rows);
        const u32* from = sorted + (to_first ? 2 * (u64)rows : 0);
        u32 shift = pass * DIGIT_BITS;
        for (u32 digit = 0; digit < DIGITS; digit++) counts[digit * SORTERS + threadIdx.x] = 0;
        for (u32 at = first; at < end; at++) {
            u32 token = pass == 0 ? min((u32)tokens[at], vocab) : from[at];
            counts[(token >> shift) % DIGITS * SORTERS + threadIdx.x]++;
        }
        __syncthreads();
        // Each count becomes the sum of the counts before it in its warp's share.
        u32 carry = 0;
        for (u32 part = 0; part < SHARE; part += 32) {
            u32* own = counts + warp * SHARE + part + lane;
            u32 all = *own, before = 0;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                u32 other = __shfl_xor_sync(ALL_LANES, all, step);
                if (lane & step) before += other;
                all += other;
            }
            *own = carry + before;
            carry += all;
        }
        if (lane == 0) totals[warp] = carry;
        __syncthreads();
        u32 base = warp_sum(lane < warp ? totals[lane] : 0u);
        if (lane == 0) bases[warp] = base;
        __syncthreads();
        for (u32 at = first; at < end; at++) {
            u32 token = pass == 0 ? min((u32)tokens[at], vocab) : from[at];
            u32 row = pass == 0 ? at : from[rows + at];
            u32 own = (token >> shift) % DIGITS * SORTERS + threadIdx.x;
            u32 place = bases[own / SHARE] + counts[own]++;
            to[place] = token;
            to[rows + place] = row;
        }
        __syncthreads();
    }
}

// Whether the sum of sorted row `at` began before it.
__device__ inline bool goes_on(const u32* sorted, u32 at) { return at > 0 && sorted[at - 1] == sorted[at]; }

template <int W> __device__ inline void add_into(float* into, const float (&sum)[W], float scale) {
    float v[W];
    load(into, v);
#pragma unroll
    for (int i = 0; i < W; i++) v[i] = fmaf(sum[i], scale, v[i]);
    store(v, into);
}

// Sums of a few columns over a portion of the sorted rows.
template <int W>
__device__ inline void sum_portion(const u32* sorted, const REAL* dout, float* dtable, float* head, u32 first, u32 end,
                                   u32 rows, u32 hidden, u32 vocab, float scale) {
    u32 token = sorted[first];
    bool begun = goes_on(sorted, first);
    float sum[W] = {};
    auto give = [&] {
        if (begun)
            store(sum, head);
        else if (token < vocab)
            add_into(dtable + (u64)token * hidden, sum, scale);
    };
    for (u32 at = first; at < end; at += 4) {
        u32 tokens[4];
        float v[4][W];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 row = min(at + i, end - 1);
            tokens[i] = sorted[row];
            load(dout + (u64)sorted[rows + row] * hidden, v[i]);
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (at + i >= end) break;
            if (tokens[i] != token) {
                give();
                token = tokens[i], begun = false;
#pragma unroll
                for (int j = 0; j < W; j++) sum[j] = 0;
            }
#pragma unroll
            for (int j = 0; j < W; j++) sum[j] += v[i][j];
        }
    }
    give();
}

// dtable[V,D] += scale · the sums over dout[N,D] that begin in a portion of the sorted rows; heads[portions, D] = the portion's
// share of a sum that began in an earlier portion.
// Grid: (portions, ceil(D / 1024)). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
embed_grad(const u32* sorted, const REAL* dout, float* dtable, float* heads, u32 rows, u32 hidden, u32 vocab,
           u32 rows_per_portion, float scale) {
    u32 first = blockIdx.x * rows_per_portion, end = min(rows, first + rows_per_portion);
    u32 from = blockIdx.y * 1024, to = min(hidden, from + 1024);
    heads += (u64)blockIdx.x * hidden;
    if (hidden % 4 == 0 && (u64)dout % (4 * sizeof(REAL)) == 0 && aligned(dtable) && aligned(heads)) {
        u32 at = from + threadIdx.x * 4;
        if (at < to) sum_portion<4>(sorted, dout + at, dtable + at, heads + at, first, end, rows, hidden, vocab, scale);
    } else {
        for (u32 at = from + threadIdx.x; at < to; at += 256)
            sum_portion<1>(sorted, dout + at, dtable + at, heads + at, first, end, rows, hidden, vocab, scale);
    }
}

// dtable[V,D] += scale · the heads of each sum that extends beyond its portion, in order. The block of the portion after the
// sum's first portion adds them; other blocks do nothing.
// Grid: (portions, ceil(D / 256)). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
embed_grad_join(const u32* sorted, const float* heads, float* dtable, u32 rows, u32 hidden, u32 vocab,
                u32 rows_per_portion, float scale) {
    u32 portion = blockIdx.x, first = portion * rows_per_portion, column = blockIdx.y * 256 + threadIdx.x;
    if (!goes_on(sorted, first)) return;
    u32 token = sorted[first], before = first - rows_per_portion;
    if (token >= vocab || column >= hidden || (sorted[before] == token && goes_on(sorted, before))) return;
    float sum = 0;
    for (u32 at = first; at < rows && sorted[at] == token; at += rows_per_portion, portion++)
        sum += heads[(u64)portion * hidden + column];
    float* into = dtable + (u64)token * hidden + column;
    *into = fmaf(sum, scale, *into);
}
