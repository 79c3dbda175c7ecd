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
use plimsoll_core::Failure;
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
    capacity: u64,
    outcome: PlanOutcome,
}

impl PlannedGeneration {
    /// Plans the continuation of `prompt` by at most `max_new_tokens` tokens.
    ///
    /// # Errors
    /// An invalid model or tokenizer, an empty prompt, or a prompt that exceeds the model's context.
    pub fn new(mut request: RunRequest, prompt: &str, max_new_tokens: usize) -> Result<PlannedGeneration, Failure> {
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
        let positions = resolved.model.config.max_positions;
        let needed = prompt_tokens.len() as u64 + max_new_tokens as u64;
        if needed > positions {
            let message = format!(
                "{} prompt tokens and {max_new_tokens} new tokens exceed the model's {positions} positions",
                prompt_tokens.len()
            );
            return Err(Failure::input(message).hint("lower --max-tokens or shorten the prompt"));
        }
        let capacity = needed.next_multiple_of(PREFILL_CHUNK_TOKENS);
        let generation = Generation { capacity, chunk: PREFILL_CHUNK_TOKENS };
        let outcome = plan_work(&request, &mut resolved, Workload::Generate(generation))?;
        let prompt = prompt.to_owned();
        Ok(PlannedGeneration { request, resolved, tokenizer, prompt, prompt_tokens, max_new_tokens, capacity, outcome })
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
