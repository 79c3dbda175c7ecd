// Causal attention within documents, its gradient, and attention over a cache.
//
// A block of queries visits the keys that it sees, tile by tile, in shared memory; no T × T matrix exists. Sums are
// float, on the ordinary arithmetic units. attention_tensor.cu has the same kernels for tensor cores.
//
// Forward (Milakov and Gimelshein, "Online normalizer calculation for softmax"; Dao et al.,
// "FlashAttention"): S = Q·Kᵀ / √E, P = e^(S − max so far), out = rescaled out + P·V.
// Backward, from stats = ln Σ e^S: P = e^(S − stats), dV = Pᵀ·dO, dP = dO·Vᵀ,
// dS = P · (dP − δ) / √E with δ = Σ out · dO, dK = dSᵀ·Q, dQ = dS·K. One kernel computes dQ, another dK and dV with all
// query heads of the group in order. Every sum therefore has a fixed order.
//
// With a soft cap c, a score s becomes c · tanh(s / c), and dS has the factor 1 − (s / c)². SOFTCAP is c, if it is defined.
//
// HEAD_DIM is E, at most 128. Threads form a grid of 16 columns (x) and some rows (y); each owns every 16th column and
// every y-th row of a tile.

constexpr int E = HEAD_DIM;
// Tile rows are padded with zeros to a multiple of 16, and spaced so that packs of four from eight rows fall into
// different banks.
constexpr int WIDE = (E + 15) / 16 * 16;
constexpr int ROW = WIDE + 4;
constexpr int COLUMNS = WIDE / 16;

__device__ inline int x() { return threadIdx.x % 16; }
__device__ inline int y() { return threadIdx.x / 16; }

// tile[ROWS] = scale · rows of `from`, `stride` elements apart; zeros from row `valid` on.
template <int ROWS, int THREADS>
__device__ inline void lay_out(float* tile, const REAL* from, u64 stride, int valid, float scale) {
    bool wide = E % 4 == 0 && stride % 4 == 0 && (u64)from % sizeof(Pack<REAL, 4>) == 0;
    for (int at = threadIdx.x; at < ROWS * (WIDE / 4); at += THREADS) {
        int row = at / (WIDE / 4), column = at % (WIDE / 4) * 4;
        float v[4] = {};
        if (row < valid) {
            const REAL* place = from + row * stride + column;
            if (wide && column < E) load<4>(place, v);
            if (!wide)
                for (int i = 0; i < 4; i++)
                    if (column + i < E) v[i] = widen(place[i]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) v[i] *= scale;
        store(v, tile + row * ROW + column);
    }
}

__device__ inline Four four(const float* at) { return *reinterpret_cast<const Four*>(at); }

// dots[i][j] = row y + i·Y of a · row x + j·16 of b.
template <int M, int N, int Y> __device__ inline void products(const float* a, const float* b, float (&dots)[M][N]) {
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int j = 0; j < N; j++) dots[i][j] = 0;
    for (int e = 0; e < WIDE; e += 4) {
        Four left[M], right[N];
#pragma unroll
        for (int i = 0; i < M; i++) left[i] = four(a + (y() + i * Y) * ROW + e);
#pragma unroll
        for (int j = 0; j < N; j++) right[j] = four(b + (x() + j * 16) * ROW + e);
#pragma unroll
        for (int i = 0; i < M; i++)
#pragma unroll
            for (int j = 0; j < N; j++)
#pragma unroll
                for (int k = 0; k < 4; k++) dots[i][j] = fmaf(left[i].at[k], right[j].at[k], dots[i][j]);
    }
}

// sums[i][c] += Σ over DEPTH of p[y + i·Y][k] · v[k][x + c·16]; rows of p are DEPTH + 4 apart.
template <int M, int DEPTH, int Y>
__device__ inline void mix(const float* p, const float* v, float (&sums)[M][COLUMNS]) {
    for (int k = 0; k < DEPTH; k += 4) {
        Four weights[M];
#pragma unroll
        for (int i = 0; i < M; i++) weights[i] = four(p + (y() + i * Y) * (DEPTH + 4) + k);
#pragma unroll
        for (int l = 0; l < 4; l++)
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                float value = v[(k + l) * ROW + x() + c * 16];
#pragma unroll
                for (int i = 0; i < M; i++) sums[i][c] = fmaf(weights[i].at[l], value, sums[i][c]);
            }
    }
}

// Rows y + i·Y below `valid` of `to`, `stride` elements apart, times factor[i].
template <int M, int Y>
__device__ inline void write_rows(const float (&sums)[M][COLUMNS], const float (&factor)[M], REAL* to, u64 stride,
                                  int valid) {
#pragma unroll
    for (int i = 0; i < M; i++)
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
            int row = y() + i * Y, column = x() + c * 16;
            if (row < valid && column < E) narrow(sums[i][c] * factor[i], to[row * stride + column]);
        }
}

// Reduces over the 16 threads that share rows.
__device__ inline float row_max(float v) {
#pragma unroll
    for (int step = 8; step > 0; step /= 2) v = fmaxf(v, __shfl_xor_sync(ALL_LANES, v, step));
    return v;
}

__device__ inline float row_sum(float v) {
#pragma unroll
    for (int step = 8; step > 0; step /= 2) v += __shfl_xor_sync(ALL_LANES, v, step);
    return v;
}

// Minimum of `count` starts, equal in every thread.
__device__ inline int least_of(const int* starts, int count) {
    int least = 0x7fffffff;
    for (int at = threadIdx.x % 32; at < count; at += 32) least = min(least, starts[at]);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) least = min(least, __shfl_xor_sync(ALL_LANES, least, step));
    return least;
}

__device__ inline float root_scale() { return 1.0f / sqrtf((float)E); }

// A scaled score, limited by the cap; the derivative of a limited score; and the score of a product of query and key,
// times log2 e.
#ifdef SOFTCAP
constexpr float INVERSE_CAP = 1.0f / SOFTCAP;
__device__ inline float capped(float score) { return SOFTCAP * tanhf(score * INVERSE_CAP); }
__device__ inline float cap_slope(float score) { return 1.0f - score * INVERSE_CAP * (score * INVERSE_CAP); }
__device__ inline float scaled(float product) { return capped(product * root_scale()) * LOG2_E; }
#else
__device__ inline float capped(float score) { return score; }
__device__ inline float cap_slope(float) { return 1.0f; }
__device__ inline float scaled(float product) { return product * (root_scale() * LOG2_E); }
#endif

// ---- forward ----

// 256 threads: 16 × 16.
constexpr int QUERIES = 64;
constexpr int KEYS = 64;

// `count` queries of a head, the first at key position `first`, over keys starts[i] ..= first + i
// (from 0 where `starts` is null).
__device__ inline void attend(const REAL* queries, u64 query_row, int first, int count, const int* starts,
                              const REAL* keys, const REAL* values, u64 key_row, REAL* out, u64 out_row,
                              float* stats) {
    float* q = shared;              // [QUERIES][ROW]
    float* kv = q + QUERIES * ROW;  // [KEYS][ROW], keys and then values
    float* p = kv + KEYS * ROW;     // [QUERIES][KEYS + 4]
    lay_out<QUERIES, 256>(q, queries, query_row, count, root_scale());
    float largest[4], sum[4], sums[4][COLUMNS] = {};
    int start[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int query = y() + i * 16;
        largest[i] = LOWEST;
        sum[i] = 0;
        start[i] = starts && query < count ? starts[query] : 0;
    }
    int end = first + count;
    for (int from = starts ? least_of(starts, count) : 0; from < end; from += KEYS) {
        __syncthreads();  // the previous tile's values have been read
        lay_out<KEYS, 256>(kv, keys + from * key_row, key_row, end - from, 1.0f);
        __syncthreads();
        float scores[4][4];
        products<4, 4, 16>(q, kv, scores);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float most = largest[i];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int key = from + x() + j * 16;
                scores[i][j] = capped(scores[i][j]);
                if (key < start[i] || key > first + y() + i * 16) scores[i][j] = -infinity();
                most = fmaxf(most, scores[i][j]);
            }
            most = row_max(most);
            float factor = expf(largest[i] - most);
            largest[i] = most;
            sum[i] *= factor;
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) sums[i][c] *= factor;
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float weight = expf(scores[i][j] - most);
                sum[i] += weight;
                p[(y() + i * 16) * (KEYS + 4) + x() + j * 16] = weight;
            }
        }
        __syncthreads();  // the keys have been read
        lay_out<KEYS, 256>(kv, values + from * key_row, key_row, end - from, 1.0f);
        __syncthreads();
        mix<4, KEYS, 16>(p, kv, sums);
    }
    float factor[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[i] = row_sum(sum[i]);
        factor[i] = 1.0f / sum[i];
        int query = y() + i * 16;
        if (stats && x() == 0 && query < count) stats[query] = largest[i] + logf(sum[i]);
    }
    write_rows<4, 16>(sums, factor, out, out_row, count);
}

// out[N, H·E] and stats[B,H,T] = log-sum-exp of the scores of qkv[N,C]: query i of a sequence sees
// its keys document_start[i] ..= i. Late queries, which see the most, come first.
// Grid: (ceil(T / 64), H, B). Block: 256. Shared memory: (128 · ROW + 64 · 68) floats.
extern "C" __global__ void __launch_bounds__(256)
attention(const REAL* qkv, const int* document_start, REAL* out, float* stats, u32 sequence, u32 heads, u32 kv_heads) {
    int first = (gridDim.x - 1 - blockIdx.x) * QUERIES;
    int count = min(QUERIES, (int)sequence - first);
    u32 head = blockIdx.y, kv = head / (heads / kv_heads);
    u64 row = (u64)(heads + 2 * kv_heads) * E, out_row = (u64)heads * E;
    u64 sequence_start = (u64)blockIdx.z * sequence, query = sequence_start + first;
    const REAL* keys = qkv + sequence_start * row + (heads + kv) * E;
    attend(qkv + query * row + head * E, row, first, count, document_start + query, keys, keys + kv_heads * E, row,
           out + query * out_row + head * E, out_row, stats + (u64)(blockIdx.z * heads + head) * sequence + first);
}

// out[S·n, H·E]: attention of the n new tokens of each of S sequences, qkv[S·n,C], over all keys up to their own. keys and
// values [P, K·E] hold caches of `capacity` tokens one after another, which already contain them in the rows places[S·n].
// first_keys[S·n] are the positions of the first keys seen, 0 where it is null.
// Grid: (ceil(n / 64), H, S). Block: 256. Shared memory: as attention.
extern "C" __global__ void __launch_bounds__(256)
cached_attention(const REAL* qkv, const REAL* keys, const REAL* values, const int* places, const int* first_keys,
                 REAL* out, u32 rows, u32 capacity, u32 heads, u32 kv_heads) {
    int block = blockIdx.x * QUERIES;
    u32 place = places[blockIdx.z * rows], start = place % capacity;
    u64 first = (u64)blockIdx.z * rows + block, cache = (u64)(place - start) * kv_heads * E;
    int count = min(QUERIES, (int)rows - block);
    u32 head = blockIdx.y, kv = head / (heads / kv_heads);
    u64 row = (u64)(heads + 2 * kv_heads) * E, out_row = (u64)heads * E;
    attend(qkv + first * row + head * E, row, (int)start + block, count, first_keys ? first_keys + first : nullptr,
           keys + cache + kv * E, values + cache + kv * E, (u64)kv_heads * E, out + first * out_row + head * E, out_row,
           nullptr);
}

// Threads that share a row of keys.
constexpr int HOLDERS = 8;

// weights[i] = q · row `from` + i of `keys` below `end`, times the scale and log2 e.
template <int W>
__device__ inline void score(const REAL* q, const REAL* keys, u64 key_row, int from, int end, float* weights) {
    constexpr int STEPS = (E + HOLDERS * W - 1) / (HOLDERS * W);
    int first = threadIdx.x % HOLDERS * W;
    float own[STEPS][W] = {};
#pragma unroll
    for (int step = 0; step < STEPS; step++)
        if (first + step * HOLDERS * W < E) load(q + first + step * HOLDERS * W, own[step]);
#pragma unroll 4
    for (int base = from; base < end; base += 128 / HOLDERS) {
        int key = base + threadIdx.x / HOLDERS;
        float sum = 0;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            int e = first + step * HOLDERS * W;
            float k[W];
            if (key >= end || e >= E) continue;
            load(keys + key * key_row + e, k);
#pragma unroll
            for (int i = 0; i < W; i++) sum = fmaf(own[step][i], k[i], sum);
        }
#pragma unroll
        for (int step = HOLDERS / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
        if (first == 0 && key < end) weights[key - from] = scaled(sum);
    }
}

// to[E] = Σ weights[i] · row `from` + i of `values` below `end`: each group of threads sums a slice of the rows, then
// the slices are added in order.
template <int W>
__device__ inline void mix_values(const float* weights, const REAL* values, u64 value_row, int from, int end,
                                  float* slices, float* to) {
    constexpr int GROUP = E / W, SLICES = 128 / GROUP;
    int slice = threadIdx.x / GROUP, column = threadIdx.x % GROUP * W;
    float sums[W] = {};
    if (slice < SLICES) {
#pragma unroll 4
        for (int row = from + slice; row < end; row += SLICES) {
            float v[W];
            load(values + row * value_row + column, v);
#pragma unroll
            for (int i = 0; i < W; i++) sums[i] = fmaf(weights[row - from], v[i], sums[i]);
        }
#pragma unroll
        for (int i = 0; i < W; i++) slices[slice * E + column + i] = sums[i];
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += 128) {
        float sum = 0;
        for (int i = 0; i < SLICES; i++) sum += slices[i * E + e];
        to[e] = sum;
    }
}

// Split-key attention for few new tokens of a sequence, n of all sequences: cached_attention over `part` keys of each head,
// to be merged by cached_attention_join. Keys before first_keys are left out.
// partials[parts][n, H][E + 2]: Σ 2^(s − largest) · value, largest, Σ 2^(s − largest) over the
// part's scores s, times log2 e. A part without keys has 0 as its last sum; its other values are undefined, except the
// largest.
// Grid: (parts, H, n). Block: 128. Shared memory: `part` + 1024 floats.
extern "C" __global__ void __launch_bounds__(128, 6)
cached_attention_part(const REAL* qkv, const REAL* keys, const REAL* values, const int* places, const int* first_keys,
                      float* partials, u32 part, u32 capacity, u32 heads, u32 kv_heads) {
    __shared__ float mosts[4];
    float* weights = shared;         // [part]
    float* slices = weights + part;  // at most 128 packs
    u32 head = blockIdx.y, kv = head / (heads / kv_heads);
    const REAL* q = qkv + (u64)blockIdx.z * (heads + 2 * kv_heads) * E + head * E;
    float* to = partials + ((u64)(blockIdx.x * gridDim.z + blockIdx.z) * heads + head) * (E + 2);
    int from = blockIdx.x * part;
    u32 place = places[blockIdx.z], position = place % capacity;
    u64 cache = (u64)(place - position) * kv_heads * E;
    int end = min(from + (int)part, (int)position + 1);
    if (first_keys) from = max(from, first_keys[blockIdx.z]);
    if (from >= end) {
        if (threadIdx.x < 2) to[E + threadIdx.x] = threadIdx.x == 0 ? LOWEST : 0.0f;
        return;
    }
    keys += cache + kv * E;
    values += cache + kv * E;
    u64 row = (u64)kv_heads * E;
    constexpr int W = E % PACK<REAL> == 0 ? PACK<REAL> : 1;
    bool wide = aligned(q) && aligned(keys) && aligned(values) && row % W == 0;
    if (wide)
        score<W>(q, keys, row, from, end, weights);
    else
        score<1>(q, keys, row, from, end, weights);
    __syncthreads();
    float most = LOWEST, sum = 0;
    for (int i = threadIdx.x; i < end - from; i += 128) most = fmaxf(most, weights[i]);
    most = row_max(most);
    most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, 16));
    if (threadIdx.x % 32 == 0) mosts[threadIdx.x / 32] = most;
    __syncthreads();
    most = fmaxf(fmaxf(mosts[0], mosts[1]), fmaxf(mosts[2], mosts[3]));
    for (int i = threadIdx.x; i < end - from; i += 128) {
        float weight = power_of_two(weights[i] - most);
        weights[i] = weight;
        sum += weight;
    }
    sum = block_sum(sum);  // its barriers separate the weights from their use
    if (wide)
        mix_values<W>(weights, values, row, from, end, slices, to);
    else
        mix_values<1>(weights, values, row, from, end, slices, to);
    if (threadIdx.x == 0) {
        to[E] = most;
        to[E + 1] = sum;
    }
}

// out[n, H·E] merged from the partials, part by part.
// Grid: (H, n). Block: 128. Shared memory: none.
extern "C" __global__ void __launch_bounds__(128)
cached_attention_join(const float* partials, REAL* out, u32 parts, u32 heads) {
    u64 unit = (u64)blockIdx.y * heads + blockIdx.x, step = (u64)gridDim.y * heads * (E + 2);
    partials += unit * (E + 2);
    float most = LOWEST;
    for (u32 part = 0; part < parts; part++) most = fmaxf(most, partials[part * step + E]);
    for (u32 e = threadIdx.x; e < E; e += 128) {
        float sum = 0, mixed = 0;
        for (u32 part = 0; part < parts; part++) {
            const float* of = partials + part * step;
            if (of[E + 1] == 0.0f) continue;
            float factor = power_of_two(of[E] - most);
            sum = fmaf(of[E + 1], factor, sum);
            mixed = fmaf(of[e], factor, mixed);
        }
        narrow(mixed / sum, out[unit * E + e]);
    }
}

// Writes the keys and values of the n tokens in qkv[n,C] to the rows places[n] of the caches [P, K·E].
// Grid: (n, ceil(K·E / 256)). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
append_cache(const REAL* qkv, const int* places, REAL* keys, REAL* values, u32 heads, u32 kv_heads) {
    u32 column = blockIdx.y * 256 + threadIdx.x, width = kv_heads * E;
    if (column >= width) return;
    u64 to = (u64)places[blockIdx.x] * width + column;
    const REAL* row = qkv + (u64)blockIdx.x * (heads + 2 * kv_heads) * E + heads * E + column;
    keys[to] = row[0];
    values[to] = row[width];
}

// Copies rows of the caches [P, K·E]: row from[i] to row to[i], unless that is negative, for n rows. No row is copied from and
// copied to.
// Grid: (n, ceil(K·E / 256)). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
copy_cache(const int* from, const int* to, REAL* keys, REAL* values, u32 kv_heads) {
    u32 column = blockIdx.y * 256 + threadIdx.x, width = kv_heads * E;
    if (column >= width || to[blockIdx.x] < 0) return;
    u64 source = (u64)from[blockIdx.x] * width + column, target = (u64)to[blockIdx.x] * width + column;
    keys[target] = keys[source];
    values[target] = values[source];
}

// ---- backward ----

// δ[B,H,T] = Σ out · dout of each head of each row.
// Grid: ceil(N·H / 8). Block: 256, a warp for each head. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
attention_delta(const REAL* out, const REAL* dout, float* delta, u32 rows, u32 sequence, u32 heads) {
    u64 unit = (u64)blockIdx.x * 8 + threadIdx.x / 32;
    if (unit >= (u64)rows * heads) return;
    float sum = 0;
    for (u64 at = unit * E + threadIdx.x % 32; at < (unit + 1) * E; at += 32)
        sum = fmaf(widen(out[at]), widen(dout[at]), sum);
    sum = warp_sum(sum);
    u64 row = unit / heads, head = unit % heads;
    if (threadIdx.x % 32 == 0) delta[(row / sequence * heads + head) * sequence + row % sequence] = sum;
}

// 128 threads: 16 × 8. The summed side is longer and the owned side shorter, so that the tiles fit into the shared
// memory of every GPU from sm_80 on (99 KiB on most).
constexpr int OWNED = 32;
constexpr int MET = 64;

// The dQ part of dqkv[N,C]: a block owns 32 queries and visits keys.
// Grid: (ceil(T / 32), H, B). Block: 128. Shared memory: (128 · ROW + 32 · 68) floats.
extern "C" __global__ void __launch_bounds__(128)
attention_grad_queries(const REAL* qkv, const REAL* dout, const float* stats, const float* delta,
                       const int* document_start, REAL* dqkv, u32 sequence, u32 heads, u32 kv_heads) {
    float* q = shared;             // [OWNED][ROW]
    float* d = q + OWNED * ROW;    // [OWNED][ROW], of the output's gradient
    float* kv = d + OWNED * ROW;   // [MET][ROW], values and then keys
    float* p = kv + MET * ROW;     // [OWNED][MET + 4], of dS
    int first = (gridDim.x - 1 - blockIdx.x) * OWNED;
    int count = min(OWNED, (int)sequence - first);
    u32 head = blockIdx.y, group = head / (heads / kv_heads);
    u64 row = (u64)(heads + 2 * kv_heads) * E, out_row = (u64)heads * E;
    u64 sequence_start = (u64)blockIdx.z * sequence, query = sequence_start + first;
    u64 unit = (u64)(blockIdx.z * heads + head) * sequence + first;
    const REAL* keys = qkv + sequence_start * row + (heads + group) * E;
    const int* starts = document_start + query;
    lay_out<OWNED, 128>(q, qkv + query * row + head * E, row, count, 1.0f);
    lay_out<OWNED, 128>(d, dout + query * out_row + head * E, out_row, count, 1.0f);
    float stat[4], less[4], one[4], sums[4][COLUMNS] = {};
    int start[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int at = y() + i * 8;
        bool real = at < count;
        stat[i] = real ? stats[unit + at] : 0.0f;
        less[i] = real ? delta[unit + at] : 0.0f;
        start[i] = real ? starts[at] : 0x7fffffff;
        one[i] = 1.0f;
    }
    int end = first + count;
    for (int from = least_of(starts, count); from < end; from += MET) {
        __syncthreads();  // the previous tile's keys have been read
        lay_out<MET, 128>(kv, keys + kv_heads * E + from * row, row, end - from, 1.0f);
        __syncthreads();
        float scores[4][4], dscores[4][4];
        products<4, 4, 8>(d, kv, dscores);
        __syncthreads();  // the values have been read
        lay_out<MET, 128>(kv, keys + from * row, row, end - from, 1.0f);
        __syncthreads();
        products<4, 4, 8>(q, kv, scores);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int key = from + x() + j * 16;
                bool seen = key >= start[i] && key <= first + y() + i * 8;
                float score = capped(scores[i][j] * root_scale()), weight = seen ? expf(score - stat[i]) : 0.0f;
                p[(y() + i * 8) * (MET + 4) + x() + j * 16] =
                    weight * (dscores[i][j] - less[i]) * root_scale() * cap_slope(score);
            }
        __syncthreads();
        mix<4, MET, 8>(p, kv, sums);
    }
    write_rows<4, 8>(sums, one, dqkv + query * row + head * E, row, count);
}

// The dK and dV parts of dqkv[N,C]: a block owns 32 keys of a kv head and visits the queries of all heads of its group,
// head by head. Tiles of queries that see none of the keys are skipped.
// Grid: (ceil(T / 32), K, B). Block: 128. Shared memory: as attention_grad_queries.
extern "C" __global__ void __launch_bounds__(128)
attention_grad_keys(const REAL* qkv, const REAL* dout, const float* stats, const float* delta,
                    const int* document_start, REAL* dqkv, u32 sequence, u32 heads, u32 kv_heads) {
    float* k = shared;             // [OWNED][ROW]
    float* v = k + OWNED * ROW;    // [OWNED][ROW]
    float* met = v + OWNED * ROW;  // [MET][ROW]: queries, gradients of the output, queries again
    float* p = met + MET * ROW;    // [OWNED][MET + 4]: P, then dS
    int first = blockIdx.x * OWNED;
    int count = min(OWNED, (int)sequence - first);
    u32 group = heads / kv_heads;
    u64 row = (u64)(heads + 2 * kv_heads) * E, out_row = (u64)heads * E;
    u64 sequence_start = (u64)blockIdx.z * sequence;
    u64 key_at = (sequence_start + first) * row + (heads + blockIdx.y) * E, value_at = key_at + kv_heads * E;
    const int* starts = document_start + sequence_start;
    lay_out<OWNED, 128>(k, qkv + key_at, row, count, 1.0f);
    lay_out<OWNED, 128>(v, qkv + value_at, row, count, 1.0f);
    float dk[4][COLUMNS] = {}, dv[4][COLUMNS] = {};
    for (u32 head = blockIdx.y * group; head < (blockIdx.y + 1) * group; head++) {
        const REAL* queries = qkv + sequence_start * row + head * E;
        const REAL* douts = dout + sequence_start * out_row + head * E;
        u64 unit = (u64)(blockIdx.z * heads + head) * sequence;
        for (int from = first / MET * MET; from < (int)sequence; from += MET) {
            int mine = from + threadIdx.x, valid = (int)sequence - from;
            // Synchronizes all threads: the previous tile has been read, too.
            if (!__syncthreads_or(threadIdx.x < MET && mine < (int)sequence && starts[mine] < first + count)) continue;
            lay_out<MET, 128>(met, queries + from * row, row, valid, 1.0f);
            __syncthreads();
            // The derivatives of caps are constants without a cap, and take no registers then.
            float weights[4][4], dweights[4][4], slopes[4][4], less[4];
            products<4, 4, 8>(k, met, weights);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int query = from + x() + j * 16;
                bool real = query < (int)sequence;
                float stat = real ? stats[unit + query] : 0.0f;
                int start = real ? starts[query] : 0x7fffffff;
                less[j] = real ? delta[unit + query] : 0.0f;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int key = first + y() + i * 8;
                    bool seen = key >= start && key <= query && key < first + count;
                    float score = capped(weights[i][j] * root_scale());
                    slopes[i][j] = cap_slope(score);
                    weights[i][j] = seen ? expf(score - stat) : 0.0f;
                    p[(y() + i * 8) * (MET + 4) + x() + j * 16] = weights[i][j];
                }
            }
            __syncthreads();  // the queries have been read
            lay_out<MET, 128>(met, douts + from * out_row, out_row, valid, 1.0f);
            __syncthreads();
            mix<4, MET, 8>(p, met, dv);
            products<4, 4, 8>(v, met, dweights);
            __syncthreads();  // P and the gradients have been read
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    p[(y() + i * 8) * (MET + 4) + x() + j * 16] =
                        weights[i][j] * (dweights[i][j] - less[j]) * root_scale() * slopes[i][j];
            lay_out<MET, 128>(met, queries + from * row, row, valid, 1.0f);
            __syncthreads();
            mix<4, MET, 8>(p, met, dk);
        }
    }
    float one[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    write_rows<4, 8>(dk, one, dqkv + key_at, row, count);
    write_rows<4, 8>(dv, one, dqkv + value_at, row, count);
}
