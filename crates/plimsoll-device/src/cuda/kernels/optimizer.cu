// Optimizer updates over many tensors at once, and the gradient norm for clipping. Everything is float, independent of
// the activation type (formulas as cpu/kernels/optimizer.rs). Updates have the CPU's bits: products that the CPU rounds
// before an addition are not fused here (__fmul_rn).

// Tensors of one launch. The table is a kernel argument (at most 4 KiB of arguments in all), so it needs no memory of
// its own and stays valid in a captured graph.
constexpr u32 TENSORS = 56;

// One tensor of the table. Blocks from first_block on update it, one chunk each.
struct Tensor {
    float* weight;
    const float* gradient;
    float* first;   // AdamW's first moment; SGD's momentum buffer, or null
    float* second;  // AdamW's second moment
    float* first_scale;  // scales of moments stored as codes in `first` and `second`; else null
    float* second_scale;
    u64 elements;
    float decay;
    u32 first_block;
};

struct Table {
    Tensor at[TENSORS];
};

// The tensor that this block updates: the last with a first block not beyond it.
__device__ inline u32 tensor_of_block(const Table& table, u32 count) {
    u32 low = 0, high = count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (table.at[middle].first_block <= blockIdx.x)
            low = middle;
        else
            high = middle;
    }
    return low;
}

// Calls body(at, width) over this block's chunk of the tensor, with packs where `wide` allows.
template <template <int> class Body, class... Rest>
__device__ inline void over_chunk(u64 from, u64 end, bool wide, Rest... rest) {
    u64 at = from + (wide ? threadIdx.x * 4 : threadIdx.x);
    if (wide)
        for (; at + 4 <= end; at += 1024) Body<4>::at(at, rest...);
    else
        for (; at < end; at += 256) Body<1>::at(at, rest...);
    // The remainder of a tensor that is not a multiple of four elements.
    if (wide && at < end)
        for (; at < end; at++) Body<1>::at(at, rest...);
}

struct AdamWStep {
    float keep, clip, mix_first, keep_second, mix_second, minus_rate, root, eps;
};

__device__ inline AdamWStep adamw_step(const float* scalars, float decay, float mix_first, float keep_second,
                                       float mix_second, float eps) {
    float rate = scalars[LEARNING_RATE];
    AdamWStep step;
    step.keep = 1.0f - __fmul_rn(rate, decay);
    step.clip = scalars[CLIP_FACTOR];
    step.mix_first = mix_first;
    step.keep_second = keep_second;
    step.mix_second = mix_second;
    step.minus_rate = -(rate / scalars[BIAS_CORRECTION_1]);
    step.root = 1.0f / sqrtf(scalars[BIAS_CORRECTION_2]);
    step.eps = eps;
    return step;
}

__device__ inline void adamw_element(const AdamWStep& s, float g, float& w, float& m, float& v) {
    g = __fmul_rn(g, s.clip);
    m = fmaf(g - m, s.mix_first, m);
    v = fmaf(g * g, s.mix_second, v * s.keep_second);
    w = fmaf(m / fmaf(sqrtf(v), s.root, s.eps), s.minus_rate, w * s.keep);
}

template <int W> struct AdamW {
    static __device__ inline void at(u64 at, Tensor t, AdamWStep s) {
        float w[W], g[W], m[W], v[W];
        load(t.weight + at, w);
        load(t.gradient + at, g);
        load(t.first + at, m);
        load(t.second + at, v);
#pragma unroll
        for (int i = 0; i < W; i++) adamw_element(s, g[i], w[i], m[i], v[i]);
        store(w, t.weight + at);
        store(m, t.first + at);
        store(v, t.second + at);
    }
};

// One step of AdamW (Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; the order of
// operations of PyTorch): w −= rate · decay · w; m, v are the moving averages of g and g²;
// w −= rate / c₁ · m / (√v / √c₂ + eps). mix_first = 1 − β₁, keep_second = β₂, mix_second = 1 − β₂.
// Grid: Σ ceil(elements / chunk). Block: 256. Shared memory: none. `chunk` is a multiple of 1024.
extern "C" __global__ void __launch_bounds__(256)
adamw(const __grid_constant__ Table table, const float* scalars, u32 count, u32 chunk, float mix_first,
      float keep_second, float mix_second, float eps) {
    Tensor t = table.at[tensor_of_block(table, count)];
    u64 from = (u64)(blockIdx.x - t.first_block) * chunk;
    AdamWStep step = adamw_step(scalars, t.decay, mix_first, keep_second, mix_second, eps);
    bool wide = aligned(t.weight) && aligned(t.gradient) && aligned(t.first) && aligned(t.second);
    over_chunk<AdamW>(from, min(t.elements, from + chunk), wide, t, step);
}

// Four elements from `at` on, in one access if `wide`; elements beyond the end are skipped.
template <class T> __device__ inline void load_four(const T* x, u64 at, u64 end, bool wide, T (&to)[4]) {
    if (wide && at + 4 <= end) {
        Pack<T, 4> pack = *reinterpret_cast<const Pack<T, 4>*>(x + at);
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = pack.at[i];
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) to[i] = at + i < end ? x[at + i] : T();
    }
}

template <class T> __device__ inline void store_four(const T (&from)[4], u64 at, u64 end, bool wide, T* x) {
    if (wide && at + 4 <= end) {
        Pack<T, 4> pack;
#pragma unroll
        for (int i = 0; i < 4; i++) pack.at[i] = from[i];
        *reinterpret_cast<Pack<T, 4>*>(x + at) = pack;
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (at + i < end) x[at + i] = from[i];
    }
}

// Elements that share scales of their moments.
constexpr u32 STATE_BLOCK = 256;

// adamw with 8-bit moments (plimsoll-program, op.rs: AdamW8). A warp handles one block: moments are dequantized,
// updated and quantized by the block's maximum in registers, never stored as floats.
// Grid, block: as adamw. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256, 2)
adamw8(const __grid_constant__ Table table, const float* scalars, u32 count, u32 chunk, float mix_first,
       float keep_second, float mix_second, float eps) {
    __shared__ float signed_map[256], unsigned_map[256], signed_tree[255], unsigned_tree[255];
    fetch(SIGNED_MAP, signed_map);
    fetch(UNSIGNED_MAP, unsigned_map);
    fetch(SIGNED_TREE, signed_tree);
    fetch(UNSIGNED_TREE, unsigned_tree);
    __syncthreads();
    const Tensor& t = table.at[tensor_of_block(table, count)];
    u64 from = (u64)(blockIdx.x - t.first_block) * chunk, end = min(t.elements, from + chunk);
    AdamWStep step = adamw_step(scalars, t.decay, mix_first, keep_second, mix_second, eps);
    u8 *first = reinterpret_cast<u8*>(t.first), *second = reinterpret_cast<u8*>(t.second);
    bool wide = aligned(t.weight) && aligned(t.gradient) && ((u64)first | (u64)second) % 4 == 0;
    u32 lane = threadIdx.x % 32;
    for (u64 block = from + threadIdx.x / 32 * STATE_BLOCK; block < end; block += 8 * STATE_BLOCK) {
        float first_scale = t.first_scale[block / STATE_BLOCK], second_scale = t.second_scale[block / STATE_BLOCK];
        float m[2][4], v[2][4], largest_m = 0, largest_v = 0;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u64 at = block + half * 128 + lane * 4;
            float w[4], g[4];
            u8 codes[2][4];
            load_four(t.weight, at, end, wide, w);
            load_four(t.gradient, at, end, wide, g);
            load_four(first, at, end, wide, codes[0]);
            load_four(second, at, end, wide, codes[1]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                m[half][i] = __fmul_rn(signed_map[codes[0][i]], first_scale);
                v[half][i] = __fmul_rn(unsigned_map[codes[1][i]], second_scale);
                adamw_element(step, g[i], w[i], m[half][i], v[half][i]);
                if (at + i < end) {
                    largest_m = fmaxf(largest_m, fabsf(m[half][i]));
                    largest_v = fmaxf(largest_v, fabsf(v[half][i]));
                }
            }
            store_four(w, at, end, wide, t.weight);
        }
        __syncwarp();  // all lanes have read the old scales
        first_scale = warp_largest(largest_m);
        second_scale = warp_largest(largest_v);
        float first_factor = inverse(first_scale), second_factor = inverse(second_scale);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u64 at = block + half * 128 + lane * 4;
            u8 codes[2][4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                codes[0][i] = (u8)code_of(signed_tree, m[half][i] * first_factor);
                codes[1][i] = (u8)code_of(unsigned_tree, v[half][i] * second_factor);
            }
            store_four(codes[0], at, end, wide, first);
            store_four(codes[1], at, end, wide, second);
        }
        if (lane == 0) {
            t.first_scale[block / STATE_BLOCK] = first_scale;
            t.second_scale[block / STATE_BLOCK] = second_scale;
        }
    }
}

struct SgdStep {
    float clip, minus_rate, momentum;
};

template <int W> struct Sgd {
    static __device__ inline void at(u64 at, Tensor t, SgdStep s) {
        float w[W], g[W], m[W];
        load(t.weight + at, w);
        load(t.gradient + at, g);
        if (t.first) load(t.first + at, m);
#pragma unroll
        for (int i = 0; i < W; i++) {
            g[i] = fmaf(w[i], t.decay, g[i] * s.clip);
            if (t.first) m[i] = g[i] = fmaf(m[i], s.momentum, g[i]);
            w[i] = fmaf(g[i], s.minus_rate, w[i]);
        }
        store(w, t.weight + at);
        if (t.first) store(m, t.first + at);
    }
};

// One step as in PyTorch: g += decay · w; buffer = momentum · buffer + g (it begins as zeros);
// w −= rate · buffer, or rate · g without one.
// Grid, block, shared memory: as adamw.
extern "C" __global__ void __launch_bounds__(256)
sgd(const __grid_constant__ Table table, const float* scalars, u32 count, u32 chunk, float momentum) {
    Tensor t = table.at[tensor_of_block(table, count)];
    u64 from = (u64)(blockIdx.x - t.first_block) * chunk;
    SgdStep step;
    step.clip = scalars[CLIP_FACTOR];
    step.minus_rate = -scalars[LEARNING_RATE];
    step.momentum = momentum;
    bool wide = aligned(t.weight) && aligned(t.gradient) && aligned(t.first);
    over_chunk<Sgd>(from, min(t.elements, from + chunk), wide, t, step);
}

// Squares that a thread sums in float before adding them to its double.
constexpr int RUN = 64;

// partials[block] = Σ gradient² over the block's chunk. NaN and infinity propagate.
// Grid, block: as adamw. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
squared_norm(const __grid_constant__ Table table, double* partials, u32 count, u64 chunk) {
    Tensor t = table.at[tensor_of_block(table, count)];
    u64 from = (u64)(blockIdx.x - t.first_block) * chunk, end = min(t.elements, from + chunk);
    double sum = 0;
    u64 whole = from;
    if (aligned(t.gradient)) {
        whole += (end - from) / 4 * 4;
        for (u64 at = from + threadIdx.x * 4; at < whole; at += 256 * RUN) {
            float run[4] = {};
            for (u64 next = at; next < min(whole, at + 256 * RUN); next += 1024) {
                float g[4];
                load(t.gradient + next, g);
#pragma unroll
                for (int i = 0; i < 4; i++) run[i] = fmaf(g[i], g[i], run[i]);
            }
            sum += (double)((run[0] + run[1]) + (run[2] + run[3]));
        }
    }
    for (u64 at = whole + threadIdx.x; at < end; at += 256) sum += (double)t.gradient[at] * (double)t.gradient[at];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// metrics[NORM_SQUARED] += Σ partials.
// Grid: 1. Block: 256. Shared memory: static only.
extern "C" __global__ void __launch_bounds__(256)
squared_norm_sum(const double* partials, double* metrics, u32 count) {
    double sum = 0;
    for (u32 at = threadIdx.x; at < count; at += 256) sum += partials[at];
    sum = block_sum(sum);
    if (threadIdx.x == 0) metrics[NORM_SQUARED] += sum;
}

// The factor for gradients: min(1, clip / (norm + 1e-6)), as in PyTorch; 1 without clipping.
// Grid: 1. Block: 32, of which one thread works. Shared memory: none.
extern "C" __global__ void __launch_bounds__(32) clip_factor(const double* metrics, float* scalars) {
    double clip = scalars[CLIP_NORM], norm = sqrt(metrics[NORM_SQUARED]);
    if (threadIdx.x == 0) scalars[CLIP_FACTOR] = clip > 0 ? (float)fmin(clip / (norm + 1e-6), 1.0) : 1.0f;
}
