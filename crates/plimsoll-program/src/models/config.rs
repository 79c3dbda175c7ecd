//! What a model is: its sizes and the few switches that its arithmetic has.
//!
//! `config.json` in and out is in `json`, the names of the weights in `weights`, known shapes in
//! `presets`, the Programs elsewhere. Nothing here touches a file.
//!
//! Legend: V vocabulary, D hidden, F feed-forward, H heads, K key/value heads, E head size.

use plimsoll_core::Failure;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The family a model belongs to: `model_type` of its `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModelType {
    /// Llama 2 and 3, TinyLlama, SmolLM2.
    Llama,
    /// Mistral, without sliding windows.
    Mistral,
    /// Qwen 2 and 2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen 3: a norm on every query and key head.
    Qwen3,
}

impl ModelType {
    /// All types.
    pub const ALL: [ModelType; 4] = [ModelType::Llama, ModelType::Mistral, ModelType::Qwen2, ModelType::Qwen3];

    /// The word in `model_type`.
    pub const fn name(self) -> &'static str {
        match self {
            ModelType::Llama => "llama",
            ModelType::Mistral => "mistral",
            ModelType::Qwen2 => "qwen2",
            ModelType::Qwen3 => "qwen3",
        }
    }

    /// The class of transformers that computes it: `architectures`.
    pub const fn architecture(self) -> &'static str {
        match self {
            ModelType::Llama => "LlamaForCausalLM",
            ModelType::Mistral => "MistralForCausalLM",
            ModelType::Qwen2 => "Qwen2ForCausalLM",
            ModelType::Qwen3 => "Qwen3ForCausalLM",
        }
    }

    /// Whether queries, keys and values have biases.
    pub const fn qkv_bias(self) -> bool {
        matches!(self, ModelType::Qwen2)
    }

    /// Whether every query and key head has a norm.
    pub const fn qk_norm(self) -> bool {
        matches!(self, ModelType::Qwen3)
    }
}

impl fmt::Display for ModelType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How the frequencies of the rotary positions are stretched.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// Every frequency is divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies are divided by `factor`, high ones kept, those between blended.
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Waves longer than `original_max_position_embeddings / low_freq_factor` are low.
        low_freq_factor: f64,
        /// Waves shorter than `original_max_position_embeddings / high_freq_factor` are high.
        high_freq_factor: f64,
        /// The context the model was first trained with, in tokens.
        original_max_position_embeddings: u64,
    },
}

/// A decoder of the Llama family.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// The family.
    pub model_type: ModelType,
    /// D: width of the residual stream.
    pub hidden: u64,
    /// Blocks.
    pub layers: u64,
    /// H: query heads.
    pub heads: u64,
    /// K: key and value heads; divides `heads`.
    pub kv_heads: u64,
    /// E: size of a head; even.
    pub head_dim: u64,
    /// F: width of the feed-forward part.
    pub ffn: u64,
    /// V: vocabulary.
    pub vocab: u64,
    /// Whether the head is the embedding.
    pub tied: bool,
    /// Added to the mean square in every norm.
    pub norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// How they are stretched.
    pub rope_scaling: RopeScaling,
    /// Biases on queries, keys and values.
    pub qkv_bias: bool,
    /// A norm on every query and key head, before the rotation.
    pub qk_norm: bool,
    /// The longest sequence, in tokens.
    pub max_positions: u64,
    /// The token that begins a document.
    pub bos: Option<i64>,
    /// The tokens that end one.
    pub eos: Vec<i64>,
    /// Standard deviation of random matrices.
    pub init_std: f64,
}

/// Largest sizes that are believed. They are far above any model, and so low that no product of
/// sizes, element counts and bytes leaves 64 bits.
pub(crate) mod limit {
    pub const HIDDEN: u64 = 1 << 18;
    pub const LAYERS: u64 = 1 << 12;
    pub const HEADS: u64 = 1 << 12;
    pub const HEAD_DIM: u64 = 1 << 12;
    pub const FFN: u64 = 1 << 22;
    pub const VOCAB: u64 = 1 << 26;
    pub const POSITIONS: u64 = 1 << 32;
    pub const PARAMETERS: u64 = 1 << 44;
}

/// Why a model's configuration is not one that Plimsoll computes. Keys are those of `config.json`;
/// a dot leads into an inner object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not JSON at all.
    #[error("not valid JSON: {message}")]
    Json {
        /// What the parser says, with line and column.
        message: String,
    },
    /// A key that has no default is absent.
    #[error("`{key}` is missing, expected {expected}")]
    Missing {
        /// The key.
        key: String,
        /// What belongs there.
        expected: String,
    },
    /// A value that means nothing.
    #[error("`{key}` is {found}, expected {expected}")]
    Wrong {
        /// The key.
        key: String,
        /// Its value, as JSON.
        found: String,
        /// What belongs there.
        expected: String,
    },
    /// A value with a meaning that Plimsoll does not compute.
    #[error("`{key}` is {found}, which is not supported; supported: {supported}")]
    Unsupported {
        /// The key.
        key: String,
        /// Its value, as JSON.
        found: String,
        /// The values that are.
        supported: String,
    },
    /// Two keys say different things about one fact.
    #[error("`{key}` is {found}, but `{other}` is {other_found}")]
    Contradiction {
        /// One key.
        key: String,
        /// Its value, as JSON.
        found: String,
        /// The other key.
        other: String,
        /// Its value, as JSON.
        other_found: String,
    },
    /// Keys that nobody told us about: they might change the arithmetic.
    #[error("unknown {}: {}", if keys.len() == 1 { "key" } else { "keys" }, quoted(keys))]
    Unknown {
        /// The keys, as they stand in the file.
        keys: Vec<String>,
    },
    /// A key was to be ignored that Plimsoll knows to matter.
    #[error("`{key}` cannot be ignored: it decides what is computed")]
    CannotIgnore {
        /// The key.
        key: String,
    },
}

fn quoted(keys: &[String]) -> String {
    const SHOWN: usize = 8;
    let mut text = keys.iter().take(SHOWN).map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
    if keys.len() > SHOWN {
        text += &format!(" and {} more", keys.len() - SHOWN);
    }
    text
}

impl ConfigError {
    /// What the user can do about it.
    pub fn hints(&self) -> Vec<String> {
        match self {
            ConfigError::Unknown { keys } if keys.len() <= 8 => {
                let flags: Vec<_> = keys.iter().map(|key| format!("--ignore-config-key {key}")).collect();
                vec![format!("if they do not change what the model computes: {}", flags.join(" "))]
            }
            ConfigError::Unknown { .. } => {
                vec!["--ignore-config-key KEY for each that does not change what the model computes".into()]
            }
            ConfigError::Unsupported { key, .. } if key == "sliding_window" => {
                vec![
                    "for sequences no longer than the window, full attention is the same: set \
                      max_position_embeddings to the window's size"
                        .into(),
                ]
            }
            _ => Vec::new(),
        }
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Failure {
        let hints = error.hints();
        hints.into_iter().fold(Failure::input(format!("config.json: {error}")), Failure::hint)
    }
}

impl ModelConfig {
    /// H·E: width of all query heads together.
    pub fn query_width(&self) -> u64 {
        self.heads * self.head_dim
    }

    /// K·E: width of all key (or value) heads together.
    pub fn kv_width(&self) -> u64 {
        self.kv_heads * self.head_dim
    }

    /// (H + 2·K)·E: rows of the fused product of queries, keys and values.
    pub fn qkv_width(&self) -> u64 {
        self.query_width() + 2 * self.kv_width()
    }

    /// Parameters of one block.
    pub fn layer_parameters(&self) -> u64 {
        let attention = self.qkv_width() * self.hidden + self.hidden * self.query_width();
        let bias = if self.qkv_bias { self.qkv_width() } else { 0 };
        let head_norms = if self.qk_norm { 2 * self.head_dim } else { 0 };
        let feed_forward = 3 * self.ffn * self.hidden;
        attention + bias + head_norms + feed_forward + 2 * self.hidden
    }

    /// Parameters of the whole model; a tied head counts once.
    pub fn parameters(&self) -> u64 {
        let tables = if self.tied { 1 } else { 2 } * self.vocab * self.hidden;
        tables + self.layers * self.layer_parameters() + self.hidden
    }

    /// Checks that the sizes fit each other and are sane, so that later arithmetic cannot overflow.
    ///
    /// # Errors
    /// The first key that is out of its range or does not go with the others.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (key, value, largest) in [
            ("hidden_size", self.hidden, limit::HIDDEN),
            ("num_hidden_layers", self.layers, limit::LAYERS),
            ("num_attention_heads", self.heads, limit::HEADS),
            ("num_key_value_heads", self.kv_heads, limit::HEADS),
            ("head_dim", self.head_dim, limit::HEAD_DIM),
            ("intermediate_size", self.ffn, limit::FFN),
            ("vocab_size", self.vocab, limit::VOCAB),
            ("max_position_embeddings", self.max_positions, limit::POSITIONS),
        ] {
            if !(1..=largest).contains(&value) {
                return Err(wrong(key, value, format!("a whole number from 1 to {largest}")));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(wrong(
                "num_key_value_heads",
                self.kv_heads,
                format!("a divisor of num_attention_heads, {}", self.heads),
            ));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(wrong("head_dim", self.head_dim, "an even number (its halves are rotated)"));
        }
        // transformers refuses such a llama, whatever head_dim says.
        if self.model_type == ModelType::Llama && !self.hidden.is_multiple_of(self.heads) {
            return Err(wrong(
                "hidden_size",
                self.hidden,
                format!("a multiple of num_attention_heads, {}", self.heads),
            ));
        }
        if self.parameters() > limit::PARAMETERS {
            return Err(wrong(
                "num_hidden_layers",
                self.layers,
                format!(
                    "sizes that give at most {} parameters together, these give {}",
                    limit::PARAMETERS,
                    self.parameters()
                ),
            ));
        }
        if !(0.0..1.0).contains(&self.norm_eps) {
            return Err(wrong("rms_norm_eps", self.norm_eps, "a number from 0 to below 1"));
        }
        if !(0.0..=1.0).contains(&self.init_std) {
            return Err(wrong("initializer_range", self.init_std, "a number from 0 to 1"));
        }
        if !(1.0..=1e30).contains(&self.rope_theta) {
            return Err(wrong("rope_theta", self.rope_theta, "a number from 1 to 1e30"));
        }
        self.validate_scaling()?;
        for (key, found, by_type) in [
            ("qkv_bias", self.qkv_bias, self.model_type.qkv_bias()),
            ("qk_norm", self.qk_norm, self.model_type.qk_norm()),
        ] {
            if found != by_type {
                return Err(wrong(key, found, format!("{by_type}, as in every {}", self.model_type)));
            }
        }
        Ok(())
    }

    fn validate_scaling(&self) -> Result<(), ConfigError> {
        let factor_of = |factor: f64| {
            let sane = (1e-6..=1e6).contains(&factor);
            if sane { Ok(()) } else { Err(wrong("rope_scaling.factor", factor, "a number from 1e-6 to 1e6")) }
        };
        match self.rope_scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => factor_of(factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: original,
            } => {
                factor_of(factor)?;
                if !(1e-6..=1e6).contains(&low) {
                    return Err(wrong("rope_scaling.low_freq_factor", low, "a number from 1e-6 to 1e6"));
                }
                if !(low..=1e6).contains(&high) || high == low {
                    let expected = format!("a number above low_freq_factor, {low}, and up to 1e6");
                    return Err(wrong("rope_scaling.high_freq_factor", high, expected));
                }
                if !(1..=limit::POSITIONS).contains(&original) {
                    let expected = format!("a whole number from 1 to {}", limit::POSITIONS);
                    return Err(wrong("rope_scaling.original_max_position_embeddings", original, expected));
                }
                Ok(())
            }
        }
    }
}

fn wrong(key: &str, found: impl fmt::Display, expected: impl Into<String>) -> ConfigError {
    ConfigError::Wrong { key: key.to_owned(), found: found.to_string(), expected: expected.into() }
}
