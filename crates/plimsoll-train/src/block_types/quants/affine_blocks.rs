//! The common part of `q4_k` and `q5_k`: 256 elements in 8 groups of 32, each with a scale and an offset of 6 bits. Two
//! f16 factors turn them into numbers: an element is factor · scale · code − offset factor · offset.

use super::search::{Affine, affine_codes, affine_error, fit_affine, weights};
use super::{as_f16, invert};

/// Largest scale and largest offset of a group, in 6 bits.
const SIX_BITS: f32 = 63.0;

/// A quantized block, before its codes are packed.
pub struct AffineBlock {
    /// Factor of all scales.
    pub factor: f32,
    /// Factor of all offsets.
    pub offset_factor: f32,
    /// Scales of the groups, 6 bits each.
    scales: [u8; 8],
    /// Offsets of the groups, 6 bits each.
    offsets: [u8; 8],
    /// Codes of the groups.
    pub codes: [[u8; 32]; 8],
}

/// Quantizes a block to codes from 0 to `levels`.
pub fn quantize(values: &[f32; 256], levels: f32) -> AffineBlock {
    let groups = values.as_chunks::<32>().0;
    let mut fits = [Affine::default(); 8];
    for (fit, group) in fits.iter_mut().zip(groups) {
        *fit = fit_affine(group, &weights(group), levels);
    }
    let largest = |number: fn(&Affine) -> f32| fits.iter().map(number).fold(0.0, f32::max);
    let factor = as_f16(largest(|fit| fit.scale) / SIX_BITS);
    let offset_factor = as_f16(largest(|fit| fit.offset) / SIX_BITS);
    let mut block = AffineBlock { factor, offset_factor, scales: [0; 8], offsets: [0; 8], codes: [[0; 32]; 8] };
    for (index, (group, fit)) in groups.iter().zip(fits).enumerate() {
        let (scale, offset) = round_to_bits(group, fit, &block, levels);
        (block.scales[index], block.offsets[index]) = (scale, offset);
        block.codes[index] = affine_codes(group, block.affine(scale, offset), levels);
    }
    block
}

/// Returns scale and offset of a group in 6 bits: of the numbers beside `fit`, those with the smallest weighted error.
fn round_to_bits(group: &[f32; 32], fit: Affine, block: &AffineBlock, levels: f32) -> (u8, u8) {
    let weights = weights(group);
    let near = |value: f32, factor: f32| (value * invert(factor)).round().clamp(0.0, SIX_BITS) as i32;
    let (scale, offset) = (near(fit.scale, block.factor), near(fit.offset, block.offset_factor));
    let mut best = (scale as u8, offset as u8);
    let mut least = affine_error(group, &weights, block.affine(best.0, best.1), levels);
    for scale in (scale - 1).max(0)..=(scale + 1).min(SIX_BITS as i32) {
        for offset in (offset - 1).max(0)..=(offset + 1).min(SIX_BITS as i32) {
            let error = affine_error(group, &weights, block.affine(scale as u8, offset as u8), levels);
            if error < least {
                (best, least) = ((scale as u8, offset as u8), error);
            }
        }
    }
    best
}

impl AffineBlock {
    fn affine(&self, scale: u8, offset: u8) -> Affine {
        Affine { scale: self.factor * f32::from(scale), offset: self.offset_factor * f32::from(offset) }
    }

    /// Packs scales and offsets. Those of the first 4 groups are in the low 6 bits of bytes 0 to 7. Of those of the last
    /// 4 groups, the low 4 bits are in bytes 8 to 11, and the high 2 bits in the high bits of bytes 0 to 7.
    pub fn packed_scales(&self) -> [u8; 12] {
        let mut packed = [0; 12];
        for group in 0..4 {
            let (scale, offset) = (self.scales[group + 4], self.offsets[group + 4]);
            packed[group] = self.scales[group] | scale >> 4 << 6;
            packed[group + 4] = self.offsets[group] | offset >> 4 << 6;
            packed[group + 8] = scale & 15 | offset << 4;
        }
        packed
    }

    /// Packs the low 4 bits of all codes: for each two groups, element `i` of the first and of the second in byte `i`.
    pub fn packed_nibbles(&self) -> [u8; 128] {
        let mut packed = [0; 128];
        for (bytes, pair) in packed.as_chunks_mut::<32>().0.iter_mut().zip(self.codes.as_chunks::<2>().0) {
            *bytes = std::array::from_fn(|i| pair[0][i] & 15 | pair[1][i] << 4);
        }
        packed
    }
}
