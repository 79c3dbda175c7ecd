//! The names of the formats of records.

use crate::config::{Format, Objective};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The format of the records of a data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordFormat {
    /// Text.
    Text,
    /// Token ids, with or without labels.
    Tokens,
    /// Conversations in the layout of OpenAI.
    Messages,
    /// Conversations in the layout of ShareGPT.
    Sharegpt,
    /// Instructions with answers in the layout of Alpaca.
    Alpaca,
    /// Prompts with completions.
    PromptCompletion,
    /// Pairs of a chosen and a rejected answer, or completions with a verdict.
    Preference,
    /// Prompts without completions.
    Prompt,
    /// Completions as token ids, with their rewards.
    Rollouts,
}

impl RecordFormat {
    /// Returns the name of the format in a run file.
    pub fn name(self) -> &'static str {
        match self {
            RecordFormat::Text => "text",
            RecordFormat::Tokens => "tokens",
            RecordFormat::Messages => "messages",
            RecordFormat::Sharegpt => "sharegpt",
            RecordFormat::Alpaca => "alpaca",
            RecordFormat::PromptCompletion => "prompt_completion",
            RecordFormat::Preference => "preference",
            RecordFormat::Prompt => "prompt",
            RecordFormat::Rollouts => "rollouts",
        }
    }

    /// Returns whether the records are tokenized.
    pub fn needs_tokenizer(self) -> bool {
        !matches!(self, RecordFormat::Tokens | RecordFormat::Rollouts)
    }

    /// Returns whether all records are conversations, which need a chat template.
    pub(super) fn needs_template(self) -> bool {
        matches!(self, RecordFormat::Messages | RecordFormat::Sharegpt | RecordFormat::Alpaca)
    }

    /// Returns whether records may be conversations.
    pub(super) fn may_need_template(self) -> bool {
        self.needs_template()
            || matches!(self, RecordFormat::PromptCompletion | RecordFormat::Preference | RecordFormat::Prompt)
    }

    /// Returns whether an objective trains on records of the format.
    pub(super) fn serves(self, objective: Objective) -> bool {
        let of = match self {
            RecordFormat::Preference => Objective::Dpo,
            RecordFormat::Prompt | RecordFormat::Rollouts => Objective::Grpo,
            _ => Objective::Supervised,
        };
        of == objective
    }

    /// Returns the keys that a record of the format has, for messages.
    pub(super) fn expected_keys(self) -> &'static str {
        match self {
            RecordFormat::Text => r#"{"text": "..."}"#,
            RecordFormat::Tokens => r#"{"input_ids": [..], "labels": [..]}; labels are optional"#,
            RecordFormat::Messages => r#"{"messages": [{"role": "user", "content": "..."}, ..]}"#,
            RecordFormat::Sharegpt => r#"{"conversations": [{"from": "human", "value": "..."}, ..]}"#,
            RecordFormat::Alpaca => r#"{"instruction": "...", "input": "...", "output": "..."}; input is optional"#,
            RecordFormat::PromptCompletion => {
                r#"{"prompt": "...", "completion": "..."}, both as text or both as lists of messages"#
            }
            RecordFormat::Preference => r#"{"prompt": "...", "chosen": "...", "rejected": "..."}; prompt is optional"#,
            RecordFormat::Prompt => r#"{"prompt": "..."}, as a text or a list of messages; rewards read other keys"#,
            RecordFormat::Rollouts => {
                r#"{"prompt_ids": [..], "completion_ids": [..], "rewards": 1.0, "old_logps": [..]}; old_logps are optional"#
            }
        }
    }
}

impl fmt::Display for RecordFormat {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Format {
    /// Returns the format that the run file names; `None` for a format to be recognized.
    pub fn named(self) -> Option<RecordFormat> {
        Some(match self {
            Format::Auto => return None,
            Format::Text => RecordFormat::Text,
            Format::Tokens => RecordFormat::Tokens,
            Format::Messages => RecordFormat::Messages,
            Format::Sharegpt => RecordFormat::Sharegpt,
            Format::Alpaca => RecordFormat::Alpaca,
            Format::PromptCompletion => RecordFormat::PromptCompletion,
            Format::Preference => RecordFormat::Preference,
            Format::Prompt => RecordFormat::Prompt,
            Format::Rollouts => RecordFormat::Rollouts,
        })
    }
}
