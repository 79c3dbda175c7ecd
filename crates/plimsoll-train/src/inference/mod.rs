//! Inference with a model: its loss on data, text from a prompt, and merging of adapters.
//!
//! Evaluation and generation are planned first and run second, so a command can print the plan or refuse it.

pub mod merge;
pub mod samples;

use crate::config::LongSamples;
use crate::data::{Dataset, Tokenizer};
use crate::planning::prepare::open_dataset;
use crate::resolve::RunRequest;
use crate::resolve::charges::set_process_charges;
use crate::resolve::{Model, Resolved, Workload};
use crate::session::engine::{Engine, EvaluationSums};
use crate::session::evaluation::{EvaluationSlice, evaluate};
use crate::session::tensor_files::load_weights;
use crate::team::open::measure_gpu_charges;
use plimsoll_core::Failure;
use plimsoll_plan::search::{PlanOutcome, search};
use plimsoll_program::models::decoder::Generation;
use samples::{Sampling, generate};
use serde::Serialize;

/// Largest number of positions per row in an evaluation without an explicit length. The longest sequence of a model may
/// need more memory than a loss is worth.
const SEQUENCE_MAX: u64 = 4096;
/// Most sequences per evaluation batch.
const MAX_BATCH_SEQUENCES: u64 = 16;
/// Prompt tokens processed per prefill call.
const PREFILL_CHUNK_TOKENS: u64 = 64;

/// The loss of a model on evaluation data.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
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
    /// Plans the evaluation of the run file's model on its evaluation data. Each sample begins a new row. Without
    /// `sequence`, rows are as long as the longest sample, at most the model's context and `SEQUENCE_MAX`.
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
        let sequence = u64::from(request.data.sequence);
        request.train.batch_tokens = sequence * data.rows().clamp(1, MAX_BATCH_SEQUENCES);
        let plan = |resolved: &mut Resolved, request: &RunRequest| {
            set_process_charges(&mut resolved.device, request.batch_sequences(), sequence);
            let outcome = search(&resolved.plan_request(request, Workload::Evaluate)?);
            match measure_gpu_charges(&mut resolved.device, &outcome, request.scratch_folder())? {
                true => Ok(search(&resolved.plan_request(request, Workload::Evaluate)?)),
                false => Ok(outcome),
            }
        };
        let outcome = plan(&mut resolved, &request)?;
        let outcome = resolved.or_fall_back_to_cpu(&request, outcome, plan)?;
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
        let sums: EvaluationSums = evaluate(&mut engine, &self.data, &slice, 0)?;
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
        let tokens: Vec<i32> = tokenizer.encode(prompt)?.into_iter().map(|id| id as i32).collect();
        let vocab = resolved.model.config.vocab;
        if let Some(unknown) = tokens.iter().find(|id| **id as u64 >= vocab) {
            return Err(Failure::input(format!(
                "{}: token {unknown} is outside the model's vocabulary of {vocab} tokens",
                path.display()
            ))
            .hint("use the tokenizer.json that belongs to the model"));
        }
        if tokens.is_empty() {
            return Err(Failure::input("the prompt has no tokens").hint("give a prompt of at least one token"));
        }
        let positions = resolved.model.config.max_positions;
        let needed = tokens.len() as u64 + max_new_tokens as u64;
        if needed > positions {
            let message = format!(
                "{} prompt tokens and {max_new_tokens} new tokens exceed the model's {positions} positions",
                tokens.len()
            );
            return Err(Failure::input(message).hint("lower --max-tokens or shorten the prompt"));
        }
        let capacity = needed.next_multiple_of(PREFILL_CHUNK_TOKENS);
        let workload = || Workload::Generate(Generation { capacity, chunk: PREFILL_CHUNK_TOKENS });
        let plan = |resolved: &mut Resolved, request: &RunRequest| {
            set_process_charges(&mut resolved.device, 1, 1);
            let outcome = search(&resolved.plan_request(request, workload())?);
            match measure_gpu_charges(&mut resolved.device, &outcome, request.scratch_folder())? {
                true => Ok(search(&resolved.plan_request(request, workload())?)),
                false => Ok(outcome),
            }
        };
        let outcome = plan(&mut resolved, &request)?;
        let outcome = resolved.or_fall_back_to_cpu(&request, outcome, plan)?;
        let prompt = prompt.to_owned();
        Ok(PlannedGeneration {
            request,
            resolved,
            tokenizer,
            prompt,
            prompt_tokens: tokens,
            max_new_tokens,
            capacity,
            outcome,
        })
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

/// Opens the device with a plan and loads the weights.
fn open_engine(request: &RunRequest, resolved: &Resolved, outcome: PlanOutcome) -> Result<Engine, Failure> {
    let (sequence, vocab) = (u64::from(request.data.sequence), resolved.model.config.vocab);
    let device = &resolved.device;
    let precision = outcome.precision;
    let mut engine = Engine::open(outcome, precision, device, None, request.scratch_folder(), sequence, vocab)?;
    load_weights(&mut engine, &resolved.model, request)?;
    Ok(engine)
}
