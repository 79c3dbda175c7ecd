//! Reading of tensors that a file stores in blocks, in pieces at any element.

use crate::block_types::BlockType;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// Most bytes of blocks that are read at once; always whole blocks.
const PIECE_BYTES: u64 = 64 << 10;
/// Size of an element as it is read: f32.
const ELEMENT_BYTES: u64 = 4;

/// The form of a tensor in a file whose elements are not in the order or type in which they are read. They are read as
/// f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlocks {
    /// Type of the elements in the file.
    pub block_type: BlockType,
    /// Elements of a row.
    pub columns: u64,
    /// Rows of a head, if the rows of each head are interleaved in the file: the first of the first half, the first of
    /// the second half, and so on. They are read one half after the other.
    pub head_rows: Option<u64>,
    /// Whether the file stores 1 + each element.
    pub adds_one: bool,
}

impl StoredBlocks {
    /// Fills `into` with the f32 bytes of elements from byte `offset` on. The tensor begins at `begin` in the file.
    ///
    /// # Errors
    /// A failed read.
    ///
    /// # Panics
    /// If the piece cuts an element.
    pub fn read_at(&self, file: &File, begin: u64, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let (first, count) = (offset / ELEMENT_BYTES, into.len() as u64 / ELEMENT_BYTES);
        assert!(offset.is_multiple_of(ELEMENT_BYTES) && count * ELEMENT_BYTES == into.len() as u64, "whole elements");
        let mut done = 0;
        while done < count {
            let element = first + done;
            let (stored, run) = self.find_run(element);
            let length = run.min(count - done);
            let bytes = (done * ELEMENT_BYTES) as usize..((done + length) * ELEMENT_BYTES) as usize;
            self.read_run(file, begin, stored, &mut into[bytes])?;
            done += length;
        }
        Ok(())
    }

    /// Returns the place of an element in the file, and the number of elements from it on that follow each other there.
    fn find_run(&self, element: u64) -> (u64, u64) {
        let Some(head_rows) = self.head_rows else { return (element, u64::MAX) };
        let (row, column) = (element / self.columns, element % self.columns);
        let (head, within) = (row / head_rows, row % head_rows);
        let (half, pair) = (within / (head_rows / 2), within % (head_rows / 2));
        let stored = head * head_rows + 2 * pair + half;
        (stored * self.columns + column, self.columns - column)
    }

    /// Reads elements that follow each other in the file, from element `first` on.
    fn read_run(&self, file: &File, begin: u64, first: u64, into: &mut [u8]) -> io::Result<()> {
        let (block, block_bytes) = (self.block_type.elements(), self.block_type.block_bytes());
        let piece_blocks = PIECE_BYTES / block_bytes;
        let mut bytes = Vec::new();
        let mut values = Vec::new();
        let added = if self.adds_one { 1.0 } else { 0.0 };
        let (mut element, mut into) = (first, into);
        while !into.is_empty() {
            let (block_number, skipped) = (element / block, element % block);
            let wanted = into.len() as u64 / ELEMENT_BYTES;
            let blocks = (skipped + wanted).div_ceil(block).min(piece_blocks);
            bytes.resize((blocks * block_bytes) as usize, 0);
            values.resize((blocks * block) as usize, 0.0);
            file.read_exact_at(&mut bytes, begin + block_number * block_bytes)?;
            self.block_type.decode(&bytes, &mut values);
            let taken = (blocks * block - skipped).min(wanted);
            let (now, later) = into.split_at_mut((taken * ELEMENT_BYTES) as usize);
            for (target, value) in now.as_chunks_mut::<4>().0.iter_mut().zip(&values[skipped as usize..]) {
                *target = (value - added).to_le_bytes();
            }
            (element, into) = (element + taken, later);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Stores 4 rows of 64 elements in blocks of 32, and reads them in pieces.
    #[test]
    fn pieces_are_those_of_the_whole() {
        let values: Vec<f32> = (0..4 * 64).map(|i| i as f32 - 100.0).collect();
        let mut bytes = vec![0; BlockType::Q8_0.bytes(values.len() as u64) as usize];
        BlockType::Q8_0.encode(&values, &mut bytes);
        let mut decoded = vec![0.0; values.len()];
        BlockType::Q8_0.decode(&bytes, &mut decoded);
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"header").unwrap();
        file.write_all(&bytes).unwrap();
        let rows: Vec<&[f32]> = decoded.chunks(64).collect();
        for (head_rows, order) in [(None, [0, 1, 2, 3]), (Some(4), [0, 2, 1, 3]), (Some(2), [0, 1, 2, 3])] {
            let expected: Vec<f32> = order.iter().flat_map(|row| rows[*row].to_vec()).collect();
            let stored = StoredBlocks { block_type: BlockType::Q8_0, columns: 64, head_rows, adds_one: false };
            for length in [1, 7, 32, 65, 256] {
                let mut read: Vec<u8> = Vec::new();
                while read.len() < 4 * expected.len() {
                    let mut piece = vec![0; (4 * length).min(4 * expected.len() - read.len())];
                    stored.read_at(&file, 6, read.len() as u64, &mut piece).unwrap();
                    read.extend(piece);
                }
                let read: Vec<f32> = read.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
                assert_eq!(read, expected, "{head_rows:?}, pieces of {length}");
            }
        }
        let stored = StoredBlocks { block_type: BlockType::Q8_0, columns: 64, head_rows: None, adds_one: true };
        let mut first = [0; 4];
        stored.read_at(&file, 6, 4 * 65, &mut first).unwrap();
        assert_eq!(f32::from_le_bytes(first), decoded[65] - 1.0);
        let error = stored.read_at(&file, 6, 1024, &mut [0; 4]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }
}
