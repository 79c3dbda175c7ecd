//! Vectors of AVX2 and AVX-512.
//!
//! `SAFETY` throughout: values of these types exist only where the dispatcher has checked the processor (see `Vector`), and
//! pointers satisfy the caller's promise.

use super::exp::{EXP_MAX, EXP_MIN, EXP_TERMS, LN2_HIGH, LN2_LOW};
use super::{Dot, Encoder, PairVector, QuantizedVector, Vector};
use half::bf16;
use plimsoll_program::formats;
use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

macro_rules! operator {
    ($name:ident, $trait:ident, $method:ident, $intrinsic:ident) => {
        impl $trait for $name {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: the dispatcher.
                $name(unsafe { $intrinsic(self.0, other.0) })
            }
        }
    };
}

macro_rules! vector {
    ($name:ident, $T:ident, $raw:ident, $lanes:literal, $panel:literal,
     $set:ident, $load:ident, $store:ident, $add:ident, $sub:ident, $mul:ident, $div:ident,
     $fma:ident, $max:ident, $sqrt:ident,
     |$from:ident, $count:ident, $fill:ident| $load_part:expr,
     |$to:ident, $places:ident, $value:ident| $store_part:expr,
     |$a:ident, $b:ident, $yes:ident, $no:ident| $select_le:expr,
     |$low:ident, $high:ident, $bit:ident| $swap:expr,
     |$s:ident| $sum:expr, |$l:ident| $largest:expr, |$x:ident| $exp:expr
     $(, |$half:ident| $widen:expr, |$half_to:ident, $narrowed:ident| $narrow:expr)?) => {
        /// A vector in one register.
        #[derive(Clone, Copy)]
        pub struct $name($raw);
        operator!($name, Add, add, $add);
        operator!($name, Sub, sub, $sub);
        operator!($name, Mul, mul, $mul);
        operator!($name, Div, div, $div);
        impl Vector<$T> for $name {
            const LANES: usize = $lanes;
            const PANEL_VECTORS: usize = $panel;
            #[inline(always)]
            fn splat(x: $T) -> Self {
                // SAFETY: the dispatcher.
                $name(unsafe { $set(x) })
            }
            #[inline(always)]
            unsafe fn load(from: *const $T) -> Self {
                // SAFETY: the dispatcher; the caller's promise.
                $name(unsafe { $load(from) })
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $T) {
                // SAFETY: the dispatcher; the caller's promise.
                unsafe { $store(to, self.0) }
            }
            #[inline(always)]
            unsafe fn load_part($from: *const $T, $count: usize, $fill: Self) -> Self {
                let $fill = $fill.0;
                // SAFETY: the dispatcher; the caller's promise; lanes masked off are not touched.
                $name(unsafe { $load_part })
            }
            #[inline(always)]
            unsafe fn store_part(self, $to: *mut $T, $places: usize) {
                let $value = self.0;
                // SAFETY: the dispatcher; the caller's promise; lanes masked off are not touched.
                unsafe { $store_part }
            }
            $(
                #[inline(always)]
                unsafe fn load_bf16($half: *const bf16) -> Self {
                    // SAFETY: the dispatcher; the caller's promise.
                    $name(unsafe { $widen })
                }
                #[inline(always)]
                unsafe fn store_bf16(self, $half_to: *mut bf16) {
                    let $narrowed = self.0;
                    // SAFETY: the dispatcher; the caller's promise.
                    unsafe { $narrow }
                }
            )?
            #[inline(always)]
            fn mul_add(self, factor: Self, term: Self) -> Self {
                // SAFETY: the dispatcher.
                $name(unsafe { $fma(self.0, factor.0, term.0) })
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                // SAFETY: the dispatcher.
                $name(unsafe { $max(self.0, other.0) })
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                // SAFETY: the dispatcher.
                $name(unsafe { $sqrt(self.0) })
            }
            #[inline(always)]
            fn exp(self) -> Self {
                let $x = self.0;
                // SAFETY: the dispatcher.
                $name(unsafe { $exp })
            }
            #[inline(always)]
            fn select_le(self, other: Self, yes: Self, no: Self) -> Self {
                let ($a, $b, $yes, $no) = (self.0, other.0, yes.0, no.0);
                // SAFETY: the dispatcher.
                $name(unsafe { $select_le })
            }
            #[inline(always)]
            fn swap_lanes(self, other: Self, $bit: usize) -> (Self, Self) {
                let ($low, $high) = (self.0, other.0);
                // SAFETY: the dispatcher.
                let (a, b) = unsafe { $swap };
                ($name(a), $name(b))
            }
            #[inline(always)]
            fn sum(self) -> $T {
                let $s = self.0;
                // SAFETY: the dispatcher.
                unsafe { $sum }
            }
            #[inline(always)]
            fn max_lane(self) -> $T {
                let $l = self.0;
                // SAFETY: the dispatcher.
                unsafe { $largest }
            }
        }
    };
}

vector!(
    F32x16,
    f32,
    __m512,
    16,
    4,
    _mm512_set1_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_add_ps,
    _mm512_sub_ps,
    _mm512_mul_ps,
    _mm512_div_ps,
    _mm512_fmadd_ps,
    _mm512_max_ps,
    _mm512_sqrt_ps,
    |from, count, fill| _mm512_mask_loadu_ps(fill, mask_first16(count), from),
    |to, count, value| _mm512_mask_storeu_ps(to, mask_first16(count), value),
    |a, b, yes, no| _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b), no, yes),
    |a, b, bit| {
        let (first, second) = swap_indices::<16>(bit);
        let first = _mm512_loadu_si512(first.as_ptr().cast());
        let second = _mm512_loadu_si512(second.as_ptr().cast());
        (_mm512_permutex2var_ps(a, first, b), _mm512_permutex2var_ps(a, second, b))
    },
    |x| _mm512_reduce_add_ps(x),
    |x| _mm512_reduce_max_ps(x),
    |x| exp_avx512(x),
    |from| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())))),
    |to, value| _mm256_storeu_si256(to.cast(), bf16_avx512(value))
);
vector!(
    F64x8,
    f64,
    __m512d,
    8,
    4,
    _mm512_set1_pd,
    _mm512_loadu_pd,
    _mm512_storeu_pd,
    _mm512_add_pd,
    _mm512_sub_pd,
    _mm512_mul_pd,
    _mm512_div_pd,
    _mm512_fmadd_pd,
    _mm512_max_pd,
    _mm512_sqrt_pd,
    |from, count, fill| _mm512_mask_loadu_pd(fill, mask_first16(count) as u8, from),
    |to, count, value| _mm512_mask_storeu_pd(to, mask_first16(count) as u8, value),
    |a, b, yes, no| _mm512_mask_blend_pd(_mm512_cmp_pd_mask::<_CMP_LE_OQ>(a, b), no, yes),
    |a, b, bit| {
        let (first, second) = swap_indices::<8>(bit);
        let first = _mm512_cvtepu32_epi64(_mm256_loadu_si256(first.as_ptr().cast()));
        let second = _mm512_cvtepu32_epi64(_mm256_loadu_si256(second.as_ptr().cast()));
        (_mm512_permutex2var_pd(a, first, b), _mm512_permutex2var_pd(a, second, b))
    },
    |x| _mm512_reduce_add_pd(x),
    |x| _mm512_reduce_max_pd(x),
    |x| {
        let mut lanes = [0.0; 8];
        _mm512_storeu_pd(lanes.as_mut_ptr(), x);
        lanes.iter_mut().for_each(|lane| *lane = lane.exp());
        _mm512_loadu_pd(lanes.as_ptr())
    }
);
vector!(
    F32x8,
    f32,
    __m256,
    8,
    2,
    _mm256_set1_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_add_ps,
    _mm256_sub_ps,
    _mm256_mul_ps,
    _mm256_div_ps,
    _mm256_fmadd_ps,
    _mm256_max_ps,
    _mm256_sqrt_ps,
    |from, count, fill| {
        let mask = mask_first8(count);
        _mm256_blendv_ps(fill, _mm256_maskload_ps(from, mask), _mm256_castsi256_ps(mask))
    },
    |to, count, value| _mm256_maskstore_ps(to, mask_first8(count), value),
    |a, b, yes, no| _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LE_OQ>(a, b)),
    |a, b, bit| match bit {
        1 => (
            _mm256_blend_ps::<0b1010_1010>(a, _mm256_moveldup_ps(b)),
            _mm256_blend_ps::<0b0101_0101>(b, _mm256_movehdup_ps(a)),
        ),
        2 => (_mm256_shuffle_ps::<0b01_00_01_00>(a, b), _mm256_shuffle_ps::<0b11_10_11_10>(a, b),),
        _ => (_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b)),
    },
    |x| {
        let mut lanes = [0.0f32; 8];
        _mm256_storeu_ps(lanes.as_mut_ptr(), x);
        let [a, b, c, d, e, f, g, h] = lanes;
        ((a + e) + (c + g)) + ((b + f) + (d + h))
    },
    |x| {
        let mut lanes = [0.0f32; 8];
        _mm256_storeu_ps(lanes.as_mut_ptr(), x);
        lanes.into_iter().fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    },
    |x| exp_avx2(x),
    |from| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())))),
    |to, value| _mm_storeu_si128(to.cast(), bf16_avx2(value))
);
vector!(
    F64x4,
    f64,
    __m256d,
    4,
    2,
    _mm256_set1_pd,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    _mm256_add_pd,
    _mm256_sub_pd,
    _mm256_mul_pd,
    _mm256_div_pd,
    _mm256_fmadd_pd,
    _mm256_max_pd,
    _mm256_sqrt_pd,
    |from, count, fill| {
        let mask = mask_first4(count);
        _mm256_blendv_pd(fill, _mm256_maskload_pd(from, mask), _mm256_castsi256_pd(mask))
    },
    |to, count, value| _mm256_maskstore_pd(to, mask_first4(count), value),
    |a, b, yes, no| _mm256_blendv_pd(no, yes, _mm256_cmp_pd::<_CMP_LE_OQ>(a, b)),
    |a, b, bit| match bit {
        1 => (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b)),
        _ => (_mm256_permute2f128_pd::<0x20>(a, b), _mm256_permute2f128_pd::<0x31>(a, b)),
    },
    |x| {
        let mut lanes = [0.0f64; 4];
        _mm256_storeu_pd(lanes.as_mut_ptr(), x);
        let [a, b, c, d] = lanes;
        (a + c) + (b + d)
    },
    |x| {
        let mut lanes = [0.0f64; 4];
        _mm256_storeu_pd(lanes.as_mut_ptr(), x);
        lanes.into_iter().fold(f64::NEG_INFINITY, |a, b| if a > b { a } else { b })
    },
    |x| {
        let mut lanes = [0.0; 4];
        _mm256_storeu_pd(lanes.as_mut_ptr(), x);
        lanes.iter_mut().for_each(|lane| *lane = lane.exp());
        _mm256_loadu_pd(lanes.as_ptr())
    }
);

impl PairVector for F32x16 {
    #[inline(always)]
    fn low(self) -> Self {
        // SAFETY: the dispatcher.
        F32x16(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_castps_si512(self.0))) })
    }
    #[inline(always)]
    fn high(self) -> Self {
        let mask = 0xffff_0000u32 as i32;
        // SAFETY: the dispatcher.
        F32x16(unsafe { _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(self.0), _mm512_set1_epi32(mask))) })
    }
}

impl PairVector for F32x8 {
    #[inline(always)]
    fn low(self) -> Self {
        // SAFETY: the dispatcher.
        F32x8(unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_castps_si256(self.0))) })
    }
    #[inline(always)]
    fn high(self) -> Self {
        let mask = 0xffff_0000u32 as i32;
        // SAFETY: the dispatcher.
        F32x8(unsafe { _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(self.0), _mm256_set1_epi32(mask))) })
    }
}

impl QuantizedVector for F32x8 {}

impl QuantizedVector for F32x16 {
    #[inline(always)]
    unsafe fn from_int8(codes: *const u8) -> Self {
        // SAFETY: the dispatcher; the caller's promise.
        F32x16(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes.cast()))) })
    }
    #[inline(always)]
    unsafe fn from_nf4(codes: *const u8) -> Self {
        // SAFETY: the dispatcher; the caller's promise; the table has 16 entries.
        F32x16(unsafe {
            // Spreads each byte over 64 bits: its upper half to the lower 32 bits, its lower half to the upper ones.
            let bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(codes.cast()));
            let apart = _mm512_or_si512(_mm512_srli_epi64::<4>(bytes), _mm512_slli_epi64::<32>(bytes));
            let index = _mm512_and_si512(apart, _mm512_set1_epi32(15));
            _mm512_permutexvar_ps(index, _mm512_loadu_ps(formats::NF4.as_ptr()))
        })
    }
    #[inline(always)]
    unsafe fn from_codebook(map: &[f32; 256], codes: *const u8) -> Self {
        // SAFETY: the dispatcher; the caller's promise; a byte is inside the table.
        F32x16(unsafe {
            let index = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.cast()));
            _mm512_i32gather_ps::<4>(index, map.as_ptr())
        })
    }
    #[inline(always)]
    unsafe fn store_codes(self, encoder: &Encoder, to: *mut u8) {
        assert!(encoder.least_code().len() == 2 * Encoder::ENTRIES);
        // SAFETY: the dispatcher; the caller's promise; entries are clamped to the table, and the table holds valid codes.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let magnitude =
                _mm512_srli_epi32::<{ Encoder::SHIFT }>(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fff_ffff)));
            let entry = _mm512_max_epu32(magnitude, _mm512_set1_epi32(Encoder::MIN_MAGNITUDE as i32));
            let entry = _mm512_min_epu32(entry, _mm512_set1_epi32(Encoder::MAX_MAGNITUDE as i32));
            let entry = _mm512_sub_epi32(entry, _mm512_set1_epi32(Encoder::MIN_MAGNITUDE as i32));
            let negative = _mm512_cmplt_epi32_mask(bits, _mm512_setzero_si512());
            let entry = _mm512_mask_add_epi32(entry, negative, entry, _mm512_set1_epi32(Encoder::ENTRIES as i32));
            let least = _mm512_i32gather_epi32::<4>(entry, encoder.least_code().as_ptr());
            let next = _mm512_i32gather_ps::<4>(least, encoder.thresholds().as_ptr());
            let above = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(next, self.0);
            let code = _mm512_mask_add_epi32(least, above, least, _mm512_set1_epi32(1));
            let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(self.0, self.0);
            _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_maskz_mov_epi32(number, code)));
        }
    }
}

/// An implementation of [`Dot`] that multiplies pairs of bf16 numbers by the dot-product instruction of AVX-512 BF16.
pub struct NativeDot;

impl Dot for NativeDot {
    type V = F32x16;
    #[inline(always)]
    fn dot(a: F32x16, b: F32x16, sum: F32x16) -> F32x16 {
        // SAFETY: the dispatcher; both are 32 numbers of 16 bits.
        F32x16(unsafe {
            let a = std::mem::transmute::<__m512, __m512bh>(a.0);
            let b = std::mem::transmute::<__m512, __m512bh>(b.0);
            _mm512_dpbf16_ps(sum.0, a, b)
        })
    }
}

/// Returns the lane from which each lane of the two results of [`Vector::swap_lanes`] comes, for the same `bit`. Lanes
/// of the first operand have numbers from 0, those of the second from N.
#[inline(always)]
const fn swap_indices<const N: usize>(bit: usize) -> ([u32; N], [u32; N]) {
    let (mut first, mut second) = ([0; N], [0; N]);
    let mut lane = 0;
    while lane < N {
        let has = lane & bit != 0;
        first[lane] = if has { N + lane - bit } else { lane } as u32;
        second[lane] = if has { N + lane } else { lane + bit } as u32;
        lane += 1;
    }
    (first, second)
}

/// Returns a mask of 16 lanes in which the first `count` are set.
#[inline(always)]
fn mask_first16(count: usize) -> u16 {
    ((1u32 << count) - 1) as u16
}

#[inline(always)]
unsafe fn mask_first8(count: usize) -> __m256i {
    // SAFETY: the dispatcher.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}

#[inline(always)]
unsafe fn mask_first4(count: usize) -> __m256i {
    // SAFETY: the dispatcher.
    unsafe { _mm256_cmpgt_epi64(_mm256_set1_epi64x(count as i64), _mm256_setr_epi64x(0, 1, 2, 3)) }
}

/// Rounds 16 lanes to bf16 like `bf16::from_f32`. Uses integer operations, because the bf16 instruction flushes
/// subnormals to zero and many processors lack it.
#[inline(always)]
unsafe fn bf16_avx512(x: __m512) -> __m256i {
    // SAFETY: the dispatcher.
    unsafe {
        let bits = _mm512_castps_si512(x);
        let high = _mm512_srli_epi32::<16>(bits);
        let odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
        let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        let quiet = _mm512_or_si512(high, _mm512_set1_epi32(0x40));
        let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(_mm512_srli_epi32::<16>(rounded), nan, quiet))
    }
}

/// Rounds 8 lanes to bf16 like [`bf16_avx512`].
#[inline(always)]
unsafe fn bf16_avx2(x: __m256) -> __m128i {
    // SAFETY: the dispatcher.
    unsafe {
        let bits = _mm256_castps_si256(x);
        let high = _mm256_srli_epi32::<16>(bits);
        let odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        let quiet = _mm256_or_si256(high, _mm256_set1_epi32(0x40));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        let halves = _mm256_blendv_epi8(_mm256_srli_epi32::<16>(rounded), quiet, nan);
        _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves))
    }
}

/// Computes `exp_f32` on 16 lanes. The final scaling is one instruction that handles subnormals.
#[inline(always)]
unsafe fn exp_avx512(x: __m512) -> __m512 {
    // SAFETY: the dispatcher.
    unsafe {
        // min and max return their second operand if one is NaN, so NaN is kept.
        let x = _mm512_min_ps(_mm512_set1_ps(EXP_MAX), x);
        let x = _mm512_max_ps(_mm512_set1_ps(EXP_MIN), x);
        let n = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm512_mul_ps(
            x,
            _mm512_set1_ps(std::f32::consts::LOG2_E),
        ));
        let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2_HIGH), x);
        let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2_LOW), r);
        let mut p = _mm512_set1_ps(EXP_TERMS[0]);
        for term in &EXP_TERMS[1..] {
            p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*term));
        }
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0));
        let p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0));
        _mm512_scalef_ps(p, n)
    }
}

/// Computes `exp_f32` on 8 lanes.
#[inline(always)]
unsafe fn exp_avx2(x: __m256) -> __m256 {
    // SAFETY: the dispatcher.
    unsafe {
        // min and max return their second operand if one is NaN, so NaN is kept.
        let x = _mm256_min_ps(_mm256_set1_ps(EXP_MAX), x);
        let x = _mm256_max_ps(_mm256_set1_ps(EXP_MIN), x);
        let n = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_mul_ps(
            x,
            _mm256_set1_ps(std::f32::consts::LOG2_E),
        ));
        let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_HIGH), x);
        let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(LN2_LOW), r);
        let mut p = _mm256_set1_ps(EXP_TERMS[0]);
        for term in &EXP_TERMS[1..] {
            p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(*term));
        }
        let p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0));
        let p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0));
        // Two factors: 2^n alone would overflow before e^x does, or lose the subnormals.
        let n = _mm256_cvtps_epi32(n);
        let half = _mm256_srai_epi32::<1>(n);
        let rest = _mm256_sub_epi32(n, half);
        let bias = _mm256_set1_epi32(127);
        let first = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias)));
        let second = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(rest, bias)));
        _mm256_mul_ps(_mm256_mul_ps(p, first), second)
    }
}
