//! Reading of GGUF files and blocks, for tests: independent of the code that writes them.

use super::BlockType;
use half::{bf16, f16};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// All element types.
pub const ALL_TYPES: [BlockType; 10] = [
    BlockType::F32,
    BlockType::F16,
    BlockType::Bf16,
    BlockType::Q4_0,
    BlockType::Q5_0,
    BlockType::Q5_1,
    BlockType::Q8_0,
    BlockType::Q4K,
    BlockType::Q5K,
    BlockType::Q6K,
];

/// Returns the values of blocks.
pub fn decode(block_type: BlockType, bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(block_type.block_bytes() as usize).flat_map(|block| decode_block(block_type, block)).collect()
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

fn decode_block(block_type: BlockType, block: &[u8]) -> Vec<f32> {
    let d = || half_at(block, 0);
    let fifth = |from: usize, i: usize| block[from + i / 8] >> (i % 8) & 1;
    let nibble = |from: usize, i: usize| block[from + i % 16] >> (i / 16 * 4) & 15;
    match block_type {
        BlockType::F32 => vec![f32::from_le_bytes(block.try_into().unwrap())],
        BlockType::F16 => vec![d()],
        BlockType::Bf16 => vec![bf16::from_le_bytes(block.try_into().unwrap()).to_f32()],
        BlockType::Q8_0 => block[2..].iter().map(|byte| f32::from(*byte as i8) * d()).collect(),
        BlockType::Q4_0 => (0..32).map(|i| (f32::from(nibble(2, i)) - 8.0) * d()).collect(),
        BlockType::Q5_0 => (0..32).map(|i| (f32::from(nibble(6, i) | fifth(2, i) << 4) - 16.0) * d()).collect(),
        BlockType::Q5_1 => {
            (0..32).map(|i| f32::from(nibble(8, i) | fifth(4, i) << 4) * d() + half_at(block, 2)).collect()
        }
        BlockType::Q4K => affine(block, &|i| block[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15),
        BlockType::Q5K => affine(block, &|i| {
            let low = block[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
            low | (block[16 + i % 32] >> (i / 32) & 1) << 4
        }),
        BlockType::Q6K => (0..256).map(|i| six_bits(block, i)).collect(),
    }
}

fn affine(block: &[u8], code: &dyn Fn(usize) -> u8) -> Vec<f32> {
    let packed = &block[4..16];
    let scale = |group: usize| match group {
        0..4 => (packed[group] & 63, packed[group + 4] & 63),
        _ => (packed[group + 4] & 15 | packed[group - 4] >> 6 << 4, packed[group + 4] >> 4 | packed[group] >> 6 << 4),
    };
    let element = |i: usize| {
        let (scale, offset) = scale(i / 32);
        half_at(block, 0) * f32::from(scale) * f32::from(code(i)) - half_at(block, 2) * f32::from(offset)
    };
    (0..256).map(element).collect()
}

fn six_bits(block: &[u8], i: usize) -> f32 {
    let (half, within) = (i / 128, i % 128);
    let low = block[64 * half + within % 64] >> (within / 64 * 4) & 15;
    let high = block[128 + 32 * half + within % 32] >> (within / 32 * 2) & 3;
    half_at(block, 208) * f32::from(block[192 + i / 16] as i8) * (f32::from(low | high << 4) - 32.0)
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
            let block_type = ALL_TYPES.into_iter().find(|block_type| u64::from(block_type.id()) == id).unwrap();
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
