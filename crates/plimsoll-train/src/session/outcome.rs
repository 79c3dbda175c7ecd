//! Result of a run, as the caller receives it.

use crate::inference::samples::Sample;
use plimsoll_core::RunResult;
use std::path::PathBuf;

/// Products of a run that ended.
pub struct Outcome {
    /// Contents of `result.json`.
    pub result: RunResult,
    /// Prompts of the evaluation data with the text that the model generates.
    pub samples: Vec<Sample>,
    /// Folder of the written model; none if the run stopped early or saves nothing.
    pub model: Option<PathBuf>,
    /// Run folder.
    pub folder: PathBuf,
}
