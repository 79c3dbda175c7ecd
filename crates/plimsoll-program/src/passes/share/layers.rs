//! *Layers*: each rank has a stage of a pipeline, a run of layers that follow each other; the first has the embedding, the
//! last the final norm, the head and the loss. Micro-batches go through the stages one after another, one forward, one
//! backward ([`crate::Schedule::one_forward_one_backward`]).
//!
//! ```text
//!   stage 0   forward ──hidden──► backward ◄─┐
//!                       │                    gradient of the stream
//!   stage 1             └► forward   backward┘
//! ```
//! - What goes down is only shown at the end of a forward pass; the next stage takes it when it comes to it. The wait for
//!   that stands in the backward pass of the same micro-batch, whose gradient comes from who has taken it: it is over by
//!   then. So no stage waits below while the one below waits above.
//! - What goes up is handed over at the end of the backward pass. The stage above comes to it whatever happens below.
//! - What a backward pass needs of its forward pass stands in a ring, with slots for each micro-batch in flight.
//! - A tied head is the embedding of the first stage on the last: both hold it, the gradient of both is the sum, and its
//!   norm counts on the first alone. Files have it from there.

use super::{message, sum_of_norms};
use crate::models::decoder::STREAM;
use crate::op::{Collective, Mode, Op, OpKind};
use crate::operands::operands_mut;
use crate::program::{Block, ProgramSet};
use crate::share::Share;
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use plimsoll_core::{Category, Space};
use std::collections::HashSet;

/// The gradient of a tied table.
const TABLE_GRADIENT: &str = "embedding.gradient";

/// Elements of it that are summed up at once.
const TABLE_PIECE: u64 = 1 << 20;

/// Numbers of what goes down and up, further ones for each micro-batch; of the norm; and of the two ways of a piece of
/// the table.
const DOWN: Index = Index { base: 1, scale: 0, micro_batch: 2 };
const UP: Index = Index { base: 2, scale: 0, micro_batch: 2 };
const NORM: Index = Index::fixed(1);
const TABLE: i64 = 2;

/// The Programs of one rank, whose layers `set` has.
pub(super) fn share(set: ProgramSet, share: &Share, micro_batches: u32, tied: bool) -> ProgramSet {
    let mut stage = Stage { share, set };
    stage.forward("forward", "train.hidden");
    stage.backward();
    for program in ["evaluate", "prefill", "decode"] {
        stage.forward(program, &format!("{program}.hidden"));
    }
    stage.norm(tied);
    stage.ring(share.in_flight(micro_batches));
    stage.set
}

struct Stage<'a> {
    share: &'a Share,
    set: ProgramSet,
}

impl Stage<'_> {
    /// The stage whose layers come before these, and that whose layers come after.
    fn before(&self) -> Option<u32> {
        self.share.rank.checked_sub(1)
    }

    fn after(&self) -> Option<u32> {
        Some(self.share.rank + 1).filter(|next| *next < self.share.ranks)
    }

    fn message(&self, collective: Collective, peer: u32, at: Operand, sequence: Index) -> [Op; 2] {
        message(self.share, collective, peer, at, self.set.tensor(at.tensor).elements(), sequence)
    }

    /// The hidden state before the first layer, and after the last.
    fn ends(&self, hidden: TensorId) -> [Operand; 2] {
        let slots = i64::from(self.set.tensor(hidden).slots);
        [Operand::slot(hidden, 0), Operand::slot(hidden, slots - 1)]
    }

    /// A forward pass takes its input from the stage before it, and shows its output to the one after it.
    fn forward(&mut self, program: &str, hidden: &str) {
        let Some(number) = self.set.program_index(program) else { return };
        let [input, output] = self.ends(self.set.find(hidden).expect("a forward pass has a hidden state"));
        let taken = self.before().map(|peer| self.message(Collective::Receive, peer, input, DOWN));
        let shown = self.after().map(|peer| self.message(Collective::Send, peer, output, DOWN));
        let blocks = &mut self.set.programs[number].blocks;
        if let Some(take) = taken {
            blocks.insert(0, Block::once("from the stage before", take.into()));
        }
        if let Some([show, wait]) = shown {
            let mut ops = vec![show];
            // Nothing comes back from a pass without a backward pass.
            ops.extend((program != "forward").then_some(wait));
            blocks.push(Block::once("to the next stage", ops));
        }
    }

    /// A backward pass takes its gradient from the stage after it, and hands its own to the one before it.
    fn backward(&mut self) {
        let Some(number) = self.set.program_index("backward") else { return };
        let [_, output] = self.ends(self.set.find("train.hidden").expect("a forward pass has a hidden state"));
        let stream = Operand::whole(self.set.find(STREAM).expect("a backward pass has a stream"));
        let taken = self.after().map(|peer| {
            let mut ops = Vec::from(self.message(Collective::Receive, peer, stream, UP));
            let [_, shown] = self.message(Collective::Send, peer, output, DOWN);
            ops.push(shown);
            Block::once("from the next stage", ops)
        });
        let handed = self.before().map(|peer| self.message(Collective::Send, peer, stream, UP));
        let blocks = &mut self.set.programs[number].blocks;
        blocks.splice(0..0, taken);
        blocks.extend(handed.map(|hand| Block::once("to the stage before", hand.into())));
    }

    /// Loss and norm are those of all stages, before anything is clipped.
    fn norm(&mut self, tied: bool) {
        let Some(number) = self.set.program_index("norm") else { return };
        let table = self.set.find(TABLE_GRADIENT).filter(|_| tied);
        let counts = |op: &Op| matches!(op.kind, OpKind::SquaredNorm { x, .. } if Some(x.tensor) == table);
        let sums = table.map(|table| self.sum_of_table(table)).unwrap_or_default();
        let norms = sum_of_norms(&self.set, self.share, NORM);
        let mut blocks = std::mem::take(&mut self.set.programs[number].blocks);
        if self.after().is_none() {
            blocks.retain(|block| !block.ops.iter().any(counts));
        }
        let clip = blocks.iter().position(|b| b.ops.iter().any(|op| matches!(op.kind, OpKind::ClipFactor { .. })));
        blocks.insert(clip.expect("a norm is clipped"), norms);
        blocks.splice(0..0, sums);
        self.set.programs[number].blocks = blocks;
    }

    /// The gradient of a tied table is the sum of that of the embedding and that of the head, in this order, on both.
    fn sum_of_table(&mut self, gradient: TensorId) -> Vec<Block> {
        let Tensor { dtype, .. } = *self.set.tensor(gradient);
        let all = self.set.tensor(gradient).elements();
        let (first, last) = (0, self.share.ranks - 1);
        let mut passing = None;
        if self.share.rank == first {
            let (name, shape) = ("norm.passing".into(), vec![all.min(TABLE_PIECE)]);
            let (space, category, lifetime) = (Space::Device, Category::Communication, Lifetime::Transient);
            self.set.tensors.push(Tensor { name, shape, dtype, space, category, lifetime, slots: 1 });
            passing = Some(Operand::whole(TensorId(self.set.tensors.len() as u32 - 1)));
        }
        let piece = |number: i64, repeat: u32, elements: u64| {
            let at = Operand::whole(gradient).from(Index::stride(TABLE_PIECE as i64));
            let [there, back] = [0, 1].map(|way| Index { base: TABLE + way, scale: 2, micro_batch: 0 });
            let message =
                |collective, peer, at, sequence| message(self.share, collective, peer, at, elements, sequence);
            let ops = match passing {
                Some(passing) => {
                    let mut ops = Vec::from(message(Collective::Receive, last, passing, there));
                    ops.push(OpKind::Add { x: passing, into: at, elements }.into());
                    ops.extend(message(Collective::Send, last, at, back));
                    ops
                }
                None => {
                    let mut ops = Vec::from(message(Collective::Send, first, at, there));
                    ops.extend(message(Collective::Receive, first, at, back));
                    ops
                }
            };
            Block { name: "tied table".into(), first: number, step: 1, repeat, ops }
        };
        let (whole, rest) = (all / TABLE_PIECE, all % TABLE_PIECE);
        let pieces = [piece(0, whole as u32, TABLE_PIECE), piece(whole as i64, u32::from(rest > 0), rest)];
        pieces.into_iter().filter(|block| block.repeat > 0).collect()
    }

    /// What a backward pass reads of its forward pass is there for each micro-batch in flight.
    fn ring(&mut self, in_flight: u32) {
        if in_flight == 1 {
            return;
        }
        let Some(backward) = self.set.program("backward") else { return };
        let (mut written, mut passing) = (HashSet::new(), HashSet::new());
        for (op, variable) in backward.trace() {
            let accesses = op.accesses(&|id| self.set.tensor(id).elements());
            for access in &accesses {
                let id = access.operand.tensor;
                let stays = self.set.tensor(id).lifetime == Lifetime::Persistent;
                let slot = access.operand.slots_at(variable, self.set.tensor(id).slots).next();
                if access.mode != Mode::Write && !stays && !written.contains(&(id, slot)) {
                    passing.insert(id);
                }
            }
            let made = accesses.iter().filter(|access| access.mode != Mode::Read).map(|access| {
                let Operand { tensor, .. } = access.operand;
                (tensor, access.operand.slots_at(variable, self.set.tensor(tensor).slots).next())
            });
            written.extend(made);
        }
        let slots = |set: &ProgramSet, id: TensorId| i64::from(set.tensor(id).slots);
        for number in ["forward", "backward"].map(|name| self.set.program_index(name)).into_iter().flatten() {
            let mut blocks = std::mem::take(&mut self.set.programs[number].blocks);
            for operand in blocks.iter_mut().flat_map(|b| &mut b.ops).flat_map(|op| operands_mut(&mut op.kind)) {
                if passing.contains(&operand.tensor) {
                    operand.slot.micro_batch = slots(&self.set, operand.tensor);
                }
            }
            self.set.programs[number].blocks = blocks;
        }
        for id in passing {
            let tensor = &mut self.set.tensors[id.0 as usize];
            // The passes of other micro-batches lie between the two of one.
            tensor.lifetime = Lifetime::Phase;
            tensor.slots *= in_flight;
        }
    }
}
