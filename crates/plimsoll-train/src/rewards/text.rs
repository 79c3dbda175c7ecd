//! Built-in rewards of the text of a completion.

use super::spec::compile;
use super::{Completion, ParseRewardError};
use fancy_regex::Regex;
use plimsoll_core::{Failure, format_count};
use serde_json::Value;
use std::borrow::Cow;

/// Returns the text of a column: a string, or a number or boolean as JSON writes it.
///
/// # Errors
/// A column that is missing, null, a list or an object.
pub(super) fn column_text<'a>(
    reward: &str,
    column: &str,
    completion: &Completion<'a>,
) -> Result<Cow<'a, str>, Failure> {
    let kind = match completion.column(reward, column)? {
        Value::String(text) => return Ok(Cow::Borrowed(text)),
        value @ (Value::Number(_) | Value::Bool(_)) => return Ok(Cow::Owned(value.to_string())),
        Value::Array(_) => "a list",
        _ => "an object",
    };
    Err(Failure::input(format!(
        "reward {reward}: key `{column}` of a record holds {kind}, expected a string, a number or a boolean"
    )))
}

/// Returns whether the text of a completion equals that of a column, both without white space at their ends.
///
/// # Errors
/// Those of [`column_text`].
pub(super) fn exact_match(reward: &str, column: &str, completion: &Completion) -> Result<bool, Failure> {
    Ok(completion.text.trim() == column_text(reward, column, completion)?.trim())
}

/// A regular expression that is searched in texts.
pub(super) struct PatternReward {
    regex: Regex,
    /// Number of texts since the last warning on which the search gave up.
    given_up: usize,
}

impl PatternReward {
    /// Compiles a pattern.
    ///
    /// # Errors
    /// An invalid pattern.
    pub fn open(pattern: &str) -> Result<PatternReward, ParseRewardError> {
        Ok(PatternReward { regex: compile(pattern)?, given_up: 0 })
    }

    /// Returns whether the pattern occurs in a text. A search that needs too many backtracking steps returns false.
    pub fn occurs_in(&mut self, text: &str) -> bool {
        self.regex.is_match(text).unwrap_or_else(|_| {
            self.given_up += 1;
            false
        })
    }

    /// Removes and returns the warning about searches that gave up.
    pub fn warning(&mut self, reward: &str) -> Option<String> {
        let count = std::mem::take(&mut self.given_up);
        let texts = format_count(count, "completion");
        (count > 0).then(|| {
            format!("reward {reward}: {texts} counted 0, because the pattern needs too many backtracking steps")
        })
    }
}

const THINK: &str = "<think>";
const TAGS: [&str; 4] = [THINK, "</think>", "<answer>", "</answer>"];

/// Returns whether a completion is `<think>…</think><answer>…</answer>` with each tag once, and white space around and
/// between the two parts only.
///
/// The first tag must be absent from the text if it stands at the end of the prompt. A record does not show the tag if
/// the chat template writes it; `opened` says that it does.
pub(super) fn has_think_answer_form(completion: &Completion, opened: bool) -> bool {
    let opened = opened || prompt_text(completion.prompt).trim_end().ends_with(THINK);
    let text = completion.text.trim();
    let parts = || {
        let (thought, rest) = if opened { text } else { text.strip_prefix(THINK)? }.split_once(TAGS[1])?;
        Some((thought, rest.trim_start().strip_prefix(TAGS[2])?.strip_suffix(TAGS[3])?))
    };
    let has_tag = |part: &str| TAGS.iter().any(|tag| part.contains(tag));
    parts().is_some_and(|(thought, answer)| !has_tag(thought) && !has_tag(answer))
}

/// Returns the text of a prompt: the string, or the content of the last message.
fn prompt_text(prompt: &Value) -> &str {
    let last = prompt.as_array().and_then(|messages| messages.last());
    let text = last.map_or(prompt, |message| &message["content"]);
    text.as_str().unwrap_or_default()
}
