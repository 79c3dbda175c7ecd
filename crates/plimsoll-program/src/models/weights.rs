//! The weights by the names that Hugging Face files give them, and where each lies in the fused
//! tensors that Plimsoll computes with.
//!
//! A product of one wide matrix is faster than of three narrow ones, so queries, keys and values
//! are rows of one tensor, and so are gate and up:
//!
//! | tensor | shape | rows |
//! |---|---|---|
//! | `embedding`, `head` | `[V, D]` | |
//! | `qkv` | `[(H + 2K)·E, D]` | queries, keys, values |
//! | `qkv_bias` | `[(H + 2K)·E]` | queries, keys, values |
//! | `attention_out` | `[D, H·E]` | |
//! | `q_norm`, `k_norm` | `[E]` | |
//! | `gate_up` | `[2F, D]` | gate, up |
//! | `down` | `[D, F]` | |
//! | `attention_norm`, `ffn_norm`, `final_norm` | `[D]` | |

use super::config::ModelConfig;

/// A weight as Hugging Face files hold it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// The name in the file.
    pub hf_name: String,
    /// The fused tensor that it is a part of.
    pub tensor: &'static str,
    /// The block, counted from 0; none outside the blocks.
    pub layer: Option<u64>,
    /// Where it begins in the fused tensor (of this layer), in elements.
    pub offset: u64,
    /// Its shape in the file.
    pub shape: Vec<u64>,
    /// Whether weight decay applies: to matrices only.
    pub decay: bool,
}

impl Parameter {
    /// Elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

impl ModelConfig {
    /// All weights, in the order in which transformers writes them. A tied head is not among them.
    pub fn hf_parameters(&self) -> Vec<Parameter> {
        let mut all = vec![outside("model.embed_tokens.weight", "embedding", vec![self.vocab, self.hidden])];
        for layer in 0..self.layers {
            self.push_layer(layer, &mut all);
        }
        all.push(outside("model.norm.weight", "final_norm", vec![self.hidden]));
        if !self.tied {
            all.push(outside("lm_head.weight", "head", vec![self.vocab, self.hidden]));
        }
        all
    }

    fn push_layer(&self, layer: u64, all: &mut Vec<Parameter>) {
        let (d, f, e) = (self.hidden, self.ffn, self.head_dim);
        let (q, kv) = (self.query_width(), self.kv_width());
        let mut push = |name: &str, tensor, offset, shape: Vec<u64>| {
            let decay = shape.len() == 2;
            let hf_name = format!("model.layers.{layer}.{name}");
            all.push(Parameter { hf_name, tensor, layer: Some(layer), offset, shape, decay });
        };
        for (part, rows, width) in [("q_proj", 0, q), ("k_proj", q, kv), ("v_proj", q + kv, kv)] {
            push(&format!("self_attn.{part}.weight"), "qkv", rows * d, vec![width, d]);
            if self.qkv_bias {
                push(&format!("self_attn.{part}.bias"), "qkv_bias", rows, vec![width]);
            }
        }
        push("self_attn.o_proj.weight", "attention_out", 0, vec![d, q]);
        if self.qk_norm {
            push("self_attn.q_norm.weight", "q_norm", 0, vec![e]);
            push("self_attn.k_norm.weight", "k_norm", 0, vec![e]);
        }
        push("mlp.gate_proj.weight", "gate_up", 0, vec![f, d]);
        push("mlp.up_proj.weight", "gate_up", f * d, vec![f, d]);
        push("mlp.down_proj.weight", "down", 0, vec![d, f]);
        push("input_layernorm.weight", "attention_norm", 0, vec![d]);
        push("post_attention_layernorm.weight", "ffn_norm", 0, vec![d]);
    }
}

fn outside(hf_name: &str, tensor: &'static str, shape: Vec<u64>) -> Parameter {
    let decay = shape.len() == 2;
    Parameter { hf_name: hf_name.to_owned(), tensor, layer: None, offset: 0, shape, decay }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::presets::{preset, preset_names};
    use std::collections::BTreeMap;

    #[test]
    fn parts_tile_every_fused_tensor_without_gap_or_overlap() {
        for name in preset_names() {
            let config = preset(name).unwrap();
            let mut parts: BTreeMap<_, Vec<(u64, u64)>> = BTreeMap::new();
            for parameter in config.hf_parameters() {
                let part = (parameter.offset, parameter.elements());
                parts.entry((parameter.layer, parameter.tensor)).or_default().push(part);
            }
            let mut total = 0;
            for ((_, tensor), mut parts) in parts {
                parts.sort_unstable();
                let end = parts.iter().fold(0, |end, &(begin, elements)| {
                    assert_eq!(begin, end, "{name} {tensor}");
                    end + elements
                });
                total += end;
            }
            assert_eq!(total, config.parameters(), "{name}");
        }
    }

    /// Made with `[name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]` of
    /// a one-layer qwen2 and qwen3 in transformers 5.23.
    #[test]
    fn names_stand_in_the_order_of_transformers() {
        let names = |preset_name: &str| {
            let config = ModelConfig { layers: 1, ..preset(preset_name).unwrap() };
            config.hf_parameters().into_iter().map(|p| p.hf_name.replace("model.layers.0.", "")).collect::<Vec<_>>()
        };
        assert_eq!(
            names("qwen2.5-0.5b"),
            [
                "model.embed_tokens.weight",
                "self_attn.q_proj.weight",
                "self_attn.q_proj.bias",
                "self_attn.k_proj.weight",
                "self_attn.k_proj.bias",
                "self_attn.v_proj.weight",
                "self_attn.v_proj.bias",
                "self_attn.o_proj.weight",
                "mlp.gate_proj.weight",
                "mlp.up_proj.weight",
                "mlp.down_proj.weight",
                "input_layernorm.weight",
                "post_attention_layernorm.weight",
                "model.norm.weight",
            ]
        );
        let qwen3 = names("qwen3-8b");
        assert_eq!(qwen3[4..7], ["self_attn.o_proj.weight", "self_attn.q_norm.weight", "self_attn.k_norm.weight"]);
        assert_eq!(qwen3.last().unwrap(), "lm_head.weight");
    }
}
