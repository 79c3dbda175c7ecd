// Quantization and dequantization of frozen matrices (int8, nf4), with the bits of the CPU kernels. A matrix is rows of
// `columns` elements, or whole blocks of one.

constexpr u32 BLOCK = 64, GROUP = 256, PIECE = BLOCK * GROUP;  // elements, blocks, elements
constexpr float INT8_MOST = 127.0f;

// Elements that a thread block dequantizes: within one nf4 group, and few enough to issue all loads at once.
constexpr u32 SPREAD = 8192;
// Elements per store of a thread, and its number of stores.
constexpr u32 AT_ONCE = 8, TIMES = SPREAD / AT_ONCE / 256;

// to = the dequantized elements of an nf4 matrix, each rounded once: value of the code · scale of the block.
// Grid: ceil(elements / 8192). Block: 256. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
dequantize_nf4(const u8* codes, const u8* scales, const float* groups, REAL* to, u64 elements) {
    __shared__ float values[16], own[SPREAD / BLOCK];
    u64 first = (u64)blockIdx.x * SPREAD;
    u32 count = (u32)min((u64)SPREAD, elements - first);
    codes += first / 2;
    to += first;
    u32 packs = (u64)codes % 4 == 0 && aligned(to) ? count / AT_ONCE : 0;
    u32 words[TIMES] = {};
#pragma unroll
    for (u32 time = 0; time < TIMES; time++) {
        u32 pack = time * 256 + threadIdx.x;
        if (pack < packs) words[time] = reinterpret_cast<const u32*>(codes)[pack];
    }
    fetch(NF4_VALUES, values);
    if (threadIdx.x * BLOCK < count) {
        u64 block = first / BLOCK + threadIdx.x;
        const float* group = groups + block / GROUP * 2;
        own[threadIdx.x] = fmaf(__uint_as_float(SIGNED_MAP[scales[block]]), group[1], group[0]);
    }
    __syncthreads();
#pragma unroll
    for (u32 time = 0; time < TIMES; time++) {
        u32 pack = time * 256 + threadIdx.x;
        if (pack >= packs) continue;
        float scale = own[pack * AT_ONCE / BLOCK], x[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE / 2; i++) {
            u32 pair = words[time] >> 8 * i;
            x[2 * i] = values[pair >> 4 & 15] * scale;
            x[2 * i + 1] = values[pair & 15] * scale;
        }
        store(x, to + pack * AT_ONCE);
    }
    for (u32 at = packs * AT_ONCE + threadIdx.x; at < count; at += 256)
        narrow(values[codes[at / 2] >> (at % 2 == 0 ? 4 : 0) & 15] * own[at / BLOCK], to[at]);
}

// to = the dequantized elements of an int8 matrix, each rounded once: code · scale of the row.
// Grid: ceil(elements / 8192). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
dequantize_int8(const u8* codes, const float* scales, REAL* to, u64 elements, u32 columns) {
    u64 first = (u64)blockIdx.x * SPREAD;
    u32 count = (u32)min((u64)SPREAD, elements - first);
    // Row and column of the first element.
    scales += first / columns;
    u32 column = (u32)(first % columns);
    codes += first;
    to += first;
    bool wide = columns % AT_ONCE == 0 && (u64)codes % AT_ONCE == 0 && aligned(to);
    u32 packs = wide ? count / AT_ONCE : 0;
    Pack<u32, 2> words[TIMES] = {};
#pragma unroll
    for (u32 time = 0; time < TIMES; time++) {
        u32 pack = time * 256 + threadIdx.x;
        if (pack < packs) words[time] = reinterpret_cast<const Pack<u32, 2>*>(codes)[pack];
    }
#pragma unroll
    for (u32 time = 0; time < TIMES; time++) {
        u32 at = (time * 256 + threadIdx.x) * AT_ONCE;
        if (at >= packs * AT_ONCE) continue;
        float scale = scales[(column + at) / columns], x[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) x[i] = (float)(signed char)(words[time].at[i / 4] >> 8 * (i % 4)) * scale;
        store(x, to + at);
    }
    for (u32 at = packs * AT_ONCE + threadIdx.x; at < count; at += 256)
        narrow((float)(signed char)codes[at] * scales[(column + at) / columns], to[at]);
}

// codes[R,C], scales[R] = f32 rows quantized to int8.
// Grid: R. Block: 256. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
quantize_int8(const float* from, u8* codes, float* scales, u32 columns) {
    from += (u64)blockIdx.x * columns;
    codes += (u64)blockIdx.x * columns;
    float most = 0;
    for (u32 at = threadIdx.x; at < columns; at += 256) most = fmaxf(most, fabsf(from[at]));
    float scale = block_largest(most) / INT8_MOST, factor = inverse(scale);
    for (u32 at = threadIdx.x; at < columns; at += 256) {
        float code = rintf(from[at] * factor);
        codes[at] = code != code ? 0 : (u8)(int)fmaxf(-INT8_MOST, fminf(INT8_MOST, code));
    }
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
}

// Number of nf4 thresholds below the value, which is its code.
__device__ inline u32 nf4_code(const float (&thresholds)[15], float value) {
    u32 code = 0;
#pragma unroll
    for (int i = 0; i < 15; i++) code += thresholds[i] < value;
    return code;
}

// codes, scales, groups = f32 elements quantized to nf4. A thread block takes one group, a warp one block of it, a lane
// one byte. One thread sums the mean, in the order of the CPU.
// Grid: ceil(elements / 16384). Block: 256. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
quantize_nf4(const float* from, u8* codes, u8* scales, float* groups, u64 elements) {
    __shared__ float thresholds[15], tree[255], own[GROUP], mean;
    u64 first = (u64)blockIdx.x * PIECE;
    u32 count = (u32)min((u64)PIECE, elements - first), blocks = (count + BLOCK - 1) / BLOCK;
    u32 lane = threadIdx.x % 32;
    from += first;
    codes += first / 2;
    fetch(NF4_THRESHOLDS, thresholds);
    fetch(SIGNED_TREE, tree);
    __syncthreads();
    for (u32 block = threadIdx.x / 32; block < blocks; block += 8) {
        u32 at = block * BLOCK + lane * 2;
        float upper = at < count ? from[at] : 0.0f, lower = at + 1 < count ? from[at + 1] : 0.0f;
        float scale = warp_largest(fmaxf(fabsf(upper), fabsf(lower))), factor = inverse(scale);
        u32 byte = nf4_code(thresholds, upper * factor) << 4 | nf4_code(thresholds, lower * factor);
        if (at < count) codes[at / 2] = (u8)byte;
        if (lane == 0) own[block] = scale;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        double sum = 0;
        for (u32 block = 0; block < blocks; block++) sum += own[block];
        mean = (float)(sum / blocks);
    }
    __syncthreads();
    float distance = threadIdx.x < blocks ? own[threadIdx.x] - mean : 0.0f;
    float most = block_largest(fabsf(distance));
    if (threadIdx.x < blocks) scales[first / BLOCK + threadIdx.x] = (u8)code_of(tree, distance * inverse(most));
    if (threadIdx.x == 0) {
        groups[2 * (u64)blockIdx.x] = mean;
        groups[2 * (u64)blockIdx.x + 1] = most;
    }
}
