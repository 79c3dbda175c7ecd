//! What a tensor is for, where it lives, and which pieces of work Programs do: the words by which memory is counted. How
//! much of it a plan gives to whom is in `plan`.

use serde::{Deserialize, Serialize};
use std::fmt;

/// What a tensor is for. Every byte of an arena is in exactly one category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Parameters, and constant tables.
    Weight,
    /// Gradients of parameters.
    Gradient,
    /// State of the optimizer.
    Optimizer,
    /// Values of a micro-batch and their gradients, inputs, caches of generation.
    Activation,
    /// Scratch of one op.
    Workspace,
    /// Buffers of collectives.
    Communication,
    /// Buffers of copies between spaces.
    Staging,
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Category::Weight => "weight",
            Category::Gradient => "gradient",
            Category::Optimizer => "optimizer",
            Category::Activation => "activation",
            Category::Workspace => "workspace",
            Category::Communication => "communication",
            Category::Staging => "staging",
        })
    }
}

/// Where a tensor lives. Every space is packed and has a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// The device's arena.
    Device,
    /// The host's arena. The CPU is its own host: there this is the device's arena.
    Host,
    /// The scratch file: what waits, where the host's memory is short.
    Scratch,
    /// A file of the run: a model, a checkpoint. Neither packed nor budgeted.
    File,
}

/// The pieces of work that Programs are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum WorkName {
    /// Weights from files, or random ones, into the arena.
    #[serde(rename = "load")]
    Load,
    /// Forward pass of a micro-batch.
    #[serde(rename = "forward")]
    Forward,
    /// Backward pass of a micro-batch, the loss included.
    #[serde(rename = "backward")]
    Backward,
    /// Clip factor and optimizer.
    #[serde(rename = "update")]
    Update,
    /// Forward pass and loss, nothing kept.
    #[serde(rename = "evaluate")]
    Evaluate,
    /// Weights and optimizer state to files.
    #[serde(rename = "save")]
    Save,
    /// New tokens from a prompt.
    #[serde(rename = "generate")]
    Generate,
    /// The move from one plan to another.
    #[serde(rename = "re-plan")]
    Replan,
}

impl fmt::Display for WorkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            WorkName::Load => "load",
            WorkName::Forward => "forward",
            WorkName::Backward => "backward",
            WorkName::Update => "update",
            WorkName::Evaluate => "evaluate",
            WorkName::Save => "save",
            WorkName::Generate => "generate",
            WorkName::Replan => "re-plan",
        })
    }
}
