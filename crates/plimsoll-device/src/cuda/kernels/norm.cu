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
    if (dim % 4 == 0 && fours(x) && fours(weight) && fours(out))
        norm_row<4>(x, weight, out, rstd + blockIdx.x, dim, eps);
    else
        norm_row<1>(x, weight, out, rstd + blockIdx.x, dim, eps);
}

template <int W>
__device__ void norm_row_grad(const REAL* x, const REAL* weight, float r, const REAL* dout, REAL* dx, float* dweight,
                              u32 dim, bool accumulate) {
    float products = 0;
    for (u32 at = threadIdx.x * W; at < dim; at += blockDim.x * W) {
        float v[W], w[W], d[W];
        load(x + at, v);
        load(weight + at, w);
        load(dout + at, d);
#pragma unroll
        for (int i = 0; i < W; i++) products = fmaf(d[i] * w[i], v[i], products);
    }
    float rate = -(r * r * r * (block_sum(products) / dim));
    for (u32 at = threadIdx.x * W; at < dim; at += blockDim.x * W) {
        float v[W], w[W], d[W], sum[W], before[W];
        load(x + at, v);
        load(weight + at, w);
        load(dout + at, d);
        load(dweight + at, sum);
        if (accumulate) load(dx + at, before);
#pragma unroll
        for (int i = 0; i < W; i++) {
            sum[i] = fmaf(d[i] * v[i], r, sum[i]);
            d[i] = fmaf(v[i], rate, d[i] * w[i] * r);
            if (accumulate) d[i] += before[i];
        }
        store(sum, dweight + at);
        store(d, dx + at);
    }
}

// dx[N,D] = or += the gradient; partials[portions, D] = what each portion of rows adds to dweight,
// for add_partials.
// Grid: portions. Block: 256. Shared memory: D floats, the portion's dweight; each thread has
// columns of its own.
extern "C" __global__ void __launch_bounds__(256)
rms_norm_grad(const REAL* x, const REAL* weight, const float* rstd, const REAL* dout, REAL* dx, float* partials,
              u32 rows, u32 dim, u32 rows_per_portion, u32 accumulate) {
    u32 first = blockIdx.x * rows_per_portion;
    u32 end = min(rows, first + rows_per_portion);
    bool wide = dim % 4 == 0 && fours(x) && fours(weight) && fours(dout) && fours(dx);
    // The barriers of the first row's sum stand between these zeros and their use.
    for (u32 at = threadIdx.x; at < dim; at += blockDim.x) shared[at] = 0;
    for (u32 row = first; row < end; row++) {
        u64 at = (u64)row * dim;
        if (wide)
            norm_row_grad<4>(x + at, weight, rstd[row], dout + at, dx + at, shared, dim, accumulate);
        else
            norm_row_grad<1>(x + at, weight, rstd[row], dout + at, dx + at, shared, dim, accumulate);
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < dim; at += blockDim.x) partials[(u64)blockIdx.x * dim + at] = shared[at];
}
