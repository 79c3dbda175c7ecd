//! The format `rollouts`: completions that a model has sampled, as token ids, with their rewards. Completions of the same
//! prompt follow each other.

use super::IGNORED_LABEL;
use super::containers::{ByteCounter, PlacedRecord, RecordReader};
use super::error::{DataError, SourceLocation};
use super::record_format::RecordFormat;
use super::token_line::TokenLine;
use crate::config::GrpoSection;
use plimsoll_core::format_count;
use serde::Deserialize;
use std::path::PathBuf;

/// A record of the format `rollouts`.
#[derive(Debug, Deserialize)]
pub(super) struct Rollout {
    prompt_ids: Vec<i32>,
    completion_ids: Vec<i32>,
    rewards: RewardValues,
    old_logps: Option<Vec<f64>>,
}

/// The rewards of a completion: one number, or one for each reward function, `null` for no opinion.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum RewardValues {
    One(Option<f64>),
    Several(Vec<Option<f64>>),
}

/// Rewards and log-probabilities of a completion.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RolloutRewards {
    /// The rewards, `None` for no opinion.
    pub rewards: Vec<Option<f64>>,
    /// Log-probability of each token of the completion when it was sampled; `None` if the current weights sampled it.
    pub old_logps: Option<Vec<f64>>,
}

impl Rollout {
    /// Checks the lengths of the lists.
    pub fn check(&self) -> Result<(), String> {
        for (key, ids) in [("prompt_ids", &self.prompt_ids), ("completion_ids", &self.completion_ids)] {
            if ids.is_empty() {
                return Err(format!("`{key}` is empty"));
            }
        }
        let (tokens, values) = (self.completion_ids.len(), self.old_logps.as_ref().map(Vec::len));
        match values.filter(|values| *values != tokens) {
            Some(values) => {
                let (values, tokens) = (format_count(values, "value"), format_count(tokens, "token"));
                Err(format!("`old_logps` has {values} for {tokens}"))
            }
            None => Ok(()),
        }
    }

    /// Checks that prompt and completion are not longer than the settings allow.
    fn check_lengths(&self, settings: &GrpoSection) -> Result<(), String> {
        for (key, ids, limit) in [
            ("max_prompt_length", &self.prompt_ids, settings.max_prompt_length),
            ("max_completion_length", &self.completion_ids, settings.max_completion_length),
        ] {
            if ids.len() > limit as usize {
                return Err(format!("{} exceed grpo.{key} = {limit}", format_count(ids.len(), "token")));
            }
        }
        Ok(())
    }
}

impl From<Rollout> for TokenLine {
    fn from(Rollout { prompt_ids, completion_ids, .. }: Rollout) -> TokenLine {
        let mut labels = vec![IGNORED_LABEL; prompt_ids.len()];
        labels.extend(&completion_ids);
        TokenLine::labelled([prompt_ids, completion_ids].concat(), labels)
    }
}

/// Reads the rewards of all completions in `files`, in order.
///
/// # Errors
/// A record of another form, completions that exceed the lengths of `settings`, groups that are incomplete or have
/// different prompts, and completions with different numbers of rewards.
pub(crate) fn read_rollouts(files: &[PathBuf], settings: &GrpoSection) -> Result<Vec<RolloutRewards>, DataError> {
    let counter = ByteCounter::default();
    let mut found: Vec<RolloutRewards> = Vec::new();
    let (mut prompt, mut last) = (Vec::new(), None);
    for file in files {
        let mut records = RecordReader::open(file, &counter)?;
        while let Some(PlacedRecord { place, record }) = records.read_next()? {
            let location = SourceLocation { file: file.clone(), place };
            let malformed = |reason| {
                let format = Some(RecordFormat::Rollouts);
                DataError::MalformedRecord { location: location.clone(), reason, format }
            };
            let rollout: Rollout = record.parse().map_err(malformed)?;
            rollout.check().and_then(|()| rollout.check_lengths(settings)).map_err(malformed)?;
            let in_group = found.len() as u64 % settings.num_generations;
            if in_group > 0 && rollout.prompt_ids != prompt {
                let wanted = format_count(settings.num_generations, "completion");
                let reason = format!("the prompt differs from that before, but a group has {wanted} of one prompt");
                return Err(malformed(reason));
            }
            let Rollout { prompt_ids, rewards, old_logps, .. } = rollout;
            let rewards = match rewards {
                RewardValues::One(reward) => vec![reward],
                RewardValues::Several(rewards) => rewards,
            };
            let expected = found.first().map_or(rewards.len(), |first| first.rewards.len());
            if rewards.len() != expected || expected == 0 {
                let (count, expected) = (format_count(rewards.len(), "reward"), expected.max(1));
                return Err(malformed(format!("`rewards` has {count}, expected {expected} as in the first record")));
            }
            found.push(RolloutRewards { rewards, old_logps });
            (prompt, last) = (prompt_ids, Some(location));
        }
    }
    match (found.len() as u64 % settings.num_generations, last) {
        (0, _) | (_, None) => Ok(found),
        (left, Some(location)) => {
            let (left, wanted) = (format_count(left, "completion"), settings.num_generations);
            let reason = format!("the last group has {left}, but grpo.num_generations is {wanted}");
            Err(DataError::MalformedRecord { location, reason, format: Some(RecordFormat::Rollouts) })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::fs;

    fn read(records: &[Value]) -> Result<Vec<RolloutRewards>, String> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rollouts.jsonl");
        let lines: Vec<String> = records.iter().map(Value::to_string).collect();
        fs::write(&file, lines.join("\n")).unwrap();
        let settings = GrpoSection {
            num_generations: 2,
            max_prompt_length: 3,
            max_completion_length: 2,
            ..GrpoSection::default()
        };
        read_rollouts(&[file], &settings).map_err(|error| error.to_string().split_once(".jsonl").unwrap().1.to_owned())
    }

    fn record(prompt: &[i32], completion: &[i32], rewards: Value) -> Value {
        json!({ "prompt_ids": prompt, "completion_ids": completion, "rewards": rewards })
    }

    #[test]
    fn rewards_may_be_one_several_or_null() {
        let found = read(&[record(&[1], &[2], json!(0.5)), record(&[1], &[2, 3], json!(null))]).unwrap();
        assert_eq!(found[0], RolloutRewards { rewards: vec![Some(0.5)], old_logps: None });
        assert_eq!(found[1].rewards, [None]);
        let mut with_old = record(&[1], &[2, 3], json!([1, null]));
        with_old["old_logps"] = json!([-0.5, -1.5]);
        let found = read(&[record(&[1], &[2], json!([null, 2.0])), with_old]).unwrap();
        assert_eq!(found[1], RolloutRewards { rewards: vec![Some(1.0), None], old_logps: Some(vec![-0.5, -1.5]) });
    }

    #[test]
    fn records_that_are_no_group_are_refused() {
        let good = || record(&[1], &[2], json!(1.0));
        let mut bad = good();
        bad["old_logps"] = json!([1.0, 2.0]);
        for (records, expected) in [
            (vec![good()], ":1: the last group has 1 completion, but grpo.num_generations is 2"),
            (
                vec![good(), record(&[2], &[2], json!(1.0))],
                ":2: the prompt differs from that before, but a group has 2 completions of one prompt",
            ),
            (vec![record(&[], &[2], json!(1.0))], ":1: `prompt_ids` is empty"),
            (vec![record(&[1], &[], json!(1.0))], ":1: `completion_ids` is empty"),
            (vec![record(&[1; 4], &[2], json!(1.0))], ":1: 4 tokens exceed grpo.max_prompt_length = 3"),
            (vec![record(&[1], &[2; 3], json!(1.0))], ":1: 3 tokens exceed grpo.max_completion_length = 2"),
            (vec![bad], ":1: `old_logps` has 2 values for 1 token"),
            (
                vec![good(), record(&[1], &[2], json!([1.0, 2.0]))],
                ":2: `rewards` has 2 rewards, expected 1 as in the first record",
            ),
        ] {
            assert_eq!(read(&records).unwrap_err(), expected);
        }
    }

    #[test]
    fn only_tokens_of_the_completion_have_labels() {
        let rollout: Rollout = serde_json::from_value(record(&[5, 6], &[7], json!(1.0))).unwrap();
        assert_eq!(TokenLine::from(rollout), TokenLine::labelled(vec![5, 6, 7], vec![-100, -100, 7]));
    }
}
