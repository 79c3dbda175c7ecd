//! The two small tensors between the host and the Programs. The host writes the values that change per step to the
//! scalar tensor, so that Programs themselves never change. Programs add loss and norm to the metrics tensor.

/// Name of the scalar tensor; it has the wide dtype of the run's precision.
pub const SCALARS: &str = "scalars";
/// Name of the metrics tensor; it is f64.
pub const METRICS: &str = "metrics";

/// Indices into the scalar tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Scalar {
    /// Learning rate of this step.
    LearningRate = 0,
    /// 1 − β₁ᵗ at step t, counted from 1.
    BiasCorrection1 = 1,
    /// 1 − β₂ᵗ at step t, counted from 1.
    BiasCorrection2 = 2,
    /// Largest allowed gradient norm; 0 for no clipping.
    ClipNorm = 3,
    /// Factor of every gradient, which the device writes.
    ClipFactor = 4,
    /// 1 / labelled tokens of the whole optimizer step.
    InverseTokens = 5,
    /// Tokens that the key-value cache holds before this call.
    CacheLength = 6,
    /// Row of this call for which the Program computes logits.
    LastRow = 7,
    /// Number of this step, counted from 1; dropout depends on it.
    Step = 8,
}

/// Indices into the metrics tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Metric {
    /// Sum of weight · negative log-likelihood since the metrics were last zeroed.
    LossSum = 0,
    /// Sum of squares of all gradients.
    NormSquared = 1,
}

/// Length of the scalar tensor.
pub const SCALAR_COUNT: u64 = 16;
/// Length of the metrics tensor.
pub const METRIC_COUNT: u64 = 8;
