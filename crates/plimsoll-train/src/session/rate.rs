//! The learning rate of a step.

use crate::config::RateSchedule;

/// The rate of step `step` (counted from 1). It rises in a line over `warmup_steps`, then falls as
/// the schedule says over what is left of `progress`: 0 at the end of the warm-up, 1 after the last step.
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
    fn the_rate_rises_to_the_highest_and_falls_as_its_schedule_says() {
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
    fn no_warm_up_starts_at_the_highest() {
        assert_eq!(learning_rate(RateSchedule::Cosine, 0.5, 1, 0, 0.0), 0.5);
    }
}
