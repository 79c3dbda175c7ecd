//! Collectives in rounds: where the memory of some device is not this processor's, what it gives and gets goes through
//! staging on the host, so many bytes at a time. All ranks of such a team then meet once for each round, in which every
//! element is of the same rank's part as before, or summed up in the same order: the bits are those of one meeting.

use plimsoll_core::DType;
use plimsoll_program::op::Collective;
use std::ops::Range;

/// What of a piece goes in a round. Elements of inputs and outputs are counted from a rank's own first one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    /// The number of the piece.
    pub piece: usize,
    /// The first byte in a buffer that holds the whole of the round.
    pub first_byte: u64,
    /// What the rank reads of its input, and writes of its output.
    pub reads: Range<u64>,
    /// See `reads`.
    pub writes: Range<u64>,
    /// Elements of each rank's part in this round.
    pub counts: Vec<u64>,
}

/// Where cuts begin in a round's buffer.
const STEP_BYTES: u64 = 256;

/// The rounds of a collective between pieces of these types and parts, as `rank` takes part in them. How it is cut depends
/// on nothing that differs between ranks. A round is of `round_bytes` at most.
pub(crate) fn rounds(
    collective: Collective,
    rank: usize,
    pieces: &[(DType, Vec<u64>)],
    round_bytes: u64,
) -> Vec<Vec<Cut>> {
    let mut rounds = vec![Vec::new()];
    let mut used = 0;
    for (piece, (dtype, counts)) in pieces.iter().enumerate() {
        let messages = matches!(collective, Collective::Send | Collective::Receive);
        let total = if messages { counts[rank] } else { counts.iter().sum() };
        let mut first = 0;
        while first < total {
            if used + dtype.bytes() > round_bytes {
                rounds.push(Vec::new());
                used = 0;
            }
            let end = total.min(first + (round_bytes - used) / dtype.bytes());
            let last = rounds.last_mut().expect("there is one from the beginning on");
            last.push(Cut { piece, first_byte: used, ..cut(collective, rank, counts, first..end) });
            used = (used + (end - first) * dtype.bytes()).next_multiple_of(STEP_BYTES);
            first = end;
        }
    }
    rounds.retain(|round| !round.is_empty());
    rounds
}

/// Elements of the whole as a cut.
fn cut(collective: Collective, rank: usize, counts: &[u64], all: Range<u64>) -> Cut {
    let nothing = 0..0;
    let firsts = counts.iter().scan(0, |first, count| {
        *first += count;
        Some(*first - count)
    });
    // What of each part lies in it, counted from the first of the part.
    let lies = |(first, &count): (u64, &u64)| {
        let within = |at: u64| at.clamp(first, first + count) - first;
        within(all.start)..within(all.end)
    };
    let parts: Vec<Range<u64>> = firsts.zip(counts).map(lies).collect();
    let own = parts[rank].clone();
    let length = |range: &Range<u64>| range.end - range.start;
    let (reads, writes, counts) = match collective {
        // Who sums up what changes no bit: everybody has something to do in every round.
        Collective::AllReduce => (all.clone(), all.clone(), alike(counts, length(&all))),
        Collective::ReduceScatter => (all, own, parts.iter().map(length).collect()),
        Collective::AllGather => (own, all, parts.iter().map(length).collect()),
        Collective::Send => (all.clone(), nothing, alone(counts.len(), rank, length(&all))),
        Collective::Receive => (nothing, all.clone(), alone(counts.len(), rank, length(&all))),
    };
    Cut { piece: 0, first_byte: 0, reads, writes, counts }
}

/// So many elements in parts that are to each other as these.
fn alike(counts: &[u64], elements: u64) -> Vec<u64> {
    let total: u128 = counts.iter().map(|&count| u128::from(count)).sum();
    let at = |sum: u128| (u128::from(elements) * sum / total) as u64;
    let mut sum = 0;
    let part = |&count: &u64| {
        let before = at(sum);
        sum += u128::from(count);
        at(sum) - before
    };
    counts.iter().map(part).collect()
}

/// What only one rank has a part of.
fn alone(ranks: usize, rank: usize, elements: u64) -> Vec<u64> {
    (0..ranks).map(|other| if other == rank { elements } else { 0 }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn collective() -> impl Strategy<Value = Collective> {
        use Collective::{AllGather, AllReduce, Receive, ReduceScatter, Send};
        prop::sample::select(vec![AllReduce, ReduceScatter, AllGather, Send, Receive])
    }

    proptest! {
        #[test]
        fn every_element_goes_once_and_ranks_agree(
            collective in collective(),
            pieces in prop::collection::vec((any::<bool>(), prop::collection::vec(0u64..400, 3)), 1..4),
            round_bytes in 8u64..2000,
        ) {
            let wide = |(wide, counts): (bool, Vec<u64>)| (if wide { DType::F64 } else { DType::F32 }, counts);
            let pieces: Vec<(DType, Vec<u64>)> = pieces.into_iter().map(wide).collect();
            let of = |rank| rounds(collective, rank, &pieces, round_bytes);
            let all: Vec<_> = (0..3).map(of).collect();
            let messages = matches!(collective, Collective::Send | Collective::Receive);
            for (rank, own) in all.iter().enumerate() {
                let counted = |round: &Vec<Cut>| -> Vec<(usize, Vec<u64>)> {
                    round.iter().map(|cut| (cut.piece, cut.counts.clone())).collect()
                };
                if !messages {
                    prop_assert!(own.iter().map(counted).eq(all[0].iter().map(counted)));
                }
                let (mut read, mut written) = (vec![0; pieces.len()], vec![0; pieces.len()]);
                for round in own {
                    let mut used = 0;
                    for cut in round {
                        prop_assert!(cut.first_byte >= used, "cuts overlap in a round");
                        used = cut.first_byte + cut.counts.iter().sum::<u64>() * pieces[cut.piece].0.bytes();
                        // One after the other, where there is something.
                        if !cut.reads.is_empty() {
                            prop_assert_eq!(cut.reads.start, read[cut.piece]);
                            read[cut.piece] = cut.reads.end;
                        }
                        if !cut.writes.is_empty() {
                            prop_assert_eq!(cut.writes.start, written[cut.piece]);
                            written[cut.piece] = cut.writes.end;
                        }
                    }
                    prop_assert!(used <= round_bytes);
                }
                for (piece, (_, counts)) in pieces.iter().enumerate() {
                    let (total, part) = (counts.iter().sum::<u64>(), counts[rank]);
                    let expected = match collective {
                        Collective::AllReduce => (total, total),
                        Collective::ReduceScatter => (total, part),
                        Collective::AllGather => (part, total),
                        Collective::Send => (part, 0),
                        Collective::Receive => (0, part),
                    };
                    prop_assert_eq!((read[piece], written[piece]), expected);
                }
            }
        }
    }
}
