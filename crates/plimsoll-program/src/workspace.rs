//! How much scratch each op needs, in elements of the wide type beside the run's precision: the planner
//! lays out exactly this, and kernels are given exactly this.
//!
//! Pure functions of sizes and of whose kernels run ([`Kernels`]). They do not depend on the processor or
//! the GPU, so that a plan on paper is the plan on the machine.

use crate::op::Heads;
use plimsoll_core::{DType, DeviceKind, DeviceSpec};

/// Whose kernels run the ops: scratch is a function of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kernels {
    /// Those of the processor.
    Cpu {
        /// Threads that work at once.
        threads: u64,
    },
    /// Those of NVIDIA GPUs.
    Cuda,
}

impl Kernels {
    /// Those that a device has, on paper as on the machine.
    pub fn of(device: &DeviceSpec) -> Kernels {
        match device.kind {
            DeviceKind::Cpu | DeviceKind::Virtual => Kernels::Cpu { threads: u64::from(device.threads) },
            DeviceKind::Cuda | DeviceKind::Paper => Kernels::Cuda,
        }
    }

    /// `product`: out[m, n] from an inner size of k.
    pub fn product(self, precision: DType, m: u64, n: u64, k: u64) -> u64 {
        match self {
            Kernels::Cpu { threads } if precision == DType::Bf16 => cpu::pairs_product(threads, m, n, k),
            Kernels::Cpu { threads } => cpu::product(threads, m, n, k),
            Kernels::Cuda => cuda::product(m, n),
        }
    }

    /// `sum_rows` of x[rows, columns].
    pub fn sum_rows(self, rows: u64, columns: u64) -> u64 {
        match self {
            Kernels::Cpu { .. } => cpu::sum_rows(rows, columns),
            Kernels::Cuda => cuda::sum_rows(rows, columns),
        }
    }

    /// `embed_grad` of dout[rows, hidden].
    pub fn embed_grad(self, rows: u64, hidden: u64) -> u64 {
        match self {
            Kernels::Cpu { .. } => 0,
            Kernels::Cuda => cuda::embed_grad(rows, hidden),
        }
    }

    /// `rms_norm_grad` of x[rows, dim].
    pub fn rms_norm_grad(self, rows: u64, dim: u64) -> u64 {
        self.sum_rows(rows, dim)
    }

    /// `head_norm_grad`: the number of heads does not matter.
    pub fn head_norm_grad(self, rows: u64, head_dim: u64) -> u64 {
        self.sum_rows(rows, 2 * head_dim)
    }

    /// `attention` over sequences of so many tokens.
    pub fn attention(self, precision: DType, sequence: u64, shape: Heads) -> u64 {
        match self {
            Kernels::Cpu { threads } => {
                cpu::attention(threads, sequence, shape.head_dim)
                    + cpu::attention_sums(precision, threads, shape.head_dim)
            }
            Kernels::Cuda => 0,
        }
    }

    /// `attention_grad`.
    pub fn attention_grad(self, precision: DType, batch: u64, sequence: u64, shape: Heads) -> u64 {
        match self {
            Kernels::Cpu { threads } => {
                cpu::attention_grad(threads, sequence, shape.head_dim)
                    + cpu::attention_grad_sums(precision, threads, sequence, shape.head_dim)
            }
            Kernels::Cuda => cuda::attention_grad(batch, sequence, shape.heads),
        }
    }

    /// `cached_attention` of `rows` new tokens over at most `capacity` keys.
    pub fn cached_attention(self, precision: DType, rows: u64, capacity: u64, shape: Heads) -> u64 {
        match self {
            Kernels::Cpu { threads } => {
                cpu::cached_attention(threads, rows, capacity, shape.head_dim)
                    + cpu::attention_sums(precision, threads, shape.head_dim)
            }
            Kernels::Cuda => cuda::cached_attention(rows, capacity, shape),
        }
    }

    /// `squared_norm`.
    pub fn squared_norm(self) -> u64 {
        match self {
            Kernels::Cpu { .. } => 0,
            Kernels::Cuda => cuda::squared_norm(),
        }
    }
}

/// The CPU's kernels (`plimsoll-device`, `cpu/kernels`). `lanes` is the number of threads that work at once.
pub mod cpu {
    use plimsoll_core::DType;

    /// Columns of the packed right-hand side of a product are padded to a multiple of this.
    pub const PRODUCT_PANEL: u64 = 64;
    /// Rows of the left-hand side go through the registers in groups of this many.
    pub const PRODUCT_GROUP: u64 = 6;
    /// A product is taken in slices of at most this depth (its `k`).
    pub const PRODUCT_DEPTH: u64 = 512;
    /// Rows of the left-hand side that one task packs.
    pub const PRODUCT_ROWS: u64 = 96;
    /// Columns of the right-hand side that are packed at once.
    pub const PRODUCT_COLUMNS: u64 = 2048;
    /// With at most this many rows and a right-hand side stored as n × k, nothing is packed.
    pub const PRODUCT_FEW_ROWS: u64 = 4;

    /// How a product of depth `k` is cut: slices of equal depth (the last may be less), each at most
    /// `PRODUCT_DEPTH` and at least 1.
    pub fn product_depth(k: u64) -> u64 {
        k.div_ceil(k.div_ceil(PRODUCT_DEPTH).max(1)).max(1)
    }

    /// `product`: out[m, n] from an inner size of k. The packed slice of the right-hand side, then a
    /// block of left-hand rows per lane.
    pub fn product(lanes: u64, m: u64, n: u64, k: u64) -> u64 {
        let depth = product_depth(k);
        let right = n.min(PRODUCT_COLUMNS).next_multiple_of(PRODUCT_PANEL) * depth;
        let left = m.min(PRODUCT_ROWS).next_multiple_of(PRODUCT_GROUP) * depth;
        right + lanes * left
    }

    /// Elements of f32 that hold the sums of a bf16 product whose inner size has several slices, at most.
    pub const PAIRS_SUMS: u64 = 1 << 20;

    /// How a product of bf16 is cut, pairs of which have the size of an f32.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Pairs {
        /// Of a slice of k: even.
        pub depth: u64,
        /// Rows of the left-hand side that one task packs.
        pub rows: u64,
        /// Columns of the right-hand side that are packed at once.
        pub columns: u64,
        /// Rows whose sums of slices stand in scratch at once, where there are several slices.
        pub rows_at_once: u64,
        /// Whether there are.
        pub sliced: bool,
    }

    impl Pairs {
        /// Of out[m, n] from an inner size of k.
        pub fn of(m: u64, n: u64, k: u64) -> Pairs {
            let depth = 2 * product_depth(k.div_ceil(2));
            let columns = n.clamp(1, PRODUCT_COLUMNS);
            let rows = m.clamp(1, PRODUCT_ROWS);
            // Whole tasks of rows.
            let rows_at_once = (PAIRS_SUMS / columns / PRODUCT_ROWS * PRODUCT_ROWS).min(m).max(1);
            Pairs { depth, rows, columns, rows_at_once, sliced: k > depth }
        }

        /// Elements of f32 that the packed slice of the right-hand side takes.
        pub fn right(self) -> u64 {
            self.columns.next_multiple_of(PRODUCT_PANEL) * self.depth / 2
        }

        /// Those of a block of left-hand rows.
        pub fn left(self) -> u64 {
            self.rows.next_multiple_of(PRODUCT_GROUP) * self.depth / 2
        }

        /// Those of the sums of slices.
        pub fn sums(self) -> u64 {
            if self.sliced { self.rows_at_once * self.columns } else { 0 }
        }
    }

    /// `product` of bf16: as that of f32, in pairs, and the sums of slices.
    pub fn pairs_product(lanes: u64, m: u64, n: u64, k: u64) -> u64 {
        let pairs = Pairs::of(m, n, k);
        pairs.right() + lanes * pairs.left() + pairs.sums()
    }

    /// Rows summed by one task where rows are added up: biases, the weights of norms. A function of
    /// the rows alone, so that the sum is the same for any number of threads.
    pub fn rows_per_sum(rows: u64) -> u64 {
        rows.div_ceil(16).max(32)
    }

    /// `sum_rows`, and the gradients of norms' weights: a partial sum per `rows_per_sum` rows.
    pub fn sum_rows(rows: u64, columns: u64) -> u64 {
        rows.div_ceil(rows_per_sum(rows)) * columns
    }

    /// Queries that attention works on at once.
    pub const ATTENTION_QUERIES: u64 = 64;
    /// Keys that attention works on at once, at most.
    pub const ATTENTION_KEYS: u64 = 256;

    /// `attention`: per lane the transposed queries, a block of scores, and four numbers for each
    /// query.
    pub fn attention(lanes: u64, sequence: u64, head_dim: u64) -> u64 {
        lanes * ATTENTION_QUERIES * (head_dim + sequence.min(ATTENTION_KEYS) + 4)
    }

    /// `attention_grad`: per lane the transposed queries and gradients of the output, the
    /// probabilities and their gradients, and four numbers for each query.
    pub fn attention_grad(lanes: u64, sequence: u64, head_dim: u64) -> u64 {
        lanes * ATTENTION_QUERIES * (2 * head_dim + 2 * sequence.min(ATTENTION_KEYS) + 4)
    }

    /// What `attention` needs besides where it does not compute in the precision itself: per lane the outputs of a block.
    pub fn attention_sums(precision: DType, lanes: u64, head_dim: u64) -> u64 {
        if precision == precision.wide() { 0 } else { lanes * ATTENTION_QUERIES * head_dim }
    }

    /// What `attention_grad` needs besides: per lane the gradients of a block of queries, and those of all keys and
    /// values of a head.
    pub fn attention_grad_sums(precision: DType, lanes: u64, sequence: u64, head_dim: u64) -> u64 {
        if precision == precision.wide() { 0 } else { lanes * head_dim * (ATTENTION_QUERIES + 2 * sequence) }
    }

    /// `cached_attention` of `rows` new tokens over at most `capacity` keys: as `attention`.
    pub fn cached_attention(lanes: u64, _rows: u64, capacity: u64, head_dim: u64) -> u64 {
        attention(lanes, capacity, head_dim)
    }
}

/// Bytes that cuBLASLt may use in a product, at most. An algorithm that wants more is not taken.
pub const CUDA_PRODUCT_BYTES: u64 = 32 << 20;

/// The CUDA kernels (`plimsoll-device`, `cuda/kernels`), in f32 elements.
pub mod cuda {
    use crate::op::Heads;

    /// f64 elements of partial sums that `squared_norm` needs.
    pub const NORM_PARTIALS: u64 = 1024;
    /// Portions of rows that are summed side by side, at most.
    const PORTIONS: u64 = 256;
    /// Rows of a portion, at least.
    const PORTION_ROWS: u64 = 4;

    /// Rows that are summed by one block. A function of the rows alone, as is then the order of the sum.
    pub fn rows_per_portion(rows: u64) -> u64 {
        rows.div_ceil(PORTIONS).max(PORTION_ROWS)
    }

    /// How many portions that makes.
    pub fn portions(rows: u64) -> u64 {
        rows.div_ceil(rows_per_portion(rows))
    }

    /// `product`: room for 32 partial results, so that small models have small arenas; products of real sizes have all.
    pub fn product(m: u64, n: u64) -> u64 {
        (32 * m * n).clamp(1 << 14, super::CUDA_PRODUCT_BYTES / 4)
    }

    /// `sum_rows`, and the gradients of norms' weights: a partial sum per portion.
    pub fn sum_rows(rows: u64, columns: u64) -> u64 {
        portions(rows) * columns
    }

    /// `embed_grad`: tokens and rows in their order, twice, and for each portion of them the sum that began before it.
    pub fn embed_grad(rows: u64, hidden: u64) -> u64 {
        4 * rows + portions(rows) * hidden
    }

    /// `attention_grad`: for each query and head the sum of out · dout.
    pub fn attention_grad(batch: u64, sequence: u64, heads: u64) -> u64 {
        batch * sequence * heads
    }

    /// With at most this many new tokens, attention over a cache shares the keys out among blocks.
    pub const FEW_ROWS: u64 = 4;

    /// How many keys a block takes then, and how many such parts there are. A function of the capacity alone,
    /// as is then the order of the sum.
    pub fn key_parts(capacity: u64) -> (u64, u64) {
        let part = capacity.div_ceil(128).next_multiple_of(16).max(128);
        (part, capacity.div_ceil(part))
    }

    /// `cached_attention`: of few tokens, for each part of the keys and each head an output and two numbers.
    pub fn cached_attention(rows: u64, capacity: u64, shape: Heads) -> u64 {
        if rows > FEW_ROWS { 0 } else { key_parts(capacity).1 * rows * shape.heads * (shape.head_dim + 2) }
    }

    /// `squared_norm`.
    pub const fn squared_norm() -> u64 {
        2 * NORM_PARTIALS
    }
}

#[cfg(test)]
mod tests {
    use super::cpu::*;
    use super::*;

    #[test]
    fn products_are_cut_evenly_and_whole() {
        for k in 1..5000 {
            let depth = product_depth(k);
            assert!((1..=PRODUCT_DEPTH).contains(&depth));
            assert_eq!(k.div_ceil(depth), k.div_ceil(PRODUCT_DEPTH), "{k}");
        }
    }

    #[test]
    fn scratch_of_a_product_is_bounded() {
        let most = product(2, 1 << 20, 1 << 20, 1 << 20);
        assert_eq!(most, PRODUCT_DEPTH * (PRODUCT_COLUMNS + 2 * PRODUCT_ROWS));
        assert_eq!(product(1, 1, 1, 1), PRODUCT_PANEL + PRODUCT_GROUP);
    }

    #[test]
    fn partial_sums_are_few() {
        for rows in 1..5000 {
            assert!(sum_rows(rows, 1) <= 16);
        }
    }

    #[test]
    fn parts_of_keys_are_few_and_cover_a_cache() {
        for capacity in (1..5000).chain([1 << 17, 1 << 20]) {
            let (part, parts) = cuda::key_parts(capacity);
            assert!((1..=128).contains(&parts) && part * parts >= capacity && part * (parts - 1) < capacity);
        }
    }

    #[test]
    fn portions_are_few_and_cover_all_rows() {
        for rows in (1..5000).chain([1 << 20, u64::from(u32::MAX)]) {
            let count = cuda::portions(rows);
            assert!((1..=256).contains(&count) && count * cuda::rows_per_portion(rows) >= rows);
        }
    }
}
