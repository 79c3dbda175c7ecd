//! `q8_0`: an f16 scale, then 32 signed bytes. An element is scale · byte.

use super::{f16_bytes, invert};

/// Size of a block in bytes.
pub const BYTES: usize = 34;

/// Quantizes a block. The scale is the largest magnitude / 127, before it is rounded to f16.
pub fn quantize(values: &[f32; 32]) -> [u8; BYTES] {
    let largest = values.iter().fold(0.0, |largest: f32, value| largest.max(value.abs()));
    let scale = largest / 127.0;
    let inverse = invert(scale);
    let mut block = [0; BYTES];
    block[..2].copy_from_slice(&f16_bytes(scale));
    for (byte, value) in block[2..].iter_mut().zip(values) {
        *byte = (value * inverse).round() as i8 as u8;
    }
    block
}
