//! Programs: straight-line lists of ops in repeated blocks, and the set of all Programs of one device. The order in
//! which a device runs them in a step is in [`crate::schedule`].

use crate::op::operands::operands;
use crate::op::{Op, OpKind};
use crate::tensor::{Tensor, TensorId};
use plimsoll_core::{Space, WorkKind};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;
use std::fmt;

/// A part of a Program that runs `repeat` times, such as one transformer layer. Its variable takes the values `first`,
/// `first + step`, …, which operands use as layer or chunk number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// Part of the model that it computes: `layer`, `loss`, `embedding`.
    pub name: String,
    /// First value of the variable.
    pub first: i64,
    /// Increment of the variable per iteration.
    pub step: i64,
    /// Number of iterations.
    pub repeat: u32,
    /// Ops of one iteration, in order.
    pub ops: Vec<Op>,
}

impl Block {
    /// Creates a block that runs once.
    pub fn once(name: &str, ops: Vec<Op>) -> Block {
        Block { name: name.into(), first: 0, step: 0, repeat: 1, ops }
    }

    /// Returns whether every iteration touches the same slots. Their lifetimes then cover the whole block.
    pub fn touches_fixed_slots(&self) -> bool {
        let has_fixed_slots = |op: &Op| operands(op).all(|operand| operand.slot.scale == 0);
        self.ops.iter().all(has_fixed_slots)
    }

    /// Returns the values of the variable, in order.
    pub fn variables(&self) -> impl Iterator<Item = i64> + use<> {
        let (first, step) = (self.first, self.step);
        (0..self.repeat as i64).map(move |i| first + step * i)
    }
}

/// The purpose of a Program: the key by which the executor, the planner and the command line name it.
///
/// A training run has all but [`ProgramKind::Merge`] and [`ProgramKind::Probe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ProgramKind {
    /// Brings weights into the arena, from files or drawn at random.
    #[serde(rename = "load")]
    Load,
    /// Zeroes the optimizer state; runs once, in a run that does not resume from a checkpoint.
    #[serde(rename = "fresh")]
    InitOptimizer,
    /// Zeroes metrics and gradients before the first micro-batch of an optimizer step.
    #[serde(rename = "begin")]
    BeginStep,
    /// Forward pass of a micro-batch.
    #[serde(rename = "forward")]
    Forward,
    /// Loss and backward pass of a micro-batch.
    #[serde(rename = "backward")]
    Backward,
    /// Global gradient norm and clip factor, after the last micro-batch.
    #[serde(rename = "norm")]
    GradientNorm,
    /// Optimizer update of all trained weights.
    #[serde(rename = "update")]
    Update,
    /// Forward pass and loss without gradients.
    #[serde(rename = "evaluate")]
    Evaluate,
    /// Forward pass of a chunk of the prompt, which fills the key-value cache.
    #[serde(rename = "prefill")]
    Prefill,
    /// Forward pass of one generated token.
    #[serde(rename = "decode")]
    Decode,
    /// Writes the trained weights to files.
    #[serde(rename = "save")]
    Save,
    /// Writes master weights and optimizer state to files.
    #[serde(rename = "checkpoint")]
    Checkpoint,
    /// Reads the files of a checkpoint.
    #[serde(rename = "restore")]
    Restore,
    /// Reads trained weights that another device has saved; a separate evaluator runs it before each evaluation.
    #[serde(rename = "renew")]
    ReloadWeights,
    /// Folds adapters into the matrices of a model directory.
    #[serde(rename = "merge")]
    Merge,
    /// A numbered Program outside any run: a measurement or a test.
    #[serde(rename = "probe")]
    Probe(u32),
}

impl ProgramKind {
    /// All kinds that a run can have.
    pub const ALL: [ProgramKind; 15] = [
        ProgramKind::Load,
        ProgramKind::InitOptimizer,
        ProgramKind::BeginStep,
        ProgramKind::Forward,
        ProgramKind::Backward,
        ProgramKind::GradientNorm,
        ProgramKind::Update,
        ProgramKind::Evaluate,
        ProgramKind::Prefill,
        ProgramKind::Decode,
        ProgramKind::Save,
        ProgramKind::Checkpoint,
        ProgramKind::Restore,
        ProgramKind::ReloadWeights,
        ProgramKind::Merge,
    ];

    /// Returns the name that the command line, messages and tensor names use.
    pub const fn name(self) -> &'static str {
        match self {
            ProgramKind::Load => "load",
            ProgramKind::InitOptimizer => "fresh",
            ProgramKind::BeginStep => "begin",
            ProgramKind::Forward => "forward",
            ProgramKind::Backward => "backward",
            ProgramKind::GradientNorm => "norm",
            ProgramKind::Update => "update",
            ProgramKind::Evaluate => "evaluate",
            ProgramKind::Prefill => "prefill",
            ProgramKind::Decode => "decode",
            ProgramKind::Save => "save",
            ProgramKind::Checkpoint => "checkpoint",
            ProgramKind::Restore => "restore",
            ProgramKind::ReloadWeights => "renew",
            ProgramKind::Merge => "merge",
            ProgramKind::Probe(_) => "probe",
        }
    }

    /// Returns the kind with this [`ProgramKind::name`].
    pub fn from_name(name: &str) -> Option<ProgramKind> {
        ProgramKind::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for ProgramKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProgramKind::Probe(number) => write!(f, "probe {number}"),
            kind => f.pad(kind.name()),
        }
    }
}

/// Straight-line ops of one piece of work on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Piece of work that the plan counts it under; several Programs may share one.
    pub work: WorkKind,
    /// Unique within its set.
    pub kind: ProgramKind,
    /// Tensors that the host fills before the Program runs. They live from the start of the phase.
    pub inputs: Vec<TensorId>,
    /// Tensors that the host reads after the Program has run. They live to the end of the phase.
    pub outputs: Vec<TensorId>,
    /// Blocks in execution order.
    pub blocks: Vec<Block>,
}

impl Program {
    /// Returns every op that runs, in order, with the value of its block's variable.
    pub fn trace(&self) -> impl Iterator<Item = (&Op, i64)> {
        self.blocks.iter().flat_map(|b| b.variables().flat_map(move |v| b.ops.iter().map(move |op| (op, v))))
    }

    /// Returns the number of ops that run.
    pub fn op_count(&self) -> usize {
        self.blocks.iter().map(|b| b.repeat as usize * b.ops.len()).sum()
    }
}

/// Programs that run one after another while their transient tensors live. The forward and backward pass of a
/// micro-batch form one phase, an evaluation another. Different phases use the same arena bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Indices into [`ProgramSet::programs`], in execution order.
    pub programs: Vec<usize>,
}

/// All Programs of one device, with one table of tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProgramSet {
    /// Tensors, indexed by [`TensorId`].
    pub tensors: Vec<Tensor>,
    /// Programs, each kind at most once.
    pub programs: Vec<Program>,
    /// Phases, which define lifetimes; every Program is in exactly one.
    pub phases: Vec<Phase>,
}

impl ProgramSet {
    /// Returns the tensor with this id.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0 as usize]
    }

    /// Returns the id of the tensor with this name.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.tensors.iter().position(|t| t.name == name).map(|i| TensorId(i as u32))
    }

    /// Returns the Program of this kind.
    pub fn program(&self, kind: ProgramKind) -> Option<&Program> {
        self.programs.iter().find(|program| program.kind == kind)
    }

    /// Returns the file tensors that a Program reads or writes, each once, in the order of its ops.
    pub fn files(&self, program: ProgramKind) -> Vec<&Tensor> {
        let mut seen = HashSet::new();
        let mut files = Vec::new();
        for op in self.program(program).iter().flat_map(|program| &program.blocks).flat_map(|block| &block.ops) {
            let OpKind::TransferStart { from, to, .. } = &op.kind else { continue };
            for tensor in [from.tensor, to.tensor] {
                if self.tensor(tensor).space == Space::File && seen.insert(tensor) {
                    files.push(self.tensor(tensor));
                }
            }
        }
        files
    }

    /// Returns the index in [`ProgramSet::programs`] of the Program of this kind.
    pub fn program_index(&self, kind: ProgramKind) -> Option<usize> {
        self.programs.iter().position(|program| program.kind == kind)
    }
}
