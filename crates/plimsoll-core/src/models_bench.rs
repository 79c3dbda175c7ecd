//! The table of `plimsoll bench models`: one row per model. The field names are a stable interface for other tools.

use crate::{Bytes, Recipe, Remedy};
use serde::{Deserialize, Serialize};

/// The outcome of the benchmark for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum ModelStatus {
    /// The model was trained on all samples.
    Ran,
    /// The model fits on a paper device; nothing was run.
    Planned,
    /// The model does not fit.
    DoesNotFit,
    /// Planning or training failed for another reason.
    Failed,
}

/// The benchmark result of one model on a device. Figures are measured, except fields with `predicted` in their name.
/// `None` is an unknown value, as after a failure; it is omitted from the JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ModelRow {
    /// The model as named on the command line.
    pub model: String,
    /// The preset or directory that the name resolves to.
    pub resolved_model: String,
    /// The outcome of the benchmark for the model.
    pub status: ModelStatus,
    /// Whether the planner found a recipe that fits under the load line.
    pub fits: bool,
    /// Number of parameters of the model; `None` if the model was not read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<u64>,
    /// Name of the device; of a team, the name of its first device. `None` if planning failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Names of all devices of a team by rank; empty for a single device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<String>,
    /// Whether the device is simulated; seconds of the run are then simulated.
    pub simulated: bool,
    /// The load line of `device`; `None` if planning failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_bytes: Option<Bytes>,
    /// The planned recipe; after a run, the recipe of its last step. If the model does not fit, the smallest recipe.
    /// `None` if planning failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Recipe>,
    /// Planned peak of the device in bytes, arena and charges together. `None` if planning failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_bytes: Option<Bytes>,
    /// Planned bytes offloaded to the host; `None` if planning failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_host_bytes: Option<Bytes>,
    /// Measured peak of the device (CPU: of the process) in bytes. `None` if nothing ran, or if the machine cannot
    /// measure it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_bytes: Option<Bytes>,
    /// Measured bytes by which the run passed the load line of `device`; `None` if it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over_load_line_bytes: Option<Bytes>,
    /// Planned seconds of an optimizer step; `None` if the model does not fit, or if planning failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_step_seconds: Option<f64>,
    /// Median seconds of an optimizer step; `None` if nothing ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_step_seconds: Option<f64>,
    /// Planned seconds of all steps together; `None` if the model does not fit, or if planning failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_seconds: Option<f64>,
    /// Seconds from the start of the run to its end: opening, weight initialization and steps. `None` if nothing ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_seconds: Option<f64>,
    /// Planned tokens (including padding) per second; `None` if the model does not fit, or if planning failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_tokens_per_second: Option<f64>,
    /// Measured tokens (including padding) per second over the steps alone; `None` if nothing ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// Number of completed optimizer steps; `None` if nothing ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Number of recoveries during the run (changes to a smaller recipe, or back); `None` if nothing ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recoveries: Option<u64>,
    /// Remedies with which the model would fit, least loss first; empty if it fits or if planning failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<Remedy>,
    /// Reason, in one line, why the model does not fit or failed. `None` if it ran, or was planned for a paper device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Actions that remedy a refusal or failure, one per entry, such as a command with which the model fits on this
    /// machine; empty if none is known, or if nothing failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hints: Vec<String>,
}

impl ModelRow {
    /// Creates a row in which only the names are known. Its status is [`ModelStatus::Failed`] until the caller sets
    /// another one.
    pub fn new(model: &str, resolved_model: &str) -> ModelRow {
        ModelRow {
            model: model.to_owned(),
            resolved_model: resolved_model.to_owned(),
            status: ModelStatus::Failed,
            fits: false,
            parameters: None,
            device: None,
            team: vec![],
            simulated: false,
            budget_bytes: None,
            recipe: None,
            predicted_bytes: None,
            predicted_host_bytes: None,
            measured_bytes: None,
            over_load_line_bytes: None,
            predicted_step_seconds: None,
            measured_step_seconds: None,
            predicted_seconds: None,
            measured_seconds: None,
            predicted_tokens_per_second: None,
            tokens_per_second: None,
            steps: None,
            recoveries: None,
            needs: Vec::new(),
            reason: None,
            hints: Vec::new(),
        }
    }
}

/// The table that `plimsoll bench models` writes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ModelsBench {
    /// Number of sequences that each model is trained on.
    pub samples: u64,
    /// Number of tokens per sequence.
    pub sequence: u64,
    /// One row per model, in the order of the request. Models that have not been benchmarked yet are missing.
    pub models: Vec<ModelRow>,
}
