//! Workspace (temporary memory) of each op. All sizes are in elements of the wide dtype: f64 in an f64 run, else f32.
//! The planner reserves exactly this, and kernels get exactly this.
//!
//! The sizes are pure functions of the op's sizes and of [`Kernels`]. They do not depend on the processor or GPU model,
//! so that a plan for a paper device is also the plan on the machine.

use crate::op::Heads;
use plimsoll_core::{DType, DeviceKind, DeviceSpec};

/// The kind of kernels that run the ops. Its methods return the sizes of the workspaces (temporary buffers) that these
/// kernels need, in elements of the wide dtype (f32, or f64 in an f64 run).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernels {
    /// Kernels for the CPU, and for virtual devices (accelerators simulated on the CPU).
    Cpu {
        /// Threads that run at once; each needs workspace of its own.
        threads: u64,
    },
    /// Kernels for NVIDIA GPUs.
    Cuda,
}

impl Kernels {
    /// Returns the kernels of a device. A paper device (planned for from a data sheet, not present) has those of a GPU.
    pub fn for_device(device: &DeviceSpec) -> Kernels {
        match device.kind {
            DeviceKind::Cpu | DeviceKind::Virtual => Kernels::Cpu { threads: u64::from(device.threads) },
            DeviceKind::Cuda | DeviceKind::Paper => Kernels::Cuda,
        }
    }

    /// Returns the workspace size of a matrix product `out[m, n]` with inner dimension `k`. The unit is an f32 element
    /// (f64 in an f64 run).
    pub fn product_workspace(self, precision: DType, m: u64, n: u64, k: u64) -> u64 {
        match self {
            Kernels::Cpu { threads } if precision == DType::Bf16 => cpu::bf16_product(threads, m, n, k),
            Kernels::Cpu { threads } => cpu::product(threads, m, n, k),
            Kernels::Cuda => cuda::product(m, n),
        }
    }

    /// Returns the workspace size of a sum over the rows of `x[rows, columns]` (the gradient of a bias). The unit is an
    /// f32 element (f64 in an f64 run).
    pub fn sum_rows_workspace(self, rows: u64, columns: u64) -> u64 {
        match self {
            Kernels::Cpu { .. } => cpu::sum_rows(rows, columns),
            Kernels::Cuda => cuda::sum_rows(rows, columns),
        }
    }

    /// Returns the workspace size of the gradient of the embedding table, from `dout[rows, hidden]`. The unit is an f32
    /// element (f64 in an f64 run).
    pub fn embed_grad_workspace(self, rows: u64, hidden: u64) -> u64 {
        match self {
            Kernels::Cpu { .. } => 0,
            Kernels::Cuda => cuda::embed_grad(rows, hidden),
        }
    }

    /// Returns the workspace size of the gradient of an RMS norm of `x[rows, dim]`. The unit is an f32 element (f64 in
    /// an f64 run).
    pub fn rms_norm_grad_workspace(self, rows: u64, dim: u64) -> u64 {
        self.sum_rows_workspace(rows, dim)
    }

    /// Returns the workspace size of the gradient of the RMS norms of queries and keys, of `rows` tokens. `widths` are
    /// the elements that a norm of queries and one of keys cover. The unit is an f32 element (f64 in an f64 run). The
    /// number of norms does not matter.
    pub fn head_norm_grad_workspace(self, rows: u64, widths: [u64; 2]) -> u64 {
        self.sum_rows_workspace(rows, widths.iter().sum())
    }

    /// Returns the workspace size of attention over sequences of `sequence` tokens. The unit is an f32 element (f64 in
    /// an f64 run).
    pub fn attention_workspace(self, precision: DType, sequence: u64, shape: Heads) -> u64 {
        match self {
            Kernels::Cpu { threads } => {
                cpu::attention(threads, sequence, shape.head_dim)
                    + cpu::attention_sums(precision, threads, shape.head_dim)
            }
            Kernels::Cuda => 0,
        }
    }

    /// Returns the workspace size of the gradient of attention over `batch` sequences of `sequence` tokens. The unit is
    /// an f32 element (f64 in an f64 run).
    pub fn attention_grad_workspace(self, precision: DType, batch: u64, sequence: u64, shape: Heads) -> u64 {
        match self {
            Kernels::Cpu { threads } => {
                cpu::attention_grad(threads, sequence, shape.head_dim)
                    + cpu::attention_grad_sums(precision, threads, sequence, shape.head_dim)
            }
            Kernels::Cuda => cuda::attention_grad(batch, sequence, shape.heads),
        }
    }

    /// Returns the workspace size of attention of `rows` new tokens of each of `sequences` sequences over key-value caches
    /// of `capacity` tokens. The unit is an f32 element (f64 in an f64 run).
    pub fn cached_attention_workspace(
        self,
        precision: DType,
        sequences: u64,
        rows: u64,
        capacity: u64,
        shape: Heads,
    ) -> u64 {
        match self {
            Kernels::Cpu { threads } => {
                cpu::cached_attention(threads, capacity, shape.head_dim)
                    + cpu::attention_sums(precision, threads, shape.head_dim)
            }
            Kernels::Cuda => cuda::cached_attention(sequences, rows, capacity, shape),
        }
    }

    /// Returns the workspace size of Σ x², from which the gradient norm is computed. The unit is an f32 element (f64 in
    /// an f64 run).
    pub fn squared_norm_workspace(self) -> u64 {
        match self {
            Kernels::Cpu { .. } => 0,
            Kernels::Cuda => cuda::squared_norm(),
        }
    }
}

/// Workspaces and tile sizes of the CPU kernels (`cpu/kernels` in `plimsoll-device`). Workspaces are in elements of the
/// wide dtype (f32, or f64 in an f64 run). `lanes` is the number of threads that run at once.
///
/// A matrix product `a[m, k] · b[k, n]` copies both operands piece by piece into packed buffers (as in GotoBLAS): a
/// *slice* is a part of k, and the right-hand side b is packed in *panels* of columns.
pub mod cpu {
    use plimsoll_core::DType;

    /// Columns of a panel: the packed right-hand side of a matrix product is padded to a multiple of it.
    pub const PRODUCT_PANEL: u64 = 64;
    /// Number of left-hand rows of a matrix product whose results are in registers at once.
    pub const PRODUCT_GROUP: u64 = 6;
    /// Largest part of the inner dimension k that a matrix product packs at once.
    pub const PRODUCT_DEPTH: u64 = 512;
    /// Rows of the left-hand side of a matrix product that one task packs.
    pub const PRODUCT_ROWS: u64 = 96;
    /// Columns of the right-hand side of a matrix product that are packed at once.
    pub const PRODUCT_COLUMNS: u64 = 2048;

    /// Returns the part of the inner dimension `k` that a matrix product packs at once, from 1 to [`PRODUCT_DEPTH`].
    /// All parts of k have this length, except for a shorter last one.
    pub fn product_depth(k: u64) -> u64 {
        k.div_ceil(k.div_ceil(PRODUCT_DEPTH).max(1)).max(1)
    }

    /// Returns the workspace size of a matrix product `out[m, n]` with inner dimension `k`, for f32 and f64 operands.
    /// The unit is an f32 element (f64 in an f64 run).
    ///
    /// The workspace holds a packed slice of the right-hand side, and for each of `lanes` threads a packed block of
    /// left-hand rows.
    pub fn product(lanes: u64, m: u64, n: u64, k: u64) -> u64 {
        let depth = product_depth(k);
        let right = n.min(PRODUCT_COLUMNS).next_multiple_of(PRODUCT_PANEL) * depth;
        let left = m.min(PRODUCT_ROWS).next_multiple_of(PRODUCT_GROUP) * depth;
        right + lanes * left
    }

    /// Largest number of f32 elements for the partial sums of a bf16 matrix product that processes the inner dimension
    /// in several slices.
    pub const BF16_SUMS_MAX: u64 = 1 << 20;

    /// The tiling of a bf16 matrix product `out[m, n]` with inner dimension k.
    ///
    /// Kernels process a slice of k at a time, and bf16 elements in pairs, each of the size of an f32. With several
    /// slices, partial sums stay in f32 in the workspace.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Bf16Product {
        /// Length of a slice of the inner dimension k, an even number.
        pub depth: u64,
        /// Rows of the left-hand side that one task packs.
        pub rows: u64,
        /// Columns of the right-hand side that are packed at once.
        pub columns: u64,
        /// Number of rows of `out` whose partial sums the workspace holds at once, if there are several slices.
        pub rows_at_once: u64,
        /// Whether the inner dimension k takes several slices.
        pub sliced: bool,
    }

    impl Bf16Product {
        /// Returns the tiling for `out[m, n]` with inner dimension k.
        pub fn new(m: u64, n: u64, k: u64) -> Bf16Product {
            let depth = 2 * product_depth(k.div_ceil(2));
            let columns = n.clamp(1, PRODUCT_COLUMNS);
            let rows = m.clamp(1, PRODUCT_ROWS);
            // A multiple of the rows of a task.
            let rows_at_once = (BF16_SUMS_MAX / columns / PRODUCT_ROWS * PRODUCT_ROWS).min(m).max(1);
            Bf16Product { depth, rows, columns, rows_at_once, sliced: k > depth }
        }

        /// Returns the size of the packed slice of the right-hand side, in f32 elements.
        pub fn right_elements(self) -> u64 {
            self.columns.next_multiple_of(PRODUCT_PANEL) * self.depth / 2
        }

        /// Returns the size of a packed block of left-hand rows, in f32 elements; each thread has one.
        pub fn left_elements(self) -> u64 {
            self.rows.next_multiple_of(PRODUCT_GROUP) * self.depth / 2
        }

        /// Returns the size of the partial sums, in f32 elements; 0 if there is only one slice.
        pub fn sum_elements(self) -> u64 {
            if self.sliced { self.rows_at_once * self.columns } else { 0 }
        }
    }

    /// Returns the workspace of a bf16 matrix product `out[m, n]` with inner dimension `k`, in f32 elements: packed
    /// operands as for f32, but two bf16 per element, and the partial sums.
    pub fn bf16_product(lanes: u64, m: u64, n: u64, k: u64) -> u64 {
        let tiling = Bf16Product::new(m, n, k);
        tiling.right_elements() + lanes * tiling.left_elements() + tiling.sum_elements()
    }

    /// Returns the number of rows that one task adds in a sum over `rows` rows (gradients of biases and norm weights).
    ///
    /// It depends only on the number of rows, so that the sum is the same for any number of threads.
    pub fn rows_per_sum(rows: u64) -> u64 {
        rows.div_ceil(16).max(32)
    }

    /// Returns the workspace size of a sum over the rows of `x[rows, columns]`. The unit is an f32 element (f64 in an
    /// f64 run). The workspace holds `columns` partial sums for every [`rows_per_sum`] rows.
    pub fn sum_rows(rows: u64, columns: u64) -> u64 {
        rows.div_ceil(rows_per_sum(rows)) * columns
    }

    /// Queries that attention processes together, as in FlashAttention.
    pub const ATTENTION_QUERIES: u64 = 64;
    /// Largest number of keys that attention processes together.
    pub const ATTENTION_KEYS: u64 = 256;

    /// Returns the workspace size of attention over sequences of `sequence` tokens. The unit is an f32 element (f64 in
    /// an f64 run). The workspace holds, for each of `lanes` threads, the transposed queries of a block, its scores,
    /// and four numbers per query.
    pub fn attention(lanes: u64, sequence: u64, head_dim: u64) -> u64 {
        lanes * ATTENTION_QUERIES * (head_dim + sequence.min(ATTENTION_KEYS) + 4)
    }

    /// Returns the workspace size of the gradient of attention over sequences of `sequence` tokens. The unit is an f32
    /// element (f64 in an f64 run). For each of `lanes` threads the workspace holds data of one block of queries:
    /// transposed queries and output gradients, probabilities and their gradients, and four numbers per query.
    pub fn attention_grad(lanes: u64, sequence: u64, head_dim: u64) -> u64 {
        lanes * ATTENTION_QUERIES * (2 * head_dim + 2 * sequence.min(ATTENTION_KEYS) + 4)
    }

    /// Returns the additional workspace of attention in bf16, which sums in f32, in f32 elements; 0 in other
    /// precisions. It holds the outputs of a block of queries for each of `lanes` threads.
    pub fn attention_sums(precision: DType, lanes: u64, head_dim: u64) -> u64 {
        if precision == precision.wide() { 0 } else { lanes * ATTENTION_QUERIES * head_dim }
    }

    /// Returns the additional workspace of the gradient of attention in bf16, which sums in f32, in f32 elements; 0 in
    /// other precisions. For each of `lanes` threads it holds the gradients of a block of queries, and those of all
    /// keys and values of a head.
    pub fn attention_grad_sums(precision: DType, lanes: u64, sequence: u64, head_dim: u64) -> u64 {
        if precision == precision.wide() { 0 } else { lanes * head_dim * (ATTENTION_QUERIES + 2 * sequence) }
    }

    /// Returns the workspace size of attention over a key-value cache of `capacity` tokens. The unit is an f32 element
    /// (f64 in an f64 run). The size is that of [`attention`] over as many tokens. The numbers of sequences and of new
    /// tokens do not matter.
    pub fn cached_attention(lanes: u64, capacity: u64, head_dim: u64) -> u64 {
        attention(lanes, capacity, head_dim)
    }
}

/// Largest workspace of cuBLASLt in a matrix product, in bytes. Its algorithms that need more are not considered.
pub const CUDA_PRODUCT_BYTES: u64 = 32 << 20;

/// Workspaces of the CUDA kernels (`cuda/kernels` in `plimsoll-device`), in f32 elements: GPUs run f32 and bf16 only.
pub mod cuda {
    use crate::op::Heads;

    /// Largest number of partial sums of Σ x² (for the gradient norm), each an f64.
    pub const NORM_PARTIALS: u64 = 1024;
    /// Largest number of portions into which a sum over rows is split; one thread block sums each.
    const PORTIONS_MAX: u64 = 256;
    /// Smallest number of rows of a portion, the rows that one thread block sums.
    const PORTION_ROWS_MIN: u64 = 4;

    /// Returns the number of rows that one thread block adds in a sum over `rows` rows.
    ///
    /// It depends only on the number of rows, and so does the order of the sum.
    pub fn rows_per_portion(rows: u64) -> u64 {
        rows.div_ceil(PORTIONS_MAX).max(PORTION_ROWS_MIN)
    }

    /// Returns the number of portions of [`rows_per_portion`] rows, each summed by one thread block, in `rows` rows.
    pub fn portions(rows: u64) -> u64 {
        rows.div_ceil(rows_per_portion(rows))
    }

    /// Returns the workspace of a matrix product `out[m, n]` by cuBLASLt, in f32 elements. It has room for 32 partial
    /// results, but at least 64 KiB and at most [`super::CUDA_PRODUCT_BYTES`]. Small models thus get small arenas, and
    /// products of common sizes get the maximum.
    pub fn product(m: u64, n: u64) -> u64 {
        (32 * m * n).clamp(1 << 14, super::CUDA_PRODUCT_BYTES / 4)
    }

    /// Returns the workspace of a sum over the rows of `x[rows, columns]`, in f32 elements: `columns` partial sums for
    /// each of the [`portions`].
    pub fn sum_rows(rows: u64, columns: u64) -> u64 {
        portions(rows) * columns
    }

    /// Returns the workspace of the gradient of the embedding table, from `rows` tokens of `hidden` elements, in f32
    /// elements.
    ///
    /// It holds token ids and row numbers, which the kernel sorts by token, each twice for the sort. For each of the
    /// [`portions`] it also holds the partial sum of a token whose rows start in an earlier portion.
    pub fn embed_grad(rows: u64, hidden: u64) -> u64 {
        4 * rows + portions(rows) * hidden
    }

    /// Returns the workspace of the gradient of attention, in f32 elements: one sum Σ out · dout for each query and
    /// head.
    pub fn attention_grad(batch: u64, sequence: u64, heads: u64) -> u64 {
        batch * sequence * heads
    }

    /// Largest number of new tokens of a sequence for which cached attention splits the keys over several thread blocks.
    pub const FEW_ROWS: u64 = 4;

    /// Returns the keys per part, and the number of parts, into which attention splits a key-value cache of `capacity`
    /// tokens. Both depend only on the capacity, and so does the order of the sum.
    pub fn key_parts(capacity: u64) -> (u64, u64) {
        let part = capacity.div_ceil(128).next_multiple_of(16).max(128);
        (part, capacity.div_ceil(part))
    }

    /// Returns the workspace of attention of `rows` new tokens of each of `sequences` sequences over key-value caches of
    /// `capacity` tokens, in f32 elements; 0 for more than [`FEW_ROWS`] new tokens of a sequence. For each head, new token
    /// and part of a cache ([`key_parts`]) it holds an output vector and two numbers.
    pub fn cached_attention(sequences: u64, rows: u64, capacity: u64, shape: Heads) -> u64 {
        let parts = if rows > FEW_ROWS { 0 } else { key_parts(capacity).1 };
        parts * sequences * rows * shape.heads * (shape.head_dim + 2)
    }

    /// Returns the workspace of Σ x², in f32 elements: [`NORM_PARTIALS`] f64 partial sums.
    pub const fn squared_norm() -> u64 {
        2 * NORM_PARTIALS
    }
}

#[cfg(test)]
mod tests {
    use super::cpu::*;
    use super::*;

    #[test]
    fn product_slices_have_equal_depth() {
        for k in 1..5000 {
            let depth = product_depth(k);
            assert!((1..=PRODUCT_DEPTH).contains(&depth));
            assert_eq!(k.div_ceil(depth), k.div_ceil(PRODUCT_DEPTH), "{k}");
        }
    }

    #[test]
    fn product_workspace_is_bounded() {
        let largest = product(2, 1 << 20, 1 << 20, 1 << 20);
        assert_eq!(largest, PRODUCT_DEPTH * (PRODUCT_COLUMNS + 2 * PRODUCT_ROWS));
        assert_eq!(product(1, 1, 1, 1), PRODUCT_PANEL + PRODUCT_GROUP);
    }

    #[test]
    fn row_sums_have_few_partial_sums() {
        for rows in 1..5000 {
            assert!(sum_rows(rows, 1) <= 16);
        }
    }

    #[test]
    fn key_parts_cover_the_cache() {
        for capacity in (1..5000).chain([1 << 17, 1 << 20]) {
            let (part, parts) = cuda::key_parts(capacity);
            assert!((1..=128).contains(&parts) && part * parts >= capacity && part * (parts - 1) < capacity);
        }
    }

    #[test]
    fn portions_cover_all_rows() {
        for rows in (1..5000).chain([1 << 20, u64::from(u32::MAX)]) {
            let count = cuda::portions(rows);
            assert!((1..=256).contains(&count) && count * cuda::rows_per_portion(rows) >= rows);
        }
    }
}
