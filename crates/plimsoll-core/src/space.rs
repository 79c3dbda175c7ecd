//! The categories of tensors, the memory spaces that hold them, and the kinds of work that Programs do. The bytes per
//! category, space and kind of work are in `plan`.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::ops::Add;

/// The purpose of a tensor. Every byte of an arena belongs to exactly one category.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Parameters and constant tables.
    Weight,
    /// Gradients of parameters.
    Gradient,
    /// Optimizer state.
    Optimizer,
    /// Inputs and intermediate values of a micro-batch, their gradients, and the key-value cache of text generation.
    Activation,
    /// Temporary buffer of one op.
    Workspace,
    /// Buffers of collectives, sends and receives.
    Communication,
    /// Staging buffers of copies between spaces.
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

/// The memory space of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Space {
    /// The device's arena.
    Device,
    /// The host's arena. The CPU is its own host: its host arena is the device's arena.
    Host,
    /// The scratch file, for offloaded tensors that exceed the host memory.
    Scratch,
    /// A file of the run, such as a model or a checkpoint. It has no arena and no load line.
    File,
}

/// One value for each memory space with a load line: the device, its host and the scratch file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PerSpace<T> {
    /// The value for the device's arena ([`Space::Device`]).
    pub device: T,
    /// The value for the host's arena ([`Space::Host`]).
    pub host: T,
    /// The value for the scratch file ([`Space::Scratch`]).
    pub file: T,
}

impl PerSpace<Space> {
    /// The three spaces with a load line, each in its own field.
    pub const SPACES: PerSpace<Space> = PerSpace { device: Space::Device, host: Space::Host, file: Space::Scratch };
}

impl<T> PerSpace<T> {
    /// Applies `function` to the value of each space, in the order device, host, file.
    pub fn map<U>(self, mut function: impl FnMut(T) -> U) -> PerSpace<U> {
        PerSpace { device: function(self.device), host: function(self.host), file: function(self.file) }
    }

    /// Returns the values in the order device, host, file.
    pub fn into_array(self) -> [T; 3] {
        [self.device, self.host, self.file]
    }
}

impl<T: Copy> PerSpace<T> {
    /// Returns the value for a space.
    ///
    /// # Panics
    /// Panics if `space` is [`Space::File`], which has no load line.
    pub fn get(&self, space: Space) -> T {
        match space {
            Space::Device => self.device,
            Space::Host => self.host,
            Space::Scratch => self.file,
            Space::File => panic!("a file of the run has no budget"),
        }
    }
}

impl<T: PartialOrd> PerSpace<T> {
    /// Returns whether each value is at most the value for the same space in `limits`.
    pub fn fits(&self, limits: &PerSpace<T>) -> bool {
        self.device <= limits.device && self.host <= limits.host && self.file <= limits.file
    }
}

impl<T: Add<Output = T>> Add for PerSpace<T> {
    type Output = PerSpace<T>;
    fn add(self, other: PerSpace<T>) -> PerSpace<T> {
        PerSpace { device: self.device + other.device, host: self.host + other.host, file: self.file + other.file }
    }
}

impl PerSpace<u64> {
    /// Returns `self - other` for each space; a negative difference becomes zero.
    pub fn saturating_sub(self, other: PerSpace<u64>) -> PerSpace<u64> {
        PerSpace {
            device: self.device.saturating_sub(other.device),
            host: self.host.saturating_sub(other.host),
            file: self.file.saturating_sub(other.file),
        }
    }

    /// Returns, for each space, the larger of the values in `self` and `other`.
    pub fn max(self, other: PerSpace<u64>) -> PerSpace<u64> {
        PerSpace {
            device: self.device.max(other.device),
            host: self.host.max(other.host),
            file: self.file.max(other.file),
        }
    }
}

/// The kind of work that a Program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
pub enum WorkKind {
    /// Fills the arena with weights from files or with random weights.
    #[serde(rename = "load")]
    Load,
    /// Forward pass of a micro-batch.
    #[serde(rename = "forward")]
    Forward,
    /// Loss and backward pass of a micro-batch.
    #[serde(rename = "backward")]
    Backward,
    /// Gradient clipping and optimizer update.
    #[serde(rename = "update")]
    Update,
    /// Forward pass and loss without activations kept for a backward pass.
    #[serde(rename = "evaluate")]
    Evaluate,
    /// Forward pass of training data that computes the log-probability of each label.
    #[serde(rename = "score")]
    Score,
    /// Forward pass of training data that computes the log-probability of each label under the initial weights of the run.
    #[serde(rename = "reference")]
    Reference,
    /// Writes weights and optimizer state to files.
    #[serde(rename = "save")]
    Save,
    /// Generates tokens from a prompt.
    #[serde(rename = "generate")]
    Generate,
    /// Moves the state of a run from one plan to another.
    #[serde(rename = "re-plan")]
    Replan,
}

impl fmt::Display for WorkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            WorkKind::Load => "load",
            WorkKind::Forward => "forward",
            WorkKind::Backward => "backward",
            WorkKind::Update => "update",
            WorkKind::Evaluate => "evaluate",
            WorkKind::Score => "score",
            WorkKind::Reference => "reference",
            WorkKind::Save => "save",
            WorkKind::Generate => "generate",
            WorkKind::Replan => "re-plan",
        })
    }
}
