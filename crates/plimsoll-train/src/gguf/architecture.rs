//! Names and settings of a model as llama.cpp knows them. Mistral models are of the architecture `llama` there.
//!
//! # Rotation of queries and keys
//! Hugging Face files rotate element i of a head together with element i + E/2. The architectures `llama`, `smollm3` and
//! `granite` of llama.cpp rotate neighbours, so the rows of their query and key projections are interleaved
//! ([`PlannedTensor::head_rows`]). The other architectures keep the order.
//!
//! # Scaling of rotary frequencies
//! Linear scaling has keys. Scaling as in Llama 3.1 becomes a tensor of divisors, `rope_freqs.weight`, which only the
//! architecture `llama` reads.
//!
//! # Sliding windows
//! These architectures of llama.cpp attend to all earlier tokens. The context of the file is therefore at most the
//! window: up to that length, both give the same results.

use super::error::GgufError;
use super::metadata::Metadata;
use super::mix::{ChosenType, FileType};
use super::planned_tensor::PlannedTensor;
use crate::block_types::BlockType;
use crate::files::{ModelDir, ModelWeights};
use plimsoll_program::models::{ModelConfig, ModelType, Parameter, RopeScaling, Target};
use std::f64::consts::TAU;

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

/// Name in GGUF of `post_attention_layernorm` in architectures that norm the output of attention with it.
const OUTPUT_NORM: (&str, &str) = ("post_attention_layernorm", "post_attention_norm");

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

/// Returns whether files of this family are read and written. Names and numbers of the others are not known here: the files
/// of Gemma models store 1 + weight of norms, those of OLMo 3 have windows, and those of Ministral 3 queries that grow.
pub const fn has_form(model_type: ModelType) -> bool {
    use ModelType::{Gemma2, Gemma3Text, Ministral3, Olmo3};
    !matches!(model_type, Olmo3 | Gemma2 | Gemma3Text | Ministral3)
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
        });
    }
    let rope_divisors = rope_divisors(config.rope_scaling, config.rope_theta, config.head_dim);
    if !rope_divisors.is_empty() {
        if architecture != "llama" {
            return Err(refuse("`rope_scaling` is of type llama3".to_owned()));
        }
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
    metadata.push(format!("{architecture}.rope.freq_base"), config.rope_theta as f32);
    if let Some(part) = part_without_form(config) {
        return Err(part);
    }
    if let RopeScaling::Linear { factor } = config.rope_scaling {
        metadata.push(format!("{architecture}.rope.scaling.type"), "linear");
        metadata.push(format!("{architecture}.rope.scaling.factor"), factor as f32);
    }
    if config.model_type == ModelType::Phi3 {
        // Files of this type name their window, which llama.cpp does not apply; 0 stands for none.
        let window = config.extras.window.unwrap_or(0);
        let number = u32::try_from(window).map_err(|_| format!("`sliding_window` is {window}"))?;
        metadata.push(format!("{architecture}.attention.sliding_window"), number);
    }
    if config.model_type == ModelType::Granite {
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
    Ok(metadata)
}

/// Returns whether an architecture rotates neighbouring elements of a head together.
pub fn rotates_neighbours(architecture: &str) -> bool {
    ["llama", "smollm3", "granite"].contains(&architecture)
}

/// Returns the sliding window of a model if it hides keys within the longest context.
fn hiding_window(config: &ModelConfig) -> Option<u64> {
    config.extras.window.filter(|window| *window < config.max_positions)
}

/// Returns the part of a model that has no form in GGUF, or none that is known here; `None` if all have one.
fn part_without_form(config: &ModelConfig) -> Option<String> {
    let scaling = match config.rope_scaling {
        RopeScaling::Dynamic { .. } => Some("dynamic"),
        RopeScaling::Yarn { .. } => Some("yarn"),
        RopeScaling::None | RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. } => None,
    };
    let scaling = scaling.map(|kind| format!("`rope_scaling` is of type {kind}"));
    // llama.cpp rotates all but every fourth layer of `smollm3`, and all layers of other architectures.
    let is_smollm3 = config.model_type == ModelType::SmolLm3;
    let unrotated: Vec<u64> = (0..config.layers).filter(|layer| is_smollm3 && layer % 4 == 3).collect();
    let differs = config.extras.unrotated_layers != unrotated;
    // The norm of all query heads of `olmo2` is as wide as the model there.
    let is_wide = config.model_type == ModelType::Olmo2 && config.heads * config.head_dim != config.hidden;
    (!has_form(config.model_type))
        .then(|| format!("`model_type` is {}", config.model_type))
        .or(scaling)
        .or_else(|| differs.then(|| "`no_rope_layers` are not every fourth layer".to_owned()))
        .or_else(|| is_wide.then(|| format!("`head_dim` is {}", config.head_dim)))
}

/// Returns the name of a tensor in GGUF from its name in Hugging Face files.
pub fn name_tensor(architecture: &str, hf_name: &str) -> String {
    let (module, kind) = hf_name.rsplit_once('.').expect("names end with .weight or .bias");
    let in_layer = module.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let (prefix, module) = in_layer.map_or((String::new(), module), |(layer, rest)| (format!("blk.{layer}."), rest));
    let own = (architecture == "olmo2").then_some(&OUTPUT_NORM);
    let known = own.into_iter().chain(&MODULES).find(|(hf, _)| *hf == module);
    let (_, name) = known.expect("every parameter has a name in GGUF");
    format!("{prefix}{name}.{kind}")
}

/// Returns whether a parameter has rows that belong to rotated elements: the projection to queries or keys, or its bias.
pub fn is_rotated(parameter: &Parameter) -> bool {
    let of = |target: Target| parameter.hf_name.contains(&format!(".{}.", target.name()));
    of(Target::Q) || of(Target::K)
}

/// Returns the divisor of each rotary frequency for scaling as in Llama 3.1, highest frequency first. Returns nothing for
/// other scalings.
fn rope_divisors(scaling: RopeScaling, theta: f64, head_dim: u64) -> Vec<f32> {
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
    use plimsoll_program::models::preset;

    #[test]
    fn every_parameter_has_a_name() {
        let mut configs: Vec<ModelConfig> = ["llama-3.2-1b", "mistral-7b-v0.3", "qwen2.5-0.5b", "qwen3-8b", "olmo2-1b"]
            .map(|name| preset(name).unwrap())
            .into();
        configs.push(ModelConfig { model_type: ModelType::Phi3, ..configs[0].clone() });
        for config in configs {
            let names: std::collections::BTreeSet<String> = config
                .hf_parameters()
                .iter()
                .map(|parameter| name_tensor(name_architecture(config.model_type), &parameter.hf_name))
                .collect();
            assert_eq!(names.len(), config.hf_parameters().len());
        }
        assert_eq!(name_tensor("llama", "model.layers.12.self_attn.k_proj.bias"), "blk.12.attn_k.bias");
        assert_eq!(name_tensor("llama", "model.norm.weight"), "output_norm.weight");
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

    #[test]
    fn models_without_form_are_refused_by_name() {
        let config = preset("mistral-7b-v0.3").unwrap();
        let dynamic = ModelConfig { rope_scaling: RopeScaling::Dynamic { factor: 2.0 }, ..config.clone() };
        assert_eq!(settings(&dynamic, "llama").unwrap_err(), "`rope_scaling` is of type dynamic");
        let mut smollm3 = ModelConfig { model_type: ModelType::SmolLm3, ..config };
        assert_eq!(settings(&smollm3, "smollm3").unwrap_err(), "`no_rope_layers` are not every fourth layer");
        smollm3.extras.unrotated_layers = (0..smollm3.layers).filter(|layer| layer % 4 == 3).collect();
        settings(&smollm3, "smollm3").unwrap();
        for (name, model_type) in [
            ("gemma2-2b", "gemma2"),
            ("gemma3-1b", "gemma3_text"),
            ("olmo3-7b", "olmo3"),
            ("ministral-3-8b", "ministral3"),
        ] {
            let refused = settings(&preset(name).unwrap(), "").unwrap_err();
            assert_eq!(refused, format!("`model_type` is {model_type}"));
        }
        let olmo2 = preset("olmo2-1b").unwrap();
        settings(&olmo2, "olmo2").unwrap();
        let wide = ModelConfig { head_dim: 2 * olmo2.head_dim, ..olmo2 };
        assert_eq!(settings(&wide, "olmo2").unwrap_err(), "`head_dim` is 256");
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
