//! Model families as data: one entry of [`FAMILIES`] for each, with what its `config.json` leaves out and what all its
//! models have in common.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The model family: `model_type` in `config.json`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModelType {
    /// Llama 2 and 3, TinyLlama, SmolLM2.
    Llama,
    /// Mistral, with or without a sliding window.
    Mistral,
    /// Ministral 3: as Mistral, with queries that grow with their position.
    Ministral3,
    /// Qwen 2 and 2.5: biases on queries, keys and values.
    Qwen2,
    /// Qwen 3: a norm on every query and key head.
    Qwen3,
    /// Phi 3 and Phi 4: fused projections.
    Phi3,
    /// SmolLM 3: some layers without rotary positions.
    SmolLm3,
    /// Granite 3: multipliers of embedding, residuals, attention scores and logits.
    Granite,
    /// OLMo 2: norms of the outputs of attention and feed-forward part, and of all query and key heads together.
    Olmo2,
    /// OLMo 3: as OLMo 2, with windows in most layers, where rotary frequencies are not scaled.
    Olmo3,
    /// Gemma 2: norms of inputs and outputs with weights around zero, GeGLU, caps of scores and logits.
    Gemma2,
    /// Gemma 3 without vision: as Gemma 2, with norms of query and key heads instead of caps, and two rotary bases.
    Gemma3Text,
}

/// The extent of the RMS norms of queries and keys, which come before the rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum QkNorm {
    /// One norm for each head. All query heads share their weights, and so do all key heads.
    PerHead,
    /// One norm for all query heads together, and one for all key heads.
    AllHeads,
}

impl QkNorm {
    /// Returns the number of elements that a norm covers, of `heads` heads with `head_dim` elements each.
    pub const fn width(self, heads: u64, head_dim: u64) -> u64 {
        match self {
            QkNorm::PerHead => head_dim,
            QkNorm::AllHeads => heads * head_dim,
        }
    }
}

/// The places of the RMS norms in a layer, apart from those of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LayerNorms {
    /// The inputs of attention and of the feed-forward part.
    Inputs,
    /// The outputs of attention and of the feed-forward part, before they are added to the residual stream.
    Outputs,
    /// Inputs and outputs.
    Both,
}

/// The function of the gate in the feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Activation {
    /// silu(x) = x · sigmoid(x), as in SwiGLU.
    Silu,
    /// gelu(x) in the approximation with tanh, which is x · sigmoid(√(8/π) · (x + 0.044715 · x³)), as in GeGLU.
    GeluTanh,
}

impl Activation {
    /// Returns the coefficients a and b of the function: x · sigmoid(a · x + b · x³).
    pub const fn coefficients(self) -> [f64; 2] {
        // √(8/π)
        const SLOPE: f64 = 1.595_769_121_605_730_7;
        match self {
            Activation::Silu => [1.0, 0.0],
            Activation::GeluTanh => [SLOPE, SLOPE * 0.044715],
        }
    }

    /// Returns the name of the function in transformers.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Activation::Silu => "silu",
            Activation::GeluTanh => "gelu_pytorch_tanh",
        }
    }
}

/// The facts that all models of a family share, and the defaults of keys that `config.json` leaves out.
pub(super) struct Family {
    pub model_type: ModelType,
    /// Value of `model_type` in `config.json`.
    pub name: &'static str,
    /// Value of `architectures` in `config.json`: the model class in transformers.
    pub architecture: &'static str,
    /// Whether queries, keys and values always have biases.
    pub qkv_bias: bool,
    /// Whether `attention_bias` and `mlp_bias` switch biases on.
    pub has_bias_switches: bool,
    /// RMS norms of queries and keys, if the family has them.
    pub qk_norm: Option<QkNorm>,
    /// The places of the RMS norms in a layer.
    pub norms: LayerNorms,
    /// Number that RMS norms add to their weights: 0, or 1 if weights are stored around zero.
    pub norm_offset: f64,
    /// Whether the embedding's output has the factor √hidden.
    pub scales_embedding: bool,
    /// Function of the gate.
    pub activation: Activation,
    /// Whether files hold queries, keys and values as one projection, and gate and up as another.
    pub fuses_projections: bool,
    /// Sliding windows: which keys switch them on, and in which layers.
    pub windows: Windows,
    /// Whether rotary frequencies may be scaled.
    pub scales_frequencies: bool,
    /// Default of `tie_word_embeddings`.
    pub tied: bool,
    /// Default of `rms_norm_eps`.
    pub norm_eps: f64,
    /// Default of `rope_theta`.
    pub rope_theta: f64,
    /// Default of the rotary base of layers with a window, which are never scaled; `None` if all layers rotate alike.
    pub local_rope_theta: Option<f64>,
    /// Default of `max_position_embeddings`.
    pub max_positions: u64,
    /// Default of `num_key_value_heads`; `None` for as many as heads.
    pub kv_heads: Option<u64>,
    /// Default of `head_dim`; `None` for hidden ÷ heads.
    pub head_dim: Option<u64>,
    /// Default of `bos_token_id`.
    pub bos: Option<i64>,
    /// Default of `eos_token_id`.
    pub eos: &'static [i64],
}

/// How a family decides which layers have a sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Windows {
    /// transformers ignores windows in this family, so one that would hide keys is refused.
    Refused,
    /// In all layers, if `sliding_window` is a number; an absent key means this default.
    Always {
        /// Window if the key is absent.
        default: Option<u64>,
    },
    /// In layers from `max_window_layers` on, if `use_sliding_window` is true; `layer_types` overrides the layers.
    Switched,
    /// In layers without rotary positions, if `use_sliding_window` is true; `layer_types` overrides the layers.
    SwitchedUnrotated,
    /// In all layers but each nth one, if `sliding_window` is a number; `layer_types` overrides the layers.
    Periodic {
        /// Window if the key is absent.
        default: u64,
        /// Distance between layers without a window.
        period: u64,
    },
}

/// The table of all families.
pub(super) static FAMILIES: [Family; 12] = [
    Family {
        model_type: ModelType::Llama,
        name: "llama",
        architecture: "LlamaForCausalLM",
        qkv_bias: false,
        has_bias_switches: true,
        qk_norm: None,
        norms: LayerNorms::Inputs,
        norm_offset: 0.0,
        scales_embedding: false,
        activation: Activation::Silu,
        fuses_projections: false,
        windows: Windows::Refused,
        scales_frequencies: true,
        tied: false,
        norm_eps: 1e-6,
        rope_theta: 1e4,
        local_rope_theta: None,
        max_positions: 2048,
        kv_heads: None,
        head_dim: None,
        bos: Some(1),
        eos: &[2],
    },
    Family {
        model_type: ModelType::Mistral,
        name: "mistral",
        architecture: "MistralForCausalLM",
        qkv_bias: false,
        has_bias_switches: false,
        qk_norm: None,
        norms: LayerNorms::Inputs,
        norm_offset: 0.0,
        scales_embedding: false,
        activation: Activation::Silu,
        fuses_projections: false,
        windows: Windows::Always { default: Some(4096) },
        scales_frequencies: true,
        tied: false,
        norm_eps: 1e-6,
        rope_theta: 1e4,
        local_rope_theta: None,
        max_positions: 131_072,
        kv_heads: Some(8),
        head_dim: None,
        bos: Some(1),
        eos: &[2],
    },
    Family {
        model_type: ModelType::Ministral3,
        name: "ministral3",
        architecture: "Ministral3ForCausalLM",
        qkv_bias: false,
        has_bias_switches: false,
        qk_norm: None,
        norms: LayerNorms::Inputs,
        norm_offset: 0.0,
        scales_embedding: false,
        activation: Activation::Silu,
        fuses_projections: false,
        windows: Windows::Always { default: None },
        scales_frequencies: true,
        tied: false,
        norm_eps: 1e-5,
        rope_theta: 1e4,
        local_rope_theta: None,
        max_positions: 262_144,
        kv_heads: Some(8),
        head_dim: Some(128),
        bos: Some(1),
        eos: &[2],
    },
    Family {
        model_type: ModelType::Qwen2,
        name: "qwen2",
        architecture: "Qwen2ForCausalLM",
        qkv_bias: true,
        has_bias_switches: false,
        qk_norm: None,
        norms: LayerNorms::Inputs,
        norm_offset: 0.0,
        scales_embedding: false,
        activation: Activation::Silu,
        fuses_projections: false,
        windows: Windows::Switched,
        scales_frequencies: true,
        tied: false,
        norm_eps: 1e-6,
        rope_theta: 1e4,
        local_rope_theta: None,
        max_positions: 32_768,
        kv_heads: Some(32),
        head_dim: None,
        bos: None,
        eos: &[],
    },
    Family {
        model_type: ModelType::Qwen3,
        name: "qwen3",
        architecture: "Qwen3ForCausalLM",
        qkv_bias: false,
        has_bias_switches: false,
        qk_norm: Some(QkNorm::PerHead),
        norms: LayerNorms::Inputs,
        norm_offset: 0.0,
        scales_embedding: false,
        activation: Activation::Silu,
        fuses_projections: false,
        windows: Windows::Switched,
        scales_frequencies: true,
        tied: false,
        norm_eps: 1e-6,
        rope_theta: 1e4,
        local_rope_theta: None,
        max_positions: 32_768,
        kv_heads: Some(32),
        head_dim: Some(128),
        bos: None,
        eos: &[],
    },
    Family {
        model_type: ModelType::Phi3,
        name: "phi3",
        architecture: "Phi3ForCausalLM",
        qkv_bias: false,
        has_bias_switches: false,
        qk_norm: None,
        norms: LayerNorms::Inputs,
        norm_offset: 0.0,
        scales_embedding: false,
        activation: Activation::Silu,
        fuses_projections: true,
        windows: Windows::Always { default: None },
        scales_frequencies: false,
        tied: false,
        norm_eps: 1e-5,
        rope_theta: 1e4,
        local_rope_theta: None,
        max_positions: 4096,
        kv_heads: None,
        head_dim: None,
        bos: Some(1),
        eos: &[32_000],
    },
    Family {
        model_type: ModelType::SmolLm3,
        name: "smollm3",
        architecture: "SmolLM3ForCausalLM",
        qkv_bias: false,
        has_bias_switches: true,
        qk_norm: None,
        norms: LayerNorms::Inputs,
        norm_offset: 0.0,
        scales_embedding: false,
        activation: Activation::Silu,
        fuses_projections: false,
        windows: Windows::SwitchedUnrotated,
        scales_frequencies: true,
        tied: true,
        norm_eps: 1e-6,
        rope_theta: 2e6,
        local_rope_theta: None,
        max_positions: 32_768,
        kv_heads: Some(4),
        head_dim: None,
        bos: Some(128_000),
        eos: &[128_001],
    },
    Family {
        model_type: ModelType::Granite,
        name: "granite",
        architecture: "GraniteForCausalLM",
        qkv_bias: false,
        has_bias_switches: false,
        qk_norm: None,
        norms: LayerNorms::Inputs,
        norm_offset: 0.0,
        scales_embedding: false,
        activation: Activation::Silu,
        fuses_projections: false,
        windows: Windows::Refused,
        scales_frequencies: true,
        tied: false,
        norm_eps: 1e-6,
        rope_theta: 1e4,
        local_rope_theta: None,
        max_positions: 2048,
        kv_heads: None,
        head_dim: None,
        bos: Some(1),
        eos: &[2],
    },
    Family {
        model_type: ModelType::Olmo2,
        name: "olmo2",
        architecture: "Olmo2ForCausalLM",
        qkv_bias: false,
        has_bias_switches: false,
        qk_norm: Some(QkNorm::AllHeads),
        norms: LayerNorms::Outputs,
        norm_offset: 0.0,
        scales_embedding: false,
        activation: Activation::Silu,
        fuses_projections: false,
        windows: Windows::Refused,
        scales_frequencies: true,
        tied: false,
        norm_eps: 1e-5,
        rope_theta: 1e4,
        local_rope_theta: None,
        max_positions: 2048,
        kv_heads: None,
        head_dim: None,
        bos: None,
        eos: &[50_279],
    },
    Family {
        model_type: ModelType::Olmo3,
        name: "olmo3",
        architecture: "Olmo3ForCausalLM",
        qkv_bias: false,
        has_bias_switches: false,
        qk_norm: Some(QkNorm::AllHeads),
        norms: LayerNorms::Outputs,
        norm_offset: 0.0,
        scales_embedding: false,
        activation: Activation::Silu,
        fuses_projections: false,
        windows: Windows::Periodic { default: 4096, period: 4 },
        scales_frequencies: true,
        tied: false,
        norm_eps: 1e-5,
        rope_theta: 5e5,
        local_rope_theta: Some(5e5),
        max_positions: 2048,
        kv_heads: None,
        head_dim: None,
        bos: None,
        eos: &[50_279],
    },
    Family {
        model_type: ModelType::Gemma2,
        name: "gemma2",
        architecture: "Gemma2ForCausalLM",
        qkv_bias: false,
        has_bias_switches: false,
        qk_norm: None,
        norms: LayerNorms::Both,
        norm_offset: 1.0,
        scales_embedding: true,
        activation: Activation::GeluTanh,
        fuses_projections: false,
        windows: Windows::Periodic { default: 4096, period: 2 },
        scales_frequencies: true,
        tied: true,
        norm_eps: 1e-6,
        rope_theta: 1e4,
        local_rope_theta: None,
        max_positions: 8192,
        kv_heads: Some(4),
        head_dim: Some(256),
        bos: Some(2),
        eos: &[1],
    },
    Family {
        model_type: ModelType::Gemma3Text,
        name: "gemma3_text",
        architecture: "Gemma3ForCausalLM",
        qkv_bias: false,
        has_bias_switches: false,
        qk_norm: Some(QkNorm::PerHead),
        norms: LayerNorms::Both,
        norm_offset: 1.0,
        scales_embedding: true,
        activation: Activation::GeluTanh,
        fuses_projections: false,
        windows: Windows::Periodic { default: 4096, period: 6 },
        scales_frequencies: true,
        tied: true,
        norm_eps: 1e-6,
        rope_theta: 1e6,
        local_rope_theta: Some(1e4),
        max_positions: 131_072,
        kv_heads: Some(4),
        head_dim: Some(256),
        bos: Some(2),
        eos: &[1],
    },
];

impl ModelType {
    /// All supported families.
    pub const ALL: [ModelType; FAMILIES.len()] = {
        let mut all = [ModelType::Llama; FAMILIES.len()];
        let mut number = 0;
        while number < all.len() {
            all[number] = FAMILIES[number].model_type;
            number += 1;
        }
        all
    };

    /// Returns the family's entry of the table.
    pub(super) const fn family(self) -> &'static Family {
        &FAMILIES[self as usize]
    }

    /// Returns the name of the family: the value of `model_type` in `config.json`.
    pub const fn name(self) -> &'static str {
        self.family().name
    }

    /// Returns the name of the model class in transformers: the value of `architectures` in `config.json`.
    pub const fn architecture(self) -> &'static str {
        self.family().architecture
    }

    /// Returns whether the projections to queries, keys and values have biases in every model of this family.
    pub const fn qkv_bias(self) -> bool {
        self.family().qkv_bias
    }

    /// Returns whether `config.json` switches biases on: `attention_bias` those of queries, keys, values and the output
    /// of attention, and `mlp_bias` those of gate, up and down.
    pub const fn has_bias_switches(self) -> bool {
        self.family().has_bias_switches
    }

    /// Returns whether files hold queries, keys and values as one projection, and gate and up as another.
    pub const fn fuses_projections(self) -> bool {
        self.family().fuses_projections
    }

    /// Returns whether models of this family may scale rotary frequencies.
    pub const fn scales_frequencies(self) -> bool {
        self.family().scales_frequencies
    }

    /// Returns the RMS norms of queries and keys in this family, and `None` if there are none.
    pub const fn qk_norm(self) -> Option<QkNorm> {
        self.family().qk_norm
    }

    /// Returns whether a layer norms the inputs of attention and of the feed-forward part.
    pub const fn norms_inputs(self) -> bool {
        !matches!(self.family().norms, LayerNorms::Outputs)
    }

    /// Returns whether a layer norms the outputs of attention and of the feed-forward part before they are added to the
    /// residual stream.
    pub const fn norms_outputs(self) -> bool {
        !matches!(self.family().norms, LayerNorms::Inputs)
    }

    /// Returns the number that RMS norms add to their weights: 0, or 1 if weights are stored around zero.
    pub const fn norm_offset(self) -> f64 {
        self.family().norm_offset
    }

    /// Returns the function of the gate in the feed-forward part.
    pub const fn activation(self) -> Activation {
        self.family().activation
    }

    /// Returns whether models of this family may cap attention scores.
    pub const fn caps_scores(self) -> bool {
        matches!(self, ModelType::Gemma2)
    }

    /// Returns whether models of this family may cap logits.
    pub const fn caps_logits(self) -> bool {
        matches!(self, ModelType::Gemma2 | ModelType::Gemma3Text)
    }
}

impl fmt::Display for ModelType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_in_order_of_families() {
        assert!(ModelType::ALL.into_iter().all(|model_type| model_type.family().model_type == model_type));
    }
}
