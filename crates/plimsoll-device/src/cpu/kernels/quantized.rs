//! Quantization and dequantization of frozen matrices in 8 and 4 bits.
//!
//! `plimsoll_program::formats` defines the formats and the exact arithmetic. These kernels process many numbers at a time and
//! give the same bits.

use super::simd::{Dot, Encoder, QuantizedVector, Real, Vector, vectorized_dot};
use crate::cpu::pool::{Pool, Shared};
use half::bf16;
use plimsoll_core::DType;
use plimsoll_program::formats::{self, NF4_BLOCK, NF4_GROUP, NF4_PIECE};
use std::ops::Range;

/// Number of elements of an nf4 block: those that share a scale.
const NF4_BLOCK_ELEMENTS: usize = NF4_BLOCK as usize;
/// Number of blocks of an nf4 group: those whose scales are quantized together.
const NF4_GROUP_BLOCKS: usize = NF4_GROUP as usize;
/// Number of elements of an nf4 group: those of all its blocks together.
const NF4_GROUP_ELEMENTS: usize = NF4_PIECE as usize;
/// Smallest number of elements that one task of the thread pool processes.
const MIN_TASK_ELEMENTS: usize = 16384;

/// A quantized matrix, or whole blocks of one. `B` is a slice of bytes (codes), and `F` a slice of f32 (scales).
#[derive(Debug)]
pub enum QuantizedData<B, F> {
    /// 8 bits, with a scale per row.
    Int8 {
        /// Codes in two's complement, `[elements]`.
        codes: B,
        /// Scale of each row, `[rows]`.
        scales: F,
    },
    /// 4 bits, with 8-bit scales.
    Nf4 {
        /// Codes, two per byte, `[⌈elements / 2⌉]`. The first of a pair is in the upper half of the byte.
        codes: B,
        /// 8-bit code of the scale of each block of 64 elements.
        scales: B,
        /// Two numbers for each group of 256 scales: their mean, and their largest distance from it.
        groups: F,
    },
}

/// Quantizes the matrix `from`, with rows of `columns` elements, and writes the result to `into`.
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

/// Quantizes a row to 8 bits and returns its scale. Codes and scale equal those of `formats::int8_row` bit for bit.
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
    /// Returns the largest magnitude of the numbers; NaN is ignored.
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
    /// Computes `codes` = `from` · `inverse`, rounded to nearest even and limited to ±127.
    fn int8_codes<D>(from: &[f32], inverse: f32, codes: &mut [u8]) {
        for (code, x) in codes.iter_mut().zip(from) {
            *code = (x * inverse).round_ties_even().clamp(-formats::INT8_MAX, formats::INT8_MAX) as i8 as u8;
        }
    }
}

vectorized_dot! {
    /// Computes `to` = `codes` · `scale`.
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
    /// Quantizes a whole block to 4 bits and returns its scale. Codes and scale equal those of `formats::nf4_block` bit
    /// for bit.
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
    /// Dequantizes the blocks with the indices `blocks` into `to`. `codes` are those of these blocks only; `scales` and
    /// `groups` are those of the whole matrix.
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
    /// Divides `from` by its largest magnitude, and encodes the quotients into `codes`. Returns that magnitude, the
    /// scale.
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
