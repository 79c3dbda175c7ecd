// The gated unit of the feed-forward block (SwiGLU, GeGLU): activation(gate) · up, and its gradient.
//
// An activation is x · s(v) with s(v) = 1 / (1 + e^−v) and v = a · x + b · x³; its derivative is
// s + x · s · (1 − s) · (a + 3b · x²) (as cpu/kernels/glu.rs).

// Columns per block.
constexpr u32 STRIP = 2048;

__device__ inline float sigmoid(float x) { return reciprocal(1.0f + power_of_two(-LOG2_E * x)); }

// The argument v of the sigmoid.
__device__ inline float argument(float x, float a, float b) { return x * fmaf(x * x, b, a); }

template <int W>
__device__ void gate(const REAL* gate_up, REAL* out, u32 from, u32 end, u32 ffn, float a, float b) {
    for (u32 at = from + threadIdx.x * W; at < end; at += 256 * W) {
        float g[W], u[W];
        load(gate_up + at, g);
        load(gate_up + ffn + at, u);
#pragma unroll
        for (int i = 0; i < W; i++) g[i] = g[i] * sigmoid(argument(g[i], a, b)) * u[i];
        store(g, out + at);
    }
}

// out[N,F] = activation(gate) · up of gate_up[N,2F] = gate | up.
// Grid: (N, ceil(F / 2048)). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
glu(const REAL* gate_up, REAL* out, u32 ffn, float a, float b) {
    gate_up += (u64)blockIdx.x * 2 * ffn;
    out += (u64)blockIdx.x * ffn;
    u32 from = blockIdx.y * STRIP, end = min(ffn, from + STRIP);
    if (ffn % PACK<REAL> == 0 && aligned(gate_up) && aligned(out))
        gate<PACK<REAL>>(gate_up, out, from, end, ffn, a, b);
    else
        gate<1>(gate_up, out, from, end, ffn, a, b);
}

template <int W>
__device__ void gate_grad(const REAL* gate_up, const REAL* dout, REAL* dgate_up, u32 from, u32 end, u32 ffn, float a,
                          float b) {
    for (u32 at = from + threadIdx.x * W; at < end; at += 256 * W) {
        float g[W], u[W], d[W];
        load(gate_up + at, g);
        load(gate_up + ffn + at, u);
        load(dout + at, d);
#pragma unroll
        for (int i = 0; i < W; i++) {
            float s = sigmoid(argument(g[i], a, b)), activated = g[i] * s;
            float inner = fmaf(g[i] * g[i], 3 * b, a);
            g[i] = d[i] * u[i] * fmaf(activated * inner, 1.0f - s, s);
            u[i] = d[i] * activated;
        }
        store(g, dgate_up + at);
        store(u, dgate_up + ffn + at);
    }
}

// dgate_up[N,2F] from gate_up[N,2F] and dout[N,F]; dgate_up may overwrite gate_up, since each thread reads both of its
// elements before it writes them.
// Grid: (N, ceil(F / 2048)). Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
glu_grad(const REAL* gate_up, const REAL* dout, REAL* dgate_up, u32 ffn, float a, float b) {
    gate_up += (u64)blockIdx.x * 2 * ffn;
    dgate_up += (u64)blockIdx.x * 2 * ffn;
    dout += (u64)blockIdx.x * ffn;
    u32 from = blockIdx.y * STRIP, end = min(ffn, from + STRIP);
    if (ffn % PACK<REAL> == 0 && aligned(gate_up) && aligned(dgate_up) && aligned(dout))
        gate_grad<PACK<REAL>>(gate_up, dout, dgate_up, from, end, ffn, a, b);
    else
        gate_grad<1>(gate_up, dout, dgate_up, from, end, ffn, a, b);
}
