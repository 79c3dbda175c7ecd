//! The two small tensors between the host and the Programs. The host writes the values that change per step, such as
//! the learning rate, to the scalar tensor, so that Programs themselves never change. Programs add loss and gradient
//! norm to the metrics tensor, which the host reads.

/// Name of the scalar tensor, by which the host passes per-step values such as the learning rate to ops. Its dtype is
/// f32, or f64 in an f64 run.
pub const SCALARS: &str = "scalars";
/// Name of the metrics tensor, in which ops sum up loss and gradient norm for the host. Its dtype is f64.
pub const METRICS: &str = "metrics";

/// The entries of the scalar tensor, with their indices. The host writes them before each step or each call of
/// generation, and ops read them. [`Scalar::ClipFactor`] is the exception: an op writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Scalar {
    /// Learning rate of this step.
    LearningRate = 0,
    /// Bias correction of Adam's first moment: 1 − β₁ᵗ at step t, counted from 1.
    BiasCorrection1 = 1,
    /// Bias correction of Adam's second moment: 1 − β₂ᵗ at step t, counted from 1.
    BiasCorrection2 = 2,
    /// Largest allowed gradient norm; 0 for no clipping.
    ClipNorm = 3,
    /// Factor that the update applies to every gradient to clip its norm. The only entry that an op writes
    /// ([`crate::OpKind::ClipFactor`]).
    ClipFactor = 4,
    /// 1 / number of labelled tokens of the whole optimizer step, on all workers together; the factor of the loss.
    InverseTokens = 5,
    /// Generation: row (position in this call's tokens) for which the Program computes logits.
    LastRow = 7,
    /// Number of this step, counted from 1; dropout depends on it.
    Step = 8,
}

/// The entries of the metrics tensor, with their indices. Ops add to it, and the host reads it after a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Metric {
    /// Sum over tokens of loss weight · negative log-likelihood, since the start of the step or evaluation.
    LossSum = 0,
    /// Sum of squares of all gradients of the step: the square of the gradient norm.
    NormSquared = 1,
}

/// Elements of the scalar tensor; those beyond the entries of [`Scalar`] are unused.
pub const SCALAR_COUNT: u64 = 16;
/// Elements of the metrics tensor; those beyond the entries of [`Metric`] are unused.
pub const METRIC_COUNT: u64 = 8;
