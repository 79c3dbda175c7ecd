//! Table of the 8-bit codes of optimizer states (`plimsoll_program::formats::dynamic_map`).

use plimsoll_program::formats;

/// A table that converts numbers to codes of `formats::dynamic_map` without a search.
pub struct Encoder {
    thresholds: [f32; 256],
    /// The least code that a number with a given sign, exponent and 7 leading mantissa bits can have. There is one
    /// entry for each combination of these bits. The code of a number is its entry, or one more.
    least_code: Vec<i32>,
}

impl Encoder {
    /// Number of low bits of an f32 that the table ignores. The remaining bits (exponent and 7 mantissa bits) are so
    /// fine that at most one threshold lies between neighbouring entries.
    pub const SHIFT: u32 = 16;
    /// Upper 16 bits of the f32 2^-25. Smaller magnitudes have the code of zero.
    pub const MIN_MAGNITUDE: u32 = 0x3300;
    /// Upper 16 bits of the f32 1.0. Numbers from 1 on have the last code, numbers from −1 down the first.
    pub const MAX_MAGNITUDE: u32 = 0x3f80;
    /// Number of table entries per sign.
    pub const ENTRIES: usize = (Encoder::MAX_MAGNITUDE - Encoder::MIN_MAGNITUDE + 1) as usize;

    /// Returns the encoder for signed or unsigned codes, which all callers share.
    pub fn shared(signed: bool) -> &'static Encoder {
        use std::sync::LazyLock;
        static ENCODERS: LazyLock<[Encoder; 2]> = LazyLock::new(|| [Encoder::new(false), Encoder::new(true)]);
        &ENCODERS[usize::from(signed)]
    }

    fn new(signed: bool) -> Encoder {
        let new_thresholds = formats::dynamic_thresholds(signed);
        let mut thresholds = [f32::INFINITY; 256];
        thresholds[..new_thresholds.len()].copy_from_slice(new_thresholds);
        let mut least_code = vec![0; 2 * Encoder::ENTRIES];
        for entry in 0..Encoder::ENTRIES {
            let first = (Encoder::MIN_MAGNITUDE + entry as u32) << Encoder::SHIFT;
            let (mut low, mut high) = (f32::from_bits(first), f32::from_bits(first | 0xffff));
            if entry == 0 {
                low = 0.0;
            }
            if entry + 1 == Encoder::ENTRIES {
                high = f32::INFINITY;
            }
            least_code[entry] = formats::code(new_thresholds, low).into();
            least_code[Encoder::ENTRIES + entry] = formats::code(new_thresholds, -high).into();
            debug_assert!(formats::code(new_thresholds, high) as i32 - least_code[entry] <= 1);
        }
        Encoder { thresholds, least_code }
    }

    /// Returns the code of a number; 0 for NaN.
    #[inline(always)]
    pub fn code(&self, value: f32) -> u8 {
        let bits = value.to_bits();
        let magnitude = (bits & 0x7fff_ffff) >> Encoder::SHIFT;
        let entry = magnitude.clamp(Encoder::MIN_MAGNITUDE, Encoder::MAX_MAGNITUDE) - Encoder::MIN_MAGNITUDE;
        let sign = if bits >> 31 == 1 { Encoder::ENTRIES } else { 0 };
        let least_code = self.least_code[entry as usize + sign];
        if value.is_nan() { 0 } else { (least_code + i32::from(self.thresholds[least_code as usize] < value)) as u8 }
    }

    /// Returns the thresholds between codes, ascending; unused entries are infinite.
    pub fn thresholds(&self) -> &[f32; 256] {
        &self.thresholds
    }

    /// Returns the table of least codes: [`Encoder::ENTRIES`] for positive numbers, then as many for negative ones.
    pub fn least_code(&self) -> &[i32] {
        &self.least_code
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::kernels::simd::{Dot, QuantizedVector, Vector, vectorized_dot};

    #[test]
    fn table_codes_match_searched_codes() {
        for signed in [false, true] {
            let (encoder, thresholds) = (Encoder::shared(signed), formats::dynamic_thresholds(signed));
            // Every 7th upper half and its neighbours, and the neighbourhood of each threshold.
            let bits = (0..=u16::MAX)
                .step_by(7)
                .flat_map(|high| [0u16, 1, 0xffff].map(|low| u32::from(high) << 16 | u32::from(low)));
            let near = thresholds.iter().flat_map(|t| [t.to_bits() - 1, t.to_bits(), t.to_bits() + 1]);
            let x: Vec<f32> =
                bits.chain(near).map(f32::from_bits).filter(|x| signed || x.is_nan() || *x >= 0.0).collect();
            let mut codes = vec![0; x.len()];
            let many = x.len() / 32 * 32;
            encode_with_vectors(encoder, &x[..many], &mut codes[..many]);
            for (i, &x) in x.iter().enumerate() {
                let want = formats::code(thresholds, x);
                assert_eq!(encoder.code(x), want, "{x:e} signed {signed}");
                assert!(i >= many || codes[i] == want, "{x:e} signed {signed}: {} for {want}", codes[i]);
            }
        }
    }

    vectorized_dot! {
        fn encode_with_vectors<D>(encoder: &Encoder, x: &[f32], codes: &mut [u8]) {
            for at in (0..x.len()).step_by(D::V::LANES) {
                // SAFETY: a multiple of all lanes, inside both.
                unsafe { D::V::load(x.as_ptr().add(at)).store_codes(encoder, codes.as_mut_ptr().add(at)) };
            }
        }
    }
}
