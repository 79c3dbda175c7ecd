// Root-mean-square norms of rows, and of all queries and all keys of a row, with their gradients.
//
// y = x · r · w (+ residual) with r = 1 / sqrt(mean(x²) + eps), where w = weight + offset. With g = dy · w, the gradient is
// dx = r · (g − x · r² · mean(g · x)), dw = Σ over rows of dy · x · r   (as cpu/kernels/norm.rs).

template <int W>
__device__ void norm_row(const REAL* x, const REAL* weight, const REAL* residual, REAL* out, float* rstd, u32 dim,
                         float eps, float offset) {
    float squares = 0;
    for (u32 at = threadIdx.x * W; at < dim; at += blockDim.x * W) {
        float v[W];
        load(x + at, v);
#pragma unroll
        for (int i = 0; i < W; i++) squares = fmaf(v[i], v[i], squares);
    }
    float r = 1.0f / sqrtf(block_sum(squares) / dim + eps);
    for (u32 at = threadIdx.x * W; at < dim; at += blockDim.x * W) {
        float v[W], w[W];
        load(x + at, v);
        load(weight + at, w);
#pragma unroll
        for (int i = 0; i < W; i++) v[i] *= r * (w[i] + offset);
        if (residual) {
            load(residual + at, w);
#pragma unroll
            for (int i = 0; i < W; i++) v[i] += w[i];
        }
        store(v, out + at);
    }
    if (threadIdx.x == 0) *rstd = r;
}

// out[N,D] = x[N,D] / rms · (weight[D] + offset) (+ residual[N,D], if not null); rstd[N] = 1 / rms.
// Grid: N. Block: 256. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
rms_norm(const REAL* x, const REAL* weight, const REAL* residual, REAL* out, float* rstd, u32 dim, float eps,
         float offset) {
    x += (u64)blockIdx.x * dim;
    out += (u64)blockIdx.x * dim;
    if (residual) residual += (u64)blockIdx.x * dim;
    if (dim % PACK<REAL> == 0 && aligned(x) && aligned(weight) && aligned(residual) && aligned(out))
        norm_row<PACK<REAL>>(x, weight, residual, out, rstd + blockIdx.x, dim, eps, offset);
    else
        norm_row<1>(x, weight, residual, out, rstd + blockIdx.x, dim, eps, offset);
}

// out[N, Q+2K]: the Q queries of a row normalized with q_weight[Q], its K keys with k_weight[K], its values copied;
// rstd[N, 2]. Q, K: numbers of elements.
// Grid: 3N. Block: 256. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
all_heads_norm(const REAL* x, const REAL* q_weight, const REAL* k_weight, REAL* out, float* rstd, u32 queries, u32 keys,
               float eps, float offset) {
    u32 row = blockIdx.x / 3, part = blockIdx.x % 3, dim = part == 0 ? queries : keys;
    u64 at = (u64)row * (queries + 2 * keys) + (part == 0 ? 0 : queries) + (part == 2 ? keys : 0);
    x += at;
    out += at;
    if (part == 2) {
        for (u32 e = threadIdx.x; e < dim; e += 256) out[e] = x[e];
        return;
    }
    const REAL* weight = part == 0 ? q_weight : k_weight;
    if (dim % PACK<REAL> == 0 && aligned(x) && aligned(weight) && aligned(out))
        norm_row<PACK<REAL>>(x, weight, nullptr, out, rstd + 2 * (u64)row + part, dim, eps, offset);
    else
        norm_row<1>(x, weight, nullptr, out, rstd + 2 * (u64)row + part, dim, eps, offset);
}

// Rows per iteration of a block: a warp reduces each row, then the threads go over all rows, each with its own columns.
constexpr u32 ROWS = 8;

// Rows of x, dout and dx are `stride` elements apart, those of rstd `rstd_stride`. dx may be dout.
template <int W>
__device__ void norm_rows_grad(const REAL* x, const REAL* weight, const float* rstd, const REAL* dout, REAL* dx,
                               float* dweight, u32 rows, u32 dim, u32 stride, u32 rstd_stride, float offset,
                               bool accumulate) {
    __shared__ float roots[ROWS], rates[ROWS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp < rows) {
        float products = 0;
        // Several loads are in flight at once.
#pragma unroll 4
        for (u32 at = lane * W; at < dim; at += 32 * W) {
            float v[W], w[W], d[W];
            load(x + (u64)warp * stride + at, v);
            load(weight + at, w);
            load(dout + (u64)warp * stride + at, d);
#pragma unroll
            for (int i = 0; i < W; i++) products = fmaf(d[i] * (w[i] + offset), v[i], products);
        }
        float r = rstd[warp * rstd_stride];
        products = warp_sum(products);
        if (lane == 0) {
            roots[warp] = r;
            rates[warp] = -(r * r * r * (products / dim));
        }
    }
    __syncthreads();
    for (u32 at = threadIdx.x * W; at < dim; at += 256 * W) {
        float w[W], sum[W];
        load(weight + at, w);
        load(dweight + at, sum);
#pragma unroll 4
        for (u32 row = 0; row < rows; row++) {
            u64 place = (u64)row * stride + at;
            float r = roots[row], rate = rates[row], v[W], d[W], before[W];
            load(x + place, v);
            load(dout + place, d);
            if (accumulate) load(dx + place, before);
#pragma unroll
            for (int i = 0; i < W; i++) {
                sum[i] = fmaf(d[i] * v[i], r, sum[i]);
                d[i] = fmaf(v[i], rate, d[i] * (w[i] + offset) * r);
                if (accumulate) d[i] += before[i];
            }
            store(d, dx + place);
        }
        store(sum, dweight + at);
    }
    __syncthreads();  // the row factors have been read
}

// dx[N,D] = or += the gradient; partials[portions, D] = each portion's contribution to dweight, for add_partials.
// Grid: portions. Block: 256. Shared memory: D floats, the portion's dweight.
extern "C" __global__ void __launch_bounds__(256, 2)
rms_norm_grad(const REAL* x, const REAL* weight, const float* rstd, const REAL* dout, REAL* dx, float* partials,
              u32 rows, u32 dim, u32 rows_per_portion, float offset, u32 accumulate) {
    u32 first = blockIdx.x * rows_per_portion;
    u32 end = min(rows, first + rows_per_portion);
    bool wide = dim % PACK<REAL> == 0 && aligned(x) && aligned(weight) && aligned(dout) && aligned(dx);
    // The barrier after the first rows' reductions separates these zeros from their use.
    for (u32 at = threadIdx.x; at < dim; at += 256) shared[at] = 0;
    for (u32 row = first; row < end; row += ROWS) {
        u64 at = (u64)row * dim;
        u32 count = min(ROWS, end - row);
        if (wide)
            norm_rows_grad<PACK<REAL>>(x + at, weight, rstd + row, dout + at, dx + at, shared, count, dim, dim, 1,
                                        offset, accumulate);
        else
            norm_rows_grad<1>(x + at, weight, rstd + row, dout + at, dx + at, shared, count, dim, dim, 1, offset,
                              accumulate);
    }
    for (u32 at = threadIdx.x; at < dim; at += 256) partials[(u64)blockIdx.x * dim + at] = shared[at];
}

// Converts the gradient of the output of all_heads_norm in dx[N, Q+2K] to that of the input; partials[portions, Q+K] =
// each portion's contribution to dq_weight | dk_weight, for add_partials.
// Grid: 2 · portions. Block: 256. Shared memory: max(Q, K) floats, the sums of a portion's queries or keys.
extern "C" __global__ void __launch_bounds__(256, 1)
all_heads_norm_grad(const REAL* x, const REAL* q_weight, const REAL* k_weight, const float* rstd, REAL* dx,
                    float* partials, u32 rows, u32 queries, u32 keys, u32 rows_per_portion,
                    float offset) {
    u32 portion = blockIdx.x / 2, part = blockIdx.x % 2;
    u32 dim = part == 0 ? queries : keys, column = part == 0 ? 0 : queries, stride = queries + 2 * keys;
    const REAL* weight = part == 0 ? q_weight : k_weight;
    u32 first = portion * rows_per_portion;
    u32 end = min(rows, first + rows_per_portion);
    x += column;
    dx += column;
    rstd += part;
    partials += (u64)portion * (queries + keys) + column;
    bool wide = dim % PACK<REAL> == 0 && stride % PACK<REAL> == 0 && aligned(x) && aligned(weight) && aligned(dx);
    // The barrier after the first rows' reductions separates these zeros from their use.
    for (u32 at = threadIdx.x; at < dim; at += 256) shared[at] = 0;
    for (u32 row = first; row < end; row += ROWS) {
        u64 at = (u64)row * stride;
        const float* roots = rstd + 2 * (u64)row;
        u32 count = min(ROWS, end - row);
        if (wide)
            norm_rows_grad<PACK<REAL>>(x + at, weight, roots, dx + at, dx + at, shared, count, dim, stride, 2, offset,
                                        false);
        else
            norm_rows_grad<1>(x + at, weight, roots, dx + at, dx + at, shared, count, dim, stride, 2, offset, false);
    }
    for (u32 at = threadIdx.x; at < dim; at += 256) partials[at] = shared[at];
}
