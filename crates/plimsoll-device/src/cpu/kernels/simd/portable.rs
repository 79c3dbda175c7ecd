//! Vectors for any processor: arrays of numbers that the compiler may vectorize.

use super::{Float, PairVector, QuantizedVector, Vector};
use std::ops::{Add, Div, Mul, Sub};

/// A vector for any processor: an array of N numbers.
#[derive(Clone, Copy)]
pub struct Lanes<T, const N: usize>([T; N]);

impl<T: Float, const N: usize> Lanes<T, N> {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(T, T) -> T) -> Self {
        let mut out = self.0;
        for lane in 0..N {
            out[lane] = f(self.0[lane], other.0[lane]);
        }
        Lanes(out)
    }
}

macro_rules! lanes_operator {
    ($trait:ident, $method:ident, $op:tt) => {
        impl<T: Float, const N: usize> $trait for Lanes<T, N> {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                self.zip(other, #[inline(always)] |a, b| a $op b)
            }
        }
    };
}
lanes_operator!(Add, add, +);
lanes_operator!(Sub, sub, -);
lanes_operator!(Mul, mul, *);
lanes_operator!(Div, div, /);

impl<T: Float, const N: usize> Vector<T> for Lanes<T, N> {
    const LANES: usize = N;
    const PANEL_VECTORS: usize = 2;
    #[inline(always)]
    fn splat(x: T) -> Self {
        Lanes([x; N])
    }
    #[inline(always)]
    unsafe fn load(from: *const T) -> Self {
        // SAFETY: the caller's promise; an array of T has T's alignment.
        Lanes(unsafe { from.cast::<[T; N]>().read() })
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut T) {
        // SAFETY: the caller's promise; an array of T has T's alignment.
        unsafe { to.cast::<[T; N]>().write(self.0) }
    }
    #[inline(always)]
    unsafe fn load_part(from: *const T, count: usize, fill: Self) -> Self {
        let mut out = fill;
        for lane in 0..count.min(N) {
            // SAFETY: the caller's promise.
            out.0[lane] = unsafe { *from.add(lane) };
        }
        out
    }
    #[inline(always)]
    unsafe fn store_part(self, to: *mut T, count: usize) {
        for lane in 0..count.min(N) {
            // SAFETY: the caller's promise.
            unsafe { *to.add(lane) = self.0[lane] };
        }
    }
    #[inline(always)]
    fn mul_add(self, factor: Self, term: Self) -> Self {
        // Not fused: without the instruction a fused operation is a library call of a hundred times the cost.
        self * factor + term
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(
            other,
            #[inline(always)]
            |a, b| if a > b { a } else { b },
        )
    }
    #[inline(always)]
    fn sqrt(self) -> Self {
        self.zip(
            self,
            #[inline(always)]
            |a, _| a.sqrt(),
        )
    }
    #[inline(always)]
    fn exp(self) -> Self {
        self.zip(
            self,
            #[inline(always)]
            |a, _| a.exp(),
        )
    }
    #[inline(always)]
    fn select_le(self, other: Self, yes: Self, no: Self) -> Self {
        let mut out = no.0;
        for lane in 0..N {
            if self.0[lane] <= other.0[lane] {
                out[lane] = yes.0[lane];
            }
        }
        Lanes(out)
    }
    #[inline(always)]
    fn swap_lanes(self, other: Self, bit: usize) -> (Self, Self) {
        let (mut a, mut b) = (self.0, other.0);
        for lane in 0..N {
            if lane & bit != 0 {
                std::mem::swap(&mut a[lane], &mut b[lane - bit]);
            }
        }
        (Lanes(a), Lanes(b))
    }
    #[inline(always)]
    fn sum(self) -> T {
        let mut out = self.0;
        let mut width = N / 2;
        while width > 0 {
            for lane in 0..width {
                out[lane] += out[lane + width];
            }
            width /= 2;
        }
        out[0]
    }
    #[inline(always)]
    fn max_lane(self) -> T {
        let mut out = self.0[0];
        for lane in 1..N {
            out = if out > self.0[lane] { out } else { self.0[lane] };
        }
        out
    }
}

impl<const N: usize> QuantizedVector for Lanes<f32, N> {}

impl<const N: usize> PairVector for Lanes<f32, N> {
    #[inline(always)]
    fn low(self) -> Self {
        Lanes(self.0.map(|x| f32::from_bits(x.to_bits() << 16)))
    }
    #[inline(always)]
    fn high(self) -> Self {
        Lanes(self.0.map(|x| f32::from_bits(x.to_bits() & 0xffff_0000)))
    }
}
