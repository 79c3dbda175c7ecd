// Instructions of tensor cores and asynchronous copies (PTX ISA, sm_80 and later), one function each, independent of
// their use. tests/cuda_shim emulates each as the PTX ISA describes it, for the CPU.
//
// A warp holds matrices together, two bf16 in a word. With g = lane / 4 and t = lane % 4 · 2, a lane has
// of a left matrix (16 × 16)  word 0: row g, columns t, t + 1; 1: row g + 8; 2: row g, columns t + 8,
//                             t + 9; 3: row g + 8, columns t + 8, t + 9
// of a right matrix (16 × 8)  word 0: rows t, t + 1 of column g; 1: rows t + 8, t + 9
// of sums (16 × 8)            0, 1: row g, columns t, t + 1; 2, 3: row g + 8.
// So two adjacent sums, rounded, form a left matrix: `left_of`.

#ifndef PLIMSOLL_SHIM

__device__ inline u32 shared_place(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// sums += left · right.
__device__ inline void mma(float (&sums)[4], const u32 (&left)[4], u32 right0, u32 right1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

// Four 8 × 8 matrices from shared memory. Lanes 8i to 8i + 7 name the rows of matrix i, 16 bytes each and
// aligned to these; to[i] is row g, columns t, t + 1 of it.
__device__ inline void load_matrices(const bf16* row, u32 (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_place(row))
                 : "memory");
}

// Transposed load: to[i] is rows t, t + 1 of column g.
__device__ inline void load_transposed(const bf16* row, u32 (&to)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_place(row))
                 : "memory");
}

// Starts copying 16 bytes, with both addresses aligned to 16, from global to shared memory; zeros if not `real`.
__device__ inline void copy_pack(void* to, const void* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(shared_place(to)), "l"(from), "r"(real ? 16 : 0)
                 : "memory");
}

// Starts copying 4 bytes from global to shared memory; zeros if not `real`.
__device__ inline void copy_word(void* to, const void* from, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(shared_place(to)), "l"(from), "r"(real ? 4 : 0)
                 : "memory");
}

// Waits for the copies of this thread; copies of other threads are complete after a barrier.
__device__ inline void copies_landed() { asm volatile("cp.async.wait_all;" ::: "memory"); }

#endif

// Sums of N · 8 columns, as the left operand of a product over these columns.
template <int N> __device__ inline void left_of(const float (&sums)[N][4], u32 (&left)[N / 2][4]) {
#pragma unroll
    for (int n = 0; n < N; n++) {
        left[n / 2][n % 2 * 2] = narrow_both(sums[n][0], sums[n][1]);
        left[n / 2][n % 2 * 2 + 1] = narrow_both(sums[n][2], sums[n][3]);
    }
}
