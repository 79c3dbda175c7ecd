//! Blocks to values, by the layouts that the modules of `quants` describe. All arithmetic is f32.

use super::BlockType;
use half::{bf16, f16};

impl BlockType {
    /// Converts whole blocks to values, and fills `into`, which has as many elements.
    ///
    /// # Panics
    /// If `from` are no whole blocks, or `into` has another number of elements.
    pub fn decode(self, from: &[u8], into: &mut [f32]) {
        assert!((into.len() as u64).is_multiple_of(self.elements()), "values are whole blocks");
        assert_eq!(from.len() as u64, self.bytes(into.len() as u64), "the blocks have the values");
        let blocks = from.chunks_exact(self.block_bytes() as usize);
        for (block, values) in blocks.zip(into.chunks_exact_mut(self.elements() as usize)) {
            self.decode_block(block, values);
        }
    }

    fn decode_block(self, block: &[u8], into: &mut [f32]) {
        let d = || half_at(block, 0);
        match self {
            BlockType::F32 => into[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            BlockType::F16 => into[0] = d(),
            BlockType::Bf16 => into[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            BlockType::Q8_0 => {
                let scale = d();
                into.iter_mut().zip(&block[2..]).for_each(|(value, byte)| *value = scale * f32::from(*byte as i8));
            }
            BlockType::Q4_0 => fill(into, d(), |i| f32::from(nibble(&block[2..], i)) - 8.0),
            BlockType::Q5_0 => fill(into, d(), |i| f32::from(five_bits(&block[2..], i)) - 16.0),
            BlockType::Q5_1 => {
                let minimum = half_at(block, 2);
                fill(into, d(), |i| f32::from(five_bits(&block[4..], i)));
                into.iter_mut().for_each(|value| *value += minimum);
            }
            BlockType::Q4K => affine(block, into, |i| block[16 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15),
            BlockType::Q5K => affine(block, into, |i| {
                let low = block[48 + i / 64 * 32 + i % 32] >> (i / 32 % 2 * 4) & 15;
                low | (block[16 + i % 32] >> (i / 32) & 1) << 4
            }),
            BlockType::Q6K => six_bits(block, into),
        }
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Fills 32 values with scale · code.
fn fill(into: &mut [f32], scale: f32, code: impl Fn(usize) -> f32) {
    into.iter_mut().enumerate().for_each(|(i, value)| *value = scale * code(i));
}

/// Returns code `i` of 32 codes of 4 bits.
fn nibble(codes: &[u8], i: usize) -> u8 {
    codes[i % 16] >> (i / 16 * 4) & 15
}

/// Returns code `i` of 32 codes of 5 bits: 4 bytes of fifth bits, then 16 bytes of nibbles.
fn five_bits(codes: &[u8], i: usize) -> u8 {
    nibble(&codes[4..], i) | (codes[i / 8] >> (i % 8) & 1) << 4
}

/// Fills 256 values with scale · code − offset, in groups of 32. Scales and offsets have 6 bits, see
/// `quants::affine_blocks`.
fn affine(block: &[u8], into: &mut [f32], code: impl Fn(usize) -> u8) {
    let (factor, offset_factor, packed) = (half_at(block, 0), half_at(block, 2), &block[4..16]);
    for (group, values) in into.chunks_exact_mut(32).enumerate() {
        let (scale, offset) = match group {
            0..4 => (packed[group] & 63, packed[group + 4] & 63),
            _ => {
                (packed[group + 4] & 15 | packed[group - 4] >> 6 << 4, packed[group + 4] >> 4 | packed[group] >> 6 << 4)
            }
        };
        let (scale, offset) = (factor * f32::from(scale), offset_factor * f32::from(offset));
        for (i, value) in values.iter_mut().enumerate() {
            *value = scale * f32::from(code(32 * group + i)) - offset;
        }
    }
}

/// Fills 256 values of a `q6_k` block.
fn six_bits(block: &[u8], into: &mut [f32]) {
    let factor = half_at(block, 208);
    for (i, value) in into.iter_mut().enumerate() {
        let (half, within) = (i / 128, i % 128);
        let low = block[64 * half + within % 64] >> (within / 64 * 4) & 15;
        let high = block[128 + 32 * half + within % 32] >> (within / 32 * 2) & 3;
        *value = factor * f32::from(block[192 + i / 16] as i8) * (f32::from(low | high << 4) - 32.0);
    }
}
