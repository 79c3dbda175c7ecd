//! The time of a pipeline step, from a simulation of its schedule.

use crate::team::stage::StageSeconds;
use plimsoll_program::{ProgramKind, Schedule};

/// A forward or backward pass of a micro-batch on one stage.
#[derive(Clone, Copy)]
struct Pass {
    is_forward: bool,
    micro_batch: usize,
}

/// Returns the passes of a stage in the order of its one-forward-one-backward schedule.
fn passes_of_stage(stages: usize, stage: usize, micro_batches: u32) -> Vec<Pass> {
    let schedule = Schedule::one_forward_one_backward(stages as u32, stage as u32, micro_batches);
    let pass = |kind: ProgramKind, micro_batch: u32| match kind {
        ProgramKind::Forward => Some(Pass { is_forward: true, micro_batch: micro_batch as usize }),
        ProgramKind::Backward => Some(Pass { is_forward: false, micro_batch: micro_batch as usize }),
        _ => None,
    };
    schedule.calls.into_iter().filter_map(|call| pass(call.program, call.micro_batch)).collect()
}

/// Most micro-batches of which each is simulated. Longer steps go on at the pace of their second half.
const MAX_SIMULATED: u32 = 2048;

/// Predicts the seconds of a pipeline step.
pub(in crate::team) fn step_seconds(stages: &[StageSeconds], micro_batches: u32) -> f64 {
    score_seconds(stages, micro_batches) + seconds_after_scores(stages, micro_batches)
}

/// Predicts the seconds of the scores of a step: each micro-batch passes through the stages, and the slowest stage sets the
/// pace. They end before the first forward pass.
fn score_seconds(stages: &[StageSeconds], micro_batches: u32) -> f64 {
    let transfer = |stage: &StageSeconds| if stage.score > 0.0 { stage.transfer } else { 0.0 };
    let first = stages.iter().map(|stage| stage.score + transfer(stage)).sum::<f64>();
    let slowest = stages.iter().map(|stage| stage.score).fold(0.0, f64::max);
    first + f64::from(micro_batches.saturating_sub(1)) * slowest
}

fn seconds_after_scores(stages: &[StageSeconds], micro_batches: u32) -> f64 {
    let Some(further) = micro_batches.checked_sub(MAX_SIMULATED) else { return simulate_step(stages, micro_batches) };
    let [half, whole] = [MAX_SIMULATED / 2, MAX_SIMULATED].map(|micro_batches| simulate_step(stages, micro_batches));
    whole + f64::from(further) * (whole - half) / f64::from(MAX_SIMULATED / 2)
}

/// Simulates a pipeline step, and returns its seconds. Each stage runs its passes in order. Activations wait in a buffer until the
/// next stage takes them. A gradient is handed over directly: the stage that computed it is blocked until the stage
/// before takes it.
fn simulate_step(stages: &[StageSeconds], micro_batches: u32) -> f64 {
    let count = stages.len();
    let passes: Vec<Vec<Pass>> = (0..count).map(|stage| passes_of_stage(count, stage, micro_batches)).collect();
    let (mut next, mut free_at) = (vec![0; count], vec![0.0f64; count]);
    // The times at which each stage's activations and gradients are ready, by micro-batch.
    let mut activation_at = vec![vec![None; micro_batches as usize]; count];
    let mut gradient_at = vec![vec![None; micro_batches as usize]; count];
    // Whether a stage is blocked because its last gradient is not taken yet.
    let mut is_blocked = vec![false; count];
    while (0..count).any(|stage| next[stage] < passes[stage].len()) {
        for stage in 0..count {
            while let Some(&Pass { is_forward, micro_batch }) =
                passes[stage].get(next[stage]).filter(|_| !is_blocked[stage])
            {
                let peer = if is_forward { stage.checked_sub(1) } else { Some(stage + 1).filter(|next| *next < count) };
                let start: Option<f64> =
                    match (peer, is_forward) {
                        (None, _) => Some(free_at[stage]),
                        (Some(below), true) => activation_at[below][micro_batch]
                            .map(|at: f64| at.max(free_at[stage]) + stages[below].transfer),
                        (Some(above), false) => gradient_at[above][micro_batch]
                            .map(|at: f64| at.max(free_at[stage]) + stages[stage].transfer),
                    };
                let Some(start) = start else { break };
                if let (Some(above), false) = (peer, is_forward) {
                    (free_at[above], is_blocked[above]) = (free_at[above].max(start), false);
                }
                let StageSeconds { forward, backward, .. } = stages[stage];
                free_at[stage] = start + if is_forward { forward } else { backward };
                let ready_at = if is_forward { &mut activation_at } else { &mut gradient_at };
                ready_at[stage][micro_batch] = Some(free_at[stage]);
                is_blocked[stage] = !is_forward && stage > 0;
                next[stage] += 1;
            }
        }
    }
    let all_passes = free_at.iter().copied().fold(0.0, f64::max);
    all_passes + stages.iter().map(|stage| stage.per_step).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(forward: f64, backward: f64, transfer: f64) -> StageSeconds {
        StageSeconds { forward, backward, transfer, ..StageSeconds::default() }
    }

    #[test]
    fn long_steps_go_on_at_the_same_pace() {
        let stages = [stage(1.0, 2.5, 0.25), stage(1.25, 2.0, 0.5), stage(0.5, 1.0, 0.125)];
        for micro_batches in [MAX_SIMULATED + 1, 3 * MAX_SIMULATED] {
            let (predicted, simulated) = (step_seconds(&stages, micro_batches), simulate_step(&stages, micro_batches));
            assert!((predicted / simulated - 1.0).abs() < 1e-3, "{predicted} for {simulated}");
            let scored = stages.map(|stage| StageSeconds { score: stage.forward, ..stage });
            let scores = step_seconds(&scored, micro_batches) - predicted;
            assert!((scores / (1.25 * f64::from(micro_batches)) - 1.0).abs() < 1e-2, "{scores} for the slowest stage");
        }
        assert!(step_seconds(&stages, u32::MAX).is_finite());
    }

    #[test]
    fn equal_stages_lose_only_the_pipeline_bubble() {
        for stages in 1..6usize {
            for micro_batches in 1..9 {
                let seconds = step_seconds(&vec![stage(1.0, 2.0, 0.0); stages], micro_batches);
                let expected = 3.0 * (f64::from(micro_batches) + stages as f64 - 1.0);
                assert!((seconds - expected).abs() < 1e-9, "{stages} stages, {micro_batches}: {seconds}, {expected}");
            }
        }
    }

    #[test]
    fn step_time_lies_between_slowest_stage_and_sum() {
        for (one, two, three) in [(1.0, 2.0, 3.0), (3.0, 2.0, 1.0), (1.0, 5.0, 1.0), (2.0, 0.1, 2.0)] {
            for transfer in [0.0, 0.3] {
                let stages = [one, two, three].map(|forward| stage(forward, 2.0 * forward, transfer));
                for micro_batches in [1, 2, 3, 10] {
                    let seconds = step_seconds(&stages, micro_batches);
                    let sum: f64 = stages.iter().map(|stage| stage.forward + stage.backward).sum();
                    let slowest = stages.iter().map(|stage| stage.forward + stage.backward).fold(0.0, f64::max);
                    let count = f64::from(micro_batches);
                    assert!(seconds >= (count * slowest).max(sum + 4.0 * transfer) - 1e-9);
                    assert!(seconds <= count * (sum + 4.0 * transfer) + 1e-9);
                }
            }
        }
    }
}
