//! Generation of text, planned first: the answers to one prompt, to the prompts of a file, or to a user.

use super::batch::{BatchPrompt, answer_batch};
use super::decoding::{Decoding, EndReason};
use super::ordered_answers::OrderedAnswers;
use super::sampling::{Sampling, SamplingChoice};
use super::text_stream::{Continuation, TextStream};
use super::{open_engine, plan_work};
use crate::data::{DataError, Prompt, PromptEncoder, PromptRecord, read_conversation, read_prompts};
use crate::engine::Engine;
use crate::engine::failure::DeviceFailure;
use crate::files::GenerationDefaults;
use crate::planning::planner::{Charges, Planner};
use crate::planning::sequences::PlannedSequences;
use crate::resolve::{Model, Resolved, RunRequest, Workload};
use plimsoll_core::{Failure, format_count};
use plimsoll_plan::search::PlanOutcome;
use plimsoll_program::models::decoder::Generation;
use serde::Serialize;
use serde_json::{Map, Value};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

/// Number of new tokens after a text for which neither the user nor the model gives a limit.
const TEXT_TOKENS: u64 = 64;
/// Number of new tokens of an answer in a conversation for which neither the user nor the model gives a limit.
const ANSWER_TOKENS: u64 = 512;
/// Number of tokens of a conversation with the user for which the user gives no limit.
const CHAT_TOKENS: u64 = 4096;
/// Number of prompt tokens that one run of the prefill Program processes.
const PREFILL_CHUNK_TOKENS: u64 = 64;
/// Largest number of prompts of a file that are answered at once.
const SEQUENCES_MAX: u64 = 64;

/// The prompts of a generation.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptSource {
    /// A text that is continued.
    Text(String),
    /// A JSON file with a conversation.
    Conversation(PathBuf),
    /// A data file with a prompt in each record.
    File(PathBuf),
    /// A conversation with the user, who has not spoken yet.
    User,
}

/// Prompts and rules of a generation.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
    /// The prompts.
    pub source: PromptSource,
    /// Largest number of new tokens for each prompt; `None` leaves it to the model.
    pub max_new_tokens: Option<u64>,
    /// Tokens of a conversation with the user that the cache holds; `None` stands for 4096, or the model's context.
    pub context: Option<u64>,
    /// Texts before which an answer ends. None of them is empty.
    pub stops: Vec<String>,
    /// Rules of sampling that the user gives.
    pub sampling: SamplingChoice,
}

/// A prompt with the answer of the model.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct GeneratedText {
    /// The prompt; absent if it is a conversation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// The conversation with the answer; absent if the prompt is a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages: Option<Vec<Map<String, Value>>>,
    /// The generated text, without the prompt.
    pub text: String,
    /// The generated tokens, including an end token and those of a stop text.
    pub tokens: Vec<i32>,
    /// The reason for which the text ends.
    pub end: EndReason,
}

/// A prompt with its tokens.
#[derive(Clone, Debug)]
pub struct PreparedPrompt {
    prompt: Prompt,
    tokens: Vec<i32>,
    max_new_tokens: usize,
    /// All keys of the record in a file of prompts.
    pub keys: Map<String, Value>,
}

impl PreparedPrompt {
    /// Returns the text that is continued; `None` if the prompt is a conversation.
    pub fn text(&self) -> Option<&str> {
        match &self.prompt {
            Prompt::Text(text) => Some(text),
            Prompt::Conversation(_) => None,
        }
    }

    /// Returns the prompt for a batch, in which all answers have the same `seed`.
    fn for_batch(&self, seed: u64) -> BatchPrompt<'_> {
        BatchPrompt { tokens: &self.tokens, max_new_tokens: self.max_new_tokens, seed }
    }

    /// Returns the prompt with its answer.
    fn answered(&self, continuation: Continuation) -> GeneratedText {
        let Continuation { text, tokens, end } = continuation;
        let (prompt, messages) = match &self.prompt {
            Prompt::Text(text) => (Some(text.clone()), None),
            Prompt::Conversation(conversation) => {
                let mut messages: Vec<_> = conversation.messages.iter().map(|message| message.object.clone()).collect();
                messages.push(crate::data::Message::new("assistant", text.clone()).object);
                (None, Some(messages))
            }
        };
        GeneratedText { prompt, messages, text, tokens, end }
    }
}

/// A text generation that is planned and ready to run.
pub struct PlannedGeneration {
    request: RunRequest,
    resolved: Resolved,
    outcome: PlanOutcome,
    /// Sizes of the plan.
    generation: Generation,
    encoder: PromptEncoder,
    prompts: Vec<PreparedPrompt>,
    limits: TokenLimits,
    sampling: Sampling,
    stops: Vec<String>,
    notes: Vec<String>,
}

/// The numbers of tokens of a generation.
#[derive(Clone, Copy, Debug)]
struct TokenLimits {
    /// Positions of the model.
    positions: u64,
    /// Limit of new tokens that the user gives.
    requested: Option<u64>,
    /// Limit of new tokens that applies otherwise, as far as the model has room.
    default: u64,
    /// Tokens of a conversation with the user.
    context: u64,
}

impl PlannedGeneration {
    /// Plans a generation, with a cache for the longest prompt and its answer, or for a conversation with the user.
    ///
    /// # Errors
    /// An invalid model, tokenizer or prompt, and a prompt that exceeds the model's context.
    pub fn new(mut request: RunRequest, generation: GenerationRequest) -> Result<PlannedGeneration, Failure> {
        let GenerationRequest { source, max_new_tokens, context, stops, sampling } = generation;
        (request.data.sequence, request.train.batch_tokens) = (1, 1);
        let model = Model::open(&request)?;
        model.check_weights(&request)?;
        let mut resolved = Resolved::for_run(&request, model, Workload::Evaluate)?;
        let path = resolved.model.tokenizer().ok_or_else(|| {
            Failure::input(format!("{} has no tokenizer.json", request.model_name()))
                .hint("put the model's tokenizer beside its weights")
        })?;
        let defaults = resolved.model.folder().map(GenerationDefaults::read).transpose()?.unwrap_or_default();
        let positions = resolved.model.config.max_positions;
        let own = if matches!(source, PromptSource::Text(_)) { TEXT_TOKENS } else { ANSWER_TOKENS };
        let limits = TokenLimits {
            positions,
            requested: max_new_tokens,
            default: defaults.max_new_tokens.unwrap_or(own),
            context: context.unwrap_or(CHAT_TOKENS.min(positions)),
        };
        let records = read_source(&source)?;
        let has_conversation = |record: &PromptRecord| matches!(record.prompt, Prompt::Conversation(_));
        let encoder = if source == PromptSource::User || records.iter().any(has_conversation) {
            PromptEncoder::for_conversations(&path, request.data.template.as_deref())?
        } else {
            PromptEncoder::for_texts(&path)?
        };
        let vocab = resolved.model.config.vocab;
        let prompts = records.into_iter().map(|record| prepare(record, &encoder, vocab, &limits));
        let prompts = prompts.collect::<Result<Vec<_>, Failure>>()?;
        let capacity = limits.capacity(&source, &prompts)?;
        let single = Generation { slots: 1, capacity, chunk: PREFILL_CHUNK_TOKENS };
        let outcome = plan_work(&request, &mut resolved, Workload::Generate(single))?;
        let is_file = matches!(source, PromptSource::File(_));
        let most = if is_file { SEQUENCES_MAX.min(prompts.len() as u64) } else { 1 };
        let found = plan_sequences(&request, &resolved, &outcome, Generation { slots: most, ..single })?;
        let (slots, outcome) = found.map_or((1, outcome), |found| (found.count, found.outcome));
        let notes = limits.shortened(&source, &prompts).into_iter().chain(defaults.note()).collect();
        let sampling = Sampling::new(sampling, &defaults);
        let generation = Generation { slots, ..single };
        Ok(PlannedGeneration {
            request,
            resolved,
            outcome,
            generation,
            encoder,
            prompts,
            limits,
            sampling,
            stops,
            notes,
        })
    }

    /// Returns notes: fewer new tokens than usual, and rules of the model that do not apply.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Returns the request, its resolved model and device, and the plan.
    pub fn plan(&self) -> (&RunRequest, &Resolved, &PlanOutcome) {
        (&self.request, &self.resolved, &self.outcome)
    }

    /// Returns the rules for the choice of the next token: those of the user, completed by those of the model.
    pub fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    /// Returns the number of prompts; 0 in a conversation with the user.
    pub fn prompts(&self) -> usize {
        self.prompts.len()
    }

    /// Returns a note about the number of prompts that are answered at once.
    pub fn describe_sequences(&self) -> String {
        let (count, most) = (self.generation.slots, SEQUENCES_MAX.min(self.prompts.len() as u64));
        let answered = format!("{} answered at once", format_count(count, "prompt"));
        if count < most { format!("{answered}: the load line has no room for more") } else { answered }
    }

    /// Returns the keys of the records of a file of prompts.
    pub fn records(&self) -> impl Iterator<Item = &Map<String, Value>> {
        self.prompts.iter().map(|prompt| &prompt.keys)
    }

    /// Opens the device and loads the model.
    ///
    /// # Errors
    /// A device that fails, or a model that can no longer be read.
    pub fn open(self) -> Result<(TextGenerator, Vec<PreparedPrompt>), Failure> {
        let engine = open_fitting(&self.request, &self.resolved, self.outcome, self.generation)?;
        let end_tokens = self.resolved.model.config.eos.clone();
        let vocab = self.resolved.model.config.vocab;
        let limits = self.limits;
        let TokenLimits { context, .. } = limits;
        let max_new_tokens = limits.requested.unwrap_or(limits.default);
        let generator = TextGenerator {
            engine,
            encoder: self.encoder,
            end_tokens,
            vocab,
            sampling: self.sampling,
            threads: self.request.run.threads.on_host(),
            stops: self.stops,
            context: context as usize,
            max_new_tokens: max_new_tokens as usize,
            cached: Vec::new(),
        };
        Ok((generator, self.prompts))
    }
}

/// A model that is loaded and answers prompts.
pub struct TextGenerator {
    engine: Engine,
    encoder: PromptEncoder,
    end_tokens: Vec<i64>,
    vocab: u64,
    sampling: Sampling,
    /// Largest number of threads that choose tokens.
    threads: usize,
    stops: Vec<String>,
    /// Tokens of a conversation with the user that the cache holds.
    pub(super) context: usize,
    /// Largest number of new tokens in a conversation with the user.
    pub(super) max_new_tokens: usize,
    /// The tokens in the cache.
    cached: Vec<i32>,
}

impl TextGenerator {
    /// Answers a prompt. `on_text` is called with each piece of the text, and ends the answer with `Break`.
    ///
    /// # Errors
    /// A device that fails.
    pub fn answer(
        &mut self,
        prompt: &PreparedPrompt,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<GeneratedText, Failure> {
        let continuation = self.continue_tokens(&prompt.tokens, prompt.max_new_tokens, on_text)?;
        Ok(prompt.answered(continuation))
    }

    /// Answers the prompts of a file, as many at once as the plan has room for. `on_answer` is called with each prompt and
    /// its answer, in the order of the prompts.
    ///
    /// # Errors
    /// A device that fails, or an error of `on_answer`.
    pub fn answer_all(
        &mut self,
        prompts: &[PreparedPrompt],
        on_answer: &mut dyn FnMut(&PreparedPrompt, GeneratedText) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let decoding = Decoding { sampling: &self.sampling, end_tokens: &self.end_tokens, max_new_tokens: 0 };
        let batch: Vec<BatchPrompt> = prompts.iter().map(|prompt| prompt.for_batch(self.sampling.seed)).collect();
        let mut on_end = |prompt: usize, answer| on_answer(&prompts[prompt], prompts[prompt].answered(answer));
        let mut answers = OrderedAnswers::new(self.encoder.tokenizer(), &self.stops, &batch, &mut on_end);
        Ok(answer_batch(&mut self.engine, &decoding, &batch, self.threads, &mut answers)?)
    }

    /// Returns the tokens of a prompt.
    ///
    /// # Errors
    /// A prompt that the template refuses, or whose tokens are not the model's.
    pub(super) fn encode(&self, prompt: &Prompt) -> Result<Vec<i32>, Failure> {
        encode(prompt, &self.encoder, self.vocab)
    }

    /// Generates at most `max_new_tokens` tokens after those of `prompt`.
    pub(super) fn continue_tokens(
        &mut self,
        prompt: &[i32],
        max_new_tokens: usize,
        on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
    ) -> Result<Continuation, Failure> {
        let decoding = Decoding { sampling: &self.sampling, end_tokens: &self.end_tokens, max_new_tokens };
        let mut stream = TextStream::new(self.encoder.tokenizer(), &self.stops, prompt);
        let mut failed: Option<DataError> = None;
        let (tokens, mut end) = decoding.run(&mut self.engine, &mut self.cached, prompt, |token| {
            let given = match stream.push(token) {
                Ok(piece) if piece.is_empty() => ControlFlow::Continue(()),
                Ok(piece) => on_text(&piece),
                Err(error) => {
                    failed = Some(error);
                    ControlFlow::Break(())
                }
            };
            match given {
                _ if stream.is_stopped() => ControlFlow::Break(EndReason::StopText),
                ControlFlow::Continue(()) => ControlFlow::Continue(()),
                ControlFlow::Break(()) => ControlFlow::Break(EndReason::Stopped),
            }
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let rest = stream.finish()?;
        if !rest.is_empty() {
            let _ = on_text(&rest);
        }
        if stream.is_stopped() {
            end = EndReason::StopText;
        }
        Ok(Continuation { text: stream.text().to_owned(), tokens, end })
    }
}

/// Plans as many sequences at once as fit, at most `generation.slots`. `single` is the plan for one; `None` if no more
/// fit.
fn plan_sequences(
    request: &RunRequest,
    resolved: &Resolved,
    single: &PlanOutcome,
    generation: Generation,
) -> Result<Option<PlannedSequences>, Failure> {
    if !single.plan.fits {
        return Ok(None);
    }
    Planner::new(request, &resolved.model, Charges::Measured).plan_sequences(resolved, single, generation)
}

/// Opens the device with a plan for several sequences. If the device refuses the memory, halves their number.
fn open_fitting(
    request: &RunRequest,
    resolved: &Resolved,
    mut outcome: PlanOutcome,
    mut generation: Generation,
) -> Result<Engine, Failure> {
    loop {
        let (plan, precision) = (outcome.plan.clone(), outcome.precision);
        match open_engine(request, resolved, outcome) {
            Err(DeviceFailure::OutOfMemory { .. }) if generation.slots > 1 => generation.slots /= 2,
            opened => return Ok(opened?),
        }
        let planner = Planner::new(request, &resolved.model, Charges::Measured);
        outcome = planner.plan_fewer_sequences(resolved, &plan, precision, generation)?;
    }
}

impl TokenLimits {
    /// Returns the largest number of new tokens after a prompt of `given` tokens.
    ///
    /// # Errors
    /// The positions are too few for the prompt and the tokens that the user asks for, or for any new token.
    fn new_tokens(&self, given: u64) -> Result<u64, Failure> {
        let room = self.positions.saturating_sub(given);
        let wanted = self.requested.unwrap_or(self.default.min(room).max(1));
        if wanted <= room {
            return Ok(wanted);
        }
        let prompt = format_count(given, "prompt token");
        let more = format_count(wanted, "new token");
        let hint = if room == 0 { "shorten the prompt" } else { "lower --max-tokens or shorten the prompt" };
        Err(Failure::input(format!("{prompt} and {more} exceed the model's {} positions", self.positions)).hint(hint))
    }

    /// Returns the tokens that the cache has to hold.
    ///
    /// # Errors
    /// A conversation with the user that exceeds the model's context.
    fn capacity(&self, source: &PromptSource, prompts: &[PreparedPrompt]) -> Result<u64, Failure> {
        if *source == PromptSource::User && self.context > self.positions {
            let message = format!("--context {} exceeds the model's {} positions", self.context, self.positions);
            return Err(Failure::input(message).hint(format!("give --context {} or less", self.positions)));
        }
        let tokens = prompts.iter().map(|prompt| prompt.tokens.len() + prompt.max_new_tokens).max();
        let tokens = tokens.map_or(self.context, |tokens| tokens as u64);
        // With tokens of an earlier prompt in the cache, the last chunk of a prompt may begin at any place.
        let is_single = matches!(source, PromptSource::Text(_) | PromptSource::Conversation(_));
        let further = if is_single { 0 } else { PREFILL_CHUNK_TOKENS };
        Ok((tokens + further).next_multiple_of(PREFILL_CHUNK_TOKENS))
    }

    /// Returns a note if the model has no room for the number of new tokens that applies without a limit of the user.
    fn shortened(&self, source: &PromptSource, prompts: &[PreparedPrompt]) -> Option<String> {
        let shortest = prompts.iter().min_by_key(|prompt| prompt.max_new_tokens)?;
        let (limit, given) = (shortest.max_new_tokens as u64, shortest.tokens.len());
        if self.requested.is_some() || limit >= self.default {
            return None;
        }
        let prompt = if matches!(source, PromptSource::File(_)) { "a prompt" } else { "the prompt" };
        Some(format!(
            "at most {limit} new tokens: the model has {} positions, and {prompt} takes {given}",
            self.positions
        ))
    }
}

impl GenerationDefaults {
    /// Returns a note about rules of the model that have no effect.
    fn note(&self) -> Option<String> {
        let names = self.unknown.iter().map(|key| format!("`{key}`")).collect::<Vec<_>>().join(", ");
        (!names.is_empty()).then(|| format!("generation_config.json: {names} has no effect here"))
    }
}

/// Returns the prompts of a source; none if the user gives them.
fn read_source(source: &PromptSource) -> Result<Vec<PromptRecord>, Failure> {
    let single = |file: &Path, prompt| {
        vec![PromptRecord { location: crate::data::SourceLocation::whole(file), prompt, keys: Map::new() }]
    };
    Ok(match source {
        PromptSource::Text(text) => single(Path::new(""), Prompt::Text(text.clone())),
        PromptSource::Conversation(file) => single(file, Prompt::Conversation(Box::new(read_conversation(file)?))),
        PromptSource::File(file) => read_prompts(file)?,
        PromptSource::User => Vec::new(),
    })
}

/// Tokenizes a prompt and checks that it fits the model. An error names the place of the prompt if it comes from a file.
fn prepare(
    record: PromptRecord,
    encoder: &PromptEncoder,
    vocab: u64,
    limits: &TokenLimits,
) -> Result<PreparedPrompt, Failure> {
    let PromptRecord { location, prompt, keys } = record;
    let checked = encode(&prompt, encoder, vocab)
        .and_then(|tokens| limits.new_tokens(tokens.len() as u64).map(|max_new_tokens| (tokens, max_new_tokens)));
    let (tokens, max_new_tokens) = checked.map_err(|mut failure| {
        if !location.file.as_os_str().is_empty() {
            failure.message = format!("{location}: {}", failure.message);
        }
        failure
    })?;
    Ok(PreparedPrompt { prompt, tokens, max_new_tokens: max_new_tokens as usize, keys })
}

/// Encodes a prompt.
///
/// # Errors
/// A prompt that the template refuses, an empty one, or a token outside the model's vocabulary of `vocab` tokens.
fn encode(prompt: &Prompt, encoder: &PromptEncoder, vocab: u64) -> Result<Vec<i32>, Failure> {
    let tokens: Vec<i32> = encoder.encode(prompt)?.into_iter().map(|id| id as i32).collect();
    if let Some(unknown) = tokens.iter().find(|id| **id as u64 >= vocab) {
        let file = encoder.tokenizer().file().display();
        let message = format!("{file}: token {unknown} is outside the model's vocabulary of {vocab} tokens");
        return Err(Failure::input(message).hint("use the tokenizer.json that belongs to the model"));
    }
    if tokens.is_empty() {
        return Err(Failure::input("the prompt has no tokens").hint("give a prompt of at least one token"));
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_tokens_fit_the_positions_of_the_model() {
        let limit = |positions, given, requested| {
            TokenLimits { positions, requested, default: TEXT_TOKENS, context: 0 }.new_tokens(given)
        };
        assert_eq!(limit(1000, 10, None).unwrap(), TEXT_TOKENS);
        assert_eq!(limit(64, 47, None).unwrap(), 17);
        assert_eq!(limit(64, 47, Some(17)).unwrap(), 17);
        let message = |given, requested| limit(64, given, requested).unwrap_err().to_string();
        let long = "47 prompt tokens and 18 new tokens exceed the model's 64 positions\n  hint: lower --max-tokens";
        assert!(message(47, Some(18)).starts_with(long), "{}", message(47, Some(18)));
        let full = "64 prompt tokens and 1 new token exceed the model's 64 positions\n  hint: shorten the prompt";
        assert_eq!(message(64, None), full);
    }
}
