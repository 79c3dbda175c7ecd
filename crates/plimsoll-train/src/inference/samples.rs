//! The sample answers that a run shows at its end.

use super::decoding::{CachedDecoder, Decoding};
use super::sampling::Sampling;
use crate::data::{Dataset, Rows, Tokenizer};
use crate::engine::evaluation::ANSWER_TOKENS_MAX;
use crate::engine::failure::DeviceFailure;
use plimsoll_core::Failure;
use plimsoll_program::models::ModelConfig;
use serde::Serialize;
use std::ops::ControlFlow;
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
        let decoding = Decoding { sampling: &Sampling::GREEDY, end_tokens: &config.eos, max_new_tokens: new_tokens };
        let (answer, _) = decoding.run(decoder, &mut Vec::new(), &prompt, |_| ControlFlow::Continue(()))?;
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
