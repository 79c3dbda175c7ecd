//! The messages of the webhook (`watch.webhook`): which events of a run have one, and their content.
//!
//! A message has the name of the run and numbers. It has no data, no prompts, no paths, and no text of errors, because such
//! text may hold paths.

use super::now;
use crate::text::{excerpt, seconds};
use plimsoll_core::{Bytes, Event, Exit, Failure, Record, Recovery, RunResult, RunStatus, format_count};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Version of the messages. It changes when a field changes its meaning or is removed.
pub const MESSAGE_VERSION: u32 = 1;

/// The body of a POST to the webhook of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct WebhookMessage {
    /// Version of this format.
    pub version: u32,
    /// Name of the run: the last part of its folder's path.
    pub run: String,
    /// Time of the event, in seconds since the Unix epoch.
    pub time: f64,
    /// The message as one line of text.
    pub text: String,
    /// The event; its fields are on the top level of the JSON object.
    #[serde(flatten)]
    pub event: WebhookEvent,
}

/// An event of which the webhook of a run is told. Unknown values are `null`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum WebhookEvent {
    /// Training starts, or continues after `--resume`.
    Start {
        /// The next step to execute, counted from 1.
        step: u64,
        /// The last step of the run; `null` if the length of the run is given in hours.
        steps: Option<u64>,
        /// Number of parameters of the model.
        parameters: u64,
        /// Names of the devices that train.
        devices: Vec<String>,
        /// Whether any training device is simulated.
        simulated: bool,
        /// Predicted seconds of a step.
        predicted_step_seconds: f64,
    },
    /// A device ran out of memory or its load line moved, and the run continued with another plan.
    Recovery {
        /// The step during or after which the recovery took place.
        step: u64,
        /// The device that changed its plan.
        device: String,
        /// Planned bytes of the device's arena before the recovery.
        arena_bytes_before: Bytes,
        /// Planned bytes of the device's arena after the recovery.
        arena_bytes: Bytes,
        /// Predicted seconds of a step before the recovery.
        predicted_step_seconds_before: f64,
        /// Predicted seconds of a step after the recovery.
        predicted_step_seconds: f64,
    },
    /// A device was lost, and the run continued without it.
    DeviceLost {
        /// The step during or after which the device was lost.
        step: u64,
        /// The name of the lost device.
        device: String,
        /// Names of the devices that continue the run.
        remaining_devices: Vec<String>,
        /// Step of the checkpoint from which training continues; `null` if no completed step was lost.
        resumed_from_step: Option<u64>,
    },
    /// The run ended as asked.
    End {
        /// `done`, or `stopped` after a request to stop.
        status: RunStatus,
        /// Number of completed steps.
        step: u64,
        /// Loss of the last step; `null` if it has none.
        loss: Option<f64>,
        /// Loss of the last evaluation; `null` without evaluations.
        eval_loss: Option<f64>,
        /// Measured tokens per second, padding included.
        tokens_per_second: f64,
        /// Number of recoveries.
        recoveries: u64,
    },
    /// The run ended by a failure. The program prints it on the machine of the run.
    Failure {
        /// Number of completed steps.
        step: u64,
        /// Exit code of the program.
        exit_code: u32,
    },
}

impl WebhookEvent {
    /// Returns the event of a record; `None` for a record without a message. A change of the shares of devices has none.
    pub fn of(event: &Event) -> Option<WebhookEvent> {
        Some(match event {
            Event::Start { step, steps, parameters, devices, simulated, predicted_step_seconds, .. } => {
                WebhookEvent::Start {
                    step: *step,
                    steps: Some(*steps).filter(|steps| *steps > 0),
                    parameters: *parameters,
                    devices: devices.clone(),
                    simulated: *simulated,
                    predicted_step_seconds: *predicted_step_seconds,
                }
            }
            Event::Recovery(recovery) if recovery.sequences.is_none() => WebhookEvent::of_recovery(recovery),
            Event::DeviceLost { step, device, remaining_devices, resumed_from_step, .. } => WebhookEvent::DeviceLost {
                step: *step,
                device: device.clone(),
                remaining_devices: remaining_devices.clone(),
                resumed_from_step: *resumed_from_step,
            },
            _ => return None,
        })
    }

    fn of_recovery(recovery: &Recovery) -> WebhookEvent {
        WebhookEvent::Recovery {
            step: recovery.step,
            device: recovery.device.clone(),
            arena_bytes_before: recovery.arena_bytes_before,
            arena_bytes: recovery.arena_bytes,
            predicted_step_seconds_before: recovery.predicted_step_seconds_before,
            predicted_step_seconds: recovery.predicted_step_seconds,
        }
    }

    /// Returns the event of the end of a run. `steps_done` is the number of steps that the events named as completed.
    pub fn of_outcome(outcome: Result<&RunResult, &Failure>, steps_done: u64) -> WebhookEvent {
        match outcome {
            Ok(result) => WebhookEvent::End {
                status: result.status,
                step: result.steps,
                loss: Some(result.loss.last).filter(|loss| !loss.is_nan()),
                eval_loss: result.eval.as_ref().map(|eval| eval.loss).filter(|loss| !loss.is_nan()),
                tokens_per_second: result.tokens_per_second,
                recoveries: result.recoveries.len() as u64,
            },
            Err(failure) => WebhookEvent::Failure { step: steps_done, exit_code: failure.exit as u32 },
        }
    }

    /// Returns whether the event ends the run.
    pub fn is_last(&self) -> bool {
        matches!(self, WebhookEvent::End { .. } | WebhookEvent::Failure { .. })
    }

    /// Describes the event in words, without the name of the run.
    fn describe(&self) -> String {
        match self {
            WebhookEvent::Start { step: 1, devices, .. } => format!("training starts on {}", devices.join(", ")),
            WebhookEvent::Start { step, devices, .. } => {
                format!("training continues at step {step} on {}", devices.join(", "))
            }
            WebhookEvent::Recovery {
                step,
                device,
                arena_bytes_before,
                arena_bytes,
                predicted_step_seconds_before: before,
                predicted_step_seconds: after,
            } => {
                let [before, after] = [*before, *after].map(seconds);
                let arena = format!("arena {arena_bytes_before} -> {arena_bytes}");
                format!("recovery at step {step}: {device}, {arena}, step {before} -> {after} (predicted)")
            }
            WebhookEvent::DeviceLost { step, device, remaining_devices, resumed_from_step } => {
                let from = resumed_from_step.map_or(String::new(), |step| format!(", resumed from step {step}"));
                format!("device lost at step {step}: {device}; {} left{from}", remaining_devices.len())
            }
            WebhookEvent::End { status: RunStatus::Done, step, loss, .. } => {
                format!("done, {}{}", format_count(*step, "step"), loss_text(*loss))
            }
            WebhookEvent::End { status: RunStatus::Stopped, step, loss, .. } => {
                format!("stopped after step {step}{}", loss_text(*loss))
            }
            WebhookEvent::Failure { step, exit_code } => {
                let kind = if *exit_code == Exit::Stopped as u32 { "stopped by a failure" } else { "failed" };
                format!("{kind} after step {step} (exit code {exit_code})")
            }
        }
    }
}

/// Formats a loss behind other words; empty if it is unknown.
fn loss_text(loss: Option<f64>) -> String {
    loss.map_or(String::new(), |loss| format!(", loss {loss:.4}"))
}

/// Makes the messages of a run.
pub struct Messages {
    /// Name of the run.
    run: String,
    /// Number of completed steps.
    steps_done: u64,
}

impl Messages {
    /// Creates the messages of the run in a folder.
    pub fn new(run_folder: &Path) -> Messages {
        let name = run_folder.file_name().map_or("run".into(), |name| name.to_string_lossy());
        Messages { run: excerpt(&name), steps_done: 0 }
    }

    /// Returns the message of an event; `None` for most events.
    pub fn of_event(&mut self, record: &Record) -> Option<WebhookMessage> {
        match &record.event {
            Event::Step { step, .. } => self.steps_done = *step,
            Event::Start { step, .. } => self.steps_done = step.saturating_sub(1),
            _ => {}
        }
        WebhookEvent::of(&record.event).map(|event| self.message(record.time, event))
    }

    /// Returns the message of the end of a run.
    pub fn of_outcome(&self, outcome: Result<&RunResult, &Failure>) -> WebhookMessage {
        self.message(now(), WebhookEvent::of_outcome(outcome, self.steps_done))
    }

    fn message(&self, time: f64, event: WebhookEvent) -> WebhookMessage {
        let text = format!("{}: {}", self.run, event.describe());
        WebhookMessage { version: MESSAGE_VERSION, run: self.run.clone(), time, text, event }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::tests::{start, step};
    use plimsoll_core::EVENTS_VERSION;
    use serde_json::json;

    fn at(event: Event) -> Record {
        Record { version: EVENTS_VERSION, time: 5.0, event }
    }

    #[test]
    fn start_has_name_of_run_and_no_path() {
        let mut messages = Messages::new(Path::new("/home/ann/secret/my-model"));
        let message = serde_json::to_value(messages.of_event(&at(start(450))).unwrap()).unwrap();
        let fields = ["version", "run", "event", "step", "steps", "time"].map(|key| &message[key]);
        assert_eq!(fields, [&json!(1), &json!("my-model"), &json!("start"), &json!(1), &json!(450), &json!(5.0)]);
        assert!(!message.to_string().contains("secret"), "{message}");
    }

    #[test]
    fn failure_has_exit_code_and_no_text() {
        let mut messages = Messages::new(Path::new("runs/a\nb"));
        assert_eq!(messages.of_event(&at(step(7, 0.1))), None);
        let failure = Failure::stopped("cannot write /home/ann/model").hint("free some disk");
        let message = messages.of_outcome(Err(&failure));
        assert_eq!(message.event, WebhookEvent::Failure { step: 7, exit_code: 4 });
        assert_eq!(message.text, "a\\nb: stopped by a failure after step 7 (exit code 4)");
        assert!(!serde_json::to_string(&message).unwrap().contains("ann"));
    }

    #[test]
    fn messages_read_back_equal() {
        let lost = Event::DeviceLost {
            step: 9,
            device: "virtual:a".to_owned(),
            reason: "no answer from /dev/x".to_owned(),
            remaining_devices: vec!["virtual:b".to_owned()],
            resumed_from_step: Some(6),
        };
        let message = Messages::new(Path::new("r")).of_event(&at(lost)).unwrap();
        assert_eq!(message.text, "r: device lost at step 9: virtual:a; 1 left, resumed from step 6");
        let text = serde_json::to_string(&message).unwrap();
        assert!(!text.contains("/dev/x"));
        assert_eq!(serde_json::from_str::<WebhookMessage>(&text).unwrap(), message);
    }
}
