//! Recompute (activation checkpointing): the backward pass of a layer recomputes the activations that the forward pass
//! dropped.
//!
//! The same ops run on the same inputs, so no bit changes. Each op is placed right before the first op that needs its
//! result, so that recomputed activations live briefly.

use crate::builder::Builder;
use crate::op::{Mode, Op};
use crate::tensor::TensorId;
use foldhash::{HashMap, HashSet};

/// Name suffix of the tensors into which a backward pass recomputes dropped activations.
pub const RECOMPUTED_SUFFIX: &str = ".recomputed";

/// Returns the backward ops of a layer with recompute (activation checkpointing): the forward ops that compute a
/// dropped tensor run again before the first backward op that reads it.
///
/// `forward` and `backward` are the ops of the layer, and `dropped` are the activations that the forward pass does not
/// keep. A recomputed tensor has the name of the original with [`RECOMPUTED_SUFFIX`]. All calls share these tensors, so
/// that layers of different recompute levels use the same ones.
pub fn recompute(builder: &mut Builder, forward: &[Op], backward: &[Op], dropped: &HashSet<TensorId>) -> Vec<Op> {
    let (recomputed, done) = (HashMap::default(), HashSet::default());
    let mut recomputer = Recomputer { builder, forward, dropped, recomputed, done, ops: Vec::new() };
    for op in backward {
        recomputer.push_backward(op);
    }
    recomputer.ops
}

/// The state of the recompute pass over the backward ops of one layer.
struct Recomputer<'a> {
    builder: &'a mut Builder,
    forward: &'a [Op],
    dropped: &'a HashSet<TensorId>,
    /// Tensor with the recomputed values, by dropped tensor.
    recomputed: HashMap<TensorId, TensorId>,
    /// Indices in `forward` of the ops that already run again.
    done: HashSet<usize>,
    ops: Vec<Op>,
}

impl Recomputer<'_> {
    /// Appends a backward op, and before it the ops that recompute the dropped tensors that it reads.
    fn push_backward(&mut self, op: &Op) {
        let reads: Vec<TensorId> = self.touched(op, |mode| mode != Mode::Write);
        for tensor in reads {
            self.recompute_tensor(tensor);
        }
        let op = self.on_recomputed(op);
        self.ops.push(op);
    }

    /// Appends the forward ops that write a dropped tensor, after the ops that recompute their own inputs. Does nothing
    /// for a tensor that is kept, or whose ops already run again.
    fn recompute_tensor(&mut self, tensor: TensorId) {
        if !self.dropped.contains(&tensor) {
            return;
        }
        let writers: Vec<usize> = (0..self.forward.len())
            .filter(|&i| self.touched(&self.forward[i], |mode| mode != Mode::Read).contains(&tensor))
            .collect();
        for writer in writers {
            if !self.done.insert(writer) {
                continue;
            }
            let op = self.forward[writer].clone();
            let written = self.touched(&op, |mode| mode != Mode::Read);
            for read in self.touched(&op, |mode| mode == Mode::Read) {
                self.recompute_tensor(read);
            }
            for tensor in written {
                self.add_recomputed(tensor);
            }
            let op = self.on_recomputed(&op);
            self.ops.push(op);
        }
    }

    /// Adds the tensor that holds the recomputed values of the dropped tensor `tensor`, unless there is one.
    fn add_recomputed(&mut self, tensor: TensorId) {
        if self.recomputed.contains_key(&tensor) {
            return;
        }
        let name = format!("{}{RECOMPUTED_SUFFIX}", self.builder.set.tensor(tensor).name);
        let copy = self.builder.find(&name).unwrap_or_else(|| self.builder.copy_of(tensor, name));
        self.recomputed.insert(tensor, copy);
    }

    /// Returns the tensors that an op accesses in a mode for which `wanted` is true.
    fn touched(&self, op: &Op, wanted: impl Fn(Mode) -> bool) -> Vec<TensorId> {
        let elements = |id| self.builder.set.tensor(id).elements();
        op.accesses(&elements).iter().filter(|a| wanted(a.mode)).map(|a| a.operand.tensor).collect()
    }

    /// Returns an op with dropped tensors replaced by recomputed ones.
    fn on_recomputed(&self, op: &Op) -> Op {
        op.rename_tensors(&|tensor| self.recomputed.get(&tensor).copied().unwrap_or(tensor))
    }
}
