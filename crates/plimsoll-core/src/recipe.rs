//! The planner's choices: what is computed again, what waits on the host, which lossy rungs are taken. What they come to in
//! bytes and seconds is in `plan`.

use serde::{Deserialize, Serialize};
use std::fmt;

/// How much of a layer is thrown away after the forward pass and computed again in the backward
/// pass. Each level includes the ones before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecomputeLevel {
    /// Nothing: all that the backward pass reads is kept.
    #[default]
    Nothing,
    /// Outputs of norms and of SwiGLU.
    Norms,
    /// And the products of gate and up.
    FeedForward,
    /// And queries, keys, values and the attention output.
    Attention,
    /// And the stream between attention and feed-forward: only the block's input is kept.
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

/// Levels of all layers as a person reads them: `4 × nothing, 2 × block`.
pub fn describe_levels(levels: &[RecomputeLevel]) -> String {
    let mut parts = Vec::new();
    for run in levels.chunk_by(|a, b| a == b) {
        parts.push(format!("{} × {}", run.len(), run[0]));
    }
    parts.join(", ")
}

/// What waits on the host while no op needs it, and comes to the device through buffers that are shared by the layers.
/// Numbers count layers, the first ones of the model. Same ops, same order of sums: no bit changes.
///
/// A trained layer's gradients and weights wait only where its optimizer state does, which is the least missed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Offload {
    /// Layers whose optimizer state and master weights wait. When it is all layers, so do those of embedding and head.
    pub optimizer: u32,
    /// Layers whose gradients wait: summed up there over the micro-batches of a step.
    pub gradients: u32,
    /// Layers whose matrices wait, and are fetched for each pass over the layer.
    pub weights: u32,
    /// Layers whose inputs wait from the forward to the backward pass.
    pub inputs: u32,
    /// Whether the embedding's table and its gradient wait; the host looks up the rows. A tied head waits with it.
    pub embedding: bool,
    /// Whether the head and its gradient wait, and come to the device for the loss, a block of rows after another.
    pub head: bool,
    /// Whether the host updates what belongs to the optimizer state that waits: gradients go there, and new weights come
    /// back. Else the state comes to the device, a piece at a time.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub update: bool,
    /// What of all this waits in the scratch file rather than in memory.
    #[serde(skip_serializing_if = "InFile::is_nothing")]
    pub file: InFile,
}

/// What of that which waits does so in the scratch file, and passes through windows of the host's memory. Numbers count
/// layers, the first ones of the model, and never more than wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct InFile {
    /// Layers whose optimizer state and master weights are there. When it is all layers, so are those of embedding and
    /// head.
    pub optimizer: u32,
    /// Layers whose gradients are there.
    pub gradients: u32,
    /// Layers whose matrices are there.
    pub weights: u32,
}

impl InFile {
    /// Nothing is in the file.
    pub const NOTHING: InFile = InFile { optimizer: 0, gradients: 0, weights: 0 };

    /// Whether nothing is in the file.
    pub fn is_nothing(&self) -> bool {
        *self == InFile::NOTHING
    }
}

impl fmt::Display for InFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&counted(&[(self.optimizer, "optimizer"), (self.gradients, "gradients"), (self.weights, "weights")]))
    }
}

/// Layers by what of them waits: `optimizer of 4, weights of 2`.
fn counted(layers: &[(u32, &str)]) -> String {
    let waiting = layers.iter().filter(|(layers, _)| *layers > 0);
    waiting.map(|(layers, what)| format!("{what} of {layers}")).collect::<Vec<_>>().join(", ")
}

impl Offload {
    /// Everything stays on the device.
    pub const NOTHING: Offload = Offload {
        optimizer: 0,
        gradients: 0,
        weights: 0,
        inputs: 0,
        embedding: false,
        head: false,
        update: false,
        file: InFile::NOTHING,
    };

    /// Whether the head comes to the device in blocks; where it is `tied`, it is the embedding's table.
    pub fn streams_head(&self, tied: bool) -> bool {
        if tied { self.embedding } else { self.head }
    }

    /// Whether everything stays on the device.
    pub fn is_nothing(&self) -> bool {
        *self == Offload::NOTHING
    }
}

impl fmt::Display for Offload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layers = counted(&[
            (self.optimizer, "optimizer"),
            (self.gradients, "gradients"),
            (self.weights, "weights"),
            (self.inputs, "inputs"),
        ]);
        let mut parts: Vec<String> = if layers.is_empty() { vec![] } else { vec![layers] };
        let whole = [(self.embedding, "embedding"), (self.head, "head"), (self.update, "the update")];
        parts.extend(whole.iter().filter(|(waits, _)| *waits).map(|(_, what)| (*what).to_owned()));
        f.pad(&if parts.is_empty() { "nothing".to_owned() } else { parts.join(", ") })
    }
}

/// The planner's choices. They never change the experiment (tokens per step, order, rates, seeds,
/// precision, method).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Recipe {
    /// Sequences in one forward and backward pass; 0 of a device that only holds a part of the state, and computes none.
    pub micro_batch: u32,
    /// What each layer computes again, first layer first.
    pub recompute: Vec<RecomputeLevel>,
    /// What waits on the host.
    #[serde(default, skip_serializing_if = "Offload::is_nothing")]
    pub offload: Offload,
    /// The lossy rungs taken, as allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rungs: Vec<Rung>,
}

impl Recipe {
    /// A recipe that keeps everything on the device.
    pub fn on_device(micro_batch: u32, recompute: Vec<RecomputeLevel>) -> Recipe {
        Recipe { micro_batch, recompute, offload: Offload::NOTHING, rungs: Vec::new() }
    }

    /// Micro-batches that so many sequences take.
    pub fn micro_batches(&self, sequences: u64) -> u64 {
        micro_batches(sequences, self.micro_batch)
    }
}

/// Micro-batches that so many sequences take, so many at once: none where none are computed.
pub fn micro_batches(sequences: u64, at_once: u32) -> u64 {
    if at_once == 0 { 0 } else { sequences.div_ceil(u64::from(at_once)) }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.micro_batch {
            0 => f.write_str("no sequences")?,
            at_once => write!(f, "micro-batch {at_once}, recompute {}", describe_levels(&self.recompute))?,
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

/// What a rung does to the numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// The same bits.
    Identical,
    /// The same sums in another order.
    Reordered,
    /// Other arithmetic.
    Lossy,
}

/// A lossy rung that the user may allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Rung {
    /// bf16 arithmetic with f32 sums.
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
    /// Every rung, least loss first.
    pub const ALL: [Rung; 5] = [Rung::Bf16, Rung::Adam8bit, Rung::Lora, Rung::Int8, Rung::Nf4];

    /// What is lost, in a few words.
    pub fn loses(self) -> &'static str {
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
