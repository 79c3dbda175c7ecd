//! The agreement checker: all ranks of a team start the same collectives, in the same order, with
//! the same counts; every start has its wait; every message has a sender and a receiver.

use crate::op::{Collective, Exchange, OpKind, Piece};
use crate::program::ProgramSet;
use crate::schedule::Schedule;
use plimsoll_core::DType;

/// How two ranks disagree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Disagreement {
    /// One starts what the other does not.
    #[error("collective {position}: rank {rank} has {found}, rank 0 has {expected}")]
    Different {
        /// The position in the order of collectives.
        position: usize,
        /// Who differs from rank 0.
        rank: usize,
        /// What it has.
        found: String,
        /// What rank 0 has.
        expected: String,
    },
    /// A start without a wait, or the other way round.
    #[error("rank {rank}: collective {sequence} is started and not awaited, or awaited and not started")]
    Unpaired {
        /// The rank.
        rank: usize,
        /// The collective's number.
        sequence: u64,
    },
    /// A message that nobody takes, or that nobody sends.
    #[error("message {sequence} from rank {from} to rank {to}: {found} sent, {expected} awaited")]
    Message {
        /// The collective's number.
        sequence: u64,
        /// Sender.
        from: usize,
        /// Receiver.
        to: usize,
        /// Elements sent.
        found: u64,
        /// Elements awaited.
        expected: u64,
    },
    /// A rank says that it is another one, or counts parts of more or fewer ranks.
    #[error("rank {rank}: collective {sequence} is written for rank {written} of {ranks}")]
    WrongRank {
        /// The rank whose Program it is.
        rank: usize,
        /// The collective's number.
        sequence: u64,
        /// The rank written in it.
        written: u32,
        /// How many parts it counts.
        ranks: usize,
    },
}

/// A collective as the ranks must agree on it: its number, what it does, and of each piece the type and every rank's part.
type Agreed = (u64, Collective, Vec<(DType, Vec<u64>)>);

/// A message: its number, sender, receiver, elements, and whether this is the sender's side.
type Message = (u64, usize, usize, u64, bool);

/// Checks the Programs of all ranks, each with its Schedule.
///
/// # Errors
/// The first disagreement.
pub fn agree(ranks: &[(&ProgramSet, &Schedule)]) -> Result<(), Disagreement> {
    let mut shared: Vec<Vec<Agreed>> = Vec::new();
    let mut messages: Vec<Message> = Vec::new();
    for (rank, (set, schedule)) in ranks.iter().enumerate() {
        let mut order = Vec::new();
        let mut open: Vec<u64> = Vec::new();
        for call in &schedule.calls {
            let Some(program) = set.program(&call.program) else { continue };
            for (op, variable) in program.trace().filter(|(op, _)| op.runs(call.last)) {
                match &op.kind {
                    OpKind::CollectiveStart(exchange) => {
                        let sequence = number(exchange, variable, call.micro_batch);
                        right_rank(exchange, sequence, rank, ranks.len())?;
                        open.push(sequence);
                        let elements = exchange.pieces.iter().map(|piece| piece.counts[rank]).sum();
                        match (exchange.collective, exchange.peer) {
                            (Collective::Send, Some(peer)) => {
                                messages.push((sequence, rank, peer as usize, elements, true));
                            }
                            (Collective::Receive, Some(peer)) => {
                                messages.push((sequence, peer as usize, rank, elements, false));
                            }
                            (collective, _) => {
                                let dtype = |piece: &Piece| set.tensor(piece.input.tensor).dtype;
                                let pieces = exchange.pieces.iter();
                                let pieces = pieces.map(|piece| (dtype(piece), piece.counts.clone())).collect();
                                order.push((sequence, collective, pieces));
                            }
                        }
                    }
                    OpKind::CollectiveWait(exchange) => {
                        let sequence = number(exchange, variable, call.micro_batch);
                        match open.iter().position(|other| *other == sequence) {
                            Some(at) => {
                                open.remove(at);
                            }
                            None => return Err(Disagreement::Unpaired { rank, sequence }),
                        }
                    }
                    _ => {}
                }
            }
        }
        if let Some(&sequence) = open.first() {
            return Err(Disagreement::Unpaired { rank, sequence });
        }
        shared.push(order);
    }
    for (rank, order) in shared.iter().enumerate().skip(1) {
        for position in 0..order.len().max(shared[0].len()) {
            let (found, expected) = (order.get(position), shared[0].get(position));
            if found != expected {
                let show = |agreed: Option<&Agreed>| match agreed {
                    Some((sequence, collective, pieces)) => format!("{collective:?} {sequence} of {pieces:?}"),
                    None => "nothing".to_owned(),
                };
                return Err(Disagreement::Different { position, rank, found: show(found), expected: show(expected) });
            }
        }
    }
    for &(sequence, from, to, elements, sent) in &messages {
        let total = |wanted: bool| -> u64 {
            messages.iter().filter(|m| (m.0, m.1, m.2, m.4) == (sequence, from, to, wanted)).map(|m| m.3).sum()
        };
        if total(!sent) != total(sent) || elements == 0 {
            return Err(Disagreement::Message { sequence, from, to, found: total(true), expected: total(false) });
        }
    }
    Ok(())
}

fn number(exchange: &Exchange, variable: i64, micro_batch: u32) -> u64 {
    exchange.sequence.at(variable, i64::from(micro_batch)) as u64
}

/// That an exchange is written for the rank whose Program it is in, and counts the parts of all.
fn right_rank(exchange: &Exchange, sequence: u64, rank: usize, ranks: usize) -> Result<(), Disagreement> {
    let wrong = exchange.pieces.iter().map(|piece| piece.counts.len()).find(|counted| *counted != ranks);
    if exchange.rank as usize == rank && wrong.is_none() {
        return Ok(());
    }
    Err(Disagreement::WrongRank { rank, sequence, written: exchange.rank, ranks: wrong.unwrap_or(ranks) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::Builder;
    use crate::program::{Block, Phase, Program};
    use crate::tensor::{Index, Operand};
    use plimsoll_core::{Category, WorkName};

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
            let pieces = vec![Piece { input: at, output: at, counts: counts.clone() }];
            let sequence = Index::fixed(*sequence as i64);
            let exchange = Exchange { collective: *collective, pieces, rank, peer: *peer, sequence, last: false };
            ops.push(OpKind::CollectiveStart(exchange.clone()).into());
            if waits {
                ops.push(OpKind::CollectiveWait(exchange).into());
            }
        }
        let mut set = builder.set;
        set.programs.push(Program {
            work: WorkName::Forward,
            name: "forward".into(),
            inputs: vec![],
            outputs: vec![],
            blocks: vec![Block::once("all", ops)],
        });
        set.phases.push(Phase { programs: vec![0] });
        let mut schedule = Schedule::accumulate(1);
        schedule.calls.retain(|c| c.program == "forward");
        (set, schedule)
    }

    fn verdict(ranks: &[(ProgramSet, Schedule)]) -> Result<(), Disagreement> {
        agree(&ranks.iter().map(|(a, b)| (a, b)).collect::<Vec<_>>())
    }

    #[test]
    fn ranks_that_start_the_same_collectives_agree() {
        let both = [(Collective::AllReduce, vec![8, 4], None, 1), (Collective::AllGather, vec![3, 5], None, 2)];
        assert_eq!(verdict(&[rank(0, &both, true), rank(1, &both, true)]), Ok(()));
    }

    #[test]
    fn other_counts_or_another_order_are_found() {
        let one = [(Collective::AllReduce, vec![8, 4], None, 1), (Collective::AllGather, vec![3, 5], None, 2)];
        let counts = [(Collective::AllReduce, vec![4, 8], None, 1), (Collective::AllGather, vec![3, 5], None, 2)];
        let mut order = one.to_vec();
        order.swap(0, 1);
        for other in [&counts[..], &order[..], &one[..1]] {
            let found = verdict(&[rank(0, &one, true), rank(1, other, true)]);
            assert!(matches!(found, Err(Disagreement::Different { rank: 1, .. })), "{found:?}");
        }
    }

    #[test]
    fn a_start_without_a_wait_is_found() {
        let one = [(Collective::AllReduce, vec![8, 4], None, 1)];
        assert_eq!(
            verdict(&[rank(0, &one, false), rank(1, &one, true)]),
            Err(Disagreement::Unpaired { rank: 0, sequence: 1 })
        );
    }

    #[test]
    fn a_message_needs_both_ends_and_the_same_size() {
        let send = [(Collective::Send, vec![8, 8], Some(1), 7)];
        let take = [(Collective::Receive, vec![8, 8], Some(0), 7)];
        let less = [(Collective::Receive, vec![8, 4], Some(0), 7)];
        assert_eq!(verdict(&[rank(0, &send, true), rank(1, &take, true)]), Ok(()));
        assert!(matches!(verdict(&[rank(0, &send, true), rank(1, &[], true)]), Err(Disagreement::Message { .. })));
        assert!(matches!(verdict(&[rank(0, &send, true), rank(1, &less, true)]), Err(Disagreement::Message { .. })));
    }
}
