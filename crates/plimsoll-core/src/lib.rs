//! The words that every part of Plimsoll shares: amounts of memory, element types, devices, the
//! plan and the events as they are written down, and what a user sees when something fails.
//!
//! Nothing here reads, writes or computes; that is what the other crates are for.

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
pub use plan::{Algorithms, DevicePlan, Effect, Fallback, Need, Plan, PlanOf, Predicted, RungPrice};
pub use recipe::{Class, InFile, Offload, Recipe, RecomputeLevel, Rung, describe_levels, micro_batches};
pub use result::{
    CollectivesBy, DeviceMemory, EvalResult, EvaluatorResult, LossSpan, LostDevice, MeasuredBy, MemberResult, Retreat,
    RunResult, RunStatus, StepSeconds,
};
pub use space::{Category, Space, WorkName};
pub use sweep::{RunDemand, SweepDevice, SweepReport, SweepRun, SweepState};
pub use team::{Alternative, Evaluates, FasterAlone, LeftOut, Member, Sharing, Worth};
pub use words::counted;
