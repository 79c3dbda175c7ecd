//! The settings that only some families have, as keys of GGUF.

use super::frequencies::push_query_growth;
use super::metadata::Metadata;
use plimsoll_program::models::{ModelConfig, ModelType};

/// Base of the rotary frequencies that llama.cpp takes in the layers of Gemma 3 with a window.
pub const GEMMA3_LOCAL_THETA: f64 = 1e4;
/// Caps of attention scores and of logits that llama.cpp takes for Gemma 2 if a file names none.
pub const GEMMA2_SOFTCAPS: [f64; 2] = [50.0, 30.0];
/// Window that llama.cpp takes for Gemma 2 if a file names none.
pub const GEMMA2_WINDOW: u64 = 4096;

/// Returns n if every nth layer has no window in llama.cpp, whatever a file says; `None` if it applies no window to this
/// family.
pub const fn window_period(model_type: ModelType) -> Option<u64> {
    match model_type {
        ModelType::Gemma2 => Some(2),
        ModelType::Olmo3 => Some(4),
        ModelType::Gemma3Text => Some(6),
        _ => None,
    }
}

/// Returns whether llama.cpp applies the windows of a family.
pub const fn applies_windows(model_type: ModelType) -> bool {
    window_period(model_type).is_some()
}

/// Returns the number n for which llama.cpp multiplies attention scores of a Gemma model by 1 / √n. It knows the largest
/// models by their number of layers.
pub const fn gemma_query_scalar(model_type: ModelType, layers: u64, hidden: u64, heads: u64, head_dim: u64) -> u64 {
    match (model_type, layers) {
        (ModelType::Gemma2, 46) | (ModelType::Gemma3Text, 62) => hidden / heads,
        _ => head_dim,
    }
}

/// Adds the keys of a family, and checks the settings that llama.cpp takes without a key.
///
/// # Errors
/// A description of the setting that has no form in GGUF.
pub fn push_family_settings(config: &ModelConfig, architecture: &str, metadata: &mut Metadata) -> Result<(), String> {
    check_rotated_layers(config)?;
    match config.model_type {
        // Files of this type name their window, which llama.cpp does not apply; 0 stands for none.
        ModelType::Phi3 => push_window(config.extras.window.unwrap_or(0), architecture, metadata)?,
        ModelType::Granite => push_multipliers(config, architecture, metadata),
        ModelType::Ministral3 => push_query_growth(config, architecture, metadata)?,
        ModelType::Olmo2 | ModelType::Olmo3 => push_olmo(config, architecture, metadata)?,
        ModelType::Gemma2 | ModelType::Gemma3Text => push_gemma(config, architecture, metadata)?,
        ModelType::Llama | ModelType::Mistral | ModelType::Qwen2 | ModelType::Qwen3 | ModelType::SmolLm3 => {}
    }
    Ok(())
}

/// Checks the layers that rotate queries and keys. llama.cpp rotates all but every fourth layer of `smollm3`, and all layers
/// of other architectures.
fn check_rotated_layers(config: &ModelConfig) -> Result<(), String> {
    let is_smollm3 = config.model_type == ModelType::SmolLm3;
    let unrotated: Vec<u64> = (0..config.layers).filter(|layer| is_smollm3 && layer % 4 == 3).collect();
    match config.extras.unrotated_layers == unrotated {
        true => Ok(()),
        false => Err("`no_rope_layers` are not every fourth layer".to_owned()),
    }
}

fn push_window(window: u64, architecture: &str, metadata: &mut Metadata) -> Result<(), String> {
    let number = u32::try_from(window).map_err(|_| format!("`sliding_window` is {window}"))?;
    metadata.push(format!("{architecture}.attention.sliding_window"), number);
    Ok(())
}

/// Adds the window of a model, whose layers without a window must be those that llama.cpp expects.
fn push_periodic_window(config: &ModelConfig, architecture: &str, metadata: &mut Metadata) -> Result<(), String> {
    let (Some(window), Some(period)) = (config.extras.window, window_period(config.model_type)) else {
        return Err("`sliding_window` is null".to_owned());
    };
    let full: Vec<u64> = (0..config.layers).filter(|layer| (layer + 1).is_multiple_of(period)).collect();
    if config.extras.full_layers != full {
        return Err(format!("the layers without a window are not layers {period}, {}, …, counted from 1", 2 * period));
    }
    push_window(window, architecture, metadata)
}

fn push_multipliers(config: &ModelConfig, architecture: &str, metadata: &mut Metadata) {
    let extras = &config.extras;
    let scale = extras.attention_multiplier.unwrap_or_else(|| (config.head_dim as f64).sqrt().recip());
    for (key, value) in [
        ("attention.scale", scale),
        ("embedding_scale", extras.embedding_multiplier),
        ("residual_scale", extras.residual_multiplier),
        ("logit_scale", extras.logits_scaling),
    ] {
        metadata.push(format!("{architecture}.{key}"), value as f32);
    }
}

fn push_olmo(config: &ModelConfig, architecture: &str, metadata: &mut Metadata) -> Result<(), String> {
    // The norm of all query heads is as wide as the model there.
    if config.heads * config.head_dim != config.hidden {
        return Err(format!("`head_dim` is {}", config.head_dim));
    }
    if config.tied {
        return Err("`tie_word_embeddings` is true".to_owned());
    }
    if config.model_type == ModelType::Olmo2 || config.extras.window.is_none() {
        return Ok(());
    }
    match config.extras.local_rope_theta {
        Some(local) if local != config.rope_theta => {
            Err(format!("`rope_theta` is {} in layers without a window, and {local} in the others", config.rope_theta))
        }
        _ => push_periodic_window(config, architecture, metadata),
    }
}

fn push_gemma(config: &ModelConfig, architecture: &str, metadata: &mut Metadata) -> Result<(), String> {
    let ModelConfig { model_type, layers, hidden, heads, head_dim, ref extras, .. } = *config;
    let scalar = gemma_query_scalar(model_type, layers, hidden, heads, head_dim);
    let expected = (scalar as f64).sqrt().recip();
    let multiplier = extras.attention_multiplier.unwrap_or(expected);
    if (multiplier / expected - 1.0).abs() > 1e-9 {
        let found = multiplier.powi(-2).round();
        return Err(format!("`query_pre_attn_scalar` is {found}; llama.cpp takes {scalar}"));
    }
    push_periodic_window(config, architecture, metadata)?;
    match (model_type, extras.score_softcap, extras.logit_softcap) {
        (ModelType::Gemma2, Some(scores), Some(logits)) => {
            metadata.push(format!("{architecture}.attn_logit_softcapping"), scores as f32);
            metadata.push(format!("{architecture}.final_logit_softcapping"), logits as f32);
        }
        (ModelType::Gemma2, ..) => {
            return Err("`attn_logit_softcapping` or `final_logit_softcapping` is null".to_owned());
        }
        (_, None, None) => {}
        _ => return Err("`attn_logit_softcapping` or `final_logit_softcapping` is not null".to_owned()),
    }
    if model_type == ModelType::Gemma2 && !config.tied {
        return Err("`tie_word_embeddings` is false".to_owned());
    }
    match extras.local_rope_theta {
        Some(local) if local != GEMMA3_LOCAL_THETA => {
            Err(format!("`rope_local_base_freq` is {local}; llama.cpp takes {GEMMA3_LOCAL_THETA}"))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::architecture::name_architecture;
    use plimsoll_program::models::{RopeScaling, preset, preset_names};

    fn refusal(config: &ModelConfig) -> Option<String> {
        push_family_settings(config, name_architecture(config.model_type), &mut Metadata::default()).err()
    }

    #[test]
    fn every_preset_has_a_form() {
        for name in preset_names() {
            assert_eq!(refusal(&preset(name).unwrap()), None, "{name}");
        }
    }

    #[test]
    fn settings_without_form_are_refused_by_name() {
        let changed = |name: &str, change: &dyn Fn(&mut ModelConfig)| {
            let mut config = preset(name).unwrap();
            change(&mut config);
            refusal(&config).unwrap_or_else(|| panic!("{name} is not refused"))
        };
        let unrotated = changed("smollm3-3b", &|config| config.extras.unrotated_layers.clear());
        assert_eq!(unrotated, "`no_rope_layers` are not every fourth layer");
        assert_eq!(changed("olmo2-1b", &|config| config.head_dim *= 2), "`head_dim` is 256");
        assert_eq!(changed("olmo2-1b", &|config| config.tied = true), "`tie_word_embeddings` is true");
        let theta = changed("olmo3-7b", &|config| config.rope_theta = 1e4);
        assert_eq!(theta, "`rope_theta` is 10000 in layers without a window, and 500000 in the others");
        assert_eq!(changed("gemma3-1b", &|config| config.extras.window = None), "`sliding_window` is null");
        let layers = changed("gemma2-2b", &|config| {
            config.extras.full_layers.pop();
        });
        assert_eq!(layers, "the layers without a window are not layers 2, 4, …, counted from 1");
        let scalar = changed("gemma2-2b", &|config| config.extras.attention_multiplier = Some(0.125));
        assert_eq!(scalar, "`query_pre_attn_scalar` is 64; llama.cpp takes 256");
        let caps = "`attn_logit_softcapping` or `final_logit_softcapping` is";
        assert_eq!(changed("gemma2-2b", &|config| config.extras.logit_softcap = None), format!("{caps} null"));
        assert_eq!(
            changed("gemma3-1b", &|config| config.extras.logit_softcap = Some(30.0)),
            format!("{caps} not null")
        );
        assert_eq!(changed("gemma2-2b", &|config| config.tied = false), "`tie_word_embeddings` is false");
        let local = changed("gemma3-1b", &|config| config.extras.local_rope_theta = Some(5e4));
        assert_eq!(local, "`rope_local_base_freq` is 50000; llama.cpp takes 10000");
        let growth = changed("ministral-3-8b", &|config| config.rope_scaling = RopeScaling::None);
        assert_eq!(growth, "`original_max_position_embeddings` is 16384 without YaRN");
    }
}
