//! What `plimsoll bench models` found: a row for each model. Other tools rely on these names.

use crate::{Bytes, Need, Recipe};
use serde::{Deserialize, Serialize};

/// How far it went with a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelStatus {
    /// It was trained on all samples.
    Ran,
    /// It fits, on a device on paper: nothing was run.
    Planned,
    /// It does not fit.
    DoesNotFit,
    /// Something else is wrong.
    Failed,
}

/// A model on a device. What is not known is left out: all figures are measured unless their name says predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelRow {
    /// As it was asked for.
    pub model: String,
    /// The preset or directory that this means.
    pub stands_for: String,
    /// How far it went.
    pub status: ModelStatus,
    /// Whether a plan fits.
    pub fits: bool,
    /// Parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<u64>,
    /// The device; of a team the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// All devices of a team, in the order of ranks; empty where one does it all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub team: Vec<String>,
    /// Whether the device is simulated: seconds of the run are then.
    pub simulated: bool,
    /// The load line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub budget_bytes: Option<Bytes>,
    /// The recipe; where it ran, that of the last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Recipe>,
    /// The most that the device holds, arena and charges, as planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_bytes: Option<Bytes>,
    /// What waits on the host, as planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_host_bytes: Option<Bytes>,
    /// The most that the device (CPU: the process) held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_bytes: Option<Bytes>,
    /// Seconds of an optimizer step, as planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_step_seconds: Option<f64>,
    /// Median seconds of an optimizer step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_step_seconds: Option<f64>,
    /// Seconds of all steps, as planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_seconds: Option<f64>,
    /// Seconds from the start of the run to its end: opening, drawing of weights and steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_seconds: Option<f64>,
    /// Tokens a second, as planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub predicted_tokens_per_second: Option<f64>,
    /// Tokens a second, over the steps alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// Optimizer steps that were done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Rungs that were taken while it ran.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retreats: Option<u64>,
    /// What would do, where it does not fit, least loss first: as in its plan.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub needs: Vec<Need>,
    /// Why it did not run, in a line.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What to do about that, a line each: the needs that this machine can meet, as commands.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hints: Vec<String>,
}

impl ModelRow {
    /// A model of which nothing is known yet.
    pub fn new(model: &str, stands_for: &str) -> ModelRow {
        ModelRow {
            model: model.to_owned(),
            stands_for: stands_for.to_owned(),
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
            retreats: None,
            needs: Vec::new(),
            why: None,
            hints: Vec::new(),
        }
    }
}

/// What was found, model after model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelsBench {
    /// Sequences that each model is trained on.
    pub samples: u64,
    /// Tokens of each.
    pub sequence: u64,
    /// In the order in which they were asked for; those that are still to come are not there.
    pub models: Vec<ModelRow>,
}
