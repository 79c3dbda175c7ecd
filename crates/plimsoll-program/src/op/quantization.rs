//! Quantized matrices and the ops between them and plain matrices. Formats and arithmetic are in [`crate::formats`].

use super::{AccessVisitor, Cost, OpKind, OperandTypes, not_in_family};
use crate::formats::{NF4_BLOCK, NF4_GROUP};
use crate::tensor::Operand;
use serde::{Deserialize, Serialize};

/// The tensors of a quantized matrix, or of some whole quantization blocks of it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Quantized {
    /// int8: 8-bit codes with one scale per row.
    Int8 {
        /// Signed codes, one byte per element.
        codes: Operand,
        /// Factors of the codes, one f32 per row.
        scales: Operand,
    },
    /// nf4 with double quantization (QLoRA): 4-bit codes with 8-bit scales.
    Nf4 {
        /// Codes, one byte per two elements.
        codes: Operand,
        /// 8-bit codes of the scales, one byte per 64 elements.
        scales: Operand,
        /// Scales of the scales, two f32 per 256 scales: their mean and their largest distance from it.
        groups: Operand,
    },
}

/// One of the tensors of a quantized matrix (codes, scales or groups), with the number of its elements in use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizedPart {
    /// Tensor slot and first element.
    pub operand: Operand,
    /// Number of elements of this tensor, not of the matrix.
    pub elements: u64,
}

impl Quantized {
    /// Returns the tensors that describe `elements` elements of a matrix with `columns` columns: codes, scales and, for
    /// nf4, groups. Each comes with the number of its elements in use.
    pub fn parts(self, elements: u64, columns: u64) -> Vec<QuantizedPart> {
        let part = |operand, elements| QuantizedPart { operand, elements };
        match self {
            Quantized::Int8 { codes, scales } => vec![part(codes, elements), part(scales, elements / columns)],
            Quantized::Nf4 { codes, scales, groups } => {
                let blocks = elements.div_ceil(NF4_BLOCK);
                vec![
                    part(codes, elements.div_ceil(2)),
                    part(scales, blocks),
                    part(groups, 2 * blocks.div_ceil(NF4_GROUP)),
                ]
            }
        }
    }
}

/// Reports to `visitor` each range of tensor elements that an op of this module reads or writes.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::Quantize { from, into, elements, columns } => {
            visitor.read(*from, *elements);
            into.parts(*elements, *columns).into_iter().for_each(|part| visitor.write(part.operand, part.elements));
        }
        OpKind::Dequantize { from, into, elements, columns } => {
            from.parts(*elements, *columns).into_iter().for_each(|part| visitor.read(part.operand, part.elements));
            visitor.write(*into, *elements);
        }
        other => not_in_family(other),
    }
}

/// Returns the number of floating-point operations of an op of this module.
pub(super) fn cost(op: &OpKind) -> Cost {
    match op {
        OpKind::Quantize { elements, .. } => Cost::other(10.0, [*elements]),
        OpKind::Dequantize { elements, .. } => Cost::other(2.0, [*elements]),
        _ => Cost::default(),
    }
}

/// Adds to `types` the dtype that each operand of an op of this module must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        OpKind::Quantize { from, into, .. } => {
            types.expect(types.summed(from), [from]).quantized(into);
        }
        OpKind::Dequantize { from, into, .. } => {
            types.expect(types.activation(into), [into]).quantized(from);
        }
        other => not_in_family(other),
    }
}
