// Sums over the ranks of a team, of what NCCL has brought. The order is that of the ranks, whoever sums up, so that the
// bits are those of every other way in which a team meets (transport/memory.rs, `sum_elements`).
//
// Grids as in elementwise.cu. `others` holds the parts of all ranks but this one, in their order, `stride` elements
// apart; `into` may be `own`.

template <class T>
__device__ void sum_in_order(const T* own, const T* others, T* into, u64 elements, u64 stride, u32 rank, u32 ranks, u32 adds) {
    for (u64 at = (u64)blockIdx.x * 256 + threadIdx.x; at < elements; at += (u64)gridDim.x * 256) {
        T sum = rank == 0 ? own[at] : others[at];
        for (u32 other = 1; other < ranks; other++)
            sum += other == rank ? own[at] : others[(u64)(other < rank ? other : other - 1) * stride + at];
        into[at] = adds ? into[at] + sum : sum;
    }
}

// into[elements] = the sum over all ranks, or that is added to it where `adds`.
// Grid: over elements. Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
sum_ranks_f32(const float* own, const float* others, float* into, u64 elements, u64 stride, u32 rank, u32 ranks, u32 adds) {
    sum_in_order(own, others, into, elements, stride, rank, ranks, adds);
}

// The same.
// Grid: over elements. Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
sum_ranks_f64(const double* own, const double* others, double* into, u64 elements, u64 stride, u32 rank, u32 ranks, u32 adds) {
    sum_in_order(own, others, into, elements, stride, rank, ranks, adds);
}
