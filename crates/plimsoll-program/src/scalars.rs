//! What changes from step to step lives in one small tensor of scalars, so that Programs, and
//! later captured graphs, stay valid; what comes out of a step lives in one of metrics.

/// The name of the scalar tensor (elements in the run's precision).
pub const SCALARS: &str = "scalars";
/// The name of the metrics tensor (f64).
pub const METRICS: &str = "metrics";

/// Places in the scalar tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Scalar {
    /// The rate of this step.
    LearningRate = 0,
    /// 1 − β₁ᵗ at step t, counted from 1.
    BiasCorrection1 = 1,
    /// 1 − β₂ᵗ.
    BiasCorrection2 = 2,
    /// The largest norm allowed; 0 = no clipping.
    ClipNorm = 3,
    /// What every gradient is multiplied with; written by the device.
    ClipFactor = 4,
    /// 1 / labelled tokens of the whole optimizer step.
    InverseTokens = 5,
    /// Tokens that the cache of generation holds before this call.
    CacheLength = 6,
    /// The row of this call whose logits are wanted.
    LastRow = 7,
    /// The number of this step, counted from 1: what is drawn at random depends on it.
    Step = 8,
}

/// Places in the metrics tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Metric {
    /// Sum of weight · negative log-likelihood since it was last cleared.
    LossSum = 0,
    /// Sum of squares of all gradients.
    NormSquared = 1,
}

/// Elements of the scalar tensor.
pub const SCALAR_COUNT: u64 = 16;
/// Elements of the metrics tensor.
pub const METRIC_COUNT: u64 = 8;
