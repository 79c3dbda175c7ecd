//! Rewards of completions for reinforcement learning: built-in functions and commands of the user.
//!
//! [`Rewards`] holds all rewards of a run. It gives each [`Completion`] one value per reward, and [`weighted_sum`] adds
//! them up. Training is elsewhere: this module knows neither models nor devices.
//!
//! - `spec`: entries of the run file, such as `regex:PATTERN`
//! - `function`: opens and calls one reward
//! - `text`, `number`, `json_schema`: the built-in rewards
//! - `command`: rewards that a process of the user computes

mod command;
mod function;
mod json_schema;
mod number;
mod spec;
#[cfg(test)]
mod testing;
mod text;

pub use spec::{ParseRewardError, RewardSpec};

use function::RewardFunction;
use plimsoll_core::{Failure, format_count};
use serde_json::{Map, Value};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Largest number of restarts of commands between two calls of [`Rewards::begin_batch`].
const RESTARTS_MAX: u32 = 3;

/// A completion of a prompt, to be rewarded.
#[derive(Clone, Copy, Debug)]
pub struct Completion<'a> {
    /// The prompt: a text or the messages of a conversation, as in the record.
    pub prompt: &'a Value,
    /// Text of the completion, without special tokens.
    pub text: &'a str,
    /// Tokens of the completion.
    pub tokens: &'a [i32],
    /// All keys of the record of the prompt, such as `answer`.
    pub columns: &'a Map<String, Value>,
}

impl<'a> Completion<'a> {
    /// Returns the value of the record under the key `column`.
    ///
    /// # Errors
    /// A key that is missing or null. The message names the reward and the keys of the record.
    fn column(&self, reward: &str, column: &str) -> Result<&'a Value, Failure> {
        let problem = match self.columns.get(column) {
            Some(Value::Null) => "is null",
            Some(value) => return Ok(value),
            None => "is missing",
        };
        let keys: Vec<String> = self.columns.keys().map(|key| format!("`{key}`")).collect();
        let keys = if keys.is_empty() { "no keys".to_owned() } else { format!("the keys {}", keys.join(", ")) };
        Err(Failure::input(format!("reward {reward}: key `{column}` of a record {problem}; the record has {keys}"))
            .hint("name the key with the expected answer, as in exact_match:KEY, or correct the records"))
    }
}

/// State of one call of [`Rewards::score`], which its rewards share.
struct Call<'a> {
    /// The call must return early if one of them is true.
    stops: &'a [&'a AtomicBool],
    /// Number of restarts of commands that remain.
    restarts_left: u32,
}

/// All rewards of a run, with their weights. They own the processes of their commands: dropping them ends these.
pub struct Rewards {
    functions: Vec<RewardFunction>,
    weights: Vec<f64>,
    /// Number of restarts of commands that remain for this batch of completions.
    restarts_left: u32,
}

impl Rewards {
    /// Opens rewards. Reads the files of schemas, and starts no process. `timeout` is the longest permitted time until
    /// the next line of a command. Without `weights`, each weight is 1.
    ///
    /// # Errors
    /// No reward, a reward that occurs twice, another number of weights than of rewards, a weight that is not finite, or
    /// a schema that cannot be read.
    pub fn open(specs: &[RewardSpec], weights: &[f64], timeout: Duration) -> Result<Rewards, Failure> {
        if specs.is_empty() {
            return Err(Failure::input("there is no reward, expected at least one")
                .hint(format!("rewards are {}", spec::FORMS.join(", "))));
        }
        if let Some((_, twice)) = specs.iter().enumerate().find(|(index, spec)| specs[..*index].contains(spec)) {
            return Err(Failure::input(format!("reward {twice} occurs twice")).hint("give it a larger weight instead"));
        }
        if !weights.is_empty() && weights.len() != specs.len() {
            let (weights, rewards) = (format_count(weights.len(), "weight"), format_count(specs.len(), "reward"));
            return Err(Failure::input(format!("there are {weights} for {rewards}, expected one for each")));
        }
        if let Some(weight) = weights.iter().find(|weight| !weight.is_finite()) {
            return Err(Failure::input(format!("the weight {weight} of a reward is not a finite number")));
        }
        let functions: Result<Vec<_>, _> = specs.iter().map(|spec| RewardFunction::open(spec, timeout)).collect();
        let weights = if weights.is_empty() { vec![1.0; specs.len()] } else { weights.to_vec() };
        Ok(Rewards { functions: functions?, weights, restarts_left: RESTARTS_MAX })
    }

    /// Returns the names of all rewards, in order.
    pub fn names(&self) -> Vec<String> {
        self.functions.iter().map(|function| function.name().to_owned()).collect()
    }

    /// Returns the weight of each reward, in order.
    pub fn weights(&self) -> &[f64] {
        &self.weights
    }

    /// Begins a batch of completions, which may come in several calls of [`Rewards::score`]. Commands may restart three times
    /// for it.
    pub fn begin_batch(&mut self) {
        self.restarts_left = RESTARTS_MAX;
    }

    /// Computes all rewards of completions: one list for each completion, with one entry for each reward. `None` stands
    /// for a reward without an opinion. Rewards run one after another.
    ///
    /// # Errors
    /// A record without the column of a reward (exit 2), or a command that still fails after three restarts
    /// (exit 4, resumable). If one of `stops` becomes true while a command works, the call ends its process and fails with
    /// exit 4 within about two seconds; a caller tells this case by `stops`.
    pub fn score(
        &mut self,
        completions: &[Completion],
        stops: &[&AtomicBool],
    ) -> Result<Vec<Vec<Option<f64>>>, Failure> {
        let mut call = Call { stops, restarts_left: self.restarts_left };
        let mut scores = vec![Vec::new(); completions.len()];
        for function in &mut self.functions {
            let found = function.score(completions, &mut call);
            self.restarts_left = call.restarts_left;
            for (scores, score) in scores.iter_mut().zip(found?) {
                scores.push(score);
            }
        }
        Ok(scores)
    }

    /// Removes and returns the warnings since the last call, such as restarts of commands.
    pub fn warnings(&mut self) -> Vec<String> {
        self.functions.iter_mut().flat_map(RewardFunction::warnings).collect()
    }
}

/// Returns the weighted sum of the rewards that have an opinion, and `None` if none has one. Rewards beyond the end of
/// `weights` have the weight 1.
pub fn weighted_sum(rewards: &[Option<f64>], weights: &[f64]) -> Option<f64> {
    let weights = weights.iter().copied().chain(std::iter::repeat(1.0));
    let terms = rewards.iter().zip(weights).filter_map(|(reward, weight)| Some((*reward)? * weight));
    terms.reduce(|sum, term| sum + term)
}

#[cfg(test)]
mod tests;
