//! `q5_0`: an f16 scale, the fifth bits of 32 codes, then their other 4 bits. An element is scale · (code − 16).

use super::{extreme, f16_bytes, invert, pack_fifth_bits, pack_nibbles};

/// Size of a block in bytes.
pub const BYTES: usize = 22;

/// Quantizes a block. The value with the largest magnitude gets the code 0, so the scale has the opposite sign.
pub fn quantize(values: &[f32; 32]) -> [u8; BYTES] {
    let scale = extreme(values) / -16.0;
    let inverse = invert(scale);
    let codes = values.map(|value| ((value * inverse + 16.5) as u8).min(31));
    let mut block = [0; BYTES];
    block[..2].copy_from_slice(&f16_bytes(scale));
    block[2..6].copy_from_slice(&pack_fifth_bits(&codes));
    block[6..].copy_from_slice(&pack_nibbles(&codes));
    block
}
