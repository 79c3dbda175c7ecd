//! The completions of a round, with their rewards: in memory, and in a file for each round in the folder `rounds` of the run.
//!
//! A file has the format `rollouts`, one line for each completion, and further keys. A run that continues within a round, or
//! returns to it, uses the completions of its file.

use super::alarms::Alarms;
use crate::config::{GrpoSection, RunConfig};
use crate::files::atomic;
use crate::planning::completions::CompletionSource;
use plimsoll_core::{Failure, RoundFigures};
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};

/// Folder of the files of rounds in the run folder.
const FOLDER: &str = "rounds";
/// Number of files that are kept: those of the newest rounds.
const FILES_MAX: u64 = 1000;

/// A completion of a round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Sample {
    /// Text of the prompt, or its messages; `None` for completions of a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<serde_json::Value>,
    /// Text of the completion; `None` for completions of a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completion: Option<String>,
    /// Tokens of the prompt.
    pub prompt_ids: Vec<i32>,
    /// Tokens of the completion.
    pub completion_ids: Vec<i32>,
    /// Its rewards, `None` for no opinion.
    pub rewards: Vec<Option<f64>>,
    /// Log-probability of each token at the first step of the round; `None` if the loss needs none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old_logps: Option<Vec<f64>>,
    /// Log-probability of each token under the initial weights of the run; `None` without KL penalty, and for completions of
    /// a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference_logps: Option<Vec<f64>>,
    /// Log-probability of each token as the sampler computed it; `None` for completions of a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling_logps: Option<Vec<f64>>,
    /// Mean entropy of the distributions from which the tokens were drawn, in nats; `None` for completions of a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy: Option<f64>,
}

/// The rounds of a run.
pub(crate) struct Rounds {
    /// Settings of the objective.
    pub settings: GrpoSection,
    /// Source of completions.
    pub source: CompletionSource,
    /// The round of the newest step with its completions; `None` before the first step.
    pub current: Option<(u64, Vec<Sample>)>,
    /// Files of rounds.
    pub files: RoundFiles,
    /// Figures of the newest steps, with their step, for the result.
    pub figures: VecDeque<(u64, RoundFigures)>,
    /// Signs in the newest figures that the run no longer learns.
    pub alarms: Alarms,
}

impl Rounds {
    /// Creates the rounds of a run.
    pub fn new(run: &RunConfig, source: CompletionSource, run_folder: &Path) -> Rounds {
        let files = RoundFiles { folder: run_folder.join(FOLDER) };
        let (settings, figures, alarms) = (run.grpo.clone(), VecDeque::new(), Alarms::default());
        Rounds { settings, source, current: None, files, figures, alarms }
    }

    /// Returns the figures of the newest steps.
    pub fn into_figures(self) -> Vec<RoundFigures> {
        self.figures.into_iter().map(|(_, figures)| figures).collect()
    }

    /// Returns the round of a step, both counted from 1.
    pub fn round_of(&self, step: u64) -> u64 {
        step.div_ceil(self.settings.num_iterations)
    }
}

/// Returns whether a completion does not end with one of `end_tokens`.
pub(crate) fn is_truncated(completion: &[i32], end_tokens: &[i64]) -> bool {
    completion.last().is_none_or(|last| !end_tokens.contains(&i64::from(*last)))
}

/// The files of the rounds of a run.
pub(crate) struct RoundFiles {
    folder: PathBuf,
}

impl RoundFiles {
    /// Writes the completions of a round, and removes the file of an old one.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, round: u64, samples: &[Sample]) -> Result<(), Failure> {
        fs::create_dir_all(&self.folder).map_err(|error| self.failure(&self.folder, &error.to_string()))?;
        let mut text = String::new();
        for sample in samples {
            text += &serde_json::to_string(sample).expect("samples have a JSON form");
            text.push('\n');
        }
        atomic::write_file(&self.path(round), text.as_bytes())?;
        if let Some(old) = round.checked_sub(FILES_MAX) {
            let _ = fs::remove_file(self.path(old));
        }
        Ok(())
    }

    /// Removes the files of all rounds, for a run that begins at its first step.
    ///
    /// # Errors
    /// They cannot be removed.
    pub fn clear(&self) -> Result<(), Failure> {
        let Ok(entries) = fs::read_dir(&self.folder) else { return Ok(()) };
        for path in entries.flatten().map(|entry| entry.path()) {
            let round = path.file_name().and_then(|name| name.to_str()?.strip_prefix("round-")?.strip_suffix(".jsonl"));
            if round.is_some_and(|round| round.parse::<u64>().is_ok()) {
                fs::remove_file(&path).map_err(|error| self.failure(&path, &error.to_string()))?;
            }
        }
        Ok(())
    }

    /// Reads the completions of a round; `None` if it has no file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(&self, round: u64) -> Result<Option<Vec<Sample>>, Failure> {
        let path = self.path(round);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.failure(&path, &error.to_string())),
        };
        let samples = text.lines().map(serde_json::from_str).collect::<Result<Vec<Sample>, _>>();
        samples.map(Some).map_err(|error| self.failure(&path, &error.to_string()))
    }

    /// Checks that the completions of a round belong to the prompts of the step.
    ///
    /// # Errors
    /// They do not (`is_same` is false): another round had other prompts, or the file was changed.
    pub fn check(&self, round: u64, is_same: bool) -> Result<(), Failure> {
        let reason = "its completions are not those of the prompts of the step";
        if is_same { Ok(()) } else { Err(self.failure(&self.path(round), reason)) }
    }

    fn path(&self, round: u64) -> PathBuf {
        self.folder.join(format!("round-{round}.jsonl"))
    }

    fn failure(&self, path: &Path, reason: &str) -> Failure {
        let path = path.display();
        Failure::input(format!("cannot read or write the completions of a round in {path}: {reason}"))
            .hint(format!("make the file accessible, or remove {path}: a run that is resumed samples the round again"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(token: i32) -> Sample {
        Sample {
            prompt: None,
            completion: Some("a".to_owned()),
            prompt_ids: vec![1, 2],
            completion_ids: vec![token],
            rewards: vec![Some(0.1), None],
            old_logps: Some(vec![-0.1]),
            reference_logps: None,
            sampling_logps: None,
            entropy: Some(0.1 + 0.2),
        }
    }

    #[test]
    fn files_keep_every_bit_and_the_newest_rounds() {
        let folder = tempfile::tempdir().unwrap();
        let files = RoundFiles { folder: folder.path().join(FOLDER) };
        assert_eq!(files.read(1).unwrap(), None);
        let samples = [sample(3), sample(4)];
        files.write(1, &samples).unwrap();
        assert_eq!(files.read(1).unwrap().unwrap(), samples);
        fs::write(files.folder.join("of-the-user.jsonl"), "").unwrap();
        files.write(1000, &samples).unwrap();
        assert!(files.read(1).unwrap().is_some());
        files.write(1001, &samples).unwrap();
        assert_eq!(files.read(1).unwrap(), None);
        fs::write(files.path(7), "{").unwrap();
        assert!(files.read(7).unwrap_err().hints[0].contains("samples the round again"));
        files.clear().unwrap();
        let names: Vec<_> = fs::read_dir(&files.folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["of-the-user.jsonl"]);
    }

    #[test]
    fn rounds_have_several_steps() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = RunConfig::default();
        run.grpo.num_iterations = 2;
        let rounds = Rounds::new(&run, CompletionSource::Rollouts(vec![]), folder.path());
        assert_eq!([1, 2, 3].map(|step| rounds.round_of(step)), [1, 1, 2]);
    }
}
