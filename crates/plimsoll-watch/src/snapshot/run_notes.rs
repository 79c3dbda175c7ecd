//! The events of a run that a report lists one by one: starts, evaluations, recoveries, lost devices and warnings.

use plimsoll_core::{Event, PreferenceFigures, Record, Recovery, RunEnvironment};
use serde::Serialize;
use std::collections::VecDeque;

/// Most events of each kind that are kept: the newest ones.
pub const MAX_NOTES: usize = 256;

/// The newest events of one kind, with the number of earlier ones that were dropped.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema), schemars(rename = "Newest{T}"))]
pub struct Newest<T> {
    /// Number of earlier events that are not listed; they are in `events.jsonl`.
    pub earlier: u64,
    /// The events in order, at most [`MAX_NOTES`].
    pub listed: VecDeque<T>,
}

impl<T> Default for Newest<T> {
    fn default() -> Newest<T> {
        Newest { earlier: 0, listed: VecDeque::new() }
    }
}

impl<T> Newest<T> {
    /// Adds the next event.
    fn push(&mut self, event: T) {
        self.listed.push_back(event);
        if self.listed.len() > MAX_NOTES {
            self.listed.pop_front();
            self.earlier += 1;
        }
    }
}

/// A start of a run: its first one, or one after `--resume`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct StartNote {
    /// Time of the start, in seconds since the Unix epoch.
    pub time: f64,
    /// The first step that it executes, counted from 1.
    pub step: u64,
    /// Number of parameters of the model.
    pub parameters: u64,
    /// Names of the devices that train.
    pub devices: Vec<String>,
    /// Whether any of them is simulated.
    pub simulated: bool,
    /// Program and machine; `None` in logs of builds that did not record them.
    pub environment: Option<RunEnvironment>,
}

/// An evaluation of a run. All figures are measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct EvaluationNote {
    /// The step after which the weights were evaluated.
    pub step: u64,
    /// Mean loss over the labelled tokens; `None` if it is no number.
    pub loss: Option<f64>,
    /// Share of answers, 0 to 1, with all tokens predicted correctly; `None` if the data have no such answers.
    pub exact_match: Option<f64>,
    /// Preferences between pairs of answers; `None` for other data.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preferences: Option<PreferenceFigures>,
    /// Mean reward of the most likely completions; `None` for other objectives.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward: Option<f64>,
    /// Seconds that the evaluation took.
    pub seconds: f64,
    /// The device that evaluated while the team trained; `None` if the team evaluated.
    pub device: Option<String>,
}

/// A change of the team of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct TeamNote {
    /// The step during or after which the team changed.
    pub step: u64,
    /// Name of the device.
    pub device: String,
    /// Whether the device returned; otherwise it was lost.
    pub returned: bool,
    /// Cause of the loss; `None` for a return.
    pub reason: Option<String>,
}

/// The listed events of a run so far. Their number does not grow with the length of the run.
#[derive(Clone, Debug, Default)]
pub struct RunNotes {
    /// Time of the first event, in seconds since the Unix epoch; `None` without events.
    pub first_time: Option<f64>,
    /// Seconds of all steps, repeated ones included.
    pub step_seconds_total: f64,
    /// Whether the plan was replaced since the newest start, by a recovery or a change of the team.
    pub is_plan_replaced: bool,
    /// Starts.
    pub starts: Newest<StartNote>,
    /// Evaluations in the order of their steps. Those that a run repeats replace the earlier ones.
    pub evaluations: Newest<EvaluationNote>,
    /// Preferences of an evaluation, whose event follows.
    preferences: Option<(u64, PreferenceFigures)>,
    /// Recoveries: changes of recipe or share, and repeated work.
    pub recoveries: Newest<Recovery>,
    /// Devices that were lost or returned.
    pub team_changes: Newest<TeamNote>,
    /// Warnings of the run, each as one line.
    pub warnings: Newest<String>,
}

impl RunNotes {
    /// Takes the next event of the run.
    pub fn update(&mut self, record: &Record) {
        self.first_time.get_or_insert(record.time);
        self.is_plan_replaced = match &record.event {
            Event::Start { .. } => false,
            Event::Recovery(recovery) => self.is_plan_replaced || replaces_plan(recovery),
            Event::DeviceLost { .. } | Event::DeviceReturned { .. } => true,
            _ => self.is_plan_replaced,
        };
        match &record.event {
            Event::Start { step, parameters, simulated, devices, environment, .. } => self.starts.push(StartNote {
                time: record.time,
                step: *step,
                parameters: *parameters,
                devices: devices.clone(),
                simulated: *simulated,
                environment: environment.as_deref().cloned(),
            }),
            Event::Step { seconds, .. } => self.step_seconds_total += seconds,
            Event::Evaluation { step, loss, reward, exact_match, seconds, device, .. } => {
                self.evaluations.listed.retain(|earlier| earlier.step < *step);
                self.evaluations.push(EvaluationNote {
                    step: *step,
                    loss: Some(*loss).filter(|loss| loss.is_finite()),
                    exact_match: *exact_match,
                    preferences: self.preferences.take().filter(|(of, _)| of == step).map(|(_, figures)| figures),
                    reward: *reward,
                    seconds: *seconds,
                    device: device.clone(),
                });
            }
            Event::Recovery(recovery) => self.recoveries.push((**recovery).clone()),
            Event::DeviceLost { step, device, reason, .. } => {
                let (device, reason) = (device.clone(), Some(reason.clone()));
                self.team_changes.push(TeamNote { step: *step, device, returned: false, reason });
            }
            Event::DeviceReturned { step, device, .. } => {
                let device = device.clone();
                self.team_changes.push(TeamNote { step: *step, device, returned: true, reason: None });
            }
            Event::Warning { message } => self.warnings.push(message.clone()),
            Event::Preferences { step, evaluation: true, figures } => self.preferences = Some((*step, *figures)),
            Event::Preferences { .. }
            | Event::Reference { .. }
            | Event::Round { .. }
            | Event::Checkpoint { .. }
            | Event::ThermalPause { .. }
            | Event::End { .. } => {}
        }
    }
}

/// Returns whether a recovery changed the plan of its device, rather than repeated work.
fn replaces_plan(recovery: &Recovery) -> bool {
    let changes_arena = recovery.arena_bytes != recovery.arena_bytes_before;
    recovery.from != recovery.to || changes_arena || recovery.sequences.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plimsoll_core::{Bytes, EVENTS_VERSION, Recipe};

    fn evaluation(step: u64, loss: f64) -> Record {
        let event =
            Event::Evaluation { step, loss, reward: None, exact_match: None, tokens: 10, seconds: 0.1, device: None };
        Record { version: EVENTS_VERSION, time: step as f64, event }
    }

    #[test]
    fn repeated_evaluations_replace_earlier_ones() {
        let mut notes = RunNotes::default();
        for (step, loss) in [(10, 3.0), (20, 2.0), (10, 2.5), (20, f64::NAN)] {
            notes.update(&evaluation(step, loss));
        }
        let found: Vec<_> = notes.evaluations.listed.iter().map(|note| (note.step, note.loss)).collect();
        assert_eq!(found, [(10, Some(2.5)), (20, None)]);
        assert_eq!((notes.evaluations.earlier, notes.first_time), (0, Some(10.0)));
    }

    #[test]
    fn repeated_work_replaces_no_plan() {
        let recipe = serde_json::json!({"micro_batch": 8, "recompute": ["nothing"]});
        let repeated: Recovery = serde_json::from_value(serde_json::json!({
            "step": 5, "device": "cpu", "reason": "out of memory", "from": recipe, "to": recipe, "class": "identical",
            "arena_bytes_before": 16, "arena_bytes": 16, "seconds": 0.1,
            "predicted_step_seconds_before": 0.05, "predicted_step_seconds": 0.05,
        }))
        .unwrap();
        let smaller = Recipe { micro_batch: 4, ..repeated.to.clone() };
        let cases = [
            (repeated.clone(), false),
            (Recovery { to: smaller, ..repeated.clone() }, true),
            (Recovery { arena_bytes: Bytes(12), ..repeated.clone() }, true),
            (Recovery { sequences: Some([4, 3]), ..repeated }, true),
        ];
        for (recovery, expected) in cases {
            let mut notes = RunNotes::default();
            let event = Event::Recovery(Box::new(recovery.clone()));
            notes.update(&Record { version: EVENTS_VERSION, time: 1.0, event });
            assert_eq!(notes.is_plan_replaced, expected, "{recovery:?}");
        }
    }

    #[test]
    fn only_newest_notes_are_kept() {
        let mut notes = RunNotes::default();
        for number in 0..MAX_NOTES as u64 + 5 {
            let event = Event::Warning { message: number.to_string() };
            notes.update(&Record { version: EVENTS_VERSION, time: 1.0, event });
        }
        assert_eq!((notes.warnings.listed.len(), notes.warnings.earlier), (MAX_NOTES, 5));
        assert_eq!(notes.warnings.listed[0], "5");
    }
}
