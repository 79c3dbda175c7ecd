//! Quantized formats: 8-bit optimizer state, and frozen matrices in int8 or nf4. This module has the tables, block
//! sizes and exact arithmetic; the kernels of all devices give the same bits. The ops are in [`crate::op`].
//!
//! All arithmetic is f32, whatever the precision of the run. A value is quantized to the nearest table entry, or to the
//! lower of two equally near ones. Its code is the number of *thresholds* below the value. Thresholds are the midpoints
//! of neighbouring entries, computed in f64 and rounded to f32.
//!
//! | format | block | codes | scale |
//! |---|---|---|---|
//! | 8-bit state, of tensors with 4096 elements or more | 256 elements | [`dynamic_map`], unsigned for the second moment | f32 largest magnitude |
//! | int8 | a row | −127..=127 | f32 largest magnitude / 127 |
//! | nf4 | 64 elements | [`NF4`], two per byte, the first in the upper half | 8-bit scale |
//! | scales of nf4 | 256 scales | signed [`dynamic_map`] | f32 mean, f32 largest distance from it |
//!
//! Sources: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization" (2022);
//! Dettmers, Pagnoni, Holtzman, Zettlemoyer, "QLoRA" (2023). There are two differences from bitsandbytes. nf4 scales
//! are centred on the mean of their group of 256 instead of the tensor's mean, so that a tensor can be quantized piece
//! by piece. int8 does not treat outliers separately.

use std::sync::LazyLock;

/// Elements that share a scale in block-wise 8-bit optimizer state (8-bit Adam).
pub const STATE_BLOCK: u64 = 256;
/// Elements of the smallest tensor with 8-bit optimizer state; smaller tensors, such as norms and biases, keep it in
/// f32 (f64 in an f64 run). The value is `min_8bit_size` of bitsandbytes.
pub const QUANTIZED_STATE_ELEMENTS_MIN: u64 = 4096;
/// Elements of a matrix that share a scale in nf4 (4-bit quantization of QLoRA).
pub const NF4_BLOCK: u64 = 64;
/// Scales of nf4 that are quantized together in double quantization: they share a mean and a largest distance from it.
pub const NF4_GROUP: u64 = 256;
/// Elements of a matrix that one group of [`NF4_GROUP`] nf4 scales covers. A matrix can be quantized in pieces that
/// start at multiples of it.
pub const NF4_PIECE: u64 = NF4_BLOCK * NF4_GROUP;
/// Largest code of an int8 element; the smallest is its negative.
pub const INT8_MAX: f32 = 127.0;

/// The value of each nf4 code, ascending and scaled to −1..=1: quantiles of a normal distribution, with an exact zero
/// (QLoRA, appendix E).
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Returns the value of each code of 8-bit optimizer state, ascending: the dynamic map of bitsandbytes.
///
/// A code has an optional sign, a decimal exponent of varying length and a linear fraction. The map contains exactly 0
/// and 1. The `signed` map is for Adam's first moment and for the scales of nf4, the unsigned map for the second
/// moment.
pub fn dynamic_map(signed: bool) -> &'static [f32; 256] {
    static MAPS: LazyLock<[[f32; 256]; 2]> = LazyLock::new(|| [make_dynamic_map(false), make_dynamic_map(true)]);
    &MAPS[usize::from(signed)]
}

fn make_dynamic_map(signed: bool) -> [f32; 256] {
    const EXPONENTS: i32 = 7;
    let mut values = vec![0.0f64, 1.0];
    for exponent in 0..EXPONENTS {
        // A shorter exponent leaves more bits for the fraction, and a missing sign one more.
        let fractions = 1u32 << (exponent as u32 + u32::from(!signed));
        let scale = 10f64.powi(exponent - (EXPONENTS - 1));
        for i in 0..fractions {
            let middle = 0.1 + 0.9 * (f64::from(i) + 0.5) / f64::from(fractions);
            values.push(scale * middle);
            if signed {
                values.push(-scale * middle);
            }
        }
    }
    values.sort_by(f64::total_cmp);
    std::array::from_fn(|i| values[i] as f32)
}

/// Returns the midpoints of neighbouring entries of an ascending table, between which a value is rounded to an entry.
pub fn thresholds<const N: usize>(table: &[f32; N]) -> Vec<f32> {
    table.windows(2).map(|pair| ((f64::from(pair[0]) + f64::from(pair[1])) / 2.0) as f32).collect()
}

/// Returns the midpoints of neighbouring entries of [`dynamic_map`], with which [`code`] quantizes.
pub fn dynamic_thresholds(signed: bool) -> &'static [f32] {
    static THRESHOLDS: LazyLock<[Vec<f32>; 2]> =
        LazyLock::new(|| [thresholds(dynamic_map(false)), thresholds(dynamic_map(true))]);
    &THRESHOLDS[usize::from(signed)]
}

/// Returns the midpoints of neighbouring entries of [`NF4`], with which [`code`] quantizes.
pub fn nf4_thresholds() -> &'static [f32] {
    static THRESHOLDS: LazyLock<Vec<f32>> = LazyLock::new(|| thresholds(&NF4));
    &THRESHOLDS
}

/// Quantizes a value: returns the code of the nearest table entry, where `thresholds` are the midpoints between
/// entries. It is the number of thresholds below the value, and 0 for NaN.
pub fn code(thresholds: &[f32], value: f32) -> u8 {
    thresholds.partition_point(|&threshold| threshold < value) as u8
}

/// Returns the factor by which values are multiplied before quantization: 1 / scale, or 0 if the scale is 0.
pub fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// Quantizes a row to int8 and returns its scale, the largest absolute value / 127. Codes are x · (1 / scale) in two's
/// complement, rounded to nearest, ties to even. All are 0 if the scale is 0.
pub fn int8_row(from: &[f32], codes: &mut [u8]) -> f32 {
    let scale = largest(from) / INT8_MAX;
    let inverse = inverse(scale);
    for (code, x) in codes.iter_mut().zip(from) {
        *code = (x * inverse).round_ties_even().clamp(-INT8_MAX, INT8_MAX) as i8 as u8;
    }
    scale
}

/// Dequantizes an int8 code of a row with this scale.
pub fn int8_value(code: u8, scale: f32) -> f32 {
    f32::from(code as i8) * scale
}

/// Quantizes up to [`NF4_BLOCK`] elements to nf4, two codes per byte with the first in the upper half. Returns their
/// scale, which is not yet quantized itself. The last byte of an odd count has the code of zero in its lower half.
pub fn nf4_block(from: &[f32], codes: &mut [u8]) -> f32 {
    let scale = largest(from);
    let inverse = inverse(scale);
    let code = |x: f32| code(nf4_thresholds(), x * inverse);
    for (byte, pair) in codes.iter_mut().zip(from.chunks(2)) {
        *byte = code(pair[0]) << 4 | code(pair.get(1).copied().unwrap_or(0.0));
    }
    scale
}

/// Quantizes up to [`NF4_GROUP`] nf4 scales to 8 bits (double quantization). Returns their mean, summed in order in
/// f64, and the largest distance from it.
pub fn nf4_group(scales: &[f32], codes: &mut [u8]) -> [f32; 2] {
    let sum: f64 = scales.iter().map(|&scale| f64::from(scale)).sum();
    let mean = (sum / scales.len() as f64) as f32;
    let largest_distance = scales.iter().map(|scale| (scale - mean).abs()).fold(0.0, f32::max);
    let inverse = inverse(largest_distance);
    for (to, scale) in codes.iter_mut().zip(scales) {
        *to = code(dynamic_thresholds(true), (scale - mean) * inverse);
    }
    [mean, largest_distance]
}

/// Dequantizes an nf4 scale from its 8-bit code and the mean and largest distance of its group, by one fused
/// multiply-add.
pub fn nf4_scale(code: u8, [mean, largest_distance]: [f32; 2]) -> f32 {
    dynamic_map(true)[usize::from(code)].mul_add(largest_distance, mean)
}

/// Dequantizes one of the two nf4 codes in a byte, with the scale of their block. `upper` selects the code in the upper
/// half, which is the first of the two elements.
pub fn nf4_value(byte: u8, upper: bool, scale: f32) -> f32 {
    NF4[usize::from(if upper { byte >> 4 } else { byte & 15 })] * scale
}

fn largest(values: &[f32]) -> f32 {
    values.iter().map(|x| x.abs()).fold(0.0, f32::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dynamic_maps_ascend_and_contain_zero_and_one() {
        for signed in [false, true] {
            let map = dynamic_map(signed);
            assert!(map.windows(2).all(|pair| pair[0] < pair[1]));
            assert_eq!(map[255], 1.0);
            assert!(map.contains(&0.0));
        }
        // The first and last entries that bitsandbytes prints for its maps (functional.create_dynamic_map).
        let (signed, unsigned) = (dynamic_map(true), dynamic_map(false));
        assert_eq!((signed[0], signed[127]), (-0.992_968_75, 0.0));
        assert_eq!((signed[128], signed[254]), (5.5e-7, 0.992_968_75));
        assert_eq!((unsigned[0], unsigned[1], unsigned[254]), (0.0, 3.25e-7, 0.996_484_4));
    }

    #[test]
    fn table_entries_quantize_to_themselves() {
        for (table, thresholds) in
            [(dynamic_map(true), dynamic_thresholds(true)), (dynamic_map(false), dynamic_thresholds(false))]
        {
            for (i, &value) in table.iter().enumerate() {
                assert_eq!(usize::from(code(thresholds, value)), i);
            }
        }
        for (i, &value) in NF4.iter().enumerate() {
            assert_eq!(usize::from(code(nf4_thresholds(), value)), i);
        }
    }

    #[test]
    fn nf4_thresholds_match_bitsandbytes() {
        // dQuantizeNF4 in csrc/kernels.cu, highest first.
        let published: [f32; 15] = [
            0.861_478_4,
            0.642_786_9,
            0.501_663_45,
            0.389_312_53,
            0.292_013_76,
            0.203_521_25,
            0.120_255_25,
            0.039_790_15,
            -0.045_525_018,
            -0.137_911_73,
            -0.234_607_4,
            -0.339_679_43,
            -0.459_995_26,
            -0.610_632_9,
            -0.848_096_4,
        ];
        for (ours, theirs) in nf4_thresholds().iter().rev().zip(published) {
            assert!((ours - theirs).abs() <= 1.0e-7, "{ours} {theirs}");
        }
    }

    #[test]
    fn nf4_block_round_trips_to_nearest_entry() {
        let values: Vec<f32> = (0..63).map(|i| ((i * 37 % 63) as f32 - 31.0) * 0.013).collect();
        let mut codes = [0; 32];
        let scale = nf4_block(&values, &mut codes);
        for (i, x) in values.iter().enumerate() {
            let back = nf4_value(codes[i / 2], i % 2 == 0, scale);
            let nearest = NF4.iter().map(|v| v * scale).min_by(|a, b| (a - x).abs().total_cmp(&(b - x).abs())).unwrap();
            assert!((back - x).abs() <= (nearest - x).abs() * 1.000_01, "{x}: {back}, {nearest}");
        }
        // The unused half of the last byte has the code of zero.
        assert_eq!(codes[31] & 15, 7);
    }

    #[test]
    fn zeros_quantize_to_zeros() {
        let mut codes = [1; 4];
        assert_eq!(nf4_block(&[0.0; 8], &mut codes), 0.0);
        assert_eq!(codes, [0x77; 4]);
        assert_eq!(int8_row(&[0.0; 4], &mut codes), 0.0);
        assert_eq!(codes, [0; 4]);
        let mut codes = [1; 4];
        let group = nf4_group(&[0.5; 4], &mut codes);
        assert_eq!((group, codes), ([0.5, 0.0], [127; 4]));
        assert_eq!(nf4_scale(127, group), 0.5);
    }

    #[test]
    fn int8_scales_rows_by_largest_magnitude() {
        let mut codes = [0; 5];
        let scale = int8_row(&[0.5, -2.54, 1.27, 0.0, 0.03], &mut codes);
        assert_eq!(codes.map(|code| code as i8), [25, -127, 64, 0, 2]);
        assert!((int8_value(codes[1], scale) + 2.54).abs() < 1e-6);
    }
}
