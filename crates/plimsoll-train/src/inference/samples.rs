//! Tokens from a model: greedy or drawn, the same for the same seed.

use crate::data::{Dataset, Rows, Tokenizer, mix};
use crate::session::engine::Engine;
use crate::session::trouble::Trouble;
use plimsoll_core::Failure;
use plimsoll_program::models::ModelConfig;
use std::path::Path;

/// A prompt, and what the model made of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sample {
    /// What it was given.
    pub prompt: String,
    /// What it said.
    pub answer: String,
    /// What the data say.
    pub expected: String,
}

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most likely token.
    pub temperature: f64,
    /// Only so many of the most likely ones; 0 = all.
    pub top_k: usize,
    /// Only the most likely ones that have this share together; 1 = all.
    pub top_p: f64,
    /// Of the draws.
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };

    /// The token after `position` tokens.
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
        let mut kept = 0.0;
        let enough = order.iter().position(|&i| {
            kept += weight(i) / total;
            kept >= self.top_p
        });
        order.truncate(enough.map_or(order.len(), |last| last + 1));
        let total: f64 = order.iter().map(|&i| weight(i)).sum();
        let mut rest = uniform(self.seed, position) * total;
        for &i in &order {
            rest -= weight(i);
            if rest < 0.0 {
                return i;
            }
        }
        *order.last().unwrap_or(&best)
    }
}

/// A number from 0 up to 1: a function of its arguments (splitmix64 of Steele, Lea and Flood, twice).
fn uniform(seed: u64, position: u64) -> f64 {
    (mix(mix(seed) ^ position) >> 11) as f64 / (1u64 << 53) as f64
}

/// What tokens can be put into, one after the other: a device, or a team whose devices need each other for it.
pub trait Continues {
    /// Puts tokens behind the `length` tokens that the cache holds, and gives the logits of the one that follows the last.
    ///
    /// # Errors
    /// What a device fails with.
    fn extend(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, Trouble>;

    /// Tokens that the cache can hold.
    fn capacity(&self) -> usize;
}

impl Continues for Engine {
    fn extend(&mut self, tokens: &[i32], length: usize) -> Result<Vec<f64>, Trouble> {
        Ok(Engine::extend(self, tokens, length)?)
    }

    fn capacity(&self) -> usize {
        Engine::capacity(self)
    }
}

/// Goes on from `prompt` for at most `most` tokens, or until one of `ends`; `room` is what the cache holds.
pub fn generate(
    engine: &mut impl Continues,
    prompt: &[i32],
    most: usize,
    room: usize,
    ends: &[i64],
    sampling: &Sampling,
) -> Result<Vec<i32>, Trouble> {
    let mut tokens = Vec::new();
    let mut logits = engine.extend(prompt, 0)?;
    let mut length = prompt.len();
    while tokens.len() < most {
        let token = sampling.choose(&logits, length as u64) as i32;
        tokens.push(token);
        if ends.contains(&i64::from(token)) || tokens.len() == most || length >= room {
            break;
        }
        logits = engine.extend(&[token], length)?;
        length += 1;
    }
    Ok(tokens)
}

/// How many samples are shown at the end of a run.
const SHOWN: usize = 5;
/// Rows that are looked at for them.
const LOOKED_AT: u64 = 64;
/// Tokens of an answer, at most.
const ANSWER: usize = 32;
/// Tokens of a prompt where no label says where it ends.
const PROMPT: usize = 8;

/// A sample in tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Drawn {
    prompt: Vec<i32>,
    answer: Vec<i32>,
    expected: Vec<i32>,
}

/// Prompts from evaluation data with what the model makes of them: what stands before the first label
/// of a row, or its first tokens. Rows without labels, or too long for the cache, show nothing.
///
/// # Errors
/// Data that cannot be read after all.
pub fn samples(engine: &mut impl Continues, data: &Dataset, config: &ModelConfig) -> Result<Vec<Drawn>, Trouble> {
    let mut rows = Rows::new(1, data.sequence());
    let mut drawn = Vec::new();
    for row in 0..data.rows().min(LOOKED_AT) {
        data.read([row], &mut rows)?;
        // Only the first document of the row.
        let document = rows.document_start.iter().take_while(|&&start| start == 0).count();
        let Some(first) = rows.labels[..document].iter().position(|&label| label >= 0) else { continue };
        let length = if first == 0 { document.min(PROMPT) } else { first + 1 };
        let expected = rows.labels[length - 1..document].iter().copied().take_while(|&label| label >= 0);
        let expected: Vec<i32> = expected.take(ANSWER).collect();
        let room = engine.capacity();
        // The last token of an answer is not read again.
        if expected.is_empty() || length + expected.len() - 1 > room {
            continue;
        }
        let prompt = rows.tokens[..length].to_vec();
        let answer = generate(engine, &prompt, expected.len(), room, &config.eos, &Sampling::GREEDY)?;
        drawn.push(Drawn { prompt, answer, expected });
        if drawn.len() == SHOWN {
            break;
        }
    }
    Ok(drawn)
}

/// Samples as text.
///
/// # Errors
/// A tokenizer that cannot be read.
pub fn readable(drawn: &[Drawn], tokenizer: &Path) -> Result<Vec<Sample>, Failure> {
    let tokenizer = Tokenizer::load(tokenizer)?;
    let text = |ids: &[i32]| tokenizer.decode(&ids.iter().map(|&id| id as u32).collect::<Vec<_>>());
    let sample =
        |d: &Drawn| Ok(Sample { prompt: text(&d.prompt)?, answer: text(&d.answer)?, expected: text(&d.expected)? });
    drawn.iter().map(sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_a_function_of_the_seed_and_follow_the_weights() {
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
    fn cuts_keep_only_the_most_likely() {
        let logits = [1.0, 3.0, 2.0, 0.0];
        let base = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 1 };
        let drawn = |s: Sampling| (0..500).map(|p| s.choose(&logits, p)).collect::<std::collections::BTreeSet<_>>();
        assert_eq!(drawn(base).len(), 4);
        assert_eq!(drawn(Sampling { top_k: 2, ..base }), [1, 2].into());
        assert_eq!(drawn(Sampling { top_p: 0.5, ..base }), [1].into());
        assert_eq!(drawn(Sampling::GREEDY), [1].into());
    }
}
