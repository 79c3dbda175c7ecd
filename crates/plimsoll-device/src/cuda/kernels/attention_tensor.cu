// Attention and its gradient on tensor cores: bf16, head dimensions that are multiples of 16 up to 128, and addresses
// aligned to 16 bytes. Formulas as in attention.cu, which takes all other cases; exponentials use base 2, so the scale
// of scores is log2 e / √E.
//
// A warp owns 16·M rows, queries or keys, and holds all their sums in registers. Scores are the sums of one product
// and, rounded to bf16, the left operand of the next, without a detour through shared memory. The gradient takes two
// kernels, which both compute P and dP: seven products instead of five, but no sum is shared between blocks, so there
// are no atomics and each sum has one order.
//
// Every tile row in shared memory is 16 bytes longer than a head: an odd number of packs, so that eight rows of a
// matrix, and eight packs of a copy, lie in different banks.

constexpr int E = HEAD_DIM;
static_assert(E % 16 == 0 && E >= 16 && E <= 128, "heads of whole matrices");
constexpr int ROW = E + 8;
// Steps of a product over E.
constexpr int DEPTH = E / 16;
constexpr int WARPS = 4;
constexpr int THREADS = 32 * WARPS;
__device__ inline int lane() { return threadIdx.x % 32; }
// Layout of sums: the row is group() or group() + 8, the columns are pair() and pair() + 1.
__device__ inline int group() { return lane() / 4; }
__device__ inline int pair() { return lane() % 4 * 2; }
// First of the block's rows that this warp owns, for `fragments` of 16 rows each.
__device__ inline int own_row(int fragments) { return threadIdx.x / 32 * (16 * fragments); }

__device__ inline float root_scale() { return 1.0f / sqrtf((float)E); }

__device__ inline bf16* tiles() { return reinterpret_cast<bf16*>(shared); }
// Offset of this lane's matrix row in a 16 × 16 part of a tile: the left operand of a product over columns, or,
// transposed, the right operand of one over rows.
__device__ inline int by_rows() { return lane() % 16 * ROW + lane() / 16 * 8; }
// Offset of this lane's matrix row for the right operand of a product over columns.
__device__ inline int by_columns() { return (lane() / 16 * 8 + lane() % 8) * ROW + lane() / 8 % 2 * 8; }

// Lanes that copy a row, a pack of 8 elements each; some are idle if the head dimension is no power of two.
constexpr int COPIERS = E <= 16 ? 2 : E <= 32 ? 4 : E <= 64 ? 8 : 16;

// Starts copying `valid` rows, at least one, `stride` elements apart; zeros after them.
template <int ROWS> __device__ inline void fetch(bf16* tile, const bf16* from, u32 stride, int valid) {
    constexpr int STEP = THREADS / COPIERS;
    static_assert(ROWS % STEP == 0 || STEP > ROWS, "whole steps");
    int row = threadIdx.x / COPIERS, column = threadIdx.x % COPIERS * 8;
    if (column >= E || row >= ROWS) return;
    tile += row * ROW + column;
    u32 at = row * stride + column;
#pragma unroll
    for (int step = 0; step < ROWS; step += STEP, at += STEP * stride)
        copy_pack(tile + step * ROW, from + (row + step < valid ? at : 0), row + step < valid);
}

// sums[m][n] = rows m·16.. of `left` · rows n·8.. of `right`, over E.
template <int M, int N>
__device__ inline void rows_by_rows(const bf16* left, const bf16* right, float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0;
#pragma unroll(M == 2 ? 2 : DEPTH)  // more would need too many registers
    for (int e = 0; e < E; e += 16) {
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) load_matrices(left + by_rows() + m * 16 * ROW + e, a[m]);
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            load_matrices(right + by_columns() + n * 8 * ROW + e, b);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(sums[m][n], a[m], b[0], b[1]);
                mma(sums[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// sums[m][n] = rows of the left operand, held in registers by columns of 16, times rows n·8.. of `right`.
template <int M, int N>
__device__ inline void rows_by_rows(const u32 (&left)[M][DEPTH][4], const bf16* right, float (&sums)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[m][n][i] = 0;
#pragma unroll
    for (int e = 0; e < DEPTH; e++)
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 b[4];
            load_matrices(right + by_columns() + n * 8 * ROW + e * 16, b);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(sums[m][n], left[m][e], b[0], b[1]);
                mma(sums[m][n + 1], left[m][e], b[2], b[3]);
            }
        }
}

template <int M> __device__ inline void hold(const bf16* rows, u32 (&left)[M][DEPTH][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int e = 0; e < DEPTH; e++) load_matrices(rows + by_rows() + m * 16 * ROW + e * 16, left[m][e]);
}

// sums[m] += left[m] · the N · 16 rows of `right`.
template <int M, int N>
__device__ inline void add_product(const u32 (&left)[M][N][4], const bf16* right, float (&sums)[M][E / 8][4]) {
#pragma unroll
    for (int k = 0; k < N; k++)
#pragma unroll
        for (int c = 0; c < E / 8; c += 2) {
            u32 b[4];
            load_transposed(right + by_rows() + k * 16 * ROW + c * 8, b);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(sums[m][c], left[m][k], b[0], b[1]);
                mma(sums[m][c + 1], left[m][k], b[2], b[3]);
            }
        }
}

// The warp's rows below `valid` of `to`, `stride` elements apart, times their factors.
template <int M>
__device__ inline void write_rows(const float (&sums)[M][E / 8][4], const float (&factor)[M][2], bf16* to, u64 stride,
                                  int valid) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = own_row(M) + m * 16 + half * 8 + group();
            if (row >= valid) continue;
            bf16* place = to + row * stride + pair();
            float f = factor[m][half];
#pragma unroll
            for (int c = 0; c < E / 8; c++)
                *reinterpret_cast<u32*>(place + c * 8) =
                    narrow_both(sums[m][c][half * 2] * f, sums[m][c][half * 2 + 1] * f);
        }
}

// Reduces over the four lanes that share rows of sums.
__device__ inline float row_max(float v) {
    v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 1));
    return fmaxf(v, __shfl_xor_sync(ALL_LANES, v, 2));
}

__device__ inline float row_sum(float v) {
    v += __shfl_xor_sync(ALL_LANES, v, 1);
    return v + __shfl_xor_sync(ALL_LANES, v, 2);
}

// Minimum and maximum of `count` starts, equal in every thread.
__device__ inline void span_of(const int* starts, int count, int& least, int& greatest) {
    least = 0x7fffffff;
    greatest = 0;
    for (int at = lane(); at < count; at += 32) {
        least = min(least, starts[at]);
        greatest = max(greatest, starts[at]);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        least = min(least, __shfl_xor_sync(ALL_LANES, least, step));
        greatest = max(greatest, __shfl_xor_sync(ALL_LANES, greatest, step));
    }
}

// Masks scores, of queries from `own` on and keys from `from` on, that a query does not see.
template <int M, int N>
__device__ inline void hide(float (&scores)[M][N][4], const int (&start)[M][2], int from, int own) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int key = from + n * 8 + pair() + i % 2, query = own + m * 16 + i / 2 * 8 + group();
                if (key < start[m][i / 2] || key > query) scores[m][n][i] = -infinity();
            }
}

// ---- forward ----

// With two fragments a warp reads half as much shared memory per product.
constexpr int QUERIES = 16 * 2 * WARPS;
// Keys per tile (`Tiles` in tiles.rs).
constexpr int KEYS = TILE_KEYS;
constexpr int CACHED_KEYS = TILE_CACHED_KEYS;
// Start of a query without keys, behind every row of a cache.
constexpr int NO_KEY = 0x3fffffff;

// `count` queries of a head, the first with the key in row `first`, over keys origin + starts[i] ..= first + i (from
// `origin` where `starts` is null). The values are copied while scores are computed, and the next keys while the values
// are used. CACHED takes fewer registers, and needs starts that ascend.
template <int KEYS, bool CACHED>
__device__ inline void attend(const bf16* queries, u64 query_row, int first, int count, int origin, const int* starts,
                              const bf16* keys, const bf16* values, u64 key_row, bf16* out, u64 out_row,
                              float* stats) {
    constexpr int M = 2;
    bf16* q = tiles();            // [QUERIES][ROW]
    bf16* k = q + QUERIES * ROW;  // [KEYS][ROW]
    bf16* v = k + KEYS * ROW;     // [KEYS][ROW]
    float largest[M][2], sum[M][2], sums[M][E / 8][4] = {};
    int start[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = own_row(M) + m * 16 + half * 8 + group();
            largest[m][half] = LOWEST;
            sum[m][half] = 0;
            // Rows behind the last query see no key, and are not written.
            start[m][half] = query < count ? origin + (starts ? starts[query] : 0) : NO_KEY;
        }
    int from = 0, latest = 0, end = first + count, own = first + own_row(M);
    if (starts) span_of(starts, count, from, latest);
    from += origin, latest += origin;
    float scale = root_scale() * LOG2_E;
    fetch<QUERIES>(q, queries, query_row, count);
    fetch<KEYS>(k, keys + from * key_row, key_row, end - from);
    for (; from < end; from += KEYS) {
        copies_landed();
        __syncthreads();  // the keys have arrived, the previous values have been read
        fetch<KEYS>(v, values + from * key_row, key_row, end - from);
        bool seen = from < own + 16 * M;
        float s[M][KEYS / 8][4];
        if (seen) rows_by_rows(q + own_row(M) * ROW, k, s);
        copies_landed();
        __syncthreads();  // the values have arrived, the keys have been read
        if (from + KEYS < end) fetch<KEYS>(k, keys + (from + KEYS) * key_row, key_row, end - from - KEYS);
        if (!seen) continue;
        // Of the queries of a thread, the last one has the latest start.
        bool whole = from >= (CACHED ? start[M - 1][1] : latest) && from + KEYS <= own + 1;
        if (CACHED) whole = __ballot_sync(ALL_LANES, whole) == ALL_LANES;
        if (!whole) hide(s, start, from, own);
        u32 p[M][KEYS / 16][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = largest[m][half], total = 0;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
                    most = fmaxf(most, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
                most = row_max(most);
                float factor = power_of_two((largest[m][half] - most) * scale), less = most * scale;
                largest[m][half] = most;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int i = half * 2; i < half * 2 + 2; i++) {
                        s[m][n][i] = power_of_two(fmaf(s[m][n][i], scale, -less));
                        total += s[m][n][i];
                    }
                sum[m][half] = fmaf(sum[m][half], factor, total);
#pragma unroll
                for (int c = 0; c < E / 8; c++) {
                    sums[m][c][half * 2] *= factor;
                    sums[m][c][half * 2 + 1] *= factor;
                }
            }
            left_of(s[m], p[m]);
        }
        add_product(p, v, sums);
    }
    float factor[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            sum[m][half] = row_sum(sum[m][half]);
            factor[m][half] = 1.0f / sum[m][half];
            int query = own_row(M) + m * 16 + half * 8 + group();
            if (stats && pair() == 0 && query < count)
                stats[query] = fmaf(largest[m][half], root_scale(), logf(sum[m][half]));
        }
    write_rows(sums, factor, out, out_row, count);
}

// As `attention` in attention.cu.
// Grid: (ceil(T / QUERIES), H, B). Block: 128. Shared memory: QUERIES + 2 · KEYS rows.
extern "C" __global__ void __launch_bounds__(THREADS)
tensor_attention(const bf16* qkv, const int* document_start, bf16* out, float* stats, u32 sequence, u32 heads,
                 u32 kv_heads) {
    int first = (gridDim.x - 1 - blockIdx.x) * QUERIES;
    int count = min(QUERIES, (int)sequence - first);
    u32 head = blockIdx.y, kv = head / (heads / kv_heads);
    u64 row = (u64)(heads + 2 * kv_heads) * E, out_row = (u64)heads * E;
    u64 sequence_start = (u64)blockIdx.z * sequence, query = sequence_start + first;
    const bf16* keys = qkv + sequence_start * row + (heads + kv) * E;
    attend<KEYS, false>(qkv + query * row + head * E, row, first, count, 0, document_start + query, keys,
                        keys + kv_heads * E, row, out + query * out_row + head * E, out_row,
                        stats + (u64)(blockIdx.z * heads + head) * sequence + first);
}

// Minimum blocks per multiprocessor for the register limit; 0 leaves it to the compiler, which before CUDA 13 spills for
// heads of 96.
#if defined(__CUDACC_VER_MAJOR__) && __CUDACC_VER_MAJOR__ < 13
constexpr int CACHED_BLOCKS = E == 96 ? 1 : 0;
#else
constexpr int CACHED_BLOCKS = 0;
#endif

// As `cached_attention` in attention.cu.
// Grid: (ceil(n / QUERIES), H, S). Block: 128. Shared memory: QUERIES + 2 · CACHED_KEYS rows.
extern "C" __global__ void __launch_bounds__(THREADS, CACHED_BLOCKS)
tensor_cached_attention(const bf16* qkv, const bf16* keys, const bf16* values, const int* places,
                        const int* first_keys, bf16* out, u32 rows, u32 capacity, u32 heads, u32 kv_heads) {
    int block = blockIdx.x * QUERIES;
    int place = places[blockIdx.z * rows];
    u64 first = (u64)blockIdx.z * rows + block;
    int count = min(QUERIES, (int)rows - block);
    u32 head = blockIdx.y, kv = head / (heads / kv_heads);
    u64 row = (u64)(heads + 2 * kv_heads) * E, out_row = (u64)heads * E;
    attend<CACHED_KEYS, true>(qkv + first * row + head * E, row, place + block, count, place - place % (int)capacity,
                              first_keys ? first_keys + first : nullptr, keys + kv * E, values + kv * E,
                              (u64)kv_heads * E, out + first * out_row + head * E, out_row, nullptr);
}

// ---- backward ----

// Fragments per warp: registers hold the sums of two for heads of up to 64.
constexpr int M = E <= 64 ? 2 : 1;
constexpr int OWNED = 16 * M * WARPS;
// Minimum blocks per multiprocessor for the register limit; 0 leaves it to the compiler, which would spill for heads of
// 80.
constexpr int BLOCKS = E == 80 ? 3 : 0;
// Rows of a tile of visited keys, and of visited queries (`Tiles` in tiles.rs). Two tiles of two tensors are allocated:
// one is used while the other is being copied.
constexpr int MET_KEYS = 32;
constexpr int MET = TILE_MET_QUERIES;

// The dQ part of dqkv[N,C], and delta[B,H,T] = Σ out · dout of each row: a block owns queries and visits keys.
// Grid: (ceil(T / OWNED), H, B). Block: 128. Shared memory: 2 · OWNED rows.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tensor_attention_grad_queries(const bf16* qkv, const bf16* out, const bf16* dout, const float* stats, float* delta,
                              const int* document_start, bf16* dqkv, u32 sequence, u32 heads, u32 kv_heads) {
    bf16* own_tiles = tiles();  // [queries, gradients of the output][OWNED][ROW], until they are in registers
    bf16* kv = tiles();         // [2][keys, values][MET_KEYS][ROW]
    static_assert(4 * MET_KEYS <= 2 * OWNED, "keys and values have room where queries were");
    int first = (gridDim.x - 1 - blockIdx.x) * OWNED;
    int count = min(OWNED, (int)sequence - first);
    u32 head = blockIdx.y, of = head / (heads / kv_heads);
    u64 row = (u64)(heads + 2 * kv_heads) * E, out_row = (u64)heads * E;
    u64 sequence_start = (u64)blockIdx.z * sequence, query = sequence_start + first;
    u64 unit = (u64)(blockIdx.z * heads + head) * sequence + first;
    const bf16* keys = qkv + sequence_start * row + (heads + of) * E;
    const bf16* values = keys + kv_heads * E;
    const int* starts = document_start + query;
    out += query * out_row + head * E;
    dout += query * out_row + head * E;

    int from, latest, end = first + count, own = first + own_row(M);
    span_of(starts, count, from, latest);
    fetch<OWNED>(own_tiles, qkv + query * row + head * E, row, count);
    fetch<OWNED>(own_tiles + OWNED * ROW, dout, out_row, count);

    float stat[M][2], less[M][2], factor[M][2], sums[M][E / 8][4] = {};
    int start[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int at = own_row(M) + m * 16 + half * 8 + group();
            bool real = at < count;
            float products = 0;
            for (int pack = lane() % 4; real && pack < E / 8; pack += 4) {
                float a[8], b[8];
                load(out + at * out_row + pack * 8, a);
                load(dout + at * out_row + pack * 8, b);
#pragma unroll
                for (int i = 0; i < 8; i++) products = fmaf(a[i], b[i], products);
            }
            less[m][half] = row_sum(products);
            if (real && pair() == 0) delta[unit + at] = less[m][half];
            stat[m][half] = real ? stats[unit + at] * LOG2_E : 0.0f;
            start[m][half] = real ? starts[at] : 0x7fffffff;
            factor[m][half] = root_scale();
        }
    float scale = root_scale() * LOG2_E;
    u32 q[M][DEPTH][4], d[M][DEPTH][4];
    copies_landed();
    __syncthreads();
    hold(own_tiles + own_row(M) * ROW, q);
    hold(own_tiles + (OWNED + own_row(M)) * ROW, d);
    __syncthreads();  // they are in registers
    fetch<MET_KEYS>(kv, keys + from * row, row, end - from);
    fetch<MET_KEYS>(kv + MET_KEYS * ROW, values + from * row, row, end - from);
    for (int turn = 0; from < end; from += MET_KEYS, turn ^= 1) {
        copies_landed();
        __syncthreads();  // this tile has arrived, the previous one has been read
        if (from + MET_KEYS < end) {
            bf16* next = kv + (turn ^ 1) * 2 * MET_KEYS * ROW;
            fetch<MET_KEYS>(next, keys + (from + MET_KEYS) * row, row, end - from - MET_KEYS);
            fetch<MET_KEYS>(next + MET_KEYS * ROW, values + (from + MET_KEYS) * row, row, end - from - MET_KEYS);
        }
        if (from >= own + 16 * M) continue;
        const bf16* k = kv + turn * 2 * MET_KEYS * ROW;
        bool whole = from >= latest && from + MET_KEYS <= own + 1;
        float s[M][MET_KEYS / 8][4], ds[M][MET_KEYS / 8][4];
        rows_by_rows(q, k, s);
        rows_by_rows(d, k + MET_KEYS * ROW, ds);
        u32 p[M][MET_KEYS / 16][4];
        if (!whole) hide(s, start, from, own);
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int n = 0; n < MET_KEYS / 8; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float weight = power_of_two(fmaf(s[m][n][i], scale, -stat[m][i / 2]));
                    ds[m][n][i] = weight * (ds[m][n][i] - less[m][i / 2]);
                }
            left_of(ds[m], p[m]);
        }
        add_product(p, k, sums);
    }
    write_rows(sums, factor, dqkv + query * row + head * E, row, count);
}

// One more than the last query, at or after `first`, that sees a key before `end`; equal in every thread.
__device__ inline int end_of_sight(const int* starts, int first, int end, int sequence) {
    __shared__ int ends[WARPS];
    int last = first;
    for (int query = first + threadIdx.x; query < sequence; query += THREADS)
        if (starts[query] < end) last = query + 1;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) last = max(last, __shfl_xor_sync(ALL_LANES, last, step));
    if (lane() == 0) ends[threadIdx.x / 32] = last;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) last = max(last, ends[warp]);
    return last;
}

// Order of key blocks. Early keys are seen by the most queries, so the tiles with the most work come first. If a large
// GPU runs all blocks at once (an H100 two on each of 132 multiprocessors), the second half is reversed, so that each
// multiprocessor gets a long and a short block.
__device__ inline int tile_in_turn(int turn, int count, u32 blocks) {
    int half = (count + 1) / 2;
    return turn < half || blocks > 264 ? turn : count - 1 - (turn - half);
}

// The dK and dV parts of dqkv[N,C]: a block owns keys of a kv head and visits the queries of all heads of its group,
// head by head, after tensor_attention_grad_queries has computed delta.
// Grid: (K, B, ceil(T / OWNED)). Block: 128. Shared memory: 2 · OWNED + 4 · MET rows, and 6 · MET floats.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
tensor_attention_grad_keys(const bf16* qkv, const bf16* dout, const float* stats, const float* delta,
                           const int* document_start, bf16* dqkv, u32 sequence, u32 heads, u32 kv_heads) {
    bf16* k = tiles();           // [OWNED][ROW]
    bf16* v = k + OWNED * ROW;   // [OWNED][ROW]
    bf16* met = v + OWNED * ROW; // [2][queries, gradients of the output][MET][ROW]
    float* words = reinterpret_cast<float*>(met + 4 * MET * ROW);  // [2][stats, delta, starts][MET]
    int first = tile_in_turn(blockIdx.z, gridDim.z, gridDim.x * gridDim.y * gridDim.z) * OWNED;
    int count = min(OWNED, (int)sequence - first), own = first + own_row(M);
    u32 group_heads = heads / kv_heads;
    u32 row = (heads + 2 * kv_heads) * E, out_row = heads * E;
    u64 sequence_start = (u64)blockIdx.y * sequence;
    u64 key_at = (sequence_start + first) * row + (heads + blockIdx.x) * E, value_at = key_at + kv_heads * E;
    const int* starts = document_start + sequence_start;
    const bf16* queries = qkv + sequence_start * row + blockIdx.x * group_heads * E;
    const bf16* douts = dout + sequence_start * out_row + blockIdx.x * group_heads * E;
    u32 units = (blockIdx.y * heads + blockIdx.x * group_heads) * sequence;

    // Copies the queries from `from` on of head `head` of the group.
    auto meet = [&](int turn, u32 head, int from) {
        bf16* to = met + turn * 2 * MET * ROW;
        int valid = (int)sequence - from;
        fetch<MET>(to, queries + (head * E + (u64)from * row), row, valid);
        fetch<MET>(to + MET * ROW, douts + (head * E + (u64)from * out_row), out_row, valid);
        int which = threadIdx.x / MET, at = threadIdx.x % MET, real = min(at, valid - 1);
        u32 unit = units + head * sequence + from + real;
        const void* word = which == 0 ? (const void*)(stats + unit) : (const void*)(delta + unit);
        if (which == 2) word = starts + from + real;
        if (which < 3) copy_word(words + (turn * 3 + which) * MET + at, word, at < valid);
    };
    fetch<OWNED>(k, qkv + key_at, row, count);
    fetch<OWNED>(v, qkv + value_at, row, count);
    meet(0, 0, first);
    int end = end_of_sight(starts, first, first + count, (int)sequence);

    float dk[M][E / 8][4] = {}, dv[M][E / 8][4] = {};
    float scale = root_scale() * LOG2_E;
    int from = first, turn = 0;
    u32 head = 0;
    while (head < group_heads) {
        copies_landed();
        __syncthreads();  // this tile has arrived, the previous one has been read
        bool last = from + MET >= end;
        u32 next_head = last ? head + 1 : head;
        int next = last ? first : from + MET;
        if (next_head < group_heads) meet(turn ^ 1, next_head, next);
        const bf16* q = met + turn * 2 * MET * ROW;
        const bf16* d = q + MET * ROW;
        const float* stat = words + turn * 3 * MET;
        const float* less = stat + MET;
        const int* start = reinterpret_cast<const int*>(less + MET);
        if (from + MET > own) {
            // Queries beyond the sequence are zeros, as are their gradients, so they add nothing.
            bool whole =
                from >= own + 16 * M - 1 && __ballot_sync(ALL_LANES, start[lane() % MET] <= own) == ALL_LANES;
            float s[M][MET / 8][4], ds[M][MET / 8][4];
            u32 p[M][MET / 16][4];
            rows_by_rows(k + own_row(M) * ROW, q, s);
            if (!whole) {
#pragma unroll
                for (int n = 0; n < MET / 8; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        int column = n * 8 + pair() + i, query = from + column, least = start[column];
#pragma unroll
                        for (int m = 0; m < M; m++)
#pragma unroll
                            for (int half = 0; half < 2; half++) {
                                int key = own + m * 16 + half * 8 + group();
                                if (key < least || key > query) s[m][n][half * 2 + i] = -infinity();
                            }
                    }
            }
#pragma unroll
            for (int n = 0; n < MET / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float base = stat[n * 8 + pair() + i] * LOG2_E;
#pragma unroll
                    for (int m = 0; m < M; m++)
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            float& weight = s[m][n][half * 2 + i];
                            weight = power_of_two(fmaf(weight, scale, -base));
                        }
                }
#pragma unroll
            for (int m = 0; m < M; m++) left_of(s[m], p[m]);
            add_product(p, d, dv);
            rows_by_rows(v + own_row(M) * ROW, d, ds);
#pragma unroll
            for (int n = 0; n < MET / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float own_less = less[n * 8 + pair() + i];
#pragma unroll
                    for (int m = 0; m < M; m++)
#pragma unroll
                        for (int half = 0; half < 2; half++)
                            ds[m][n][half * 2 + i] =
                                s[m][n][half * 2 + i] * (ds[m][n][half * 2 + i] - own_less);
                }
#pragma unroll
            for (int m = 0; m < M; m++) left_of(ds[m], p[m]);
            add_product(p, q, dk);
        }
        head = next_head;
        from = next;
        turn ^= 1;
    }
    float one[M][2], root[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            one[m][half] = 1.0f;
            root[m][half] = root_scale();
        }
    write_rows(dk, root, dqkv + key_at, row, count);
    write_rows(dv, one, dqkv + value_at, row, count);
}
