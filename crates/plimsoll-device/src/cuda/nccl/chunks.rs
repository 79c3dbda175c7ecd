//! Division of a collective's pieces into chunks that fit into the NCCL staging buffer.

use plimsoll_core::DType;
use std::ops::Range;

/// The most chunks per batch. The chunks of a batch share an NCCL group, with one message per chunk from each rank to
/// each other rank.
const CHUNKS_PER_BATCH_MAX: usize = 64;
/// Alignment of slots in the staging buffer.
pub(super) const SLOT_ALIGNMENT: u64 = 256;

/// A range of elements of a collective's piece, the same range within each rank's part. If a part ends before the range
/// does, the chunk has fewer elements of that rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Index of the piece in the collective.
    pub(super) piece: usize,
    /// Range of elements, relative to the start of each rank's part of the piece.
    pub(super) elements: Range<u64>,
    /// Offset of the chunk's slots in the staging buffer: one outgoing slot for each other rank, then one incoming slot
    /// for each.
    pub(super) staging_offset: u64,
    /// Bytes between the starts of two consecutive slots.
    pub(super) stride: u64,
}

impl Chunk {
    /// Returns the chunk's range of elements, shortened to a part that has `count` elements.
    pub(super) fn range_within(&self, count: u64) -> Range<u64> {
        self.elements.start.min(count)..self.elements.end.min(count)
    }
}

/// Splits the pieces of a collective between `ranks` ranks into chunks, in batches that fit into a staging buffer. A
/// piece is given by its data type and the number of elements of each rank's part. All ranks compute the same batches.
pub(super) fn chunk_batches(ranks: usize, pieces: &[(DType, &[u64])], staging_bytes: u64) -> Vec<Vec<Chunk>> {
    let slots = 2 * (ranks as u64 - 1);
    let slot_bytes_max = staging_bytes / slots / SLOT_ALIGNMENT * SLOT_ALIGNMENT;
    assert!(slot_bytes_max > 0, "bug: staging of {staging_bytes} bytes for {ranks} ranks");
    let mut batches: Vec<Vec<Chunk>> = Vec::new();
    let mut used = staging_bytes;
    for (piece, (dtype, counts)) in pieces.iter().enumerate() {
        let longest = counts.iter().copied().max().unwrap_or(0);
        let mut first = 0;
        while first < longest {
            let elements = first..longest.min(first + slot_bytes_max / dtype.bytes());
            let stride = ((elements.end - elements.start) * dtype.bytes()).next_multiple_of(SLOT_ALIGNMENT);
            if used + slots * stride > staging_bytes
                || batches.last().is_none_or(|batch| batch.len() == CHUNKS_PER_BATCH_MAX)
            {
                batches.push(Vec::new());
                used = 0;
            }
            first = elements.end;
            batches.last_mut().expect("a batch was pushed above").push(Chunk {
                piece,
                elements,
                staging_offset: used,
                stride,
            });
            used += slots * stride;
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_cover_each_element_once_within_scratch(
            pieces in prop::collection::vec((any::<bool>(), prop::collection::vec(0u64..3000, 3)), 1..90),
            staging_bytes in 1024u64..20_000,
        ) {
            let wide = |(wide, counts): &(bool, Vec<u64>)| (if *wide { DType::F64 } else { DType::Bf16 }, counts.clone());
            let pieces: Vec<(DType, Vec<u64>)> = pieces.iter().map(wide).collect();
            let piece_shapes: Vec<(DType, &[u64])> = pieces.iter().map(|(dtype, counts)| (*dtype, &counts[..])).collect();
            let all = chunk_batches(3, &piece_shapes, staging_bytes);
            for rank in 0..3 {
                let mut next = vec![0; pieces.len()];
                for batch in &all {
                    prop_assert!(batch.len() <= CHUNKS_PER_BATCH_MAX);
                    let mut used = 0;
                    for chunk in batch {
                        let (dtype, counts) = &pieces[chunk.piece];
                        let range = chunk.range_within(counts[rank]);
                        prop_assert!(chunk.staging_offset >= used);
                        prop_assert!((range.end - range.start) * dtype.bytes() <= chunk.stride);
                        // Two other ranks, each with an outgoing and an incoming slot.
                        used = chunk.staging_offset + 4 * chunk.stride;
                        prop_assert_eq!(range.start, next[chunk.piece]);
                        next[chunk.piece] = range.end;
                    }
                    prop_assert!(used <= staging_bytes);
                }
                prop_assert!(next.iter().zip(&pieces).all(|(next, (_, counts))| *next == counts[rank]));
            }
        }
    }
}
