//! The event log of a run: `events.jsonl`, one JSON object ([`Record`]) per line.

use crate::result::nan_from_null;
use crate::{Bytes, Category, Recovery};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;

/// Version of the format of `events.jsonl`. It changes when a field changes its meaning or is removed.
pub const EVENTS_VERSION: u32 = 1;

/// One line of `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct Record {
    /// Version of the format of `events.jsonl` ([`EVENTS_VERSION`]).
    pub version: u32,
    /// Time of the event, in seconds since the Unix epoch.
    pub time: f64,
    /// The event; its fields are on the top level of the JSON object.
    #[serde(flatten)]
    pub event: Event,
}

impl Record {
    /// Parses a line of `events.jsonl`.
    ///
    /// # Errors
    /// The line is no record, as when the run was killed while it wrote it.
    pub fn from_line(line: &[u8]) -> serde_json::Result<Record> {
        StepLine::parse(line).map_or_else(|| serde_json::from_slice(line), |step| Ok(Record::from(step)))
    }
}

/// The record of a step, without the levels of [`Record`]. Most lines are steps, and are parsed several times as fast by
/// these fields than as a [`Record`], which keeps all fields until it knows the kind of the event.
#[derive(Deserialize)]
struct StepLine<'a> {
    version: u32,
    time: f64,
    event: &'a str,
    step: u64,
    loss: Option<f64>,
    norm: f64,
    learning_rate: f64,
    tokens: u64,
    labelled_tokens: u64,
    seconds: f64,
    bytes: Bytes,
    #[serde(default)]
    memory: Option<Vec<HeldMemory>>,
}

impl<'a> StepLine<'a> {
    /// Parses a line; `None` if it is no step.
    fn parse(line: &'a [u8]) -> Option<StepLine<'a>> {
        serde_json::from_slice(line).ok().filter(|line: &StepLine| line.event == "step")
    }
}

impl From<StepLine<'_>> for Record {
    fn from(line: StepLine<'_>) -> Record {
        let StepLine {
            version, time, step, norm, learning_rate, tokens, labelled_tokens, seconds, bytes, memory, ..
        } = line;
        let loss = line.loss.unwrap_or(f64::NAN);
        let event = Event::Step { step, loss, norm, learning_rate, tokens, labelled_tokens, seconds, bytes, memory };
        Record { version, time, event }
    }
}

/// Measured memory of a training device at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct HeldMemory {
    /// The device's name.
    pub device: String,
    /// Bytes that the run holds on the device now (CPU: that the process holds).
    pub held_bytes: Bytes,
    /// Most bytes that the run has held there so far, by the count of its process; `None` if the system does not report
    /// it, and for a GPU.
    pub peak_bytes: Option<Bytes>,
    /// Measured bytes of the arena under the present plan by category, at the moment when the most bytes of tensors were
    /// in use so far. Written when they may have changed, and `None` in the measurements between. Never written for
    /// devices that do not measure them, such as remote ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arena_by_category: Option<BTreeMap<Category, Bytes>>,
}

/// The program that started a run, and the machine that it started on. The models of GPUs are in the plan
/// ([`GemmAlgorithms`](crate::GemmAlgorithms)).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RunEnvironment {
    /// Version of Plimsoll.
    pub plimsoll_version: String,
    /// Git commit from which the program was built; `None` if the build was not given one (`PLIMSOLL_COMMIT`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub commit: Option<String>,
    /// The operating system with its release, such as `linux 6.8.0`.
    pub system: String,
    /// Model name of the processor.
    pub processor: String,
    /// Number of physical cores that the process may use.
    pub cores: u32,
    /// Memory of the machine, or a smaller limit on the process.
    pub memory_bytes: Bytes,
}

/// Rewards of pairs of answers. The reward of an answer is `dpo.beta` times a difference, as in TRL: its log-probability under
/// the current weights minus that under the initial weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct PreferenceFigures {
    /// Number of pairs of answers.
    pub pairs: u64,
    /// Mean reward of the chosen answers.
    pub chosen_reward: f64,
    /// Mean reward of the rejected answers.
    pub rejected_reward: f64,
    /// Share of pairs, 0 to 1, in which the chosen answer has the larger reward.
    pub accuracy: f64,
}

impl PreferenceFigures {
    /// Returns the mean difference between the rewards of the chosen and the rejected answer.
    pub fn margin(&self) -> f64 {
        self.chosen_reward - self.rejected_reward
    }
}

/// Figures of the completions of a round, under the names of TRL. JSON has no NaN: it is written as `null`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RoundFigures {
    /// Mean reward of the completions; NaN, in JSON `null`, if none has a reward.
    #[serde(deserialize_with = "nan_from_null")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub reward: f64,
    /// Standard deviation of the rewards; NaN, in JSON `null`, if fewer than two completions have one.
    #[serde(deserialize_with = "nan_from_null")]
    #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
    pub reward_std: f64,
    /// Share of completions, 0 to 1, whose group has equal rewards. Such a group teaches nothing.
    pub frac_reward_zero_std: f64,
    /// Mean reward of each reward function, under its name. NaN, in JSON `null`, without an opinion.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[cfg_attr(feature = "schema", schemars(with = "BTreeMap<String, Option<f64>>"))]
    #[serde(deserialize_with = "nan_values_from_null")]
    pub rewards: BTreeMap<String, f64>,
    /// Mean KL divergence of a token from the reference model; `None` without KL penalty.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// Mean entropy of the distribution of a token, in nats; `None` for completions of a file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entropy: Option<f64>,
    /// Share of tokens, 0 to 1, whose ratio is clipped; of completions with ratios of completions. `None` if all ratios are 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clip_ratio: Option<f64>,
    /// Mean absolute difference between the log-probabilities of the sampler and those of the loss; `None` if they are not
    /// compared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sampling_difference: Option<f64>,
    /// Lengths of the completions.
    pub completions: CompletionFigures,
    /// Seconds of the phases.
    pub seconds: RoundSeconds,
}

/// Lengths of the completions of a round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct CompletionFigures {
    /// Number of completions.
    pub count: u64,
    /// Mean number of tokens.
    pub mean_length: f64,
    /// Share of completions, 0 to 1, without an end token.
    pub clipped_ratio: f64,
}

/// Measured seconds of the phases of a step over sampled completions. A phase that does not run takes 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub struct RoundSeconds {
    /// Sampling of completions.
    pub generate: f64,
    /// Rewards of completions, after the last one was sampled.
    pub reward: f64,
    /// Log-probabilities of their tokens.
    pub score: f64,
    /// Log-probabilities of their tokens under the initial weights of the run.
    #[serde(default)]
    pub reference: f64,
    /// Gradients and update.
    pub update: f64,
}

/// Reads the `null` values of a map as NaN.
fn nan_values_from_null<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, f64>, D::Error> {
    let values = BTreeMap::<String, Option<f64>>::deserialize(from)?;
    Ok(values.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
}

/// An event of a run. All bytes and seconds are measured, except fields with `predicted` in their name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Training starts, or continues after `--resume`.
    Start {
        /// The next step to execute, counted from 1.
        step: u64,
        /// The last step of the run; 0 if the length of the run is given in hours.
        steps: u64,
        /// Number of parameters of the model.
        parameters: u64,
        /// Planned bytes of the arenas of all devices together, including the evaluator. Host arenas do not count.
        arena_bytes: Bytes,
        /// Predicted seconds of a step.
        predicted_step_seconds: f64,
        /// Number of floating-point operations in the matrix products of a step. Recomputed products do not count.
        product_flops: f64,
        /// Peak rate of matrix products of all training devices together, in floating-point operations per second. 0 if
        /// the rate is unknown, or if other programs disturbed its measurement.
        peak_flops: f64,
        /// Whether any training device is simulated; all seconds of the run are then simulated.
        #[serde(default)]
        simulated: bool,
        /// Names of the devices that train.
        #[serde(default)]
        devices: Vec<String>,
        /// The program and the machine of this start; `None` in logs of earlier builds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        environment: Option<Box<RunEnvironment>>,
    },
    /// An optimizer step completed.
    Step {
        /// The step, counted from 1.
        step: u64,
        /// Mean loss over the labelled tokens of the step. NaN, in JSON `null`, if it has none.
        #[serde(deserialize_with = "nan_from_null")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
        loss: f64,
        /// Global gradient norm before clipping.
        norm: f64,
        /// The learning rate of the step.
        learning_rate: f64,
        /// Number of tokens of the step, including padding.
        tokens: u64,
        /// Number of tokens that count in the loss.
        labelled_tokens: u64,
        /// Seconds that the step took.
        seconds: f64,
        /// Bytes that all training devices together hold after the step (CPU: that the process holds).
        bytes: Bytes,
        /// Memory of each training device. Written at most twice a second; `None` in the events between.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        memory: Option<Vec<HeldMemory>>,
    },
    /// An evaluation completed. If a device outside the team evaluates while training goes on, this event comes after
    /// the events of later steps.
    Evaluation {
        /// The step after which the weights were evaluated.
        step: u64,
        /// Mean loss over the labelled tokens. NaN, in JSON `null`, for sampled completions, which have a reward.
        #[serde(deserialize_with = "nan_from_null")]
        #[cfg_attr(feature = "schema", schemars(with = "Option<f64>"))]
        loss: f64,
        /// Mean reward of the most likely completions; `None` for other objectives, and if none has a reward.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reward: Option<f64>,
        /// Share of answers, 0 to 1, with all tokens predicted correctly; `None` if the data are not all prompts with one
        /// short answer.
        exact_match: Option<f64>,
        /// Number of labelled tokens.
        tokens: u64,
        /// Seconds that the evaluation took.
        seconds: f64,
        /// The device that evaluated concurrently with training; `None` if the training devices evaluated.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
    /// Progress of the reference pass: log-probabilities of answers under the initial weights. Written about every ten
    /// seconds, and at the end of the pass.
    Reference {
        /// Number of rows that this pass has computed so far.
        rows: u64,
        /// Number of rows that were missing when this pass began.
        all_rows: u64,
        /// Seconds since this pass began.
        seconds: f64,
    },
    /// Rewards of the pairs of a step before its update, or of the evaluation pairs. The event of the step or the
    /// evaluation follows.
    Preferences {
        /// The step; for an evaluation, the step after which the weights were evaluated.
        step: u64,
        /// Whether the answers are those of the evaluation data.
        evaluation: bool,
        /// The figures.
        #[serde(flatten)]
        figures: PreferenceFigures,
    },
    /// Figures of the completions of a step, before its update. The event of the step follows.
    Round {
        /// The step.
        step: u64,
        /// The round, counted from 1. It has several steps with `grpo.num_iterations`.
        round: u64,
        /// The figures.
        #[serde(flatten)]
        figures: Box<RoundFigures>,
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
    /// A device ran out of memory, or its load line moved. The run continued with another recipe, or repeated the
    /// failed work.
    Recovery(Box<Recovery>),
    /// A device was lost; training continues on the remaining devices.
    DeviceLost {
        /// The step during or after which the device was lost.
        step: u64,
        /// The name of the lost device.
        device: String,
        /// The cause, as far as it is known.
        reason: String,
        /// Names of the devices that continue the run. A device that the plan excluded before may be among them.
        remaining_devices: Vec<String>,
        /// Step of the checkpoint from which training continues; 0 if it begins anew. `None` if training continues
        /// without going back, because no completed step was lost.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resumed_from_step: Option<u64>,
    },
    /// A lost device returned and joined the team again.
    DeviceReturned {
        /// The last step completed without the device.
        step: u64,
        /// The name of the device.
        device: String,
        /// Names of all devices that train from now on.
        team: Vec<String>,
    },
    /// Training paused between two steps, because a device was too warm or throttled by heat.
    ThermalPause {
        /// The last step completed before the pause.
        step: u64,
        /// The name of the device.
        device: String,
        /// Temperature of the device before the pause, in degrees Celsius.
        celsius: f64,
        /// Whether the device reported thermal throttling.
        throttled: bool,
        /// Temperature of the device after the pause, in degrees Celsius.
        celsius_after: f64,
        /// Highest permitted temperature in degrees Celsius (`run.max_temperature`).
        max_celsius: f64,
        /// Duration of the pause in seconds.
        seconds: f64,
    },
    /// A warning for the user.
    Warning {
        /// The warning, one line.
        message: String,
    },
    /// The run ended.
    End {
        /// The outcome of the run: `done` or `stopped`.
        status: String,
        /// Number of completed steps.
        step: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_parsed_as_all_records() {
        let held =
            HeldMemory { device: "cpu".to_owned(), held_bytes: Bytes(5), peak_bytes: None, arena_by_category: None };
        for (loss, memory) in [(0.1 + 0.2, None), (f64::NAN, Some(vec![held]))] {
            let event = Event::Step {
                step: 7,
                loss,
                norm: 1e-300,
                learning_rate: 3e-4,
                tokens: 64,
                labelled_tokens: 63,
                seconds: 0.25,
                bytes: Bytes(1 << 40),
                memory,
            };
            let record = Record { version: EVENTS_VERSION, time: 1795806062.427775, event };
            let line = serde_json::to_string(&record).unwrap();
            assert!(StepLine::parse(line.as_bytes()).is_some(), "{line}");
            // Not by equality, because NaN differs from itself.
            assert_eq!(format!("{:?}", Record::from_line(line.as_bytes()).unwrap()), format!("{record:?}"));
        }
    }

    #[test]
    fn other_events_are_parsed_and_cut_lines_refused() {
        let event = Event::Warning { message: "step".to_owned() };
        let record = Record { version: EVENTS_VERSION, time: 1.5, event };
        let line = serde_json::to_string(&record).unwrap();
        assert!(StepLine::parse(line.as_bytes()).is_none());
        assert_eq!(Record::from_line(line.as_bytes()).unwrap(), record);
        assert!(Record::from_line(&line.as_bytes()[..line.len() - 1]).is_err());
    }
}
