//! The scaling of rotary frequencies in the terms of GGUF, in both directions.
//!
//! | scaling | in a file |
//! |---|---|
//! | linear | `rope.scaling.type` = `linear`, `rope.scaling.factor` |
//! | YaRN | `rope.scaling.type` = `yarn`, factor, original context and bounds of the interpolation |
//! | as in Llama 3.1 | a tensor of divisors, `rope_freqs.weight`, which only the architecture `llama` reads |
//!
//! With YaRN, llama.cpp multiplies rotated queries and keys by 1 + 0.1 · ln(factor) and by `rope.scaling.attn_factor`. The
//! architecture `mistral3` divides by 1 + 0.1 · m · ln(factor), too; m is `rope.scaling.yarn_log_multiplier`.

use super::metadata::Metadata;
use plimsoll_program::models::{ModelConfig, ModelType, RopeScaling};
use std::f64::consts::TAU;

/// Largest relative difference at which a factor of attention counts as that of llama.cpp.
const SAME_FACTOR: f64 = 1e-6;
/// `beta_fast` and `beta_slow` that llama.cpp takes in all architectures but `mistral3`, which reads them from the file.
pub const YARN_BETAS: [f64; 2] = [32.0, 1.0];

/// Adds the keys of the rotary frequencies.
///
/// # Errors
/// A description of the part that has no form in GGUF.
pub fn push_scaling(config: &ModelConfig, architecture: &str, metadata: &mut Metadata) -> Result<(), String> {
    metadata.push(format!("{architecture}.rope.freq_base"), config.rope_theta as f32);
    let key = |name: &str| format!("{architecture}.rope.scaling.{name}");
    match config.rope_scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            metadata.push(key("type"), "linear");
            metadata.push(key("factor"), factor as f32);
        }
        // Only sequences that are longer than the context are scaled.
        RopeScaling::Dynamic { .. } => return Err("`rope_scaling` is of type dynamic".to_owned()),
        RopeScaling::Llama3 { .. } if architecture == "llama" => {}
        RopeScaling::Llama3 { .. } => return Err("`rope_scaling` is of type llama3".to_owned()),
        // llama.cpp would interpolate the frequencies of layers with a window, too.
        RopeScaling::Yarn { .. } if config.model_type.norm_offset() != 0.0 => {
            return Err("`rope_scaling` is of type yarn".to_owned());
        }
        RopeScaling::Yarn { truncate: false, .. } => return Err("`truncate` of YaRN is false".to_owned()),
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            original_max_position_embeddings: original,
            attention_factor,
            ..
        } => {
            let context = u32::try_from(original).map_err(|_| format!("{ORIGINAL} is {original}"))?;
            metadata.push(key("type"), "yarn");
            metadata.push(key("factor"), factor as f32);
            metadata.push(key("original_context_length"), context);
            metadata.push(key("yarn_beta_fast"), beta_fast as f32);
            metadata.push(key("yarn_beta_slow"), beta_slow as f32);
            let is_ministral3 = config.model_type == ModelType::Ministral3;
            if !is_ministral3 && [beta_fast, beta_slow] != YARN_BETAS {
                return Err(format!("`beta_fast` and `beta_slow` of YaRN are {beta_fast} and {beta_slow}"));
            }
            if is_ministral3 {
                metadata.push(key("yarn_log_multiplier"), 1.0f32);
            }
            let default = if is_ministral3 { 1.0 } else { RopeScaling::yarn_growth(factor, 1.0) };
            let own = attention_factor / default;
            match (own - 1.0).abs() > SAME_FACTOR {
                true if is_ministral3 => return Err(format!("`attention_factor` of YaRN is {attention_factor}")),
                true => metadata.push(key("attn_factor"), own as f32),
                false => {}
            }
        }
    }
    Ok(())
}

/// Name of the key of the context length before scaling.
const ORIGINAL: &str = "`original_max_position_embeddings`";

/// Adds the growth of queries with their position.
///
/// # Errors
/// A description of the part that has no form in GGUF.
pub fn push_query_growth(config: &ModelConfig, architecture: &str, metadata: &mut Metadata) -> Result<(), String> {
    let Some(growth) = config.extras.query_growth else { return Ok(()) };
    // llama.cpp takes the original context of YaRN as the period.
    if config.rope_scaling.original_positions() != Some(growth.period) {
        return Err(format!("{ORIGINAL} is {} without YaRN", growth.period));
    }
    metadata.push(format!("{architecture}.attention.temperature_scale"), growth.beta as f32);
    Ok(())
}

/// Returns the divisor of each rotary frequency for scaling as in Llama 3.1, highest frequency first: `head_dim / 2`
/// of them, and none for other scalings. `theta` is the base of the frequencies.
pub fn rope_divisors(scaling: RopeScaling, theta: f64, head_dim: u64) -> Vec<f32> {
    let RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings } = scaling
    else {
        return Vec::new();
    };
    let (original, range) = (original_max_position_embeddings as f64, high_freq_factor - low_freq_factor);
    // Divides a frequency by `factor`, except for the share that the turns within the original context keep.
    let wavelength = |pair: u64| TAU * theta.powf(2.0 * pair as f64 / head_dim as f64);
    let kept = |pair: u64| ((original / wavelength(pair) - low_freq_factor) / range).clamp(0.0, 1.0);
    let divisor = |pair: u64| 1.0 / ((1.0 - kept(pair)) / factor + kept(pair));
    (0..head_dim / 2).map(|pair| divisor(pair) as f32).collect()
}

/// Returns the scaling as in Llama 3.1 with these divisors; `None` if there is none. A file does not have its settings, so
/// those that all published models share are taken. `theta` is the base of the frequencies, `head_dim` the elements of a
/// head.
pub fn find_llama3_scaling(divisors: &[f32], theta: f64, head_dim: u64) -> Option<RopeScaling> {
    if divisors.len() as u64 != head_dim / 2 {
        return None;
    }
    let scaling = RopeScaling::Llama3 {
        factor: f64::from(*divisors.last()?),
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    let expected = rope_divisors(scaling, theta, head_dim);
    let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-4 * b.abs();
    expected.iter().zip(divisors).all(is_near).then_some(scaling)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::architecture::name_architecture;
    use plimsoll_program::models::preset;

    #[test]
    fn only_own_factors_of_attention_are_written() {
        let of = |attention_factor: f64| {
            let config = ModelConfig {
                rope_scaling: RopeScaling::Yarn {
                    factor: 4.0,
                    beta_fast: 32.0,
                    beta_slow: 1.0,
                    original_max_position_embeddings: 8192,
                    truncate: true,
                    attention_factor,
                },
                ..preset("qwen3-8b").unwrap()
            };
            let mut metadata = Metadata::default();
            push_scaling(&config, "qwen3", &mut metadata).unwrap();
            metadata.get("qwen3.rope.scaling.attn_factor").cloned()
        };
        let default = RopeScaling::yarn_growth(4.0, 1.0);
        assert_eq!((of(default), of(1.0)), (None, Some(((1.0 / default) as f32).into())));
    }

    #[test]
    fn scalings_without_form_are_refused_by_name() {
        let refusal = |model: &str, rope_scaling: RopeScaling| {
            let config = ModelConfig { rope_scaling, ..preset(model).unwrap() };
            push_scaling(&config, name_architecture(config.model_type), &mut Metadata::default()).unwrap_err()
        };
        let dynamic = refusal("mistral-7b-v0.3", RopeScaling::Dynamic { factor: 2.0 });
        assert_eq!(dynamic, "`rope_scaling` is of type dynamic");
        let llama3 = preset("llama-3.2-1b").unwrap().rope_scaling;
        assert_eq!(refusal("qwen3-8b", llama3), "`rope_scaling` is of type llama3");
        let yarn = preset("ministral-3-8b").unwrap().rope_scaling;
        assert_eq!(refusal("gemma3-1b", yarn), "`rope_scaling` is of type yarn");
        let RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position_embeddings, .. } = yarn else {
            panic!("{yarn:?}")
        };
        let other = |truncate, attention_factor| RopeScaling::Yarn {
            factor,
            beta_fast: beta_fast / 2.0,
            beta_slow,
            original_max_position_embeddings,
            truncate,
            attention_factor,
        };
        assert_eq!(refusal("ministral-3-8b", other(true, 1.5)), "`attention_factor` of YaRN is 1.5");
        assert_eq!(refusal("ministral-3-8b", other(false, 1.0)), "`truncate` of YaRN is false");
        assert_eq!(refusal("qwen3-8b", other(true, 1.0)), "`beta_fast` and `beta_slow` of YaRN are 16 and 1");
    }

    #[test]
    fn rope_divisors_run_from_one_to_the_factor() {
        let divisors_of = |config: &ModelConfig| rope_divisors(config.rope_scaling, config.rope_theta, config.head_dim);
        let config = preset("llama-3.2-1b").unwrap();
        let RopeScaling::Llama3 { factor, .. } = config.rope_scaling else { panic!() };
        let mut divisors = divisors_of(&config);
        assert_eq!(divisors.len(), 32);
        assert_eq!((divisors[0], divisors[31]), (1.0, factor as f32));
        assert!(divisors.windows(2).all(|pair| pair[0] <= pair[1]));
        let found = |divisors: &[f32]| find_llama3_scaling(divisors, config.rope_theta, config.head_dim);
        assert_eq!(found(&divisors), Some(config.rope_scaling));
        divisors[20] *= 1.01;
        assert_eq!(found(&divisors), None);
        assert!(divisors_of(&preset("llama-2-7b").unwrap()).is_empty() && found(&[]).is_none());
    }
}
