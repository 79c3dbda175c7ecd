// Element-wise operations on activations, and sums over rows.
//
// Grids of kernels over `elements` are ceil(elements / 1024), at most 65,536 blocks of 256 threads in a grid-stride
// loop, 16 bytes at a time if aligned.

template <int W> __device__ void add_all(const REAL* x, REAL* into, u64 elements) {
    u64 step = (u64)gridDim.x * 256 * W;
    for (u64 at = ((u64)blockIdx.x * 256 + threadIdx.x) * W; at < elements; at += step) {
        float a[W], b[W];
        load(x + at, a);
        load(into + at, b);
#pragma unroll
        for (int i = 0; i < W; i++) b[i] += a[i];
        store(b, into + at);
    }
}

// into += x
// Grid: over elements. Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256) add(const REAL* x, REAL* into, u64 elements) {
    if (elements % PACK<REAL> == 0 && aligned(x) && aligned(into))
        add_all<PACK<REAL>>(x, into, elements);
    else
        add_all<1>(x, into, elements);
}

template <int W> __device__ void cap_all(REAL* x, u64 elements, float cap) {
    u64 step = (u64)gridDim.x * 256 * W;
    for (u64 at = ((u64)blockIdx.x * 256 + threadIdx.x) * W; at < elements; at += step) {
        float v[W];
        load(x + at, v);
#pragma unroll
        for (int i = 0; i < W; i++) v[i] = cap * tanhf(v[i] / cap);
        store(v, x + at);
    }
}

// x = cap · tanh(x / cap)
// Grid: over elements. Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256) soft_cap(REAL* x, u64 elements, float cap) {
    if (elements % PACK<REAL> == 0 && aligned(x))
        cap_all<PACK<REAL>>(x, elements, cap);
    else
        cap_all<1>(x, elements, cap);
}

template <int W> __device__ void add_strip(const REAL* x, REAL* into, u32 from, u32 end) {
    for (u32 at = from + threadIdx.x * W; at < end; at += 256 * W) {
        float a[W], b[W];
        load(into + at, a);
        load(x + at, b);
#pragma unroll
        for (int i = 0; i < W; i++) a[i] += b[i];
        store(a, into + at);
    }
}

// into[N,C] += x[N,C], with rows `x_stride` and `stride` elements apart; an x_stride of 0 repeats one row, for the bias
// of a product that could not fuse it.
// Grid: (N, ceil(C / 2048)). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
add_rows(const REAL* x, REAL* into, u32 columns, u32 x_stride, u32 into_stride) {
    x += (u64)blockIdx.x * x_stride;
    into += (u64)blockIdx.x * into_stride;
    u32 from = blockIdx.y * 2048, end = min(columns, from + 2048);
    if (columns % PACK<REAL> == 0 && aligned(into) && aligned(x))
        add_strip<PACK<REAL>>(x, into, from, end);
    else
        add_strip<1>(x, into, from, end);
}

template <int W>
__device__ void sum_strip(const REAL* x, float* sums, u32 first, u32 end, u32 from, u32 to, u32 columns) {
    for (u32 at = from + threadIdx.x * W; at < to; at += 256 * W) {
        float sum[W] = {};
#pragma unroll 4
        for (u32 row = first; row < end; row++) {
            float v[W];
            load(x + (u64)row * columns + at, v);
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += v[i];
        }
#pragma unroll
        for (int i = 0; i < W; i++) sums[at + i] = sum[i];
    }
}

// partials[portions, C]: the sum of each portion of the rows of x[N,C], for add_partials.
// Grid: (ceil(C / 2048), portions). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
sum_rows(const REAL* x, float* partials, u32 rows, u32 columns, u32 rows_per_portion) {
    u32 first = blockIdx.y * rows_per_portion, end = min(rows, first + rows_per_portion);
    u32 from = blockIdx.x * 2048, to = min(columns, from + 2048);
    partials += (u64)blockIdx.y * columns;
    if (columns % PACK<REAL> == 0 && aligned(x))
        sum_strip<PACK<REAL>>(x, partials, first, end, from, to, columns);
    else
        sum_strip<1>(x, partials, first, end, from, to, columns);
}

// into[C] += Σ over `count` partial sums, `stride` elements apart. Eight slices are summed in parallel, then added in
// order.
// Grid: ceil(C / 32). Block: 256. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
add_partials(const float* partials, float* into, u32 count, u32 columns, u32 stride) {
    __shared__ float sums[8][32];
    u32 lane = threadIdx.x % 32, slice = threadIdx.x / 32;
    u32 column = blockIdx.x * 32 + lane;
    float sum = 0;
    if (column < columns)
        for (u32 at = slice; at < count; at += 8) sum += partials[(u64)at * stride + column];
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice > 0 || column >= columns) return;
    float total = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) total += sums[i][lane];
    into[column] += total;
}

// out[C] = the row of x[N,C] that the scalars select.
// Grid: ceil(C / 256). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
pick_row(const REAL* x, const float* scalars, REAL* out, u32 columns) {
    u32 column = blockIdx.x * 256 + threadIdx.x;
    u64 row = (u64)scalars[LAST_ROW];
    if (column < columns) out[column] = x[row * columns + column];
}
