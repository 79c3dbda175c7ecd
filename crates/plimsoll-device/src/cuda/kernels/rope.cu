// Rotary position embeddings, in the "rotate half" convention of Hugging Face: element i of a head is rotated with
// element i + E/2 (as cpu/kernels/rope.rs).

// Turns `pairs` pairs of a row; `turns` has the angles of the first `queried` pairs, and `shift` numbers later those of the
// others.
template <int W>
__device__ void turn(REAL* row, const float* turns, u32 queried, u32 pairs, u64 shift, u32 head_dim, float sign) {
    u32 half = head_dim / 2;
    for (u32 pair = (blockIdx.y * 256 + threadIdx.x) * W; pair < pairs; pair += gridDim.y * 256 * W) {
        u32 i = pair % half;
        REAL* low = row + pair / half * head_dim + i;
        float a[W], b[W], c[W], s[W];
        load(low, a);
        load(low + half, b);
        const float* angles = turns + (pair < queried ? 0 : shift);
        load(angles + i, c);
        load(angles + half + i, s);
#pragma unroll
        for (int k = 0; k < W; k++) {
            float before = a[k], sine = s[k] * sign;
            a[k] = before * c[k] - b[k] * sine;
            b[k] = fmaf(b[k], c[k], before * sine);
        }
        store(a, low);
        store(b, low + half);
    }
}

// Rotates the query and key heads of qkv[N,C] in place by positions[N]; sign = −1 rotates back, which is the gradient.
// table[P,E] is cos | sin; the rows of keys lie `key_shift` rows behind those of queries.
// Grid: (N, ceil((H+K)·E/2 / 2048)). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
rope(REAL* qkv, const float* table, const int* positions, u32 heads, u32 kv_heads, u32 columns, u32 head_dim,
     u32 key_shift, float sign) {
    u32 half = head_dim / 2, queried = heads * half, pairs = queried + kv_heads * half;
    u64 shift = (u64)key_shift * head_dim;
    qkv += (u64)blockIdx.x * columns;
    table += (u64)positions[blockIdx.x] * head_dim;
    if (half % PACK<REAL> == 0 && aligned(qkv) && aligned(table))
        turn<PACK<REAL>>(qkv, table, queried, pairs, shift, head_dim, sign);
    else
        turn<1>(qkv, table, queried, pairs, shift, head_dim, sign);
}

// Kind of frequency scaling: RopeScaling of plimsoll-program.
constexpr u32 PLAIN = 0, LINEAR = 1, YARN = 3;  // 2 is Llama 3

// Radians per position of pair i, in float as in transformers. The power is computed in double and rounded, as by a
// correctly rounded powf. Llama 3 keeps high frequencies, divides low ones, and interpolates in between (Llama 3.1
// model card; transformers, modeling_rope_utils). YaRN interpolates by the number i, `high` frequencies from `low` on.
__device__ inline float frequency(u32 i, u32 head_dim, float theta, u32 scaling, float factor, float low, float high,
                                  float context) {
    float plain = 1.0f / (float)pow((double)theta, (double)((float)(2 * i) / (float)head_dim));
    if (scaling == PLAIN) return plain;
    float slow = plain / factor;
    if (scaling == LINEAR) return slow;
    if (scaling == YARN) {
        float divided = fminf(fmaxf(((float)i - low) / high, 0.0f), 1.0f);
        return slow * divided + plain * (1.0f - divided);
    }
    float wave = 6.28318530717958648f / plain;
    if (wave < context / high) return plain;
    if (wave > context / low) return slow;
    float smooth = (context / wave - low) / (high - low);
    return (1.0f - smooth) * slow + smooth * plain;
}

// Fills table[P,E]: the cosines of the E/2 angles of position p, then their sines, computed in double and rounded, times
// `amplitude` and 1 + beta · ln(1 + ⌊p / period⌋). Runs once per run.
// Grid: ceil(P·E/2 / 256). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
rope_table(float* table, u32 table_rows, u32 head_dim, float theta, u32 scaling, float factor, float low, float high,
           float context, float amplitude, float beta, u32 period) {
    u32 half = head_dim / 2;
    u64 at = (u64)blockIdx.x * 256 + threadIdx.x;
    if (at >= (u64)table_rows * half) return;
    u64 position = at / half;
    u32 i = at % half;
    float angle = (float)position * frequency(i, head_dim, theta, scaling, factor, low, high, context);
    amplitude *= 1.0f + beta * log1pf((float)(position / period));
    table[position * head_dim + i] = (float)cos((double)angle) * amplitude;
    table[position * head_dim + half + i] = (float)sin((double)angle) * amplitude;
}

// out[N] = starts + max(0, positions + shift). With a shift of 1 − window, this is the first key that each token sees through
// a sliding window. Where `starts` is null, all documents start at 0.
// Grid: ceil(N / 256). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
shift_positions(const int* positions, const int* starts, int* out, u32 rows, u32 shift) {
    u32 row = blockIdx.x * 256 + threadIdx.x;
    if (row >= rows) return;
    out[row] = (starts ? starts[row] : 0) + max(0, positions[row] + (int)shift);
}
