//! Numbers and vectors: the types that tensors are stored in (`Real`), the two floats that kernels
//! compute in (`Float`), vectors of those in three widths (`Vector`), and `vectorised!`, which
//! compiles a function for each width and picks the widest one that the processor has.
//!
//! Kernels are written once, over `T: Real` and `V: Vector<T::Wide>`: reading widens, which is exact,
//! and writing rounds, once, to nearest even. `PLIMSOLL_VECTORS` (`portable`, `avx2`, `avx512`)
//! narrows the choice: to reproduce another machine's bits, or to test.

use super::coarse::Encoder;
use super::product::{self, Left, Product, Target};
use super::{attention, pairs};
use crate::cpu::pool::Pool;
use bytemuck::Pod;
use half::bf16;
use plimsoll_core::DType;
use plimsoll_program::formats;
use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};
use std::sync::OnceLock;

/// A type that tensors are stored in: `f32`, `bf16`, or `f64` for the reference executor of the tests.
pub trait Real: Pod + Default + PartialOrd + Send + Sync + Debug {
    /// What it is computed in, and what sums, statistics and masters are stored in.
    type Wide: Float;
    /// The type's name in plans.
    const DTYPE: DType;
    /// Whether it is its own wide type.
    const IS_WIDE: bool;
    /// 0
    const ZERO: Self;
    /// The nearest number to `x`.
    fn of(x: f64) -> Self;
    /// The same number in 64 bits.
    fn wide(self) -> f64;
    /// The same number in the wide type.
    fn widen(self) -> Self::Wide;
    /// The nearest number to `x`, ties to even.
    fn narrow(x: Self::Wide) -> Self;
    /// Reads `LANES` numbers.
    ///
    /// # Safety
    /// As `Vector::load`.
    unsafe fn load<V: Vector<Self::Wide>>(from: *const Self) -> V;
    /// Writes all lanes, rounded.
    ///
    /// # Safety
    /// As `Vector::store`.
    unsafe fn store<V: Vector<Self::Wide>>(value: V, to: *mut Self);
    /// Reads `count` numbers; the other lanes are those of `fill`.
    ///
    /// # Safety
    /// As `Vector::load_part`.
    unsafe fn load_part<V: Vector<Self::Wide>>(from: *const Self, count: usize, fill: V) -> V;
    /// Writes the first `count` lanes, rounded.
    ///
    /// # Safety
    /// As `Vector::store_part`.
    unsafe fn store_part<V: Vector<Self::Wide>>(value: V, to: *mut Self, count: usize);
    /// `product` for operands of this type, into a result of the same or of the wide one.
    fn product<O: Real<Wide = Self::Wide>>(pool: &Pool, p: Product<Self>, out: &mut [O], scratch: &mut [Self::Wide]);
    /// Attention's right-hand operands: `to[E, Q]` = the first `count` rows of `from`, `row` apart, times `scale`, or,
    /// in a type whose products are of pairs, in pairs and as they are; other lanes become zeros.
    fn lay_out(from: &[Self], row: usize, count: usize, head: usize, scale: Self::Wide, to: &mut [Self::Wide]);
    /// What scores made of such operands are still to be multiplied with, where `scale` was asked for.
    fn rest_of_scale(scale: Self::Wide) -> Self::Wide;
    /// `target[m, n]` = rows of `a` over k · what `lay_out` made, from `right` on, Q apart.
    fn score(
        m: usize,
        n: usize,
        k: usize,
        a: *const Self,
        row: usize,
        right: *const Self::Wide,
        target: Target<Self::Wide>,
    );
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
    /// 1
    const ONE: Self;
    /// The lowest finite number.
    const LOWEST: Self;
    /// Minus infinity.
    const MINUS_INFINITY: Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// e to the power of `self`, by the algorithm of the vectors.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// `self` to the power of `exponent`.
    fn powf(self, exponent: Self) -> Self;
    /// Sine of radians.
    fn sin(self) -> Self;
    /// Cosine of radians.
    fn cos(self) -> Self;
}

/// `LANES` numbers side by side.
///
/// The methods of the AVX types use instructions that not every processor has. Values of these
/// types are made only in functions under `vectorised!`, which asks the processor first; that is
/// what their `SAFETY` comments mean by "the dispatcher". The module is private for that reason.
pub trait Vector<T: Float>:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// How many numbers.
    const LANES: usize;
    /// How many vectors wide the tile of a matrix product is: as many as fill the registers.
    const PANEL: usize;
    /// `x` in all lanes.
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
    /// Reads `count` (`<= LANES`) numbers; the other lanes are those of `fill`.
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
    /// As `load`.
    #[inline(always)]
    unsafe fn load_bf16(from: *const bf16) -> Self {
        // SAFETY: the caller's promise.
        unsafe { Self::load_bf16_part(from, Self::LANES, Self::splat(T::ZERO)) }
    }
    /// Writes all lanes, rounded to bf16: to nearest even, subnormals kept, NaN quiet.
    ///
    /// # Safety
    /// As `store`.
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut bf16) {
        // SAFETY: the caller's promise.
        unsafe { self.store_bf16_part(to, Self::LANES) }
    }
    /// As `load_part`, of bf16.
    ///
    /// # Safety
    /// As `load_part`.
    #[inline(always)]
    unsafe fn load_bf16_part(from: *const bf16, count: usize, fill: Self) -> Self {
        let mut lanes = [T::ZERO; MOST_LANES];
        // SAFETY: no vector has more lanes; the caller's promise.
        unsafe {
            fill.store(lanes.as_mut_ptr());
            for (at, lane) in lanes.iter_mut().enumerate().take(count) {
                *lane = T::of((*from.add(at)).wide());
            }
            Self::load(lanes.as_ptr())
        }
    }
    /// As `store_part`, rounded to bf16.
    ///
    /// # Safety
    /// As `store_part`.
    #[inline(always)]
    unsafe fn store_bf16_part(self, to: *mut bf16, count: usize) {
        let mut lanes = [T::ZERO; MOST_LANES];
        // SAFETY: no vector has more lanes; the caller's promise.
        unsafe {
            self.store(lanes.as_mut_ptr());
            for (at, lane) in lanes.iter().enumerate().take(count) {
                *to.add(at) = bf16::from_f32(lane.wide() as f32);
            }
        }
    }
    /// `self * factor + term`, fused where the processor can.
    fn mul_add(self, factor: Self, term: Self) -> Self;
    /// The larger of each pair; `other` where they cannot be compared.
    fn max(self, other: Self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// e to the power of each lane: within 2 units in the last place for f32, infinity above the range, 0 below it,
    /// NaN for NaN.
    fn exp(self) -> Self;
    /// `yes` where `self <= other`, else `no`.
    fn where_le(self, other: Self, yes: Self, no: Self) -> Self;
    /// Swaps the lanes of `self` whose number has `bit` with those of `other` that lie `bit` below: the step of a
    /// transposition.
    fn swap_lanes(self, other: Self, bit: usize) -> (Self, Self);
    /// The sum of all lanes, in an order fixed by the type.
    fn sum(self) -> T;
    /// The largest lane.
    fn largest(self) -> T;
}

/// Vectors whose lanes may hold the bits of a pair of bf16, the first number in the lower half.
pub trait PairVector: Vector<f32> {
    /// The first number of each pair.
    fn low(self) -> Self;
    /// The second number of each pair.
    fn high(self) -> Self;
}

/// Vectors of numbers that stand in codes of 4 or 8 bit (`plimsoll_program::formats`).
pub trait CoarseVector: Vector<f32> {
    /// `LANES` numbers of 8 bit in two's complement.
    ///
    /// # Safety
    /// `codes` must be readable for `LANES` bytes.
    #[inline(always)]
    unsafe fn of_int8(codes: *const u8) -> Self {
        let mut lanes = [0.0; MOST_LANES];
        for (at, lane) in lanes.iter_mut().enumerate().take(Self::LANES) {
            // SAFETY: the caller's promise.
            *lane = f32::from(unsafe { *codes.add(at) } as i8);
        }
        // SAFETY: no vector has more lanes.
        unsafe { Self::load(lanes.as_ptr()) }
    }
    /// `LANES` values of nf4, two to a byte.
    ///
    /// # Safety
    /// `codes` must be readable for `LANES / 2` bytes.
    #[inline(always)]
    unsafe fn of_nf4(codes: *const u8) -> Self {
        let mut lanes = [0.0; MOST_LANES];
        for at in 0..Self::LANES / 2 {
            // SAFETY: the caller's promise.
            let byte = unsafe { *codes.add(at) };
            lanes[2 * at] = formats::NF4[usize::from(byte >> 4)];
            lanes[2 * at + 1] = formats::NF4[usize::from(byte & 15)];
        }
        // SAFETY: no vector has more lanes.
        unsafe { Self::load(lanes.as_ptr()) }
    }
    /// The entries of a table.
    ///
    /// # Safety
    /// `codes` must be readable for `LANES` bytes.
    #[inline(always)]
    unsafe fn of_map(map: &[f32; 256], codes: *const u8) -> Self {
        let mut lanes = [0.0; MOST_LANES];
        for (at, lane) in lanes.iter_mut().enumerate().take(Self::LANES) {
            // SAFETY: the caller's promise.
            *lane = map[usize::from(unsafe { *codes.add(at) })];
        }
        // SAFETY: no vector has more lanes.
        unsafe { Self::load(lanes.as_ptr()) }
    }
    /// The codes of all lanes.
    ///
    /// # Safety
    /// `to` must be writable for `LANES` bytes.
    #[inline(always)]
    unsafe fn to_codes(self, encoder: &Encoder, to: *mut u8) {
        let mut lanes = [0.0; MOST_LANES];
        // SAFETY: no vector has more lanes; the caller's promise.
        unsafe {
            self.store(lanes.as_mut_ptr());
            for (at, &lane) in lanes.iter().enumerate().take(Self::LANES) {
                *to.add(at) = encoder.code(lane);
            }
        }
    }
}

impl<const N: usize> CoarseVector for Lanes<f32, N> {}

/// A way to multiply pairs of bf16.
pub trait Dot {
    /// The vectors that hold the pairs, and the sums.
    type V: PairVector + CoarseVector;
    /// sum + a.low · b.low + a.high · b.high
    fn dot(a: Self::V, b: Self::V, sum: Self::V) -> Self::V;
}

/// Pairs taken apart and multiplied as f32.
pub struct Widened<V>(std::marker::PhantomData<V>);

impl<V: PairVector + CoarseVector> Dot for Widened<V> {
    type V = V;
    #[inline(always)]
    fn dot(a: V, b: V, sum: V) -> V {
        a.high().mul_add(b.high(), a.low().mul_add(b.low(), sum))
    }
}

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

#[cfg(target_arch = "x86_64")]
pub use x86::Native;
#[cfg(not(target_arch = "x86_64"))]
pub type Native = Widened<Lanes<f32, 8>>;

/// No vector has more lanes.
const MOST_LANES: usize = 16;

/// Which vectors are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Arrays of numbers; whatever the compiler makes of them.
    Portable,
    /// AVX2 and FMA.
    Avx2,
    /// AVX-512 F.
    Avx512,
    /// The same, and AVX-512 BF16 for products of bf16.
    Avx512Bf16,
}

/// The widest vectors of this processor, or fewer if `PLIMSOLL_VECTORS` says so.
pub fn level() -> Level {
    static LEVEL: OnceLock<Level> = OnceLock::new();
    *LEVEL.get_or_init(|| {
        let limit = match std::env::var("PLIMSOLL_VECTORS").as_deref() {
            Ok("portable") => Level::Portable,
            Ok("avx2") => Level::Avx2,
            Ok("avx512") => Level::Avx512,
            _ => Level::Avx512Bf16,
        };
        widest().min(limit)
    })
}

#[cfg(target_arch = "x86_64")]
fn widest() -> Level {
    let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
    let avx512 = avx2 && is_x86_feature_detected!("avx512f");
    match (avx512 && is_x86_feature_detected!("avx512bf16"), avx512, avx2) {
        (true, ..) => Level::Avx512Bf16,
        (_, true, _) => Level::Avx512,
        (.., true) => Level::Avx2,
        _ => Level::Portable,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn widest() -> Level {
    Level::Portable
}

/// Defines `fn name<T: Real>(…)` (or `T: Float`) whose body, written over `T` and `V: Vector<T::Wide>`, is
/// compiled for each width of vectors and called at the widest that the processor has. Types after `V` are
/// further ones with the same wide type.
macro_rules! vectorised {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$T:ident, $V:ident>($($rest:tt)*) $($more:tt)*) => {
        vectorised! { $(#[$meta])* $vis fn $name<$T: Real, $V>($($rest)*) $($more)* }
    };
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$T:ident: $bound:ident, $V:ident $(, $X:ident)*>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name<$T: $crate::cpu::kernels::simd::$bound $(, $X: $crate::cpu::kernels::simd::Real<Wide = $T::Wide>)*>($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$T: $crate::cpu::kernels::simd::$bound, $V: $crate::cpu::kernels::simd::Vector<$T::Wide> $(, $X: $crate::cpu::kernels::simd::Real<Wide = $T::Wide>)*>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::cpu::kernels::simd::{Level, level};
                #[target_feature(enable = "avx512f,avx2,fma")]
                fn avx512<$T: $crate::cpu::kernels::simd::$bound $(, $X: $crate::cpu::kernels::simd::Real<Wide = $T::Wide>)*>($($arg: $ty),*) $(-> $ret)? {
                    body::<$T, <$T::Wide as $crate::cpu::kernels::simd::Float>::Avx512 $(, $X)*>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2<$T: $crate::cpu::kernels::simd::$bound $(, $X: $crate::cpu::kernels::simd::Real<Wide = $T::Wide>)*>($($arg: $ty),*) $(-> $ret)? {
                    body::<$T, <$T::Wide as $crate::cpu::kernels::simd::Float>::Avx2 $(, $X)*>($($arg),*)
                }
                match level() {
                    // SAFETY: `level` has asked this processor for these features.
                    Level::Avx512 | Level::Avx512Bf16 => return unsafe { avx512::<$T $(, $X)*>($($arg),*) },
                    // SAFETY: as above.
                    Level::Avx2 => return unsafe { avx2::<$T $(, $X)*>($($arg),*) },
                    Level::Portable => {}
                }
            }
            body::<$T, <$T::Wide as $crate::cpu::kernels::simd::Float>::Portable $(, $X)*>($($arg),*)
        }
    };
}
pub(crate) use vectorised;

/// Defines a function over `D: Dot`, compiled for each way to multiply pairs, and called as this processor can.
macro_rules! by_level {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$D:ident $(, $O:ident)?>($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name$(<$O: Real<Wide = f32>>)?($($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn body<$D: Dot $(, $O: Real<Wide = f32>)?>($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                use $crate::cpu::kernels::simd::{Float, Level, Native, level};
                #[target_feature(enable = "avx512f,avx512bf16,avx2,fma")]
                fn native$(<$O: Real<Wide = f32>>)?($($arg: $ty),*) $(-> $ret)? {
                    body::<Native $(, $O)?>($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx2,fma")]
                fn avx512$(<$O: Real<Wide = f32>>)?($($arg: $ty),*) $(-> $ret)? {
                    body::<$crate::cpu::kernels::simd::Widened<<f32 as Float>::Avx512> $(, $O)?>($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2$(<$O: Real<Wide = f32>>)?($($arg: $ty),*) $(-> $ret)? {
                    body::<$crate::cpu::kernels::simd::Widened<<f32 as Float>::Avx2> $(, $O)?>($($arg),*)
                }
                match level() {
                    // SAFETY: `level` has asked this processor for these features.
                    Level::Avx512Bf16 => return unsafe { native($($arg),*) },
                    // SAFETY: as above.
                    Level::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Level::Avx2 => return unsafe { avx2($($arg),*) },
                    Level::Portable => {}
                }
            }
            body::<$crate::cpu::kernels::simd::Widened<<f32 as $crate::cpu::kernels::simd::Float>::Portable> $(, $O)?>($($arg),*)
        }
    };
}
pub(crate) use by_level;

/// Calls `work(at, count)` for each strip of `LANES` elements of `0..n`; the last may have fewer.
#[inline(always)]
pub fn strips<T: Real, V: Vector<T::Wide>>(n: usize, mut work: impl FnMut(usize, usize)) {
    let mut at = 0;
    while at + V::LANES <= n {
        work(at, V::LANES);
        at += V::LANES;
    }
    if at < n {
        work(at, n - at);
    }
}

/// The strip of `count` elements at `at`, filled up with `fill`.
#[inline(always)]
pub fn get_or<T: Real, V: Vector<T::Wide>>(slice: &[T], at: usize, count: usize, fill: V) -> V {
    assert!(count <= V::LANES && at + count <= slice.len());
    // SAFETY: the range is inside the slice.
    unsafe {
        if count == V::LANES {
            T::load(slice.as_ptr().add(at))
        } else {
            T::load_part(slice.as_ptr().add(at), count, fill)
        }
    }
}

/// The strip of `count` elements at `at`, filled up with zeros.
#[inline(always)]
pub fn get<T: Real, V: Vector<T::Wide>>(slice: &[T], at: usize, count: usize) -> V {
    get_or(slice, at, count, V::splat(T::Wide::ZERO))
}

/// Writes the first `count` lanes at `at`.
#[inline(always)]
pub fn put<T: Real, V: Vector<T::Wide>>(slice: &mut [T], at: usize, count: usize, value: V) {
    assert!(count <= V::LANES && at + count <= slice.len());
    // SAFETY: the range is inside the slice.
    unsafe {
        if count == V::LANES {
            T::store(value, slice.as_mut_ptr().add(at))
        } else {
            T::store_part(value, slice.as_mut_ptr().add(at), count)
        }
    }
}

/// Asks for the cache line at `at`, which need not be a valid place.
#[inline(always)]
pub fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: part of the baseline; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

vectorised! {
    /// `to[columns, to_row]` = factor · the transpose of `from[rows, from_row]`; `rows <= to_row`.
    pub fn transpose<T: Float, V>(from: &[T], from_row: usize, rows: usize, columns: usize, factor: T, to: &mut [T], to_row: usize) {
        let scale = V::splat(factor.widen());
        turn::<T, V>(from, from_row, rows, columns, to, to_row, #[inline(always)] |block| block * scale, #[inline(always)] |x| x * factor);
    }
}

vectorised! {
    /// `transpose` of what only has the size of a `T`: no bit is changed.
    pub fn transpose_bits<T: Float, V>(from: &[T], from_row: usize, rows: usize, columns: usize, to: &mut [T], to_row: usize) {
        turn::<T, V>(from, from_row, rows, columns, to, to_row, #[inline(always)] |block| block, #[inline(always)] |x| x);
    }
}

#[inline(always)]
fn turn<T: Float, V: Vector<T::Wide>>(
    from: &[T],
    from_row: usize,
    rows: usize,
    columns: usize,
    to: &mut [T],
    to_row: usize,
    adjust: impl Fn(V) -> V,
    adjust_one: impl Fn(T) -> T,
) {
    if rows == 0 || columns == 0 {
        return;
    }
    assert!(from.len() >= (rows - 1) * from_row + columns && to.len() >= (columns - 1) * to_row + rows);
    let whole = (rows - rows % V::LANES, columns - columns % V::LANES);
    for i in (0..whole.0).step_by(V::LANES) {
        for j in (0..whole.1).step_by(V::LANES) {
            let mut block = [V::splat(T::Wide::ZERO); MOST_LANES];
            for r in 0..V::LANES {
                prefetch(from.as_ptr().wrapping_add((i + r + V::LANES) * from_row + j));
                // SAFETY: row i + r, columns j.. are inside `from`, as asserted.
                block[r] = adjust(unsafe { T::load(from.as_ptr().add((i + r) * from_row + j)) });
            }
            let mut bit = 1;
            while bit < V::LANES {
                for r in 0..V::LANES {
                    if r & bit == 0 {
                        (block[r], block[r | bit]) = block[r].swap_lanes(block[r | bit], bit);
                    }
                }
                bit *= 2;
            }
            for r in 0..V::LANES {
                // SAFETY: row j + r, columns i.. are inside `to`, as asserted.
                unsafe { T::store(block[r], to.as_mut_ptr().add((j + r) * to_row + i)) };
            }
        }
    }
    for i in 0..rows {
        let first = if i < whole.0 { whole.1 } else { 0 };
        for j in first..columns {
            to[j * to_row + i] = adjust_one(from[i * from_row + j]);
        }
    }
}

/// Above this, e^x is infinite in f32 (ln 2^128 = 88.72…; the scaling overflows by itself).
const EXP_MOST: f32 = 90.0;
/// Below this, e^x is zero in f32 (half the smallest subnormal is e^-103.97…).
const EXP_LEAST: f32 = -105.0;
/// ln 2 in two parts; the first has so few bits that its product with any exponent is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// 1/k! for k = 7 … 1. After the reduction |r| <= ln 2 / 2, where the next term of the series
/// is below 5e-9: less than a tenth of the rounding.
const EXP_TERMS: [f32; 6] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5];
/// Adding and subtracting 1.5 · 2^23 rounds to the nearest integer, ties to even.
const ROUNDER: f32 = 12_582_912.0;

/// One lane of the vectors' `exp`, for processors without wide vectors.
#[inline(always)]
fn exp_f32(x: f32) -> f32 {
    // Comparisons are false for NaN: it is kept.
    let x = if x > EXP_MOST { EXP_MOST } else { x };
    let x = if x < EXP_LEAST { EXP_LEAST } else { x };
    let n = (x * std::f32::consts::LOG2_E + ROUNDER) - ROUNDER;
    let r = x - n * LN2_HIGH - n * LN2_LOW;
    let mut p = EXP_TERMS[0];
    for term in &EXP_TERMS[1..] {
        p = p * r + term;
    }
    let p = p * r * r + r + 1.0;
    // Two factors: 2^n alone would overflow before e^x does, or lose the subnormals.
    let n = n as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    p * power(half) * power(n - half)
}

macro_rules! real {
    ($T:ident, $dtype:ident, $lanes:literal, $avx2:ty, $avx512:ty, $exp:expr) => {
        impl Real for $T {
            type Wide = Self;
            const DTYPE: DType = DType::$dtype;
            const IS_WIDE: bool = true;
            const ZERO: Self = 0.0;
            #[inline(always)]
            fn of(x: f64) -> Self {
                x as $T
            }
            #[inline(always)]
            fn wide(self) -> f64 {
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
                product::float(pool, p, out, scratch);
            }
            fn lay_out(from: &[Self], row: usize, count: usize, head: usize, scale: Self, to: &mut [Self]) {
                attention::lay_out(from, row, count, head, scale, to);
            }
            fn rest_of_scale(_: Self) -> Self {
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
    fn of(x: f64) -> Self {
        bf16::from_f32(super::cast::to_odd(x))
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        f64::from(self.widen())
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        // `to_f32` makes a NaN quiet, which takes a comparison for each number.
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
    fn lay_out(from: &[Self], row: usize, count: usize, head: usize, _: f32, to: &mut [f32]) {
        pairs::lay_out(from, row, count, head, to);
    }
    fn rest_of_scale(scale: f32) -> f32 {
        scale
    }
    fn score(m: usize, n: usize, k: usize, a: *const Self, row: usize, right: *const f32, to: Target<f32>) {
        pairs::score(m, n, k, a, row, right, to);
    }
}

/// Vectors for any processor.
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
    const PANEL: usize = 2;
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
        // Not the fused one: without the instruction it is a call of a hundred times the cost.
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
    fn where_le(self, other: Self, yes: Self, no: Self) -> Self {
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
    fn largest(self) -> T {
        let mut out = self.0[0];
        for lane in 1..N {
            out = if out > self.0[lane] { out } else { self.0[lane] };
        }
        out
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! AVX2 and AVX-512. `SAFETY` throughout: see `Vector`: values of these types exist only where
    //! the dispatcher has found the processor able; pointers are as good as the caller promised.

    use super::super::coarse::Encoder;
    use super::{CoarseVector, Dot, EXP_LEAST, EXP_MOST, EXP_TERMS, LN2_HIGH, LN2_LOW, PairVector, Vector};
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
         |$a:ident, $b:ident, $yes:ident, $no:ident| $where_le:expr,
         |$low:ident, $high:ident, $bit:ident| $swap:expr,
         |$s:ident| $sum:expr, |$l:ident| $largest:expr, |$x:ident| $exp:expr
         $(, |$half:ident| $widen:expr, |$half_to:ident, $narrowed:ident| $narrow:expr)?) => {
            /// Numbers in one register.
            #[derive(Clone, Copy)]
            pub struct $name($raw);
            operator!($name, Add, add, $add);
            operator!($name, Sub, sub, $sub);
            operator!($name, Mul, mul, $mul);
            operator!($name, Div, div, $div);
            impl Vector<$T> for $name {
                const LANES: usize = $lanes;
                const PANEL: usize = $panel;
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
                fn where_le(self, other: Self, yes: Self, no: Self) -> Self {
                    let ($a, $b, $yes, $no) = (self.0, other.0, yes.0, no.0);
                    // SAFETY: the dispatcher.
                    $name(unsafe { $where_le })
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
                fn largest(self) -> $T {
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
        |from, count, fill| _mm512_mask_loadu_ps(fill, first16(count), from),
        |to, count, value| _mm512_mask_storeu_ps(to, first16(count), value),
        |a, b, yes, no| _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b), no, yes),
        |a, b, bit| {
            let (first, second) = swap_indices::<16>(bit);
            let first = _mm512_loadu_si512(first.as_ptr().cast());
            let second = _mm512_loadu_si512(second.as_ptr().cast());
            (_mm512_permutex2var_ps(a, first, b), _mm512_permutex2var_ps(a, second, b))
        },
        |x| _mm512_reduce_add_ps(x),
        |x| _mm512_reduce_max_ps(x),
        |x| exp512(x),
        |from| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())))),
        |to, value| _mm256_storeu_si256(to.cast(), narrow512(value))
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
        |from, count, fill| _mm512_mask_loadu_pd(fill, first16(count) as u8, from),
        |to, count, value| _mm512_mask_storeu_pd(to, first16(count) as u8, value),
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
            let mask = first8(count);
            _mm256_blendv_ps(fill, _mm256_maskload_ps(from, mask), _mm256_castsi256_ps(mask))
        },
        |to, count, value| _mm256_maskstore_ps(to, first8(count), value),
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
        |x| exp256(x),
        |from| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())))),
        |to, value| _mm_storeu_si128(to.cast(), narrow256(value))
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
            let mask = first4(count);
            _mm256_blendv_pd(fill, _mm256_maskload_pd(from, mask), _mm256_castsi256_pd(mask))
        },
        |to, count, value| _mm256_maskstore_pd(to, first4(count), value),
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
            F32x16(unsafe {
                _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(self.0), _mm512_set1_epi32(mask)))
            })
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
            F32x8(unsafe {
                _mm256_castsi256_ps(_mm256_and_si256(_mm256_castps_si256(self.0), _mm256_set1_epi32(mask)))
            })
        }
    }

    impl CoarseVector for F32x8 {}

    impl CoarseVector for F32x16 {
        #[inline(always)]
        unsafe fn of_int8(codes: *const u8) -> Self {
            // SAFETY: the dispatcher; the caller's promise.
            F32x16(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes.cast()))) })
        }
        #[inline(always)]
        unsafe fn of_nf4(codes: *const u8) -> Self {
            // SAFETY: the dispatcher; the caller's promise; the table has 16 entries.
            F32x16(unsafe {
                // Each byte in 64 bits: its upper half to the lower 32 of them, its lower half to the upper ones.
                let bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(codes.cast()));
                let apart = _mm512_or_si512(_mm512_srli_epi64::<4>(bytes), _mm512_slli_epi64::<32>(bytes));
                let index = _mm512_and_si512(apart, _mm512_set1_epi32(15));
                _mm512_permutexvar_ps(index, _mm512_loadu_ps(formats::NF4.as_ptr()))
            })
        }
        #[inline(always)]
        unsafe fn of_map(map: &[f32; 256], codes: *const u8) -> Self {
            // SAFETY: the dispatcher; the caller's promise; a byte is inside the table.
            F32x16(unsafe {
                let index = _mm512_cvtepu8_epi32(_mm_loadu_si128(codes.cast()));
                _mm512_i32gather_ps::<4>(index, map.as_ptr())
            })
        }
        #[inline(always)]
        unsafe fn to_codes(self, encoder: &Encoder, to: *mut u8) {
            assert!(encoder.least().len() == 2 * Encoder::ENTRIES);
            // SAFETY: the dispatcher; the caller's promise; entries are clamped to the table, whose own ones are codes.
            unsafe {
                let bits = _mm512_castps_si512(self.0);
                let magnitude =
                    _mm512_srli_epi32::<{ Encoder::SHIFT }>(_mm512_and_si512(bits, _mm512_set1_epi32(0x7fff_ffff)));
                let entry = _mm512_max_epu32(magnitude, _mm512_set1_epi32(Encoder::LEAST as i32));
                let entry = _mm512_min_epu32(entry, _mm512_set1_epi32(Encoder::MOST as i32));
                let entry = _mm512_sub_epi32(entry, _mm512_set1_epi32(Encoder::LEAST as i32));
                let negative = _mm512_cmplt_epi32_mask(bits, _mm512_setzero_si512());
                let entry = _mm512_mask_add_epi32(entry, negative, entry, _mm512_set1_epi32(Encoder::ENTRIES as i32));
                let least = _mm512_i32gather_epi32::<4>(entry, encoder.least().as_ptr());
                let next = _mm512_i32gather_ps::<4>(least, encoder.thresholds().as_ptr());
                let above = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(next, self.0);
                let code = _mm512_mask_add_epi32(least, above, least, _mm512_set1_epi32(1));
                let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(self.0, self.0);
                _mm_storeu_si128(to.cast(), _mm512_cvtepi32_epi8(_mm512_maskz_mov_epi32(number, code)));
            }
        }
    }

    /// Pairs multiplied by AVX-512 BF16.
    pub struct Native;

    impl Dot for Native {
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

    /// Which of the lanes of a pair (the second's counted from N) go where in `swap_lanes`.
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

    /// The mask of the first `count` of up to 16 lanes.
    #[inline(always)]
    fn first16(count: usize) -> u16 {
        ((1u32 << count) - 1) as u16
    }

    #[inline(always)]
    unsafe fn first8(count: usize) -> __m256i {
        // SAFETY: the dispatcher.
        unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(count as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
    }

    #[inline(always)]
    unsafe fn first4(count: usize) -> __m256i {
        // SAFETY: the dispatcher.
        unsafe { _mm256_cmpgt_epi64(_mm256_set1_epi64x(count as i64), _mm256_setr_epi64x(0, 1, 2, 3)) }
    }

    /// bf16 of 16 lanes as `bf16::from_f32` has them. By integers: the processor's own instruction makes zeros of
    /// subnormals, and not every processor has it.
    #[inline(always)]
    unsafe fn narrow512(x: __m512) -> __m256i {
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

    /// `narrow512` of 8 lanes.
    #[inline(always)]
    unsafe fn narrow256(x: __m256) -> __m128i {
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

    /// `exp_f32` on 16 lanes; the last scaling is one instruction that knows subnormals.
    #[inline(always)]
    unsafe fn exp512(x: __m512) -> __m512 {
        // SAFETY: the dispatcher.
        unsafe {
            // min and max return their second operand when one is NaN: it is kept.
            let x = _mm512_min_ps(_mm512_set1_ps(EXP_MOST), x);
            let x = _mm512_max_ps(_mm512_set1_ps(EXP_LEAST), x);
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

    /// `exp_f32` on 8 lanes.
    #[inline(always)]
    unsafe fn exp256(x: __m256) -> __m256 {
        // SAFETY: the dispatcher.
        unsafe {
            // min and max return their second operand when one is NaN: it is kept.
            let x = _mm256_min_ps(_mm256_set1_ps(EXP_MOST), x);
            let x = _mm256_max_ps(_mm256_set1_ps(EXP_LEAST), x);
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
}

#[cfg(test)]
mod tests {
    use super::*;

    vectorised! {
        fn exp_all<T: Float, V>(x: &mut [T]) {
            strips::<T, V>(x.len(), #[inline(always)] |at, count| {
                let value: V = get(x, at, count);
                put(x, at, count, value.exp());
            });
        }
    }

    #[test]
    fn exp_is_within_two_units_over_the_whole_range() {
        let mut x: Vec<f32> = (-1_040_000..=887_000).map(|i| i as f32 * 1e-4).collect();
        let exact: Vec<f64> = x.iter().map(|&x| f64::from(x).exp()).collect();
        exp_all(&mut x);
        for (got, want) in x.iter().zip(exact) {
            // A unit in the last place of the nearest f32, or of the subnormals.
            let unit = (want * f64::from(f32::EPSILON)).max(f64::from(f32::from_bits(1)));
            assert!((f64::from(*got) - want).abs() <= 2.0 * unit, "{got} for {want}");
        }
    }

    #[test]
    fn exp_of_the_extremes() {
        let mut x = [f32::NEG_INFINITY, -1e30, -200.0, 0.0, 88.8, 1e30, f32::INFINITY, f32::NAN, -0.0, 89.9, 90.1];
        exp_all(&mut x);
        let inf = f32::INFINITY;
        assert_eq!(x[..7], [0.0, 0.0, 0.0, 1.0, inf, inf, inf]);
        assert!(x[7].is_nan());
        assert_eq!(x[8..], [1.0, inf, inf]);
        let mut x = [f64::NEG_INFINITY, 1.0, f64::NAN, 710.0, -5.0];
        exp_all(&mut x);
        assert_eq!(x[..2], [0.0, 1f64.exp()]);
        assert!(x[2].is_nan() && x[3].is_infinite() && x[4] == (-5f64).exp());
    }

    #[test]
    fn transposes_of_any_shape_are_right() {
        fn check<T: Float>() {
            for (rows, columns) in [(1, 1), (16, 16), (5, 40), (40, 5), (67, 33), (64, 64)] {
                let (from_row, to_row) = (columns + 3, rows + 2);
                let from: Vec<T> = (0..rows * from_row).map(|i| T::of(i as f64)).collect();
                let mut to = vec![T::of(-1.0); columns * to_row];
                transpose(&from, from_row, rows, columns, T::of(0.5), &mut to, to_row);
                for (at, value) in to.iter().enumerate() {
                    let (j, i) = (at / to_row, at % to_row);
                    let want = if i < rows { T::of((i * from_row + j) as f64 * 0.5) } else { T::of(-1.0) };
                    assert_eq!(*value, want, "{i}, {j} of {rows} x {columns}");
                }
            }
        }
        check::<f32>();
        check::<f64>();
    }

    vectorised! {
        fn ends<T: Float, V>(x: &[T], out: &mut [T]) -> (T, T) {
            let mut sum = V::splat(T::ZERO);
            let mut largest = V::splat(T::MINUS_INFINITY);
            strips::<T, V>(x.len(), #[inline(always)] |at, count| {
                let value: V = get(x, at, count);
                sum = sum + value;
                largest = largest.max(get_or(x, at, count, V::splat(T::MINUS_INFINITY)));
                put(out, at, count, value.where_le(V::splat(T::ZERO), V::splat(T::ONE), value.sqrt()));
            });
            (sum.sum(), largest.largest())
        }
    }

    #[test]
    fn parts_of_vectors_touch_nothing_else() {
        for n in 0..40 {
            let x: Vec<f32> = (0..n).map(|i| i as f32 - 5.0).collect();
            let mut out = vec![-7.0f32; n + 20];
            let (sum, largest) = ends(&x, &mut out[..n]);
            assert_eq!(sum, x.iter().sum::<f32>());
            assert_eq!(largest, x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            for i in 0..n {
                assert_eq!(out[i], if x[i] <= 0.0 { 1.0 } else { x[i].sqrt() });
            }
            assert!(out[n..].iter().all(|&kept| kept == -7.0));
        }
    }

    vectorised! {
        fn through<T, V>(x: &[T::Wide], out: &mut [T], back: &mut [T::Wide]) {
            strips::<T, V>(x.len(), #[inline(always)] |at, count| {
                put(out, at, count, get::<T::Wide, V>(x, at, count));
                put(back, at, count, get::<T, V>(out, at, count));
            });
        }
    }

    #[test]
    fn vectors_round_to_bf16_as_single_numbers_do() {
        // Every upper half, with lower halves below, at and above the tie; parts of vectors at the end.
        let bits = (0..=u16::MAX)
            .flat_map(|high| [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff].map(|low| u32::from(high) << 16 | low));
        let x: Vec<f32> = bits.chain([0; 5]).map(f32::from_bits).collect();
        let (mut out, mut back) = (vec![bf16::ONE; x.len()], vec![1.0; x.len()]);
        through(&x, &mut out, &mut back);
        for (i, x) in x.iter().enumerate() {
            assert_eq!(out[i].to_bits(), bf16::from_f32(*x).to_bits(), "{x} ({:x})", x.to_bits());
            assert_eq!(back[i].to_bits(), u32::from(out[i].to_bits()) << 16);
        }
    }
}
