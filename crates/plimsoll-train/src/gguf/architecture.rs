//! Names and settings of a model as llama.cpp knows them. Mistral models are of the architecture `llama` there.
//!
//! # Rotation of queries and keys
//! Hugging Face files rotate element i of a head together with element i + E/2. The architectures `llama`, `mistral3`,
//! `smollm3` and `granite` of llama.cpp rotate neighbours, so the rows of their query and key projections are interleaved
//! ([`PlannedTensor::head_rows`]). The other architectures keep the order.
//!
//! # Norms
//! Gemma models multiply by 1 + weight in their norms. Their files in GGUF store 1 + weight.
//!
//! # Sliding windows
//! llama.cpp applies them in three architectures: `gemma2`, where every 2nd layer attends to all earlier tokens, `olmo2` (every
//! 4th) and `gemma3` (every 6th). In the others, all layers attend to all earlier tokens. The context of such a file is
//! therefore at most the window: up to that length, both give the same results.

use super::error::GgufError;
use super::family_settings::{applies_windows, push_family_settings};
use super::frequencies::{push_scaling, rope_divisors};
use super::metadata::Metadata;
use super::mix::{ChosenType, FileType};
use super::planned_tensor::PlannedTensor;
use crate::block_types::BlockType;
use crate::files::{ModelDir, ModelWeights};
use plimsoll_program::models::{ModelConfig, ModelType, Parameter, Target};

/// Names of the modules in Hugging Face files, and their names in GGUF.
const MODULES: [(&str, &str); 17] = [
    ("model.embed_tokens", "token_embd"),
    ("model.norm", "output_norm"),
    ("lm_head", "output"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
];

/// Names of the norms around attention in architectures that norm its output.
const OUTPUT_NORMS: [(&str, &str); 2] =
    [("post_attention_layernorm", "post_attention_norm"), ("pre_feedforward_layernorm", "ffn_norm")];

/// A model in the terms of GGUF.
pub struct Expression {
    /// Name of the architecture.
    pub architecture: &'static str,
    /// Keys that begin with the name of the architecture.
    pub metadata: Metadata,
    /// Tensors, in the order of [`ModelConfig::hf_parameters`]. One without a source may follow: `rope_freqs.weight`.
    pub tensors: Vec<PlannedTensor>,
    /// Values of `rope_freqs.weight`; empty if the model has none.
    pub rope_divisors: Vec<f32>,
    /// A note about a context that is shorter than that of the model.
    pub note: Option<String>,
}

/// Returns the name of a model's architecture in llama.cpp.
pub const fn name_architecture(model_type: ModelType) -> &'static str {
    match model_type {
        ModelType::Llama | ModelType::Mistral => "llama",
        ModelType::Ministral3 => "mistral3",
        ModelType::Qwen2 => "qwen2",
        ModelType::Qwen3 => "qwen3",
        ModelType::Phi3 => "phi3",
        ModelType::SmolLm3 => "smollm3",
        ModelType::Granite => "granite",
        ModelType::Olmo2 | ModelType::Olmo3 => "olmo2",
        ModelType::Gemma2 => "gemma2",
        ModelType::Gemma3Text => "gemma3",
    }
}

/// Expresses a model with these weights as a file of type `file_type`.
///
/// # Errors
/// A setting of the model that the architecture does not have.
pub fn express(model: &ModelDir, weights: &ModelWeights, file_type: FileType) -> Result<Expression, GgufError> {
    let config = &model.config;
    let architecture = name_architecture(config.model_type);
    let refuse = |part: String| GgufError::Inexpressible { path: model.path.join("config.json"), part, architecture };
    let metadata = settings(config, architecture).map_err(refuse)?;
    let mut tensors = Vec::new();
    for (parameter, entry) in &weights.parameters {
        let ChosenType { block_type, replaced } = file_type.choose(config, parameter);
        tensors.push(PlannedTensor {
            source: parameter.hf_name.clone(),
            name: name_tensor(architecture, &parameter.hf_name),
            shape: parameter.shape.clone(),
            dtype: entry.dtype().expect("opened weights are floats"),
            block_type,
            replaced,
            head_rows: (rotates_neighbours(architecture) && is_rotated(parameter)).then_some(config.head_dim),
            adds_one: stores_one_more(config, parameter),
        });
    }
    let rope_divisors = rope_divisors(config.rope_scaling, config.rope_theta, config.head_dim);
    if !rope_divisors.is_empty() {
        tensors.push(PlannedTensor::computed("rope_freqs.weight", rope_divisors.len() as u64));
    }
    debug_assert!(tensors.iter().all(|tensor| tensor.shape.len() == 2 || tensor.block_type == BlockType::F32));
    let note = hiding_window(config).map(|window| {
        format!("the context of the file is {window} tokens, the sliding window of the model, which llama.cpp does not apply")
    });
    Ok(Expression { architecture, metadata, tensors, rope_divisors, note })
}

/// Returns the keys with a model's settings, or the setting that does not fit its key.
fn settings(config: &ModelConfig, architecture: &str) -> Result<Metadata, String> {
    let mut metadata = Metadata::default();
    for (key, name, value) in [
        ("vocab_size", "vocab_size", config.vocab),
        ("context_length", "max_position_embeddings", hiding_window(config).unwrap_or(config.max_positions)),
        ("embedding_length", "hidden_size", config.hidden),
        ("block_count", "num_hidden_layers", config.layers),
        ("feed_forward_length", "intermediate_size", config.ffn),
        ("attention.head_count", "num_attention_heads", config.heads),
        ("attention.head_count_kv", "num_key_value_heads", config.kv_heads),
        ("attention.key_length", "head_dim", config.head_dim),
        ("attention.value_length", "head_dim", config.head_dim),
        ("rope.dimension_count", "head_dim", config.head_dim),
    ] {
        let number = u32::try_from(value).map_err(|_| format!("`{name}` is {value}"))?;
        metadata.push(format!("{architecture}.{key}"), number);
    }
    metadata.push(format!("{architecture}.attention.layer_norm_rms_epsilon"), config.norm_eps as f32);
    push_scaling(config, architecture, &mut metadata)?;
    push_family_settings(config, architecture, &mut metadata)?;
    Ok(metadata)
}

/// Returns whether an architecture rotates neighbouring elements of a head together.
pub fn rotates_neighbours(architecture: &str) -> bool {
    ["llama", "mistral3", "smollm3", "granite"].contains(&architecture)
}

/// Returns whether a file stores 1 + each element of a parameter.
pub fn stores_one_more(config: &ModelConfig, parameter: &Parameter) -> bool {
    config.model_type.norm_offset() == 1.0 && parameter.hf_name.ends_with("norm.weight")
}

/// Returns the sliding window of a model if llama.cpp does not apply it, and it hides keys within the longest context.
fn hiding_window(config: &ModelConfig) -> Option<u64> {
    config.extras.window.filter(|window| !applies_windows(config.model_type) && *window < config.max_positions)
}

/// Returns the name of a tensor in GGUF from its name in Hugging Face files.
pub fn name_tensor(architecture: &str, hf_name: &str) -> String {
    let (module, kind) = hf_name.rsplit_once('.').expect("names end with .weight or .bias");
    let in_layer = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let (prefix, module) = in_layer.map_or((String::new(), module), |(layer, rest)| (format!("blk.{layer}."), rest));
    let own = if ["olmo2", "gemma2", "gemma3"].contains(&architecture) { &OUTPUT_NORMS[..] } else { &[] };
    let known = own.iter().chain(&MODULES).find(|(hf, _)| *hf == module);
    let (_, name) = known.expect("every parameter has a name in GGUF");
    format!("{prefix}{name}.{kind}")
}

/// Returns whether a parameter has rows that belong to rotated elements: the projection to queries or keys, or its bias.
pub fn is_rotated(parameter: &Parameter) -> bool {
    let of = |target: Target| parameter.hf_name.contains(&format!(".{}.", target.name()));
    of(Target::Q) || of(Target::K)
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_program::models::{preset, preset_names};

    #[test]
    fn every_parameter_has_a_name() {
        for config in preset_names().map(|name| preset(name).unwrap()) {
            let names: std::collections::BTreeSet<String> = config
                .hf_parameters()
                .iter()
                .map(|parameter| name_tensor(name_architecture(config.model_type), &parameter.hf_name))
                .collect();
            assert_eq!(names.len(), config.hf_parameters().len());
        }
        assert_eq!(name_tensor("llama", "model.layers.12.self_attn.k_proj.bias"), "blk.12.attn_k.bias");
        assert_eq!(name_tensor("llama", "model.norm.weight"), "output_norm.weight");
        let layer_norm =
            |architecture: &str, name: &str| name_tensor(architecture, &format!("model.layers.0.{name}.weight"));
        for (name, in_gguf) in [
            ("input_layernorm", "blk.0.attn_norm.weight"),
            ("post_attention_layernorm", "blk.0.post_attention_norm.weight"),
            ("pre_feedforward_layernorm", "blk.0.ffn_norm.weight"),
            ("post_feedforward_layernorm", "blk.0.post_ffw_norm.weight"),
        ] {
            assert_eq!(layer_norm("gemma3", name), in_gguf);
        }
        assert_eq!(layer_norm("llama", "post_attention_layernorm"), "blk.0.ffn_norm.weight");
    }

    #[test]
    fn norms_of_gemma_store_one_more() {
        for (model, stored) in [("gemma2-2b", 4 * 26 + 1), ("gemma3-1b", 6 * 26 + 1), ("olmo3-7b", 0), ("qwen3-8b", 0)]
        {
            let config = preset(model).unwrap();
            let parameters = config.hf_parameters();
            let norms = parameters.iter().filter(|parameter| stores_one_more(&config, parameter));
            assert!(norms.clone().all(|parameter| parameter.shape.len() == 1));
            assert_eq!(norms.count(), stored, "{model}");
        }
    }

    #[test]
    fn context_ends_at_the_window() {
        let mut config = preset("mistral-7b-v0.3").unwrap();
        assert_eq!((config.max_positions, hiding_window(&config)), (32768, None));
        config.extras.window = Some(4096);
        assert_eq!(hiding_window(&config), Some(4096));
        config.extras.window = Some(32768);
        assert_eq!(hiding_window(&config), None);
    }
}
