//! Quantization and dequantization of frozen matrices in 8 and 4 bits.
//!
//! `plimsoll_program::formats` defines the formats and the exact arithmetic. These kernels process many numbers at a time and
//! give the same bits.

use super::simd::{Dot, QuantizedVector, Real, Vector, vectorized_dot};
use crate::cpu::pool::{Pool, Shared};
use half::bf16;
use plimsoll_core::DType;
use plimsoll_program::formats::{self, NF4_BLOCK, NF4_GROUP, NF4_PIECE};
use std::ops::Range;

/// Elements of an nf4 block.
const NF4_BLOCK_ELEMENTS: usize = NF4_BLOCK as usize;
/// Blocks of an nf4 group.
const NF4_GROUP_BLOCKS: usize = NF4_GROUP as usize;
/// Elements of an nf4 group.
const NF4_GROUP_ELEMENTS: usize = NF4_PIECE as usize;
/// Smallest task, in elements.
const MIN_TASK_ELEMENTS: usize = 16384;

/// A quantized matrix, or whole blocks of one.
#[derive(Debug)]
pub enum QuantizedData<B, F> {
    /// 8 bits, with a scale per row.
    Int8 {
        /// Two's complement, `[elements]`.
        codes: B,
        /// Scales, `[rows]`.
        scales: F,
    },
    /// 4 bits, with 8-bit scales.
    Nf4 {
        /// `[⌈elements / 2⌉]`, with the first of each pair in the upper half.
        codes: B,
        /// One for each block of 64 elements.
        scales: B,
        /// Mean and largest distance of each 256 scales.
        groups: F,
    },
}

/// Quantizes `from`, with rows of `columns` elements, into `into`.
pub fn quantize<T: Real>(pool: &Pool, from: &[T], columns: usize, into: QuantizedData<&mut [u8], &mut [f32]>) {
    match into {
        QuantizedData::Int8 { codes, scales } => {
            assert!(codes.len() == from.len() && scales.len() * columns == from.len());
            let (codes, rows) = (Shared::new(codes), scales.len());
            let scales = Shared::new(scales);
            pool.split(rows, MIN_TASK_ELEMENTS.div_ceil(columns), |range, _| {
                for row in range {
                    let part = row * columns..(row + 1) * columns;
                    // SAFETY: rows of one split are disjoint.
                    let (codes, scale) = unsafe { (codes.part(part.clone()), scales.part(row..row + 1)) };
                    scale[0] = int8_row(&from[part], codes);
                }
            });
        }
        QuantizedData::Nf4 { codes, scales, groups } => {
            let blocks = from.len().div_ceil(NF4_BLOCK_ELEMENTS);
            assert!(codes.len() == from.len().div_ceil(2) && scales.len() == blocks);
            assert!(groups.len() == 2 * blocks.div_ceil(NF4_GROUP_BLOCKS));
            let total = groups.len() / 2;
            let (codes, scales, groups) = (Shared::new(codes), Shared::new(scales), Shared::new(groups));
            pool.run(total, |group, _| {
                let part = group * NF4_GROUP_ELEMENTS..from.len().min((group + 1) * NF4_GROUP_ELEMENTS);
                let own = group * NF4_GROUP_BLOCKS..blocks.min((group + 1) * NF4_GROUP_BLOCKS);
                // SAFETY: groups have disjoint codes, scales and numbers, since each starts at an even element.
                let (codes, scales, numbers) = unsafe {
                    (
                        codes.part(part.start / 2..part.end.div_ceil(2)),
                        scales.part(own),
                        groups.part(2 * group..2 * group + 2),
                    )
                };
                let mut block_scales = [0.0; NF4_GROUP_BLOCKS];
                for ((from, codes), scale) in from[part]
                    .chunks(NF4_BLOCK_ELEMENTS)
                    .zip(codes.chunks_mut(NF4_BLOCK_ELEMENTS / 2))
                    .zip(&mut block_scales)
                {
                    let mut block = [0.0; NF4_BLOCK_ELEMENTS];
                    block.iter_mut().zip(from).for_each(|(to, x)| *to = to_f32(*x));
                    *scale = if from.len() == NF4_BLOCK_ELEMENTS {
                        nf4_block(&block, codes)
                    } else {
                        formats::nf4_block(&block[..from.len()], codes)
                    };
                }
                numbers.copy_from_slice(&formats::nf4_group(&block_scales[..scales.len()], scales));
            });
        }
    }
}

/// Dequantizes `from` into `to`; each element is rounded once.
pub fn dequantize<T: Real>(pool: &Pool, from: QuantizedData<&[u8], &[f32]>, columns: usize, to: &mut [T]) {
    match T::DTYPE {
        DType::F32 => dequantize_with_vectors::<f32>(pool, &from, columns, bytemuck::cast_slice_mut(to)),
        DType::Bf16 => dequantize_with_vectors::<bf16>(pool, &from, columns, bytemuck::cast_slice_mut(to)),
        // The formats define f32 numbers; other types convert them.
        _ => match from {
            QuantizedData::Int8 { codes, scales } => {
                for (i, to) in to.iter_mut().enumerate() {
                    *to = T::from_f64(formats::int8_value(codes[i], scales[i / columns]).into());
                }
            }
            QuantizedData::Nf4 { codes, scales, groups } => {
                for (i, to) in to.iter_mut().enumerate() {
                    let scale = nf4_scale_of_block(scales, groups, i / NF4_BLOCK_ELEMENTS);
                    *to = T::from_f64(formats::nf4_value(codes[i / 2], i % 2 == 0, scale).into());
                }
            }
        },
    }
}

fn dequantize_with_vectors<O: Real<Wide = f32>>(
    pool: &Pool,
    from: &QuantizedData<&[u8], &[f32]>,
    columns: usize,
    to: &mut [O],
) {
    let total = to.len();
    let to = Shared::new(to);
    match *from {
        QuantizedData::Int8 { codes, scales } => {
            assert!(codes.len() == total && scales.len() * columns == total);
            pool.split(scales.len(), MIN_TASK_ELEMENTS.div_ceil(columns), |range, _| {
                for row in range {
                    let part = row * columns..(row + 1) * columns;
                    // SAFETY: rows of one split are disjoint.
                    int8_values(&codes[part.clone()], scales[row], unsafe { to.part(part) });
                }
            });
        }
        QuantizedData::Nf4 { codes, scales, groups } => {
            let blocks = total.div_ceil(NF4_BLOCK_ELEMENTS);
            assert!(codes.len() == total.div_ceil(2) && scales.len() == blocks);
            assert!(groups.len() == 2 * blocks.div_ceil(NF4_GROUP_BLOCKS));
            pool.split(blocks, MIN_TASK_ELEMENTS / NF4_BLOCK_ELEMENTS, |range, _| {
                let part = range.start * NF4_BLOCK_ELEMENTS..total.min(range.end * NF4_BLOCK_ELEMENTS);
                let codes = &codes[part.start / 2..part.end.div_ceil(2)];
                // SAFETY: blocks of one split are disjoint.
                nf4_values(codes, scales, groups, range, unsafe { to.part(part) });
            });
        }
    }
}

#[inline(always)]
fn to_f32<T: Real>(x: T) -> f32 {
    x.to_f64() as f32
}

#[inline(always)]
fn nf4_scale_of_block(scales: &[u8], groups: &[f32], block: usize) -> f32 {
    let group = block / NF4_GROUP_BLOCKS * 2;
    formats::nf4_scale(scales[block], [groups[group], groups[group + 1]])
}

/// Quantizes a row like `formats::int8_row`.
fn int8_row<T: Real>(from: &[T], codes: &mut [u8]) -> f32 {
    let mut row = [0.0; 256];
    let mut max = 0.0f32;
    for part in from.chunks(row.len()) {
        row.iter_mut().zip(part).for_each(|(to, x)| *to = to_f32(*x));
        max = max.max(max_abs(&row[..part.len()]));
    }
    let scale = max / formats::INT8_MAX;
    let inverse = formats::inverse(scale);
    for (part, codes) in from.chunks(row.len()).zip(codes.chunks_mut(row.len())) {
        row.iter_mut().zip(part).for_each(|(to, x)| *to = to_f32(*x));
        int8_codes(&row[..part.len()], inverse, codes);
    }
    scale
}

vectorized_dot! {
    fn max_abs<D>(x: &[f32]) -> f32 {
        let mut max = D::V::splat(0.0);
        let zero = D::V::splat(0.0);
        let mut at = 0;
        while at < x.len() {
            let count = (x.len() - at).min(D::V::LANES);
            // SAFETY: `count` numbers are left.
            let value = unsafe { D::V::load_part(x.as_ptr().add(at), count, zero) };
            // A NaN leaves the maximum unchanged.
            max = value.max(zero - value).max(max);
            at += count;
        }
        max.max_lane()
    }
}

vectorized_dot! {
    fn int8_codes<D>(from: &[f32], inverse: f32, codes: &mut [u8]) {
        for (code, x) in codes.iter_mut().zip(from) {
            *code = (x * inverse).round_ties_even().clamp(-formats::INT8_MAX, formats::INT8_MAX) as i8 as u8;
        }
    }
}

vectorized_dot! {
    fn int8_values<D, O>(codes: &[u8], scale: f32, to: &mut [O]) {
        assert!(codes.len() == to.len());
        let lanes = D::V::LANES;
        let full_end = to.len() - to.len() % lanes;
        for at in (0..full_end).step_by(lanes) {
            // SAFETY: `lanes` elements from `at` on are inside both.
            unsafe { O::store(D::V::from_int8(codes.as_ptr().add(at)) * D::V::splat(scale), to.as_mut_ptr().add(at)) };
        }
        for (to, &code) in to[full_end..].iter_mut().zip(&codes[full_end..]) {
            *to = O::narrow(formats::int8_value(code, scale));
        }
    }
}

vectorized_dot! {
    /// Quantizes a whole block like `formats::nf4_block`.
    fn nf4_block<D>(from: &[f32; NF4_BLOCK_ELEMENTS], codes: &mut [u8]) -> f32 {
        let scale = max_abs(from);
        let inverse = formats::inverse(scale);
        let mut counts = [0u8; NF4_BLOCK_ELEMENTS];
        for &threshold in formats::nf4_thresholds() {
            for (count, x) in counts.iter_mut().zip(from) {
                *count += u8::from(threshold < x * inverse);
            }
        }
        for (byte, pair) in codes.iter_mut().zip(counts.as_chunks::<2>().0) {
            *byte = pair[0] << 4 | pair[1];
        }
        scale
    }
}

vectorized_dot! {
    /// Dequantizes `blocks`, given their codes; `scales` and `groups` belong to the whole matrix.
    fn nf4_values<D, O>(codes: &[u8], scales: &[u8], groups: &[f32], blocks: Range<usize>, to: &mut [O]) {
        let lanes = D::V::LANES;
        for ((block, codes), to) in blocks.zip(codes.chunks(NF4_BLOCK_ELEMENTS / 2)).zip(to.chunks_mut(NF4_BLOCK_ELEMENTS)) {
            let scale = nf4_scale_of_block(scales, groups, block);
            if to.len() < NF4_BLOCK_ELEMENTS {
                for (i, to) in to.iter_mut().enumerate() {
                    *to = O::narrow(formats::nf4_value(codes[i / 2], i % 2 == 0, scale));
                }
                continue;
            }
            assert!(codes.len() == NF4_BLOCK_ELEMENTS / 2);
            for at in (0..NF4_BLOCK_ELEMENTS).step_by(lanes) {
                // SAFETY: lanes elements from `at` on, and their codes, are inside the block.
                unsafe {
                    let value = D::V::from_nf4(codes.as_ptr().add(at / 2)) * D::V::splat(scale);
                    O::store(value, to.as_mut_ptr().add(at));
                }
            }
        }
    }
}

/// Converts numbers to codes of `formats::dynamic_map` by a table instead of a search.
pub struct Encoder {
    thresholds: [f32; 256],
    /// Least code by sign, exponent and leading bits of a number. Comparing with the next threshold gives the code.
    least_code: Vec<i32>,
}

impl Encoder {
    /// Low bits of a magnitude that the table ignores. The remaining bits, its exponent and 7 more, are so fine that at most
    /// one threshold lies between neighbouring entries.
    pub const SHIFT: u32 = 16;
    /// Magnitudes below this (2^-25) have the code of zero.
    pub const MIN_MAGNITUDE: u32 = 0x3300;
    /// Magnitudes from this (1.0) on have the last code, or the first.
    pub const MAX_MAGNITUDE: u32 = 0x3f80;
    /// Entries per sign.
    pub const ENTRIES: usize = (Encoder::MAX_MAGNITUDE - Encoder::MIN_MAGNITUDE + 1) as usize;

    /// Returns the encoder for signed or unsigned codes.
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

    /// Returns the code of a number.
    #[inline(always)]
    pub fn code(&self, value: f32) -> u8 {
        let bits = value.to_bits();
        let magnitude = (bits & 0x7fff_ffff) >> Encoder::SHIFT;
        let entry = magnitude.clamp(Encoder::MIN_MAGNITUDE, Encoder::MAX_MAGNITUDE) - Encoder::MIN_MAGNITUDE;
        let sign = if bits >> 31 == 1 { Encoder::ENTRIES } else { 0 };
        let least_code = self.least_code[entry as usize + sign];
        if value.is_nan() { 0 } else { (least_code + i32::from(self.thresholds[least_code as usize] < value)) as u8 }
    }

    /// Returns the thresholds between codes.
    pub fn thresholds(&self) -> &[f32; 256] {
        &self.thresholds
    }

    /// Returns the table of least codes.
    pub fn least_code(&self) -> &[i32] {
        &self.least_code
    }
}

vectorized_dot! {
    /// Computes `to` = `map[codes]` · scale.
    pub(super) fn from_codebook<D>(map: &[f32; 256], codes: &[u8], scale: f32, to: &mut [f32]) {
        assert!(codes.len() == to.len());
        let lanes = D::V::LANES;
        let full_end = to.len() - to.len() % lanes;
        for at in (0..full_end).step_by(lanes) {
            // SAFETY: `lanes` elements from `at` on are inside both.
            unsafe { (D::V::from_codebook(map, codes.as_ptr().add(at)) * D::V::splat(scale)).store(to.as_mut_ptr().add(at)) };
        }
        for (to, &code) in to[full_end..].iter_mut().zip(&codes[full_end..]) {
            *to = map[usize::from(code)] * scale;
        }
    }
}

vectorized_dot! {
    /// Encodes `from`, scaled by its largest magnitude, which is returned.
    pub(super) fn encode_by_codebook<D>(encoder: &Encoder, from: &[f32], codes: &mut [u8]) -> f32 {
        assert!(codes.len() == from.len());
        let scale = max_abs(from);
        let inverse = formats::inverse(scale);
        let lanes = D::V::LANES;
        let full_end = from.len() - from.len() % lanes;
        for at in (0..full_end).step_by(lanes) {
            // SAFETY: `lanes` elements from `at` on are inside both.
            unsafe {
                let value = D::V::load(from.as_ptr().add(at)) * D::V::splat(inverse);
                value.store_codes(encoder, codes.as_mut_ptr().add(at));
            }
        }
        for (code, x) in codes[full_end..].iter_mut().zip(&from[full_end..]) {
            *code = encoder.code(x * inverse);
        }
        scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
