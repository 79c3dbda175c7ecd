//! One reward of a run: opening and calling it.

use super::command::CommandReward;
use super::json_schema::SchemaReward;
use super::text::{PatternReward, exact_match, has_think_answer_form};
use super::{Call, Completion, RewardSpec, number};
use plimsoll_core::Failure;
use std::fs::File;
use std::time::Duration;

/// An opened reward.
pub(super) struct RewardFunction {
    name: String,
    kind: Kind,
}

/// State of a reward, for each kind of reward.
enum Kind {
    ExactMatch { column: String },
    Numeric { column: String },
    Regex(PatternReward),
    FormatThinkAnswer { opened: bool },
    LengthPenalty { tokens: usize },
    JsonSchema(SchemaReward),
    Command(CommandReward),
}

impl RewardFunction {
    /// Opens a reward. `timeout` is the longest permitted time until the next line of a command.
    ///
    /// # Errors
    /// A schema or a file of Python that cannot be read, or a pattern that is invalid.
    pub fn open(spec: &RewardSpec, timeout: Duration) -> Result<RewardFunction, Failure> {
        let name = spec.name();
        let kind = match spec {
            RewardSpec::ExactMatch { column } => Kind::ExactMatch { column: column.clone() },
            RewardSpec::Numeric { column } => Kind::Numeric { column: column.clone() },
            RewardSpec::Regex { pattern } => Kind::Regex(PatternReward::open(pattern)?),
            RewardSpec::FormatThinkAnswer { opened } => Kind::FormatThinkAnswer { opened: *opened },
            RewardSpec::LengthPenalty { tokens } => Kind::LengthPenalty { tokens: tokens.get() },
            RewardSpec::JsonSchema { file: Some(file) } => Kind::JsonSchema(SchemaReward::open(file)?),
            RewardSpec::JsonSchema { file: None } => Kind::JsonSchema(SchemaReward::of_records()),
            RewardSpec::Python { place, function } => {
                check_file(&name, place)?;
                let arguments = ["python", place, function].map(str::to_owned);
                Kind::Command(CommandReward::of_python(&name, &arguments, timeout))
            }
            RewardSpec::ReasoningGym { dataset } => {
                let arguments = ["reasoning_gym", dataset].map(str::to_owned);
                Kind::Command(CommandReward::of_python(&name, &arguments, timeout))
            }
            RewardSpec::Command { command } => Kind::Command(CommandReward::new(&name, command, timeout)),
        };
        Ok(RewardFunction { name, kind })
    }

    /// Returns the name of the reward.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Computes the reward of each completion, in order.
    ///
    /// # Errors
    /// Those of [`super::Rewards::score`].
    pub fn score(&mut self, completions: &[Completion], call: &mut Call) -> Result<Vec<Option<f64>>, Failure> {
        let name = &*self.name;
        let flag = |is_met: bool| f64::from(u8::from(is_met));
        match &mut self.kind {
            Kind::ExactMatch { column } => score_each(completions, |one| exact_match(name, column, one).map(flag)),
            Kind::Numeric { column } => score_each(completions, |one| number::matches(name, column, one).map(flag)),
            Kind::Regex(pattern) => score_each(completions, |one| Ok(flag(pattern.occurs_in(one.text)))),
            Kind::FormatThinkAnswer { opened } => {
                score_each(completions, |one| Ok(flag(has_think_answer_form(one, *opened))))
            }
            Kind::LengthPenalty { tokens } => {
                score_each(completions, |one| Ok(length_penalty(one.tokens.len(), *tokens)))
            }
            Kind::JsonSchema(schema) => score_each(completions, |one| schema.is_satisfied(name, one).map(flag)),
            Kind::Command(command) => command.score(completions, call),
        }
    }

    /// Removes and returns the warnings since the last call.
    pub fn warnings(&mut self) -> Vec<String> {
        match &mut self.kind {
            Kind::Regex(pattern) => pattern.warning(&self.name).into_iter().collect(),
            Kind::Command(command) => command.warnings(),
            _ => Vec::new(),
        }
    }
}

/// Refuses a file of Python that cannot be read, before any completion is sampled. Modules are left to the interpreter.
fn check_file(name: &str, place: &str) -> Result<(), Failure> {
    match place.ends_with(".py").then(|| File::open(place)) {
        Some(Err(error)) => Err(Failure::input(format!("reward {name}: cannot read {place}: {error}"))),
        _ => Ok(()),
    }
}

/// Computes a reward of each completion on its own.
fn score_each<'a>(
    completions: &[Completion<'a>],
    mut score: impl FnMut(&Completion<'a>) -> Result<f64, Failure>,
) -> Result<Vec<Option<f64>>, Failure> {
    completions.iter().map(|completion| score(completion).map(Some)).collect()
}

/// Returns the penalty of a completion of `count` tokens: 0 up to `limit`, then minus the excess divided by `limit`, at
/// least -1.
fn length_penalty(count: usize, limit: usize) -> f64 {
    let excess = count.saturating_sub(limit);
    if excess == 0 { 0.0 } else { -(excess as f64 / limit as f64).min(1.0) }
}
