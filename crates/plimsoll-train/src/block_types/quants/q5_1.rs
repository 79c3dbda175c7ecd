//! `q5_1`: an f16 scale and an f16 minimum, the fifth bits of 32 codes, then their other 4 bits. An element is
//! scale · code + minimum.

use super::{bounds, f16_bytes, invert, pack_fifth_bits, pack_nibbles};

/// Size of a block in bytes.
pub const BYTES: usize = 24;

/// Quantizes a block.
pub fn quantize(values: &[f32; 32]) -> [u8; BYTES] {
    let (low, high) = bounds(values);
    let scale = (high - low) / 31.0;
    let inverse = invert(scale);
    let codes = values.map(|value| (((value - low) * inverse + 0.5) as u8).min(31));
    let mut block = [0; BYTES];
    block[..2].copy_from_slice(&f16_bytes(scale));
    block[2..4].copy_from_slice(&f16_bytes(low));
    block[4..8].copy_from_slice(&pack_fifth_bits(&codes));
    block[8..].copy_from_slice(&pack_nibbles(&codes));
    block
}
