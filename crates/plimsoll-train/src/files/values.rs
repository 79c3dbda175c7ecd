//! Checks and conversions of the values in tensors, and checksums of files.

use half::{bf16, f16};
use plimsoll_core::{Bytes, DType};
use serde::{Deserialize, Serialize};
use std::io::{self, Read};

/// Size and checksum of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileSummary {
    /// Size in bytes.
    pub bytes: Bytes,
    /// CRC-32 of the content.
    pub crc32: u32,
}

impl FileSummary {
    /// Reads a file to its end, and returns the size and checksum of what was read.
    ///
    /// # Errors
    /// A failed read.
    pub fn read(mut file: impl Read) -> io::Result<FileSummary> {
        let (mut hasher, mut bytes, mut buffer) = (crc32fast::Hasher::new(), 0, vec![0; 1 << 20]);
        loop {
            match file.read(&mut buffer) {
                Ok(0) => return Ok(FileSummary { bytes: Bytes(bytes), crc32: hasher.finalize() }),
                Ok(count) => {
                    hasher.update(&buffer[..count]);
                    bytes += count as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Returns the summary of a file with this content.
    pub fn of(content: &[u8]) -> FileSummary {
        FileSummary { bytes: Bytes(content.len() as u64), crc32: crc32fast::hash(content) }
    }
}

/// Converts bytes of type `dtype`, one of f32, f16 and bf16, to f32 values.
///
/// # Panics
/// If `dtype` is another type.
pub(crate) fn decode_floats(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect(),
        DType::F16 => bytes.as_chunks::<2>().0.iter().map(|value| f16::from_le_bytes(*value).to_f32()).collect(),
        DType::Bf16 => bytes.as_chunks::<2>().0.iter().map(|value| bf16::from_le_bytes(*value).to_f32()).collect(),
        DType::F64 | DType::I32 | DType::U8 => panic!("opened weights are F32, F16 or BF16"),
    }
}

/// Converts bytes of one type to bytes of another, each value to the nearest one, ties to even. Both are one of f32, f16 and
/// bf16.
///
/// # Errors
/// A finite value that is too large for the type, which is returned.
///
/// # Panics
/// If one of the types is another.
pub(crate) fn convert_floats(from: DType, to: DType, bytes: &[u8]) -> Result<Vec<u8>, f32> {
    let values = decode_floats(from, bytes);
    let mut converted = Vec::with_capacity(values.len() * to.bytes() as usize);
    for value in values {
        let is_beyond = match to {
            DType::F16 => {
                let half = f16::from_f32(value);
                converted.extend(half.to_le_bytes());
                half.is_infinite()
            }
            DType::Bf16 => {
                let half = bf16::from_f32(value);
                converted.extend(half.to_le_bytes());
                half.is_infinite()
            }
            DType::F32 => {
                converted.extend(value.to_le_bytes());
                false
            }
            DType::F64 | DType::I32 | DType::U8 => panic!("weights are written as F32, F16 or BF16"),
        };
        if is_beyond && value.is_finite() {
            return Err(value);
        }
    }
    Ok(converted)
}

/// Whether `bytes`, whole values of type `dtype`, contain NaN or an infinite value. Such a value has all bits of its
/// exponent set.
pub fn has_non_finite(dtype: DType, bytes: &[u8]) -> bool {
    let sixteen = |mask: u16| any_value(bytes, |value| u16::from_le_bytes(value) & mask == mask);
    match dtype {
        DType::F64 => any_value(bytes, |value| !f64::from_le_bytes(value).is_finite()),
        DType::F32 => any_value(bytes, |value| !f32::from_le_bytes(value).is_finite()),
        DType::Bf16 => sixteen(0x7f80),
        DType::F16 => sixteen(0x7c00),
        DType::I32 | DType::U8 => false,
    }
}

/// Whether a value of N bytes in `bytes` fulfils `condition`. Only every 4096 values are followed by a branch, so that
/// the compiler uses vector instructions.
fn any_value<const N: usize>(bytes: &[u8], condition: impl Fn([u8; N]) -> bool) -> bool {
    let in_group = |values: &[[u8; N]]| values.iter().fold(false, |any, &value| any | condition(value));
    bytes.as_chunks::<N>().0.chunks(4096).any(in_group)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_finite_values_are_found_anywhere() {
        let cases = [
            (DType::F64, f64::MAX.to_le_bytes().to_vec(), f64::INFINITY.to_le_bytes().to_vec()),
            (DType::F32, f32::MAX.to_le_bytes().to_vec(), f32::NAN.to_le_bytes().to_vec()),
            (DType::Bf16, vec![0x7f, 0x7f], vec![0x80, 0xff]),
            (DType::F16, vec![0xff, 0x7b], vec![1, 0x7e]),
        ];
        for (dtype, largest, infinite) in cases {
            assert!(!has_non_finite(dtype, &largest.repeat(5000)), "{dtype}");
            for before in [0, 4095, 4999] {
                let values = [largest.repeat(before), infinite.clone(), largest.repeat(4999 - before)].concat();
                assert!(has_non_finite(dtype, &values), "{dtype}");
            }
        }
        assert!(!has_non_finite(DType::U8, &[0xff; 8]) && !has_non_finite(DType::I32, &[0xff; 8]));
    }
}
