//! Workspace (temporary memory) of each op, in elements of the wide dtype of the run's precision. The planner reserves
//! exactly this, and kernels get exactly this.
//!
//! The sizes are pure functions of the op's sizes and of [`Kernels`]. They do not depend on the processor or GPU model,
//! so that a plan for a paper device is also the plan on the machine.

use crate::op::Heads;
use plimsoll_core::{DType, DeviceKind, DeviceSpec};

/// The kernels that run the ops; workspace sizes depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernels {
    /// Kernels for CPUs and virtual devices.
    Cpu {
        /// Threads that run at once.
        threads: u64,
    },
    /// Kernels for NVIDIA GPUs.
    Cuda,
}

impl Kernels {
    /// Returns the kernels of a device; a paper device has those of a GPU.
    pub fn for_device(device: &DeviceSpec) -> Kernels {
        match device.kind {
            DeviceKind::Cpu | DeviceKind::Virtual => Kernels::Cpu { threads: u64::from(device.threads) },
            DeviceKind::Cuda | DeviceKind::Paper => Kernels::Cuda,
        }
    }

    /// Returns the workspace of `product`: `out[m, n]` with inner dimension k.
    pub fn product(self, precision: DType, m: u64, n: u64, k: u64) -> u64 {
        match self {
            Kernels::Cpu { threads } if precision == DType::Bf16 => cpu::bf16_product(threads, m, n, k),
            Kernels::Cpu { threads } => cpu::product(threads, m, n, k),
            Kernels::Cuda => cuda::product(m, n),
        }
    }

    /// Returns the workspace of `sum_rows` of `x[rows, columns]`.
    pub fn sum_rows(self, rows: u64, columns: u64) -> u64 {
        match self {
            Kernels::Cpu { .. } => cpu::sum_rows(rows, columns),
            Kernels::Cuda => cuda::sum_rows(rows, columns),
        }
    }

    /// Returns the workspace of `embed_grad` of `dout[rows, hidden]`.
    pub fn embed_grad(self, rows: u64, hidden: u64) -> u64 {
        match self {
            Kernels::Cpu { .. } => 0,
            Kernels::Cuda => cuda::embed_grad(rows, hidden),
        }
    }

    /// Returns the workspace of `rms_norm_grad` of `x[rows, dim]`.
    pub fn rms_norm_grad(self, rows: u64, dim: u64) -> u64 {
        self.sum_rows(rows, dim)
    }

    /// Returns the workspace of `head_norm_grad`, for any number of heads.
    pub fn head_norm_grad(self, rows: u64, head_dim: u64) -> u64 {
        self.sum_rows(rows, 2 * head_dim)
    }

    /// Returns the workspace of `attention` over sequences of `sequence` tokens.
    pub fn attention(self, precision: DType, sequence: u64, shape: Heads) -> u64 {
        match self {
            Kernels::Cpu { threads } => {
                cpu::attention(threads, sequence, shape.head_dim)
                    + cpu::attention_sums(precision, threads, shape.head_dim)
            }
            Kernels::Cuda => 0,
        }
    }

    /// Returns the workspace of `attention_grad` of `batch` sequences of `sequence` tokens.
    pub fn attention_grad(self, precision: DType, batch: u64, sequence: u64, shape: Heads) -> u64 {
        match self {
            Kernels::Cpu { threads } => {
                cpu::attention_grad(threads, sequence, shape.head_dim)
                    + cpu::attention_grad_sums(precision, threads, sequence, shape.head_dim)
            }
            Kernels::Cuda => cuda::attention_grad(batch, sequence, shape.heads),
        }
    }

    /// Returns the workspace of `cached_attention` of `rows` new tokens over at most `capacity` keys.
    pub fn cached_attention(self, precision: DType, rows: u64, capacity: u64, shape: Heads) -> u64 {
        match self {
            Kernels::Cpu { threads } => {
                cpu::cached_attention(threads, rows, capacity, shape.head_dim)
                    + cpu::attention_sums(precision, threads, shape.head_dim)
            }
            Kernels::Cuda => cuda::cached_attention(rows, capacity, shape),
        }
    }

    /// Returns the workspace of `squared_norm`.
    pub fn squared_norm(self) -> u64 {
        match self {
            Kernels::Cpu { .. } => 0,
            Kernels::Cuda => cuda::squared_norm(),
        }
    }
}

/// Workspaces and tile sizes of the CPU kernels (`cpu/kernels` in `plimsoll-device`). `lanes` is the number of threads
/// that run at once.
pub mod cpu {
    use plimsoll_core::DType;

    /// Multiple to which the columns of the packed right-hand side are padded.
    pub const PRODUCT_PANEL: u64 = 64;
    /// Rows of the left-hand side that registers hold at once.
    pub const PRODUCT_GROUP: u64 = 6;
    /// Largest depth (part of `k`) of a slice of a product.
    pub const PRODUCT_DEPTH: u64 = 512;
    /// Rows of the left-hand side that one task packs.
    pub const PRODUCT_ROWS: u64 = 96;
    /// Columns of the right-hand side that are packed at once.
    pub const PRODUCT_COLUMNS: u64 = 2048;
    /// Largest number of rows for which nothing is packed, if the right-hand side is stored as n × k.
    pub const PRODUCT_FEW_ROWS: u64 = 4;

    /// Returns the depth of the slices of a product of depth `k`: equal, except for a shorter last slice, and from 1 to
    /// [`PRODUCT_DEPTH`].
    pub fn product_depth(k: u64) -> u64 {
        k.div_ceil(k.div_ceil(PRODUCT_DEPTH).max(1)).max(1)
    }

    /// Returns the workspace of `product`: `out[m, n]` with inner dimension k. It holds the packed slice of the
    /// right-hand side and a block of left-hand rows per lane.
    pub fn product(lanes: u64, m: u64, n: u64, k: u64) -> u64 {
        let depth = product_depth(k);
        let right = n.min(PRODUCT_COLUMNS).next_multiple_of(PRODUCT_PANEL) * depth;
        let left = m.min(PRODUCT_ROWS).next_multiple_of(PRODUCT_GROUP) * depth;
        right + lanes * left
    }

    /// Largest number of f32 elements for the partial sums of a bf16 product with several slices.
    pub const BF16_SUMS_MAX: u64 = 1 << 20;

    /// The tiling of a bf16 product. Kernels process bf16 elements in pairs, each of the size of an f32.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Bf16Product {
        /// Depth of a slice of k, an even number.
        pub depth: u64,
        /// Rows of the left-hand side that one task packs.
        pub rows: u64,
        /// Columns of the right-hand side that are packed at once.
        pub columns: u64,
        /// Rows with partial sums in the workspace at once, if there are several slices.
        pub rows_at_once: u64,
        /// Whether there are several slices.
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

        /// Returns the f32 elements of the packed slice of the right-hand side.
        pub fn right(self) -> u64 {
            self.columns.next_multiple_of(PRODUCT_PANEL) * self.depth / 2
        }

        /// Returns the f32 elements of a packed block of left-hand rows.
        pub fn left(self) -> u64 {
            self.rows.next_multiple_of(PRODUCT_GROUP) * self.depth / 2
        }

        /// Returns the f32 elements of the partial sums.
        pub fn sums(self) -> u64 {
            if self.sliced { self.rows_at_once * self.columns } else { 0 }
        }
    }

    /// Returns the workspace of a bf16 `product`: packed operands as for f32, but in pairs, and the partial sums.
    pub fn bf16_product(lanes: u64, m: u64, n: u64, k: u64) -> u64 {
        let tiling = Bf16Product::new(m, n, k);
        tiling.right() + lanes * tiling.left() + tiling.sums()
    }

    /// Returns the rows that one task adds in sums over rows: gradients of biases and norm weights. It depends only on
    /// the number of rows, so that the sum is the same for any number of threads.
    pub fn rows_per_sum(rows: u64) -> u64 {
        rows.div_ceil(16).max(32)
    }

    /// Returns the workspace of `sum_rows` and of gradients of norm weights: a partial sum per [`rows_per_sum`] rows.
    pub fn sum_rows(rows: u64, columns: u64) -> u64 {
        rows.div_ceil(rows_per_sum(rows)) * columns
    }

    /// Queries of an attention block.
    pub const ATTENTION_QUERIES: u64 = 64;
    /// Largest number of keys of an attention block.
    pub const ATTENTION_KEYS: u64 = 256;

    /// Returns the workspace of `attention`: per lane the transposed queries, a block of scores, and four numbers per
    /// query.
    pub fn attention(lanes: u64, sequence: u64, head_dim: u64) -> u64 {
        lanes * ATTENTION_QUERIES * (head_dim + sequence.min(ATTENTION_KEYS) + 4)
    }

    /// Returns the workspace of `attention_grad`: per lane the transposed queries and output gradients, the
    /// probabilities and their gradients, and four numbers per query.
    pub fn attention_grad(lanes: u64, sequence: u64, head_dim: u64) -> u64 {
        lanes * ATTENTION_QUERIES * (2 * head_dim + 2 * sequence.min(ATTENTION_KEYS) + 4)
    }

    /// Returns the additional workspace of `attention` in bf16, which sums in f32: per lane the outputs of a block.
    pub fn attention_sums(precision: DType, lanes: u64, head_dim: u64) -> u64 {
        if precision == precision.wide() { 0 } else { lanes * ATTENTION_QUERIES * head_dim }
    }

    /// Returns the additional workspace of `attention_grad` in bf16, which sums in f32: per lane the gradients of a
    /// block of queries, and those of all keys and values of a head.
    pub fn attention_grad_sums(precision: DType, lanes: u64, sequence: u64, head_dim: u64) -> u64 {
        if precision == precision.wide() { 0 } else { lanes * head_dim * (ATTENTION_QUERIES + 2 * sequence) }
    }

    /// Returns the workspace of `cached_attention` over at most `capacity` keys, which equals that of [`attention`].
    pub fn cached_attention(lanes: u64, _rows: u64, capacity: u64, head_dim: u64) -> u64 {
        attention(lanes, capacity, head_dim)
    }
}

/// Largest workspace of cuBLASLt in a product, in bytes. Algorithms that need more are not considered.
pub const CUDA_PRODUCT_BYTES: u64 = 32 << 20;

/// Workspaces of the CUDA kernels (`cuda/kernels` in `plimsoll-device`), in f32 elements.
pub mod cuda {
    use crate::op::Heads;

    /// Partial sums of `squared_norm`, in f64 elements.
    pub const NORM_PARTIALS: u64 = 1024;
    /// Largest number of portions of rows that are summed in parallel.
    const PORTIONS_MAX: u64 = 256;
    /// Smallest number of rows of a portion.
    const PORTION_ROWS_MIN: u64 = 4;

    /// Returns the rows that one block sums. They depend only on the number of rows, and so does the order of the sum.
    pub fn rows_per_portion(rows: u64) -> u64 {
        rows.div_ceil(PORTIONS_MAX).max(PORTION_ROWS_MIN)
    }

    /// Returns the number of portions of [`rows_per_portion`] rows.
    pub fn portions(rows: u64) -> u64 {
        rows.div_ceil(rows_per_portion(rows))
    }

    /// Returns the workspace of `product`: 32 partial results, at most [`super::CUDA_PRODUCT_BYTES`]. Small models
    /// thus get small arenas, and products of common sizes get the maximum.
    pub fn product(m: u64, n: u64) -> u64 {
        (32 * m * n).clamp(1 << 14, super::CUDA_PRODUCT_BYTES / 4)
    }

    /// Returns the workspace of `sum_rows` and of gradients of norm weights: a partial sum per portion.
    pub fn sum_rows(rows: u64, columns: u64) -> u64 {
        portions(rows) * columns
    }

    /// Returns the workspace of `embed_grad`: tokens and rows in sorted order with a second buffer each, and per
    /// portion the partial sum of a token that started in an earlier portion.
    pub fn embed_grad(rows: u64, hidden: u64) -> u64 {
        4 * rows + portions(rows) * hidden
    }

    /// Returns the workspace of `attention_grad`: the sum of out · dout for each query and head.
    pub fn attention_grad(batch: u64, sequence: u64, heads: u64) -> u64 {
        batch * sequence * heads
    }

    /// Largest number of new tokens for which cached attention splits the keys over several blocks.
    pub const FEW_ROWS: u64 = 4;

    /// Returns the keys per block and the number of such parts, if the keys are split. Both depend only on the
    /// capacity, and so does the order of the sum.
    pub fn key_parts(capacity: u64) -> (u64, u64) {
        let part = capacity.div_ceil(128).next_multiple_of(16).max(128);
        (part, capacity.div_ceil(part))
    }

    /// Returns the workspace of `cached_attention`: with at most [`FEW_ROWS`] tokens, an output and two numbers for
    /// each part of the keys and each head.
    pub fn cached_attention(rows: u64, capacity: u64, shape: Heads) -> u64 {
        if rows > FEW_ROWS { 0 } else { key_parts(capacity).1 * rows * shape.heads * (shape.head_dim + 2) }
    }

    /// Returns the workspace of `squared_norm`.
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
