//! Agreement check: all ranks of a team start the same collectives in the same order with the same counts, every start
//! has its wait, and every send has a matching receive.

use crate::op::{Collective, Exchange, ExchangeRange, OpKind};
use crate::program::ProgramSet;
use crate::schedule::Schedule;
use plimsoll_core::DType;

/// A difference between the collectives of two ranks, which would make them wait for each other forever or exchange
/// wrong data.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CollectiveMismatch {
    /// At one position in the order of collectives, a rank starts another one than rank 0.
    #[error("collective {position}: rank {rank} starts {found}, rank 0 starts {expected}")]
    Different {
        /// Index in the order in which each rank starts its collectives, from 0.
        position: usize,
        /// Rank that differs from rank 0.
        rank: usize,
        /// Collective that this rank starts, or `nothing`.
        found: String,
        /// Collective that rank 0 starts, or `nothing`.
        expected: String,
    },
    /// A collective or message is started and never awaited, or awaited and never started.
    #[error("rank {rank}: collective {sequence} has a start without a wait, or a wait without a start")]
    Unpaired {
        /// Rank of the worker.
        rank: usize,
        /// Sequence number, by which a wait finds its start.
        sequence: u64,
    },
    /// A send and its receive have different element counts (0 if one of them is missing), or both have 0.
    #[error(
        "message {sequence} from rank {from} to rank {to}: {found} elements sent, {expected} expected by the receiver"
    )]
    Message {
        /// Sequence number, equal in the send and its receive.
        sequence: u64,
        /// Rank of the sender.
        from: usize,
        /// Rank of the receiver.
        to: usize,
        /// Elements sent.
        found: u64,
        /// Elements that the receiver expects.
        expected: u64,
    },
    /// The Program of a rank has a collective or message that is built for another rank, or for another number of
    /// ranks.
    #[error("rank {rank}: collective {sequence} is written for rank {written} of {ranks}")]
    WrongRank {
        /// Rank with the collective in its Program.
        rank: usize,
        /// Sequence number of the collective.
        sequence: u64,
        /// Rank for which the collective is built.
        written: u32,
        /// Number of ranks for which the collective is built.
        ranks: usize,
    },
}

/// A collective with the properties in which all ranks must agree.
#[derive(Clone, Debug, PartialEq)]
struct StartedCollective {
    sequence: u64,
    collective: Collective,
    pieces: Vec<PieceShape>,
}

/// The dtype of a range that a collective works on, and the number of elements of each rank's part.
#[derive(Clone, Debug, PartialEq)]
struct PieceShape {
    dtype: DType,
    counts: Vec<u64>,
}

/// One side of a point-to-point message.
#[derive(Clone, Copy, PartialEq)]
struct Message {
    sequence: u64,
    from: usize,
    to: usize,
    elements: u64,
    /// Whether this is the sender's side.
    sent: bool,
}

/// Checks that the Programs of all ranks, run in the order of their schedules, start matching collectives.
///
/// `ranks` has the Programs and the schedule of each rank, rank 0 first.
///
/// # Errors
/// Returns the first mismatch.
pub fn check_agreement(ranks: &[(&ProgramSet, &Schedule)]) -> Result<(), CollectiveMismatch> {
    let mut collectives: Vec<Vec<StartedCollective>> = Vec::new();
    let mut messages: Vec<Message> = Vec::new();
    for (rank, (set, schedule)) in ranks.iter().enumerate() {
        collectives.push(started_collectives(set, schedule, rank, ranks.len(), &mut messages)?);
    }
    check_order(&collectives)?;
    check_messages(&messages)
}

/// Returns the collectives that a rank starts, in order, and adds its sends and receives to `messages`. Fails if a
/// start or wait is unpaired, or if a collective is built for another rank.
fn started_collectives(
    set: &ProgramSet,
    schedule: &Schedule,
    rank: usize,
    ranks: usize,
    messages: &mut Vec<Message>,
) -> Result<Vec<StartedCollective>, CollectiveMismatch> {
    let mut collectives = Vec::new();
    // A send and a receive of the same rank may share a sequence number.
    let mut open: Vec<(u64, bool)> = Vec::new();
    let is_send = |exchange: &Exchange| exchange.collective == Collective::Send;
    for call in &schedule.calls {
        let Some(program) = set.program(call.program) else { continue };
        for (op, variable) in program.trace().filter(|(op, _)| op.runs(call.last)) {
            match &op.kind {
                OpKind::CollectiveStart(exchange) => {
                    let sequence = sequence_number(exchange, variable, call.micro_batch);
                    check_rank(exchange, sequence, rank, ranks)?;
                    open.push((sequence, is_send(exchange)));
                    let elements = exchange.pieces.iter().map(|piece| piece.counts[rank]).sum();
                    match (exchange.collective, exchange.peer) {
                        (Collective::Send, Some(peer)) => {
                            messages.push(Message { sequence, from: rank, to: peer as usize, elements, sent: true });
                        }
                        (Collective::Receive, Some(peer)) => {
                            messages.push(Message { sequence, from: peer as usize, to: rank, elements, sent: false });
                        }
                        (collective, _) => {
                            let shape = |piece: &ExchangeRange| PieceShape {
                                dtype: set.tensor(piece.input.tensor).dtype,
                                counts: piece.counts.clone(),
                            };
                            let pieces = exchange.pieces.iter().map(shape).collect();
                            collectives.push(StartedCollective { sequence, collective, pieces });
                        }
                    }
                }
                OpKind::CollectiveWait(exchange) => {
                    let sequence = sequence_number(exchange, variable, call.micro_batch);
                    let started = (sequence, is_send(exchange));
                    let Some(at) = open.iter().position(|other| *other == started) else {
                        return Err(CollectiveMismatch::Unpaired { rank, sequence });
                    };
                    open.remove(at);
                }
                _ => {}
            }
        }
    }
    match open.first() {
        Some(&(sequence, _)) => Err(CollectiveMismatch::Unpaired { rank, sequence }),
        None => Ok(collectives),
    }
}

/// Checks that every rank starts the same collectives as rank 0, in the same order.
fn check_order(collectives: &[Vec<StartedCollective>]) -> Result<(), CollectiveMismatch> {
    let show = |collective: Option<&StartedCollective>| match collective {
        Some(StartedCollective { sequence, collective, pieces }) => format!("{collective:?} {sequence} of {pieces:?}"),
        None => "nothing".to_owned(),
    };
    for (rank, order) in collectives.iter().enumerate().skip(1) {
        for position in 0..order.len().max(collectives[0].len()) {
            let (found, expected) = (order.get(position), collectives[0].get(position));
            if found != expected {
                let (found, expected) = (show(found), show(expected));
                return Err(CollectiveMismatch::Different { position, rank, found, expected });
            }
        }
    }
    Ok(())
}

/// Checks that both sides of every message have the same number of elements, at least 1.
fn check_messages(messages: &[Message]) -> Result<(), CollectiveMismatch> {
    for &Message { sequence, from, to, elements, sent } in messages {
        let total = |sent: bool| -> u64 {
            let same_side = |m: &&Message| (m.sequence, m.from, m.to, m.sent) == (sequence, from, to, sent);
            messages.iter().filter(same_side).map(|m| m.elements).sum()
        };
        if total(!sent) != total(sent) || elements == 0 {
            return Err(CollectiveMismatch::Message { sequence, from, to, found: total(true), expected: total(false) });
        }
    }
    Ok(())
}

fn sequence_number(exchange: &Exchange, variable: i64, micro_batch: u32) -> u64 {
    exchange.sequence.at(variable, i64::from(micro_batch)) as u64
}

/// Checks that a collective in a rank's Program is built for that rank, and has a part for each of the ranks.
fn check_rank(exchange: &Exchange, sequence: u64, rank: usize, ranks: usize) -> Result<(), CollectiveMismatch> {
    let wrong_count = exchange.pieces.iter().map(|piece| piece.counts.len()).find(|count| *count != ranks);
    if exchange.rank as usize == rank && wrong_count.is_none() {
        return Ok(());
    }
    let written = exchange.rank;
    Err(CollectiveMismatch::WrongRank { rank, sequence, written, ranks: wrong_count.unwrap_or(ranks) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::Builder;
    use crate::program::{Block, Phase, Program, ProgramKind};
    use crate::tensor::{Index, Operand};
    use plimsoll_core::{Category, WorkKind};

    fn rank(
        rank: u32,
        collectives: &[(Collective, Vec<u64>, Option<u32>, u64)],
        waits: bool,
    ) -> (ProgramSet, Schedule) {
        let mut builder = Builder::new(DType::F32, crate::workspace::Kernels::Cuda);
        let buffer = builder.transient("buffer", &[64], DType::F32, Category::Communication, 1);
        let at = Operand::whole(buffer);
        let mut ops = Vec::new();
        for (collective, counts, peer, sequence) in collectives {
            let pieces = vec![ExchangeRange { input: at, output: at, counts: counts.clone() }];
            let sequence = Index::fixed(*sequence as i64);
            let exchange = Exchange { collective: *collective, pieces, rank, peer: *peer, sequence, last: false };
            ops.push(OpKind::CollectiveStart(exchange.clone()).into());
            if waits {
                ops.push(OpKind::CollectiveWait(exchange).into());
            }
        }
        let mut set = builder.set;
        set.programs.push(Program {
            work: WorkKind::Forward,
            kind: ProgramKind::Forward,
            inputs: vec![],
            outputs: vec![],
            blocks: vec![Block::once("all", ops)],
        });
        set.phases.push(Phase { programs: vec![0] });
        let mut schedule = Schedule::accumulate(1);
        schedule.calls.retain(|c| c.program == ProgramKind::Forward);
        (set, schedule)
    }

    fn check(ranks: &[(ProgramSet, Schedule)]) -> Result<(), CollectiveMismatch> {
        check_agreement(&ranks.iter().map(|(a, b)| (a, b)).collect::<Vec<_>>())
    }

    #[test]
    fn equal_collectives_agree() {
        let both = [(Collective::AllReduce, vec![8, 4], None, 1), (Collective::AllGather, vec![3, 5], None, 2)];
        assert_eq!(check(&[rank(0, &both, true), rank(1, &both, true)]), Ok(()));
    }

    #[test]
    fn different_counts_or_order_are_reported() {
        let one = [(Collective::AllReduce, vec![8, 4], None, 1), (Collective::AllGather, vec![3, 5], None, 2)];
        let counts = [(Collective::AllReduce, vec![4, 8], None, 1), (Collective::AllGather, vec![3, 5], None, 2)];
        let mut order = one.to_vec();
        order.swap(0, 1);
        for other in [&counts[..], &order[..], &one[..1]] {
            let found = check(&[rank(0, &one, true), rank(1, other, true)]);
            assert!(matches!(found, Err(CollectiveMismatch::Different { rank: 1, .. })), "{found:?}");
        }
    }

    #[test]
    fn start_without_wait_is_reported() {
        let one = [(Collective::AllReduce, vec![8, 4], None, 1)];
        assert_eq!(
            check(&[rank(0, &one, false), rank(1, &one, true)]),
            Err(CollectiveMismatch::Unpaired { rank: 0, sequence: 1 })
        );
    }

    #[test]
    fn wait_for_receive_does_not_end_send() {
        let send = [(Collective::Send, vec![8, 8], Some(1), 7)];
        let (mut set, schedule) = rank(0, &send, true);
        let wait = &mut set.programs[0].blocks[0].ops[1].kind;
        let OpKind::CollectiveWait(exchange) = wait else { panic!("{wait:?}") };
        exchange.collective = Collective::Receive;
        let receive = [(Collective::Receive, vec![8, 8], Some(0), 7)];
        let found = check(&[(set, schedule), rank(1, &receive, true)]);
        assert_eq!(found, Err(CollectiveMismatch::Unpaired { rank: 0, sequence: 7 }));
    }

    #[test]
    fn message_needs_matching_send_and_receive() {
        let send = [(Collective::Send, vec![8, 8], Some(1), 7)];
        let receive = [(Collective::Receive, vec![8, 8], Some(0), 7)];
        let shorter = [(Collective::Receive, vec![8, 4], Some(0), 7)];
        assert_eq!(check(&[rank(0, &send, true), rank(1, &receive, true)]), Ok(()));
        assert!(matches!(check(&[rank(0, &send, true), rank(1, &[], true)]), Err(CollectiveMismatch::Message { .. })));
        assert!(matches!(
            check(&[rank(0, &send, true), rank(1, &shorter, true)]),
            Err(CollectiveMismatch::Message { .. })
        ));
    }
}
