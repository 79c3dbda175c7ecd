//! What a plan says of a team: how the work is shared out, what each device is given, who is left out and why. The plan
//! that all of it stands in is in `plan`.

use crate::{Algorithms, Bytes, DevicePlan, Predicted, Recipe, RungPrice};
use serde::{Deserialize, Serialize};
use std::fmt;

/// How the work of a step is shared out among the devices of a team.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sharing {
    /// Every device has the whole model and computes some of the sequences.
    Batch,
    /// The same, and weights, gradients and optimizer state stand in parts of unequal size on all of them.
    State,
    /// Every device has some of the layers, one after the other: a pipeline.
    Layers,
}

impl fmt::Display for Sharing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Sharing::Batch => "batch",
            Sharing::State => "state",
            Sharing::Layers => "layers",
        })
    }
}

/// What one device of a team is given. All figures are predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Member {
    /// Its name.
    pub device: String,
    /// Its own choices.
    pub recipe: Recipe,
    /// Sequences of each optimizer step that it computes; under shared layers all of them. 0 where it only holds a part of the
    /// state.
    pub sequences: u64,
    /// The first of its layers and the one after its last, where layers are shared out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<[u64; 2]>,
    /// Its part of the state in parts of 1024, where state is shared out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<u64>,
    /// Why it computes none, where it only holds a part of the state.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What its products are done with, once it was opened, where it is a GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub algorithms: Option<Algorithms>,
    /// Seconds of a step in which it computes.
    pub busy_seconds: f64,
    /// Seconds of a step in which it does nothing but exchange with the others, or waits for them.
    pub idle_seconds: f64,
    /// What each rung frees and costs on it, where somebody asked (`--explain`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ladder: Vec<RungPrice>,
}

/// A device that was named, or found, and takes no part in the steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Its name.
    pub device: String,
    /// Which of the devices it is, counted from 0: several on paper may have one name.
    #[serde(default)]
    pub number: usize,
    /// Why.
    pub why: String,
    /// What would use it, as settings for the command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_by: Option<String>,
    /// Tokens (padding counted) a second of the team with it, predicted; none where it cannot take part.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// What it does beside the steps; none where it does nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evaluates: Option<Evaluates>,
}

/// A device beside the steps evaluates what the others train, while they go on. All figures are predicted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluates {
    /// How many rows at once; weights and activations are all that it holds.
    pub recipe: Recipe,
    /// What it holds, under its own load line.
    pub device: DevicePlan,
    /// Rows of an evaluation, where the data have been read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// Seconds that it takes for an evaluation; for one row of a long one where the data have not been read.
    pub seconds: f64,
    /// The same of the devices that do the steps.
    pub team_seconds: f64,
    /// Seconds in which these hand over the weights.
    pub hand_over_seconds: f64,
}

impl Evaluates {
    /// Seconds that an evaluation takes the others less than if they made it themselves, where they can go on for so long
    /// before they need what it comes to.
    pub fn saves(&self, meanwhile_seconds: f64) -> f64 {
        let waits = (self.seconds - meanwhile_seconds).max(0.0);
        self.team_seconds - self.hand_over_seconds - waits
    }

    /// Where the data have not been read: so many rows or more have to be evaluated for it to be worth handing over.
    pub fn least_rows(&self) -> u64 {
        (self.hand_over_seconds / self.team_seconds).ceil().max(1.0) as u64
    }
}

/// What a team does, beside what its devices do alone. All figures are predicted: tokens (padding counted) a second.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Worth {
    /// What the devices of the team do alone, each with the whole step, added up.
    pub alone: f64,
    /// What whole sequences and an update by everybody leave of that, if nothing had to be exchanged.
    pub at_most: f64,
}

/// What would be faster without the rest of its team.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FasterAlone {
    /// A device, or a host with its devices.
    pub name: String,
    /// What it would do, predicted.
    pub tokens_per_second: f64,
}

/// A way to share out that was looked at, where somebody asked (`--explain`).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Alternative {
    /// How; none for one device alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sharing: Option<Sharing>,
    /// The devices that take part.
    pub devices: Vec<String>,
    /// What each computes and holds, in words.
    pub shares: Vec<String>,
    /// Whether it fits under every load line.
    pub fits: bool,
    /// Predicted bytes of each device, charges included.
    pub peak_bytes: Vec<Bytes>,
    /// Predicted speed.
    pub predicted: Predicted,
}
