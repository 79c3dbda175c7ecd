//! The completions of a run over groups of them: where they come from, checked before the run is planned.

use crate::config::{DataSource, Objective};
use crate::data::{
    Dataset, Prompt, PromptRecord, RecordFormat, RolloutRewards, Tokenizer, TrainingData, list_files, read_prompts,
    read_rollouts,
};
use crate::resolve::RunRequest;
use crate::resolve::model::Model;
use crate::rewards::{RewardSpec, Rewards};
use plimsoll_core::{DeviceSpec, Failure, format_count};
use plimsoll_program::models::ModelConfig;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// The most completions that are sampled at once unless the run file names another number.
const SLOTS_MAX: u64 = 64;
/// Part of the load line that the key-value cache may take unless the run file names the number of completions.
const CACHE_SHARE: u64 = 4;

/// The source of the completions of a run.
pub(crate) enum CompletionSource {
    /// Files; the rewards of each row, for each source of training data.
    Rollouts(Vec<Vec<RolloutRewards>>),
    /// The model of the run.
    Prompts(Arc<PromptSource>),
}

/// Prompts whose completions the model samples, and their rewards.
pub(crate) struct PromptSource {
    /// The prompt of each row, for each source of training data.
    pub train: Vec<Vec<PromptRecord>>,
    /// The prompts of the evaluation data.
    pub eval: Vec<PromptRecord>,
    /// Tokenizer of the model.
    pub tokenizer: Tokenizer,
    /// Rewards of completions.
    pub rewards: Mutex<Rewards>,
}

/// Decides the number of completions that are sampled at once, unless the run file does or it is decided: as many as have room
/// in a quarter of the smallest load line, at most those of a round.
pub(crate) fn decide_slots<'a>(
    run: &mut RunRequest,
    model: &ModelConfig,
    devices: impl Iterator<Item = &'a DeviceSpec>,
) {
    if !run.samples_completions() || run.slots.is_some() {
        return;
    }
    let most = run.grpo.completions().min(SLOTS_MAX);
    let values = 2 * model.layers * model.kv_heads * model.head_dim * u64::from(run.data.sequence);
    let fitting = devices.map(|device| {
        let slot = values * run.arithmetic(device.kind).bytes();
        device.budget.0 / CACHE_SHARE / slot.max(1)
    });
    run.slots = Some(fitting.min().unwrap_or(1).clamp(1, most));
}

/// Halves the number of completions that are sampled at once, for a run that does not fit. Returns false if it cannot.
pub(crate) fn halve_slots(run: &mut RunRequest) -> bool {
    let is_fixed = run.recipe.slots.is_some();
    match run.slots.filter(|slots| !is_fixed && *slots > 1) {
        Some(slots) => {
            run.slots = Some(slots / 2);
            true
        }
        None => false,
    }
}

/// Opens the source of completions of a run; `None` for other objectives.
///
/// # Errors
/// Files that are no groups of completions or no prompts, and settings that do not match them.
pub(super) fn open_completions(
    run: &RunRequest,
    model: &Model,
    train: &TrainingData,
    eval: Option<&Dataset>,
) -> Result<Option<CompletionSource>, Failure> {
    if run.train.objective != Objective::Grpo {
        return Ok(None);
    }
    if run.samples_completions() {
        let prompts = open_prompts(run, model, train, eval)?;
        return Ok(Some(CompletionSource::Prompts(Arc::new(prompts))));
    }
    open_rollouts(run, train, eval).map(Some)
}

/// Reads the rewards of completions in files.
fn open_rollouts(run: &RunRequest, train: &TrainingData, eval: Option<&Dataset>) -> Result<CompletionSource, Failure> {
    if eval.is_some() {
        let message = "data.eval: completions of a file are not evaluated";
        return Err(Failure::input(message).hint("leave data.eval out"));
    }
    let mut rewards = Vec::new();
    for (source, dataset) in run.data.training_sources().iter().zip(train.sources()) {
        let found = read_rollouts(&files_of(run, source)?, &run.grpo)?;
        check_reward_count(&found, &run.grpo.reward_weights)?;
        check_count(found.len(), dataset)?;
        rewards.push(found);
    }
    Ok(CompletionSource::Rollouts(rewards))
}

/// Checks that each reward has a weight, if there are weights.
fn check_reward_count(rollouts: &[RolloutRewards], weights: &[f64]) -> Result<(), Failure> {
    let rewards = rollouts.first().map_or(0, |first| first.rewards.len());
    if weights.is_empty() || rewards == weights.len() {
        return Ok(());
    }
    let (weights, rewards) = (format_count(weights.len(), "weight"), format_count(rewards, "reward"));
    Err(Failure::input(format!("grpo.reward_weights: {weights}, but records with {rewards}"))
        .hint("give one weight for each reward, or none"))
}

/// Reads prompts, and opens their rewards.
fn open_prompts(
    run: &RunRequest,
    model: &Model,
    train: &TrainingData,
    eval: Option<&Dataset>,
) -> Result<PromptSource, Failure> {
    let settings = &run.grpo;
    if train.formats().contains(&RecordFormat::Rollouts) {
        return Err(Failure::input("data.train: the files hold rollouts, not prompts")
            .hint("to train on them, name the format: data.format = \"rollouts\", or --rollouts FILE"));
    }
    let specs = settings
        .rewards
        .iter()
        .map(|text| text.parse::<RewardSpec>().map_err(|error| Failure::input(format!("grpo.rewards: {error}"))));
    let specs = specs.collect::<Result<Vec<RewardSpec>, Failure>>()?;
    let timeout = Duration::from_secs_f64(settings.reward_timeout_seconds);
    let rewards = Rewards::open(&specs, &settings.reward_weights, timeout)
        .map_err(|failure| Failure { message: format!("grpo.rewards: {}", failure.message), ..failure })?;
    let file = model.tokenizer().ok_or_else(|| {
        Failure::input("train.objective = \"grpo\" needs a tokenizer.json beside the model's weights")
    })?;
    let mut prompts = Vec::new();
    for (source, dataset) in run.data.training_sources().iter().zip(train.sources()) {
        prompts.push(read_source(run, source, dataset)?);
    }
    let eval_source = DataSource { path: run.data.eval.clone(), ..DataSource::default() };
    let eval = eval.map_or(Ok(Vec::new()), |eval| read_source(run, &eval_source, eval))?;
    Ok(PromptSource { train: prompts, eval, tokenizer: Tokenizer::load(&file)?, rewards: Mutex::new(rewards) })
}

/// Reads the prompts of a source, one for each row of `dataset`.
fn read_source(run: &RunRequest, source: &DataSource, dataset: &Dataset) -> Result<Vec<PromptRecord>, Failure> {
    let (longest, place) = dataset.longest_document();
    let limit = run.grpo.max_prompt_length;
    // An end token follows each prompt.
    if longest > u64::from(limit) + 1 {
        let tokens = format_count(longest - 1, "token");
        return Err(Failure::input(format!(
            "{place}: the prompt has {tokens}, more than grpo.max_prompt_length = {limit}"
        ))
        .hint(format!("set grpo.max_prompt_length to {} or more, or shorten the prompt", longest - 1)));
    }
    let mut prompts = Vec::new();
    for file in files_of(run, source)? {
        prompts.extend(read_prompts(&file)?);
    }
    let is_empty = |record: &&PromptRecord| matches!(&record.prompt, Prompt::Text(text) if text.is_empty());
    if let Some(empty) = prompts.iter().find(is_empty) {
        return Err(Failure::input(format!("{}: the prompt is empty", empty.location)).hint("leave it out"));
    }
    check_count(prompts.len(), dataset)?;
    Ok(prompts)
}

fn files_of(run: &RunRequest, source: &DataSource) -> Result<Vec<PathBuf>, Failure> {
    Ok(list_files(&source.path, source.format.unwrap_or(run.data.format), source.split)?)
}

/// Checks that each record has a row.
fn check_count(records: usize, dataset: &Dataset) -> Result<(), Failure> {
    let skipped = dataset.skipped_documents();
    if skipped > 0 {
        return Err(Failure::input(format!(
            "data.train or data.eval: {} without tokens",
            format_count(skipped, "prompt")
        ))
        .hint("leave empty prompts out"));
    }
    if records as u64 != dataset.rows() {
        let message =
            format!("{} in files, but {} when they were tokenized", format_count(records, "record"), dataset.rows());
        return Err(Failure::input(message).hint("the files have changed: start the command again"));
    }
    Ok(())
}
