//! The report of a run: [`Report`], from which the page, the Markdown text and the JSON are made, so that all show the
//! same numbers.
//!
//! ```text
//! run folder → snapshot::run_folder ┐
//! run.toml → run_file ──────────────┴─ build → Report ─┬─ json
//!                                                      └─ document ─┬─ html, plot
//!                                                                   └─ markdown
//! ```
//!
//! `document` turns a report into sections of text, tables and plots; `html` and `markdown` only write them down.

mod build;
mod document;
mod html;
mod markdown;
mod plot;
pub mod run_file;

pub(crate) use build::hardware;

use crate::snapshot::RunSnapshot;
use crate::snapshot::run_notes::{EvaluationNote, Newest, StartNote, TeamNote};
use plimsoll_core::{
    Bytes, Category, Class, MeasuredBy, Parallelism, Recipe, Recommendation, Recovery, RunEnvironment, Rung, WorkKind,
};
use run_file::RunSettings;
use serde::Serialize;

/// Version of the JSON form of [`Report`]. It changes when a field changes its meaning or is removed.
pub const REPORT_VERSION: u32 = 1;

/// A run with its plan, its measurements and its history. Unknown values are `null`, never 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Report {
    /// Version of this format.
    pub version: u32,
    /// Time of the report, in seconds since the Unix epoch.
    pub at: f64,
    /// The run, as `plimsoll watch` shows it. Its folder is an absolute path.
    pub run: RunSnapshot,
    /// Conditions that need attention, then the warnings of the run.
    pub warnings: Newest<String>,
    /// Settings of the run; `None` without a readable `run.toml`.
    pub settings: Option<RunSettings>,
    /// Number of parameters of the model; `None` before the first start.
    pub parameters: Option<u64>,
    /// Shell commands that repeat or resume the run.
    pub commands: Commands,
    /// Program and machine of the newest start; `None` if they were not recorded.
    pub environment: Option<RunEnvironment>,
    /// Time of the first event, in seconds since the Unix epoch.
    pub started_at: Option<f64>,
    /// Time of the newest event, in seconds since the Unix epoch.
    pub newest_at: Option<f64>,
    /// Seconds of all steps, repeated ones included. Time for data, evaluations and checkpoints does not count.
    pub step_seconds_total: f64,
    /// Loss of the first step with a label.
    pub first_loss: Option<f64>,
    /// The plan; `None` without a readable `plan.json`.
    pub plan: Option<PlanSummary>,
    /// Changes of settings that the planner predicts to make the run faster under the load lines of its plan, in the
    /// order of plans; `None` unless `--advise` asks for them, and if the run cannot be planned again.
    pub recommendations: Option<Vec<Recommendation>>,
    /// Predicted and measured speed.
    pub speed: Speed,
    /// Devices of the run, planned and measured.
    pub devices: Vec<DeviceReport>,
    /// Starts of the run.
    pub starts: Newest<StartNote>,
    /// Evaluations.
    pub evaluations: Newest<EvaluationNote>,
    /// Recoveries.
    pub recoveries: Newest<Recovery>,
    /// Devices that were lost or returned.
    pub team_changes: Newest<TeamNote>,
    /// Whether the same command gives the same bits; `None` before the end of the run.
    pub reproducible: Option<bool>,
    /// The reasons for `reproducible`.
    pub reproducible_because: Vec<String>,
}

/// Shell commands about a run, to be copied.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Commands {
    /// Trains the same run in another folder; `None` without `run.toml`, and for a folder whose name no command can hold.
    pub repeat: Option<String>,
    /// Continues the run; `None` unless it stopped or died.
    pub resume: Option<String>,
}

/// The choices of the newest plan of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PlanSummary {
    /// The recipe; of a team, that of rank 0.
    pub recipe: Recipe,
    /// Effect of the plan's rungs on the results.
    pub class: Class,
    /// Lossy rungs that the plan takes.
    pub rungs: Vec<Rung>,
    /// The parallelism; `None` for a single device.
    pub parallelism: Option<Parallelism>,
    /// Planned bytes of tensors offloaded to the host.
    pub host_bytes: Bytes,
    /// Planned bytes of the scratch file; `None` without one.
    pub scratch_file_bytes: Option<Bytes>,
    /// Devices that take no part, each with its reason.
    pub excluded: Vec<String>,
    /// Notes of the planner about its measurements and limits.
    pub notes: Vec<String>,
}

/// Predicted and measured speed of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Speed {
    /// Whether the measured figures are those of simulated devices.
    pub simulated: bool,
    /// Predicted seconds of a step under the newest plan.
    pub predicted_step_seconds: Option<f64>,
    /// Measured seconds of a step: the median since the last start; before the end of the run its running mean.
    pub measured_step_seconds: Option<f64>,
    /// Measured 95th percentile of the seconds of a step; `None` before the end of the run.
    pub measured_step_seconds_p95: Option<f64>,
    /// Predicted tokens (including padding) per second under the newest plan.
    pub predicted_tokens_per_second: Option<f64>,
    /// Measured tokens (including padding) per second: over all steps since the last start; before the end of the run
    /// its running mean.
    pub measured_tokens_per_second: Option<f64>,
    /// Whether the measured figures include steps under an earlier plan than the predicted ones.
    #[serde(skip)]
    pub is_plan_replaced: bool,
}

/// A predicted amount of memory beside the measured one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct MemoryPair {
    /// Predicted bytes; `None` without a plan.
    pub predicted_bytes: Option<Bytes>,
    /// Measured bytes; `None` if they were not measured.
    pub measured_bytes: Option<Bytes>,
}

/// Planned and measured memory of a device.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct DeviceReport {
    /// The device's name.
    pub name: String,
    /// Model name of the hardware; `None` if the run folder does not name it, and for a simulated device.
    pub hardware: Option<String>,
    /// Whether the device is simulated.
    pub simulated: bool,
    /// The load line: after the run, that at the time of the measured peak; else that of the newest plan.
    pub load_line_bytes: Option<Bytes>,
    /// Highest peak of arena and charges together.
    pub total: MemoryPair,
    /// Highest peak of the arena.
    pub arena: MemoryPair,
    /// Bytes outside the arena.
    pub charges: MemoryPair,
    /// Source of the measured total; `None` before the end of the run, and without a measurement.
    pub measured_by: Option<MeasuredBy>,
    /// Bytes by which the process passed the load line; `None` if it did not.
    pub over_load_line_bytes: Option<Bytes>,
    /// Arena of the newest plan, to which `by_category` and `by_program` belong. It differs from `arena` after a change of
    /// the plan.
    pub newest_plan_arena_bytes: Option<Bytes>,
    /// Bytes in the arena by category, at the moment when the arena is fullest. Measured bytes are those under the newest
    /// plan; of a device outside that plan, those under its own.
    pub by_category: Vec<CategoryMemory>,
    /// Peak of the arena in each kind of work.
    pub by_program: Vec<ProgramMemory>,
    /// The predicted peak of the newest plan with the op that sets it, such as `peak 46.10 MiB in the backward pass, layer
    /// 3, at matrix product of down`; `None` if the plan does not tell.
    pub peak_set_by: Option<String>,
    /// Sequences that the device computes per step; `None` for a single device.
    pub sequences: Option<u64>,
    /// Measured compute time of a step divided by the predicted one; `None` before the end of the run, for a single
    /// device, and for one without sequences.
    pub compute_slowdown: Option<f64>,
}

/// Memory of a category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CategoryMemory {
    /// The category.
    pub category: Category,
    /// Its bytes.
    #[serde(flatten)]
    pub memory: MemoryPair,
}

/// Memory of a kind of work.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct ProgramMemory {
    /// The kind of work.
    pub program: WorkKind,
    /// Its bytes.
    #[serde(flatten)]
    pub memory: MemoryPair,
    /// The place of the op that sets the predicted peak, such as `layer 3, at matrix product of down`; `None` if the
    /// plan does not tell.
    pub set_by: Option<String>,
}

impl Report {
    /// Returns the page: one HTML document without scripts and outside requests.
    pub fn html(&self) -> String {
        html::page(&document::Document::new(self))
    }

    /// Returns the report as Markdown.
    pub fn markdown(&self) -> String {
        markdown::text(&document::Document::new(self))
    }

    /// Returns the report as a JSON object on several lines.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("plain data has a JSON form")
    }
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
