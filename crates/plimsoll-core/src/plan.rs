//! The plan as it is written down: `plan.json`, and what `plimsoll plan --json` prints.

use crate::Bytes;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// What a tensor is for. Every byte of an arena is in exactly one category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Parameters, and constant tables.
    Weight,
    /// Gradients of parameters.
    Gradient,
    /// State of the optimizer.
    Optimizer,
    /// Values of a micro-batch and their gradients, inputs, caches of generation.
    Activation,
    /// Scratch of one op.
    Workspace,
    /// Buffers of collectives.
    Communication,
    /// Buffers of copies between spaces.
    Staging,
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Category::Weight => "weight",
            Category::Gradient => "gradient",
            Category::Optimizer => "optimizer",
            Category::Activation => "activation",
            Category::Workspace => "workspace",
            Category::Communication => "communication",
            Category::Staging => "staging",
        })
    }
}

/// Where a tensor lives. Every space is packed and has a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// The device's arena.
    Device,
    /// The host's arena. The CPU is its own host: there this is the device's arena.
    Host,
    /// The scratch file: what waits, where the host's memory is short.
    Scratch,
    /// A file of the run: a model, a checkpoint. Neither packed nor budgeted.
    File,
}

/// The pieces of work that Programs are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum WorkName {
    /// Weights from files, or random ones, into the arena.
    #[serde(rename = "load")]
    Load,
    /// Forward pass of a micro-batch.
    #[serde(rename = "forward")]
    Forward,
    /// Backward pass of a micro-batch, the loss included.
    #[serde(rename = "backward")]
    Backward,
    /// Clip factor and optimizer.
    #[serde(rename = "update")]
    Update,
    /// Forward pass and loss, nothing kept.
    #[serde(rename = "evaluate")]
    Evaluate,
    /// Weights and optimizer state to files.
    #[serde(rename = "save")]
    Save,
    /// New tokens from a prompt.
    #[serde(rename = "generate")]
    Generate,
    /// The move from one plan to another.
    #[serde(rename = "re-plan")]
    Replan,
}

impl fmt::Display for WorkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            WorkName::Load => "load",
            WorkName::Forward => "forward",
            WorkName::Backward => "backward",
            WorkName::Update => "update",
            WorkName::Evaluate => "evaluate",
            WorkName::Save => "save",
            WorkName::Generate => "generate",
            WorkName::Replan => "re-plan",
        })
    }
}

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

/// What a device (or the host) holds under a plan. All bytes are predicted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct DevicePlan {
    /// The device's name.
    pub name: String,
    /// Whether figures of this device come from a simulation.
    pub simulated: bool,
    /// The load line.
    pub budget_bytes: Bytes,
    /// The one allocation.
    pub arena_bytes: Bytes,
    /// Held outside the arena.
    pub charges_bytes: Bytes,
    /// Arena and charges.
    pub peak_bytes: Bytes,
    /// Bytes by category at the moment the arena is fullest.
    pub by_category: BTreeMap<Category, Bytes>,
    /// Peak of the arena while each Program runs.
    pub by_program: BTreeMap<WorkName, Bytes>,
    /// The largest sum of live tensors: no packing can be below it.
    pub lower_bound_bytes: Bytes,
}

/// Predicted speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Predicted {
    /// One optimizer step.
    pub step_seconds: f64,
    /// Tokens (padding counted) a second.
    pub tokens_per_second: f64,
}

/// Which algorithms a library of products does the products of a run with: with others, last bits differ. Chosen once,
/// then kept with plan and checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Algorithms {
    /// The library's version, as it says it itself.
    pub library: u64,
    /// The GPU's name.
    pub gpu: String,
    /// The newest CUDA that the driver knows: 12040 is 12.4.
    pub driver: u32,
    /// By the product's name: the algorithm, 64 bytes in hexadecimal.
    pub chosen: BTreeMap<String, String>,
}

impl Algorithms {
    /// Whether both were chosen by the same library and driver on the same kind of GPU: only then one may be used for
    /// the other.
    pub fn of_the_same(&self, other: &Algorithms) -> bool {
        let of = |these: &Algorithms| (these.library, these.gpu.clone(), these.driver);
        of(self) == of(other)
    }
}

impl fmt::Display for Algorithms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Algorithms { library, gpu, driver, .. } = self;
        write!(f, "{gpu}, driver for CUDA {}.{}, cuBLASLt {library}", driver / 1000, driver % 1000 / 10)
    }
}

/// A budget that would fit when the named rungs are allowed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Need {
    /// The lossy rungs that must be allowed.
    pub allow: Vec<Rung>,
    /// The smallest load line that then fits.
    pub budget_bytes: Bytes,
    /// What it then takes on the host, where that is more than the host's load line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_bytes: Option<Bytes>,
    /// What it then takes of a scratch file, where that is more than was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<Bytes>,
    /// What the plan then holds on the device, where the present load line is enough and there is one device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_bytes: Option<Bytes>,
    /// Load lines that other devices of a team need then, too, by their names: all of a name that have less.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub others: BTreeMap<String, Bytes>,
}

/// The last rung: a device that cannot hold the run by any rung that may be taken, and whose work the processor does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fallback {
    /// The device that was asked for.
    pub device: String,
    /// Its load line.
    pub budget_bytes: Bytes,
    /// The smallest load line that would have done there.
    pub needs_bytes: Bytes,
}

impl fmt::Display for Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Fallback { device, budget_bytes, needs_bytes } = self;
        write!(f, "fallback to CPU: {device} would have to hold {needs_bytes}, and its load line is {budget_bytes}")
    }
}

/// A rung of the ladder: what it frees and costs. All figures are predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RungPrice {
    /// `micro_batch`, `recompute`, what waits on the host as `offload.optimizer`, or the name of a lossy rung.
    pub rung: String,
    /// What it does to the numbers.
    pub class: Class,
    /// What is lost, in words.
    pub loses: String,
    /// Whether the planner may take it.
    pub allowed: bool,
    /// As far as it goes and nothing else, against the plain recipe: one micro-batch, nothing computed again, nothing on
    /// the host.
    pub alone: Effect,
    /// As far as the plan takes it, against the same plan without it; none where the plan does without.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_plan: Option<Effect>,
}

/// What taking a rung does. All figures are predicted.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Effect {
    /// Bytes that the device holds less.
    pub freed_bytes: i64,
    /// Bytes that the host holds more.
    pub host_bytes: i64,
    /// Bytes that the scratch file holds more.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub file_bytes: i64,
    /// Seconds that a step takes longer.
    pub costs_seconds: f64,
    /// Tokens (padding counted) a second with it.
    pub tokens_per_second: f64,
}

fn is_zero(bytes: &i64) -> bool {
    *bytes == 0
}

/// How the work of a step is shared out among the devices of a team.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// Every device has the whole model and computes some of the sequences.
    Batch,
    /// The same, and weights, gradients and optimizer state stand in parts of unequal size on all of them.
    State,
    /// Every device has some of the layers, one after the other: a pipeline.
    Layers,
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Sharing::Batch => "batch",
            Sharing::State => "state",
            Sharing::Layers => "layers",
        })
    }
}

/// What one device of a team is given. All figures are predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Its name.
    pub device: String,
    /// Its own choices.
    pub recipe: Recipe,
    /// Sequences of each optimizer step that it computes; under shared layers all of them. 0 where it only holds a part of the
    /// state.
    pub sequences: u64,
    /// The first of its layers and the one after its last, where layers are shared out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<[u64; 2]>,
    /// Its part of the state in parts of 1024, where state is shared out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<u64>,
    /// Why it computes none, where it only holds a part of the state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What its products are done with, once it was opened, where it is a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<Algorithms>,
    /// Seconds of a step in which it computes.
    pub busy_seconds: f64,
    /// Seconds of a step in which it does nothing but exchange with the others, or waits for them.
    pub idle_seconds: f64,
    /// What each rung frees and costs on it, where somebody asked (`--explain`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ladder: Vec<RungPrice>,
}

/// A device that was named, or found, and takes no part in the steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Its name.
    pub device: String,
    /// Which of the devices it is, counted from 0: several on paper may have one name.
    #[serde(default)]
    pub number: usize,
    /// Why.
    pub why: String,
    /// What would use it, as settings for the command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_by: Option<String>,
    /// Tokens (padding counted) a second of the team with it, predicted; none where it cannot take part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// What it does beside the steps; none where it does nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluates: Option<Evaluates>,
}

/// A device beside the steps evaluates what the others train, while they go on. All figures are predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluates {
    /// How many rows at once; weights and activations are all that it holds.
    pub recipe: Recipe,
    /// What it holds, under its own load line.
    pub device: DevicePlan,
    /// Rows of an evaluation, where the data have been read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// Seconds that it takes for an evaluation; for one row of a long one where the data have not been read.
    pub seconds: f64,
    /// The same of the devices that do the steps.
    pub team_seconds: f64,
    /// Seconds in which these hand over the weights.
    pub hand_over_seconds: f64,
}

impl Evaluates {
    /// Seconds that an evaluation takes the others less than if they made it themselves, where they can go on for so long
    /// before they need what it comes to.
    pub fn saves(&self, meanwhile_seconds: f64) -> f64 {
        let waits = (self.seconds - meanwhile_seconds).max(0.0);
        self.team_seconds - self.hand_over_seconds - waits
    }

    /// Where the data have not been read: so many rows or more have to be evaluated for it to be worth handing over.
    pub fn least_rows(&self) -> u64 {
        (self.hand_over_seconds / self.team_seconds).ceil().max(1.0) as u64
    }
}

/// What a team does, beside what its devices do alone. All figures are predicted: tokens (padding counted) a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worth {
    /// What the devices of the team do alone, each with the whole step, added up.
    pub alone: f64,
    /// What whole sequences and an update by everybody leave of that, if nothing had to be exchanged.
    pub at_most: f64,
}

/// What would be faster without the rest of its team.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FasterAlone {
    /// A device, or a host with its devices.
    pub name: String,
    /// What it would do, predicted.
    pub tokens_per_second: f64,
}

/// A way to share out that was looked at, where somebody asked (`--explain`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// How; none for one device alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// The devices that take part.
    pub devices: Vec<String>,
    /// What each computes and holds, in words.
    pub shares: Vec<String>,
    /// Whether it fits under every load line.
    pub fits: bool,
    /// Predicted bytes of each device, charges included.
    pub peak_bytes: Vec<Bytes>,
    /// Predicted speed.
    pub predicted: Predicted,
}

/// What a plan was made for: a run of anything else cannot follow it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanOf {
    /// Parameters of the model.
    pub parameters: u64,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Tokens of an optimizer step.
    pub batch_tokens: u64,
}

impl fmt::Display for PlanOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PlanOf { parameters, sequence, batch_tokens } = self;
        write!(f, "{parameters} parameters, {batch_tokens} tokens a step in sequences of {sequence}")
    }
}

/// A plan, or the word that there is none.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Whether the run fits under every load line.
    pub fits: bool,
    /// The choices; where nothing fits, those of the smallest recipe.
    pub recipe: Recipe,
    /// What the rungs taken do to the numbers, against the plain recipe.
    pub class: Class,
    /// The lossy rungs taken.
    #[serde(default)]
    pub rungs: Vec<Rung>,
    /// The tensors of a checkpoint, in a file.
    #[serde(default)]
    pub checkpoint_bytes: Bytes,
    /// Every device that takes part, in the order of ranks.
    pub devices: Vec<DevicePlan>,
    /// How they share the work; none where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// What each of them is given, in the same order; empty where there is one. The recipe of the plan is the first one's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<Member>,
    /// What they are worth together, where it was planned and is not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub worth: Option<Worth>,
    /// What a team's links cost: seconds that a step would take less if they took none, predicted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link_seconds: Option<f64>,
    /// Where all have to take part: a device that would be faster without the others, or over several hosts one of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub faster_alone: Option<FasterAlone>,
    /// The devices that take no part.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<LeftOut>,
    /// Other ways to share out, fastest first, where somebody asked (`--explain`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub alternatives: Vec<Alternative>,
    /// The host.
    pub host: DevicePlan,
    /// The scratch file, where something waits in it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<DevicePlan>,
    /// Predicted speed.
    pub predicted: Predicted,
    /// The smallest budgets that would fit, where it does not fit.
    pub needs: Vec<Need>,
    /// What was planned; none where only a part of a run was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<PlanOf>,
    /// That other programs took the processor while its rates were measured, with what follows from it and what would help.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disturbed: Option<String>,
    /// What earlier runs found out about the device, where the plan follows it: that it could not hold what was free.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learned: Option<String>,
    /// What the products of a GPU are done with, once it was opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<Algorithms>,
    /// The device that was asked for, where the processor does its work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fallback: Option<Fallback>,
    /// What each rung frees and costs, where somebody asked (`--explain`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ladder: Vec<RungPrice>,
}
