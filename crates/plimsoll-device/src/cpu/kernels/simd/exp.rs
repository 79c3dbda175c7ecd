//! The exponential function in f32: constants shared by all widths of vectors, and the scalar version.

/// Upper limit of inputs: larger ones count as this one. e^x is infinite in f32 from x = ln 2^128 = 88.72… on, where
/// the scaling overflows by itself.
pub(super) const EXP_MAX: f32 = 90.0;
/// Lower limit of inputs: smaller ones count as this one. e^x is zero in f32 below x = -103.97…, half the smallest
/// subnormal.
pub(super) const EXP_MIN: f32 = -105.0;
/// First of two parts of ln 2. It has so few bits that its product with any exponent is exact.
pub(super) const LN2_HIGH: f32 = 355.0 / 512.0;
/// Second of two parts of ln 2: the rest.
pub(super) const LN2_LOW: f32 = -2.121_944_4e-4;
/// Coefficients 1/k! of the series of e^r, for k = 7 down to 2. After the reduction |r| <= ln 2 / 2, where the next
/// term is below 5e-9: less than a tenth of the rounding.
pub(super) const EXP_TERMS: [f32; 6] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5];
/// 1.5 · 2^23. Adding and subtracting it rounds an f32 to the nearest integer, ties to even.
pub(super) const ROUNDING_SHIFT: f32 = 12_582_912.0;

/// Returns e^x for a single number, by the same algorithm as the versions for vectors.
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
