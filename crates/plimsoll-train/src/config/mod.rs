//! The run file: every key of `run.toml`, its type and its default.
//!
//! Here is what a run file says; `read` turns text and `--set` into it, `keys` lists each key with
//! what it expects, `check` holds the rules between keys. Nothing here looks at models, data or
//! devices: whether a path exists or a preset is known is the business of who opens it.

mod check;
pub mod grid;
mod keys;
mod moved;
mod read;
#[cfg(test)]
mod tests;

pub use read::{RunFileError, list_setting, model_setting, setting};

use crate::remote::Elsewhere;
use plimsoll_core::{Budget, DType, DeviceKind, RecomputeLevel, Rung};
use plimsoll_plan::request::{DeviceRequest, DevicesRequest};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Models and data that start with this are made by Plimsoll itself; they are no paths.
pub const EXAMPLE_PREFIX: &str = "example:";

/// A run file, resolved: every key has its value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunFile {
    /// What is trained.
    pub model: ModelSection,
    /// What it is trained on.
    pub data: DataSection,
    /// How it is trained.
    pub train: TrainSection,
    /// Adapters, for `train.method = "lora"`.
    pub lora: LoraSection,
    /// Load lines and permissions.
    pub memory: MemorySection,
    /// Pins of the planner's choices.
    pub recipe: RecipeSection,
    /// Where it runs.
    pub run: RunSection,
    /// How devices on other hosts are reached: no key, whoever starts the run brings it.
    #[serde(skip)]
    pub elsewhere: Elsewhere,
    /// Load lines of devices that were moved while the run was under way: no key, they stand in a file of their own.
    #[serde(skip)]
    pub moved: BTreeMap<String, Budget>,
}

/// `[model]`: exactly one of `path` and `preset` is set.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ModelSection {
    /// A Hugging Face directory, or its `config.json` alone. Absolute after [`RunFile::load`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The name of a known shape without weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// Where the first weights come from. Default: pretrained for a path, random for a preset.
    pub init: Init,
    /// A PEFT directory with adapters of the model: trained on, or computed with. Absolute after [`RunFile::load`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    /// Keys of `config.json` that are unknown to Plimsoll and harmless, as the user says.
    pub ignore_config_keys: Vec<String>,
}

/// Where the first weights come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Init {
    /// From the directory's safetensors.
    #[default]
    Pretrained,
    /// Drawn from `train.seed`.
    Random,
}

/// `[data]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DataSection {
    /// Files or globs, `.jsonl` or `.txt`; or `example:sums`. Absolute after [`RunFile::load`].
    #[serde(deserialize_with = "read::one_or_many")]
    pub train: Vec<String>,
    /// The same, for evaluation.
    #[serde(deserialize_with = "read::one_or_many")]
    pub eval: Vec<String>,
    /// What a sample looks like.
    pub format: Format,
    /// Tokens of one sequence.
    pub sequence: u32,
    /// Documents back to back (else one sample a sequence, padded).
    pub pack: bool,
    /// What happens to a sample longer than `sequence`.
    pub long: Long,
    /// Whether the order of samples is drawn from the seed, anew each epoch.
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
            long: Long::Split,
            shuffle: true,
        }
    }
}

/// What a sample looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// `{"text"}` a line, or plain text.
    Text,
    /// `{"input_ids", "labels"?}` a line.
    Tokens,
}

/// What happens to a sample longer than a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Long {
    /// It goes on in the next sequence.
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
    /// Passes over the data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epochs: Option<f64>,
    /// Hours of training time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hours: Option<f64>,
    /// Tokens of one optimizer step over the whole team, padding counted; a multiple of
    /// `data.sequence`. Default: the largest such multiple up to 65536, at least one sequence.
    pub batch_tokens: u64,
    /// The optimizer.
    pub optimizer: Optimizer,
    /// The highest rate.
    pub learning_rate: f64,
    /// How the rate falls after the warm-up.
    pub schedule: RateSchedule,
    /// Steps in which the rate rises from zero.
    pub warmup_steps: u64,
    /// Decoupled decay, on matrices only.
    pub weight_decay: f64,
    /// AdamW's averages of gradient and square; SGD takes the first as its momentum.
    pub betas: [f64; 2],
    /// AdamW's epsilon.
    pub eps: f64,
    /// The global gradient norm is clipped to this; 0 clips nothing.
    pub clip_norm: f64,
    /// The arithmetic.
    pub precision: Precision,
    /// What is trained.
    pub method: Method,
    /// The lossy rungs that the run takes; none: they have not been decided.
    #[serde(deserialize_with = "read::decided_rungs", skip_serializing_if = "Option::is_none")]
    pub rungs: Option<Vec<Rung>>,
    /// Seed of weights, order and sampling.
    pub seed: u64,
    /// Steps between evaluations; 0 evaluates at the end only.
    pub eval_every: u64,
    /// Steps between checkpoints; 0 leaves it to the minutes.
    pub save_every: u64,
    /// Minutes between checkpoints; 0 leaves it to the steps.
    pub save_every_minutes: f64,
    /// Checkpoints that are kept.
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

/// How long a run is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    /// Optimizer steps.
    Steps(u64),
    /// Passes over the data.
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

/// How the rate falls after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RateSchedule {
    /// Not at all.
    Constant,
    /// In a line to zero.
    Linear,
    /// Along half a cosine to zero.
    Cosine,
}

/// The arithmetic of a run; part of the experiment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Resolved once, at the first start.
    Auto,
    /// 32-bit floats.
    F32,
    /// bfloat16 products with f32 sums.
    Bf16,
    /// 64-bit floats, on processors: to compare runs with each other.
    F64,
}

/// What is trained.
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
    /// The adapter's product is scaled by alpha / rank.
    pub alpha: f64,
    /// Share of the adapter's input that is dropped.
    pub dropout: f64,
    /// The matrices that get an adapter.
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
    /// The load line of each device that has none of its own: a share of what is free, or `6GiB`; see [`MemorySection::line`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget: Option<Budget>,
    /// The load line of the host, in the same words.
    pub host: Budget,
    /// The most that the scratch file may hold, in the same words; without it there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<Budget>,
    /// The folder that the scratch file is in; the run folder where it is not said. Absolute after [`RunFile::load`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file_dir: Option<String>,
    /// Lossy rungs that the planner may take.
    #[serde(deserialize_with = "read::rungs")]
    pub allow: Vec<Rung>,
}

impl MemorySection {
    /// The load line of each device that has none of its own: without a word, 90 % of what is free.
    pub fn line(&self) -> Budget {
        self.budget.unwrap_or(Budget::DEVICE)
    }
}

impl Default for MemorySection {
    fn default() -> MemorySection {
        MemorySection { budget: None, host: Budget::HOST, file: None, file_dir: None, allow: Vec::new() }
    }
}

/// `[recipe]`: choices taken out of the planner's hands.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RecipeSection {
    /// Sequences in one forward and backward pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch: Option<u32>,
    /// What each layer computes again: one level for all layers, or one a layer; empty leaves it to
    /// the planner.
    #[serde(deserialize_with = "read::one_or_many")]
    pub recompute: Vec<RecomputeLevel>,
}

/// `[run]`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RunSection {
    /// The run folder. Absolute after [`RunFile::load`].
    pub dir: String,
    /// The devices: `auto`, `cpu=6GiB`, `virtual:a=600MiB@1.0,virtual:b=200MiB@0.5`, `rtx3090`.
    pub devices: String,
    /// Threads that compute.
    pub threads: Threads,
    /// A device that is as warm as that, in degrees Celsius, rests between two steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_temperature: Option<f64>,
    /// A device of a team that gives no sign of life for so long is lost, however long its work takes.
    pub heartbeat_seconds: f64,
    /// What does the work where a device cannot hold it by any rung that may be taken.
    pub fallback: FallbackTo,
    /// Which of several devices work on the run.
    pub team: TeamOf,
    /// Whether GPUs that all have the same NCCL exchange by it.
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
            fallback: FallbackTo::Cpu,
            team: TeamOf::Auto,
            nccl: true,
        }
    }
}

/// What does the work of a device that cannot hold it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FallbackTo {
    /// The processor, under the host's load line: slowly, and it says so.
    Cpu,
    /// Nothing: the run is refused.
    None,
}

/// Which of several devices work on a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TeamOf {
    /// Those that make it faster, or possible.
    #[default]
    Auto,
    /// All of them, whatever it costs.
    All,
}

/// Threads that compute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "read::WordOrNumber", into = "read::WordOrNumber")]
pub enum Threads {
    /// 80 % of the physical cores, at least one: the machine stays usable.
    #[default]
    Auto,
    /// So many.
    Count(u32),
}

impl Threads {
    /// The number that the user asked for.
    pub fn asked(self) -> Option<u32> {
        match self {
            Threads::Auto => None,
            Threads::Count(count) => Some(count),
        }
    }
}

impl RunFile {
    /// How long the run is; `None` where the file does not say, which [`RunFile::check_trainable`]
    /// refuses.
    pub fn length(&self) -> Option<Length> {
        let train = &self.train;
        train.steps.map(Length::Steps).or(train.epochs.map(Length::Epochs)).or(train.hours.map(Length::Hours))
    }

    /// Sequences of one optimizer step over the whole team.
    pub fn batch_sequences(&self) -> u64 {
        self.train.batch_tokens / u64::from(self.data.sequence)
    }

    /// The element type of the arithmetic on a kind of device: bf16 on GPUs, f32 on the processor, where it is left open.
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

    /// Writes down what `precision = "auto"` means: it belongs to the experiment and is decided once.
    pub fn decide_precision(&mut self, on: DeviceKind) {
        if self.train.precision == Precision::Auto {
            self.train.precision = match self.arithmetic(on) {
                DType::Bf16 => Precision::Bf16,
                _ => Precision::F32,
            };
        }
    }

    /// Writes down the lossy rungs that a plan takes: from now on they belong to the experiment.
    pub fn decide_rungs(&mut self, rungs: &[Rung]) {
        if rungs.contains(&Rung::Bf16) {
            self.train.precision = Precision::Bf16;
        }
        if rungs.contains(&Rung::Lora) {
            self.train.method = Method::Lora;
        }
        self.train.rungs = Some(rungs.to_vec());
    }

    /// What is said of adapters over a model that is drawn at random: nothing keeps the model.
    pub(crate) fn lost_base(&self) -> Option<String> {
        let lost = self.train.method == Method::Lora && self.model.init == Init::Random;
        lost.then(|| {
            "adapters over random weights (model.init = \"random\"): only the adapters are saved, so that eval, generate and merge \
             will have no model for them; train.method = \"full\" saves all, or name a directory with weights"
                .to_owned()
        })
    }

    /// The devices asked for: of a cluster, what those have turned out to be.
    pub fn devices(&self) -> DevicesRequest {
        let asked = || self.run.devices.parse().expect("a loaded run file has devices that can be read");
        self.elsewhere.devices().cloned().unwrap_or_else(asked)
    }

    /// The load line of a device: its own where it was named with one, else that of all.
    pub fn budget_of(&self, device: &str) -> Budget {
        let own = self
            .devices()
            .devices
            .into_iter()
            .find(|asked| {
                let any_gpu = matches!(asked, DeviceRequest::Cuda { index: None, .. }) && device.starts_with("cuda:");
                any_gpu || asked.name() == device
            })
            .and_then(|asked| asked.budget());
        own.unwrap_or(self.memory.line())
    }

    /// What is said of a load line that no device goes by, since each has an amount of its own.
    pub fn idle_budget(&self) -> Option<String> {
        let devices = self.devices();
        let own = |asked: &DeviceRequest| asked.budget().is_some();
        // Those of a cluster have an amount of it by now.
        let all_own = !devices.devices.is_empty() && devices.devices.iter().all(own) && !devices.elsewhere();
        let budget = self.memory.budget.filter(|budget| all_own && *budget != Budget::DEVICE)?;
        Some(format!("memory.budget = {budget} holds no device: run.devices gives each an amount of its own"))
    }

    /// The load line of the host.
    pub fn host(&self) -> Budget {
        self.devices().host.unwrap_or(self.memory.host)
    }

    /// What the scratch file may hold, where there may be one.
    pub fn file(&self) -> Option<Budget> {
        self.devices().file.or(self.memory.file)
    }

    /// The folder that the scratch file is in.
    pub fn file_folder(&self) -> &Path {
        Path::new(self.memory.file_dir.as_ref().unwrap_or(&self.run.dir))
    }

    /// The same, where there may be a scratch file.
    pub fn scratch(&self) -> Option<&Path> {
        self.file().map(|_| self.file_folder())
    }

    /// The model as the user named it: its path or its preset.
    pub fn model_name(&self) -> &str {
        self.model.path.as_deref().or(self.model.preset.as_deref()).unwrap_or_default()
    }
}
