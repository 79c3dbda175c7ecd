//! Scaling of rotary frequencies, and growth of queries: kinds, settings and their validation. The kernels of `RopeTable`
//! compute the frequencies themselves.

use super::config::{ConfigError, limit, wrong};
use serde::{Deserialize, Serialize};
use std::f64::consts::TAU;

/// The scaling of rotary frequencies: `rope_scaling` in `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    /// No scaling.
    None,
    /// Every frequency is divided by `factor`.
    Linear {
        /// Divisor of all frequencies.
        factor: f64,
    },
    /// Dynamic NTK scaling: frequencies change only for sequences that exceed the model's positions, which no run has.
    Dynamic {
        /// Factor of the base for longer sequences; has no effect here.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high ones are kept, and those between are interpolated.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Bound of low frequencies: wavelengths above `original_max_position_embeddings / low_freq_factor`.
        low_freq_factor: f64,
        /// Bound of high frequencies: wavelengths below `original_max_position_embeddings / high_freq_factor`.
        high_freq_factor: f64,
        /// Context length before scaling, in tokens.
        original_max_position_embeddings: u64,
    },
    /// YaRN (Peng et al., 2023): low frequencies are divided by `factor`, high ones are kept, and those between are
    /// interpolated by their number. Rotated queries and keys are multiplied by `attention_factor`.
    Yarn {
        /// Divisor of low frequencies.
        factor: f64,
        /// Turns within the original context from which frequencies are kept.
        beta_fast: f64,
        /// Turns within the original context below which frequencies are divided.
        beta_slow: f64,
        /// Context length before scaling, in tokens.
        original_max_position_embeddings: u64,
        /// Whether the bounds of the interpolation are rounded to whole numbers.
        truncate: bool,
        /// Factor of rotated queries and of rotated keys.
        attention_factor: f64,
    },
}

/// The growth of rotated queries with their position: `llama_4_scaling_beta` in `config.json`. The query at position p has
/// the factor 1 + `beta` · ln(1 + ⌊p / `period`⌋), as in Llama 4.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct QueryGrowth {
    /// Factor of the logarithm.
    pub beta: f64,
    /// Number of positions after which the factor grows (`original_max_position_embeddings`).
    pub period: u64,
}

impl QueryGrowth {
    /// The growth that transformers assumes for Ministral 3.
    pub const MINISTRAL3: QueryGrowth = QueryGrowth { beta: 0.1, period: 16_384 };

    /// Returns the factor of the query at `position`.
    pub fn factor(&self, position: u64) -> f64 {
        1.0 + self.beta * ((position / self.period) as f64).ln_1p()
    }

    /// Checks that both settings are in range, and that the period is the context length of `scaling`, if it has one.
    pub(super) fn validate(&self, scaling: &RopeScaling) -> Result<(), ConfigError> {
        if !(0.0..=1e6).contains(&self.beta) {
            return Err(wrong("rope_parameters.llama_4_scaling_beta", self.beta, "a number from 0 to 1e6"));
        }
        check_original(self.period)?;
        match scaling.original_positions() {
            Some(original) if original != self.period => {
                let key = "rope_parameters.original_max_position_embeddings";
                Err(wrong(key, self.period, format!("{original}, as for the scaling of frequencies")))
            }
            _ => Ok(()),
        }
    }
}

impl RopeScaling {
    /// The scaling that transformers assumes for Ministral 3. Published models have it, too.
    pub const MINISTRAL3: RopeScaling = RopeScaling::Yarn {
        factor: 16.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
        original_max_position_embeddings: 16_384,
        truncate: true,
        attention_factor: 1.0,
    };

    /// Returns the context length before scaling, in tokens; `None` for scalings that do not depend on it.
    pub const fn original_positions(&self) -> Option<u64> {
        match *self {
            RopeScaling::Llama3 { original_max_position_embeddings: original, .. }
            | RopeScaling::Yarn { original_max_position_embeddings: original, .. } => Some(original),
            RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Dynamic { .. } => None,
        }
    }

    /// Returns the factor by which YaRN lets rotated queries and keys grow if frequencies are divided by `factor`:
    /// 1 + 0.1 · `coefficient` · ln(`factor`), and 1 for factors up to 1.
    pub fn yarn_growth(factor: f64, coefficient: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * coefficient * factor.ln() + 1.0 }
    }

    /// Returns the factor of rotated queries and of rotated keys: 1 except for YaRN.
    pub fn attention_factor(&self) -> f64 {
        match self {
            RopeScaling::Yarn { attention_factor, .. } => *attention_factor,
            _ => 1.0,
        }
    }

    /// Returns the numbers of the frequencies between which YaRN interpolates, for heads of `head_dim` elements:
    /// frequencies up to the first are kept, those from the second on are divided. Returns zeros for other scalings.
    pub fn yarn_range(&self, head_dim: u64, theta: f64) -> [f64; 2] {
        let &RopeScaling::Yarn { beta_fast, beta_slow, original_max_position_embeddings, truncate, .. } = self else {
            return [0.0; 2];
        };
        let dim = head_dim as f64;
        // The number of the frequency that turns `turns` times within the original context.
        let number =
            |turns: f64| dim * (original_max_position_embeddings as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (number(beta_fast), number(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        [low, if low == high { high + 0.001 } else { high }]
    }

    /// Checks that all settings are in range.
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        match *self {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => check("factor", factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                check("factor", factor)?;
                check("low_freq_factor", low)?;
                check_above("high_freq_factor", high, "low_freq_factor", low)?;
                check_original(original)
            }
            RopeScaling::Yarn {
                factor,
                beta_fast: fast,
                beta_slow: slow,
                original_max_position_embeddings: original,
                attention_factor,
                truncate: _,
            } => {
                check("factor", factor)?;
                check("attention_factor", attention_factor)?;
                check("beta_slow", slow)?;
                check_above("beta_fast", fast, "beta_slow", slow)?;
                check_original(original)
            }
        }
    }
}

/// Checks that a number inside `rope_scaling` is from 1e-6 to 1e6.
fn check(key: &str, value: f64) -> Result<(), ConfigError> {
    let in_range = (1e-6..=1e6).contains(&value);
    if in_range { Ok(()) } else { Err(wrong(&format!("rope_scaling.{key}"), value, "a number from 1e-6 to 1e6")) }
}

/// Checks that a context length before scaling is one that a model may have.
fn check_original(original: u64) -> Result<(), ConfigError> {
    if (1..=limit::POSITIONS).contains(&original) {
        return Ok(());
    }
    let expected = format!("a whole number from 1 to {}", limit::POSITIONS);
    Err(wrong("rope_scaling.original_max_position_embeddings", original, expected))
}

/// Checks that a value inside `rope_scaling` is above another, and at most 1e6.
fn check_above(key: &str, value: f64, lower_key: &str, lower: f64) -> Result<(), ConfigError> {
    if (lower..=1e6).contains(&value) && value != lower {
        return Ok(());
    }
    let expected = format!("a number above {lower_key}, {lower}, and up to 1e6");
    Err(wrong(&format!("rope_scaling.{key}"), value, expected))
}
