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
mod result;
mod sweep;
mod words;

pub use budget::{Budget, ParseBudgetError};
pub use bytes::{Bytes, ParseBytesError};
pub use device::{DeviceKind, DeviceSpec, FileSpec, HostSpec, Link, NcclSpec, OpRates, Rates};
pub use dtype::DType;
pub use event::{EVENTS_VERSION, Event, Record};
pub use failure::{Exit, Failure};
pub use models_bench::{ModelRow, ModelStatus, ModelsBench};
pub use plan::{
    Algorithms, Alternative, Category, Class, DevicePlan, Effect, Evaluates, Fallback, FasterAlone, InFile, LeftOut,
    Member, Need, Offload, Plan, PlanOf, Predicted, Recipe, RecomputeLevel, Rung, RungPrice, Sharing, Space, WorkName,
    Worth, describe_levels, micro_batches,
};
pub use result::{
    CollectivesBy, DeviceMemory, EvalResult, EvaluatorResult, LossSpan, LostDevice, MeasuredBy, MemberResult, Retreat,
    RunResult, RunStatus, StepSeconds,
};
pub use sweep::{RunDemand, SweepDevice, SweepReport, SweepRun, SweepState};
pub use words::counted;
