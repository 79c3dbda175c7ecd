//! Reading of GGUF files for tests of the writer, independent of `file`.

use crate::block_types::BlockType;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// Returns the values of blocks.
pub fn decode(block_type: BlockType, bytes: &[u8]) -> Vec<f32> {
    let mut values = vec![0.0; bytes.len() / block_type.block_bytes() as usize * block_type.elements() as usize];
    block_type.decode(bytes, &mut values);
    values
}

/// A tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct ReadTensor {
    /// Sizes as in the file: columns first.
    pub shape: Vec<u64>,
    pub block_type: BlockType,
    pub data: Vec<u8>,
}

/// A GGUF file in memory.
pub struct GgufFile {
    /// Values of the keys; lists as JSON.
    pub keys: BTreeMap<String, Value>,
    pub tensors: BTreeMap<String, ReadTensor>,
}

impl GgufFile {
    /// Reads a file.
    pub fn read(path: &Path) -> GgufFile {
        let bytes = std::fs::read(path).unwrap();
        let mut reader = Reader { bytes: &bytes, at: 0 };
        assert_eq!(reader.take(4), b"GGUF");
        assert_eq!(reader.number(4), 3);
        let (tensors, keys) = (reader.number(8), reader.number(8));
        let keys = (0..keys).map(|_| (reader.text(), reader.typed_value())).collect();
        let infos: Vec<_> = (0..tensors)
            .map(|_| {
                let name = reader.text();
                let shape: Vec<u64> = (0..reader.number(4)).map(|_| reader.number(8)).collect();
                (name, shape, reader.number(4), reader.number(8))
            })
            .collect();
        let data = reader.at.next_multiple_of(32);
        let tensors = infos.into_iter().map(|(name, shape, id, offset)| {
            let block_type = BlockType::ALL.into_iter().find(|block_type| u64::from(block_type.id()) == id).unwrap();
            assert_eq!(offset % 32, 0);
            let (start, length) = (data + offset as usize, block_type.bytes(shape.iter().product()) as usize);
            (name, ReadTensor { shape, block_type, data: bytes[start..start + length].to_vec() })
        });
        GgufFile { keys, tensors: tensors.collect() }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        self.at += count;
        &self.bytes[self.at - count..self.at]
    }

    fn number(&mut self, bytes: usize) -> u64 {
        self.take(bytes).iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    fn text(&mut self) -> String {
        let length = self.number(8) as usize;
        String::from_utf8(self.take(length).to_vec()).unwrap()
    }

    fn typed_value(&mut self) -> Value {
        let value_type = self.number(4);
        self.value(value_type)
    }

    fn value(&mut self, value_type: u64) -> Value {
        match value_type {
            4 => self.number(4).into(),
            5 => (self.number(4) as u32 as i32).into(),
            6 => f32::from_bits(self.number(4) as u32).into(),
            7 => (self.number(1) == 1).into(),
            8 => self.text().into(),
            9 => {
                let (inner, count) = (self.number(4), self.number(8));
                (0..count).map(|_| self.value(inner)).collect()
            }
            other => panic!("type {other}"),
        }
    }
}
