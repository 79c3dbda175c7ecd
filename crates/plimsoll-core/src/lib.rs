//! Types shared by all crates of Plimsoll, which plans every byte of a training run before it starts.
//!
//! | subject | types |
//! |---|---|
//! | memory | [`Bytes`], [`Budget`] (`90%`, `6GiB`), [`Space`] and [`PerSpace`], [`Category`], [`DType`] |
//! | devices: input of the planner | [`DeviceSpec`] with [`Rates`] and [`Link`], [`HostSpec`], [`FileSpec`] |
//! | choices of the planner | [`Recipe`] with [`RecomputeLevel`] and [`Offload`], [`Rung`] and its [`Class`] |
//! | the plan | [`Plan`] with a [`DevicePlan`] per device; the [`Remedy`] list of a refusal |
//! | the team of a plan | [`Parallelism`], [`WorkerPlan`], [`ExcludedDevice`], [`EvaluatorPlan`] |
//! | a run | [`Event`], [`RunResult`], [`Recovery`] |
//! | failures | [`Failure`]: message, hints and [`Exit`] code |
//! | text for a terminal | [`printable`] |
//!
//! The types with `Serialize` are the JSON formats. Field names are JSON keys. Under the feature `schema` they have
//! JSON schemas, which `cargo xtask schema` writes.
//!
//! | file | type |
//! |---|---|
//! | `plan.json`, output of `plimsoll plan --json` | [`Plan`] |
//! | a line of `events.jsonl` | [`Record`] |
//! | `result.json` | [`RunResult`] |
//! | `sweep.json` | [`SweepReport`] |
//! | file of `plimsoll bench models --json` | [`ModelsBench`] |
//!
//! This crate does no input or output, and plans nothing.
//!
//! # Example
//!
//! A load line is a budget applied to the free memory of a device. A plan fits if no device exceeds its load line.
//!
//! ```
//! use plimsoll_core::{Budget, Bytes, Plan};
//!
//! let free: Bytes = "8GiB".parse()?;
//! let budget: Budget = "75%".parse()?;
//! assert_eq!(budget.load_line(free), Bytes::gib(6));
//!
//! let json = r#"{
//!     "fits": true,
//!     "recipe": {"micro_batch": 2, "recompute": ["nothing", "block"]},
//!     "class": "reordered",
//!     "devices": [{
//!         "name": "cuda:0", "simulated": false, "budget_bytes": 6442450944,
//!         "arena_bytes": 4294967296, "charges_bytes": 536870912, "peak_bytes": 4831838208,
//!         "lower_bound_bytes": 4294967296, "by_category": {}, "by_program": {}
//!     }],
//!     "predicted": {"step_seconds": 0.5, "tokens_per_second": 8192.0},
//! #   "host": {
//! #       "name": "host", "simulated": false, "budget_bytes": 0,
//! #       "arena_bytes": 0, "charges_bytes": 0, "peak_bytes": 0,
//! #       "lower_bound_bytes": 0, "by_category": {}, "by_program": {}
//! #   },
//!     "needs": []
//! }"#;
//! let plan: Plan = serde_json::from_str(json)?;
//! let device = &plan.devices[0];
//! assert_eq!(device.peak_bytes.to_string(), "4.50 GiB");
//! assert!(plan.fits && device.peak_bytes <= device.budget_bytes);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

mod budget;
mod bytes;
mod device;
mod dtype;
mod event;
mod failure;
mod log_request;
mod models_bench;
mod plan;
pub mod printable;
mod recipe;
mod result;
mod space;
mod sweep;
mod team;
mod timeline;
mod words;

pub use budget::{Budget, ParseBudgetError};
pub use bytes::{Bytes, ParseBytesError};
pub use device::{DeviceKind, DeviceSpec, FileSpec, HostSpec, Link, NcclSpec, OpRates, Rates};
pub use dtype::DType;
pub use event::{
    CompletionFigures, EVENTS_VERSION, Event, HeldMemory, PreferenceFigures, Record, RoundFigures, RoundSeconds,
    RunEnvironment,
};
pub use failure::{Exit, Failure, is_disk_full};
pub use log_request::LogRequest;
pub use models_bench::{ModelRow, ModelStatus, ModelsBench};
pub use plan::{
    DevicePlan, Fallback, GemmAlgorithms, MachineHost, Plan, PlannedWorkload, Predicted, PredictedGeneration,
    Recommendation, Remedy, RungEffect, RungPrice, SmallestRecipe,
};
pub use recipe::{Class, Offload, Recipe, RecomputeLevel, Rung, ScratchOffload, describe_levels, micro_batches};
pub use result::{
    CollectiveBackend, DeviceMemory, EvalResult, EvaluatorResult, LossSpan, LostDevice, MeasuredBy, Recovery,
    RunResult, RunStatus, StepSeconds, WorkerResult, nan_from_null,
};
pub use space::{Category, PerSpace, Space, WorkKind};
pub use sweep::{RunDemand, SweepDevice, SweepReport, SweepRun, SweepState};
pub use team::{Alternative, EvaluatorPlan, ExcludedDevice, FasterAlone, Parallelism, ScalingEfficiency, WorkerPlan};
pub use timeline::{TimelinePoint, peak_point};
pub use words::format_count;
