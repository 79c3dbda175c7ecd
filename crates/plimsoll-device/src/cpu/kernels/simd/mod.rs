//! Vector types and the number types of tensors.
//!
//! - [`Real`] is a type that tensors are stored in, [`Float`] a type that kernels compute in.
//! - [`Vector`] is a vector of floats, in three widths (`portable`, `x86`).
//! - `vectorized!` compiles a function for each width and calls the widest one that the processor supports (`dispatch`).
//!
//! Kernels are written once, over `T: Real` and `V: Vector<T::Wide>`. Reading widens, which is exact; writing rounds once, to
//! nearest even. `PLIMSOLL_VECTORS` (`portable`, `avx2`, `avx512`) restricts the choice, to reproduce the bits of another
//! machine or for tests.

mod access;
mod dispatch;
mod elements;
mod encoder;
mod exp;
mod portable;
#[cfg(test)]
mod tests;
mod transpose;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use access::{get, get_or, prefetch, put, strips};
pub use dispatch::{SimdLevel, simd_level};
pub(crate) use dispatch::{vectorized, vectorized_dot};
pub use elements::to_odd;
pub use encoder::Encoder;
pub use portable::Lanes;
pub use transpose::{transpose, transpose_bits};
#[cfg(target_arch = "x86_64")]
pub use x86::NativeDot;
/// The method to multiply pairs of bf16 on processors other than x86: in f32, without a bf16 instruction.
#[cfg(not(target_arch = "x86_64"))]
pub type NativeDot = WidenedDot<Lanes<f32, 8>>;

use bytemuck::Pod;
use half::bf16;
use plimsoll_core::DType;
use plimsoll_program::formats;
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// A type that tensors are stored in: `f32`, `bf16`, or `f64` for the reference executor of the tests.
pub trait Real: Pod + Default + PartialOrd + Send + Sync + Debug {
    /// Type in which kernels compute with these numbers, and in which sums, statistics and master weights are stored.
    type Wide: Float;
    /// The same type as a value, as plans name it.
    const DTYPE: DType;
    /// Whether the type is its own wide type.
    const IS_WIDE: bool;
    /// Zero.
    const ZERO: Self;
    /// Returns the nearest number to `x`.
    fn from_f64(x: f64) -> Self;
    /// Converts the number to f64, exactly.
    fn to_f64(self) -> f64;
    /// Converts the number to the wide type, exactly.
    fn widen(self) -> Self::Wide;
    /// Returns the nearest number to `x`, ties to even.
    fn narrow(x: Self::Wide) -> Self;
    /// Reads a vector of numbers and widens them.
    ///
    /// # Safety
    /// The promises of `Vector::load` hold.
    unsafe fn load<V: Vector<Self::Wide>>(from: *const Self) -> V;
    /// Writes all lanes of a vector, rounded to this type.
    ///
    /// # Safety
    /// The promises of `Vector::store` hold.
    unsafe fn store<V: Vector<Self::Wide>>(value: V, to: *mut Self);
    /// Reads `count` numbers into the first lanes of a vector, and widens them. The other lanes come from `fill`.
    ///
    /// # Safety
    /// The promises of `Vector::load_part` hold.
    unsafe fn load_part<V: Vector<Self::Wide>>(from: *const Self, count: usize, fill: V) -> V;
    /// Writes the first `count` lanes of a vector, rounded to this type.
    ///
    /// # Safety
    /// The promises of `Vector::store_part` hold.
    unsafe fn store_part<V: Vector<Self::Wide>>(value: V, to: *mut Self, count: usize);
}

/// A float that kernels compute in: `f32`, or `f64` for the reference executor of the tests.
pub trait Float:
    Real<Wide = Self>
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
{
    /// Vectors for any processor.
    type Portable: Vector<Self>;
    /// Vectors of 256 bits with fused multiply-add.
    type Avx2: Vector<Self>;
    /// Vectors of 512 bits.
    type Avx512: Vector<Self>;
    /// One.
    const ONE: Self;
    /// Lowest finite number.
    const LOWEST: Self;
    /// Negative infinity.
    const MINUS_INFINITY: Self;
    /// Returns the square root.
    fn sqrt(self) -> Self;
    /// Returns e to the power of `self`, by the same algorithm as the vectors.
    fn exp(self) -> Self;
    /// Returns the natural logarithm.
    fn ln(self) -> Self;
    /// Returns `self` to the power of `exponent`.
    fn powf(self, exponent: Self) -> Self;
    /// Returns the sine of radians.
    fn sin(self) -> Self;
    /// Returns the cosine of radians.
    fn cos(self) -> Self;
}

/// A vector of `LANES` numbers.
///
/// The AVX types use instructions that some processors lack. Values of these types are created only in functions under
/// `vectorized!`, which checks the processor first; their `SAFETY` comments call this "the dispatcher". The module is
/// private for that reason.
pub trait Vector<T: Float>:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// Number of numbers in a vector.
    const LANES: usize;
    /// Number of vectors in a row of a matrix-product tile, chosen to fill the registers.
    const PANEL_VECTORS: usize;
    /// Returns a vector with `x` in all lanes.
    fn splat(x: T) -> Self;
    /// Reads `LANES` numbers.
    ///
    /// # Safety
    /// `from` must be readable for `LANES` numbers; alignment does not matter beyond that of `T`.
    unsafe fn load(from: *const T) -> Self;
    /// Writes all lanes.
    ///
    /// # Safety
    /// `to` must be writable for `LANES` numbers.
    unsafe fn store(self, to: *mut T);
    /// Reads `count` (`<= LANES`) numbers; the other lanes come from `fill`.
    ///
    /// # Safety
    /// `from` must be readable for `count` numbers.
    unsafe fn load_part(from: *const T, count: usize, fill: Self) -> Self;
    /// Writes the first `count` (`<= LANES`) lanes.
    ///
    /// # Safety
    /// `to` must be writable for `count` numbers.
    unsafe fn store_part(self, to: *mut T, count: usize);
    /// Reads `LANES` numbers of bf16.
    ///
    /// # Safety
    /// The promises of `load` hold.
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::load_bf16_part(from, Self::LANES, Self::splat(T::ZERO)) }
    }
    /// Writes all lanes, rounded to bf16: to nearest even, subnormals kept, NaN quiet.
    ///
    /// # Safety
    /// The promises of `store` hold.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { self.store_bf16_part(to, Self::LANES) }
    }
    /// Reads `count` numbers of bf16; the other lanes come from `fill`.
    ///
    /// # Safety
    /// The promises of `load_part` hold.
    #[inline(always)]
    unsafe fn load_bf16_part(from: *const bf16, count: usize, fill: Self) -> Self {
        let mut lanes = [T::ZERO; MAX_LANES];
        // SAFETY: `MAX_LANES` suffices for every vector; the caller's promise.
        unsafe {
            fill.store(lanes.as_mut_ptr());
            widen_lanes(std::slice::from_raw_parts(from, count), &mut lanes);
            Self::load(lanes.as_ptr())
        }
    }
    /// Writes the first `count` lanes, rounded to bf16.
    ///
    /// # Safety
    /// The promises of `store_part` hold.
    #[inline(always)]
    unsafe fn store_bf16_part(self, to: *mut bf16, count: usize) {
        let mut lanes = [T::ZERO; MAX_LANES];
        // SAFETY: `MAX_LANES` suffices for every vector; the caller's promise.
        unsafe {
            self.store(lanes.as_mut_ptr());
            narrow_lanes(&lanes, std::slice::from_raw_parts_mut(to, count));
        }
    }
    /// Returns `self * factor + term`, fused if the processor supports it.
    fn mul_add(self, factor: Self, term: Self) -> Self;
    /// Returns the larger number of each lane, or that of `other` if one of the two is NaN.
    fn max(self, other: Self) -> Self;
    /// Returns the square root of each lane.
    fn sqrt(self) -> Self;
    /// Returns e to the power of each lane: within 2 units in the last place for f32, infinity above the range, 0 below
    /// it, NaN for NaN.
    fn exp(self) -> Self;
    /// Returns `yes` in lanes where `self <= other`, else `no`.
    fn select_le(self, other: Self, yes: Self, no: Self) -> Self;
    /// Swaps each lane of `self` that has `bit` in its index with the lane of `other` that lies `bit` below. A
    /// transposition consists of such steps.
    fn swap_lanes(self, other: Self, bit: usize) -> (Self, Self);
    /// Returns the sum of all lanes, in an order fixed by the type.
    fn sum(self) -> T;
    /// Returns the largest lane.
    fn max_lane(self) -> T;
}

/// Converts numbers of bf16 and writes them to the first lanes. Not inlined, because parts of vectors are rare and the
/// code is long.
#[inline(never)]
fn widen_lanes<T: Float>(from: &[bf16], lanes: &mut [T; MAX_LANES]) {
    for (lane, number) in lanes.iter_mut().zip(from) {
        *lane = T::from_f64(number.to_f64());
    }
}

/// Rounds the first `to.len()` lanes to bf16. Not inlined, because parts of vectors are rare and the code is long.
#[inline(never)]
fn narrow_lanes<T: Float>(lanes: &[T; MAX_LANES], to: &mut [bf16]) {
    for (number, lane) in to.iter_mut().zip(lanes) {
        *number = bf16::from_f32(lane.to_f64() as f32);
    }
}

/// A vector of 32-bit lanes, each of which may hold the bits of two bf16 numbers, the first in the lower half.
pub trait PairVector: Vector<f32> {
    /// Returns the first number of each lane's pair, as f32.
    fn low(self) -> Self;
    /// Returns the second number of each lane's pair, as f32.
    fn high(self) -> Self;
}

/// A vector that can be decoded from, and encoded to, quantized numbers of 4 or 8 bits (`plimsoll_program::formats`).
pub trait QuantizedVector: Vector<f32> {
    /// Decodes `LANES` int8 numbers.
    ///
    /// # Safety
    /// `codes` must be readable for `LANES` bytes.
    #[inline(always)]
    unsafe fn from_int8(codes: *const u8) -> Self {
        let mut lanes = [0.0; MAX_LANES];
        for (at, lane) in lanes.iter_mut().enumerate().take(Self::LANES) {
            // SAFETY: the caller's promise.
            *lane = f32::from(unsafe { *codes.add(at) } as i8);
        }
        // SAFETY: `MAX_LANES` suffices for every vector.
        unsafe { Self::load(lanes.as_ptr()) }
    }
    /// Decodes `LANES` nf4 values, two per byte.
    ///
    /// # Safety
    /// `codes` must be readable for `LANES / 2` bytes.
    #[inline(always)]
    unsafe fn from_nf4(codes: *const u8) -> Self {
        let mut lanes = [0.0; MAX_LANES];
        for at in 0..Self::LANES / 2 {
            // SAFETY: the caller's promise.
            let byte = unsafe { *codes.add(at) };
            lanes[2 * at] = formats::NF4[usize::from(byte >> 4)];
            lanes[2 * at + 1] = formats::NF4[usize::from(byte & 15)];
        }
        // SAFETY: `MAX_LANES` suffices for every vector.
        unsafe { Self::load(lanes.as_ptr()) }
    }
    /// Returns the numbers that `map` gives for `LANES` codes.
    ///
    /// # Safety
    /// `codes` must be readable for `LANES` bytes.
    #[inline(always)]
    unsafe fn from_codebook(map: &[f32; 256], codes: *const u8) -> Self {
        let mut lanes = [0.0; MAX_LANES];
        for (at, lane) in lanes.iter_mut().enumerate().take(Self::LANES) {
            // SAFETY: the caller's promise.
            *lane = map[usize::from(unsafe { *codes.add(at) })];
        }
        // SAFETY: `MAX_LANES` suffices for every vector.
        unsafe { Self::load(lanes.as_ptr()) }
    }
    /// Encodes each lane to a byte, and writes the bytes.
    ///
    /// # Safety
    /// `to` must be writable for `LANES` bytes.
    #[inline(always)]
    unsafe fn store_codes(self, encoder: &Encoder, to: *mut u8) {
        let mut lanes = [0.0; MAX_LANES];
        // SAFETY: `MAX_LANES` suffices for every vector; the caller's promise.
        unsafe {
            self.store(lanes.as_mut_ptr());
            for (at, &lane) in lanes.iter().enumerate().take(Self::LANES) {
                *to.add(at) = encoder.code(lane);
            }
        }
    }
}

/// A method to multiply pairs of bf16 numbers, two in each 32-bit lane of a vector.
pub trait Dot {
    /// Vectors that hold the pairs and the sums.
    type V: PairVector + QuantizedVector;
    /// Returns sum + a.low · b.low + a.high · b.high in each lane.
    fn dot(a: Self::V, b: Self::V, sum: Self::V) -> Self::V;
}

/// The method to multiply pairs of bf16 in f32, for processors without a bf16 instruction.
pub struct WidenedDot<V>(std::marker::PhantomData<V>);

impl<V: PairVector + QuantizedVector> Dot for WidenedDot<V> {
    type V = V;
    #[inline(always)]
    fn dot(a: V, b: V, sum: V) -> V {
        a.high().mul_add(b.high(), a.low().mul_add(b.low(), sum))
    }
}

/// Largest number of lanes that a vector of any type has.
const MAX_LANES: usize = 16;
