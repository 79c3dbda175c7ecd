//! Writing of a GGUF file. Tensors arrive in pieces and in order; each is converted and written as soon as whole rows
//! are there, so memory holds a few rows only.

use super::error::GgufError;
use super::metadata::{ALIGNMENT, Metadata};
use super::planned_tensor::PlannedTensor;
use crate::block_types::BlockType;
use crate::files::{FilesError, decode_floats, has_non_finite, reserve_space};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Elements that one thread converts at once: whole blocks of every type.
const TASK_ELEMENTS: usize = 1 << 14;

/// A GGUF file that is being written.
pub struct GgufWriter<'a> {
    file: &'a File,
    path: &'a Path,
    tensors: &'a [PlannedTensor],
    /// Index of the tensor that is being written.
    current: usize,
    /// Offset in the file of the next block of the current tensor.
    next: u64,
    /// Elements of the current tensor that are written.
    written_elements: u64,
    /// Bytes of the current tensor that are not yet whole rows.
    pending: Vec<u8>,
    /// Offset of the end of the file.
    file_bytes: u64,
    /// Threads that convert values; `None` if the system refuses them.
    pool: Option<ThreadPool>,
}

impl<'a> GgufWriter<'a> {
    /// Writes the header and reserves the disk space of the whole file. `path` is for messages.
    ///
    /// # Errors
    /// A full disk, or a failed write.
    pub fn create(
        file: &'a File,
        path: &'a Path,
        metadata: &Metadata,
        tensors: &'a [PlannedTensor],
    ) -> Result<GgufWriter<'a>, GgufError> {
        let header = metadata.encode(tensors);
        let next = header.len() as u64;
        let data: u64 = tensors.iter().map(|tensor| tensor.bytes().next_multiple_of(ALIGNMENT)).sum();
        reserve_space(file, path, next + data)?;
        file.write_all_at(&header, 0).map_err(|e| FilesError::io(path, "write", e))?;
        let (current, written_elements, pending) = (0, 0, Vec::new());
        let (file_bytes, pool) = (next + data, ThreadPoolBuilder::new().build().ok());
        Ok(GgufWriter { file, path, tensors, current, next, written_elements, pending, file_bytes, pool })
    }

    /// Writes the next bytes of the parameter `source`. Parameters arrive in the order of the tensors.
    ///
    /// # Errors
    /// Values that are not finite or out of range, or a failed write.
    ///
    /// # Panics
    /// If another parameter is expected.
    pub fn write(&mut self, source: &str, bytes: &[u8]) -> Result<(), GgufError> {
        let tensor = &self.tensors[self.current];
        assert_eq!(tensor.source, source, "parameters arrive in order");
        if has_non_finite(tensor.dtype, bytes) {
            return Err(GgufError::NotFinite { tensor: tensor.name.clone() });
        }
        let unit = (tensor.unit_elements() * tensor.dtype.bytes()) as usize;
        if self.pending.is_empty() && bytes.len().is_multiple_of(unit) {
            return self.convert(bytes);
        }
        self.pending.extend_from_slice(bytes);
        let whole = self.pending.len() / unit * unit;
        let mut pending = std::mem::take(&mut self.pending);
        self.convert(&pending[..whole])?;
        pending.drain(..whole);
        self.pending = pending;
        Ok(())
    }

    /// Writes the values of a computed vector.
    ///
    /// # Errors
    /// A failed write.
    pub fn write_computed(&mut self, values: &[f32]) -> Result<(), GgufError> {
        self.write("", bytemuck::cast_slice(values))
    }

    /// Converts whole rows of the current tensor and writes them. Goes on to the next tensor after the last row.
    fn convert(&mut self, bytes: &[u8]) -> Result<(), GgufError> {
        let tensor = &self.tensors[self.current];
        let mut values = decode_floats(tensor.dtype, bytes);
        if let Some(head_rows) = tensor.head_rows {
            values = interleave(&values, tensor.unit_elements() as usize, head_rows as usize);
        }
        if tensor.adds_one {
            values.iter_mut().for_each(|value| *value += 1.0);
        }
        let largest = tensor.block_type.largest();
        if values.iter().any(|value| value.abs() > largest) {
            return Err(GgufError::OutOfRange { tensor: tensor.name.clone(), block_type: tensor.block_type });
        }
        let blocks = self.encode(tensor.block_type, &values);
        self.file.write_all_at(&blocks, self.next).map_err(|e| FilesError::io(self.path, "write", e))?;
        self.next += blocks.len() as u64;
        self.written_elements += values.len() as u64;
        if self.written_elements == tensor.elements() {
            self.next = self.next.next_multiple_of(ALIGNMENT);
            (self.current, self.written_elements) = (self.current + 1, 0);
        }
        Ok(())
    }

    /// Returns the blocks of whole rows.
    fn encode(&self, block_type: BlockType, values: &[f32]) -> Vec<u8> {
        let mut blocks = vec![0; block_type.bytes(values.len() as u64) as usize];
        let task_bytes = block_type.bytes(TASK_ELEMENTS as u64) as usize;
        match &self.pool {
            Some(pool) => pool.install(|| {
                let tasks = values.par_chunks(TASK_ELEMENTS).zip(blocks.par_chunks_mut(task_bytes));
                tasks.for_each(|(values, blocks)| block_type.encode(values, blocks));
            }),
            None => block_type.encode(values, &mut blocks),
        }
        blocks
    }

    /// Returns the tensor that is being written; `None` after the last.
    pub fn current(&self) -> Option<&PlannedTensor> {
        self.tensors.get(self.current)
    }

    /// Returns the offset in the file up to which it is written.
    pub fn written_bytes(&self) -> u64 {
        self.next
    }

    /// Returns the size of the whole file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    /// Checks that the file is complete.
    ///
    /// # Panics
    /// If a tensor has not been written to its end.
    pub fn finish(self) {
        assert!(self.current == self.tensors.len() && self.pending.is_empty(), "a tensor is incomplete");
    }
}

/// Interleaves the rows of each head, which has `head_elements` elements in `head_rows` rows: first row of the first half,
/// first row of the second half, and so on.
fn interleave(values: &[f32], head_elements: usize, head_rows: usize) -> Vec<f32> {
    let columns = head_elements / head_rows;
    let mut interleaved = Vec::with_capacity(values.len());
    for head in values.chunks_exact(head_elements) {
        let (first, second) = head.split_at(head_elements / 2);
        for (first, second) in first.chunks_exact(columns).zip(second.chunks_exact(columns)) {
            interleaved.extend_from_slice(first);
            interleaved.extend_from_slice(second);
        }
    }
    interleaved
}

#[cfg(test)]
mod tests {
    use super::super::testing::{GgufFile, decode};
    use super::*;

    fn planned(name: &str, shape: &[u64], block_type: BlockType, head_rows: Option<u64>) -> PlannedTensor {
        PlannedTensor {
            source: name.to_owned(),
            shape: shape.to_vec(),
            block_type,
            head_rows,
            adds_one: false,
            ..PlannedTensor::computed(name, 1)
        }
    }

    /// Writes tensors in pieces of `piece` values, and reads the file.
    fn write(tensors: &[PlannedTensor], piece: usize, value: impl Fn(u64) -> f32) -> Result<GgufFile, GgufError> {
        let temp = tempfile::NamedTempFile::new().unwrap();
        let mut metadata = Metadata::default();
        metadata.push("general.architecture", "llama");
        let mut writer = GgufWriter::create(temp.as_file(), temp.path(), &metadata, tensors)?;
        for tensor in tensors {
            let values: Vec<f32> = (0..tensor.elements()).map(&value).collect();
            for piece in values.chunks(piece) {
                writer.write(&tensor.source, bytemuck::cast_slice(piece))?;
            }
        }
        assert_eq!(writer.written_bytes(), writer.file_bytes());
        writer.finish();
        Ok(GgufFile::read(temp.path()))
    }

    #[test]
    fn tensors_in_any_pieces_are_read_back() {
        let tensors = [
            planned("a", &[5, 64], BlockType::Q8_0, None),
            planned("b", &[7], BlockType::F32, None),
            planned("c", &[8, 3], BlockType::F32, Some(4)),
            planned("d", &[8], BlockType::F32, Some(4)),
            planned("e", &[3, 256], BlockType::Q4K, None),
        ];
        let whole = write(&tensors, usize::MAX, |i| (i as f32).sin()).unwrap();
        for piece in [1, 7, 64, 100] {
            let file = write(&tensors, piece, |i| (i as f32).sin()).unwrap();
            assert_eq!(file.tensors, whole.tensors);
        }
        assert_eq!(whole.tensors["a"].shape, [64, 5]);
        assert_eq!(whole.keys["general.architecture"], "llama");
        let rows = write(&tensors, 5, |i| i as f32).unwrap();
        let values = decode(BlockType::F32, &rows.tensors["d"].data);
        assert_eq!(values, [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
        let norm = PlannedTensor { adds_one: true, ..planned("n", &[3], BlockType::F32, None) };
        let norm = write(&[norm], 2, |i| i as f32).unwrap();
        assert_eq!(decode(BlockType::F32, &norm.tensors["n"].data), [1.0, 2.0, 3.0]);
        let values = decode(BlockType::F32, &rows.tensors["c"].data);
        assert_eq!(values[..12], [0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 3.0, 4.0, 5.0, 9.0, 10.0, 11.0]);
    }

    #[test]
    fn values_beyond_the_type_are_refused_by_tensor() {
        for (value, block_type, says) in [
            (70000.0, BlockType::F16, "tensor `w` holds values beyond 65504, the largest that f16 stores"),
            (-70000.0, BlockType::Q4_0, "tensor `w` holds values beyond 65504, the largest that q4_0 stores"),
            (f32::NAN, BlockType::F32, "tensor `w` holds NaN or infinite values"),
            (f32::INFINITY, BlockType::Bf16, "tensor `w` holds NaN or infinite values"),
        ] {
            let error = write(&[planned("w", &[1, 32], block_type, None)], 32, |_| value).err().unwrap();
            assert_eq!(error.to_string(), says);
        }
        write(&[planned("w", &[1, 32], BlockType::Bf16, None)], 32, |_| 70000.0).unwrap();
    }
}
