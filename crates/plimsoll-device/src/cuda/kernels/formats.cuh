// Codes of the quantized formats: plimsoll-program, formats.rs. Its tables precede this file, with numbers as bit
// patterns: SIGNED_MAP, UNSIGNED_MAP (256 values), SIGNED_TREE, UNSIGNED_TREE (255 thresholds, see `code_of`),
// NF4_VALUES (16), NF4_THRESHOLDS (15).
//
// Tables that lanes index differently are read from shared memory: `fetch`, then a barrier.

typedef unsigned char u8;

// Copies a table, or its first entries, to shared memory.
template <int N> __device__ inline void fetch(const u32* table, float (&to)[N]) {
    for (u32 at = threadIdx.x; at < N; at += blockDim.x) to[at] = __uint_as_float(table[at]);
}

// Number of the 255 thresholds below `value`; 0 for NaN. `tree` has them by levels, the middle one first; below node i
// are 2i + 1 and 2i + 2. Lanes of a warp, each at a node of the same level, therefore seldom have bank conflicts.
__device__ inline u32 code_of(const float (&tree)[255], float value) {
    u32 node = 0;
#pragma unroll
    for (int level = 0; level < 8; level++) node = 2 * node + 1 + (tree[node] < value);
    return node - 255;
}

// Factor that scales values before quantization; 0 if all are zero.
__device__ inline float inverse(float scale) { return scale == 0.0f ? 0.0f : 1.0f / scale; }
