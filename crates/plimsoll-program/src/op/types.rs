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

/// A list of the dtypes that the operands of an op must have. The module of the op's family fills it.
pub(super) struct OperandTypes<'k> {
    expected: Vec<(&'k Operand, DType)>,
    dtype_of: &'k dyn Fn(&Operand) -> DType,
}

impl<'k> OperandTypes<'k> {
    /// Requires that all `operands` have dtype `dtype`.
    pub(super) fn expect<const N: usize>(&mut self, dtype: DType, operands: [&'k Operand; N]) -> &mut Self {
        self.expect_all(dtype, operands.into_iter())
    }

    /// Requires that all `operands` have dtype `dtype`. Takes an iterator, so that optional operands may be left out.
    pub(super) fn expect_all(&mut self, dtype: DType, operands: impl Iterator<Item = &'k Operand>) -> &mut Self {
        self.expected.extend(operands.map(|operand| (operand, dtype)));
        self
    }

    /// Requires the dtypes of a quantized matrix: u8 for codes and for the scales of nf4; f32 for the scales of int8
    /// and for the groups of nf4.
    pub(super) fn quantized(&mut self, matrix: &'k Quantized) -> &mut Self {
        match matrix {
            Quantized::Int8 { codes, scales } => self.expect(DType::U8, [codes]).expect(DType::F32, [scales]),
            Quantized::Nf4 { codes, scales, groups } => {
                self.expect(DType::U8, [codes, scales]).expect(DType::F32, [groups])
            }
        }
    }

    /// Returns the dtype that an operand's tensor has.
    pub(super) fn found(&self, operand: &Operand) -> DType {
        (self.dtype_of)(operand)
    }

    /// Returns the dtype of `operand`, which decides the required dtypes of the op's other operands. If it is none of
    /// `choices`, returns the first choice; `operand` itself is then reported as mistyped.
    pub(super) fn one_of(&self, operand: &Operand, choices: &[DType]) -> DType {
        let found = self.found(operand);
        if choices.contains(&found) { found } else { choices[0] }
    }

    /// Returns the dtype of `operand`, an activation, if it is f32, f64 or bf16; f32 otherwise.
    pub(super) fn activation(&self, operand: &Operand) -> DType {
        self.one_of(operand, &[DType::F32, DType::F64, DType::Bf16])
    }

    /// Returns the dtype of `operand`, a sum or optimizer state, if it is f32 or f64; f32 otherwise.
    pub(super) fn summed(&self, operand: &Operand) -> DType {
        self.one_of(operand, &[DType::F32, DType::F64])
    }

    /// Returns the dtype of `operand`, data of a model file, if it is f32, f64, bf16 or f16; f32 otherwise.
    pub(super) fn file(&self, operand: &Operand) -> DType {
        self.one_of(operand, &[DType::F32, DType::F64, DType::Bf16, DType::F16])
    }
}

/// Returns the first operand with a wrong dtype, and the dtype that it must have; `None` if all are right. `dtype_of`
/// gives the dtype of an operand's tensor.
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
