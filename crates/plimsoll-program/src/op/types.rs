//! The dtypes that the operands of an op must have. The kernels of all devices rely on them.
//!
//! A is the dtype of activations and computed weights: f64, f32 or bf16. W = [`DType::wide`] of A is the dtype of sums,
//! statistics, weight gradients, master weights, optimizer state and workspaces.

use super::{
    Family, OpKind, Quantized, attention, collective, elementwise, embedding, fill, loss, matmul, norm, optimizer,
    quantization, transfer,
};
use crate::tensor::Operand;
use plimsoll_core::DType;

/// The operands of an op with the dtypes that they must have.
pub(super) struct OperandTypes<'k> {
    expected: Vec<(&'k Operand, DType)>,
    dtype_of: &'k dyn Fn(&Operand) -> DType,
}

impl<'k> OperandTypes<'k> {
    /// Requires `dtype` of all `operands`.
    pub(super) fn expect<const N: usize>(&mut self, dtype: DType, operands: [&'k Operand; N]) -> &mut Self {
        self.expect_all(dtype, operands.into_iter())
    }

    /// Requires `dtype` of the optional operands that the op has.
    pub(super) fn expect_all(&mut self, dtype: DType, operands: impl Iterator<Item = &'k Operand>) -> &mut Self {
        self.expected.extend(operands.map(|operand| (operand, dtype)));
        self
    }

    /// Requires bytes for the codes of a quantized matrix, and the dtypes of its scales.
    pub(super) fn quantized(&mut self, matrix: &'k Quantized) -> &mut Self {
        match matrix {
            Quantized::Int8 { codes, scales } => self.expect(DType::U8, [codes]).expect(DType::F32, [scales]),
            Quantized::Nf4 { codes, scales, groups } => {
                self.expect(DType::U8, [codes, scales]).expect(DType::F32, [groups])
            }
        }
    }

    /// Returns the dtype of an operand.
    pub(super) fn found(&self, operand: &Operand) -> DType {
        (self.dtype_of)(operand)
    }

    /// Returns the dtype of an operand that decides those of the others, or the first choice if it is none of
    /// `choices`. In that case the operand itself is reported as mistyped.
    pub(super) fn one_of(&self, operand: &Operand, choices: &[DType]) -> DType {
        let found = self.found(operand);
        if choices.contains(&found) { found } else { choices[0] }
    }

    /// Returns A, from an activation.
    pub(super) fn activation(&self, operand: &Operand) -> DType {
        self.one_of(operand, &[DType::F32, DType::F64, DType::Bf16])
    }

    /// Returns W, from a sum or an optimizer state.
    pub(super) fn summed(&self, operand: &Operand) -> DType {
        self.one_of(operand, &[DType::F32, DType::F64])
    }

    /// Returns a dtype that files may have.
    pub(super) fn file(&self, operand: &Operand) -> DType {
        self.one_of(operand, &[DType::F32, DType::F64, DType::Bf16, DType::F16])
    }
}

/// Returns the first operand with a wrong dtype, and the dtype that it must have.
pub(crate) fn mistyped_operand(op: &OpKind, dtype_of: &dyn Fn(&Operand) -> DType) -> Option<(Operand, DType)> {
    let mut types = OperandTypes { expected: Vec::with_capacity(10), dtype_of };
    match op.family() {
        Family::Matmul => matmul::expect_types(op, &mut types),
        Family::Embedding => embedding::expect_types(op, &mut types),
        Family::Norm => norm::expect_types(op, &mut types),
        Family::Attention => attention::expect_types(op, &mut types),
        Family::Loss => loss::expect_types(op, &mut types),
        Family::Elementwise => elementwise::expect_types(op, &mut types),
        Family::Fill => fill::expect_types(op, &mut types),
        Family::Quantization => quantization::expect_types(op, &mut types),
        Family::Optimizer => optimizer::expect_types(op, &mut types),
        Family::Transfer => transfer::expect_types(op, &mut types),
        Family::Collective => collective::expect_types(op, &mut types),
    }
    let wrong = types.expected.into_iter().find(|(operand, dtype)| dtype_of(operand) != *dtype);
    wrong.map(|(operand, dtype)| (*operand, dtype))
}
