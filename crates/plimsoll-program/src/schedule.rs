//! The order of Programs on each device in one optimizer step. Accumulation and
//! one-forward-one-backward are written here, not inside Programs.

/// One call of a Program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The Program's name.
    pub program: String,
    /// Which micro-batch it works on.
    pub micro_batch: u32,
    /// Whether there is no later one in this step: what is summed over micro-batches is then whole.
    pub last: bool,
}

/// All calls of one device in one optimizer step, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// In order.
    pub calls: Vec<Call>,
}

impl Schedule {
    /// A call for one of `micro_batches`.
    fn push(&mut self, program: &str, micro_batch: u32, micro_batches: u32) {
        self.calls.push(Call { program: program.into(), micro_batch, last: micro_batch + 1 == micro_batches });
    }

    fn close(mut self) -> Schedule {
        self.push("norm", 0, 1);
        self.push("update", 0, 1);
        self
    }

    /// Each micro-batch forward and backward, then the update: a device that has all layers, alone or in a team.
    pub fn accumulate(micro_batches: u32) -> Schedule {
        let mut schedule = Schedule::default();
        schedule.push("begin", 0, 1);
        for m in 0..micro_batches {
            schedule.push("forward", m, micro_batches);
            schedule.push("backward", m, micro_batches);
        }
        schedule.close()
    }

    /// Stage `stage` of a pipeline of `stages`: as many forward passes as it takes to fill the
    /// stages below it, then one backward pass for each forward pass, then the rest.
    /// At most `stages - stage` micro-batches are in flight on a stage.
    pub fn one_forward_one_backward(stages: u32, stage: u32, micro_batches: u32) -> Schedule {
        assert!(stage < stages, "stage {stage} of {stages}");
        let mut schedule = Schedule::default();
        schedule.push("begin", 0, 1);
        let warm = (stages - stage - 1).min(micro_batches);
        for m in 0..warm {
            schedule.push("forward", m, micro_batches);
        }
        for m in 0..micro_batches - warm {
            schedule.push("forward", warm + m, micro_batches);
            schedule.push("backward", m, micro_batches);
        }
        for m in micro_batches - warm..micro_batches {
            schedule.push("backward", m, micro_batches);
        }
        schedule.close()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_flight_max(schedule: &Schedule) -> i32 {
        let mut now = 0;
        let mut most = 0;
        for call in &schedule.calls {
            match call.program.as_str() {
                "forward" => now += 1,
                "backward" => now -= 1,
                _ => {}
            }
            most = most.max(now);
        }
        assert_eq!(now, 0, "every forward pass has its backward pass");
        most
    }

    #[test]
    fn a_pipeline_stage_keeps_at_most_its_depth_in_flight_and_each_micro_batch_in_order() {
        for stages in 1..6 {
            for stage in 0..stages {
                for micro_batches in 1..9 {
                    let schedule = Schedule::one_forward_one_backward(stages, stage, micro_batches);
                    assert_eq!(in_flight_max(&schedule), (stages - stage).min(micro_batches) as i32);
                    for kind in ["forward", "backward"] {
                        let order: Vec<u32> =
                            schedule.calls.iter().filter(|c| c.program == kind).map(|c| c.micro_batch).collect();
                        assert_eq!(order, (0..micro_batches).collect::<Vec<_>>());
                    }
                }
            }
        }
    }

    #[test]
    fn a_pipeline_of_one_stage_is_plain_accumulation() {
        assert_eq!(Schedule::one_forward_one_backward(1, 0, 5), Schedule::accumulate(5));
    }
}
