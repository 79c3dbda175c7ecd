//! Arguments of `generate`.

use super::model::{InferenceArgs, reject_training_rungs};
use super::values::{non_empty, positive, positive_number, share, share_or_none, temperature};
use clap::{ArgGroup, Args};
use plimsoll_core::{Failure, Rung};
use plimsoll_train::config::{RunConfig, setting};
use plimsoll_train::inference::generation::{GenerationRequest, PromptSource};
use plimsoll_train::inference::sampling::SamplingChoice;
use plimsoll_train::resolve::RunRequest;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Arguments of `plimsoll generate`, which answers prompts.
#[derive(Debug, Args)]
#[command(
    group(ArgGroup::new("source").required(true).args(["prompt", "chat", "messages", "prompts"])),
    after_help = "Examples:
  plimsoll generate models/my-llama --prompt \"Once upon a time\" --max-tokens 50
  plimsoll generate models/my-llama --chat
  plimsoll generate models/my-llama --prompts questions.jsonl --out answers.jsonl"
)]
pub struct GenerateArgs {
    /// Model: a Hugging Face directory, or a GGUF file
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// Text to continue
    #[arg(long, value_name = "TEXT", help_heading = "Prompts")]
    prompt: Option<String>,
    /// Talk with the model: each line of the input is a message
    #[arg(long, conflicts_with = "json", help_heading = "Prompts")]
    pub chat: bool,
    /// Answer the conversation in this JSON file: a list of messages, or an object with `messages`
    #[arg(long, value_name = "FILE", help_heading = "Prompts")]
    messages: Option<PathBuf>,
    /// Answer each record of a data file with `prompt` or `messages`
    #[arg(long, value_name = "FILE", requires = "out", conflicts_with = "json", help_heading = "Prompts")]
    prompts: Option<PathBuf>,
    /// JSON lines file of the answers to --prompts; an existing one is continued
    #[arg(long, value_name = "FILE", requires = "prompts", conflicts_with_all = ["prompt", "chat", "messages"], help_heading = "Prompts")]
    pub out: Option<PathBuf>,
    /// First message of a conversation with --chat, from the system
    #[arg(long, value_name = "TEXT", requires = "chat", conflicts_with_all = ["prompt", "messages", "prompts"], help_heading = "Prompts")]
    pub system: Option<String>,
    /// Chat template: a file, or the name of a built-in one [default: that of the model]
    #[arg(long, value_name = "NAME|FILE", conflicts_with = "prompt", help_heading = "Prompts")]
    template: Option<String>,
    /// Maximum number of new tokens [default: that of the model, else 64 after a text and 512 in a conversation, or fewer
    /// if the model has no room for them]
    #[arg(long, value_name = "TOKENS", value_parser = positive())]
    max_tokens: Option<u32>,
    /// Tokens of the conversation with --chat that the cache holds; older messages are dropped [default: 4096, or the
    /// context of the model]
    #[arg(long, value_name = "TOKENS", requires = "chat", conflicts_with_all = ["prompt", "messages", "prompts"], value_parser = clap::value_parser!(u32).range(16..))]
    context: Option<u32>,
    /// End an answer before this text (repeatable)
    #[arg(long, value_name = "TEXT", value_parser = non_empty)]
    stop: Vec<String>,
    /// Sampling temperature; 0 always takes the most likely token [default: that of the model]
    #[arg(long, value_parser = temperature, allow_negative_numbers = true, help_heading = "Sampling")]
    temperature: Option<f32>,
    /// Sample only from the K most likely tokens
    #[arg(long, value_name = "K", value_parser = positive(), help_heading = "Sampling")]
    top_k: Option<u32>,
    /// Sample only from the most likely tokens with a total probability of P (above 0, at most 1)
    #[arg(long, value_name = "P", value_parser = share, help_heading = "Sampling")]
    top_p: Option<f32>,
    /// Sample only from tokens with at least the share P of the probability of the most likely one
    #[arg(long, value_name = "P", value_parser = share_or_none, help_heading = "Sampling")]
    min_p: Option<f32>,
    /// Make tokens less likely that were there before; 1 changes nothing
    #[arg(long, value_name = "FACTOR", value_parser = positive_number, help_heading = "Sampling")]
    repetition_penalty: Option<f32>,
    /// Seed of the sampling
    #[arg(long, default_value_t = 1, help_heading = "Sampling")]
    seed: u64,
    #[command(flatten)]
    inference: InferenceArgs,
    /// Print the text and its tokens as JSON
    #[arg(long, help_heading = "Output")]
    pub json: bool,
}

/// The settings that answers depend on, as the user gives them, and the rungs of the plan.
#[derive(Debug, Serialize)]
pub struct AnswerSettings {
    model: PathBuf,
    adapter: Option<PathBuf>,
    template: Option<String>,
    rungs: Vec<Rung>,
    max_tokens: Option<u32>,
    stop: Vec<String>,
    temperature: Option<f32>,
    top_k: Option<u32>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: u64,
}

impl GenerateArgs {
    /// Returns the settings of answers under a plan with these rungs.
    pub fn answer_settings(&self, rungs: &[Rung]) -> AnswerSettings {
        AnswerSettings {
            model: absolute(&self.dir),
            adapter: self.inference.adapter.as_deref().map(absolute),
            template: self.template.clone(),
            rungs: rungs.to_vec(),
            max_tokens: self.max_tokens,
            stop: self.stop.clone(),
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed,
        }
    }

    /// Builds the request of the model.
    ///
    /// # Errors
    /// An invalid setting, or a rung in `--allow` that only applies to training.
    pub fn build_request(&self) -> Result<RunRequest, Failure> {
        let mut settings = self.inference.settings(&self.dir);
        settings.extend(self.inference.template(self.template.as_ref()).map(|file| setting("data.template", &file)));
        reject_training_rungs(RunConfig::from_settings(&settings)?)
    }

    /// Returns the prompts and rules of the generation.
    pub fn generation(&self) -> GenerationRequest {
        let source = match (&self.prompt, &self.messages, &self.prompts) {
            (Some(text), ..) => PromptSource::Text(text.clone()),
            (_, Some(file), _) => PromptSource::Conversation(file.clone()),
            (.., Some(file)) => PromptSource::File(file.clone()),
            _ => PromptSource::User,
        };
        let sampling = SamplingChoice {
            temperature: self.temperature.map(f64::from),
            top_k: self.top_k.map(|count| count as usize),
            top_p: self.top_p.map(f64::from),
            min_p: self.min_p.map(f64::from),
            repetition_penalty: self.repetition_penalty.map(f64::from),
            seed: self.seed,
        };
        GenerationRequest {
            source,
            max_new_tokens: self.max_tokens.map(u64::from),
            context: self.context.map(u64::from),
            stops: self.stop.clone(),
            sampling,
        }
    }
}

/// Returns the path from the root, with links resolved; a hub id as it is.
fn absolute(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}
