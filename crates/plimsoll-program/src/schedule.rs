//! The order in which a device runs its Programs in one optimizer step: gradient accumulation and the 1F1B pipeline
//! schedule. Programs themselves know nothing of it.

use crate::program::ProgramKind;

/// One call of a Program for one micro-batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The Program to run.
    pub program: ProgramKind,
    /// Index of the micro-batch within the step, from 0; 0 for Programs that run once per step.
    pub micro_batch: u32,
    /// Whether this is the last micro-batch of the step: gradients are complete after its backward pass. Also true for
    /// Programs that run once per step, such as the update.
    pub last: bool,
}

/// The order in which one device calls its Programs in one optimizer step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// Calls in execution order.
    pub calls: Vec<Call>,
}

impl Schedule {
    /// Appends the call of `program` for micro-batch `micro_batch` of `micro_batches`.
    fn push(&mut self, program: ProgramKind, micro_batch: u32, micro_batches: u32) {
        self.calls.push(Call { program, micro_batch, last: micro_batch + 1 == micro_batches });
    }

    /// Appends the gradient norm and the update, which end every step, and returns the complete schedule.
    fn close(mut self) -> Schedule {
        self.push(ProgramKind::GradientNorm, 0, 1);
        self.push(ProgramKind::Update, 0, 1);
        self
    }

    /// Returns the schedule of gradient accumulation: each micro-batch forward and backward, then the update.
    ///
    /// Applies to a device that has all layers, alone or in a data-parallel or sharded team.
    pub fn accumulate(micro_batches: u32) -> Schedule {
        let mut schedule = Schedule::default();
        schedule.push(ProgramKind::BeginStep, 0, 1);
        for m in 0..micro_batches {
            schedule.push(ProgramKind::Forward, m, micro_batches);
            schedule.push(ProgramKind::Backward, m, micro_batches);
        }
        schedule.close()
    }

    /// Returns the 1F1B schedule (PipeDream-Flush) of stage `stage`, counted from 0, in a pipeline of `stages` stages.
    ///
    /// The stage first runs enough forward passes to fill the stages after it. Then it alternates one forward and one
    /// backward pass, and ends with the remaining backward passes. At most `stages - stage` micro-batches are in
    /// flight on it (forward pass done, backward pass not).
    ///
    /// # Panics
    /// Panics if `stage` is not below `stages`.
    pub fn one_forward_one_backward(stages: u32, stage: u32, micro_batches: u32) -> Schedule {
        assert!(stage < stages, "stage {stage} of {stages}");
        let mut schedule = Schedule::default();
        schedule.push(ProgramKind::BeginStep, 0, 1);
        let warm_up = (stages - stage - 1).min(micro_batches);
        for m in 0..warm_up {
            schedule.push(ProgramKind::Forward, m, micro_batches);
        }
        for m in 0..micro_batches - warm_up {
            schedule.push(ProgramKind::Forward, warm_up + m, micro_batches);
            schedule.push(ProgramKind::Backward, m, micro_batches);
        }
        for m in micro_batches - warm_up..micro_batches {
            schedule.push(ProgramKind::Backward, m, micro_batches);
        }
        schedule.close()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_flight_max(schedule: &Schedule) -> i32 {
        let mut in_flight = 0;
        let mut max = 0;
        for call in &schedule.calls {
            match call.program {
                ProgramKind::Forward => in_flight += 1,
                ProgramKind::Backward => in_flight -= 1,
                _ => {}
            }
            max = max.max(in_flight);
        }
        assert_eq!(in_flight, 0, "every forward pass has its backward pass");
        max
    }

    #[test]
    fn pipeline_stage_bounds_in_flight_and_keeps_order() {
        for stages in 1..6 {
            for stage in 0..stages {
                for micro_batches in 1..9 {
                    let schedule = Schedule::one_forward_one_backward(stages, stage, micro_batches);
                    assert_eq!(in_flight_max(&schedule), (stages - stage).min(micro_batches) as i32);
                    for kind in [ProgramKind::Forward, ProgramKind::Backward] {
                        let order: Vec<u32> =
                            schedule.calls.iter().filter(|c| c.program == kind).map(|c| c.micro_batch).collect();
                        assert_eq!(order, (0..micro_batches).collect::<Vec<_>>());
                    }
                }
            }
        }
    }

    #[test]
    fn one_stage_pipeline_is_gradient_accumulation() {
        assert_eq!(Schedule::one_forward_one_backward(1, 0, 5), Schedule::accumulate(5));
    }
}
