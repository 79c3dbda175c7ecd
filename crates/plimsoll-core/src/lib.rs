//! Types shared by all crates of Plimsoll: amounts of memory, element types, device specifications, recipes, plans,
//! results, events and failures.
//!
//! The serialised types are the JSON formats: `plan.json` ([`Plan`]), `result.json` ([`RunResult`]), a line of
//! `events.jsonl` ([`Record`]), `sweep.json` ([`SweepReport`]) and the table of `bench models` ([`ModelsBench`]). Field
//! names are JSON keys.
//!
//! This crate holds types only: it does no input or output and plans nothing.

#![forbid(unsafe_code)]

mod budget;
mod bytes;
mod device;
mod dtype;
mod event;
mod failure;
mod models_bench;
mod plan;
mod recipe;
mod result;
mod space;
mod sweep;
mod team;
mod words;

pub use budget::{Budget, ParseBudgetError};
pub use bytes::{Bytes, ParseBytesError};
pub use device::{DeviceKind, DeviceSpec, FileSpec, HostSpec, Link, NcclSpec, OpRates, Rates};
pub use dtype::DType;
pub use event::{EVENTS_VERSION, Event, Record};
pub use failure::{Exit, Failure};
pub use models_bench::{ModelRow, ModelStatus, ModelsBench};
pub use plan::{DevicePlan, Fallback, GemmAlgorithms, Plan, PlannedWorkload, Predicted, Remedy, RungEffect, RungPrice};
pub use recipe::{Class, Offload, Recipe, RecomputeLevel, Rung, ScratchOffload, describe_levels, micro_batches};
pub use result::{
    CollectiveBackend, DeviceMemory, EvalResult, EvaluatorResult, LossSpan, LostDevice, MeasuredBy, Recovery,
    RunResult, RunStatus, StepSeconds, WorkerResult,
};
pub use space::{Category, PerSpace, Space, WorkKind};
pub use sweep::{RunDemand, SweepDevice, SweepReport, SweepRun, SweepState};
pub use team::{Alternative, EvaluatorPlan, ExcludedDevice, FasterAlone, Parallelism, ScalingEfficiency, WorkerPlan};
pub use words::format_count;
