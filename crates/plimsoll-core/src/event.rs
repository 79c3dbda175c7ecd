//! What happens in a run, one object a line in `events.jsonl`.

use crate::{Bytes, Retreat};
use serde::{Deserialize, Serialize};

/// The version of the event lines; it changes when a field changes its meaning or goes away.
pub const EVENTS_VERSION: u32 = 1;

/// One line of `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// [`EVENTS_VERSION`].
    pub version: u32,
    /// Seconds since the Unix epoch.
    pub time: f64,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// What can happen. All bytes and seconds are measured unless a field says predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The run starts or goes on.
    Start {
        /// The first step that will be done, counted from 1.
        step: u64,
        /// The last step; 0 where the run is measured in hours.
        steps: u64,
        /// Trained parameters.
        parameters: u64,
        /// Bytes of the arenas.
        arena_bytes: Bytes,
        /// Predicted seconds of a step.
        predicted_step_seconds: f64,
        /// Operations in the matrix products that a step must do, recompute left out.
        product_flops: f64,
        /// Operations a second that the devices were measured to do in such products; 0 if unknown, or measured beside other
        /// work.
        peak_flops: f64,
        /// Whether a device is simulated: all seconds of this run are then.
        #[serde(default)]
        simulated: bool,
    },
    /// An optimizer step is done.
    Step {
        /// Counted from 1.
        step: u64,
        /// Mean over the labelled tokens of the step.
        loss: f64,
        /// Global gradient norm before clipping.
        norm: f64,
        /// The rate used.
        learning_rate: f64,
        /// Tokens, padding counted.
        tokens: u64,
        /// Tokens that counted in the loss.
        labelled_tokens: u64,
        /// How long it took.
        seconds: f64,
        /// Bytes the process held (CPU) or the device held, after the step.
        bytes: Bytes,
    },
    /// An evaluation is done. One that a device made beside the steps comes when it is ready, behind later steps.
    Evaluation {
        /// After this step.
        step: u64,
        /// Mean over the labelled tokens.
        loss: f64,
        /// Share of samples whose labelled tokens were all predicted right.
        exact_match: Option<f64>,
        /// Labelled tokens.
        tokens: u64,
        /// How long it took.
        seconds: f64,
        /// The device that made it beside the steps; none where those who do the steps did.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
    /// A checkpoint is complete on disk.
    Checkpoint {
        /// After this step.
        step: u64,
        /// Its folder.
        path: String,
        /// How long it took.
        seconds: f64,
    },
    /// The run goes on with another recipe, or does again what was refused.
    Retreat(Box<Retreat>),
    /// A device is gone; the others go on.
    Lost {
        /// While this step was done, or between it and the next.
        step: u64,
        /// Its name.
        device: String,
        /// What is known of it.
        why: String,
        /// The devices that go on, of those that worked on the run or were left out.
        left: Vec<String>,
        /// The step of the checkpoint from which they go on, 0 for the beginning; none where no finished step was lost with it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        back_to: Option<u64>,
    },
    /// A device that was lost is there again, and works on the run from here on.
    Back {
        /// After this step.
        step: u64,
        /// Its name.
        device: String,
        /// All that work on the run now.
        team: Vec<String>,
    },
    /// A device that was too warm, or was slowed down for it, has rested between two steps.
    Rest {
        /// After this step.
        step: u64,
        /// Its name.
        device: String,
        /// How warm it was, in degrees Celsius.
        celsius: f64,
        /// Whether it was slowed down because of heat.
        throttled: bool,
        /// How warm it was in the end.
        celsius_after: f64,
        /// How warm it may be (`run.max_temperature`).
        max_celsius: f64,
        /// How long it rested.
        seconds: f64,
    },
    /// Something the user should know.
    Warning {
        /// One line.
        message: String,
    },
    /// The run ends.
    End {
        /// `done` or `stopped`.
        status: String,
        /// Steps done.
        step: u64,
    },
}
