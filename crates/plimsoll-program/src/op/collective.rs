//! Collectives and point-to-point messages between the workers of a team.

use super::{AccessVisitor, Mode, OpKind, OperandTypes, not_in_family};
use crate::tensor::{Index, Operand};
use serde::{Deserialize, Serialize};

/// The kinds of communication between the workers of a team.
///
/// Every piece of an [`Exchange`] is split into one part per rank, with the lengths in [`Piece::counts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Collective {
    /// Every rank gets the sum of all inputs, in place. Each rank adds up its own part and sends it to the others.
    AllReduce,
    /// Each rank adds the sum of all inputs over its own part to its output.
    ReduceScatter,
    /// Every rank gets the parts of all ranks.
    AllGather,
    /// Point-to-point send to [`Exchange::peer`].
    Send,
    /// Point-to-point receive from [`Exchange::peer`].
    Receive,
}

/// A run of elements in a collective.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// First element that this rank contributes: of all parts if the collective sums, else of its own part.
    pub input: Operand,
    /// First element that this rank gets: of all parts, or of its own part in a reduce-scatter.
    pub output: Operand,
    /// Elements of each rank's part.
    pub counts: Vec<u64>,
}

/// One communication call as the Program of one rank contains it.
///
/// All ranks of a team start the same collectives in the same order with the same counts. Sums are added in the order
/// of the ranks, so that all ranks get the same bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Exchange {
    /// Kind of communication.
    pub collective: Collective,
    /// Tensor ranges that are communicated together.
    pub pieces: Vec<Piece>,
    /// Rank of the worker that runs the Program.
    pub rank: u32,
    /// Rank of the other worker, in sends and receives.
    pub peer: Option<u32>,
    /// Sequence number, unique within its Program for each iteration of the block.
    pub sequence: Index,
    /// Whether only the last micro-batch of a step runs it, when the gradients are complete.
    pub last: bool,
}

impl Exchange {
    /// Returns whether this is a send or a receive, in which only two ranks take part.
    pub fn is_point_to_point(&self) -> bool {
        matches!(self.collective, Collective::Send | Collective::Receive)
    }

    /// Returns the elements of `piece` that this rank reads and those that it writes.
    pub fn elements(&self, piece: &Piece) -> (u64, u64) {
        let (total, own) = (piece.counts.iter().sum(), piece.counts[self.rank as usize]);
        match self.collective {
            Collective::AllReduce => (total, total),
            Collective::ReduceScatter => (total, own),
            Collective::AllGather => (own, total),
            Collective::Send => (own, 0),
            Collective::Receive => (0, own),
        }
    }
}

/// Visits the operand ranges that the op touches.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
            for piece in &exchange.pieces {
                let (read, written) = exchange.elements(piece);
                let adds = exchange.collective == Collective::ReduceScatter;
                if piece.input == piece.output && read == written {
                    visitor.update(piece.output, written);
                    continue;
                }
                if read > 0 {
                    visitor.read(piece.input, read);
                }
                if written > 0 {
                    visitor.touch(piece.output, written, if adds { Mode::Update } else { Mode::Write });
                }
            }
        }
        other => not_in_family(other),
    }
}

/// Adds the dtypes that the operands must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
            for piece in &exchange.pieces {
                let sums = matches!(exchange.collective, Collective::AllReduce | Collective::ReduceScatter);
                let real = if sums { types.summed(&piece.input) } else { types.found(&piece.input) };
                types.expect(real, [&piece.input, &piece.output]);
            }
        }
        other => not_in_family(other),
    }
}
