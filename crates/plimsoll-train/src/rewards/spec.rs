//! Entries of `grpo.rewards`: the name of a reward and its argument.

use fancy_regex::{Regex, RegexBuilder};
use plimsoll_core::Failure;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

/// All forms of an entry.
pub(super) const FORMS: [&str; 9] = [
    "exact_match[:COLUMN]",
    "numeric[:COLUMN]",
    "regex:PATTERN",
    "format_think_answer[:opened]",
    "length_penalty:TOKENS",
    "json_schema[:FILE]",
    "python:FILE.py:FUNCTION",
    "reasoning_gym:DATASET",
    "command:COMMAND",
];

/// Key of a record that holds the expected answer unless an entry names another one.
const DEFAULT_COLUMN: &str = "answer";

/// Largest number of backtracking steps of a regular expression on one text. They take about a tenth of a second.
const BACKTRACK_LIMIT: usize = 1_000_000;

/// One reward, parsed from an entry such as `exact_match`. Rewards are 1 or 0 unless their description says otherwise.
/// `Display` writes an entry that parses to the same reward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RewardSpec {
    /// The text equals that of a column, both without white space at their ends.
    ExactMatch {
        /// Key of the record.
        column: String,
    },
    /// The last number of the text equals the last number of a column.
    Numeric {
        /// Key of the record.
        column: String,
    },
    /// The pattern occurs in the text.
    Regex {
        /// A valid regular expression in the syntax of `fancy-regex`.
        pattern: String,
    },
    /// The text is `<think>…</think><answer>…</answer>`.
    FormatThinkAnswer {
        /// Whether the prompt always ends with the tag `<think>`, so that the text begins after it.
        opened: bool,
    },
    /// From 0 to -1: minus the tokens above a limit, divided by the limit.
    LengthPenalty {
        /// Largest number of tokens without a penalty.
        tokens: NonZeroUsize,
    },
    /// The text is JSON that satisfies a schema.
    JsonSchema {
        /// File of the schema; `None` for the key `schema` of the record.
        file: Option<PathBuf>,
    },
    /// A function in Python computes any number.
    Python {
        /// A file with the ending `.py`, or a module.
        place: String,
        /// Name of the function in it.
        function: String,
    },
    /// The score of an answer, as the Python package reasoning-gym computes it.
    ReasoningGym {
        /// Name of the dataset.
        dataset: String,
    },
    /// A process computes any number.
    Command {
        /// Command line for `sh`.
        command: String,
    },
}

/// An error of parsing a [`RewardSpec`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseRewardError {
    /// No reward has this name.
    #[error("`{name}` is not a reward, expected one of {}", FORMS.join(", "))]
    Unknown {
        /// The text before the first `:`.
        name: String,
    },
    /// The argument after the name is missing, superfluous or invalid.
    #[error("reward `{text}` does not have the form {form}")]
    Argument {
        /// The text that failed to parse.
        text: String,
        /// The form of the reward.
        form: &'static str,
    },
    /// The pattern of `regex:PATTERN` is invalid.
    #[error("reward `regex:{pattern}` has an invalid pattern: {problem}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// Description of the problem.
        problem: String,
    },
}

impl From<ParseRewardError> for Failure {
    fn from(error: ParseRewardError) -> Failure {
        Failure::input(error.to_string())
    }
}

/// Compiles a regular expression that gives up after [`BACKTRACK_LIMIT`] steps.
///
/// # Errors
/// An invalid or too large pattern.
pub(super) fn compile(pattern: &str) -> Result<Regex, ParseRewardError> {
    RegexBuilder::new(pattern)
        .backtrack_limit(BACKTRACK_LIMIT)
        .build()
        .map_err(|error| ParseRewardError::Pattern { pattern: pattern.to_owned(), problem: error.to_string() })
}

impl RewardSpec {
    /// Returns the entry that parses to this reward, such as `exact_match`.
    pub fn name(&self) -> String {
        self.to_string()
    }
}

/// Returns whether `name` can name a function of a module, or of a class in it.
fn is_python_name(name: &str) -> bool {
    name.split('.').all(|part| {
        !part.is_empty()
            && !part.starts_with(|first: char| first.is_ascii_digit())
            && part.chars().all(|character| character.is_alphanumeric() || character == '_')
    })
}

impl FromStr for RewardSpec {
    type Err = ParseRewardError;

    fn from_str(text: &str) -> Result<RewardSpec, ParseRewardError> {
        let (name, argument) = match text.split_once(':') {
            // Spaces in a pattern have a meaning.
            Some((name, argument)) if name.trim() == "regex" => (name.trim(), Some(argument)),
            Some((name, argument)) => (name.trim(), Some(argument.trim())),
            None => (text.trim(), None),
        };
        let has_name = |form: &&&str| form.split([':', '[']).next() == Some(name);
        let Some(form) = FORMS.iter().find(has_name) else {
            return Err(ParseRewardError::Unknown { name: name.to_owned() });
        };
        let wrong_argument = || ParseRewardError::Argument { text: text.to_owned(), form };
        let required = || argument.filter(|argument| !argument.is_empty()).ok_or_else(wrong_argument);
        if argument.is_some() {
            required()?;
        }
        let column = || argument.unwrap_or(DEFAULT_COLUMN).to_owned();
        Ok(match name {
            "exact_match" => RewardSpec::ExactMatch { column: column() },
            "numeric" => RewardSpec::Numeric { column: column() },
            "regex" => {
                let pattern = required()?.to_owned();
                compile(&pattern)?;
                RewardSpec::Regex { pattern }
            }
            "format_think_answer" if argument.is_none_or(|argument| argument == "opened") => {
                RewardSpec::FormatThinkAnswer { opened: argument.is_some() }
            }
            "length_penalty" => {
                RewardSpec::LengthPenalty { tokens: required()?.parse().map_err(|_| wrong_argument())? }
            }
            "json_schema" => RewardSpec::JsonSchema { file: argument.map(PathBuf::from) },
            "python" => {
                let (place, function) = required()?.rsplit_once(':').ok_or_else(wrong_argument)?;
                if place.is_empty() || !is_python_name(function) {
                    return Err(wrong_argument());
                }
                RewardSpec::Python { place: place.to_owned(), function: function.to_owned() }
            }
            "reasoning_gym" => RewardSpec::ReasoningGym { dataset: required()?.to_owned() },
            "command" => RewardSpec::Command { command: required()?.to_owned() },
            _ => return Err(wrong_argument()),
        })
    }
}

impl fmt::Display for RewardSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RewardSpec::ExactMatch { column } if column == DEFAULT_COLUMN => f.write_str("exact_match"),
            RewardSpec::ExactMatch { column } => write!(f, "exact_match:{column}"),
            RewardSpec::Numeric { column } if column == DEFAULT_COLUMN => f.write_str("numeric"),
            RewardSpec::Numeric { column } => write!(f, "numeric:{column}"),
            RewardSpec::Regex { pattern } => write!(f, "regex:{pattern}"),
            RewardSpec::FormatThinkAnswer { opened: false } => f.write_str("format_think_answer"),
            RewardSpec::FormatThinkAnswer { opened: true } => f.write_str("format_think_answer:opened"),
            RewardSpec::LengthPenalty { tokens } => write!(f, "length_penalty:{tokens}"),
            RewardSpec::JsonSchema { file: None } => f.write_str("json_schema"),
            RewardSpec::JsonSchema { file: Some(file) } => write!(f, "json_schema:{}", file.display()),
            RewardSpec::Python { place, function } => write!(f, "python:{place}:{function}"),
            RewardSpec::ReasoningGym { dataset } => write!(f, "reasoning_gym:{dataset}"),
            RewardSpec::Command { command } => write!(f, "command:{command}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<RewardSpec, ParseRewardError> {
        text.parse()
    }

    #[test]
    fn displayed_entry_parses_to_same_reward() {
        let entries = [
            "exact_match",
            "exact_match:solution",
            "numeric",
            "numeric:solution",
            "regex: a:b ",
            r"regex:(?<=x)\d",
            "format_think_answer",
            "format_think_answer:opened",
            "length_penalty:512",
            "json_schema",
            "json_schema:a b.json",
            "python:rewards/a b:c.py:accuracy",
            "python:trl.rewards:think_format_reward",
            "reasoning_gym:leg_counting",
            "command:python3 reward.py --url http://localhost:80",
        ];
        for entry in entries {
            let reward = parse(entry).unwrap();
            assert_eq!((reward.name(), reward.to_string()), (entry.to_owned(), entry.to_owned()));
            assert_eq!(reward.to_string().parse(), Ok(reward));
        }
        assert_eq!(parse(" exact_match : answer ").unwrap().name(), "exact_match");
        assert_eq!(parse("regex: a ").unwrap(), RewardSpec::Regex { pattern: " a ".to_owned() });
        assert_eq!(parse("command: a ").unwrap(), RewardSpec::Command { command: "a".to_owned() });
    }

    #[test]
    fn unknown_reward_names_all_forms() {
        for text in ["", "exactmatch", "Exact_match", "reward.py", "command", "regex", "length_penalty", ":answer"] {
            let error = parse(text).unwrap_err();
            let ParseRewardError::Unknown { .. } = error else {
                assert!(error.to_string().contains(&format!("{text}:")), "{error}");
                continue;
            };
            assert!(FORMS.iter().all(|form| error.to_string().contains(form)), "{error}");
        }
    }

    #[test]
    fn wrong_argument_names_the_form() {
        let invalid = [
            "exact_match:",
            "numeric: ",
            "regex:",
            "format_think_answer:closed",
            "length_penalty:0",
            "length_penalty:-1",
            "length_penalty:1.5",
            "length_penalty:99999999999999999999",
            "json_schema:",
            "python:rewards.py",
            "python::f",
            "python:rewards.py:",
            "python:rewards.py:2f",
            "python:rewards.py:f()",
            "reasoning_gym:",
            "command:  ",
        ];
        for text in invalid {
            let error = parse(text).unwrap_err();
            assert!(matches!(error, ParseRewardError::Argument { .. }), "{text}: {error}");
            let failure = Failure::from(error);
            assert!(failure.message.contains(text.split(':').next().unwrap()), "{failure}");
            assert_eq!(failure.exit, plimsoll_core::Exit::Input);
        }
    }

    #[test]
    fn invalid_pattern_is_refused_at_once() {
        for pattern in ["(", "[a", "(?P<x", r"\1", "(?:(?:a{1000}){1000}){1000}"] {
            let error = parse(&format!("regex:{pattern}")).unwrap_err();
            assert!(matches!(error, ParseRewardError::Pattern { .. }), "{error}");
            assert!(error.to_string().contains(&format!("`regex:{pattern}`")), "{error}");
        }
    }
}
