//! Quantized types. Each module turns one block of finite f32 values into its bytes; all arithmetic is f32.
//!
//! The types with a scale for 32 elements (`q4_0`, `q5_0`, `q5_1`, `q8_0`) have the bits of the reference in the Python
//! package `gguf`. For the types with 256 elements (`q4_k`, `q5_k`, `q6_k`) the format leaves the choice of scales to the
//! writer; `search` chooses them.

mod affine_blocks;
pub(super) mod q4_0;
pub(super) mod q4_k;
pub(super) mod q5_0;
pub(super) mod q5_1;
pub(super) mod q5_k;
pub(super) mod q6_k;
pub(super) mod q8_0;
mod search;

use half::f16;

/// Returns the value with the largest magnitude, the first of several; 0 if there are no values.
fn extreme(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |extreme: f32, &value| if value.abs() > extreme.abs() { value } else { extreme })
}

/// Returns the smallest and the largest value.
fn bounds(values: &[f32]) -> (f32, f32) {
    let start = (f32::INFINITY, f32::NEG_INFINITY);
    values.iter().fold(start, |(low, high), &value| (low.min(value), high.max(value)))
}

/// Returns 1 / `value`, and 0 for 0.
fn invert(value: f32) -> f32 {
    if value == 0.0 { 0.0 } else { 1.0 / value }
}

/// Returns the bytes of a value as f16, rounded to nearest, ties to even.
fn f16_bytes(value: f32) -> [u8; 2] {
    f16::from_f32(value).to_le_bytes()
}

/// Returns a value rounded to f16.
fn as_f16(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
}

/// Packs 32 codes: the low 4 bits of elements `i` and `i + 16` in byte `i`.
fn pack_nibbles(codes: &[u8; 32]) -> [u8; 16] {
    std::array::from_fn(|i| codes[i] & 15 | codes[i + 16] << 4)
}

/// Packs bit 4 of 32 codes: that of element `i` in bit `i`.
fn pack_fifth_bits(codes: &[u8; 32]) -> [u8; 4] {
    let bits = codes.iter().enumerate().fold(0u32, |bits, (i, code)| bits | u32::from(code >> 4 & 1) << i);
    bits.to_le_bytes()
}
