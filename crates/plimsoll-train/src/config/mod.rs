//! The run file: every key of `run.toml` with its type and default, as plain data.
//!
//! `read` parses text and `--set` settings, `keys` lists each key with its expected value, `check` holds the rules between
//! keys, and `grid` expands the settings of a sweep. Nothing here looks at models, data or devices: `resolve` reports a path
//! that does not exist or an unknown preset.
//!
//! Steps to add a key: the field and its default here, a line in `keys`, a rule in `check` if it has a range, and a row in
//! `docs/run-file.md`. Two tests compare the list and the documentation with the structs.

mod check;
pub mod grid;
mod keys;
mod read;
#[cfg(test)]
mod tests;

pub use read::{RunConfigError, list_setting, model_setting, setting};

use plimsoll_core::{Budget, DType, DeviceKind, Parallelism, RecomputeLevel, Rung};
use plimsoll_plan::device_request::DevicesRequest;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Prefix of models and data that Plimsoll generates; such values are not paths.
pub const EXAMPLE_PREFIX: &str = "example:";

/// A run file in which every key has its value. It is plain data; see [`RunRequest`](crate::resolve::RunRequest) for a run with
/// connections to remote devices.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunConfig {
    /// The model.
    pub model: ModelSection,
    /// Training and evaluation data.
    pub data: DataSection,
    /// Length, optimizer and other settings of the experiment.
    pub train: TrainSection,
    /// Adapters, for `train.method = "lora"`.
    pub lora: LoraSection,
    /// Load lines and permitted lossy rungs.
    pub memory: MemorySection,
    /// Choices that the planner may not make.
    pub recipe: RecipeSection,
    /// Run folder and devices.
    pub run: RunSection,
}

/// `[model]`: exactly one of `path` and `preset` is set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// A Hugging Face directory, or its `config.json` alone. Absolute after [`RunConfig::load`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The name of a built-in model shape without weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// Source of the first weights. Default: pretrained for a path, random for a preset.
    pub init: Init,
    /// A PEFT directory with adapters of the model, which are trained further or used for evaluation. Absolute after
    /// [`RunConfig::load`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Keys of `config.json` that Plimsoll does not know and the user declares harmless.
    pub ignore_config_keys: Vec<String>,
}

/// Source of the first weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Init {
    /// The safetensors files of the model's directory.
    #[default]
    Pretrained,
    /// Random numbers from `train.seed`.
    Random,
}

/// `[data]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// Files or globs, `.jsonl` or `.txt`; or `example:sums`. Absolute after [`RunConfig::load`].
    #[serde(deserialize_with = "read::one_or_many")]
    pub train: Vec<String>,
    /// Evaluation data in the same notation.
    #[serde(deserialize_with = "read::one_or_many")]
    pub eval: Vec<String>,
    /// Format of a sample.
    pub format: Format,
    /// Tokens of one sequence (T).
    pub sequence: u32,
    /// Whether samples are packed back to back; otherwise each sequence holds one sample and padding.
    pub pack: bool,
    /// Handling of samples longer than `sequence`.
    pub long: LongSamples,
    /// Whether samples are shuffled, in a new order each epoch.
    pub shuffle: bool,
}

impl Default for DataSection {
    fn default() -> DataSection {
        DataSection {
            train: Vec::new(),
            eval: Vec::new(),
            format: Format::Text,
            sequence: 1024,
            pack: true,
            long: LongSamples::Split,
            shuffle: true,
        }
    }
}

/// Format of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// One JSON object with `text` per line, or plain text.
    Text,
    /// One JSON object with `input_ids` and optional `labels` per line.
    Tokens,
}

/// Handling of samples longer than a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LongSamples {
    /// The sample continues in the next sequence.
    Split,
    /// The run does not start.
    Refuse,
}

/// `[train]`: at most one of `steps`, `epochs` and `hours` is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TrainSection {
    /// Optimizer steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Passes over the training data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Hours of training time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hours: Option<f64>,
    /// Tokens of one optimizer step over the whole team, including padding; a multiple of `data.sequence`. Default: the
    /// largest such multiple up to 65536, at least one sequence.
    pub batch_tokens: u64,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The highest learning rate.
    pub learning_rate: f64,
    /// Learning rate after the warm-up.
    pub schedule: RateSchedule,
    /// Steps in which the learning rate rises from zero.
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
    /// Trained parameters: all, or adapters.
    pub method: Method,
    /// Lossy rungs that the run uses; `None` until they are decided.
    #[serde(deserialize_with = "read::decided_rungs", skip_serializing_if = "Option::is_none")]
    pub rungs: Option<Vec<Rung>>,
    /// Seed of weights, sample order and sampling.
    pub seed: u64,
    /// Steps between evaluations; 0 evaluates at the end only.
    pub eval_every: u64,
    /// Steps between checkpoints; 0 uses `save_every_minutes` only.
    pub save_every: u64,
    /// Minutes between checkpoints; 0 uses `save_every` only.
    pub save_every_minutes: f64,
    /// Number of newest checkpoints to keep.
    pub keep: u32,
}

impl Default for TrainSection {
    fn default() -> TrainSection {
        TrainSection {
            steps: None,
            epochs: None,
            hours: None,
            batch_tokens: 65536,
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

/// Length of a run.
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

/// Precision of the computation; part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Decided when the run first starts: bf16 on GPUs, f32 on processors.
    Auto,
    /// 32-bit floats.
    F32,
    /// Products of bfloat16 numbers with f32 accumulation.
    Bf16,
    /// 64-bit floats, on processors only, as a reference.
    F64,
}

/// Trained parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// Every parameter.
    Full,
    /// Low-rank adapters on a frozen base.
    Lora,
}

/// `[lora]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct LoraSection {
    /// Rank of an adapter.
    pub rank: u32,
    /// Scale of an adapter's output, which is multiplied by alpha / rank.
    pub alpha: f64,
    /// Dropout probability of an adapter's input.
    pub dropout: f64,
    /// Names of the matrices that get an adapter.
    #[serde(deserialize_with = "read::one_or_many")]
    pub targets: Vec<String>,
}

impl Default for LoraSection {
    fn default() -> LoraSection {
        let targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];
        LoraSection { rank: 16, alpha: 32.0, dropout: 0.0, targets: targets.map(str::to_owned).to_vec() }
    }
}

/// `[memory]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MemorySection {
    /// Load line of each device that has none of its own: a share of free memory, or an amount such as `6GiB`. See
    /// [`MemorySection::device_budget`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// Load line of the host's memory: a share or an amount.
    pub host: Budget,
    /// Largest size of the scratch file: a share of the free disk space, or an amount. `None` allows no scratch file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<Budget>,
    /// Folder of the scratch file. Default: the run folder. Absolute after [`RunConfig::load`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_dir: Option<String>,
    /// Lossy rungs that the planner may take.
    #[serde(deserialize_with = "read::rungs")]
    pub allow: Vec<Rung>,
}

impl MemorySection {
    /// Returns the load line of each device that has none of its own. Default: 90 % of free memory.
    pub fn device_budget(&self) -> Budget {
        self.budget.unwrap_or(Budget::DEVICE)
    }
}

impl Default for MemorySection {
    fn default() -> MemorySection {
        MemorySection { budget: None, host: Budget::HOST, file: None, file_dir: None, allow: Vec::new() }
    }
}

/// `[recipe]`: choices that the planner may not make.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecipeSection {
    /// Sequences in one forward and backward pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<u32>,
    /// Recompute level of each layer: one level for all layers, or one per layer. If empty, the planner chooses.
    #[serde(deserialize_with = "read::one_or_many")]
    pub recompute: Vec<RecomputeLevel>,
}

/// `[run]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunSection {
    /// The run folder. Absolute after [`RunConfig::load`].
    pub dir: String,
    /// The devices: `auto`, `cpu=6GiB`, `virtual:a=600MiB@1.0,virtual:b=200MiB@0.5`, `rtx3090`.
    pub devices: String,
    /// Number of computing threads.
    pub threads: Threads,
    /// Temperature in degrees Celsius at which a device pauses between two steps; `None` never pauses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_temperature: Option<f64>,
    /// Seconds without a heartbeat after which a device of a team is lost. A thread of its own sends heartbeats, so slow work
    /// does not count as a loss.
    pub heartbeat_seconds: f64,
    /// Device that takes over if no permitted recipe fits on an accelerator.
    pub fallback: FallbackTarget,
    /// Sharing of the run among several devices.
    pub parallelism: ParallelismChoice,
    /// Whether GPUs exchange by NCCL if all have the same version of it.
    pub nccl: bool,
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
        }
    }
}

/// Device that takes over if a run does not fit on an accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FallbackTarget {
    /// The processor, under the host's load line; the plan reports it.
    Cpu,
    /// No device: the run is refused.
    None,
}

/// Sharing of a run among several devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ParallelismChoice {
    /// The fastest way, on the devices that make the run faster or possible.
    #[default]
    Auto,
    /// Data parallel only.
    Data,
    /// Sharded (FSDP, ZeRO-3) only.
    Sharded,
    /// Pipeline parallel only.
    Pipeline,
    /// The fastest way that uses every device.
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

    /// Returns whether one of several devices may work alone.
    pub fn allows_single_device(self) -> bool {
        matches!(self, ParallelismChoice::Auto | ParallelismChoice::Data)
    }
}

/// Number of computing threads.
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
}

impl RunConfig {
    /// Returns the length of the run; `None` if the file sets none, which [`RunConfig::check_trainable`] rejects.
    pub fn length(&self) -> Option<Length> {
        let train = &self.train;
        train.steps.map(Length::Steps).or(train.epochs.map(Length::Epochs)).or(train.hours.map(Length::Hours))
    }

    /// Returns the number of sequences of one optimizer step over the whole team.
    pub fn batch_sequences(&self) -> u64 {
        self.train.batch_tokens / u64::from(self.data.sequence)
    }

    /// Returns the element type of the computation on a kind of device. With `auto`, bf16 on GPUs and f32 on processors.
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

    /// Replaces `precision = "auto"` by the precision on this kind of device. The precision belongs to the experiment and is
    /// decided once.
    pub fn decide_precision(&mut self, on: DeviceKind) {
        if self.train.precision == Precision::Auto {
            self.train.precision = match self.arithmetic(on) {
                DType::Bf16 => Precision::Bf16,
                _ => Precision::F32,
            };
        }
    }

    /// Stores the lossy rungs of a plan. From now on they belong to the experiment.
    pub fn decide_rungs(&mut self, rungs: &[Rung]) {
        if rungs.contains(&Rung::Bf16) {
            self.train.precision = Precision::Bf16;
        }
        if rungs.contains(&Rung::Lora) {
            self.train.method = Method::Lora;
        }
        self.train.rungs = Some(rungs.to_vec());
    }

    /// Returns a warning if adapters are trained over a random model, because nothing saves that model.
    pub(crate) fn unsaved_base_warning(&self) -> Option<String> {
        let unsaved = self.train.method == Method::Lora && self.model.init == Init::Random;
        unsaved.then(|| {
            "adapters over random weights (model.init = \"random\"): only the adapters are saved, so that eval, generate and merge \
             will have no model for them; train.method = \"full\" saves all, or name a directory with weights"
                .to_owned()
        })
    }

    /// Returns the devices that `run.devices` names, with `ray` and other cluster words as they are written.
    ///
    /// # Panics
    /// If `run.devices` cannot be parsed; loading a run file checks it.
    pub fn requested_devices(&self) -> DevicesRequest {
        self.run.devices.parse().expect("loading a run file checks run.devices")
    }

    /// Returns the folder of the scratch file, whether or not there may be a scratch file.
    pub fn scratch_file_folder(&self) -> &Path {
        Path::new(self.memory.file_dir.as_ref().unwrap_or(&self.run.dir))
    }

    /// Returns the model as the user named it: its path or its preset.
    pub fn model_name(&self) -> &str {
        self.model.path.as_deref().or(self.model.preset.as_deref()).unwrap_or_default()
    }
}
