//! Results of recovery in the training loop: [`Continuation`] if the step goes on, [`StepInterrupt`] if the loop is
//! left.

use crate::data::DataError;
use crate::engine::failure::DeviceFailure;
use crate::files::FilesError;
use plimsoll_core::Failure;

/// Way in which work continues after a device failed in it and the run recovered.
pub(crate) enum Continuation {
    /// The caller tries the same work again.
    Repeat,
    /// The failed worker was removed, and the others follow another plan. The caller tries the work again, unless that
    /// work was itself a switch to another plan.
    PlanChanged,
    /// The failed worker was removed, for the reason in this text. The others finish the step, and share the work of
    /// the removed worker from the next step on.
    FinishStep(String),
}

/// Reason that the training loop was left.
#[derive(Debug)]
pub enum StepInterrupt {
    /// The run ends with an error. A failure with the exit code `Exit::Stopped` is treated as a [`StepInterrupt::Stop`]
    /// with a `state_intact` of false.
    Fatal(Failure),
    /// The run stops early and can be resumed.
    Stop {
        /// Reason for the stop.
        failure: Failure,
        /// Whether weights and optimizer state are exactly those of the last finished step.
        state_intact: bool,
    },
    /// The run restarted from a checkpoint. The work in progress is dropped, and the loop continues with the step after
    /// the checkpoint.
    RolledBack,
}

impl From<Failure> for StepInterrupt {
    fn from(failure: Failure) -> StepInterrupt {
        StepInterrupt::Fatal(failure)
    }
}

impl From<DeviceFailure> for StepInterrupt {
    fn from(failure: DeviceFailure) -> StepInterrupt {
        StepInterrupt::Fatal(failure.into())
    }
}

impl From<FilesError> for StepInterrupt {
    fn from(error: FilesError) -> StepInterrupt {
        StepInterrupt::Fatal(error.into())
    }
}

impl From<DataError> for StepInterrupt {
    fn from(error: DataError) -> StepInterrupt {
        StepInterrupt::Fatal(error.into())
    }
}
