//! [`Real`] and [`Float`] for f32, f64 and bf16.

use super::exp::exp_f32;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Float, Lanes, Real, Vector};
use half::bf16;
use plimsoll_core::DType;

macro_rules! real {
    ($T:ident, $dtype:ident, $lanes:literal, $avx2:ty, $avx512:ty, $exp:expr) => {
        impl Real for $T {
            type Wide = Self;
            const DTYPE: DType = DType::$dtype;
            const IS_WIDE: bool = true;
            const ZERO: Self = 0.0;
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $T
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn widen(self) -> Self {
                self
            }
            #[inline(always)]
            fn narrow(x: Self) -> Self {
                x
            }
            #[inline(always)]
            unsafe fn load<V: Vector<Self>>(from: *const Self) -> V {
                // SAFETY: the caller's promise.
                unsafe { V::load(from) }
            }
            #[inline(always)]
            unsafe fn store<V: Vector<Self>>(value: V, to: *mut Self) {
                // SAFETY: the caller's promise.
                unsafe { value.store(to) }
            }
            #[inline(always)]
            unsafe fn load_part<V: Vector<Self>>(from: *const Self, count: usize, fill: V) -> V {
                // SAFETY: the caller's promise.
                unsafe { V::load_part(from, count, fill) }
            }
            #[inline(always)]
            unsafe fn store_part<V: Vector<Self>>(value: V, to: *mut Self, count: usize) {
                // SAFETY: the caller's promise.
                unsafe { value.store_part(to, count) }
            }
        }
        impl Float for $T {
            type Portable = Lanes<$T, $lanes>;
            #[cfg(target_arch = "x86_64")]
            type Avx2 = $avx2;
            #[cfg(target_arch = "x86_64")]
            type Avx512 = $avx512;
            #[cfg(not(target_arch = "x86_64"))]
            type Avx2 = Lanes<$T, $lanes>;
            #[cfg(not(target_arch = "x86_64"))]
            type Avx512 = Lanes<$T, $lanes>;
            const ONE: Self = 1.0;
            const LOWEST: Self = $T::MIN;
            const MINUS_INFINITY: Self = $T::NEG_INFINITY;
            #[inline(always)]
            fn sqrt(self) -> Self {
                self.sqrt()
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                self.ln()
            }
            fn powf(self, exponent: Self) -> Self {
                self.powf(exponent)
            }
            fn sin(self) -> Self {
                self.sin()
            }
            fn cos(self) -> Self {
                self.cos()
            }
        }
    };
}

real!(f32, F32, 8, x86::F32x8, x86::F32x16, exp_f32);
real!(f64, F64, 4, x86::F64x4, x86::F64x8, f64::exp);

impl Real for bf16 {
    type Wide = f32;
    const DTYPE: DType = DType::Bf16;
    const IS_WIDE: bool = false;
    const ZERO: Self = bf16::ZERO;
    fn from_f64(x: f64) -> Self {
        bf16::from_f32(to_odd(x))
    }
    #[inline(always)]
    fn to_f64(self) -> f64 {
        f64::from(self.widen())
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        // Unlike `to_f32`, this does not quiet NaNs, which would cost a comparison per number.
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        bf16::from_f32(x)
    }
    #[inline(always)]
    unsafe fn load<V: Vector<f32>>(from: *const Self) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16(from) }
    }
    #[inline(always)]
    unsafe fn store<V: Vector<f32>>(value: V, to: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe { value.store_bf16(to) }
    }
    #[inline(always)]
    unsafe fn load_part<V: Vector<f32>>(from: *const Self, count: usize, fill: V) -> V {
        // SAFETY: the caller's promise.
        unsafe { V::load_bf16_part(from, count, fill) }
    }
    #[inline(always)]
    unsafe fn store_part<V: Vector<f32>>(value: V, to: *mut Self, count: usize) {
        // SAFETY: the caller's promise.
        unsafe { value.store_bf16_part(to, count) }
    }
}

/// Rounds `x` to odd: if it lies between two f32 numbers, to the one whose last bit is 1. Rounding the result further,
/// to 16 bits, then gives the same as rounding `x` once (Boldo and Melquiond, "When double rounding is odd").
/// Conversions from f64 by the crate `half` lack this property, because they drop the low half of `x`.
#[inline]
pub fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    if f64::from(nearest) == x || x.is_nan() {
        return nearest;
    }
    let toward_zero = nearest.to_bits() - u32::from(f64::from(nearest).abs() > x.abs());
    f32::from_bits(toward_zero | 1)
}
