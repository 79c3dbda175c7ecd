//! Arguments of `bench devices`, `bench step` and `bench models`.

use super::SettingArgs;
use super::values::{duration, positive};
use clap::Args;
use plimsoll_core::{Bytes, Failure};
use plimsoll_train::config::{RunConfig, model_setting, setting};
use plimsoll_train::resolve::RunRequest;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Arguments of `plimsoll bench devices`, which measures the devices of this machine.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll bench devices --duration 3m --json rates.json")]
pub struct BenchDevicesArgs {
    /// Total time to measure, for example 30s or 3m
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub duration: Duration,
    /// Also write the rates to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Arguments of `plimsoll bench step`, which times a training step. They are those of `peers/torch_step.py`, the
/// PyTorch script for comparison.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  plimsoll bench step --threads 2 --sequence 512 --batch 4")]
pub struct BenchStepArgs {
    /// Vocabulary size
    #[arg(long, default_value_t = 8192, value_parser = positive(), help_heading = "Model")]
    pub vocab: u32,
    /// Number of transformer layers
    #[arg(long, default_value_t = 6, value_parser = positive(), help_heading = "Model")]
    pub layers: u32,
    /// Hidden size
    #[arg(long, default_value_t = 384, value_parser = positive(), help_heading = "Model")]
    pub hidden: u32,
    /// Attention heads
    #[arg(long, default_value_t = 6, value_parser = positive(), help_heading = "Model")]
    pub heads: u32,
    /// Key/value heads; fewer than --heads gives grouped-query attention
    #[arg(long, default_value_t = 6, value_parser = positive(), help_heading = "Model")]
    pub kv_heads: u32,
    /// Feed-forward (intermediate) size
    #[arg(long, default_value_t = 1024, value_parser = positive(), help_heading = "Model")]
    pub ffn: u32,
    /// Tokens per sequence
    #[arg(long, default_value_t = 256, value_parser = positive(), help_heading = "Batch")]
    pub sequence: u32,
    /// Sequences per micro-batch
    #[arg(long, default_value_t = 8, value_parser = positive(), help_heading = "Batch")]
    pub batch: u32,
    /// Gradient accumulation: micro-batches per optimizer step
    #[arg(long, default_value_t = 1, value_parser = positive(), help_heading = "Batch")]
    pub accumulate: u32,
    /// Timed steps
    #[arg(long, default_value_t = 10, value_parser = positive(), help_heading = "Measurement")]
    pub steps: u32,
    /// Steps before the timed ones
    #[arg(long, default_value_t = 4, help_heading = "Measurement")]
    pub warmup: u32,
    /// Device: cpu or cuda:0
    #[arg(long, default_value = "cpu", help_heading = "Measurement")]
    pub device: String,
    /// CPU threads, at most as many as the machine has [default: 2, or 1 if there is only one]
    #[arg(long, value_parser = positive(), help_heading = "Measurement")]
    pub threads: Option<u32>,
    /// Arithmetic: f32 or bf16
    #[arg(long, default_value = "f32", value_parser = ["f32", "bf16"], help_heading = "Training")]
    pub dtype: String,
    /// Activation checkpointing: keep only the input of each block and recompute the rest in the backward pass
    #[arg(long, help_heading = "Training")]
    pub checkpoint: bool,
    /// Memory limit of the arena; the planner chooses the fastest recipe within it that changes no result
    #[arg(long, value_name = "SIZE", conflicts_with = "checkpoint", help_heading = "Training")]
    pub memory: Option<Bytes>,
    /// Training method: full (all weights) or lora (LoRA adapters on every projection)
    #[arg(long, default_value = "full", value_parser = ["full", "lora"], help_heading = "Training")]
    pub method: String,
    /// LoRA rank; alpha is twice the rank
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1 << 18), help_heading = "Training")]
    pub rank: u32,
    /// Storage of the frozen base weights with --method lora: plain (not quantized), int8 or nf4
    #[arg(long, default_value = "plain", value_parser = ["plain", "int8", "nf4"], help_heading = "Training")]
    pub base: String,
}

/// Arguments of `plimsoll bench models`, which plans models and trains those that fit.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  plimsoll bench models 7b 11b 13b --devices cuda:0 --allow nf4,lora --json models.json"
)]
pub struct BenchModelsArgs {
    /// Models: sizes (7b, 11b, 13b), presets, Hugging Face directories or config.json files
    #[arg(required = true, value_name = "MODEL")]
    pub models: Vec<String>,
    /// Sequences that each model trains on
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u64).range(1..1 << 32))]
    pub samples: u64,
    /// Tokens per sequence
    #[arg(long, value_name = "TOKENS", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(2..=1 << 24))]
    pub sequence: u32,
    #[command(flatten)]
    settings: SettingArgs,
    /// Also write the rows of the table to this file as JSON
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
}

impl BenchModelsArgs {
    /// Builds the request of one model: random weights, one epoch over the file `data`, with about 65536 tokens per
    /// step. The `KEY=VALUE` settings in `more` override those of the flags.
    ///
    /// # Errors
    /// An invalid setting.
    pub fn build_request(
        &self,
        model: &str,
        data: &Path,
        run_dir: &Path,
        more: &[String],
    ) -> Result<RunRequest, Failure> {
        const STEP_TOKENS: u64 = 65536;
        const MAX_TOKENS: u64 = 1 << 31;
        let sequence = u64::from(self.sequence);
        if self.samples * sequence > MAX_TOKENS {
            let message = format!("--samples: {} × {sequence} tokens are more than {MAX_TOKENS}", self.samples);
            return Err(Failure::input(message).hint("give fewer or shorter samples, such as --samples 1000"));
        }
        let batch_sequences = (STEP_TOKENS / sequence).clamp(1, self.samples);
        let fixed = [
            ("data.format", "tokens".to_owned()),
            ("data.pack", "false".to_owned()),
            ("data.sequence", sequence.to_string()),
            ("model.init", "random".to_owned()),
            ("train.batch_tokens", (batch_sequences * sequence).to_string()),
            ("train.epochs", "1".to_owned()),
        ];
        let mut settings = vec![model_setting(model)];
        settings.extend(fixed.iter().map(|(key, value)| format!("{key}={value}")));
        settings.push(setting("data.train", &data.to_string_lossy()));
        settings.push(setting("run.dir", &run_dir.to_string_lossy()));
        // A model that does not fit on the device is reported as such, not trained on the CPU instead.
        settings.push(setting("run.fallback", "none"));
        settings.extend(self.settings.settings());
        settings.extend_from_slice(more);
        Ok(RunConfig::from_settings(&settings)?.into())
    }
}
