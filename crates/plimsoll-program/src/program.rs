//! Programs, the blocks they are made of, and the order in which a device runs them.

use crate::op::{Op, OpKind};
use crate::operands::operands;
use crate::tensor::{Tensor, TensorId};
use plimsoll_core::{Space, WorkName};
use serde::{Deserialize, Serialize};
use std::collections::HashSet;

/// A part of a Program that runs `repeat` times; its variable takes `first`, `first + step`, …
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Block {
    /// What it computes: `layer`, `loss`, `embedding`.
    pub name: String,
    /// The variable's first value.
    pub first: i64,
    /// What the variable grows by.
    pub step: i64,
    /// How often it runs.
    pub repeat: u32,
    /// In order.
    pub ops: Vec<Op>,
}

impl Block {
    /// A block that runs once.
    pub fn once(name: &str, ops: Vec<Op>) -> Block {
        Block { name: name.into(), first: 0, step: 0, repeat: 1, ops }
    }

    /// Whether every iteration touches the same slots: then nothing lives shorter than the block.
    pub fn keeps_its_slots(&self) -> bool {
        let fixed = |op: &Op| operands(op).all(|operand| operand.slot.scale == 0);
        self.ops.iter().all(fixed)
    }

    /// The variable's values, in order.
    pub fn variables(&self) -> impl Iterator<Item = i64> + use<> {
        let (first, step) = (self.first, self.step);
        (0..self.repeat as i64).map(move |i| first + step * i)
    }
}

/// Straight-line ops of one piece of work on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Program {
    /// What it is for; several Programs may share a work.
    pub work: WorkName,
    /// Unique within its set: `forward`, `prefill`, `decode`.
    pub name: String,
    /// Filled by the host before it runs; they live from the start of the phase.
    pub inputs: Vec<TensorId>,
    /// Read by the host after it ran; they live to the end of the phase.
    pub outputs: Vec<TensorId>,
    /// In order.
    pub blocks: Vec<Block>,
}

impl Program {
    /// Every op that runs, in order, with the value of its block's variable.
    pub fn trace(&self) -> impl Iterator<Item = (&Op, i64)> {
        self.blocks.iter().flat_map(|b| b.variables().flat_map(move |v| b.ops.iter().map(move |op| (op, v))))
    }

    /// How many ops run.
    pub fn length(&self) -> usize {
        self.blocks.iter().map(|b| b.repeat as usize * b.ops.len()).sum()
    }
}

/// Programs that run one after another while their transient tensors live: the forward and the
/// backward pass of a micro-batch are one phase, an evaluation is another. Phases share the arena.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Indices into [`ProgramSet::programs`], in order.
    pub programs: Vec<usize>,
}

/// All Programs of one device, over one table of tensors.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProgramSet {
    /// Indexed by [`TensorId`].
    pub tensors: Vec<Tensor>,
    /// All Programs.
    pub programs: Vec<Program>,
    /// How their lifetimes hang together; every Program is in exactly one phase.
    pub phases: Vec<Phase>,
}

impl ProgramSet {
    /// A tensor by its id.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.0 as usize]
    }

    /// A tensor by its name.
    pub fn find(&self, name: &str) -> Option<TensorId> {
        self.tensors.iter().position(|t| t.name == name).map(|i| TensorId(i as u32))
    }

    /// A Program by its name.
    pub fn program(&self, name: &str) -> Option<&Program> {
        self.programs.iter().find(|p| p.name == name)
    }

    /// The tensors of files that a Program reads or writes, each once, in the order of its ops.
    pub fn files(&self, program: &str) -> Vec<&Tensor> {
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

    /// The index of a Program by its name.
    pub fn program_index(&self, name: &str) -> Option<usize> {
        self.programs.iter().position(|p| p.name == name)
    }
}
