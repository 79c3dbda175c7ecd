//! Arguments of `eval` and `export`, and those that `eval` shares with `generate`.

use super::values::{file_type, positive, pre_tokenizer};
use clap::{ArgGroup, Args};
use plimsoll_core::{Bytes, Failure};
use plimsoll_train::config::{RunConfig, list_setting, setting};
use plimsoll_train::gguf::FileType;
use plimsoll_train::resolve::RunRequest;
use plimsoll_watch::plan::list_rungs;
use std::path::{Path, PathBuf};

/// Arguments of `plimsoll eval`, which evaluates a model on data.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll eval runs/sums/model --data runs/sums/example/eval.jsonl --format tokens")]
pub struct EvalArgs {
    /// Model: a Hugging Face directory, a GGUF file, or a hub id such as hub:OWNER/NAME
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Data: a file, or a glob pattern
    #[arg(long, value_name = "FILE")]
    data: String,
    /// Format of the records: auto (the default), text, tokens or another value of data.format
    #[arg(long)]
    format: Option<String>,
    /// Chat template of conversations: a file, or the name of a built-in one [default: that of the model]
    #[arg(long, value_name = "NAME|FILE")]
    template: Option<String>,
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
        settings.extend(self.inference.template(self.template.as_ref()).map(|file| setting("data.template", &file)));
        reject_training_rungs(RunConfig::from_settings(&settings)?)
    }
}

/// Arguments of `plimsoll export`, which writes a model for other programs.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  plimsoll export runs/my-llama --gguf my-llama.gguf --type q4_k_m --modelfile Modelfile
  plimsoll export hub:Qwen/Qwen2.5-0.5B --adapter runs/chat/adapter --gguf chat.gguf --type q8_0
  plimsoll export runs/chat --merged chat-model --type bf16")]
#[command(group(ArgGroup::new("output").required(true).args(["gguf", "merged"])))]
pub struct ExportArgs {
    /// Model: a run folder, a Hugging Face directory, a GGUF file, a hub id, or a PEFT directory that names its base model
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,
    /// Write a GGUF file for llama.cpp and Ollama, which must not exist yet
    #[arg(long, value_name = "FILE", requires = "file_type")]
    pub gguf: Option<PathBuf>,
    /// Write a Hugging Face directory, which must not exist yet
    #[arg(long, value_name = "DIR")]
    pub merged: Option<PathBuf>,
    /// Type of the weights. GGUF: f32, bf16, f16, q8_0, q6_k, q5_k_m, q4_k_m, q4_0. Directory: f32, bf16 or f16
    /// [default of a directory: the types of the model]
    #[arg(long = "type", value_name = "TYPE", value_parser = file_type)]
    pub file_type: Option<FileType>,
    /// Merge these LoRA adapters into the model: a PEFT directory
    #[arg(long, value_name = "DIR")]
    pub adapter: Option<PathBuf>,
    /// Largest size of a file of weights in the directory [default: 5 GB]
    #[arg(long, value_name = "SIZE", requires = "merged", conflicts_with = "gguf")]
    pub shard_size: Option<Bytes>,
    /// Also write a Modelfile for `ollama create`, which must not exist yet
    #[arg(long, value_name = "FILE", requires = "gguf", conflicts_with = "merged")]
    pub modelfile: Option<PathBuf>,
    /// Name of the pre-tokenizer in llama.cpp, if it is not recognized
    #[arg(long, value_name = "NAME", value_parser = pre_tokenizer, requires = "gguf", conflicts_with = "merged")]
    pub pre: Option<String>,
    /// Ignore a key of the model's config.json that Plimsoll does not know (repeatable)
    #[arg(long, value_name = "KEY")]
    pub ignore_config_key: Vec<String>,
    /// Show no progress and no notes
    #[arg(long, help_heading = "Output")]
    pub quiet: bool,
    /// Print the result as JSON
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// Flags of `eval` and `generate` for the device and the form of the model.
#[derive(Debug, Args)]
pub(super) struct InferenceArgs {
    /// Apply these LoRA adapters to the model: a PEFT directory
    #[arg(long, value_name = "DIR")]
    pub(super) adapter: Option<PathBuf>,
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
    /// Returns the chat template `given`, a file or the name of a built-in one, or else the path of `chat_template.jinja` in
    /// the adapter's folder. `None` if there is neither.
    pub fn template(&self, given: Option<&String>) -> Option<String> {
        let beside = self.adapter.as_ref().map(|adapter| adapter.join("chat_template.jinja"));
        let beside = beside.filter(|file| file.is_file()).map(|file| file.to_string_lossy().into_owned());
        given.cloned().or(beside)
    }

    /// Returns the model and the flags as `KEY=VALUE` settings of the run file.
    pub fn settings(&self, model: &Path) -> Vec<String> {
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
pub(super) fn reject_training_rungs(config: RunConfig) -> Result<RunRequest, Failure> {
    let Some(rung) = config.memory.allow.iter().find(|rung| rung.is_training_only()) else { return Ok(config.into()) };
    let names = list_rungs(|rung| !rung.is_training_only());
    let failure = Failure::input(format!("--allow {rung}: this rung only applies to training"));
    Err(failure.hint(format!("allowed here: {names}")))
}
