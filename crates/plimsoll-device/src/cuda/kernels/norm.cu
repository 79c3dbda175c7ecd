// Root-mean-square norms of rows, and their gradient.
//
// y = x · r · w with r = 1 / sqrt(mean(x²) + eps). For the gradient, with g = dy · w:
// dx = r · (g − x · r² · mean(g · x)), dw = Σ over rows of dy · x · r   (as cpu/kernels/norm.rs).

template <int W>
__device__ void norm_row(const REAL* x, const REAL* weight, REAL* out, float* rstd, u32 dim, float eps) {
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
        for (int i = 0; i < W; i++) v[i] *= r * w[i];
        store(v, out + at);
    }
    if (threadIdx.x == 0) *rstd = r;
}

// out[N,D] = x[N,D] / rms · weight[D]; rstd[N] = 1 / rms.
// Grid: N. Block: 256. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
rms_norm(const REAL* x, const REAL* weight, REAL* out, float* rstd, u32 dim, float eps) {
    x += (u64)blockIdx.x * dim;
    out += (u64)blockIdx.x * dim;
    if (dim % PACK<REAL> == 0 && aligned(x) && aligned(weight) && aligned(out))
        norm_row<PACK<REAL>>(x, weight, out, rstd + blockIdx.x, dim, eps);
    else
        norm_row<1>(x, weight, out, rstd + blockIdx.x, dim, eps);
}

// Rows per iteration of a block: a warp reduces each row, then the threads go over all rows, each with its own columns.
constexpr u32 ROWS = 8;

template <int W>
__device__ void norm_rows_grad(const REAL* x, const REAL* weight, const float* rstd, const REAL* dout, REAL* dx,
                               float* dweight, u32 rows, u32 dim, bool accumulate) {
    __shared__ float roots[ROWS], rates[ROWS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp < rows) {
        float products = 0;
        // Several loads are in flight at once.
#pragma unroll 4
        for (u32 at = lane * W; at < dim; at += 32 * W) {
            float v[W], w[W], d[W];
            load(x + (u64)warp * dim + at, v);
            load(weight + at, w);
            load(dout + (u64)warp * dim + at, d);
#pragma unroll
            for (int i = 0; i < W; i++) products = fmaf(d[i] * w[i], v[i], products);
        }
        float r = rstd[warp];
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
            u64 place = (u64)row * dim + at;
            float r = roots[row], rate = rates[row], v[W], d[W], before[W];
            load(x + place, v);
            load(dout + place, d);
            if (accumulate) load(dx + place, before);
#pragma unroll
            for (int i = 0; i < W; i++) {
                sum[i] = fmaf(d[i] * v[i], r, sum[i]);
                d[i] = fmaf(v[i], rate, d[i] * w[i] * r);
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
              u32 rows, u32 dim, u32 rows_per_portion, u32 accumulate) {
    u32 first = blockIdx.x * rows_per_portion;
    u32 end = min(rows, first + rows_per_portion);
    bool wide = dim % PACK<REAL> == 0 && aligned(x) && aligned(weight) && aligned(dout) && aligned(dx);
    // The barrier after the first rows' reductions separates these zeros from their use.
    for (u32 at = threadIdx.x; at < dim; at += 256) shared[at] = 0;
    for (u32 row = first; row < end; row += ROWS) {
        u64 at = (u64)row * dim;
        u32 count = min(ROWS, end - row);
        if (wide)
            norm_rows_grad<PACK<REAL>>(x + at, weight, rstd + row, dout + at, dx + at, shared, count, dim, accumulate);
        else
            norm_rows_grad<1>(x + at, weight, rstd + row, dout + at, dx + at, shared, count, dim, accumulate);
    }
    for (u32 at = threadIdx.x; at < dim; at += 256) partials[(u64)blockIdx.x * dim + at] = shared[at];
}
