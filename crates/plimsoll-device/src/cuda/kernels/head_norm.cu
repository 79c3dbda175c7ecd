// Root-mean-square norms of each query and key head (Qwen3), and their gradient. Formulas as in norm.cu over the E
// elements of a head. One warp handles a head of a row.

// The most elements of a head per lane: E <= 256.
constexpr int HELD = 8;

// out[N,C]: query heads normalized with q_weight[E], key heads with k_weight[E], values copied; rstd[N, H+K].
// Grid: ceil(N·(H+2K) / 8). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
head_norm(const REAL* x, const REAL* q_weight, const REAL* k_weight, REAL* out, float* rstd, u32 rows, u32 heads,
          u32 kv_heads, u32 head_dim, float eps, float offset) {
    u32 lane = threadIdx.x % 32, all = heads + 2 * kv_heads, normed = heads + kv_heads;
    u64 unit = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (unit >= (u64)rows * all) return;
    u64 row = unit / all;
    u32 head = unit % all;
    x += unit * head_dim;
    out += unit * head_dim;
    if (head >= normed) {
        for (u32 e = lane; e < head_dim; e += 32) out[e] = x[e];
        return;
    }
    const REAL* weight = head < heads ? q_weight : k_weight;
    float v[HELD], squares = 0;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        u32 e = lane + 32 * i;
        v[i] = e < head_dim ? widen(x[e]) : 0.0f;
        squares = fmaf(v[i], v[i], squares);
    }
    float r = 1.0f / sqrtf(warp_sum(squares) / head_dim + eps);
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        u32 e = lane + 32 * i;
        if (e < head_dim) narrow(v[i] * r * (widen(weight[e]) + offset), out[e]);
    }
    if (lane == 0) rstd[row * normed + head] = r;
}

// Converts the output's gradient in dx[N,C] to the input's; partials[portions, 2E] = each portion's contribution to
// dq_weight | dk_weight, for add_partials.
// Grid: portions. Block: 256. Shared memory: 8 · 2E floats, the sums of each warp.
extern "C" __global__ void __launch_bounds__(256)
head_norm_grad(const REAL* x, const REAL* q_weight, const REAL* k_weight, const float* rstd, REAL* dx,
               float* partials, u32 rows, u32 heads, u32 kv_heads, u32 head_dim, u32 rows_per_portion,
               float offset) {
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, all = heads + 2 * kv_heads, normed = heads + kv_heads;
    u64 first = (u64)blockIdx.x * rows_per_portion;
    u64 end = min((u64)rows, first + rows_per_portion);
    float dq[HELD] = {}, dk[HELD] = {};
    for (u64 unit = first * normed + warp; unit < end * normed; unit += 8) {
        u64 row = unit / normed;
        u32 head = unit % normed;
        bool query = head < heads;
        const REAL* weight = query ? q_weight : k_weight;
        u64 at = (row * all + head) * head_dim;
        float v[HELD], d[HELD], products = 0;
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            u32 e = lane + 32 * i;
            bool inside = e < head_dim;
            v[i] = inside ? widen(x[at + e]) : 0.0f;
            d[i] = inside ? widen(dx[at + e]) : 0.0f;
            products = fmaf(inside ? d[i] * (widen(weight[e]) + offset) : 0.0f, v[i], products);
        }
        float r = rstd[unit];
        float rate = -(r * r * r * (warp_sum(products) / head_dim));
#pragma unroll
        for (int i = 0; i < HELD; i++) {
            u32 e = lane + 32 * i;
            if (e < head_dim) narrow(fmaf(v[i], rate, d[i] * (widen(weight[e]) + offset) * r), dx[at + e]);
            float dweight = d[i] * v[i] * r;
            dq[i] += query ? dweight : 0.0f;
            dk[i] += query ? 0.0f : dweight;
        }
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        u32 e = lane + 32 * i;
        if (e < head_dim) {
            shared[warp * 2 * head_dim + e] = dq[i];
            shared[warp * 2 * head_dim + head_dim + e] = dk[i];
        }
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < 2 * head_dim; at += blockDim.x) {
        float sum = 0;
        for (u32 from = 0; from < 8; from++) sum += shared[from * 2 * head_dim + at];
        partials[(u64)blockIdx.x * 2 * head_dim + at] = sum;
    }
}
