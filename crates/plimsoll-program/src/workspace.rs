//! Scratch that ops need, in elements of the run's precision. The kernels use exactly this.
//! Sums over rows are made of partial sums over fixed ranges of rows, so that the bits do not
//! depend on the number of threads.

/// Ranges of rows that partial sums are made of.
pub const ROW_PARTS: u64 = 16;
/// Query rows that attention treats at once.
pub const ATTENTION_ROWS: u64 = 64;

/// Partial sums of a bias gradient.
pub fn sum_rows(_rows: u64, columns: u64) -> u64 {
    ROW_PARTS * columns
}

/// Partial sums of the norm's weight gradient.
pub fn rms_norm_grad(_rows: u64, dim: u64) -> u64 {
    ROW_PARTS * dim
}

/// Partial sums of the two head norms' weight gradients.
pub fn head_norm_grad(_rows: u64, _heads: u64, _kv_heads: u64, head_dim: u64) -> u64 {
    ROW_PARTS * 2 * head_dim
}

/// Scores of a block of queries, for each lane.
pub fn attention(lanes: u64, sequence: u64, _head_dim: u64) -> u64 {
    lanes * ATTENTION_ROWS * sequence
}

/// Probabilities and their gradients of a block of queries, for each lane.
pub fn attention_grad(lanes: u64, sequence: u64, _head_dim: u64) -> u64 {
    lanes * 2 * ATTENTION_ROWS * sequence
}

/// Scores of new tokens against the cache, for each lane.
pub fn cached_attention(lanes: u64, rows: u64, capacity: u64, _head_dim: u64) -> u64 {
    lanes * rows.min(ATTENTION_ROWS) * capacity
}

/// Partial sums of the loss over rows.
pub fn cross_entropy(rows: u64, _vocab: u64) -> u64 {
    rows
}
