//! Programs: straight-line lists of ops in repeated blocks, and the set of all Programs of one device. The order in
//! which a device runs them in a step is in [`crate::schedule`].

use crate::op::operands::operands;
use crate::op::{Op, OpKind};
use crate::tensor::{Tensor, TensorId};
use foldhash::{HashMap, HashSet};
use plimsoll_core::{Space, WorkKind};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A part of a Program that runs `repeat` times: a transformer layer, or a piece of a large tensor.
///
/// It is a loop whose variable takes the values `first`, `first + step`, …. Operands of its ops are functions of the
/// variable ([`crate::Index`]), so that iteration v uses, say, the weights of layer v.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// Part of the model that it computes, for messages: `layer`, `loss`, `embedding`. Need not be unique.
    pub name: String,
    /// Value of the block's variable in the first iteration.
    pub first: i64,
    /// Increment of the block's variable per iteration; negative in a backward pass, which goes from the last layer to
    /// the first.
    pub step: i64,
    /// Number of iterations.
    pub repeat: u32,
    /// Ops of one iteration, in order.
    pub ops: Vec<Op>,
}

impl Block {
    /// Creates a block that runs once, with variable 0.
    pub fn once(name: &str, ops: Vec<Op>) -> Block {
        Block::iteration(name, 0, ops)
    }

    /// Creates a block that runs once: the iteration of another block in which the variable has this value. For a layer,
    /// it tells the layer's number.
    pub fn iteration(name: &str, variable: i64, mut ops: Vec<Op>) -> Block {
        // A Program has thousands of blocks with a few large ops each.
        ops.shrink_to_fit();
        Block { name: name.into(), first: variable, step: 0, repeat: 1, ops }
    }

    /// Returns whether every iteration touches the same tensor slots (no operand's slot depends on the block's
    /// variable). Their lifetimes then cover the whole block.
    pub fn touches_fixed_slots(&self) -> bool {
        let has_fixed_slots = |op: &Op| operands(op).all(|operand| operand.slot.scale == 0);
        self.ops.iter().all(has_fixed_slots)
    }

    /// Returns the values of the block's variable, one per iteration, in order.
    pub fn variables(&self) -> impl Iterator<Item = i64> + use<> {
        let (first, step) = (self.first, self.step);
        (0..self.repeat as i64).map(move |i| first + step * i)
    }
}

/// The purpose of a Program (a straight-line list of ops): the key by which the executor, the planner and the command
/// line name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ProgramKind {
    /// Fills the weights in the arena (the one allocation of the device) from files or with random numbers.
    #[serde(rename = "load")]
    Load,
    /// Zeroes the optimizer state; runs once, in a run that does not resume from a checkpoint.
    #[serde(rename = "fresh")]
    InitOptimizer,
    /// Zeroes gradients and the sums of loss and gradient norm, before the first micro-batch of an optimizer step.
    #[serde(rename = "begin")]
    BeginStep,
    /// Forward pass of a micro-batch, without the loss.
    #[serde(rename = "forward")]
    Forward,
    /// Loss and backward pass of a micro-batch.
    #[serde(rename = "backward")]
    Backward,
    /// Norm of all gradients together and the clip factor (as in `clip_grad_norm_`), after the last micro-batch.
    #[serde(rename = "norm")]
    GradientNorm,
    /// Optimizer update of all trained weights.
    #[serde(rename = "update")]
    Update,
    /// Forward pass and loss of a micro-batch of evaluation data, without gradients.
    #[serde(rename = "evaluate")]
    Evaluate,
    /// Forward pass of a micro-batch of training data that computes the log-probability of each label, without
    /// gradients.
    #[serde(rename = "score")]
    Score,
    /// Forward pass of a micro-batch of training data that computes the log-probability of each label under the initial
    /// weights of the run, with which the objective compares.
    #[serde(rename = "reference")]
    Reference,
    /// Forward pass of a chunk of the prompt, which fills the key-value cache.
    #[serde(rename = "prefill")]
    Prefill,
    /// Copies keys and values of the first tokens of prompts from one sequence of the key-value cache to others.
    #[serde(rename = "copy_prefix")]
    CopyPrefix,
    /// Forward pass of one generated token.
    #[serde(rename = "decode")]
    Decode,
    /// Writes the trained weights to files, in the run's precision.
    #[serde(rename = "save")]
    Save,
    /// Writes master weights (f32 copies of bf16 weights) and optimizer state to files, to resume the run.
    #[serde(rename = "checkpoint")]
    Checkpoint,
    /// Reads the files that [`ProgramKind::Checkpoint`] has written, in a resumed run.
    #[serde(rename = "restore")]
    Restore,
    /// Reads trained weights that [`ProgramKind::Save`] of another device has written. A device that only evaluates
    /// runs it before each evaluation.
    #[serde(rename = "renew")]
    ReloadWeights,
    /// Adds LoRA adapters to the matrices of a model directory, for `plimsoll export`.
    #[serde(rename = "merge")]
    Merge,
    /// A numbered Program outside any run: a measurement or a test.
    #[serde(rename = "probe")]
    Probe(u32),
}

impl ProgramKind {
    /// All kinds except [`ProgramKind::Probe`], in declaration order.
    pub const ALL: [ProgramKind; 18] = [
        ProgramKind::Load,
        ProgramKind::InitOptimizer,
        ProgramKind::BeginStep,
        ProgramKind::Forward,
        ProgramKind::Backward,
        ProgramKind::GradientNorm,
        ProgramKind::Update,
        ProgramKind::Evaluate,
        ProgramKind::Score,
        ProgramKind::Reference,
        ProgramKind::Prefill,
        ProgramKind::CopyPrefix,
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
            ProgramKind::Score => "score",
            ProgramKind::Reference => "reference",
            ProgramKind::Prefill => "prefill",
            ProgramKind::CopyPrefix => "copy_prefix",
            ProgramKind::Decode => "decode",
            ProgramKind::Save => "save",
            ProgramKind::Checkpoint => "checkpoint",
            ProgramKind::Restore => "restore",
            ProgramKind::ReloadWeights => "renew",
            ProgramKind::Merge => "merge",
            ProgramKind::Probe(_) => "probe",
        }
    }

    /// Returns the kind with this [`ProgramKind::name`], and `None` for `probe` and unknown names.
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

/// A straight-line list of ops for one piece of work on one device, such as the forward pass of a micro-batch. It has
/// no branches and allocates nothing; only its blocks repeat.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// Kind of work under which `plan.json` reports the Program's peak bytes. Several Programs may have the same one.
    pub work: WorkKind,
    /// Purpose, unique within its [`ProgramSet`].
    pub kind: ProgramKind,
    /// Tensors that the host fills before the Program runs, such as token ids. Their bytes are reserved from the start
    /// of the Program's [`Phase`] (Programs that run in sequence).
    pub inputs: Vec<TensorId>,
    /// Tensors that the host reads after the Program has run, such as logits. Their bytes are reserved to the end of
    /// the Program's [`Phase`] (Programs that run in sequence).
    pub outputs: Vec<TensorId>,
    /// Parts of the Program in execution order, each with ops that run once or in a loop.
    pub blocks: Vec<Block>,
}

impl Program {
    /// Returns every op that runs, with blocks unrolled, in order. Each comes with the value of its block's variable
    /// (such as the layer) in that iteration.
    pub fn trace(&self) -> impl Iterator<Item = (&Op, i64)> {
        self.blocks.iter().flat_map(|b| b.variables().flat_map(move |v| b.ops.iter().map(move |op| (op, v))))
    }

    /// Returns the number of ops that run: every op counts once per iteration of its block.
    pub fn op_count(&self) -> usize {
        self.blocks.iter().map(|b| b.repeat as usize * b.ops.len()).sum()
    }
}

/// Programs that run one after another and pass transient tensors (activations) to each other.
///
/// The forward and backward pass of a micro-batch form one phase, an evaluation another. No transient tensor outlives
/// its phase, so different phases reuse the same arena bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Programs of the phase in execution order, as indices into [`ProgramSet::programs`].
    pub programs: Vec<usize>,
}

/// All Programs of one device (forward, backward, update, save, …), with one table of the tensors that they share.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProgramSet {
    /// Tensors, indexed by [`TensorId`].
    pub tensors: Vec<Tensor>,
    /// Programs, each kind at most once.
    pub programs: Vec<Program>,
    /// Phases, within which transient tensors live; every Program is in exactly one.
    pub phases: Vec<Phase>,
}

impl ProgramSet {
    /// Returns the tensor with this id, which must be one of this set.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0 as usize]
    }

    /// Returns the id of the tensor with this name, and `None` if the set has none.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.tensors.iter().position(|t| t.name == name).map(|i| TensorId(i as u32))
    }

    /// Removes the Programs for which `wanted` is false, and phases without Programs.
    pub fn retain_programs(&mut self, wanted: impl Fn(&Program) -> bool) {
        let programs = std::mem::take(&mut self.programs);
        let mut new_indices: HashMap<usize, usize> = HashMap::default();
        for (number, program) in programs.into_iter().enumerate().filter(|(_, program)| wanted(program)) {
            new_indices.insert(number, self.programs.len());
            self.programs.push(program);
        }
        for phase in &mut self.phases {
            phase.programs = phase.programs.iter().filter_map(|number| new_indices.get(number).copied()).collect();
        }
        self.phases.retain(|phase| !phase.programs.is_empty());
    }

    /// Returns the Program of this kind, and `None` if the set has none.
    pub fn program(&self, kind: ProgramKind) -> Option<&Program> {
        self.programs.iter().find(|program| program.kind == kind)
    }

    /// Returns the file tensors that a Program reads or writes, each once, in the order of its ops. A file tensor
    /// stands for a tensor in a file of a model or checkpoint. Empty if the set has no such Program.
    pub fn files(&self, program: ProgramKind) -> Vec<&Tensor> {
        let mut seen = HashSet::default();
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

    /// Returns the index in [`ProgramSet::programs`] of the Program of this kind, and `None` if the set has none.
    pub fn program_index(&self, kind: ProgramKind) -> Option<usize> {
        self.programs.iter().position(|program| program.kind == kind)
    }
}
