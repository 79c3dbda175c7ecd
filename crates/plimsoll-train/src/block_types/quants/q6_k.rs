//! `q6_k`: 256 codes of 6 bits, 16 signed scales of 8 bits, then an f16 factor. An element is
//! factor · scale · (code − 32), with a scale for 16 elements.

use super::search::{fit_scale, scale_error, scaled_codes, weights};
use super::{as_f16, extreme, f16_bytes, invert};

/// Size of a block in bytes.
pub const BYTES: usize = 210;

/// Quantizes a block. The scale with the largest magnitude becomes −128, so the factor has the opposite sign.
pub fn quantize(values: &[f32; 256]) -> [u8; BYTES] {
    let groups = values.as_chunks::<16>().0;
    let mut fits = [0f32; 16];
    for (fit, group) in fits.iter_mut().zip(groups) {
        *fit = fit_scale(group, &weights(group));
    }
    let factor = as_f16(extreme(&fits) / -128.0);
    let mut codes = [[0u8; 16]; 16];
    let mut scales = [0i8; 16];
    for (index, (group, fit)) in groups.iter().zip(fits).enumerate() {
        scales[index] = round_to_bits(group, fit, factor);
        codes[index] = scaled_codes(group, factor * f32::from(scales[index]));
    }
    pack(codes.as_flattened(), scales, factor)
}

/// Returns the scale of a group in 8 bits: of the numbers beside `fit`, the one with the smallest weighted error.
fn round_to_bits(group: &[f32; 16], fit: f32, factor: f32) -> i8 {
    let weights = weights(group);
    let near = (fit * invert(factor)).round().clamp(-128.0, 127.0) as i32;
    let error = |scale: i32| scale_error(group, &weights, factor * scale as f32);
    let (mut best, mut least) = (near, error(near));
    for scale in [near - 1, near + 1].into_iter().filter(|scale| (-128..128).contains(scale)) {
        let error = error(scale);
        if error < least {
            (best, least) = (scale, error);
        }
    }
    best as i8
}

/// Packs a block. Each half has 128 codes in 4 quarters of 32. The low 4 bits of quarters 0 and 1 are in the low bits of
/// 64 bytes, those of quarters 2 and 3 in their high bits. A further 32 bytes have the high 2 bits of all quarters.
fn pack(codes: &[u8], scales: [i8; 16], factor: f32) -> [u8; BYTES] {
    let mut block = [0; BYTES];
    for (half, codes) in codes.as_chunks::<128>().0.iter().enumerate() {
        for i in 0..64 {
            block[64 * half + i] = codes[i] & 15 | codes[i + 64] << 4;
        }
        for i in 0..32 {
            let high = |quarter: usize| (codes[32 * quarter + i] >> 4) << (2 * quarter);
            block[128 + 32 * half + i] = high(0) | high(1) | high(2) | high(3);
        }
    }
    block[192..208].copy_from_slice(&scales.map(|scale| scale as u8));
    block[208..].copy_from_slice(&f16_bytes(factor));
    block
}
