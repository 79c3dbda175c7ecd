//! Token sampling, the generation loop, and the sample answers that a run shows at its end. The same seed yields the
//! same tokens.

use crate::data::{Dataset, Rows, Tokenizer, splitmix64};
use crate::engine::Engine;
use crate::engine::evaluation::ANSWER_TOKENS_MAX;
use crate::engine::failure::DeviceFailure;
use plimsoll_core::Failure;
use plimsoll_program::models::ModelConfig;
use serde::Serialize;
use std::path::Path;

/// A prompt from evaluation data with the model's continuation and, if the data have one, the right answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Sample {
    /// The prompt.
    pub prompt: String,
    /// The answer in the data; `None` if the prompt has no single right answer, as in prose.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// The model's continuation of the prompt.
    pub answer: String,
}

/// Rules for the choice of the next token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Softmax temperature. 0 selects the most likely token.
    pub temperature: f64,
    /// Number of the most likely tokens from which the next one is drawn; 0 means all.
    pub top_k: usize,
    /// Nucleus sampling: the next token is drawn from the fewest most likely tokens that together have this
    /// probability. 1 means all.
    pub top_p: f64,
    /// Seed of the random draws.
    pub seed: u64,
}

impl Sampling {
    /// Rules that always select the most likely token.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

    /// Returns the id of the token to put at `position` of the sequence, chosen by its `logits`, of shape `[V]`. The
    /// seed and `position` decide a random choice.
    pub fn choose(&self, logits: &[f64], position: u64) -> usize {
        let best = (0..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best });
        if self.temperature <= 0.0 {
            return best;
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        if self.top_k > 0 {
            order.truncate(self.top_k);
        }
        let weight = |i: usize| ((logits[i] - logits[best]) / self.temperature).exp();
        let total: f64 = order.iter().map(|&i| weight(i)).sum();
        let mut share = 0.0;
        let last_kept = order.iter().position(|&i| {
            share += weight(i) / total;
            share >= self.top_p
        });
        order.truncate(last_kept.map_or(order.len(), |last| last + 1));
        let total: f64 = order.iter().map(|&i| weight(i)).sum();
        let mut remaining = uniform(self.seed, position) * total;
        for &i in &order {
            remaining -= weight(i);
            if remaining < 0.0 {
                return i;
            }
        }
        *order.last().unwrap_or(&best)
    }
}

/// Returns a number in [0, 1) that depends only on its arguments, by hashing twice with splitmix64.
fn uniform(seed: u64, position: u64) -> f64 {
    (splitmix64(splitmix64(seed) ^ position) >> 11) as f64 / (1u64 << 53) as f64
}

/// A model with a key-value cache that generates token by token: on one device, or on a team of devices.
pub trait CachedDecoder {
    /// Appends `tokens` to the cache, which holds `length` tokens before. Returns the logits of the next token, of
    /// shape `[V]`.
    ///
    /// # Errors
    /// A device that fails.
    fn extend(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, DeviceFailure>;

    /// Returns the number of tokens that the cache can hold.
    fn capacity(&self) -> usize;
}

impl CachedDecoder for Engine {
    fn extend(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, DeviceFailure> {
        Ok(Engine::extend(self, tokens, length)?)
    }

    fn capacity(&self) -> usize {
        Engine::capacity(self)
    }
}

/// Generates and returns the tokens that follow `prompt`. Stops after `max_new_tokens` tokens, after one of
/// `end_tokens`, which is included, or when the cache of `capacity` tokens is full.
///
/// # Errors
/// A device that fails.
pub fn generate(
    decoder: &mut impl CachedDecoder,
    prompt: &[i32],
    max_new_tokens: usize,
    capacity: usize,
    end_tokens: &[i64],
    sampling: &Sampling,
) -> Result<Vec<i32>, DeviceFailure> {
    let mut tokens = Vec::new();
    let mut logits = decoder.extend(prompt, 0)?;
    let mut length = prompt.len();
    while tokens.len() < max_new_tokens {
        let token = sampling.choose(&logits, length as u64) as i32;
        tokens.push(token);
        let ended = end_tokens.contains(&i64::from(token));
        if ended || tokens.len() == max_new_tokens || length >= capacity {
            break;
        }
        logits = decoder.extend(&[token], length)?;
        length += 1;
    }
    Ok(tokens)
}

/// Largest number of samples that a run shows at its end.
const SAMPLES_SHOWN: usize = 5;
/// Number of rows of evaluation data that are searched for samples.
const ROWS_SEARCHED: u64 = 64;
/// Number of tokens of a sample's prompt if its row is labelled from the first token on.
const PROMPT_TOKENS: usize = 8;

/// A prompt, the model's continuation and the right answer, as tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSample {
    prompt: Vec<i32>,
    answer: Vec<i32>,
    /// `None` if the prompt has no single right answer.
    expected: Option<Vec<i32>>,
}

/// Continues up to 5 prompts from evaluation data with greedy decoding, by at most `ANSWER_TOKENS_MAX` tokens. A
/// prompt is the part of a row before its first label, or the first 8 tokens if the row is labelled from its start, as
/// prose is. Only the former has a right answer, and only a short one. Rows without labels, or too long for the cache,
/// are skipped.
///
/// # Errors
/// A device that fails, or data that can no longer be read.
pub fn generate_samples(
    decoder: &mut impl CachedDecoder,
    data: &Dataset,
    config: &ModelConfig,
) -> Result<Vec<TokenSample>, DeviceFailure> {
    let mut rows = Rows::new(1, data.sequence());
    let mut samples = Vec::new();
    for row in 0..data.rows().min(ROWS_SEARCHED) {
        data.read([row], &mut rows)?;
        // Uses only the first document of the row.
        let document = rows.document_start.iter().take_while(|&&start| start == 0).count();
        let Some(first) = rows.labels[..document].iter().position(|&label| label >= 0) else { continue };
        let length = if first == 0 { document.min(PROMPT_TOKENS) } else { first + 1 };
        let labelled = rows.labels[length - 1..document].iter().copied().take_while(|&label| label >= 0);
        let expected: Vec<i32> = labelled.collect();
        let new_tokens = expected.len().min(ANSWER_TOKENS_MAX);
        let capacity = decoder.capacity();
        // The last token of an answer is not put into the cache.
        if new_tokens == 0 || length + new_tokens - 1 > capacity {
            continue;
        }
        let prompt = rows.tokens[..length].to_vec();
        let answer = generate(decoder, &prompt, new_tokens, capacity, &config.eos, &Sampling::GREEDY)?;
        let has_right_answer = first > 0 && expected.len() == new_tokens;
        samples.push(TokenSample { prompt, answer, expected: has_right_answer.then_some(expected) });
        if samples.len() == SAMPLES_SHOWN {
            break;
        }
    }
    Ok(samples)
}

/// Decodes samples to text with the `tokenizer.json` at `tokenizer`.
///
/// # Errors
/// A tokenizer that cannot be read.
pub fn decode_samples(samples: &[TokenSample], tokenizer: &Path) -> Result<Vec<Sample>, Failure> {
    let tokenizer = Tokenizer::load(tokenizer)?;
    let text = |ids: &[i32]| tokenizer.decode(&ids.iter().map(|&id| id as u32).collect::<Vec<_>>());
    let sample = |d: &TokenSample| {
        let expected = d.expected.as_deref().map(text).transpose()?;
        Ok(Sample { prompt: text(&d.prompt)?, answer: text(&d.answer)?, expected })
    };
    samples.iter().map(sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_depend_on_seed_and_follow_weights() {
        let logits = [0.0, 2f64.ln(), 5f64.ln()];
        let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 7 };
        let mut counts = [0; 3];
        for position in 0..8000 {
            let token = sampling.choose(&logits, position);
            assert_eq!(token, sampling.choose(&logits, position));
            counts[token] += 1;
        }
        for (count, share) in counts.iter().zip([1.0, 2.0, 5.0]) {
            assert!((f64::from(*count) / 1000.0 - share).abs() < 0.2, "{counts:?}");
        }
    }

    #[test]
    fn top_k_and_top_p_keep_most_likely() {
        let logits = [1.0, 3.0, 2.0, 0.0];
        let base = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 1 };
        let drawn = |s: Sampling| (0..500).map(|p| s.choose(&logits, p)).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(drawn(base).len(), 4);
        assert_eq!(drawn(Sampling { top_k: 2, ..base }), [1, 2].into());
        assert_eq!(drawn(Sampling { top_p: 0.5, ..base }), [1].into());
        assert_eq!(drawn(Sampling::GREEDY), [1].into());
    }
}
