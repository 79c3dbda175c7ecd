//! The table of `plimsoll bench models`: one row per model. The field names are a stable interface for other tools.

use crate::{Bytes, Recipe, Remedy};
use serde::{Deserialize, Serialize};

/// The outcome of the benchmark for a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// A model on a device. Unknown values are omitted. Figures are measured, except fields with `predicted` in their name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelRow {
    /// The model as named on the command line.
    pub model: String,
    /// The preset or directory that the name resolves to.
    pub resolved_model: String,
    /// The outcome.
    pub status: ModelStatus,
    /// Whether a plan fits.
    pub fits: bool,
    /// Parameters of the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<u64>,
    /// The device; the first device of a team.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// All devices of a team by rank; empty for a single device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<String>,
    /// Whether the device is simulated; seconds of the run are then simulated.
    pub simulated: bool,
    /// The load line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_bytes: Option<Bytes>,
    /// The recipe; after a run, the recipe of its last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Recipe>,
    /// Planned peak of the device: arena and charges.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_bytes: Option<Bytes>,
    /// Planned bytes offloaded to the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_host_bytes: Option<Bytes>,
    /// Measured peak of the device (CPU: of the process).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_bytes: Option<Bytes>,
    /// Planned seconds of an optimizer step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_step_seconds: Option<f64>,
    /// Median seconds of an optimizer step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_step_seconds: Option<f64>,
    /// Planned seconds of all steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_seconds: Option<f64>,
    /// Seconds from the start of the run to its end: opening, weight initialization and steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_seconds: Option<f64>,
    /// Planned tokens per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_tokens_per_second: Option<f64>,
    /// Measured tokens per second over the steps alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// Completed optimizer steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Recoveries during the run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recoveries: Option<u64>,
    /// Remedies of the plan if the model does not fit, least loss first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<Remedy>,
    /// Reason why the model did not run, in one line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Remedies that this machine can meet, as commands, one per line.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hints: Vec<String>,
}

impl ModelRow {
    /// Creates a row without any result.
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

/// The table of the benchmark.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelsBench {
    /// Sequences that each model is trained on.
    pub samples: u64,
    /// Tokens per sequence.
    pub sequence: u64,
    /// Rows in the order of the request. Models that have not been benchmarked yet are missing.
    pub models: Vec<ModelRow>,
}
