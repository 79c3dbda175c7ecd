//! Arguments of `eval`, `generate` and `merge`.

use super::values::{positive, share, temperature};
use clap::Args;
use plimsoll_core::Failure;
use plimsoll_train::config::{RunConfig, list_setting, setting};
use plimsoll_train::resolve::RunRequest;
use plimsoll_watch::plan::list_rungs;
use std::path::{Path, PathBuf};

/// Arguments of `plimsoll eval`, which evaluates a model on data.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll eval runs/sums/model --data runs/sums/example/eval.jsonl --format tokens")]
pub struct EvalArgs {
    /// Model: a Hugging Face directory
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Data: a .jsonl or .txt file, or a glob pattern
    #[arg(long, value_name = "FILE")]
    data: String,
    /// Format of a sample: text or tokens
    #[arg(long)]
    format: Option<String>,
    /// Tokens per sequence; longer samples are split [default: the length of the longest sample]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..1 << 24))]
    pub sequence: Option<u32>,
    #[command(flatten)]
    inference: InferenceArgs,
    /// Print loss, perplexity and number of tokens as JSON
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

impl EvalArgs {
    /// Builds the request to evaluate the model. The key `data.eval` of the request names the data.
    ///
    /// # Errors
    /// An invalid setting, or a rung in `--allow` that only applies to training.
    pub fn build_request(&self) -> Result<RunRequest, Failure> {
        let mut settings = self.inference.settings(&self.dir);
        settings.push(setting("data.eval", &self.data));
        settings.extend(self.format.as_ref().map(|format| setting("data.format", format)));
        reject_training_rungs(RunConfig::from_settings(&settings)?)
    }
}

/// Arguments of `plimsoll generate`, which continues a prompt.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll generate models/my-llama --prompt \"Once upon a time\" --max-tokens 50")]
pub struct GenerateArgs {
    /// Model: a Hugging Face directory
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Text to continue
    #[arg(long, value_name = "TEXT")]
    pub prompt: String,
    /// Maximum number of new tokens [default: 64, or fewer if the model has no room for them]
    #[arg(long, value_name = "TOKENS", value_parser = positive())]
    pub max_tokens: Option<u32>,
    /// Sampling temperature; 0 always takes the most likely token
    #[arg(long, default_value_t = 0.0, value_parser = temperature, help_heading = "Sampling")]
    pub temperature: f32,
    /// Sample only from the K most likely tokens
    #[arg(long, value_name = "K", value_parser = positive(), help_heading = "Sampling")]
    pub top_k: Option<u32>,
    /// Sample only from the most likely tokens with a total probability of P (above 0, at most 1)
    #[arg(long, value_name = "P", value_parser = share, help_heading = "Sampling")]
    pub top_p: Option<f32>,
    /// Seed of the sampling
    #[arg(long, default_value_t = 1, help_heading = "Sampling")]
    pub seed: u64,
    #[command(flatten)]
    inference: InferenceArgs,
    /// Print the text and its tokens as JSON
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

impl GenerateArgs {
    /// Builds the request to generate text with the model.
    ///
    /// # Errors
    /// An invalid setting, or a rung in `--allow` that only applies to training.
    pub fn build_request(&self) -> Result<RunRequest, Failure> {
        reject_training_rungs(RunConfig::from_settings(&self.inference.settings(&self.dir))?)
    }
}

/// Arguments of `plimsoll merge`, which merges an adapter into its base model.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll merge models/my-llama runs/my-llama/adapter models/my-llama-tuned")]
pub struct MergeArgs {
    /// Base model: a Hugging Face directory
    #[arg(value_name = "BASE")]
    pub base: PathBuf,
    /// LoRA adapters of the base model: a PEFT directory
    #[arg(value_name = "ADAPTER")]
    pub adapter: PathBuf,
    /// Folder of the merged model, which must not exist yet
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Ignore a key of the model's config.json that Plimsoll does not know (repeatable)
    #[arg(long, value_name = "KEY")]
    pub ignore_config_key: Vec<String>,
}

/// Flags of `eval` and `generate` for the device and the form of the model.
#[derive(Debug, Args)]
struct InferenceArgs {
    /// Apply these LoRA adapters to the model: a PEFT directory
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    /// Device, for example cpu or cuda:0
    #[arg(long, help_heading = "Devices and memory")]
    devices: Option<String>,
    /// Memory limit of the device, an amount (6GiB) or a share of the free memory (90%) [default: 90%]
    #[arg(long, value_name = "SIZE|SHARE", help_heading = "Devices and memory")]
    budget: Option<String>,
    /// Lossy memory savings that may be used if the model does not fit: bf16, int8, nf4 (separated by commas)
    #[arg(long, value_name = "RUNGS", help_heading = "Devices and memory")]
    allow: Option<String>,
    /// CPU threads
    #[arg(long, value_parser = positive(), help_heading = "Devices and memory")]
    threads: Option<u32>,
    /// Ignore a key of the model's config.json that Plimsoll does not know (repeatable)
    #[arg(long, value_name = "KEY")]
    ignore_config_key: Vec<String>,
}

impl InferenceArgs {
    /// Returns the model and the flags as `KEY=VALUE` settings of the run file.
    fn settings(&self, model: &Path) -> Vec<String> {
        let mut settings = vec![setting("model.path", &model.to_string_lossy())];
        settings.extend(self.adapter.as_ref().map(|adapter| setting("model.adapter", &adapter.to_string_lossy())));
        settings.extend(self.allow.as_ref().map(|allow| setting("memory.allow", allow)));
        settings.extend(self.devices.as_ref().map(|devices| setting("run.devices", devices)));
        settings.extend(self.budget.as_ref().map(|budget| setting("memory.budget", budget)));
        settings.extend(self.threads.map(|threads| format!("run.threads={threads}")));
        if !self.ignore_config_key.is_empty() {
            settings.push(list_setting("model.ignore_config_keys", &self.ignore_config_key));
        }
        settings
    }
}

/// Converts a configuration to a request. Rejects rungs of `--allow` that only affect training.
fn reject_training_rungs(config: RunConfig) -> Result<RunRequest, Failure> {
    let Some(rung) = config.memory.allow.iter().find(|rung| rung.is_training_only()) else { return Ok(config.into()) };
    let names = list_rungs(|rung| !rung.is_training_only());
    let failure = Failure::input(format!("--allow {rung}: this rung only applies to training"));
    Err(failure.hint(format!("allowed here: {names}")))
}
