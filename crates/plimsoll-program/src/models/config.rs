//! Model configuration: sizes and the few switches of the arithmetic, with their validation.
//!
//! Reading and writing `config.json` is in `json`, weight names are in `weights`, known shapes in `presets`, and
//! Programs in `decoder`. This module accesses no files.
//!
//! Legend: V vocabulary, D hidden, F feed-forward, H heads, K key/value heads, E head size.

pub use super::family::{Activation, ModelType, QkNorm};
pub use super::rope::{QueryGrowth, RopeScaling};
use half::bf16;
use plimsoll_core::{DType, Failure};
use std::{fmt, iter};

/// The configuration of a decoder of any family: the content of its `config.json` as far as it
/// determines the arithmetic. Sizes are in elements.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Model family.
    pub model_type: ModelType,
    /// D: width of the residual stream.
    pub hidden: u64,
    /// Number of layers.
    pub layers: u64,
    /// H: number of query heads.
    pub heads: u64,
    /// K: number of key heads and of value heads; divides `heads`.
    pub kv_heads: u64,
    /// E: size of an attention head, an even number.
    pub head_dim: u64,
    /// F: width of the feed-forward part (`intermediate_size`).
    pub ffn: u64,
    /// V: vocabulary size.
    pub vocab: u64,
    /// Whether the output head shares the weights of the embedding (`tie_word_embeddings`).
    pub tied: bool,
    /// Value added to the mean square in every RMS norm.
    pub norm_eps: f64,
    /// Base of the rotary frequencies. `extras` may have another one for layers with a window.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies with this base.
    pub rope_scaling: RopeScaling,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output projection of attention has a bias.
    pub attention_out_bias: bool,
    /// Whether gate, up and down have biases.
    pub ffn_bias: bool,
    /// RMS norms of queries and keys before the rotation; `None` if there are none.
    pub qk_norm: Option<QkNorm>,
    /// Longest sequence that the model accepts, in tokens.
    pub max_positions: u64,
    /// Id of the token that starts a document; `None` if the model has none.
    pub bos: Option<i64>,
    /// Ids of the tokens at which generation stops; empty if there are none. An id that no token has, such as −1, never
    /// stops it.
    pub eos: Vec<i64>,
    /// Standard deviation of randomly initialized matrices (`initializer_range`).
    pub init_std: f64,
    /// Parts that most models do not have.
    pub extras: Extras,
}

/// Parts of a model that most models do not have; by default none of them.
#[derive(Clone, Debug, PartialEq)]
pub struct Extras {
    /// Number of keys that a token sees in layers with a sliding window, its own included.
    pub window: Option<u64>,
    /// Layers without the window, in ascending order.
    pub full_layers: Vec<u64>,
    /// Layers that do not rotate queries and keys (NoPE), in ascending order.
    pub unrotated_layers: Vec<u64>,
    /// Factor of the embedding's output.
    pub embedding_multiplier: f64,
    /// Factor of what attention and the feed-forward part add to the residual stream.
    pub residual_multiplier: f64,
    /// Factor of attention scores; `None` for 1 / √head size.
    pub attention_multiplier: Option<f64>,
    /// Divisor of logits.
    pub logits_scaling: f64,
    /// Limit c of attention scores s, which become c · tanh(s / c); `None` for no limit.
    pub score_softcap: Option<f64>,
    /// Limit of logits in the same form; `None` for no limit.
    pub logit_softcap: Option<f64>,
    /// Base of the rotary frequencies in layers with a window, which are not scaled then; `None` if all layers rotate
    /// alike.
    pub local_rope_theta: Option<f64>,
    /// Growth of rotated queries with their position; `None` for no growth.
    pub query_growth: Option<QueryGrowth>,
}

/// The rotation of queries and keys by their positions in a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rotation {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
    /// Factor of rotated queries and of rotated keys. It has the effect of `attention_multiplier`: attention itself
    /// multiplies their products by 1 / √head size.
    pub amplitude: f64,
}

impl Extras {
    /// Returns the parts that every model of a family has, and none that only some of its models have.
    pub fn of_family(model_type: ModelType) -> Extras {
        let query_growth = (model_type == ModelType::Ministral3).then_some(QueryGrowth::MINISTRAL3);
        Extras { local_rope_theta: model_type.family().local_rope_theta, query_growth, ..Extras::default() }
    }
}

impl Default for Extras {
    fn default() -> Extras {
        Extras {
            window: None,
            full_layers: Vec::new(),
            unrotated_layers: Vec::new(),
            embedding_multiplier: 1.0,
            residual_multiplier: 1.0,
            attention_multiplier: None,
            logits_scaling: 1.0,
            score_softcap: None,
            logit_softcap: None,
            local_rope_theta: None,
            query_growth: None,
        }
    }
}

/// Largest accepted sizes. They are far above any model, and so low that no product of sizes, element counts and bytes
/// overflows 64 bits.
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

/// The reason why Plimsoll refuses a model configuration. Keys are those of `config.json`; a dot separates the key of
/// an inner object.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The text of `config.json` is not JSON, or not a JSON object.
    #[error("not valid JSON: {message}")]
    Json {
        /// Description of the error. If the text is not JSON, it includes the line and column.
        message: String,
    },
    /// A key that has no default is missing.
    #[error("`{key}` is missing, expected {expected}")]
    Missing {
        /// Missing key.
        key: String,
        /// Description of the expected value.
        expected: String,
    },
    /// A value is out of range or of the wrong type.
    #[error("`{key}` is {found}, expected {expected}")]
    Wrong {
        /// Key of the value.
        key: String,
        /// Value as JSON.
        found: String,
        /// Description of the expected value.
        expected: String,
    },
    /// A value is valid in transformers, but Plimsoll does not support it.
    #[error("`{key}` is {found}, which is not supported; supported: {supported}")]
    Unsupported {
        /// Key of the value.
        key: String,
        /// Value as JSON; for an absent key, the meaning of its absence.
        found: String,
        /// Supported values.
        supported: String,
    },
    /// Two keys have contradicting values.
    #[error("`{key}` is {found}, but `{other}` is {other_found}")]
    Contradiction {
        /// First key.
        key: String,
        /// Value of the first key, as JSON.
        found: String,
        /// The key whose value contradicts that of `key`.
        other: String,
        /// Value of the second key, as JSON.
        other_found: String,
    },
    /// The file has unknown keys, which might change the arithmetic.
    #[error("unknown {}: {}", if keys.len() == 1 { "key" } else { "keys" }, quoted(keys))]
    Unknown {
        /// Keys as in the file.
        keys: Vec<String>,
    },
    /// The user asks to ignore a key (`--ignore-config-key`) that Plimsoll knows to change the arithmetic.
    #[error("`{key}` cannot be ignored: it changes what the model computes")]
    CannotIgnore {
        /// Key that the user asks to ignore.
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
    /// Returns hints with which the user can solve the problem; empty if there are none.
    pub fn hints(&self) -> Vec<String> {
        match self {
            ConfigError::Unknown { keys } if keys.len() <= 8 => {
                let flags: Vec<_> = keys.iter().map(|key| format!("--ignore-config-key {key}")).collect();
                vec![format!("if they do not change what the model computes, ignore them: {}", flags.join(" "))]
            }
            ConfigError::Unknown { .. } => {
                vec!["ignore each key that does not change what the model computes: --ignore-config-key KEY".into()]
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
    /// Returns the width of all query heads together: heads · head size.
    pub fn query_width(&self) -> u64 {
        self.heads * self.head_dim
    }

    /// Returns the width of all key heads together, which is also that of all value heads: kv heads · head size.
    pub fn kv_width(&self) -> u64 {
        self.kv_heads * self.head_dim
    }

    /// Returns the rows of the matrix that computes queries, keys and values at once: (heads + 2 · kv heads) · head
    /// size.
    pub fn qkv_width(&self) -> u64 {
        self.query_width() + 2 * self.kv_width()
    }

    /// Returns the number of keys that a token sees in a layer with a sliding window, and `None` for other layers.
    pub fn window_of(&self, layer: u64) -> Option<u64> {
        self.extras.window.filter(|_| !self.extras.full_layers.contains(&layer))
    }

    /// Returns the rotations of queries and keys: that of layers without a window, then that of layers with one if it differs.
    pub fn rotations(&self) -> Vec<Rotation> {
        let scores = self.extras.attention_multiplier.map_or(1.0, |factor| factor * (self.head_dim as f64).sqrt());
        let rotation = |theta, scaling: RopeScaling| {
            let amplitude = scaling.attention_factor() * scores.sqrt();
            Rotation { theta, scaling, amplitude }
        };
        let first = rotation(self.rope_theta, self.rope_scaling);
        let local = self.extras.local_rope_theta.filter(|_| self.extras.window.is_some());
        let local = local.map(|theta| rotation(theta, RopeScaling::None)).filter(|local| *local != first);
        iter::once(first).chain(local).collect()
    }

    /// Returns the growth of queries in sequences of up to `tokens`; `None` if all their queries have the factor 1.
    pub fn query_growth_within(&self, tokens: u64) -> Option<QueryGrowth> {
        self.extras.query_growth.filter(|growth| growth.period < tokens && growth.beta > 0.0)
    }

    /// Returns the index of a layer's rotation in [`ModelConfig::rotations`]; `None` if it does not rotate.
    pub fn rotation_of(&self, layer: u64) -> Option<usize> {
        let last = self.rotations().len() - 1;
        (!self.extras.unrotated_layers.contains(&layer)).then(|| if self.window_of(layer).is_some() { last } else { 0 })
    }

    /// Returns the factor of the embedding's output in a run of this precision. A factor √hidden is rounded to the
    /// precision first, as in transformers.
    pub fn embedding_scale(&self, precision: DType) -> f64 {
        if !self.model_type.family().scales_embedding {
            return self.extras.embedding_multiplier;
        }
        let scale = (self.hidden as f64).sqrt();
        if precision == DType::Bf16 { bf16::from_f64(scale).to_f64() } else { scale }
    }

    /// Returns the number of parameters of one layer.
    pub fn layer_parameters(&self) -> u64 {
        let attention = self.qkv_width() * self.hidden + self.hidden * self.query_width();
        let biases = [
            (self.qkv_bias, self.qkv_width()),
            (self.attention_out_bias, self.hidden),
            (self.ffn_bias, 2 * self.ffn + self.hidden),
        ];
        let biases: u64 = biases.into_iter().filter(|(is_present, _)| *is_present).map(|(_, elements)| elements).sum();
        let qk_norms: u64 = self.qk_norm_widths().into_iter().flatten().sum();
        let feed_forward = 3 * self.ffn * self.hidden;
        let norms = 2 * (u64::from(self.model_type.norms_inputs()) + u64::from(self.model_type.norms_outputs()));
        attention + biases + qk_norms + feed_forward + norms * self.hidden
    }

    /// Returns the numbers of elements that a norm of queries and one of keys cover; `None` without such norms.
    pub fn qk_norm_widths(&self) -> Option<[u64; 2]> {
        let norm = self.qk_norm?;
        Some([self.heads, self.kv_heads].map(|heads| norm.width(heads, self.head_dim)))
    }

    /// Returns the number of parameters of the whole model. A head that shares the embedding's weights does not count.
    pub fn parameters(&self) -> u64 {
        let tables = if self.tied { 1 } else { 2 } * self.vocab * self.hidden;
        tables + self.layers * self.layer_parameters() + self.hidden
    }

    /// Checks that all values are in range and consistent. Later arithmetic on sizes cannot overflow then.
    ///
    /// # Errors
    /// Returns the first key that is out of range or inconsistent with others.
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
        // transformers refuses such a model, even with an explicit head_dim.
        let is_refused = matches!(self.model_type, ModelType::Llama | ModelType::Gemma2 | ModelType::Gemma3Text);
        if is_refused && !self.hidden.is_multiple_of(self.heads) {
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
        self.rope_scaling.validate()?;
        self.validate_extras()?;
        let has_switch = self.model_type.has_bias_switches();
        for (key, found, by_type) in [
            ("qkv_bias", self.qkv_bias, self.model_type.qkv_bias() || has_switch && self.qkv_bias),
            ("attention_out_bias", self.attention_out_bias, has_switch && self.qkv_bias),
            ("ffn_bias", self.ffn_bias, has_switch && self.ffn_bias),
        ] {
            if found != by_type {
                return Err(wrong(key, found, format!("{by_type}, as in every such {}", self.model_type)));
            }
        }
        let qk_norm = self.model_type.qk_norm();
        if self.qk_norm != qk_norm {
            let expected = format!("{qk_norm:?}, as in every {}", self.model_type);
            return Err(wrong("qk_norm", format!("{:?}", self.qk_norm), expected));
        }
        Ok(())
    }
}

impl ModelConfig {
    fn validate_extras(&self) -> Result<(), ConfigError> {
        for (key, value) in [
            ("embedding_multiplier", self.extras.embedding_multiplier),
            ("residual_multiplier", self.extras.residual_multiplier),
            ("attention_multiplier", self.extras.attention_multiplier.unwrap_or(1.0)),
            ("logits_scaling", self.extras.logits_scaling),
            ("attn_logit_softcapping", self.extras.score_softcap.unwrap_or(1.0)),
            ("final_logit_softcapping", self.extras.logit_softcap.unwrap_or(1.0)),
        ] {
            if !(1e-6..=1e6).contains(&value) {
                return Err(wrong(key, value, "a number from 1e-6 to 1e6"));
            }
        }
        if self.rope_scaling != RopeScaling::None && !self.model_type.scales_frequencies() {
            return Err(wrong("rope_scaling", format!("{:?}", self.rope_scaling), "null in this model family"));
        }
        let (local, family_local) = (self.extras.local_rope_theta, self.model_type.family().local_rope_theta);
        if local.is_some() != family_local.is_some() || !local.is_none_or(|theta| (1.0..=1e30).contains(&theta)) {
            let expected = family_local.map_or("null in this model family", |_| "a number from 1 to 1e30");
            return Err(wrong("rope_local_base_freq", format!("{local:?}"), expected));
        }
        let grows = self.model_type == ModelType::Ministral3;
        if self.extras.query_growth.is_some() != grows {
            let expected = if grows { "a number" } else { "null in this model family" };
            let found = format!("{:?}", self.extras.query_growth);
            return Err(wrong("rope_parameters.llama_4_scaling_beta", found, expected));
        }
        self.extras.query_growth.map_or(Ok(()), |growth| growth.validate(&self.rope_scaling))?;
        // A norm of an output hides a factor before it.
        let factor = self.extras.residual_multiplier;
        if self.model_type.norms_outputs() && factor != 1.0 {
            return Err(wrong("residual_multiplier", factor, "1 in this model family"));
        }
        let caps = [self.extras.score_softcap, self.extras.logit_softcap];
        if !self.model_type.caps_scores() && caps[0].is_some() {
            return Err(wrong("attn_logit_softcapping", format!("{:?}", caps[0]), "null in this model family"));
        }
        if !self.model_type.caps_logits() && caps[1].is_some() {
            return Err(wrong("final_logit_softcapping", format!("{:?}", caps[1]), "null in this model family"));
        }
        let sorted = |layers: &[u64]| layers.is_sorted() && layers.last().is_none_or(|last| *last < limit::LAYERS);
        for (key, layers) in
            [("layer_types", &self.extras.full_layers), ("no_rope_layers", &self.extras.unrotated_layers)]
        {
            if !sorted(layers) {
                return Err(wrong(key, format!("{layers:?}"), "layers in ascending order"));
            }
        }
        Ok(())
    }
}

pub(super) fn wrong(key: &str, found: impl fmt::Display, expected: impl Into<String>) -> ConfigError {
    ConfigError::Wrong { key: key.to_owned(), found: found.to_string(), expected: expected.into() }
}
