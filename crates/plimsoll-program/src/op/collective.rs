//! Collectives and point-to-point messages between the workers of a team.

use super::{AccessVisitor, Mode, OpKind, OperandTypes, not_in_family};
use crate::tensor::{Index, Operand};
use serde::{Deserialize, Serialize};

/// The kinds of communication between the workers of a team.
///
/// A collective works on ranges of elements ([`ExchangeRange`]). Each range is split into one part per rank; unlike in
/// NCCL, the parts may have unequal lengths ([`ExchangeRange::counts`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Collective {
    /// Adds up the range elementwise over all ranks, in place; every rank gets the whole result. Each rank computes its
    /// own part of the sum and sends it to the others.
    AllReduce,
    /// Adds up the range elementwise over all ranks. Each rank gets its own part of the sum, and adds it to its output.
    ReduceScatter,
    /// Every rank gets the parts of all ranks, one after another.
    AllGather,
    /// One rank sends its part to another rank ([`Exchange::peer`]).
    Send,
    /// One rank receives its part from another rank ([`Exchange::peer`]).
    Receive,
}

impl Collective {
    /// Returns whether the collective begins with an elementwise sum over all ranks, of which each rank computes its
    /// own part. True for all-reduce and reduce-scatter.
    pub const fn sums(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::ReduceScatter)
    }

    /// Returns whether the collective ends with a gather, in which every rank gets the parts of all ranks. True for
    /// all-reduce and all-gather.
    pub const fn gathers(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::AllGather)
    }

    /// Returns whether the result is added to the output, as in reduce-scatter. The other kinds overwrite the output.
    pub const fn adds_to_output(self) -> bool {
        matches!(self, Collective::ReduceScatter)
    }

    /// Returns whether this is a send or a receive, in which only two ranks take part.
    pub const fn is_point_to_point(self) -> bool {
        matches!(self, Collective::Send | Collective::Receive)
    }
}

/// A range of tensor elements that a collective works on, with its split into one part per rank. An [`Exchange`] may
/// have several, of different tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExchangeRange {
    /// First element that this rank contributes (the send buffer). It begins the whole range in all-reduce and
    /// reduce-scatter, the rank's own part in all-gather and send. A receive does not use it.
    pub input: Operand,
    /// First element that this rank gets (the receive buffer). It begins the whole range in all-reduce and all-gather,
    /// the rank's own part in reduce-scatter and receive. A send does not use it.
    pub output: Operand,
    /// Number of elements of each rank's part, by rank.
    pub counts: Vec<u64>,
}

/// A collective, send or receive as the Program of one rank contains it.
///
/// All ranks of a team start the same collectives in the same order with the same counts. Sums are added in the order
/// of the ranks, so that all ranks get the same bits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Exchange {
    /// Kind of communication.
    pub collective: Collective,
    /// Tensor ranges that are communicated together.
    pub pieces: Vec<ExchangeRange>,
    /// Rank of the worker that runs the Program.
    pub rank: u32,
    /// Rank of the other worker in sends and receives; `None` in collectives, in which all ranks take part.
    pub peer: Option<u32>,
    /// Sequence number, which identifies an exchange: its start, its wait and the matching ops of the other ranks have
    /// the same one. Within a call of a Program, no two sends share a number, and no two other exchanges do. A send and
    /// an exchange of another kind may.
    pub sequence: Index,
    /// Whether the exchange runs only for the last micro-batch of a step, such as the all-reduce of complete gradients.
    /// If false, it runs for every micro-batch.
    pub last: bool,
}

impl Exchange {
    /// Returns whether this is a send or a receive, in which only two ranks take part.
    pub fn is_point_to_point(&self) -> bool {
        self.collective.is_point_to_point()
    }

    /// Returns the number of elements of `piece` that this rank reads, and the number that it writes.
    pub fn elements(&self, piece: &ExchangeRange) -> (u64, u64) {
        let (total, own) = (piece.counts.iter().sum(), piece.counts[self.rank as usize]);
        let total_or_own = |is_total: bool| if is_total { total } else { own };
        match self.collective {
            Collective::Send => (own, 0),
            Collective::Receive => (0, own),
            collective => (total_or_own(collective.sums()), total_or_own(collective.gathers())),
        }
    }
}

/// Reports to `visitor` each range of tensor elements that an op of this module reads or writes.
pub(super) fn visit_accesses(op: &OpKind, visitor: &mut AccessVisitor) {
    match op {
        OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
            for piece in &exchange.pieces {
                let (read, written) = exchange.elements(piece);
                let adds = exchange.collective.adds_to_output();
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

/// Adds to `types` the dtype that each operand of an op of this module must have.
pub(super) fn expect_types<'k>(op: &'k OpKind, types: &mut OperandTypes<'k>) {
    match op {
        OpKind::CollectiveStart(exchange) | OpKind::CollectiveWait(exchange) => {
            for piece in &exchange.pieces {
                let sums = exchange.collective.sums();
                let real = if sums { types.summed(&piece.input) } else { types.found(&piece.input) };
                types.expect(real, [&piece.input, &piece.output]);
            }
        }
        other => not_in_family(other),
    }
}
