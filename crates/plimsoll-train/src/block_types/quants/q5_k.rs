//! `q5_k`: two f16 factors, 8 scales and 8 offsets of 6 bits, the fifth bits of 256 codes, then their other 4 bits.

use super::{affine_blocks, f16_bytes};

/// Size of a block in bytes.
pub const BYTES: usize = 176;

/// Quantizes a block. Bit `g` of byte `i` of the fifth bits belongs to element `i` of group `g`.
pub fn quantize(values: &[f32; 256]) -> [u8; BYTES] {
    let quantized = affine_blocks::quantize(values, 31.0);
    let mut block = [0; BYTES];
    block[..2].copy_from_slice(&f16_bytes(quantized.factor));
    block[2..4].copy_from_slice(&f16_bytes(quantized.offset_factor));
    block[4..16].copy_from_slice(&quantized.packed_scales());
    for (group, codes) in quantized.codes.iter().enumerate() {
        for (byte, code) in block[16..48].iter_mut().zip(codes) {
            *byte |= code >> 4 << group;
        }
    }
    block[48..].copy_from_slice(&quantized.packed_nibbles());
    block
}
