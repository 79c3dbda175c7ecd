//! Length of a run: which rows form its steps, how many steps there are, and when it is finished. Pure functions of the
//! run file and the progress so far.

use crate::config::{Length, RunConfig};
use crate::data::{BatchSampler, RowOrder};
use crate::session::checkpoint::CheckpointInfo;

/// Whether a run with the progress `info` has reached its last step or its time limit. `steps` is the total number of
/// steps; `None` if a time limit ends the run.
pub(crate) fn is_finished(run: &RunConfig, steps: Option<u64>, info: &CheckpointInfo) -> bool {
    let seconds_limit = match run.length() {
        Some(Length::Hours(hours)) => hours * 3600.0,
        _ => f64::INFINITY,
    };
    steps.is_some_and(|steps| info.step >= steps) || info.elapsed_seconds >= seconds_limit
}

/// Returns the batches of a run over `rows` rows of training data, and its number of steps. The number is `None` if a
/// time limit ends the run.
pub(crate) fn batches_and_steps(run: &RunConfig, rows: u64) -> (BatchSampler, Option<u64>) {
    let order = RowOrder { seed: run.train.seed, rows, shuffle: run.data.shuffle };
    let end = match run.length() {
        Some(Length::Epochs(epochs)) => {
            Some(order.rows_of_epochs(epochs).max(1).next_multiple_of(run.rows_per_group()))
        }
        _ => None,
    };
    let batches =
        BatchSampler { order, rows: run.batch_rows(), row_limit: end, steps_per_batch: run.steps_per_batch() };
    let steps = match run.length() {
        Some(Length::Steps(steps)) => Some(steps),
        _ => batches.steps(),
    };
    (batches, steps)
}

/// Returns the number of rows that a run reads, over `rows` rows of training data. Returns `None` if a time limit ends the
/// run, or if the run file gives no length.
pub fn rows_of_run(run: &RunConfig, rows: u64) -> Option<u64> {
    let (batches, steps) = batches_and_steps(run, rows);
    Some(
        batches
            .row_limit
            .unwrap_or(u64::MAX)
            .min(steps?.div_ceil(batches.steps_per_batch).saturating_mul(batches.rows)),
    )
}

/// Returns the number of steps that remain if each takes `step_seconds`; infinite for a run without limit.
pub(crate) fn remaining_steps(run: &RunConfig, info: &CheckpointInfo, step_seconds: f64) -> f64 {
    match (info.steps, run.length()) {
        (Some(steps), _) => steps.saturating_sub(info.step) as f64,
        (None, Some(Length::Hours(hours))) => (hours * 3600.0 - info.elapsed_seconds).max(0.0) / step_seconds,
        _ => f64::INFINITY,
    }
}

/// Returns the progress that the learning rate schedule uses for `step`: 0 until the end of the warm-up, 1 after the
/// last step. If a time limit ends the run, it is the part of that time that has passed; 0 for a run without limit.
pub(crate) fn schedule_progress(run: &RunConfig, info: &CheckpointInfo, step: u64) -> f64 {
    let warmup = run.train.warmup_steps;
    match (info.steps, run.length()) {
        (Some(steps), _) => (step - 1).saturating_sub(warmup) as f64 / steps.saturating_sub(warmup).max(1) as f64,
        (None, Some(Length::Hours(hours))) => info.elapsed_seconds / (hours * 3600.0),
        _ => 0.0,
    }
}
