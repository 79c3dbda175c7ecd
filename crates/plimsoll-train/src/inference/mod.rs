//! Inference with a model: its loss on data, text from a prompt, and merging of adapters.
//!
//! Evaluation and generation are planned first and run second, so a command can print the plan or refuse it.

pub mod merge;
pub mod samples;

use crate::config::LongSamples;
use crate::data::{Dataset, Tokenizer};
use crate::engine::evaluation::{EvaluationSlice, evaluate_slice};
use crate::engine::tensor_files::load_weights;
use crate::engine::{Engine, EvaluationSums};
use crate::planning::planner::{Charges, Planner};
use crate::planning::prepare::open_dataset;
use crate::resolve::RunRequest;
use crate::resolve::{Model, Resolved, Workload};
use plimsoll_core::{Failure, format_count};
use plimsoll_plan::search::PlanOutcome;
use plimsoll_program::models::decoder::Generation;
use samples::{Sampling, generate};
use serde::Serialize;
use std::path::Path;
use std::sync::Arc;

/// Largest number of positions per row in an evaluation for which the user gives no length. Rows as long as a model's
/// context could need too much memory.
const SEQUENCE_MAX: u64 = 4096;
/// Largest number of sequences per evaluation batch.
const MAX_BATCH_SEQUENCES: u64 = 16;
/// Number of new tokens for which the user gives no limit, as far as the model has room for them.
const NEW_TOKENS: u64 = 64;
/// Number of prompt tokens that one run of the prefill Program processes.
const PREFILL_CHUNK_TOKENS: u64 = 64;

/// The loss of a model on evaluation data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EvaluationLoss {
    /// Mean negative log-likelihood per labelled token, in nats.
    pub loss: f64,
    /// Perplexity: e to the power of the loss.
    pub perplexity: f64,
    /// Number of labelled tokens.
    pub tokens: u64,
}

/// A prompt and its continuation by the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GeneratedText {
    /// The prompt.
    pub prompt: String,
    /// The generated text, without the prompt.
    pub text: String,
    /// The generated tokens, including an end token.
    pub tokens: Vec<i32>,
}

/// An evaluation that is planned and ready to run.
pub struct PlannedEvaluation {
    request: RunRequest,
    resolved: Resolved,
    data: Dataset,
    outcome: PlanOutcome,
}

impl PlannedEvaluation {
    /// Plans the evaluation of the run file's model on its evaluation data. Each sample begins a new row of `sequence`
    /// tokens. With `None`, rows are as long as the longest sample, at most the model's context and `SEQUENCE_MAX`.
    ///
    /// # Errors
    /// An invalid model, invalid data, or devices that cannot be used.
    pub fn new(mut request: RunRequest, sequence: Option<u32>) -> Result<PlannedEvaluation, Failure> {
        let model = Model::open(&request)?;
        model.check_weights(&request)?;
        (request.data.pack, request.data.long) = (false, LongSamples::Split);
        let longest_row = model.config.max_positions.min(SEQUENCE_MAX) as u32;
        request.data.sequence = sequence.unwrap_or(longest_row);
        request.train.batch_tokens = u64::from(request.data.sequence);
        if sequence.is_none() {
            // Reading the data yields the longest sample. Opening it again below uses the token cache.
            let (longest, _) = open_dataset(&request, &model, &request.data.eval, 1)?.longest_document();
            request.data.sequence = longest_row.min((longest.max(2) - 1).try_into().unwrap_or(longest_row));
        }
        let mut resolved = Resolved::for_run(&request, model, Workload::Evaluate)?;
        let data = open_dataset(&request, &resolved.model, &request.data.eval, resolved.device.threads as usize)?;
        request.train.batch_tokens = u64::from(request.data.sequence) * data.rows().clamp(1, MAX_BATCH_SEQUENCES);
        let outcome = plan_work(&request, &mut resolved, Workload::Evaluate)?;
        Ok(PlannedEvaluation { request, resolved, data, outcome })
    }

    /// Returns the request, its resolved model and device, and the plan.
    pub fn plan(&self) -> (&RunRequest, &Resolved, &PlanOutcome) {
        (&self.request, &self.resolved, &self.outcome)
    }

    /// Evaluates all samples.
    ///
    /// # Errors
    /// A device that fails, or a model or data that can no longer be read.
    pub fn run(self) -> Result<EvaluationLoss, Failure> {
        let mut engine = open_engine(&self.request, &self.resolved, self.outcome)?;
        let slice = EvaluationSlice { rows: 0..self.data.rows(), micro_batch: engine.recipe().micro_batch };
        let sums: EvaluationSums = evaluate_slice(&mut engine, &self.data, &slice, 0)?;
        Ok(EvaluationLoss { loss: sums.loss(), perplexity: sums.loss().exp(), tokens: sums.tokens })
    }
}

/// A text generation that is planned and ready to run.
pub struct PlannedGeneration {
    request: RunRequest,
    resolved: Resolved,
    tokenizer: Tokenizer,
    prompt: String,
    prompt_tokens: Vec<i32>,
    max_new_tokens: usize,
    shortened_note: Option<String>,
    capacity: u64,
    outcome: PlanOutcome,
}

impl PlannedGeneration {
    /// Plans the continuation of `prompt` by at most `max_new_tokens` tokens. `None` stands for 64, or fewer if the
    /// model's context has no room for them.
    ///
    /// # Errors
    /// An invalid model or tokenizer, an empty prompt, or a prompt that exceeds the model's context.
    pub fn new(
        mut request: RunRequest,
        prompt: &str,
        max_new_tokens: Option<u64>,
    ) -> Result<PlannedGeneration, Failure> {
        request.data.sequence = 1;
        request.train.batch_tokens = 1;
        let model = Model::open(&request)?;
        model.check_weights(&request)?;
        let mut resolved = Resolved::for_run(&request, model, Workload::Evaluate)?;
        let path = resolved.model.tokenizer().ok_or_else(|| {
            Failure::input(format!("{} has no tokenizer.json", request.model_name()))
                .hint("put the model's tokenizer beside its weights")
        })?;
        let tokenizer = Tokenizer::load(&path)?;
        let prompt_tokens = encode_prompt(&tokenizer, &path, prompt, resolved.model.config.vocab)?;
        let (positions, given) = (resolved.model.config.max_positions, prompt_tokens.len() as u64);
        let limit = new_token_limit(positions, given, max_new_tokens)?;
        let is_shortened = max_new_tokens.is_none() && limit < NEW_TOKENS;
        let shortened_note = is_shortened.then(|| {
            format!("at most {limit} new tokens: the model has {positions} positions, and the prompt takes {given}")
        });
        let max_new_tokens = limit as usize;
        let capacity = (given + limit).next_multiple_of(PREFILL_CHUNK_TOKENS);
        let generation = Generation { capacity, chunk: PREFILL_CHUNK_TOKENS };
        let outcome = plan_work(&request, &mut resolved, Workload::Generate(generation))?;
        Ok(PlannedGeneration {
            request,
            resolved,
            tokenizer,
            prompt: prompt.to_owned(),
            prompt_tokens,
            max_new_tokens,
            shortened_note,
            capacity,
            outcome,
        })
    }

    /// Returns a note if the model has no room for the number of new tokens that applies without a limit of the user.
    pub fn shortened_note(&self) -> Option<&str> {
        self.shortened_note.as_deref()
    }

    /// Returns the request, its resolved model and device, and the plan.
    pub fn plan(&self) -> (&RunRequest, &Resolved, &PlanOutcome) {
        (&self.request, &self.resolved, &self.outcome)
    }

    /// Generates the text.
    ///
    /// # Errors
    /// A device that fails, or a model that can no longer be read.
    pub fn run(self, sampling: &Sampling) -> Result<GeneratedText, Failure> {
        let mut engine = open_engine(&self.request, &self.resolved, self.outcome)?;
        let end_tokens = &self.resolved.model.config.eos;
        let tokens = generate(
            &mut engine,
            &self.prompt_tokens,
            self.max_new_tokens,
            self.capacity as usize,
            end_tokens,
            sampling,
        )?;
        let decode = |ids: &[i32]| self.tokenizer.decode(&ids.iter().map(|&id| id as u32).collect::<Vec<_>>());
        // The text of a token depends on the token before it, for example in a leading space. So the whole is decoded
        // and the prompt removed.
        let (before, whole) = (decode(&self.prompt_tokens)?, decode(&[&self.prompt_tokens[..], &tokens].concat())?);
        let text = match whole.strip_prefix(&before) {
            Some(continuation) => continuation.to_owned(),
            None => decode(&tokens)?,
        };
        Ok(GeneratedText { prompt: self.prompt, text, tokens })
    }
}

/// Plans an evaluation or a generation on the device of `resolved`. If it does not fit there, plans for the processor
/// where that is allowed. Sets the charges (bytes outside the arena) of the device to those of the plan.
fn plan_work(request: &RunRequest, resolved: &mut Resolved, work: Workload) -> Result<PlanOutcome, Failure> {
    let model = Arc::clone(&resolved.model);
    Planner::new(request, &model, Charges::Measured).plan_chosen_device(resolved, work)
}

/// Returns the largest number of new tokens after a prompt of `given` tokens, for a model with `positions` positions.
/// `requested` is the number that the user asks for.
///
/// # Errors
/// The positions are too few for the prompt and the tokens that the user asks for, or for any new token.
fn new_token_limit(positions: u64, given: u64, requested: Option<u64>) -> Result<u64, Failure> {
    let room = positions.saturating_sub(given);
    let wanted = requested.unwrap_or(NEW_TOKENS.min(room).max(1));
    if wanted <= room {
        return Ok(wanted);
    }
    let prompt = format_count(given, "prompt token");
    let more = format_count(wanted, "new token");
    let hint = if room == 0 { "shorten the prompt" } else { "lower --max-tokens or shorten the prompt" };
    Err(Failure::input(format!("{prompt} and {more} exceed the model's {positions} positions")).hint(hint))
}

/// Encodes a prompt with the tokenizer from the file `path`.
///
/// # Errors
/// An empty prompt, or a token outside the model's vocabulary of `vocab` tokens.
fn encode_prompt(tokenizer: &Tokenizer, path: &Path, prompt: &str, vocab: u64) -> Result<Vec<i32>, Failure> {
    let tokens: Vec<i32> = tokenizer.encode(prompt)?.into_iter().map(|id| id as i32).collect();
    if let Some(unknown) = tokens.iter().find(|id| **id as u64 >= vocab) {
        let message =
            format!("{}: token {unknown} is outside the model's vocabulary of {vocab} tokens", path.display());
        return Err(Failure::input(message).hint("use the tokenizer.json that belongs to the model"));
    }
    if tokens.is_empty() {
        return Err(Failure::input("the prompt has no tokens").hint("give a prompt of at least one token"));
    }
    Ok(tokens)
}

/// Opens the device of `resolved` with the arena and Programs of a plan, and loads the model's weights.
fn open_engine(request: &RunRequest, resolved: &Resolved, outcome: PlanOutcome) -> Result<Engine, Failure> {
    let (sequence, vocab) = (u64::from(request.data.sequence), resolved.model.config.vocab);
    let device = &resolved.device;
    let precision = outcome.precision;
    let mut engine = Engine::open(outcome, precision, device, None, request.scratch_folder(), sequence, vocab)?;
    load_weights(&mut engine, &resolved.model, request)?;
    Ok(engine)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_tokens_fit_the_positions_of_the_model() {
        assert_eq!(new_token_limit(1000, 10, None).unwrap(), NEW_TOKENS);
        assert_eq!(new_token_limit(64, 47, None).unwrap(), 17);
        assert_eq!(new_token_limit(64, 47, Some(17)).unwrap(), 17);
        let message = |given, requested| new_token_limit(64, given, requested).unwrap_err().to_string();
        let long = "47 prompt tokens and 18 new tokens exceed the model's 64 positions\n  hint: lower --max-tokens";
        assert!(message(47, Some(18)).starts_with(long), "{}", message(47, Some(18)));
        let full = "64 prompt tokens and 1 new token exceed the model's 64 positions\n  hint: shorten the prompt";
        assert_eq!(message(64, None), full);
    }
}
