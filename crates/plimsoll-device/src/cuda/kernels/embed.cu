// Rows of the embedding table, and their gradient.

// Columns of a block in the gradient.
constexpr u32 STRIP = 1024;

template <int W> __device__ void copy_row(const REAL* from, REAL* to, u32 hidden) {
    for (u32 at = threadIdx.x * W; at < hidden; at += 256 * W) {
        float v[W];
        load(from + at, v);
        store(v, to + at);
    }
}

// out[N,D] = the rows of table[V,D] that tokens[N] name; NaN for a token outside the table.
// Grid: N. Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
embed(const int* tokens, const REAL* table, REAL* out, u32 hidden, u32 vocab) {
    u32 token = tokens[blockIdx.x];
    const REAL* from = table + (u64)token * hidden;
    out += (u64)blockIdx.x * hidden;
    if (token >= vocab)
        for (u32 at = threadIdx.x; at < hidden; at += 256) narrow(not_a_number(), out[at]);
    else if (hidden % PACK<REAL> == 0 && aligned(from) && aligned(out))
        copy_row<PACK<REAL>>(from, out, hidden);
    else
        copy_row<1>(from, out, hidden);
}

// dtable[V,D] += the rows of dout[N,D], each where its token points. The block of a token's first
// row adds up all rows of that token, in order; the others have nothing to do. No sorting, no
// atomics, one order. The N² comparisons of tokens cost little beside the rows: at N = 8192 each
// block reads 32 KiB from the cache.
// Grid: (N, ceil(D / 1024)). Block: 256. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
embed_grad(const int* tokens, const REAL* dout, float* dtable, u32 rows, u32 hidden, u32 vocab) {
    __shared__ u32 equal[8];  // of 256 tokens, which are this block's
    u32 own = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 token = tokens[own];
    if (token >= vocab) return;
    for (u32 from = 0; from < own; from += 256) {
        u32 row = from + threadIdx.x;
        if (__syncthreads_or(row < own && (u32)tokens[row] == token)) return;
    }
    u32 column = blockIdx.y * STRIP + threadIdx.x;
    float sums[4] = {};
    for (u32 from = own; from < rows; from += 256) {
        u32 mine = from + threadIdx.x;
        u32 lanes = __ballot_sync(ALL_LANES, mine < rows && (u32)tokens[mine] == token);
        __syncthreads();  // the last tokens have been seen
        if (lane == 0) equal[warp] = lanes;
        __syncthreads();
        for (u32 part = 0; part < 8; part++) {
            for (u32 left = equal[part]; left != 0; left &= left - 1) {
                u64 row = from + part * 32 + __ffs(left) - 1;
#pragma unroll
                for (int i = 0; i < 4; i++)
                    if (column + 256 * i < hidden) sums[i] += widen(dout[row * hidden + column + 256 * i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        if (column + 256 * i < hidden) dtable[(u64)token * hidden + column + 256 * i] += sums[i];
}
