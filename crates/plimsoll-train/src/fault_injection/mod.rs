//! Fault injection: deliberate out-of-memory errors, slow, lost and silent devices, so that users and tests can see how a run recovers.
//!
//! The flags `--inject-oom`, `--inject-slow`, `--inject-loss` and `--inject-silence` become [`Injection`]s. A run refuses injections
//! that cannot occur (`check`), triggers the others at their place (`trigger`), and reports at its end which ones did not occur.
//! Reading and printing flags is in `parse`.

mod check;
mod parse;
mod trigger;

pub use check::{InjectionTargets, TargetDevice};
pub use trigger::{FaultInjection, FaultObserver, PendingFault};

use plimsoll_program::ProgramKind;

/// Names that `--inject-oom` and `--inject-loss` know as `PROGRAM`: Programs, the opening of a device, and the switch
/// to another plan.
pub const PROGRAMS: [&str; 19] = [
    OPEN,
    ProgramKind::Load.name(),
    ProgramKind::InitOptimizer.name(),
    ProgramKind::BeginStep.name(),
    ProgramKind::Forward.name(),
    ProgramKind::Backward.name(),
    ProgramKind::GradientNorm.name(),
    ProgramKind::Update.name(),
    ProgramKind::Evaluate.name(),
    ProgramKind::Score.name(),
    ProgramKind::Reference.name(),
    ProgramKind::Prefill.name(),
    ProgramKind::CopyPrefix.name(),
    ProgramKind::Decode.name(),
    ProgramKind::Save.name(),
    ProgramKind::Checkpoint.name(),
    ProgramKind::Restore.name(),
    ProgramKind::ReloadWeights.name(),
    REPLAN,
];

/// Name that selects the switch to another plan in the value of a flag such as `--inject-oom`. The fault makes the
/// whole switch fail, not one op.
pub(crate) const REPLAN: &str = "re-plan";

/// Name that selects the opening of a device in the value of `--inject-loss` or `--inject-silence`. The device is then
/// lost, or falls silent, while it is opened.
pub(crate) const OPEN: &str = "open";

/// Names of the Programs that run in step 0, the start, and in no other step.
const START_PROGRAMS: [&str; 3] =
    [ProgramKind::Load.name(), ProgramKind::InitOptimizer.name(), ProgramKind::Restore.name()];

/// Names of the work of an evaluator, a device outside the team that only evaluates: opening and Programs.
const EVALUATOR_PROGRAMS: [&str; 4] =
    [OPEN, ProgramKind::Load.name(), ProgramKind::ReloadWeights.name(), ProgramKind::Evaluate.name()];

/// A fault that the user asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Injection {
    /// `--inject-oom [DEVICE/]STEP[:PROGRAM[:OP]]`: one out-of-memory error, in this step at this op.
    OutOfMemory {
        /// Name of the device; the first of the team if absent.
        device: Option<String>,
        /// Step in which the error occurs. Work between two steps belongs to the earlier one, and 0 is the start.
        step: u64,
        /// Name of the Program; the first that runs in the step if absent.
        program: Option<String>,
        /// Op of the Program; its first one if absent.
        op: Option<OpSelector>,
    },
    /// `--inject-oom random:P`: each run of a Program fails with this probability, at a random op.
    RandomOutOfMemory {
        /// Probability that one run of a Program fails, above 0 and at most 1.
        probability: f64,
    },
    /// `--inject-slow DEVICE:STEP:FACTOR`: forward and backward passes of the device take longer from this step on.
    Slow {
        /// Name of the device.
        device: String,
        /// First slow step.
        step: u64,
        /// Factor by which the passes take longer; 1 changes nothing, and smaller values are refused.
        factor: f64,
    },
    /// `--inject-loss DEVICE:STEP[:PROGRAM]`: the device is lost in this step, at the start of the Program, and stays
    /// lost.
    Loss {
        /// Name of the device.
        device: String,
        /// Step of the loss; 0 is the start.
        step: u64,
        /// Name of the Program at whose start the device is lost; the first that runs in the step if absent.
        program: Option<String>,
    },
    /// `--inject-silence DEVICE:STEP[:open][:forever]`: the device sends no heartbeat from this step on.
    Silence {
        /// Name of the device.
        device: String,
        /// Step of the silence; 0 is the start.
        step: u64,
        /// Whether the device falls silent while it is opened. Otherwise it does so before its first Program in this
        /// step.
        opening: bool,
        /// Whether the device's thread blocks for ever; otherwise it returns as soon as the device counts as lost.
        forever: bool,
    },
}

/// A choice of one op of a Program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpSelector {
    /// Position of the op in its Program, counted from 1.
    Number(u32),
    /// Name of the op; the first one with this name is meant.
    Named(String),
}
