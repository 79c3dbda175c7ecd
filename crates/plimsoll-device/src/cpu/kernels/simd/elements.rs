//! [`Real`] and [`Float`] for f32, f64 and bf16.

use super::exp::exp_f32;
#[cfg(target_arch = "x86_64")]
use super::x86;
use super::{Float, Lanes, Real, Vector};
use crate::cpu::kernels::product::{self, Left, Product, Target};
use crate::cpu::kernels::{attention, pairs};
use crate::cpu::pool::Pool;
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
            fn product<O: Real<Wide = Self>>(pool: &Pool, p: Product<Self>, out: &mut [O], scratch: &mut [Self]) {
                product::packed_product(pool, p, out, scratch);
            }
            fn pack_right_operand(from: &[Self], row: usize, count: usize, head: usize, scale: Self, to: &mut [Self]) {
                attention::pack_right_operand(from, row, count, head, scale, to);
            }
            fn remaining_scale(_: Self) -> Self {
                1.0
            }
            fn score(m: usize, n: usize, k: usize, a: *const Self, row: usize, right: *const Self, to: Target<Self>) {
                product::small_product(
                    m,
                    n,
                    k,
                    product::Depth::Whole,
                    Left::rows(a, row),
                    right,
                    attention::QUERIES,
                    to,
                );
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
        bf16::from_f32(crate::cpu::kernels::cast::to_odd(x))
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
    fn product<O: Real<Wide = f32>>(pool: &Pool, p: Product<Self>, out: &mut [O], scratch: &mut [f32]) {
        pairs::product(pool, p, out, scratch);
    }
    fn pack_right_operand(from: &[Self], row: usize, count: usize, head: usize, _: f32, to: &mut [f32]) {
        pairs::pack_right_operand(from, row, count, head, to);
    }
    fn remaining_scale(scale: f32) -> f32 {
        scale
    }
    fn score(m: usize, n: usize, k: usize, a: *const Self, row: usize, right: *const f32, to: Target<f32>) {
        pairs::score(m, n, k, a, row, right, to);
    }
}
