//! The run file: every key of `run.toml` with its type and default, as plain data.
//!
//! `read` parses text and `--set` settings, `keys` lists each key with its expected value, `check` holds the rules between
//! keys, `sources` has the tables `[[data.source]]`, `objectives` the settings of objectives, and `grid` expands the settings of
//! a sweep. Nothing here looks at models, data or devices: `resolve` reports a
//! path that does not exist or an unknown preset.
//!
//! Steps to add a key: the field and its default here, a line in `keys`, a rule in `check` if it has a range, and a row
//! in `docs/run-file.md`. Two tests compare the list and the documentation with the structs.

mod check;
pub mod grid;
mod keys;
mod objectives;
mod read;
mod sources;
#[cfg(test)]
mod tests;

pub(crate) use check::MAX_BATCH_TOKENS;
pub use objectives::{DpoLoss, DpoSection, GrpoLoss, GrpoSection, ImportanceLevel, Objective, RewardScale};
pub use read::{RunConfigError, list_setting, model_setting, setting};
pub use sources::{DataSource, Split};

use crate::files::ModuleNames;
use plimsoll_core::{Budget, DType, DeviceKind, Parallelism, RecomputeLevel, Rung};
use plimsoll_plan::device_request::DevicesRequest;
use plimsoll_program::models::Target;
use plimsoll_program::models::decoder::Scores;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Prefix of names of built-in models and data (`example:sums`) in a run file; such values are not paths.
pub const EXAMPLE_PREFIX: &str = "example:";
/// Prefix of ids of the Hugging Face Hub (`hub:OWNER/NAME`) in a run file; such values are not paths.
pub const HUB_PREFIX: &str = "hub:";

/// Content of a run file (`run.toml`), with a given or default value for every key. It is plain data; see
/// [`RunRequest`](crate::resolve::RunRequest) for a run with connections to remote devices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// The model.
    pub model: ModelSection,
    /// Training and evaluation data.
    pub data: DataSection,
    /// Length, optimizer and other settings of the experiment.
    pub train: TrainSection,
    /// Rank, scale and matrices of LoRA adapters, if the run trains them.
    pub lora: LoraSection,
    /// Settings of direct preference optimization, if it is the objective.
    pub dpo: DpoSection,
    /// Settings of group relative policy optimization, if it is the objective.
    pub grpo: GrpoSection,
    /// Memory limits, and the lossy savings (rungs) that the planner may take.
    pub memory: MemorySection,
    /// Planner choices that the user fixes: micro-batch and recompute levels.
    pub recipe: RecipeSection,
    /// Run folder and devices.
    pub run: RunSection,
    /// Logs of the run for other programs.
    pub watch: WatchSection,
    /// Hub ids in whose place the sections above hold local paths. No key of a run file.
    #[serde(skip)]
    pub hub: HubSources,
}

/// The hub ids of a run whose files are fetched. [`RunConfig::to_toml`] writes them in place of the local paths.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HubSources {
    /// `model.path` as the user wrote it.
    pub model_name: Option<String>,
    /// `model.path` with the commit.
    pub model: Option<String>,
    /// `model.adapter` with the commit.
    pub adapter: Option<String>,
    /// `data.train`, in which each id has its commit.
    pub train: Option<Vec<String>>,
    /// `data.source`, in which each id has its commit.
    pub source: Option<Vec<DataSource>>,
    /// `data.eval`, in which each id has its commit.
    pub eval: Option<Vec<String>>,
}

impl HubSources {
    /// Returns the name of the model's repository; `None` without one, or if the model lies in a folder of it.
    pub fn base_model(&self) -> Option<&str> {
        let name = self.model_name.as_deref()?.strip_prefix(HUB_PREFIX)?;
        let (repository, files) = name.split_once(':').unwrap_or((name, ""));
        (!files.contains('/')).then(|| repository.split('@').next().unwrap_or_default())
    }

    /// Returns the commit of the model's repository.
    pub fn base_commit(&self) -> Option<&str> {
        let (_, rest) = self.model.as_deref()?.split_once('@')?;
        rest.split(':').next()
    }
}

/// The section `[model]` of a run file. Exactly one of `path` and `preset` is set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// A Hugging Face directory, or its `config.json` alone; `None` if `preset` names the model. Absolute after
    /// [`RunConfig::load`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The name of a built-in model shape without weights, such as `llama-3.2-1b`; `None` if `path` names the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// Source of the first weights. Default: pretrained for a path, random for a preset.
    pub init: Init,
    /// A PEFT directory with adapters of the model, which are trained further or used for evaluation. `None` if the run
    /// has no adapters or starts with new ones. Absolute after [`RunConfig::load`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Keys of `config.json` that Plimsoll does not know and the user declares harmless. Other unknown keys are errors.
    pub ignore_config_keys: Vec<String>,
}

/// Source of the weights with which a new run starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Init {
    /// The safetensors files of the model's directory.
    #[default]
    Pretrained,
    /// Random numbers from `train.seed`.
    Random,
}

/// The section `[data]` of a run file: training and evaluation data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// Training data: files, globs or hub ids; or `example:sums`. Empty if `source` names them, and in runs that only
    /// evaluate. Absolute after [`RunConfig::load`].
    #[serde(deserialize_with = "read::one_or_many")]
    pub train: Vec<String>,
    /// Evaluation data: files, globs or hub ids; or `example:sums`. Empty for no evaluation. Absolute after
    /// [`RunConfig::load`].
    #[serde(deserialize_with = "read::one_or_many")]
    pub eval: Vec<String>,
    /// Format of the records in the files.
    pub format: Format,
    /// The chat template of conversations: a file, or the name of a built-in one. `None` stands for the model's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Messages of a conversation that are trained.
    pub train_on: TrainOn,
    /// End-of-turn tokens that are trained.
    pub train_on_end: TrainOnEnd,
    /// Handling of chat templates that write earlier turns differently from the last one.
    pub not_prefix: NotPrefix,
    /// T: tokens of one sequence.
    pub sequence: u32,
    /// Whether documents are packed back to back into sequences; otherwise each document starts a sequence of its own,
    /// and the rest is padding.
    pub pack: bool,
    /// Handling of documents longer than `sequence`.
    pub long: LongSamples,
    /// Whether sequences are shuffled, in a new order each epoch.
    pub shuffle: bool,
    /// Sources of training data, in place of `train`; empty if `train` names the data.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub source: Vec<DataSource>,
}

impl Default for DataSection {
    fn default() -> DataSection {
        DataSection {
            train: Vec::new(),
            eval: Vec::new(),
            format: Format::Auto,
            template: None,
            train_on: TrainOn::Assistant,
            train_on_end: TrainOnEnd::Turn,
            not_prefix: NotPrefix::Split,
            sequence: 1024,
            pack: true,
            long: LongSamples::Split,
            shuffle: true,
            source: Vec::new(),
        }
    }
}

/// Format of the records in data files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Format {
    /// The format that the first records of each file fit.
    Auto,
    /// Text under `text`, or plain text files.
    Text,
    /// Token ids under `input_ids`, with optional `labels`.
    Tokens,
    /// Conversations under `messages`, with `role` and `content`.
    Messages,
    /// Conversations under `conversations`, with `from` and `value`.
    Sharegpt,
    /// Instructions with answers: `instruction`, `input` and `output`.
    Alpaca,
    /// Prompts with completions: `prompt` and `completion`.
    PromptCompletion,
    /// Pairs of answers: `chosen` and `rejected`.
    Preference,
    /// Prompts whose completions the model samples: `prompt`. Other keys are for rewards.
    Prompt,
    /// Completions that a model has sampled: `prompt_ids`, `completion_ids` and `rewards`.
    Rollouts,
}

/// Messages of a conversation that are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainOn {
    /// All messages of the assistant.
    #[default]
    Assistant,
    /// The last message of the assistant.
    Last,
    /// All messages.
    All,
    /// The messages of the assistant after the last message of the user.
    Completion,
}

/// End-of-turn tokens that are trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrainOnEnd {
    /// The one of each trained turn.
    #[default]
    Turn,
    /// The one of the last turn of a conversation.
    Last,
    /// None.
    None,
}

/// Handling of chat templates that write earlier turns differently from the last one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NotPrefix {
    /// Each trained turn becomes a sample of its own, as the end of its conversation.
    #[default]
    Split,
    /// The template is an error, and the run does not start.
    Refuse,
}

/// Handling of documents that are longer than a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LongSamples {
    /// The document continues in the next sequence.
    Split,
    /// The document is an error, and the run does not start.
    Refuse,
}

/// The section `[train]` of a run file: the experiment. At most one of `steps`, `epochs` and `hours` is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSection {
    /// Length of the run in optimizer steps; `None` if `epochs` or `hours` gives the length, or no key does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Length of the run in passes over the training data; `None` if `steps` or `hours` gives the length, or no key
    /// does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Length of the run in hours of training time; `None` if `steps` or `epochs` gives the length, or no key does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hours: Option<f64>,
    /// Tokens of one optimizer step over the whole team, including padding; a multiple of `data.sequence`. Default: the
    /// largest such multiple up to 65536, at least one sequence.
    pub batch_tokens: u64,
    /// The objective.
    pub objective: Objective,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// Course of the learning rate after the warm-up.
    pub schedule: RateSchedule,
    /// Number of steps at the start of the run in which the learning rate rises linearly from zero.
    pub warmup_steps: u64,
    /// Decoupled weight decay, applied to matrices only.
    pub weight_decay: f64,
    /// AdamW's decay rates of the averages of gradient and squared gradient; SGD uses the first as its momentum.
    pub betas: [f64; 2],
    /// AdamW's epsilon.
    pub eps: f64,
    /// Global gradient norm that gradients are clipped to; 0 disables clipping.
    pub clip_norm: f64,
    /// Precision of the computation.
    pub precision: Precision,
    /// Trained parameters: all, or LoRA adapters.
    pub method: Method,
    /// Lossy memory savings (rungs, such as 8-bit Adam) that the run uses. `None` until the user or the first plan has
    /// decided them; then they stay.
    #[serde(deserialize_with = "read::decided_rungs", skip_serializing_if = "Option::is_none")]
    pub rungs: Option<Vec<Rung>>,
    /// Seed of random weights, dropout, the order of sequences and random faults.
    pub seed: u64,
    /// Steps between evaluations; 0 evaluates at the end only.
    pub eval_every: u64,
    /// Steps between checkpoints; 0 uses `save_every_minutes` only.
    pub save_every: u64,
    /// Minutes between checkpoints; 0 uses `save_every` only.
    pub save_every_minutes: f64,
    /// Number of checkpoints that are kept: the newest ones.
    pub keep: u32,
}

impl Default for TrainSection {
    fn default() -> TrainSection {
        TrainSection {
            steps: None,
            epochs: None,
            hours: None,
            batch_tokens: 65536,
            objective: Objective::Supervised,
            optimizer: Optimizer::Adamw,
            learning_rate: 3e-4,
            schedule: RateSchedule::Cosine,
            warmup_steps: 10,
            weight_decay: 0.1,
            betas: [0.9, 0.95],
            eps: 1e-8,
            clip_norm: 1.0,
            precision: Precision::Auto,
            method: Method::Full,
            rungs: None,
            seed: 1,
            eval_every: 0,
            save_every: 0,
            save_every_minutes: 10.0,
            keep: 2,
        }
    }
}

/// Length of a training run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    /// Optimizer steps.
    Steps(u64),
    /// Passes over the training data.
    Epochs(f64),
    /// Hours of training time.
    Hours(f64),
}

/// The optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Optimizer {
    /// Adam with decoupled weight decay.
    Adamw,
    /// Gradient descent with momentum.
    Sgd,
}

/// Course of the learning rate after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RateSchedule {
    /// Constant at its highest value.
    Constant,
    /// Linear decay to zero.
    Linear,
    /// Decay to zero along half a cosine.
    Cosine,
}

/// Precision of the computation. It belongs to the experiment: a resumed run cannot change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Decided when the run first starts: bf16 on GPUs, f32 on CPUs.
    Auto,
    /// 32-bit floats.
    F32,
    /// bfloat16 with f32 sums, master weights and optimizer state.
    Bf16,
    /// 64-bit floats, on CPUs only, as a reference.
    F64,
}

/// The parameters that a run trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Every parameter.
    Full,
    /// Low-rank adapters on a frozen base.
    Lora,
}

/// The section `[lora]` of a run file: adapters, for `train.method = "lora"`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraSection {
    /// Rank of an adapter.
    pub rank: u32,
    /// Scale of the adapters: an adapter's output is multiplied by alpha / rank.
    pub alpha: f64,
    /// Whether an adapter's output is multiplied by alpha / √rank instead.
    pub rslora: bool,
    /// Dropout probability of an adapter's input.
    pub dropout: f64,
    /// Matrices that get an adapter: names such as `q_proj`, or a regular expression of their paths.
    #[serde(deserialize_with = "read::lora_targets")]
    pub targets: ModuleNames,
    /// Layers that get adapters, counted from 0; all layers if empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<u64>,
    /// Ranks of matrices that differ from `rank`, by regular expressions for the ends of their paths.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub rank_pattern: BTreeMap<String, u32>,
    /// Alphas of matrices that differ from `alpha`, by regular expressions for the ends of their paths.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub alpha_pattern: BTreeMap<String, f64>,
}

impl Default for LoraSection {
    fn default() -> LoraSection {
        LoraSection {
            rank: 16,
            alpha: 32.0,
            rslora: false,
            dropout: 0.0,
            targets: all_targets(),
            layers: vec![],
            rank_pattern: BTreeMap::new(),
            alpha_pattern: BTreeMap::new(),
        }
    }
}

/// Returns the names of all matrices that can have an adapter.
fn all_targets() -> ModuleNames {
    ModuleNames::List(Target::ALL.iter().map(|target| target.name().to_owned()).collect())
}

/// The section `[memory]` of a run file: limits (load lines) and permitted lossy savings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemorySection {
    /// Load line (the most bytes that a device may hold) of each device for which `run.devices` gives none: a share of
    /// free memory, or an amount such as `6GiB`. `None` stands for 90 % of free memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// Most bytes of host memory that offloaded tensors may fill: a share of free memory, or an amount.
    pub host: Budget,
    /// Largest size of the scratch file: a share of the free disk space, or an amount. `None` allows no scratch file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<Budget>,
    /// Folder of the scratch file; `None` stands for the run folder. Absolute after [`RunConfig::load`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_dir: Option<String>,
    /// Lossy memory savings (rungs) that the planner may take if nothing else fits; empty for none.
    #[serde(deserialize_with = "read::rungs")]
    pub allow: Vec<Rung>,
}

impl MemorySection {
    /// Returns the load line (the most bytes that a device may hold) of each device for which `run.devices` gives none.
    /// It is `memory.budget`, or 90 % of free memory if that key is not set.
    pub fn device_budget(&self) -> Budget {
        self.budget.unwrap_or(Budget::DEVICE)
    }

    /// Returns the load lines of a device without its own and of the host.
    pub fn load_lines(&self) -> (Budget, Budget) {
        (self.device_budget(), self.host)
    }
}

impl Default for MemorySection {
    fn default() -> MemorySection {
        MemorySection { budget: None, host: Budget::HOST, file: None, file_dir: None, allow: Vec::new() }
    }
}

/// The section `[recipe]` of a run file: planner choices that the user fixes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecipeSection {
    /// Sequences in one forward and backward pass; `None` (`"auto"`) if the planner chooses.
    #[serde(deserialize_with = "read::auto_or_number", skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<u32>,
    /// Recompute level (activation checkpointing) of each layer: one level for all layers, or one per layer. If empty,
    /// the planner chooses.
    #[serde(deserialize_with = "read::one_or_many")]
    pub recompute: Vec<RecomputeLevel>,
    /// Number of completions that are sampled at once, each with a slot of the key-value cache; `None` (`"auto"`) for as many
    /// as have room.
    #[serde(deserialize_with = "read::auto_or_number", skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
}

/// The section `[run]` of a run file: run folder, devices and their operation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunSection {
    /// The run folder. Absolute after [`RunConfig::load`].
    pub dir: String,
    /// The devices of the run, such as `auto`, `cpu=6GiB`, `virtual:a=600MiB@1.0,virtual:b=200MiB@0.5` or `rtx3090`.
    pub devices: String,
    /// Number of compute threads of the CPU.
    pub threads: Threads,
    /// Temperature in degrees Celsius at which a device pauses between two steps; `None` never pauses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_temperature: Option<f64>,
    /// Seconds without a heartbeat after which a device of a team counts as lost. A separate thread sends heartbeats,
    /// so slow work does not count as a loss.
    pub heartbeat_seconds: f64,
    /// Device that takes over if the run does not fit on the requested devices.
    pub fallback: FallbackTarget,
    /// Kind of parallelism with several devices.
    pub parallelism: ParallelismChoice,
    /// Whether a team of GPUs exchanges data by NCCL, if all have the same version of it.
    pub nccl: bool,
    /// Whether the same command gives the same bits each time: shares, micro-batches and algorithms then follow from
    /// nothing that is measured, and stay. `None` is true for a run that follows a stored plan, else false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deterministic: Option<bool>,
}

impl Default for RunSection {
    fn default() -> RunSection {
        RunSection {
            dir: "runs/run".into(),
            devices: "auto".into(),
            threads: Threads::Auto,
            max_temperature: None,
            heartbeat_seconds: 30.0,
            fallback: FallbackTarget::Cpu,
            parallelism: ParallelismChoice::Auto,
            nccl: true,
            deterministic: None,
        }
    }
}

/// The section `[watch]` of a run file: logs of the run for other programs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WatchSection {
    /// Whether the run writes TensorBoard event files into its folder.
    pub tensorboard: bool,
    /// URL (`http://…`) to which the run posts its start, recoveries and end; `None` for no messages.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub webhook: Option<String>,
}

/// Device that takes over if a run does not fit on an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FallbackTarget {
    /// The CPU, under the host's load line (`memory.host`); the plan reports it.
    Cpu,
    /// No device: the run is refused.
    None,
}

/// The user's choice of parallelism with several devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ParallelismChoice {
    /// The fastest kind, on those devices that make the run faster or possible.
    #[default]
    Auto,
    /// Data parallel only.
    Data,
    /// Sharded (FSDP, ZeRO-3) only.
    Sharded,
    /// Pipeline parallel only.
    Pipeline,
    /// The fastest kind that uses every device.
    All,
}

impl ParallelismChoice {
    /// Returns the only kind of parallelism that the planner may choose; `None` if it may choose any.
    pub fn pinned(self) -> Option<Parallelism> {
        match self {
            ParallelismChoice::Auto | ParallelismChoice::All => None,
            ParallelismChoice::Data => Some(Parallelism::Data),
            ParallelismChoice::Sharded => Some(Parallelism::Sharded),
            ParallelismChoice::Pipeline => Some(Parallelism::Pipeline),
        }
    }

    /// Returns whether the planner may choose a plan that uses a single device and leaves the others idle.
    pub fn allows_single_device(self) -> bool {
        matches!(self, ParallelismChoice::Auto | ParallelismChoice::Data)
    }
}

/// Number of compute threads of the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "read::WordOrNumber", into = "read::WordOrNumber")]
pub enum Threads {
    /// 80 % of the physical cores, at least one, so that the machine stays usable.
    #[default]
    Auto,
    /// A fixed number of threads.
    Count(u32),
}

impl Threads {
    /// Returns the number that the user requested; `None` for `auto`.
    pub fn requested(self) -> Option<u32> {
        match self {
            Threads::Auto => None,
            Threads::Count(count) => Some(count),
        }
    }

    /// Returns the number of threads for work beside that of devices: as many as requested, at most one for each processor.
    pub fn on_host(self) -> usize {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        self.requested().map_or(processors, |count| processors.min(count as usize)).max(1)
    }
}

impl RunConfig {
    /// Returns the length of the run; `None` if no key sets it, which [`RunConfig::check_trainable`] rejects.
    pub fn length(&self) -> Option<Length> {
        let train = &self.train;
        train.steps.map(Length::Steps).or(train.epochs.map(Length::Epochs)).or(train.hours.map(Length::Hours))
    }

    /// Returns whether the same command gives the same bits each time.
    pub fn is_deterministic(&self) -> bool {
        self.run.deterministic == Some(true)
    }

    /// Returns the number of sequences of one optimizer step over the whole team.
    pub fn batch_sequences(&self) -> u64 {
        self.train.batch_tokens / u64::from(self.data.sequence)
    }

    /// Returns the number of rows of training data of one optimizer step: prompts if the model samples completions of them,
    /// else sequences.
    pub fn batch_rows(&self) -> u64 {
        if self.samples_completions() { self.grpo.prompts_per_step } else { self.batch_sequences() }
    }

    /// Returns the number of consecutive rows of training data that belong together: the completions of a prompt in a file.
    pub fn rows_per_group(&self) -> u64 {
        let has_groups = self.train.objective == Objective::Grpo && self.data.format == Format::Rollouts;
        if has_groups { self.grpo.num_generations } else { 1 }
    }

    /// Returns whether the model of the run samples the completions on which it trains.
    pub fn samples_completions(&self) -> bool {
        self.train.objective == Objective::Grpo && self.data.format != Format::Rollouts
    }

    /// Returns the log-probabilities of its labels with which a step begins.
    pub fn scores(&self) -> Scores {
        match self.train.objective {
            Objective::Supervised => Scores::None,
            Objective::Dpo => Scores::Present,
            Objective::Grpo if self.samples_completions() => match self.grpo.beta > 0.0 {
                true => Scores::PresentAndInitial,
                false if self.grpo.num_iterations > 1 => Scores::Present,
                false => Scores::None,
            },
            Objective::Grpo => Scores::Present,
        }
    }

    /// Returns the number of consecutive steps that use the same rows of training data.
    pub fn steps_per_batch(&self) -> u64 {
        if self.train.objective == Objective::Grpo { self.grpo.num_iterations } else { 1 }
    }

    /// Returns the number of sequences for which the process of a run holds buffers of a step: those of the step, and
    /// once more those whose scores it computes.
    pub fn buffered_sequences(&self) -> u64 {
        self.batch_sequences() * if self.train.objective == Objective::Supervised { 1 } else { 2 }
    }

    /// Returns the element type of the computation on a kind of device. With `train.precision = "auto"` it is bf16 on
    /// GPUs and f32 on CPUs.
    pub fn arithmetic(&self, on: DeviceKind) -> DType {
        match self.train.precision {
            Precision::Auto => match on {
                DeviceKind::Cuda | DeviceKind::Paper => DType::Bf16,
                DeviceKind::Cpu | DeviceKind::Virtual => DType::F32,
            },
            Precision::F32 => DType::F32,
            Precision::Bf16 => DType::Bf16,
            Precision::F64 => DType::F64,
        }
    }

    /// Replaces `train.precision = "auto"` by the precision on this kind of device. The precision belongs to the
    /// experiment and is decided once, when the run first starts.
    pub fn decide_precision(&mut self, on: DeviceKind) {
        if self.train.precision == Precision::Auto {
            self.train.precision = match self.arithmetic(on) {
                DType::Bf16 => Precision::Bf16,
                _ => Precision::F32,
            };
        }
    }

    /// Stores in `[train]` which lossy memory savings (rungs) a plan uses. From then on they belong to the experiment.
    /// The rungs `bf16` and `lora` also change `train.precision` and `train.method`.
    pub fn decide_rungs(&mut self, rungs: &[Rung]) {
        if rungs.contains(&Rung::Bf16) {
            self.train.precision = Precision::Bf16;
        }
        if rungs.contains(&Rung::Lora) {
            self.train.method = Method::Lora;
        }
        self.train.rungs = Some(rungs.to_vec());
    }

    /// Returns a warning if adapters are trained over a random model, because nothing saves that model; otherwise
    /// `None`.
    pub(crate) fn unsaved_base_warning(&self) -> Option<String> {
        let unsaved = self.train.method == Method::Lora && self.model.init == Init::Random;
        unsaved.then(|| {
            "adapters over random weights (model.init = \"random\"): only the adapters are saved, so that eval, generate and merge \
             will have no model for them; train.method = \"full\" saves all, or name a directory with weights"
                .to_owned()
        })
    }

    /// Returns the parsed `run.devices`. Words that stand for several devices, such as `auto` and `ray`, stay as they
    /// are.
    ///
    /// # Panics
    /// If `run.devices` cannot be parsed; loading a run file checks it.
    pub fn requested_devices(&self) -> DevicesRequest {
        self.run.devices.parse().expect("loading a run file checks run.devices")
    }

    /// Returns the folder for the scratch file: `memory.file_dir`, or else the run folder. `memory.file` decides
    /// whether there may be a scratch file.
    pub fn scratch_file_folder(&self) -> &Path {
        Path::new(self.memory.file_dir.as_ref().unwrap_or(&self.run.dir))
    }

    /// Returns the hub id, path or preset that names the model; empty text if none is set.
    pub fn model_name(&self) -> &str {
        let names = [&self.hub.model_name, &self.model.path, &self.model.preset];
        names.into_iter().find_map(Option::as_deref).unwrap_or_default()
    }
}
