//! Completions of prompts for training, with the log-probability of each token as the sampler computed it.

use super::batch::{BatchListener, BatchPrompt, SlotDecoder, answer_batch};
use super::decoding::{Decoding, EndReason};
use super::sampling::Sampling;
use crate::engine::failure::DeviceFailure;
use plimsoll_core::Failure;
use std::ops::{ControlFlow, Range};

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
struct Collector {
    temperature: f64,
    completions: Vec<SampledCompletion>,
}

impl BatchListener for Collector {
    fn on_token(&mut self, _: usize, _: i32) -> Result<ControlFlow<EndReason>, Failure> {
        Ok(ControlFlow::Continue(()))
    }

    fn on_choice(&mut self, prompt: usize, token: i32, logits: &[f64]) {
        let (logp, entropy) = describe_choice(logits, self.temperature, token as usize);
        let completion = &mut self.completions[prompt];
        completion.logps.push(logp);
        completion.entropy += entropy;
    }

    fn on_end(&mut self, prompt: usize, tokens: &[i32], _: EndReason) -> Result<(), Failure> {
        let completion = &mut self.completions[prompt];
        completion.tokens = tokens.to_vec();
        completion.entropy /= tokens.len().max(1) as f64;
        Ok(())
    }
}

/// Returns the log-probability of a token and the entropy of the distribution of `logits` at a temperature; at temperature 0
/// those at temperature 1.
fn describe_choice(logits: &[f64], temperature: f64, token: usize) -> (f64, f64) {
    let scale = if temperature > 0.0 { 1.0 / temperature } else { 1.0 };
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut sum, mut weighted) = (0.0, 0.0);
    for logit in logits {
        let difference = (logit - largest) * scale;
        let weight = difference.exp();
        sum += weight;
        weighted += weight * difference;
    }
    let log_sum = sum.ln();
    ((logits[token] - largest) * scale - log_sum, log_sum - weighted / sum)
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
    let CompletionRequest { prompts, max_new_tokens, sampling, end_tokens } = request;
    let decoding = Decoding { sampling, end_tokens, max_new_tokens: *max_new_tokens };
    let max_new_tokens = *max_new_tokens;
    let prompts = prompts[range].iter().map(|(tokens, seed)| BatchPrompt { tokens, max_new_tokens, seed: *seed });
    let batch: Vec<BatchPrompt> = prompts.collect();
    let completions = vec![SampledCompletion::default(); batch.len()];
    let mut collector = Collector { temperature: sampling.temperature, completions };
    answer_batch(decoder, &decoding, &batch, &mut collector)?;
    Ok(collector.completions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_have_their_probability_and_entropy() {
        let logits = [0.0, 2f64.ln(), 5f64.ln()];
        let (logp, entropy) = describe_choice(&logits, 1.0, 2);
        let shares = [0.125f64, 0.25, 0.625];
        assert!((logp - shares[2].ln()).abs() < 1e-12);
        assert!((entropy + shares.iter().map(|share| share * share.ln()).sum::<f64>()).abs() < 1e-12);
        let squares = [1.0f64, 4.0, 25.0].map(|weight| weight / 30.0);
        let (logp, entropy) = describe_choice(&logits, 0.5, 1);
        assert!((logp - squares[1].ln()).abs() < 1e-12);
        assert!((entropy + squares.iter().map(|share| share * share.ln()).sum::<f64>()).abs() < 1e-12);
    }
}
