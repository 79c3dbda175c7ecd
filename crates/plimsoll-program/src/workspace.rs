//! How much scratch each op needs, in elements of the op's type: the planner lays out exactly
//! this, and the CPU's kernels (`plimsoll-device`, `cpu/kernels`) are given exactly this.
//!
//! Pure functions of sizes and `lanes`, the number of threads that work at once. They do not
//! depend on the processor, so that a plan on paper is the plan on the machine.

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

/// Rows summed by one task where rows are added up: biases, the weights of norms. A function of
/// the rows alone, so that the sum is the same for any number of threads.
pub fn rows_per_sum(rows: u64) -> u64 {
    rows.div_ceil(16).max(32)
}

/// `sum_rows`: a partial sum per `rows_per_sum` rows.
pub fn sum_rows(rows: u64, columns: u64) -> u64 {
    rows.div_ceil(rows_per_sum(rows)) * columns
}

/// `rms_norm_grad`: a partial sum of the weight's gradient per `rows_per_sum` rows.
pub fn rms_norm_grad(rows: u64, dim: u64) -> u64 {
    sum_rows(rows, dim)
}

/// `head_norm_grad`: partial sums of the gradients of both weights per `rows_per_sum` rows; the
/// number of heads does not matter.
pub fn head_norm_grad(rows: u64, _heads: u64, _kv_heads: u64, head_dim: u64) -> u64 {
    sum_rows(rows, 2 * head_dim)
}

/// `cross_entropy`: the loss of each row.
pub fn cross_entropy(rows: u64, _vocab: u64) -> u64 {
    rows
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

/// `cached_attention` of `rows` new tokens over at most `capacity` keys: as `attention`.
pub fn cached_attention(lanes: u64, _rows: u64, capacity: u64, head_dim: u64) -> u64 {
    attention(lanes, capacity, head_dim)
}

#[cfg(test)]
mod tests {
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
}
