//! Rotary positions, attention over a micro-batch, and attention over the key-value cache of generation.

use super::{AccessVisitor, Cost, OpKind, OperandTypes, QkNorm, not_in_family};
use plimsoll_core::DType;
use serde::{Deserialize, Serialize};

/// The numbers of query heads and of key/value heads of an attention, and the size of a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Heads {
    /// H, the number of query heads.
    pub heads: u64,
    /// K, the number of key heads and of value heads.
    pub kv_heads: u64,
    /// E, the number of elements of a head.
    pub head_dim: u64,
}

impl Heads {
    /// Returns C = (H + 2K)·E, the columns of the tensor with queries, keys and values side by side.
    pub fn columns(self) -> u64 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Returns H·E, the columns of the attention output.
    pub fn query_columns(self) -> u64 {
        self.heads * self.head_dim
    }

    /// Returns H + K, the number of query and key heads, to which rotary positions (and the head norms of Qwen 3)
    /// apply.
    pub fn rotated_heads(self) -> u64 {
        self.heads + self.kv_heads
    }

    /// Returns the numbers of elements that a norm of queries and one of keys cover.
    pub fn norm_widths(self, norm: QkNorm) -> [u64; 2] {
        [self.heads, self.kv_heads].map(|heads| norm.width(heads, self.head_dim))
    }

    /// Returns the number of norms of a token's queries and keys.
    pub fn norm_count(self, norm: QkNorm) -> u64 {
        match norm {
            QkNorm::PerHead => self.rotated_heads(),
            QkNorm::AllHeads => 2,
        }
    }
}

/// Reports to `visitor` each range of tensor elements that an op of this module reads or writes.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::Rope { qkv, table, positions, rows, table_rows, shape, .. } => {
            visitor.read(*table, table_rows * shape.head_dim);
            visitor.read(*positions, *rows);
            visitor.update(*qkv, rows * shape.columns());
        }
        OpKind::RopeTable { table, table_rows, head_dim, .. } => visitor.write(*table, table_rows * head_dim),
        OpKind::Attention { qkv, document_start, out, stats, workspace, batch, sequence, shape, .. } => {
            let rows = batch * sequence;
            visitor.read(*qkv, rows * shape.columns());
            visitor.read(*document_start, rows);
            visitor.write(*out, rows * shape.query_columns());
            visitor.write(*stats, rows * shape.heads);
            visitor.write_all(*workspace);
        }
        OpKind::AttentionGrad {
            qkv,
            out,
            dout,
            stats,
            document_start,
            dqkv,
            workspace,
            batch,
            sequence,
            shape,
            ..
        } => {
            let rows = batch * sequence;
            visitor.read(*qkv, rows * shape.columns());
            visitor.read(*out, rows * shape.query_columns());
            visitor.read(*dout, rows * shape.query_columns());
            visitor.read(*stats, rows * shape.heads);
            visitor.read(*document_start, rows);
            visitor.write(*dqkv, rows * shape.columns());
            visitor.write_all(*workspace);
        }
        OpKind::ShiftPositions { positions, document_start, out, rows, .. } => {
            visitor.read(*positions, *rows);
            document_start.iter().for_each(|starts| visitor.read(*starts, *rows));
            visitor.write(*out, *rows);
        }
        OpKind::CachedAttention {
            qkv,
            keys,
            values,
            places,
            first_keys,
            out,
            workspace,
            slots,
            sequences,
            rows,
            capacity,
            shape,
            ..
        } => {
            let (rows, cache) = (sequences * rows, slots * capacity * shape.kv_heads * shape.head_dim);
            first_keys.iter().for_each(|first_keys| visitor.read(*first_keys, rows));
            visitor.read(*qkv, rows * shape.columns());
            visitor.read(*keys, cache);
            visitor.read(*values, cache);
            visitor.read(*places, rows);
            visitor.write(*out, rows * shape.query_columns());
            visitor.write_all(*workspace);
        }
        OpKind::AppendCache { qkv, keys, values, places, slots, sequences, rows, capacity, shape } => {
            let (rows, cache) = (sequences * rows, slots * capacity * shape.kv_heads * shape.head_dim);
            visitor.read(*qkv, rows * shape.columns());
            visitor.read(*places, rows);
            visitor.update(*keys, cache);
            visitor.update(*values, cache);
        }
        OpKind::CopyCache { keys, values, from, to, slots, capacity, rows, shape } => {
            let cache = slots * capacity * shape.kv_heads * shape.head_dim;
            visitor.read(*from, *rows);
            visitor.read(*to, *rows);
            visitor.update(*keys, cache);
            visitor.update(*values, cache);
        }
        other => not_in_family(other),
    }
}

/// Returns the number of floating-point operations of an op of this module.
pub(super) fn cost(op: &OpKind) -> Cost {
    match op {
        OpKind::Rope { rows, shape, .. } => Cost::other(3.0, [*rows, shape.rotated_heads(), shape.head_dim]),
        OpKind::RopeTable { table_rows, head_dim, .. } => Cost::other(40.0, [*table_rows, *head_dim]),
        OpKind::Attention { batch, sequence, shape, .. } => {
            // Two products over the scores, and the softmax.
            let scores = count_causal_scores(*batch, *sequence, shape);
            Cost {
                product_shape: Some((64, *sequence, shape.head_dim)),
                ..Cost::new(4.0 * scores * shape.head_dim as f64, 12.0 * scores)
            }
        }
        OpKind::AttentionGrad { batch, sequence, shape, .. } => {
            let scores = count_causal_scores(*batch, *sequence, shape);
            Cost {
                product_shape: Some((64, *sequence, shape.head_dim)),
                ..Cost::new(10.0 * scores * shape.head_dim as f64, 14.0 * scores)
            }
        }
        OpKind::CachedAttention { sequences, rows, capacity, shape, .. } => {
            let scores = *sequences as f64 * *rows as f64 * *capacity as f64 * shape.heads as f64;
            Cost {
                product_shape: Some((*rows, *capacity, shape.head_dim)),
                ..Cost::new(4.0 * scores * shape.head_dim as f64, 12.0 * scores)
            }
        }
        _ => Cost::default(),
    }
}

/// Returns the number of scores of B sequences of T tokens and H heads. The causal mask leaves half of the T × T.
fn count_causal_scores(batch: u64, sequence: u64, shape: &Heads) -> f64 {
    batch as f64 * shape.heads as f64 * sequence as f64 * (sequence as f64 + 1.0) / 2.0
}

/// Adds to `types` the dtype that each operand of an op of this module must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        OpKind::Rope { qkv, table, positions, .. } => {
            let real = types.activation(qkv);
            types.expect(real, [qkv]).expect(real.wide(), [table]).expect(DType::I32, [positions]);
        }
        OpKind::RopeTable { table, .. } => {
            types.expect(types.summed(table), [table]);
        }
        OpKind::Attention { qkv, document_start, out, stats, workspace, .. } => {
            let real = types.activation(qkv);
            types.expect(real, [qkv, out]).expect(real.wide(), [stats, workspace]).expect(DType::I32, [document_start]);
        }
        OpKind::AttentionGrad { qkv, out, dout, stats, document_start, dqkv, workspace, .. } => {
            let real = types.activation(qkv);
            types
                .expect(real, [qkv, out, dout, dqkv])
                .expect(real.wide(), [stats, workspace])
                .expect(DType::I32, [document_start]);
        }
        OpKind::ShiftPositions { positions, document_start, out, .. } => {
            types.expect(DType::I32, [positions, out]);
            if let Some(starts) = document_start {
                types.expect(DType::I32, [starts]);
            }
        }
        OpKind::CachedAttention { qkv, keys, values, places, first_keys, out, workspace, .. } => {
            let real = types.activation(qkv);
            types.expect(real, [qkv, keys, values, out]).expect(real.wide(), [workspace]).expect(DType::I32, [places]);
            if let Some(first_keys) = first_keys {
                types.expect(DType::I32, [first_keys]);
            }
        }
        OpKind::AppendCache { qkv, keys, values, places, .. } => {
            let real = types.activation(qkv);
            types.expect(real, [qkv, keys, values]).expect(DType::I32, [places]);
        }
        OpKind::CopyCache { keys, values, from, to, .. } => {
            let real = types.activation(keys);
            types.expect(real, [keys, values]).expect(DType::I32, [from, to]);
        }
        other => not_in_family(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_of_longest_sequence_do_not_wrap() {
        let shape = Heads { heads: 2, kv_heads: 2, head_dim: 8 };
        let scores = count_causal_scores(1, i32::MAX as u64, &shape);
        assert_eq!(scores, 2_147_483_647.0 * 2_147_483_648.0);
        assert_eq!(count_causal_scores(3, 4, &shape), 60.0);
    }
}
