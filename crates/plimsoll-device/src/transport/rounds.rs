//! Splits collectives into rounds that fit a staging buffer.
//!
//! Bytes in memory that this processor cannot access pass through a staging buffer on the host. All ranks of
//! such a group then call one collective per round. Each element belongs to the same rank's part as before and is
//! summed in the same order, so the results are bit-identical to those of a single call.

use plimsoll_core::DType;
use plimsoll_program::op::Collective;
use std::ops::Range;

/// One rank's accesses to the slice of a tensor range (piece) that one round of a collective exchanges. Element ranges
/// count from the first element of the rank's input or output buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PieceSlice {
    /// Index of the piece among the pieces of the collective.
    pub piece: usize,
    /// Offset of the slice in the staging buffer that holds the whole round, in bytes.
    pub first_byte: u64,
    /// Elements of the input that the rank reads; empty for a receive.
    pub reads: Range<u64>,
    /// Elements of the output that the rank writes; empty for a send.
    pub writes: Range<u64>,
    /// Number of elements of each rank's part in this round, by rank.
    pub counts: Vec<u64>,
}

/// Alignment of slices in the staging buffer of a round.
const SLICE_ALIGNMENT_BYTES: u64 = 256;

/// Splits a collective into rounds of at most `round_bytes`, and returns the slices that `rank` accesses in each round.
/// `pieces` holds the type of each piece, and the number of elements of each rank's part. Every rank computes the same
/// rounds.
pub(crate) fn split_into_rounds(
    collective: Collective,
    rank: usize,
    pieces: &[(DType, Vec<u64>)],
    round_bytes: u64,
) -> Vec<Vec<PieceSlice>> {
    let mut rounds = vec![Vec::new()];
    let mut used = 0;
    for (piece, (dtype, counts)) in pieces.iter().enumerate() {
        let total = if collective.is_point_to_point() { counts[rank] } else { counts.iter().sum() };
        let mut first = 0;
        while first < total {
            if used + dtype.bytes() > round_bytes {
                rounds.push(Vec::new());
                used = 0;
            }
            let end = total.min(first + (round_bytes - used) / dtype.bytes());
            let last = rounds.last_mut().expect("there is at least one round");
            last.push(PieceSlice { piece, first_byte: used, ..slice_of(collective, rank, counts, first..end) });
            used = (used + (end - first) * dtype.bytes()).next_multiple_of(SLICE_ALIGNMENT_BYTES);
            first = end;
        }
    }
    rounds.retain(|round| !round.is_empty());
    rounds
}

/// Returns the slice of a round that exchanges elements `range`, counted from the first element of the whole piece. Its
/// fields `piece` and `first_byte` are left zero.
fn slice_of(collective: Collective, rank: usize, counts: &[u64], range: Range<u64>) -> PieceSlice {
    let nothing = 0..0;
    let part_starts = counts.iter().scan(0, |first, count| {
        *first += count;
        Some(*first - count)
    });
    // Overlap of the range with each part, counted from the part's first element.
    let overlap_with_part = |(first, &count): (u64, &u64)| {
        let within = |element: u64| element.clamp(first, first + count) - first;
        within(range.start)..within(range.end)
    };
    let parts: Vec<Range<u64>> = part_starts.zip(counts).map(overlap_with_part).collect();
    let own = parts[rank].clone();
    let length = |range: &Range<u64>| range.end - range.start;
    let range_or_own = |is_range: bool| if is_range { range.clone() } else { own.clone() };
    let (reads, writes, counts) = match collective {
        Collective::Send => (range.clone(), nothing, single_rank_counts(counts.len(), rank, length(&range))),
        Collective::Receive => (nothing, range.clone(), single_rank_counts(counts.len(), rank, length(&range))),
        _ => {
            let (sums, gathers) = (collective.sums(), collective.gathers());
            // If all ranks get the sum, it does not matter which rank adds up an element: each takes a share of the
            // round.
            let counts = match sums && gathers {
                true => scale_counts(counts, length(&range)),
                false => parts.iter().map(length).collect(),
            };
            (range_or_own(sums), range_or_own(gathers), counts)
        }
    };
    PieceSlice { piece: 0, first_byte: 0, reads, writes, counts }
}

/// Divides `elements` among the ranks in proportion to `counts`.
fn scale_counts(counts: &[u64], elements: u64) -> Vec<u64> {
    let total: u128 = counts.iter().map(|&count| u128::from(count)).sum();
    let share_before = |sum: u128| (u128::from(elements) * sum / total) as u64;
    let mut sum = 0;
    let part = |&count: &u64| {
        let before = share_before(sum);
        sum += u128::from(count);
        share_before(sum) - before
    };
    counts.iter().map(part).collect()
}

/// Returns the part sizes of `ranks` ranks of which only `rank` has elements.
fn single_rank_counts(ranks: usize, rank: usize, elements: u64) -> Vec<u64> {
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
        fn rounds_cover_each_element_once_on_all_ranks(
            collective in collective(),
            pieces in prop::collection::vec((any::<bool>(), prop::collection::vec(0u64..400, 3)), 1..4),
            round_bytes in 8u64..2000,
        ) {
            let wide = |(wide, counts): (bool, Vec<u64>)| (if wide { DType::F64 } else { DType::F32 }, counts);
            let pieces: Vec<(DType, Vec<u64>)> = pieces.into_iter().map(wide).collect();
            let split = |rank| split_into_rounds(collective, rank, &pieces, round_bytes);
            let calls: Vec<_> = (0..3).map(split).collect();
            let messages = collective.is_point_to_point();
            for (rank, own) in calls.iter().enumerate() {
                let counted = |round: &Vec<PieceSlice>| -> Vec<(usize, Vec<u64>)> {
                    round.iter().map(|slice| (slice.piece, slice.counts.clone())).collect()
                };
                if !messages {
                    prop_assert!(own.iter().map(counted).eq(calls[0].iter().map(counted)));
                }
                let (mut read, mut written) = (vec![0; pieces.len()], vec![0; pieces.len()]);
                for round in own {
                    let mut used = 0;
                    for slice in round {
                        prop_assert!(slice.first_byte >= used, "slices overlap in a round");
                        used = slice.first_byte + slice.counts.iter().sum::<u64>() * pieces[slice.piece].0.bytes();
                        // Nonempty slices of a piece follow each other without gaps.
                        if !slice.reads.is_empty() {
                            prop_assert_eq!(slice.reads.start, read[slice.piece]);
                            read[slice.piece] = slice.reads.end;
                        }
                        if !slice.writes.is_empty() {
                            prop_assert_eq!(slice.writes.start, written[slice.piece]);
                            written[slice.piece] = slice.writes.end;
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
