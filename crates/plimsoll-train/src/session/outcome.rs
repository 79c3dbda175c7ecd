//! Result of a run, as the caller receives it.

use crate::inference::samples::Sample;
use plimsoll_core::RunResult;
use serde::{Serialize, Serializer};
use std::path::{Path, PathBuf};

/// Products of a run that ended. The Python function `plimsoll.train` returns them.
#[derive(Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "Trained"))]
pub struct Outcome {
    /// Contents of `result.json`.
    pub result: RunResult,
    /// Prompts of the evaluation data with the text that the model generates.
    pub samples: Vec<Sample>,
    /// Folder of the written model; `None` if the run stopped early or saves nothing.
    #[serde(serialize_with = "optional_path_as_text")]
    pub model: Option<PathBuf>,
    /// Run folder.
    #[serde(serialize_with = "path_as_text")]
    pub folder: PathBuf,
}

/// Writes a path as text. Bytes that are not UTF-8 become U+FFFD.
fn path_as_text<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&path.display())
}

/// Writes a path as text, `None` as `null`.
fn optional_path_as_text<S: Serializer>(path: &Option<PathBuf>, to: S) -> Result<S::Ok, S::Error> {
    path.as_ref().map(|path| path.display().to_string()).serialize(to)
}
