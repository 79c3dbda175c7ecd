//! The event log of a run: `events.jsonl`, one JSON object ([`Record`]) per line.

use crate::{Bytes, Recovery};
use serde::{Deserialize, Serialize};

/// Version of the event lines. It changes when a field changes its meaning or is removed.
pub const EVENTS_VERSION: u32 = 1;

/// One line of `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// [`EVENTS_VERSION`].
    pub version: u32,
    /// Seconds since the Unix epoch.
    pub time: f64,
    /// The event; its fields are on the top level of the JSON object.
    #[serde(flatten)]
    pub event: Event,
}

/// An event of a run. All bytes and seconds are measured, except fields with `predicted` in their name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Training starts, or continues after `--resume`.
    Start {
        /// The next step to execute, counted from 1.
        step: u64,
        /// The last step; 0 if the length of the run is given in hours.
        steps: u64,
        /// Trained parameters.
        parameters: u64,
        /// Bytes of all arenas.
        arena_bytes: Bytes,
        /// Predicted seconds of a step.
        predicted_step_seconds: f64,
        /// Operations of the matrix products of a step, without recompute.
        product_flops: f64,
        /// Measured operations per second of the devices in such matrix products. 0 if unknown, or if other programs
        /// disturbed the measurement.
        peak_flops: f64,
        /// Whether any device is simulated; all seconds of the run are then simulated.
        #[serde(default)]
        simulated: bool,
    },
    /// An optimizer step completed.
    Step {
        /// The step, counted from 1.
        step: u64,
        /// Mean loss over the labelled tokens of the step.
        loss: f64,
        /// Global gradient norm before clipping.
        norm: f64,
        /// The learning rate of the step.
        learning_rate: f64,
        /// Tokens of the step, including padding.
        tokens: u64,
        /// Tokens that count in the loss.
        labelled_tokens: u64,
        /// Seconds that the step took.
        seconds: f64,
        /// Bytes held after the step by the device (CPU: by the process).
        bytes: Bytes,
    },
    /// An evaluation completed. If a device outside the team evaluates concurrently, the event follows later steps.
    Evaluation {
        /// The step after which the weights were evaluated.
        step: u64,
        /// Mean loss over the labelled tokens.
        loss: f64,
        /// Share of samples with all labelled tokens predicted correctly.
        exact_match: Option<f64>,
        /// Labelled tokens.
        tokens: u64,
        /// Seconds that the evaluation took.
        seconds: f64,
        /// The device that evaluated concurrently with training; `None` if the training devices evaluated.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
    /// A checkpoint is complete on disk.
    Checkpoint {
        /// The last step that the checkpoint contains.
        step: u64,
        /// The folder of the checkpoint.
        path: String,
        /// Seconds that saving took.
        seconds: f64,
    },
    /// The run continued after an out-of-memory error or a moved load line, with another recipe or by a retry.
    Recovery(Box<Recovery>),
    /// A device was lost; training continues on the remaining devices.
    DeviceLost {
        /// The step during or after which the device was lost.
        step: u64,
        /// The name of the lost device.
        device: String,
        /// The cause, as far as it is known.
        reason: String,
        /// Devices that continue the run, including devices that the plan had excluded before.
        remaining_devices: Vec<String>,
        /// Step of the checkpoint from which training continues, 0 for the start of the run. `None` if no completed
        /// step was lost with the device.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resumed_from_step: Option<u64>,
    },
    /// A lost device returned and joined the team again.
    DeviceReturned {
        /// The last step completed without the device.
        step: u64,
        /// The name of the device.
        device: String,
        /// All devices that now train.
        team: Vec<String>,
    },
    /// Training paused between two steps, because a device was too warm or throttled by heat.
    ThermalPause {
        /// The step before the pause.
        step: u64,
        /// The name of the device.
        device: String,
        /// Temperature before the pause in degrees Celsius.
        celsius: f64,
        /// Whether the device reported thermal throttling.
        throttled: bool,
        /// Temperature after the pause in degrees Celsius.
        celsius_after: f64,
        /// The permitted temperature in degrees Celsius (`run.max_temperature`).
        max_celsius: f64,
        /// Seconds of the pause.
        seconds: f64,
    },
    /// A warning for the user.
    Warning {
        /// The warning, one line.
        message: String,
    },
    /// The run ended.
    End {
        /// `done` or `stopped`.
        status: String,
        /// Completed steps.
        step: u64,
    },
}
