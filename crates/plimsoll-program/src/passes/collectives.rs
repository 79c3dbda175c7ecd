//! The agreement checker: all ranks of a team start the same collectives, in the same order, with
//! the same counts; every start has its wait; every message has a sender and a receiver.

use crate::op::{Collective, OpKind};
use crate::program::ProgramSet;
use crate::schedule::Schedule;

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

/// Checks the Programs of all ranks, each with its Schedule.
pub fn agree(ranks: &[(&ProgramSet, &Schedule)]) -> Result<(), Disagreement> {
    let mut shared: Vec<Vec<(u64, Collective, Vec<u64>)>> = Vec::new();
    let mut messages: Vec<(u64, usize, usize, u64, bool)> = Vec::new();
    for (rank, (set, schedule)) in ranks.iter().enumerate() {
        let mut order = Vec::new();
        let mut open: Vec<u64> = Vec::new();
        for call in &schedule.calls {
            let Some(program) = set.program(&call.program) else { continue };
            for (op, _) in program.trace() {
                match &op.kind {
                    OpKind::CollectiveStart { collective, counts, rank: written, peer, sequence, .. } => {
                        if *written as usize != rank || counts.len() != ranks.len() {
                            return Err(Disagreement::WrongRank {
                                rank,
                                sequence: *sequence,
                                written: *written,
                                ranks: counts.len(),
                            });
                        }
                        open.push(*sequence);
                        match (collective, peer) {
                            (Collective::Send, Some(peer)) => {
                                messages.push((*sequence, rank, *peer as usize, counts[rank], true));
                            }
                            (Collective::Receive, Some(peer)) => {
                                messages.push((*sequence, *peer as usize, rank, counts[rank], false));
                            }
                            _ => order.push((*sequence, *collective, counts.clone())),
                        }
                    }
                    OpKind::CollectiveWait { sequence, .. } => match open.iter().position(|s| s == sequence) {
                        Some(at) => {
                            open.remove(at);
                        }
                        None => return Err(Disagreement::Unpaired { rank, sequence: *sequence }),
                    },
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
                let show = |c: Option<&(u64, Collective, Vec<u64>)>| match c {
                    Some((sequence, collective, counts)) => format!("{collective:?} {sequence} of {counts:?}"),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::builder::Builder;
    use crate::program::{Block, Phase, Program};
    use crate::tensor::Operand;
    use plimsoll_core::{Category, DType, WorkName};

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
            let (collective, counts, peer, sequence) = (*collective, counts.clone(), *peer, *sequence);
            ops.push(
                OpKind::CollectiveStart {
                    collective,
                    input: at,
                    output: at,
                    counts: counts.clone(),
                    rank,
                    peer,
                    sequence,
                }
                .into(),
            );
            if waits {
                ops.push(
                    OpKind::CollectiveWait { collective, input: at, output: at, counts, rank, peer, sequence }.into(),
                );
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
