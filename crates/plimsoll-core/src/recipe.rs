//! Recipes: the planner's choices of micro-batch, recompute levels, offload and lossy rungs. Their predicted bytes and
//! seconds are in `plan`.

use crate::words::format_count;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The recompute level of a layer (activation checkpointing): the activations that the forward pass drops and the
/// backward pass recomputes. Each level includes all lower levels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum RecomputeLevel {
    /// No recompute: all activations that the backward pass reads are kept.
    #[default]
    Nothing,
    /// Recomputes the outputs of norms and of SwiGLU.
    Norms,
    /// Additionally recomputes the outputs of the gate and up projections.
    FeedForward,
    /// Additionally recomputes queries, keys, values and the attention output.
    Attention,
    /// Additionally recomputes the residual stream between attention and feed-forward: only the layer's input is kept.
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

/// Formats the levels of all layers for messages: `4 × nothing, 2 × block`, or `nothing` if no layer recomputes
/// anything.
pub fn describe_levels(levels: &[RecomputeLevel]) -> String {
    if levels.iter().all(|level| *level == RecomputeLevel::Nothing) {
        return RecomputeLevel::Nothing.to_string();
    }
    let runs = levels.chunk_by(|a, b| a == b).map(|equal| format!("{} × {}", equal.len(), equal[0]));
    runs.collect::<Vec<_>>().join(", ")
}

/// The tensors that a recipe offloads to the host. They pass to the device through staging buffers that all layers
/// share. Numbers count layers from the first layer of the model. Ops and the order of sums stay the same, so no bit
/// changes.
///
/// Gradients and weights of a trained layer are offloaded only if its optimizer state is, which is used least often.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Offload {
    /// Number of layers with offloaded optimizer state and master weights. If it is all layers, those of embedding and
    /// head are offloaded too.
    pub optimizer: u32,
    /// Number of layers with offloaded gradients, which the host accumulates over the micro-batches of a step.
    pub gradients: u32,
    /// Number of layers with offloaded weight matrices, which are fetched for each pass over the layer.
    pub weights: u32,
    /// Number of layers whose inputs are on the host between the forward and the backward pass.
    pub inputs: u32,
    /// Whether the embedding table and its gradient are offloaded. The host then looks up the rows of the tokens. A
    /// head that is tied to the embedding is offloaded with it.
    pub embedding: bool,
    /// Whether the head and its gradient are offloaded. For the loss, the device then fetches the head in blocks of
    /// rows.
    pub head: bool,
    /// Whether the host updates the parameters whose optimizer state is offloaded: their gradients go to the host, and
    /// new weights come back. If false, their optimizer state passes through the device in pieces.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub update: bool,
    /// The part of the offloaded tensors that the scratch file holds instead of host memory.
    #[serde(skip_serializing_if = "ScratchOffload::is_nothing")]
    pub file: ScratchOffload,
}

/// Offloaded tensors that the scratch file holds. They pass through windows of host memory. Numbers count layers from
/// the first layer of the model, and never exceed the offloaded layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct ScratchOffload {
    /// Number of layers with optimizer state and master weights in the file. If it is all layers, those of embedding
    /// and head are in the file too.
    pub optimizer: u32,
    /// Number of layers with gradients in the file.
    pub gradients: u32,
    /// Number of layers with weight matrices in the file.
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

/// Formats the layer counts above zero with their names: `optimizer of 4 layers, weights of 2`. Returns an empty text if
/// all are zero.
fn describe_layer_counts(layers: &[(u32, &str)]) -> String {
    let mut offloaded = layers.iter().filter(|(layers, _)| *layers > 0);
    let first =
        offloaded.next().map(|(layers, name)| format!("{name} of {}", format_count(u64::from(*layers), "layer")));
    let others = offloaded.map(|(layers, name)| format!("{name} of {layers}"));
    first.into_iter().chain(others).collect::<Vec<_>>().join(", ")
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

    /// Returns whether the head is offloaded, so that the device fetches it in blocks of rows. If the head is `tied`,
    /// it is the embedding table, and is offloaded with it.
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
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Recipe {
    /// Sequences per forward and backward pass (the micro-batch); 0 for a storage-only worker, which computes none.
    pub micro_batch: u32,
    /// Recompute level of each layer, first layer first.
    pub recompute: Vec<RecomputeLevel>,
    /// Tensors offloaded to the host.
    #[serde(default, skip_serializing_if = "Offload::is_nothing")]
    pub offload: Offload,
    /// Lossy rungs taken, each allowed by the user; empty if the recipe is lossless.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rungs: Vec<Rung>,
}

impl Recipe {
    /// Creates a recipe without offload and without lossy rungs.
    pub fn on_device(micro_batch: u32, recompute: Vec<RecomputeLevel>) -> Recipe {
        Recipe { micro_batch, recompute, offload: Offload::NOTHING, rungs: Vec::new() }
    }

    /// Returns the number of micro-batches that `sequences` sequences need, rounded up; 0 for a storage-only worker.
    pub fn micro_batches(&self, sequences: u64) -> u64 {
        micro_batches(sequences, self.micro_batch)
    }
}

/// Returns the number of micro-batches that `sequences` sequences need, rounded up, at `micro_batch` sequences each.
/// Returns 0 if `micro_batch` is 0.
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
            write!(f, ", on the host: {}", self.offload)?;
        }
        if !self.offload.file.is_nothing() {
            write!(f, "; of these in the scratch file: {}", self.offload.file)?;
        }
        let names: Vec<String> = self.rungs.iter().map(Rung::to_string).collect();
        if names.is_empty() { Ok(()) } else { write!(f, ", with {}", names.join(" and ")) }
    }
}

/// The effect of a rung, or of a change of recipe, on the numbers of a run: its losses and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// All results keep every bit.
    Identical,
    /// Results are equal up to the order of sums.
    Reordered,
    /// Results differ, because the arithmetic or the training method is different.
    Lossy,
}

/// A lossy rung that the user may allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// bf16 arithmetic with f32 accumulation.
    Bf16,
    /// Block-wise 8-bit optimizer state.
    Adam8bit,
    /// Training of low-rank adapters beside a frozen base model.
    Lora,
    /// Frozen base weights in 8 bits, with one scale per row.
    Int8,
    /// Frozen base weights in 4 bits, with one scale per block.
    Nf4,
}

/// The names of all lossy rungs, for help texts and messages; `quoted` puts each in quotation marks. This is a macro
/// because `concat!` takes only literals.
#[macro_export]
macro_rules! rung_names {
    () => {
        "bf16, adam8bit, lora, int8, nf4"
    };
    (quoted) => {
        "\"bf16\", \"adam8bit\", \"lora\", \"int8\", \"nf4\""
    };
}

/// The fixed properties of a lossy rung.
struct RungProperties {
    /// Name in run files, messages and JSON.
    name: &'static str,
    /// Number of bits, as text, that `memory.allow` accepts in place of the name. `None` if it accepts only the name.
    bits: Option<&'static str>,
    /// Loss of accuracy in a few words, such as `frozen base in 4 bit`.
    accuracy_impact: &'static str,
    /// Whether the rung has no effect on commands that do not train.
    is_training_only: bool,
}

impl Rung {
    /// All lossy rungs, least loss first.
    pub const ALL: [Rung; 5] = [Rung::Bf16, Rung::Adam8bit, Rung::Lora, Rung::Int8, Rung::Nf4];

    const fn properties(self) -> RungProperties {
        let (name, bits, accuracy_impact, is_training_only) = match self {
            Rung::Bf16 => ("bf16", Some("16"), "16 of 24 bits a number", false),
            Rung::Adam8bit => ("adam8bit", None, "state in 8 bit", true),
            Rung::Lora => ("lora", None, "all but adapters", true),
            Rung::Int8 => ("int8", Some("8"), "frozen base in 8 bit", false),
            Rung::Nf4 => ("nf4", Some("4"), "frozen base in 4 bit", false),
        };
        RungProperties { name, bits, accuracy_impact, is_training_only }
    }

    /// Returns the lossy rung whose name (`nf4`) or number of bits (`4`) is `word`; `None` if there is none.
    pub fn named(word: &str) -> Option<Rung> {
        Rung::ALL.into_iter().find(|rung| {
            let RungProperties { name, bits, .. } = rung.properties();
            word == name || Some(word) == bits
        })
    }

    /// Returns the rung's loss of accuracy in a few words, such as `frozen base in 4 bit`.
    pub fn accuracy_impact(self) -> &'static str {
        self.properties().accuracy_impact
    }

    /// Returns whether the rung only affects training, as 8-bit optimizer state does. Commands that do not train refuse
    /// such a rung.
    pub fn is_training_only(self) -> bool {
        self.properties().is_training_only
    }
}

impl fmt::Display for Rung {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.properties().name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rung_names_list_all_rungs() {
        let join = |name: fn(Rung) -> String| Rung::ALL.map(name).join(", ");
        assert_eq!(join(|rung| rung.to_string()), rung_names!());
        assert_eq!(join(|rung| format!("\"{rung}\"")), rung_names!(quoted));
    }

    #[test]
    fn rungs_are_found_by_name_and_bits() {
        for rung in Rung::ALL {
            assert_eq!(Rung::named(&rung.to_string()), Some(rung));
        }
        assert_eq!(["16", "8", "4"].map(Rung::named), [Rung::Bf16, Rung::Int8, Rung::Nf4].map(Some));
        assert_eq!(Rung::named("fp8"), None);
    }
}
