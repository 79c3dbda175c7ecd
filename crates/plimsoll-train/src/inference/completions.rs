//! Completions of prompts for training, with the log-probability of each token as the sampler computed it.

use super::batch::{BatchListener, BatchPrompt, SlotDecoder, answer_batch};
use super::decoding::{Decoding, EndReason};
use super::sampling::{Choice, Sampling};
use crate::engine::failure::DeviceFailure;
use plimsoll_core::Failure;
use std::ops::{ControlFlow, Range};
use std::sync::mpsc::Sender;

/// The prompts of a round, and the rules by which they are completed.
#[derive(Clone, Debug)]
pub(crate) struct CompletionRequest {
    /// Tokens of the prompts, at least one each, with the seed of each completion.
    pub prompts: Vec<(Vec<i32>, u64)>,
    /// Largest number of tokens of a completion; at least 1.
    pub max_new_tokens: usize,
    /// Choice of the next token. Its seed has no effect.
    pub sampling: Sampling,
    /// Tokens after which a completion ends. They are part of it.
    pub end_tokens: Vec<i64>,
    /// Largest number of threads of each worker that choose tokens.
    pub threads: usize,
    /// Receives each completion at its end, with its number. If a failure follows, it is sampled and sent once more.
    pub ended: Option<Sender<Option<(usize, SampledCompletion)>>>,
}

/// A completion of a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SampledCompletion {
    /// Its tokens.
    pub tokens: Vec<i32>,
    /// Log-probability of each token, at the temperature of sampling, among all tokens.
    pub logps: Vec<f64>,
    /// Mean entropy of the distributions of the tokens, in nats, at the temperature of sampling, among all tokens.
    pub entropy: f64,
}

/// The receiver of completions.
struct Collector<'r> {
    request: &'r CompletionRequest,
    /// Number of the first prompt.
    first: usize,
    completions: Vec<SampledCompletion>,
}

impl BatchListener for Collector<'_> {
    const TAKES_CHOICES: bool = true;

    fn on_token(&mut self, _: usize, _: i32) -> Result<ControlFlow<EndReason>, Failure> {
        Ok(ControlFlow::Continue(()))
    }

    fn on_choice(&mut self, prompt: usize, choice: Choice) {
        let completion = &mut self.completions[prompt];
        completion.logps.push(choice.logp);
        completion.entropy += choice.entropy;
    }

    fn on_end(&mut self, prompt: usize, tokens: &[i32], _: EndReason) -> Result<(), Failure> {
        let completion = &mut self.completions[prompt];
        completion.tokens = tokens.to_vec();
        completion.entropy /= tokens.len().max(1) as f64;
        if let Some(ended) = &self.request.ended
            && ended.send(Some((self.first + prompt, completion.clone()))).is_err()
        {
            // The caller reports the failure of the reward instead.
            return Err(Failure::stopped("a reward of an earlier completion failed"));
        }
        Ok(())
    }
}

/// Completes the prompts `range` of a request, in as many sequences at once as `decoder` has slots. Returns the completions in
/// order.
///
/// # Errors
/// A device that fails.
pub(crate) fn complete<D: SlotDecoder>(
    decoder: &mut D,
    request: &CompletionRequest,
    range: Range<usize>,
) -> Result<Vec<SampledCompletion>, DeviceFailure> {
    let CompletionRequest { prompts, max_new_tokens, sampling, end_tokens, .. } = request;
    let decoding = Decoding { sampling, end_tokens, max_new_tokens: *max_new_tokens };
    let max_new_tokens = *max_new_tokens;
    let first = range.start;
    let prompts = prompts[range].iter().map(|(tokens, seed)| BatchPrompt { tokens, max_new_tokens, seed: *seed });
    let batch: Vec<BatchPrompt> = prompts.collect();
    let completions = vec![SampledCompletion::default(); batch.len()];
    let mut collector = Collector { request, first, completions };
    answer_batch(decoder, &decoding, &batch, request.threads, &mut collector)?;
    Ok(collector.completions)
}
