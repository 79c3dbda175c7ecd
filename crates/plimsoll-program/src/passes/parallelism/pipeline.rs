//! Pipeline: each rank is a stage with a run of consecutive layers. The first stage has the embedding; the last has the
//! final norm, the head and the loss. Micro-batches pass through the stages in 1F1B order
//! ([`crate::Schedule::one_forward_one_backward`]).
//!
//! ```text
//!   stage 0   forward ──hidden──► backward ◄─┐
//!                       │                    gradient of the stream
//!   stage 1             └► forward   backward┘
//! ```
//! - **Activations down**: a forward pass only starts the send of its output. The next stage receives it when it runs
//!   that micro-batch. The wait for the send is in the backward pass of the same micro-batch: its gradient comes from
//!   the stage that has received the activations, so the send is complete by then. Two stages therefore never wait for
//!   each other.
//! - **Gradients up**: a backward pass sends its gradient and waits for that at its end.
//! - **In flight**: tensors that a backward pass needs from its forward pass get slots for each micro-batch in flight.
//! - **Tied head**: both the first and the last stage hold the embedding table. Both use the sum of the two gradients.
//!   Its norm counts on the first stage alone, which also writes it to files.

use super::{loss_and_norm_sum, message};
use crate::models::decoder::RESIDUAL_GRADIENT;
use crate::op::operands::operands_mut;
use crate::op::{Collective, Mode, Op, OpKind};
use crate::program::{Block, ProgramKind, ProgramSet};
use crate::share::Share;
use crate::tensor::{Index, Lifetime, Operand, Tensor, TensorId};
use foldhash::HashSet;
use plimsoll_core::{Category, Space};

/// Rank of the first stage.
const FIRST_STAGE: u32 = 0;

/// Name of the gradient of a tied embedding table.
const TABLE_GRADIENT: &str = "embedding.gradient";

/// Elements of the gradient of a tied embedding table that first and last stage exchange at once.
const TABLE_PIECE: u64 = 1 << 20;

/// Sequence numbers of the messages with activations to the next stage: 1 for the first micro-batch, then 3, 5, ….
const DOWN: Index = Index { base: 1, scale: 0, micro_batch: 2 };
/// Sequence numbers of the messages with gradients to the previous stage: 2 for the first micro-batch, then 4, 6, ….
const UP: Index = Index { base: 2, scale: 0, micro_batch: 2 };
/// Sequence number of the all-reduce of loss and norm, in the norm Program.
const LOSS_AND_NORM: Index = Index::fixed(1);
/// Sequence number of the first message about the tied embedding table, in the norm Program. Each piece of the table
/// has two messages.
const TABLE: i64 = 2;

/// Forward passes without a backward pass.
const PASSES_WITHOUT_GRADIENTS: [ProgramKind; 5] =
    [ProgramKind::Evaluate, ProgramKind::Score, ProgramKind::Reference, ProgramKind::Prefill, ProgramKind::Decode];

/// Returns the Programs of one pipeline stage, with the messages to and from its neighbours. `set` has the Programs for
/// the stage's layers, without messages.
pub(super) fn parallelize(set: ProgramSet, share: &Share, micro_batches: u32, tied: bool) -> ProgramSet {
    let mut stage = Stage { share, set };
    stage.connect_forward(ProgramKind::Forward, "train.hidden");
    stage.connect_backward();
    for program in PASSES_WITHOUT_GRADIENTS {
        stage.connect_forward(program, &format!("{program}.hidden"));
    }
    stage.connect_norm(tied);
    stage.add_in_flight_slots(share.in_flight(micro_batches));
    stage.set
}

/// The pipeline stage of one rank while its Programs are rewritten.
struct Stage<'a> {
    share: &'a Share,
    set: ProgramSet,
}

impl Stage<'_> {
    /// Returns the rank of the previous stage, and `None` for the first stage.
    fn previous(&self) -> Option<u32> {
        self.share.rank.checked_sub(1)
    }

    /// Returns the rank of the next stage, and `None` for the last stage.
    fn next(&self) -> Option<u32> {
        Some(self.share.rank + 1).filter(|next| *next < self.share.ranks)
    }

    /// Returns the ops that start and await a send or receive of the whole slot at `at`.
    fn message(&self, collective: Collective, peer: u32, at: Operand, sequence: Index) -> [Op; 2] {
        message(self.share, collective, peer, at, self.set.tensor(at.tensor).elements(), sequence)
    }

    /// Returns the operands in the tensor `hidden` that hold the input of the stage's first layer and the output of its
    /// last.
    fn input_and_output(&self, hidden: TensorId) -> [Operand; 2] {
        let slots = i64::from(self.set.tensor(hidden).slots);
        [Operand::slot(hidden, 0), Operand::slot(hidden, slots - 1)]
    }

    /// Makes a forward pass receive its input from the previous stage and send its output to the next one. Both are
    /// slots of the tensor with the name `hidden`, the residual stream between layers.
    fn connect_forward(&mut self, program: ProgramKind, hidden: &str) {
        let Some(number) = self.set.program_index(program) else { return };
        let hidden = self.set.find(hidden).expect("a forward pass has a hidden state");
        let [input, output] = self.input_and_output(hidden);
        let receive = self.previous().map(|peer| self.message(Collective::Receive, peer, input, DOWN));
        let send = self.next().map(|peer| self.message(Collective::Send, peer, output, DOWN));
        let blocks = &mut self.set.programs[number].blocks;
        if let Some(receive) = receive {
            blocks.insert(0, Block::once("receive from previous stage", receive.into()));
        }
        if let Some([start, wait]) = send {
            let mut ops = vec![start];
            // A training pass waits in its backward pass.
            ops.extend((program != ProgramKind::Forward).then_some(wait));
            blocks.push(Block::once("send to next stage", ops));
        }
    }

    /// Makes the backward pass receive the gradient of its output from the next stage, and send the gradient of its
    /// input to the previous one.
    fn connect_backward(&mut self) {
        let Some(number) = self.set.program_index(ProgramKind::Backward) else { return };
        let hidden = self.set.find("train.hidden").expect("a forward pass has a hidden state");
        let [_, output] = self.input_and_output(hidden);
        let stream = self.set.find(RESIDUAL_GRADIENT).expect("a backward pass has a residual gradient");
        let stream = Operand::whole(stream);
        let receive = self.next().map(|peer| {
            let mut ops = Vec::from(self.message(Collective::Receive, peer, stream, UP));
            let [_, wait_for_send] = self.message(Collective::Send, peer, output, DOWN);
            ops.push(wait_for_send);
            Block::once("receive from next stage", ops)
        });
        let send = self.previous().map(|peer| self.message(Collective::Send, peer, stream, UP));
        let blocks = &mut self.set.programs[number].blocks;
        blocks.splice(0..0, receive);
        blocks.extend(send.map(|send| Block::once("send to previous stage", send.into())));
    }

    /// Adds the sums of loss and gradient norm over all stages to the norm Program, before the clip factor is computed.
    /// If the embedding table is `tied`, adds the sum of its two gradients, too.
    fn connect_norm(&mut self, tied: bool) {
        let Some(number) = self.set.program_index(ProgramKind::GradientNorm) else { return };
        let table = self.set.find(TABLE_GRADIENT).filter(|_| tied);
        let is_norm_of_table = |op: &Op| matches!(op.kind, OpKind::SquaredNorm { x, .. } if Some(x.tensor) == table);
        let table_sum = table.map(|table| self.table_sum(table)).unwrap_or_default();
        let loss_and_norm = loss_and_norm_sum(&self.set, self.share, LOSS_AND_NORM);
        let mut blocks = std::mem::take(&mut self.set.programs[number].blocks);
        if self.next().is_none() {
            blocks.retain(|block| !block.ops.iter().any(is_norm_of_table));
        }
        let clip = blocks.iter().position(|b| b.ops.iter().any(|op| matches!(op.kind, OpKind::ClipFactor { .. })));
        blocks.insert(clip.expect("the norm Program computes a clip factor"), loss_and_norm);
        blocks.splice(0..0, table_sum);
        self.set.programs[number].blocks = blocks;
    }

    /// Returns the blocks that sum the two gradients of a tied table, piece by piece: the last stage sends its
    /// gradient, the first stage adds it and sends the sum back. The order of the sum is that of a single device.
    fn table_sum(&mut self, gradient: TensorId) -> Vec<Block> {
        let Tensor { dtype, .. } = *self.set.tensor(gradient);
        let total = self.set.tensor(gradient).elements();
        let mut received = None;
        if self.share.rank == FIRST_STAGE {
            let (name, shape) = ("norm.received".into(), vec![total.min(TABLE_PIECE)]);
            let (space, category, lifetime) = (Space::Device, Category::Communication, Lifetime::Transient);
            self.set.tensors.push(Tensor { name, shape, dtype, space, category, lifetime, slots: 1 });
            received = Some(Operand::whole(TensorId(self.set.tensors.len() as u32 - 1)));
        }
        let (full, rest) = (total / TABLE_PIECE, total % TABLE_PIECE);
        let pieces = |first: i64, repeat: u32, elements: u64| {
            let ops = self.piece_sum(gradient, received, elements);
            Block { name: "tied table".into(), first, step: 1, repeat, ops }
        };
        let blocks = [pieces(0, full as u32, TABLE_PIECE), pieces(full as i64, u32::from(rest > 0), rest)];
        blocks.into_iter().filter(|block| block.repeat > 0).collect()
    }

    /// Returns the ops that sum one piece of the two gradients of a tied table. `received` is the first stage's buffer
    /// for the gradient of the last stage, and `None` on the last stage.
    fn piece_sum(&self, gradient: TensorId, received: Option<Operand>, elements: u64) -> Vec<Op> {
        let last_stage = self.share.ranks - 1;
        let at = Operand::whole(gradient).starting_at(Index::stride(TABLE_PIECE as i64));
        let [to_first, to_last] = [0, 1].map(|way| Index { base: TABLE + way, scale: 2, micro_batch: 0 });
        let message = |collective, peer, at, sequence| message(self.share, collective, peer, at, elements, sequence);
        match received {
            Some(received) => {
                let mut ops = Vec::from(message(Collective::Receive, last_stage, received, to_first));
                ops.push(OpKind::Add { x: received, into: at, elements }.into());
                ops.extend(message(Collective::Send, last_stage, at, to_last));
                ops
            }
            None => {
                let mut ops = Vec::from(message(Collective::Send, FIRST_STAGE, at, to_first));
                ops.extend(message(Collective::Receive, FIRST_STAGE, at, to_last));
                ops
            }
        }
    }

    /// Multiplies by `in_flight` the slots of each tensor that a backward pass reads from its forward pass. The forward
    /// passes of that many micro-batches run before the backward pass of the first one.
    fn add_in_flight_slots(&mut self, in_flight: u32) {
        if in_flight == 1 {
            return;
        }
        let kept = self.tensors_kept_for_backward();
        for program in [ProgramKind::Forward, ProgramKind::Backward] {
            let Some(number) = self.set.program_index(program) else { continue };
            let mut blocks = std::mem::take(&mut self.set.programs[number].blocks);
            for operand in blocks.iter_mut().flat_map(|b| &mut b.ops).flat_map(|op| operands_mut(&mut op.kind)) {
                if kept.contains(&operand.tensor) {
                    operand.slot.micro_batch = i64::from(self.set.tensor(operand.tensor).slots);
                }
            }
            self.set.programs[number].blocks = blocks;
        }
        for id in kept {
            let tensor = &mut self.set.tensors[id.0 as usize];
            // Passes of other micro-batches run between the forward and the backward pass of one.
            tensor.lifetime = Lifetime::Phase;
            tensor.slots *= in_flight;
        }
    }

    /// Returns the activations that the backward pass reads before it writes them: those from the forward pass.
    fn tensors_kept_for_backward(&self) -> HashSet<TensorId> {
        let (mut written, mut kept) = (HashSet::default(), HashSet::default());
        let Some(backward) = self.set.program(ProgramKind::Backward) else { return kept };
        for (op, variable) in backward.trace() {
            let accesses = op.accesses(&|id| self.set.tensor(id).elements());
            let slot_of = |operand: Operand| {
                let tensor = operand.tensor;
                (tensor, operand.possible_slots(variable, self.set.tensor(tensor).slots).next())
            };
            for access in &accesses {
                let id = access.operand.tensor;
                let is_persistent = self.set.tensor(id).lifetime == Lifetime::Persistent;
                if access.mode != Mode::Write && !is_persistent && !written.contains(&slot_of(access.operand)) {
                    kept.insert(id);
                }
            }
            let writes = accesses.iter().filter(|access| access.mode != Mode::Read);
            written.extend(writes.map(|access| slot_of(access.operand)));
        }
        kept
    }
}
