//! The exponential function in f32: constants shared by all widths of vectors, and the scalar version.

/// Smallest input from which e^x is infinite in f32 (ln 2^128 = 88.72…; the scaling overflows by itself).
pub(super) const EXP_MAX: f32 = 90.0;
/// Input below which e^x is zero in f32 (half the smallest subnormal is e^-103.97…).
pub(super) const EXP_MIN: f32 = -105.0;
/// ln 2 in two parts; the first has so few bits that its product with any exponent is exact.
pub(super) const LN2_HIGH: f32 = 355.0 / 512.0;
pub(super) const LN2_LOW: f32 = -2.121_944_4e-4;
/// 1/k! for k = 7 … 1. After the reduction |r| <= ln 2 / 2, where the next term of the series
/// is below 5e-9: less than a tenth of the rounding.
pub(super) const EXP_TERMS: [f32; 6] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5];
/// Adding and subtracting 1.5 · 2^23 rounds to the nearest integer, ties to even.
pub(super) const ROUNDING_SHIFT: f32 = 12_582_912.0;

/// Returns e^x by the same algorithm as the vectors.
#[inline(always)]
pub(super) fn exp_f32(x: f32) -> f32 {
    // Comparisons with NaN are false, so NaN is kept.
    let x = if x > EXP_MAX { EXP_MAX } else { x };
    let x = if x < EXP_MIN { EXP_MIN } else { x };
    let n = (x * std::f32::consts::LOG2_E + ROUNDING_SHIFT) - ROUNDING_SHIFT;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = EXP_TERMS[0];
    for term in &EXP_TERMS[1..] {
        p = p * r + term;
    }
    let p = p * r * r + r + 1.0;
    // Two factors: 2^n alone would overflow before e^x does, or lose the subnormals.
    let n = n as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    p * power(half) * power(n - half)
}
