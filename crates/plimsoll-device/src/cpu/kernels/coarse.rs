//! Frozen matrices in 8 or 4 bit, into these formats and back. What they hold, and the exact arithmetic,
//! is in `plimsoll_program::formats`; here it is done many numbers at a time, with the same bits.

use super::simd::{CoarseVector, Dot, Real, Vector, by_level};
use crate::cpu::pool::{Pool, Shared};
use half::bf16;
use plimsoll_core::DType;
use plimsoll_program::formats::{self, NF4_BLOCK, NF4_GROUP, NF4_PIECE};
use std::ops::Range;

/// Elements of a block.
const BLOCK: usize = NF4_BLOCK as usize;
/// Blocks of a group.
const GROUP: usize = NF4_GROUP as usize;
/// Elements of a group.
const PIECE: usize = NF4_PIECE as usize;
/// Elements below which a task is not worth sharing out.
const LEAST: usize = 16384;

/// A matrix in a coarse format, or whole blocks of one.
#[derive(Debug)]
pub enum Coarse<B, F> {
    /// A scale for each row.
    Int8 {
        /// `[elements]`, in two's complement.
        codes: B,
        /// `[rows]`.
        scales: F,
    },
    /// 4 bit, with scales of 8 bit.
    Nf4 {
        /// `[⌈elements / 2⌉]`, the first of a pair in the upper half.
        codes: B,
        /// One for each block of 64 elements.
        scales: B,
        /// Mean and largest distance of each 256 scales.
        groups: F,
    },
}

/// `into` = `from`, whose rows have `columns` elements.
pub fn quantise<T: Real>(pool: &Pool, from: &[T], columns: usize, into: Coarse<&mut [u8], &mut [f32]>) {
    match into {
        Coarse::Int8 { codes, scales } => {
            assert!(codes.len() == from.len() && scales.len() * columns == from.len());
            let (codes, rows) = (Shared::new(codes), scales.len());
            let scales = Shared::new(scales);
            pool.split(rows, LEAST.div_ceil(columns), |range, _| {
                for row in range {
                    let part = row * columns..(row + 1) * columns;
                    // SAFETY: rows of one split are disjoint.
                    let (codes, scale) = unsafe { (codes.part(part.clone()), scales.part(row..row + 1)) };
                    scale[0] = int8_row(&from[part], codes);
                }
            });
        }
        Coarse::Nf4 { codes, scales, groups } => {
            let blocks = from.len().div_ceil(BLOCK);
            assert!(codes.len() == from.len().div_ceil(2) && scales.len() == blocks);
            assert!(groups.len() == 2 * blocks.div_ceil(GROUP));
            let total = groups.len() / 2;
            let (codes, scales, groups) = (Shared::new(codes), Shared::new(scales), Shared::new(groups));
            pool.run(total, |group, _| {
                let part = group * PIECE..from.len().min((group + 1) * PIECE);
                let own = group * GROUP..blocks.min((group + 1) * GROUP);
                // SAFETY: a group has codes, scales and numbers of its own; its first element is an even one.
                let (codes, scales, numbers) = unsafe {
                    (
                        codes.part(part.start / 2..part.end.div_ceil(2)),
                        scales.part(own),
                        groups.part(2 * group..2 * group + 2),
                    )
                };
                let mut whole = [0.0; GROUP];
                for ((from, codes), scale) in from[part].chunks(BLOCK).zip(codes.chunks_mut(BLOCK / 2)).zip(&mut whole)
                {
                    let mut block = [0.0; BLOCK];
                    block.iter_mut().zip(from).for_each(|(to, x)| *to = in_f32(*x));
                    *scale = if from.len() == BLOCK {
                        nf4_block(&block, codes)
                    } else {
                        formats::nf4_block(&block[..from.len()], codes)
                    };
                }
                numbers.copy_from_slice(&formats::nf4_group(&whole[..scales.len()], scales));
            });
        }
    }
}

/// `to` = the elements of `from`, each rounded once.
pub fn dequantise<T: Real>(pool: &Pool, from: Coarse<&[u8], &[f32]>, columns: usize, to: &mut [T]) {
    match T::DTYPE {
        DType::F32 => spread::<f32>(pool, &from, columns, bytemuck::cast_slice_mut(to)),
        DType::Bf16 => spread::<bf16>(pool, &from, columns, bytemuck::cast_slice_mut(to)),
        // The formats' numbers are f32.
        _ => match from {
            Coarse::Int8 { codes, scales } => {
                for (i, to) in to.iter_mut().enumerate() {
                    *to = T::of(formats::int8_value(codes[i], scales[i / columns]).into());
                }
            }
            Coarse::Nf4 { codes, scales, groups } => {
                for (i, to) in to.iter_mut().enumerate() {
                    let scale = scale_of(scales, groups, i / BLOCK);
                    *to = T::of(formats::nf4_value(codes[i / 2], i % 2 == 0, scale).into());
                }
            }
        },
    }
}

fn spread<O: Real<Wide = f32>>(pool: &Pool, from: &Coarse<&[u8], &[f32]>, columns: usize, to: &mut [O]) {
    let total = to.len();
    let to = Shared::new(to);
    match *from {
        Coarse::Int8 { codes, scales } => {
            assert!(codes.len() == total && scales.len() * columns == total);
            pool.split(scales.len(), LEAST.div_ceil(columns), |range, _| {
                for row in range {
                    let part = row * columns..(row + 1) * columns;
                    // SAFETY: rows of one split are disjoint.
                    int8_values(&codes[part.clone()], scales[row], unsafe { to.part(part) });
                }
            });
        }
        Coarse::Nf4 { codes, scales, groups } => {
            let blocks = total.div_ceil(BLOCK);
            assert!(codes.len() == total.div_ceil(2) && scales.len() == blocks);
            assert!(groups.len() == 2 * blocks.div_ceil(GROUP));
            pool.split(blocks, LEAST / BLOCK, |range, _| {
                let part = range.start * BLOCK..total.min(range.end * BLOCK);
                let codes = &codes[part.start / 2..part.end.div_ceil(2)];
                // SAFETY: blocks of one split are disjoint.
                nf4_values(codes, scales, groups, range, unsafe { to.part(part) });
            });
        }
    }
}

#[inline(always)]
fn in_f32<T: Real>(x: T) -> f32 {
    x.wide() as f32
}

#[inline(always)]
fn scale_of(scales: &[u8], groups: &[f32], block: usize) -> f32 {
    let group = block / GROUP * 2;
    formats::nf4_scale(scales[block], [groups[group], groups[group + 1]])
}

/// `formats::int8_row`.
fn int8_row<T: Real>(from: &[T], codes: &mut [u8]) -> f32 {
    let mut row = [0.0; 256];
    let mut most = 0.0f32;
    for part in from.chunks(row.len()) {
        row.iter_mut().zip(part).for_each(|(to, x)| *to = in_f32(*x));
        most = most.max(largest(&row[..part.len()]));
    }
    let scale = most / formats::INT8_MOST;
    let inverse = formats::inverse(scale);
    for (part, codes) in from.chunks(row.len()).zip(codes.chunks_mut(row.len())) {
        row.iter_mut().zip(part).for_each(|(to, x)| *to = in_f32(*x));
        int8_codes(&row[..part.len()], inverse, codes);
    }
    scale
}

by_level! {
    fn largest<D>(x: &[f32]) -> f32 {
        let mut most = D::V::splat(0.0);
        let zero = D::V::splat(0.0);
        let mut at = 0;
        while at < x.len() {
            let count = (x.len() - at).min(D::V::LANES);
            // SAFETY: `count` numbers are left.
            let value = unsafe { D::V::load_part(x.as_ptr().add(at), count, zero) };
            // Where they cannot be compared, `most` stays.
            most = value.max(zero - value).max(most);
            at += count;
        }
        most.largest()
    }
}

by_level! {
    fn int8_codes<D>(from: &[f32], inverse: f32, codes: &mut [u8]) {
        for (code, x) in codes.iter_mut().zip(from) {
            *code = (x * inverse).round_ties_even().clamp(-formats::INT8_MOST, formats::INT8_MOST) as i8 as u8;
        }
    }
}

by_level! {
    fn int8_values<D, O>(codes: &[u8], scale: f32, to: &mut [O]) {
        assert!(codes.len() == to.len());
        let lanes = D::V::LANES;
        let whole = to.len() - to.len() % lanes;
        for at in (0..whole).step_by(lanes) {
            // SAFETY: `lanes` elements from `at` on are inside both.
            unsafe { O::store(D::V::of_int8(codes.as_ptr().add(at)) * D::V::splat(scale), to.as_mut_ptr().add(at)) };
        }
        for (to, &code) in to[whole..].iter_mut().zip(&codes[whole..]) {
            *to = O::narrow(formats::int8_value(code, scale));
        }
    }
}

by_level! {
    /// `formats::nf4_block` of a whole block.
    fn nf4_block<D>(from: &[f32; BLOCK], codes: &mut [u8]) -> f32 {
        let scale = largest(from);
        let inverse = formats::inverse(scale);
        let mut counts = [0u8; BLOCK];
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

by_level! {
    /// The elements of `blocks`, whose codes these are; `scales` and `groups` are those of the whole matrix.
    fn nf4_values<D, O>(codes: &[u8], scales: &[u8], groups: &[f32], blocks: Range<usize>, to: &mut [O]) {
        let lanes = D::V::LANES;
        for ((block, codes), to) in blocks.zip(codes.chunks(BLOCK / 2)).zip(to.chunks_mut(BLOCK)) {
            let scale = scale_of(scales, groups, block);
            if to.len() < BLOCK {
                for (i, to) in to.iter_mut().enumerate() {
                    *to = O::narrow(formats::nf4_value(codes[i / 2], i % 2 == 0, scale));
                }
                continue;
            }
            assert!(codes.len() == BLOCK / 2);
            for at in (0..BLOCK).step_by(lanes) {
                // SAFETY: lanes elements from `at` on, and their codes, are inside the block.
                unsafe {
                    let value = D::V::of_nf4(codes.as_ptr().add(at / 2)) * D::V::splat(scale);
                    O::store(value, to.as_mut_ptr().add(at));
                }
            }
        }
    }
}

/// Numbers to the codes of `formats::dynamic_map`, without a search.
pub struct Encoder {
    thresholds: [f32; 256],
    /// For the sign, exponent and first bits of a number: the least code it may have. The next threshold decides.
    least: Vec<i32>,
}

impl Encoder {
    /// Bits of a magnitude that are looked at, from above: its exponent and 7 more. So few numbers share them that no
    /// two thresholds lie between.
    pub const SHIFT: u32 = 16;
    /// Magnitudes below have the code of zero: 2^-25.
    pub const LEAST: u32 = 0x3300;
    /// Those from 1 on have the last code, or the first.
    pub const MOST: u32 = 0x3f80;
    /// Entries for one sign.
    pub const ENTRIES: usize = (Encoder::MOST - Encoder::LEAST + 1) as usize;

    pub fn of(signed: bool) -> &'static Encoder {
        use std::sync::LazyLock;
        static ENCODERS: LazyLock<[Encoder; 2]> = LazyLock::new(|| [Encoder::new(false), Encoder::new(true)]);
        &ENCODERS[usize::from(signed)]
    }

    fn new(signed: bool) -> Encoder {
        let of_map = formats::dynamic_thresholds(signed);
        let mut thresholds = [f32::INFINITY; 256];
        thresholds[..of_map.len()].copy_from_slice(of_map);
        let mut least = vec![0; 2 * Encoder::ENTRIES];
        for entry in 0..Encoder::ENTRIES {
            let first = (Encoder::LEAST + entry as u32) << Encoder::SHIFT;
            let (mut low, mut high) = (f32::from_bits(first), f32::from_bits(first | 0xffff));
            if entry == 0 {
                low = 0.0;
            }
            if entry + 1 == Encoder::ENTRIES {
                high = f32::INFINITY;
            }
            least[entry] = formats::code(of_map, low).into();
            least[Encoder::ENTRIES + entry] = formats::code(of_map, -high).into();
            debug_assert!(formats::code(of_map, high) as i32 - least[entry] <= 1);
        }
        Encoder { thresholds, least }
    }

    /// The code of one number.
    #[inline(always)]
    pub fn code(&self, value: f32) -> u8 {
        let bits = value.to_bits();
        let magnitude = (bits & 0x7fff_ffff) >> Encoder::SHIFT;
        let entry = magnitude.clamp(Encoder::LEAST, Encoder::MOST) - Encoder::LEAST;
        let sign = if bits >> 31 == 1 { Encoder::ENTRIES } else { 0 };
        let least = self.least[entry as usize + sign];
        if value.is_nan() { 0 } else { (least + i32::from(self.thresholds[least as usize] < value)) as u8 }
    }

    pub fn thresholds(&self) -> &[f32; 256] {
        &self.thresholds
    }

    pub fn least(&self) -> &[i32] {
        &self.least
    }
}

by_level! {
    /// `to` = `map[codes]` · scale
    pub(super) fn of_map<D>(map: &[f32; 256], codes: &[u8], scale: f32, to: &mut [f32]) {
        assert!(codes.len() == to.len());
        let lanes = D::V::LANES;
        let whole = to.len() - to.len() % lanes;
        for at in (0..whole).step_by(lanes) {
            // SAFETY: `lanes` elements from `at` on are inside both.
            unsafe { (D::V::of_map(map, codes.as_ptr().add(at)) * D::V::splat(scale)).store(to.as_mut_ptr().add(at)) };
        }
        for (to, &code) in to[whole..].iter_mut().zip(&codes[whole..]) {
            *to = map[usize::from(code)] * scale;
        }
    }
}

by_level! {
    /// The codes of `from` by its largest magnitude, which is the result.
    pub(super) fn to_map<D>(encoder: &Encoder, from: &[f32], codes: &mut [u8]) -> f32 {
        assert!(codes.len() == from.len());
        let scale = largest(from);
        let inverse = formats::inverse(scale);
        let lanes = D::V::LANES;
        let whole = from.len() - from.len() % lanes;
        for at in (0..whole).step_by(lanes) {
            // SAFETY: `lanes` elements from `at` on are inside both.
            unsafe {
                let value = D::V::load(from.as_ptr().add(at)) * D::V::splat(inverse);
                value.to_codes(encoder, codes.as_mut_ptr().add(at));
            }
        }
        for (code, x) in codes[whole..].iter_mut().zip(&from[whole..]) {
            *code = encoder.code(x * inverse);
        }
        scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_without_a_search_are_those_of_the_search() {
        for signed in [false, true] {
            let (encoder, thresholds) = (Encoder::of(signed), formats::dynamic_thresholds(signed));
            // Every 7th pattern of the upper halves, around each of them, and around each threshold.
            let bits = (0..=u16::MAX)
                .step_by(7)
                .flat_map(|high| [0u16, 1, 0xffff].map(|low| u32::from(high) << 16 | u32::from(low)));
            let near = thresholds.iter().flat_map(|t| [t.to_bits() - 1, t.to_bits(), t.to_bits() + 1]);
            let x: Vec<f32> =
                bits.chain(near).map(f32::from_bits).filter(|x| signed || x.is_nan() || *x >= 0.0).collect();
            let mut codes = vec![0; x.len()];
            let many = x.len() / 32 * 32;
            by_lanes(encoder, &x[..many], &mut codes[..many]);
            for (i, &x) in x.iter().enumerate() {
                let want = formats::code(thresholds, x);
                assert_eq!(encoder.code(x), want, "{x:e} signed {signed}");
                assert!(i >= many || codes[i] == want, "{x:e} signed {signed}: {} for {want}", codes[i]);
            }
        }
    }

    by_level! {
        fn by_lanes<D>(encoder: &Encoder, x: &[f32], codes: &mut [u8]) {
            for at in (0..x.len()).step_by(D::V::LANES) {
                // SAFETY: a multiple of all lanes, inside both.
                unsafe { D::V::load(x.as_ptr().add(at)).to_codes(encoder, codes.as_mut_ptr().add(at)) };
            }
        }
    }
}
