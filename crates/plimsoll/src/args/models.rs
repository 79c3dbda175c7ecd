//! Arguments of `models`, which lists the models that fit, and of `init`, which writes a run file.

use super::SettingArgs;
use super::values::{duration, speed};
use clap::Args;
use plimsoll_watch::model_list::USEFUL_TOKENS_PER_SECOND;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of `plimsoll models`, which lists the models that can be trained on some devices.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  plimsoll models
  plimsoll models --devices rtx3090,host=64GiB --allow int8,nf4
  plimsoll models --dir ~/models --json | jq -r '.models[] | select(.fit == \"fits\") | .model'

Each model is planned in full and with LoRA, and with each rung of --allow. The
list has all presets, the models in --dir, and those in the cache of Hugging
Face. Nothing is downloaded. Models that fit at a useful speed come first, the
largest of them at the top.")]
pub struct ModelsArgs {
    /// Folder with models: the folder itself, and each folder in it that has a config.json (repeatable)
    #[arg(long, value_name = "DIR")]
    pub dir: Vec<PathBuf>,
    #[command(flatten)]
    pub settings: SettingArgs,
    /// Tokens per sequence
    #[arg(long, value_name = "TOKENS")]
    pub sequence: Option<u32>,
    /// Tokens per optimizer step, a multiple of the sequence length
    #[arg(long, value_name = "TOKENS")]
    pub batch_tokens: Option<u64>,
    /// Tokens per second from which on a larger model ranks before a faster one
    #[arg(long, value_name = "TOKENS", default_value_t = USEFUL_TOKENS_PER_SECOND, value_parser = speed)]
    pub useful_speed: f64,
    /// Longest time to plan; models that are not planned by then are listed as such
    #[arg(long, value_name = "DURATION", default_value = "3min", value_parser = duration)]
    pub time: Duration,
    /// Print the list as JSON
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

impl ModelsArgs {
    /// Returns the flags as `KEY=VALUE` settings of the run file, without a model.
    pub fn settings(&self) -> Vec<String> {
        let sequence = self.sequence.map(|sequence| format!("data.sequence={sequence}"));
        let batch_tokens = self.batch_tokens.map(|tokens| format!("train.batch_tokens={tokens}"));
        sequence.into_iter().chain(batch_tokens).chain(self.settings.settings()).collect()
    }
}

/// Arguments of `plimsoll init`, which writes a run file.
#[derive(Clone, Debug, Args)]
#[command(after_help = "\
Examples:
  plimsoll init
  plimsoll init --yes --model qwen2.5-0.5b --data 'data/*.jsonl' --out run.toml

A question whose flag is given is not asked. With --yes none is asked. The file
is written last, after its plan is shown.")]
pub struct InitArgs {
    /// Ask nothing: take the flags, and defaults for the rest; --model and --data are then required
    #[arg(long, short = 'y', requires_all = ["model", "data"])]
    pub yes: bool,
    /// Model: a Hugging Face directory, a config.json, a preset such as qwen2.5-0.5b, or a size such as 7b
    #[arg(long, value_name = "DIR|config.json|PRESET")]
    pub model: Option<String>,
    /// Folder with models to suggest if no --model is given: the folder itself, and each folder in it (repeatable)
    #[arg(long, value_name = "DIR", conflicts_with = "model")]
    pub dir: Vec<PathBuf>,
    /// Training data: a file, or a glob such as 'data/*.jsonl' (repeatable)
    #[arg(long, value_name = "FILE")]
    pub data: Vec<String>,
    /// Devices of the run, in the notation of `plimsoll train --help` [default: auto]
    #[arg(long, help_heading = "Devices and memory")]
    pub devices: Option<String>,
    /// Memory limit of each device, an amount (6GiB) or a share of the free memory (90%) [default: 90%]
    #[arg(long, value_name = "SIZE|SHARE", help_heading = "Devices and memory")]
    pub budget: Option<String>,
    /// Lossy memory savings that the planner may use if nothing else fits: bf16, adam8bit, lora, int8, nf4
    #[arg(long, value_name = "RUNGS", help_heading = "Devices and memory")]
    pub allow: Option<String>,
    /// Host memory for offload, an amount or a share of the free memory; 1B allows none [default: 80%]
    #[arg(long, value_name = "SIZE|SHARE", help_heading = "Devices and memory")]
    pub host: Option<String>,
    /// Train all parameters (full) or LoRA adapters (lora) [default: full]
    #[arg(long, value_name = "METHOD", value_parser = ["full", "lora"])]
    pub method: Option<String>,
    /// Tokens per sequence [default: 1024, or fewer if the model takes fewer]
    #[arg(long, value_name = "TOKENS")]
    pub sequence: Option<u32>,
    /// Tokens per optimizer step, a multiple of the sequence length [default: the largest up to 65536]
    #[arg(long, value_name = "TOKENS")]
    pub batch_tokens: Option<u64>,
    /// Optimizer steps [default: one pass over the data]
    #[arg(long, value_name = "COUNT", value_parser = super::values::positive())]
    pub steps: Option<u32>,
    /// Folder of the run [default: runs/ and the name of the model]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<String>,
    /// The run file to write [default: run.toml]
    #[arg(long, short, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Replace an existing run file
    #[arg(long)]
    pub force: bool,
}
