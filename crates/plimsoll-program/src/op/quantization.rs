//! Quantized matrices and the ops between them and plain matrices. Formats and arithmetic are in [`crate::formats`].

use super::{AccessVisitor, Cost, OpKind, OperandTypes, not_in_family};
use crate::formats::{NF4_BLOCK, NF4_GROUP};
use crate::tensor::Operand;
use serde::{Deserialize, Serialize};

/// The operands of a quantized matrix, or of whole quantization blocks of one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum Quantized {
    /// 8-bit codes with one scale per row.
    Int8 {
        /// One byte per element.
        codes: Operand,
        /// One f32 per row.
        scales: Operand,
    },
    /// 4-bit codes with 8-bit scales.
    Nf4 {
        /// One byte per two elements.
        codes: Operand,
        /// One byte per 64 elements.
        scales: Operand,
        /// Two f32 per 256 scales: their mean and their largest distance from it.
        groups: Operand,
    },
}

/// An operand of a quantized matrix with the number of its elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizedPart {
    /// First element of the part.
    pub operand: Operand,
    /// Elements of the operand's tensor.
    pub elements: u64,
}

impl Quantized {
    /// Returns each operand with the elements that belong to `elements` elements of a matrix of `columns` columns.
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

/// Visits the operand ranges that the op touches.
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

/// Returns the floating-point operations of the op.
pub(super) fn cost(op: &OpKind) -> Cost {
    match op {
        OpKind::Quantize { elements, .. } => Cost::other(10 * elements),
        OpKind::Dequantize { elements, .. } => Cost::other(2 * elements),
        _ => Cost::default(),
    }
}

/// Adds the dtypes that the operands must have.
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
