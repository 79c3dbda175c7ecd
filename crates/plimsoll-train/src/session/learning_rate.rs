//! Learning rate of a step: linear warm-up, then a schedule.

use crate::config::RateSchedule;

/// Returns the learning rate of `step`, counted from 1. The rate rises linearly to `highest` over `warmup_steps`, then
/// follows `schedule`. `progress` is the finished fraction of the run after warm-up: 0 at the end of warm-up, 1 after
/// the last step.
pub fn learning_rate(schedule: RateSchedule, highest: f64, step: u64, warmup_steps: u64, progress: f64) -> f64 {
    if step <= warmup_steps {
        return highest * step as f64 / warmup_steps as f64;
    }
    let progress = progress.clamp(0.0, 1.0);
    highest
        * match schedule {
            RateSchedule::Constant => 1.0,
            RateSchedule::Linear => 1.0 - progress,
            RateSchedule::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
        }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_rises_in_warmup_then_follows_schedule() {
        let rate = |schedule, step| {
            let progress = (step as f64 - 1.0 - 10.0) / 90.0;
            learning_rate(schedule, 1.0, step, 10, progress)
        };
        for schedule in [RateSchedule::Constant, RateSchedule::Linear, RateSchedule::Cosine] {
            assert_eq!(rate(schedule, 1), 0.1);
            assert_eq!(rate(schedule, 10), 1.0);
            assert_eq!(rate(schedule, 11), 1.0);
        }
        assert_eq!(rate(RateSchedule::Constant, 100), 1.0);
        assert!((rate(RateSchedule::Linear, 56) - 0.5).abs() < 1e-12);
        assert!((rate(RateSchedule::Cosine, 56) - 0.5).abs() < 1e-12);
        assert!(rate(RateSchedule::Cosine, 100) < 1e-3);
    }

    #[test]
    fn run_without_warmup_starts_at_highest_rate() {
        assert_eq!(learning_rate(RateSchedule::Cosine, 0.5, 1, 0, 0.0), 0.5);
    }
}
