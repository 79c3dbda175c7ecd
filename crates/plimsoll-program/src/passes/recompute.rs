//! Recompute: the backward pass of a layer makes again what the forward pass threw away.
//!
//! The same ops run again on the same inputs, so every bit is the same. Each is placed right before
//! the first op that needs it, so that what it makes lives briefly.

use crate::builder::Builder;
use crate::op::{Mode, Op};
use crate::tensor::TensorId;
use std::collections::{HashMap, HashSet};

/// The backward ops of a layer with what must be made again put in front of its first use.
///
/// `dropped` are tensors that the forward pass does not keep. Copies have the name of the original
/// with `.again`; they are shared between calls, so that layers of different levels use the same.
pub fn recompute(builder: &mut Builder, forward: &[Op], backward: &[Op], dropped: &HashSet<TensorId>) -> Vec<Op> {
    let mut pass = Pass { builder, forward, dropped, again: HashMap::new(), done: HashSet::new(), ops: Vec::new() };
    for op in backward {
        let op = pass.prepared(op);
        pass.ops.push(op);
    }
    pass.ops
}

struct Pass<'a> {
    builder: &'a mut Builder,
    forward: &'a [Op],
    dropped: &'a HashSet<TensorId>,
    /// Copies by original.
    again: HashMap<TensorId, TensorId>,
    /// Forward ops (by number) that have been run again.
    done: HashSet<usize>,
    ops: Vec<Op>,
}

impl Pass<'_> {
    /// The op with every dropped operand replaced by its copy, after the copy has been made.
    fn prepared(&mut self, op: &Op) -> Op {
        let reads: Vec<TensorId> = self.touched(op, |mode| mode != Mode::Write);
        for tensor in reads {
            self.make(tensor);
        }
        self.renamed(op)
    }

    fn make(&mut self, tensor: TensorId) {
        if !self.dropped.contains(&tensor) {
            return;
        }
        let makers: Vec<usize> = (0..self.forward.len())
            .filter(|&i| self.touched(&self.forward[i], |mode| mode != Mode::Read).contains(&tensor))
            .collect();
        for maker in makers {
            if !self.done.insert(maker) {
                continue;
            }
            let op = self.forward[maker].clone();
            let mine = self.touched(&op, |mode| mode != Mode::Read);
            for read in self.touched(&op, |mode| mode == Mode::Read) {
                self.make(read);
            }
            for written in mine {
                self.copy(written);
            }
            let op = self.renamed(&op);
            self.ops.push(op);
        }
    }

    fn copy(&mut self, tensor: TensorId) {
        if self.again.contains_key(&tensor) {
            return;
        }
        let name = format!("{}.again", self.builder.set.tensor(tensor).name);
        let copy = self.builder.find(&name).unwrap_or_else(|| self.builder.copy_of(tensor, name));
        self.again.insert(tensor, copy);
    }

    fn touched(&self, op: &Op, wanted: impl Fn(Mode) -> bool) -> Vec<TensorId> {
        let elements = |id| self.builder.set.tensor(id).elements();
        op.accesses(&elements).iter().filter(|a| wanted(a.mode)).map(|a| a.operand.tensor).collect()
    }

    fn renamed(&self, op: &Op) -> Op {
        op.with_tensors(&|tensor| self.again.get(&tensor).copied().unwrap_or(tensor))
    }
}
