//! The header of a GGUF file: key-value pairs, and name, shape, type and offset of each tensor.

use super::planned_tensor::PlannedTensor;

/// The first bytes of a file.
pub const MAGIC: &[u8; 4] = b"GGUF";
/// Version of the format.
const VERSION: u32 = 3;
/// Alignment of the data and of each tensor, in bytes, unless `general.alignment` of a file says otherwise.
pub const ALIGNMENT: u64 = 32;

/// The value of a key.
#[derive(Clone, Debug, PartialEq)]
pub enum MetadataValue {
    /// A whole number of 32 bits.
    U32(u32),
    /// A floating-point number of 32 bits.
    F32(f32),
    /// A boolean.
    Bool(bool),
    /// A string.
    String(String),
    /// A list of strings.
    Strings(Vec<String>),
    /// A list of signed whole numbers of 32 bits.
    I32s(Vec<i32>),
    /// A list of floating-point numbers of 32 bits.
    F32s(Vec<f32>),
}

/// GGUF's codes for the types of metadata values.
pub mod value_type {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

impl From<u32> for MetadataValue {
    fn from(number: u32) -> MetadataValue {
        MetadataValue::U32(number)
    }
}

impl From<f32> for MetadataValue {
    fn from(number: f32) -> MetadataValue {
        MetadataValue::F32(number)
    }
}

impl From<bool> for MetadataValue {
    fn from(truth: bool) -> MetadataValue {
        MetadataValue::Bool(truth)
    }
}

impl From<&str> for MetadataValue {
    fn from(text: &str) -> MetadataValue {
        MetadataValue::String(text.to_owned())
    }
}

impl MetadataValue {
    /// Appends the type and the value.
    fn encode(&self, into: &mut Vec<u8>) {
        match self {
            MetadataValue::U32(number) => extend(into, value_type::U32, &number.to_le_bytes()),
            MetadataValue::F32(number) => extend(into, value_type::F32, &number.to_le_bytes()),
            MetadataValue::Bool(truth) => extend(into, value_type::BOOL, &[u8::from(*truth)]),
            MetadataValue::String(text) => {
                extend(into, value_type::STRING, &[]);
                push_text(into, text);
            }
            MetadataValue::Strings(texts) => {
                begin_list(into, value_type::STRING, texts.len());
                texts.iter().for_each(|text| push_text(into, text));
            }
            MetadataValue::I32s(numbers) => {
                begin_list(into, value_type::I32, numbers.len());
                numbers.iter().for_each(|number| into.extend(number.to_le_bytes()));
            }
            MetadataValue::F32s(numbers) => {
                begin_list(into, value_type::F32, numbers.len());
                numbers.iter().for_each(|number| into.extend(number.to_le_bytes()));
            }
        }
    }
}

fn extend(into: &mut Vec<u8>, value_type: u32, bytes: &[u8]) {
    into.extend(value_type.to_le_bytes());
    into.extend(bytes);
}

fn begin_list(into: &mut Vec<u8>, value_type: u32, count: usize) {
    into.extend(value_type::ARRAY.to_le_bytes());
    into.extend(value_type.to_le_bytes());
    into.extend((count as u64).to_le_bytes());
}

fn push_text(into: &mut Vec<u8>, text: &str) {
    into.extend((text.len() as u64).to_le_bytes());
    into.extend(text.as_bytes());
}

/// The key-value pairs of a file, in their order.
#[derive(Clone, Debug, Default)]
pub struct Metadata(Vec<(String, MetadataValue)>);

impl Metadata {
    /// Adds a pair.
    pub fn push(&mut self, key: impl Into<String>, value: impl Into<MetadataValue>) {
        self.0.push((key.into(), value.into()));
    }

    /// Adds all pairs of `other`.
    pub fn append(&mut self, other: Metadata) {
        self.0.extend(other.0);
    }

    /// Returns the value of a key, and `None` if there is none.
    #[cfg(test)]
    pub fn get(&self, key: &str) -> Option<&MetadataValue> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// Returns the header of a file with these pairs and tensors, filled up with zeros to the alignment of the data.
    pub fn encode(&self, tensors: &[PlannedTensor]) -> Vec<u8> {
        let mut header = MAGIC.to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((self.0.len() as u64).to_le_bytes());
        for (key, value) in &self.0 {
            push_text(&mut header, key);
            value.encode(&mut header);
        }
        let mut offset = 0u64;
        for tensor in tensors {
            push_text(&mut header, &tensor.name);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|size| header.extend(size.to_le_bytes()));
            header.extend(tensor.block_type.id().to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset += tensor.bytes().next_multiple_of(ALIGNMENT);
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        header
    }
}
