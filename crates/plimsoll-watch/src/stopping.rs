//! The rest of the work of a run that is asked to stop, from its events so far.

use crate::text::seconds;
use plimsoll_core::Event;
use std::time::Instant;

/// Seconds below which the time left in a step is not worth a word.
const SHORT_SECONDS: f64 = 1.0;

/// The state of a run that matters if it is asked to stop, derived from its events alone.
#[derive(Clone, Debug, Default)]
pub struct StopOutlook {
    /// Number of steps of the run; 0 if its length is given in hours, or before the run starts.
    steps: u64,
    /// The last completed step; 0 before the first one.
    done: u64,
    /// Step of the newest checkpoint; 0 without one.
    saved: u64,
    /// Seconds of the last step, predicted before the first one, and the time at which the present step began. `None`
    /// before the run starts.
    pace: Option<(f64, Instant)>,
}

impl StopOutlook {
    /// Updates the state with an event that happened at the time `now`.
    pub fn update(&mut self, event: &Event, now: Instant) {
        match event {
            Event::Start { step, steps, predicted_step_seconds, .. } => {
                (self.steps, self.done, self.saved) = (*steps, step - 1, step - 1);
                self.pace = Some((*predicted_step_seconds, now));
            }
            Event::Step { step, seconds, .. } => {
                self.done = *step;
                self.pace = Some((*seconds, now));
            }
            Event::Checkpoint { step, .. } => self.saved = *step,
            _ => {}
        }
        if let Some((_, began)) = &mut self.pace {
            *began = now;
        }
    }

    /// Describes the work that the run finishes before it stops, such as `step 13, about 40 s`.
    pub fn work_left(&self, now: Instant) -> String {
        if self.steps > 0 && self.done >= self.steps {
            return "the run: all steps are done".to_owned();
        }
        let Some((seconds_of_step, began)) = self.pace else { return "the next step".to_owned() };
        let step = format!("step {}", self.done + 1);
        let left = seconds_of_step - (now - began).as_secs_f64();
        match left {
            SHORT_SECONDS.. => format!("{step}, about {}", seconds(left.round()).replace(".00", "")),
            _ => step,
        }
    }

    /// Returns the step of the newest checkpoint; `None` without one.
    pub fn newest_checkpoint(&self) -> Option<u64> {
        Some(self.saved).filter(|step| *step > 0)
    }

    /// Returns whether the run has started: its folder can then be resumed.
    pub fn has_started(&self) -> bool {
        self.pace.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::tests::{start, step};
    use std::time::Duration;

    #[test]
    fn work_left_follows_planned_then_measured_time() {
        let began = Instant::now();
        let after = |seconds| began + Duration::from_secs_f64(seconds);
        let mut outlook = StopOutlook::default();
        assert_eq!((outlook.work_left(began), outlook.has_started()), ("the next step".to_owned(), false));
        let mut event = start(20);
        if let Event::Start { predicted_step_seconds, .. } = &mut event {
            *predicted_step_seconds = 700.0;
        }
        outlook.update(&event, began);
        assert_eq!(outlook.work_left(after(100.0)), "step 1, about 10 min 00 s");
        outlook.update(&step(1, 56.0), after(700.0));
        assert_eq!(outlook.work_left(after(716.0)), "step 2, about 40 s");
        assert_eq!(outlook.work_left(after(756.5)), "step 2", "it takes longer than the one before");
        outlook.update(&step(20, 56.0), after(2000.0));
        assert_eq!(outlook.work_left(after(2001.0)), "the run: all steps are done");
    }

    #[test]
    fn newest_checkpoint_is_that_of_start_or_later() {
        let mut outlook = StopOutlook::default();
        outlook.update(&start(20), Instant::now());
        assert_eq!((outlook.newest_checkpoint(), outlook.has_started()), (None, true));
        let checkpoint = Event::Checkpoint { step: 4, path: "runs/a/checkpoints/step-4".into(), seconds: 1.0 };
        outlook.update(&checkpoint, Instant::now());
        assert_eq!(outlook.newest_checkpoint(), Some(4));
    }
}
