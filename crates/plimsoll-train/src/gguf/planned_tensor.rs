//! Name, shape and type of each tensor of a file, before its values arrive.

use crate::block_types::BlockType;
use plimsoll_core::DType;

/// A tensor of the file that is to be written.
#[derive(Clone, Debug)]
pub struct PlannedTensor {
    /// Name of the parameter in Hugging Face files; empty if the values are computed.
    pub source: String,
    /// Name in the file.
    pub name: String,
    /// Shape as in Hugging Face files: rows, then columns; or elements.
    pub shape: Vec<u64>,
    /// Type of the values as they arrive.
    pub dtype: DType,
    /// Type in the file.
    pub block_type: BlockType,
    /// Type that the file type asks for, if its blocks do not divide the columns.
    pub replaced: Option<BlockType>,
    /// Rows of a head, if the rows of each head are interleaved: those of its first half with those of its second half.
    pub head_rows: Option<u64>,
    /// Whether 1 is added to each value.
    pub adds_one: bool,
}

impl PlannedTensor {
    /// Returns a vector of f32 whose values are computed.
    pub fn computed(name: &str, elements: u64) -> PlannedTensor {
        PlannedTensor {
            source: String::new(),
            name: name.to_owned(),
            shape: vec![elements],
            dtype: DType::F32,
            block_type: BlockType::F32,
            replaced: None,
            head_rows: None,
            adds_one: false,
        }
    }

    /// Returns the number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the size in the file in bytes.
    pub fn bytes(&self) -> u64 {
        self.block_type.bytes(self.elements())
    }

    /// Returns the fewest elements that can be converted at once: a head, or a row; of a vector, one element.
    pub(super) fn unit_elements(&self) -> u64 {
        let columns = if self.shape.len() == 2 { self.shape[1] } else { 1 };
        columns * self.head_rows.unwrap_or(1)
    }

    /// Returns the bytes that the conversion holds at once if pieces have `piece_bytes` bytes: the bytes as they arrived,
    /// f32 values, interleaved values, and blocks.
    pub fn conversion_bytes(&self, piece_bytes: u64) -> u64 {
        let (dtype, unit) = (self.dtype.bytes(), self.unit_elements());
        let elements = (piece_bytes / dtype + unit).min(self.elements());
        let copies = if self.head_rows.is_some() { 2 } else { 1 };
        elements * (dtype + copies * 4) + self.block_type.bytes(elements.next_multiple_of(self.block_type.elements()))
    }
}
