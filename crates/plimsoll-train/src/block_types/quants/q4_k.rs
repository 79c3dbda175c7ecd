//! `q4_k`: two f16 factors, 8 scales and 8 offsets of 6 bits, then 256 codes of 4 bits.

use super::{affine_blocks, f16_bytes};

/// Size of a block in bytes.
pub const BYTES: usize = 144;

/// Quantizes a block.
pub fn quantize(values: &[f32; 256]) -> [u8; BYTES] {
    let quantized = affine_blocks::quantize(values, 15.0);
    let mut block = [0; BYTES];
    block[..2].copy_from_slice(&f16_bytes(quantized.factor));
    block[2..4].copy_from_slice(&f16_bytes(quantized.offset_factor));
    block[4..16].copy_from_slice(&quantized.packed_scales());
    block[16..].copy_from_slice(&quantized.packed_nibbles());
    block
}
