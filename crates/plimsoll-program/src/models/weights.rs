//! Weights: their names in Hugging Face files, and their place in the fused tensors that Plimsoll computes with.
//!
//! One product with a wide matrix is faster than several with narrow ones. Therefore queries, keys and values are rows
//! of one tensor, and so are gate and up:
//!
//! | tensor | shape | rows |
//! |---|---|---|
//! | `embedding`, `head` | `[V, D]` | |
//! | `qkv` | `[(H + 2K)·E, D]` | queries, keys, values |
//! | `qkv_bias` | `[(H + 2K)·E]` | queries, keys, values |
//! | `attention_out` | `[D, H·E]` | |
//! | `attention_out_bias`, `down_bias` | `[D]` | |
//! | `q_norm`, `k_norm` | `[E]`, or `[H·E]` and `[K·E]` | |
//! | `gate_up` | `[2F, D]` | gate, up |
//! | `gate_up_bias` | `[2F]` | gate, up |
//! | `down` | `[D, F]` | |
//! | `attention_norm`, `ffn_norm` (of inputs), `final_norm` | `[D]` | |
//! | `attention_output_norm`, `ffn_output_norm` | `[D]` | |

use super::config::ModelConfig;

/// A projection (linear layer) of a transformer layer, as transformers has it: `q_proj`, `down_proj`, …. LoRA adapters
/// attach to projections, and a frozen model may quantize them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "named after the modules of transformers: q_proj, …")]
pub enum Target {
    Q,
    K,
    V,
    O,
    Gate,
    Up,
    Down,
    /// Queries, keys and values as one projection, as some families store them.
    Qkv,
    /// Gate and up as one projection, as some families store them.
    GateUp,
}

impl Target {
    /// All projections of a family that fuses none, in the order in which a layer computes them.
    pub const ALL: [Target; 7] = [Target::Q, Target::K, Target::V, Target::O, Target::Gate, Target::Up, Target::Down];

    /// All projections of a family that fuses them, in the order in which a layer computes them.
    pub const FUSED: [Target; 4] = [Target::Qkv, Target::O, Target::GateUp, Target::Down];

    /// Returns the module name in transformers and in PEFT's `target_modules`: `q_proj`.
    pub const fn name(self) -> &'static str {
        match self {
            Target::Q => "q_proj",
            Target::K => "k_proj",
            Target::V => "v_proj",
            Target::O => "o_proj",
            Target::Gate => "gate_proj",
            Target::Up => "up_proj",
            Target::Down => "down_proj",
            Target::Qkv => "qkv_proj",
            Target::GateUp => "gate_up_proj",
        }
    }

    /// Returns the projection with this module name, and `None` if there is none.
    pub fn named(name: &str) -> Option<Target> {
        Target::ALL.into_iter().chain(Target::FUSED).find(|target| target.name() == name)
    }

    /// Returns the projections that this one fuses; empty if it is a single one.
    const fn parts(self) -> &'static [Target] {
        match self {
            Target::Qkv => &[Target::Q, Target::K, Target::V],
            Target::GateUp => &[Target::Gate, Target::Up],
            _ => &[],
        }
    }

    /// Returns the name of the parent module in transformers, `self_attn` or `mlp`.
    const fn group(self) -> &'static str {
        match self {
            Target::Q | Target::K | Target::V | Target::O | Target::Qkv => "self_attn",
            Target::Gate | Target::Up | Target::Down | Target::GateUp => "mlp",
        }
    }

    /// Returns the path of the projection's module in a layer, in transformers: `model.layers.0.self_attn.q_proj`.
    pub fn module(self, layer: u64) -> String {
        format!("model.layers.{layer}.{}.{}", self.group(), self.name())
    }

    /// Returns the name of the tensor that contains the projection's matrix. Queries, keys and values are rows of the
    /// fused tensor `qkv`, gate and up of `gate_up`. Each other projection has a tensor of its own.
    pub const fn tensor(self) -> &'static str {
        match self {
            Target::Q | Target::K | Target::V | Target::Qkv => "qkv",
            Target::O => "attention_out",
            Target::Gate | Target::Up | Target::GateUp => "gate_up",
            Target::Down => "down",
        }
    }

    /// Returns the name of the tensor that contains the projection's bias, if it has one.
    pub const fn bias(self) -> &'static str {
        match self {
            Target::Q | Target::K | Target::V | Target::Qkv => "qkv_bias",
            Target::O => "attention_out_bias",
            Target::Gate | Target::Up | Target::GateUp => "gate_up_bias",
            Target::Down => "down_bias",
        }
    }

    /// Returns whether the projection has a bias in this model.
    pub fn has_bias(self, config: &ModelConfig) -> bool {
        match self {
            Target::Q | Target::K | Target::V | Target::Qkv => config.qkv_bias,
            Target::O => config.attention_out_bias,
            Target::Gate | Target::Up | Target::Down | Target::GateUp => config.ffn_bias,
        }
    }

    /// Returns the names of the tensors of the projection's LoRA adapter: A `[r, columns]` and B `[rows, r]`, with rank
    /// r.
    pub const fn adapter(self) -> [&'static str; 2] {
        match self {
            Target::Q => ["q.lora_a", "q.lora_b"],
            Target::K => ["k.lora_a", "k.lora_b"],
            Target::V => ["v.lora_a", "v.lora_b"],
            Target::O => ["o.lora_a", "o.lora_b"],
            Target::Gate => ["gate.lora_a", "gate.lora_b"],
            Target::Up => ["up.lora_a", "up.lora_b"],
            Target::Down => ["down.lora_a", "down.lora_b"],
            Target::Qkv => ["qkv.lora_a", "qkv.lora_b"],
            Target::GateUp => ["gate_up.lora_a", "gate_up.lora_b"],
        }
    }

    /// Returns the rows (outputs) and columns (inputs) of the projection's matrix.
    pub fn shape(self, config: &ModelConfig) -> [u64; 2] {
        let (d, f, q, kv) = (config.hidden, config.ffn, config.query_width(), config.kv_width());
        match self {
            Target::Q => [q, d],
            Target::K | Target::V => [kv, d],
            Target::O => [d, q],
            Target::Gate | Target::Up => [f, d],
            Target::Down => [d, f],
            Target::Qkv => [q + 2 * kv, d],
            Target::GateUp => [2 * f, d],
        }
    }

    /// Returns the projection's first row in its tensor ([`Target::tensor`]), 0 if the tensor is not fused. In the
    /// output of the product with that tensor, the projection's results start at the column with this number.
    pub fn first_row(self, config: &ModelConfig) -> u64 {
        match self {
            Target::Q | Target::O | Target::Gate | Target::Down | Target::Qkv | Target::GateUp => 0,
            Target::K => config.query_width(),
            Target::V => config.query_width() + config.kv_width(),
            Target::Up => config.ffn,
        }
    }
}

/// A weight as Hugging Face files store it, and its place in the fused tensors that Plimsoll computes with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Name in the file, such as `model.layers.0.self_attn.q_proj.weight`.
    pub hf_name: String,
    /// Name of the fused tensor that contains it, such as `qkv`.
    pub tensor: &'static str,
    /// Layer, counted from 0; `None` for embedding, final norm and head.
    pub layer: Option<u64>,
    /// Index of its first element within the tensor; if the tensor has a slot per layer, within that slot.
    pub offset: u64,
    /// Shape in the file; `[out, in]` for matrices.
    pub shape: Vec<u64>,
    /// Whether weight decay applies; only matrices decay.
    pub decay: bool,
    /// Projection that the parameter belongs to, as its matrix or as matrix A or B of its LoRA adapter. `None` for
    /// biases, norms, embedding and head.
    pub target: Option<Target>,
}

impl Parameter {
    /// Returns the number of elements of the parameter.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }
}

impl ModelConfig {
    /// Returns all projections of a layer, in the order in which it computes them.
    pub fn targets(&self) -> &'static [Target] {
        if self.model_type.fuses_projections() { &Target::FUSED } else { &Target::ALL }
    }

    /// Returns those projections of this model that `targets` names. A fused projection is named by its own name, or by
    /// those of all its parts.
    pub fn own_targets(&self, targets: &[Target]) -> Vec<Target> {
        let is_named = |target: &Target| {
            let parts = target.parts();
            targets.contains(target) || !parts.is_empty() && parts.iter().all(|part| targets.contains(part))
        };
        self.targets().iter().copied().filter(is_named).collect()
    }

    /// Returns all weights of the model, in the order of `named_parameters()` in transformers. A head that shares the
    /// embedding's weights is left out.
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

    /// Returns the matrices A and B of LoRA adapters with their names in PEFT, layer by layer. `rank` returns the rank of
    /// the adapter on a projection of a layer, and `None` for a projection without one.
    pub fn adapter_parameters(&self, rank: impl Fn(u64, Target) -> Option<u64>) -> Vec<Parameter> {
        let mut all = Vec::new();
        for layer in 0..self.layers {
            for &target in self.targets() {
                let Some(rank) = rank(layer, target) else { continue };
                let [rows, columns] = target.shape(self);
                let shapes = [vec![rank, columns], vec![rows, rank]];
                for ((tensor, shape), matrix) in target.adapter().into_iter().zip(shapes).zip(["A", "B"]) {
                    let hf_name = format!("base_model.model.{}.lora_{matrix}.weight", target.module(layer));
                    let (layer, target) = (Some(layer), Some(target));
                    all.push(Parameter { hf_name, tensor, layer, offset: 0, shape, decay: true, target });
                }
            }
        }
        all
    }

    fn push_layer(&self, layer: u64, all: &mut Vec<Parameter>) {
        let d = self.hidden;
        let mut push = |name: &str, tensor, offset, shape: Vec<u64>, target| {
            let decay = shape.len() == 2;
            let hf_name = format!("model.layers.{layer}.{name}");
            all.push(Parameter { hf_name, tensor, layer: Some(layer), offset, shape, decay, target });
        };
        for &target in self.targets() {
            let ([rows, columns], first) = (target.shape(self), target.first_row(self));
            let module = format!("{}.{}", target.group(), target.name());
            push(&format!("{module}.weight"), target.tensor(), first * columns, vec![rows, columns], Some(target));
            if target.has_bias(self) {
                push(&format!("{module}.bias"), target.bias(), first, vec![rows], None);
            }
            if let Some([queries, keys]) = self.qk_norm_widths().filter(|_| target == Target::O) {
                push("self_attn.q_norm.weight", "q_norm", 0, vec![queries], None);
                push("self_attn.k_norm.weight", "k_norm", 0, vec![keys], None);
            }
        }
        for (name, tensor) in self.layer_norms() {
            push(name, tensor, 0, vec![d], None);
        }
    }

    /// Returns the norms of a layer besides those of queries and keys: name in the file and tensor, in the file's order.
    fn layer_norms(&self) -> &'static [(&'static str, &'static str)] {
        match (self.model_type.norms_inputs(), self.model_type.norms_outputs()) {
            (true, false) => {
                &[("input_layernorm.weight", "attention_norm"), ("post_attention_layernorm.weight", "ffn_norm")]
            }
            (false, _) => &[
                ("post_attention_layernorm.weight", "attention_output_norm"),
                ("post_feedforward_layernorm.weight", "ffn_output_norm"),
            ],
            (true, true) => &[
                ("input_layernorm.weight", "attention_norm"),
                ("post_attention_layernorm.weight", "attention_output_norm"),
                ("pre_feedforward_layernorm.weight", "ffn_norm"),
                ("post_feedforward_layernorm.weight", "ffn_output_norm"),
            ],
        }
    }
}

fn outside(hf_name: &str, tensor: &'static str, shape: Vec<u64>) -> Parameter {
    let decay = shape.len() == 2;
    Parameter { hf_name: hf_name.to_owned(), tensor, layer: None, offset: 0, shape, decay, target: None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::presets::{preset, preset_names};
    use std::collections::BTreeMap;

    #[test]
    fn parameters_tile_every_fused_tensor() {
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

    /// The expected names come from `[name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]`
    /// of a one-layer qwen2, qwen3, olmo2, gemma2 and gemma3_text in transformers 5.23.
    #[test]
    fn weight_order_matches_transformers() {
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
        let gemma2 = names("gemma2-2b");
        let norms = ["input", "post_attention", "pre_feedforward", "post_feedforward"];
        assert_eq!(gemma2[8..12], norms.map(|name| format!("{name}_layernorm.weight")));
        assert_eq!(gemma2.last().unwrap(), "model.norm.weight");
        let gemma3 = names("gemma3-270m");
        assert_eq!((&gemma3[4..7], &gemma3[10..14]), (&qwen3[4..7], &gemma2[8..12]));
        let olmo2 = names("olmo2-1b");
        assert_eq!(olmo2[4..7], qwen3[4..7]);
        assert_eq!(olmo2[10..12], ["post_attention_layernorm.weight", "post_feedforward_layernorm.weight"]);
    }
}
