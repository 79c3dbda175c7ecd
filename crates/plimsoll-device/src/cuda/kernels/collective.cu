// Sums over the ranks of a team, of parts that NCCL has delivered. Every rank sums in rank order, so the bits equal
// those of every other transport (`sum_elements` in transport).
//
// Grids as in elementwise.cu. `others` holds the parts of all other ranks in rank order, `stride` elements apart;
// `into` may equal `own`.

template <class T>
__device__ void sum_in_order(const T* own, const T* others, T* into, u64 elements, u64 stride, u32 rank, u32 ranks, u32 adds) {
    for (u64 at = (u64)blockIdx.x * 256 + threadIdx.x; at < elements; at += (u64)gridDim.x * 256) {
        T sum = rank == 0 ? own[at] : others[at];
        for (u32 other = 1; other < ranks; other++)
            sum += other == rank ? own[at] : others[(u64)(other < rank ? other : other - 1) * stride + at];
        into[at] = adds ? into[at] + sum : sum;
    }
}

// into[elements] = the sum over all ranks, or += the sum with `adds`; f32.
// Grid: over elements. Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
sum_ranks_f32(const float* own, const float* others, float* into, u64 elements, u64 stride, u32 rank, u32 ranks, u32 adds) {
    sum_in_order(own, others, into, elements, stride, rank, ranks, adds);
}

// into[elements] = the sum over all ranks, or += the sum with `adds`; f64.
// Grid: over elements. Block: 256. Shared memory: none.
extern "C" __global__ void __launch_bounds__(256)
sum_ranks_f64(const double* own, const double* others, double* into, u64 elements, u64 stride, u32 rank, u32 ranks, u32 adds) {
    sum_in_order(own, others, into, elements, stride, rank, ranks, adds);
}
