//! Recipes: the planner's choices of micro-batch, recompute levels, offload and lossy rungs. Their predicted bytes and
//! seconds are in `plan`.

use serde::{Deserialize, Serialize};
use std::fmt;

/// The recompute level of a layer (activation checkpointing): the activations that the forward pass drops and the
/// backward pass recomputes. Each level includes all lower levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeLevel {
    /// No recompute: all activations that the backward pass reads are kept.
    #[default]
    Nothing,
    /// Outputs of norms and of SwiGLU.
    Norms,
    /// Additionally the outputs of the gate and up projections.
    FeedForward,
    /// Additionally queries, keys, values and the attention output.
    Attention,
    /// Additionally the residual stream between attention and feed-forward: only the layer's input is kept.
    Block,
}

impl RecomputeLevel {
    /// All levels, least recomputation first.
    pub const ALL: [RecomputeLevel; 5] = [
        RecomputeLevel::Nothing,
        RecomputeLevel::Norms,
        RecomputeLevel::FeedForward,
        RecomputeLevel::Attention,
        RecomputeLevel::Block,
    ];
}

impl fmt::Display for RecomputeLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            RecomputeLevel::Nothing => "nothing",
            RecomputeLevel::Norms => "norms",
            RecomputeLevel::FeedForward => "feed_forward",
            RecomputeLevel::Attention => "attention",
            RecomputeLevel::Block => "block",
        })
    }
}

/// Formats the levels of all layers for messages: `4 × nothing, 2 × block`.
pub fn describe_levels(levels: &[RecomputeLevel]) -> String {
    let runs = levels.chunk_by(|a, b| a == b).map(|equal| format!("{} × {}", equal.len(), equal[0]));
    runs.collect::<Vec<_>>().join(", ")
}

/// Tensors offloaded to the host. They pass to the device through staging buffers that all layers share. Numbers count
/// layers from the first layer of the model. Ops and the order of sums stay the same, so no bit changes.
///
/// Gradients and weights of a trained layer are offloaded only if its optimizer state is, which is used least often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Offload {
    /// Layers with offloaded optimizer state and master weights. If it is all layers, those of embedding and head are
    /// offloaded too.
    pub optimizer: u32,
    /// Layers with offloaded gradients, which the host accumulates over the micro-batches of a step.
    pub gradients: u32,
    /// Layers with offloaded weight matrices, which are fetched for each pass over the layer.
    pub weights: u32,
    /// Layers with inputs offloaded between the forward and the backward pass.
    pub inputs: u32,
    /// Whether the embedding table and its gradient are offloaded. The host looks up the rows. A tied head is offloaded
    /// too.
    pub embedding: bool,
    /// Whether the head and its gradient are offloaded. The device fetches the head in blocks of rows for the loss.
    pub head: bool,
    /// Whether the host updates the parameters with offloaded optimizer state: gradients go to the host, and new
    /// weights come back. Otherwise the optimizer state passes through the device in pieces.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub update: bool,
    /// The part of the offloaded tensors that the scratch file holds instead of host memory.
    #[serde(skip_serializing_if = "ScratchOffload::is_nothing")]
    pub file: ScratchOffload,
}

/// Offloaded tensors that the scratch file holds. They pass through windows of host memory. Numbers count layers from
/// the first layer of the model, and never exceed the offloaded layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct ScratchOffload {
    /// Layers with optimizer state and master weights in the file. If it is all layers, those of embedding and head are
    /// in the file too.
    pub optimizer: u32,
    /// Layers with gradients in the file.
    pub gradients: u32,
    /// Layers with weight matrices in the file.
    pub weights: u32,
}

impl ScratchOffload {
    /// An unused scratch file.
    pub const NOTHING: ScratchOffload = ScratchOffload { optimizer: 0, gradients: 0, weights: 0 };

    /// Returns whether the scratch file is unused.
    pub fn is_nothing(&self) -> bool {
        *self == ScratchOffload::NOTHING
    }
}

impl fmt::Display for ScratchOffload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&describe_layer_counts(&[
            (self.optimizer, "optimizer"),
            (self.gradients, "gradients"),
            (self.weights, "weights"),
        ]))
    }
}

/// Formats the nonzero layer counts with their names: `optimizer of 4, weights of 2`.
fn describe_layer_counts(layers: &[(u32, &str)]) -> String {
    let offloaded = layers.iter().filter(|(layers, _)| *layers > 0);
    offloaded.map(|(layers, name)| format!("{name} of {layers}")).collect::<Vec<_>>().join(", ")
}

impl Offload {
    /// No offload: all tensors stay on the device.
    pub const NOTHING: Offload = Offload {
        optimizer: 0,
        gradients: 0,
        weights: 0,
        inputs: 0,
        embedding: false,
        head: false,
        update: false,
        file: ScratchOffload::NOTHING,
    };

    /// Returns whether the device fetches the head in blocks of rows. A `tied` head is the embedding table.
    pub fn streams_head(&self, tied: bool) -> bool {
        if tied { self.embedding } else { self.head }
    }

    /// Returns whether nothing is offloaded.
    pub fn is_nothing(&self) -> bool {
        *self == Offload::NOTHING
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layers = describe_layer_counts(&[
            (self.optimizer, "optimizer"),
            (self.gradients, "gradients"),
            (self.weights, "weights"),
            (self.inputs, "inputs"),
        ]);
        let mut parts: Vec<String> = if layers.is_empty() { vec![] } else { vec![layers] };
        let unlayered = [(self.embedding, "embedding"), (self.head, "head"), (self.update, "the update")];
        parts.extend(unlayered.iter().filter(|(offloaded, _)| *offloaded).map(|(_, name)| (*name).to_owned()));
        f.pad(&if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") })
    }
}

/// The planner's choices for one device. They never change the experiment: tokens per step, sample order, learning
/// rates, seeds, precision and method.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Recipe {
    /// Sequences per forward and backward pass; 0 for a storage-only worker, which computes none.
    pub micro_batch: u32,
    /// Recompute level of each layer, first layer first.
    pub recompute: Vec<RecomputeLevel>,
    /// Tensors offloaded to the host.
    #[serde(default, skip_serializing_if = "Offload::is_nothing")]
    pub offload: Offload,
    /// Lossy rungs taken; each must be allowed by the user.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rungs: Vec<Rung>,
}

impl Recipe {
    /// Creates a recipe without offload and lossy rungs.
    pub fn on_device(micro_batch: u32, recompute: Vec<RecomputeLevel>) -> Recipe {
        Recipe { micro_batch, recompute, offload: Offload::NOTHING, rungs: Vec::new() }
    }

    /// Returns the number of micro-batches for `sequences` sequences.
    pub fn micro_batches(&self, sequences: u64) -> u64 {
        micro_batches(sequences, self.micro_batch)
    }
}

/// Returns the number of micro-batches of `micro_batch` sequences for `sequences` sequences; 0 if `micro_batch` is 0.
pub fn micro_batches(sequences: u64, micro_batch: u32) -> u64 {
    if micro_batch == 0 { 0 } else { sequences.div_ceil(u64::from(micro_batch)) }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.micro_batch {
            0 => f.write_str("no sequences")?,
            size => write!(f, "micro-batch {size}, recompute {}", describe_levels(&self.recompute))?,
        }
        if !self.offload.is_nothing() {
            write!(f, ", on the host {}", self.offload)?;
        }
        if !self.offload.file.is_nothing() {
            write!(f, ", of that in the scratch file {}", self.offload.file)?;
        }
        let names: Vec<String> = self.rungs.iter().map(Rung::to_string).collect();
        if names.is_empty() { Ok(()) } else { write!(f, ", with {}", names.join(" and ")) }
    }
}

/// The effect of a rung on the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// All results keep every bit.
    Identical,
    /// Sums are added in another order.
    Reordered,
    /// Arithmetic or method is different.
    Lossy,
}

/// A lossy rung that the user may allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// bf16 arithmetic with f32 accumulation.
    Bf16,
    /// Block-wise 8-bit optimizer state.
    Adam8bit,
    /// A frozen base and low-rank adapters.
    Lora,
    /// Row-wise 8-bit frozen base.
    Int8,
    /// Block-wise 4-bit frozen base.
    Nf4,
}

impl Rung {
    /// All lossy rungs, least loss first.
    pub const ALL: [Rung; 5] = [Rung::Bf16, Rung::Adam8bit, Rung::Lora, Rung::Int8, Rung::Nf4];

    /// Returns the loss of accuracy, in a few words.
    pub fn accuracy_impact(self) -> &'static str {
        match self {
            Rung::Bf16 => "16 of 24 bits a number",
            Rung::Adam8bit => "state in 8 bit",
            Rung::Lora => "all but adapters",
            Rung::Int8 => "frozen base in 8 bit",
            Rung::Nf4 => "frozen base in 4 bit",
        }
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Rung::Bf16 => "bf16",
            Rung::Adam8bit => "adam8bit",
            Rung::Lora => "lora",
            Rung::Int8 => "int8",
            Rung::Nf4 => "nf4",
        })
    }
}
